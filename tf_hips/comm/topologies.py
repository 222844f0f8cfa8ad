# SPDX-License-Identifier: Apache-2.0
"""How the packets of one bucket become the packets of its sum, the same ones on all ranks.

    ps         every rank sends each packet to the owner of its chunk (alltoall); the owner merges
               the packets of all ranks in rank order and encodes the sum
    ring, butterfly, blocks
               hop by hop (see `schedules`) a rank decodes the partial sum that it gets, adds its
               own gradient and encodes the result; the owner does so last
    allgather  every rank sends all of its packets to everyone; nothing is encoded a second time
    hierarchical, hierarchical_fp16
               sums of float32 or float16 inside a node, `ps` between the nodes (see `hierarchy`)

Packets of sums are handed on unchanged, by one allgather (hierarchical: between nodes and inside of
them). What is handed on also says, where that is asked for, which gradient of which rank was not
finite: a codec would hide it from the others.

    bytes that a rank sends per packet of b bytes             collectives    encodings of an element
    ps            2 b (N - 1) / N                             2              2
    ring          2 b (N - 1) / N                             N              N, one on each rank
    butterfly     2 b (N - 1) / N                             1 + log2 N     N, one on each rank
    allgather     b (N - 1)                                   1              1
    hierarchical  2 b (H - 1) / H per node to other nodes     5              2, H nodes

Follows CaSync of HiPress (Bai et al., Gradient Compression Supercharged High-Performance Data
Parallel DNN Training, SOSP 2021, section 3), whose ring was never released.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.partition import NOTE_BYTES, Piece
from tf_hips.comm.schedules import Schedule
from tf_hips.ops import graph
from tf_hips.ops.compressor import CHUNK, Compressor
from tf_hips.ops.flow import first_nonfinite, opaque, yielded

# Groups of at least this many elements are encoded two at a time, and other work may go before
# each: whatever becomes ready meanwhile, a collective to begin or packets to merge, waits for one.
_TURN_ELEMENTS = CHUNK
_TURNS_AT_ONCE = 2

_LAST_TENSOR = 2**31 - 1


class Codec(Protocol):
    """What encodes pieces, and keeps what belongs to that."""

    compressor: Compressor
    """Encodes gradients, and partial sums in hops."""

    def encode(self, piece: Piece, value: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The packet of this rank's gradient, or of a partial sum with it; once per step."""

    def recode(self, piece: Piece, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The packet of the sum of what the rows decode to, encoded with `for_sums`."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What travels together.

    Attributes:
        label: names of its collectives begin so.
        pieces: in the order in which they travel.
        segments: the segment of each piece.
    """

    label: str
    pieces: tuple[Piece, ...]
    segments: tuple[int, ...]

    def of(self, segment: int) -> list[int]:
        """Places of the pieces of one segment."""
        return [place for place, found in enumerate(self.segments) if found == segment]

    def length(self, places: Sequence[int], compressor: Compressor) -> int:
        """Bytes of the packets of the pieces at `places`."""
        return sum(self.lengths(places, compressor))

    def lengths(self, places: Sequence[int], compressor: Compressor) -> list[int]:
        """Bytes of the packet of each piece at `places`."""
        return [compressor.chunk_packet_bytes(self.pieces[place].num_elements) for place in places]


@dataclasses.dataclass(frozen=True)
class Travelled:
    """What came of a bucket.

    Attributes:
        packets: of the sum, for each piece: uint8 [bytes]; where a topology gathers, those of all
            ranks, uint8 [ranks, bytes], whose merged values are the sum.
        notes: int64 [ranks], 0 or what `culprit` reads; empty where nothing was noted.
        sent: what is there when the bucket has been encoded, or has begun to travel.
    """

    packets: list[tf.Tensor]
    notes: tf.Tensor
    sent: tf.Tensor


class Topology(Protocol):
    """How the packets of a bucket travel.

    Attributes:
        num_segments: into how many segments the pieces are spread.
        gathers: whether everyone gets everyone's packets, which are not encoded a second time.
        encodes_sums: whether partial sums are encoded by what encodes gradients.
    """

    num_segments: int
    gathers: bool
    encodes_sums: bool

    def encoded(self, rank: int) -> Sequence[int]:
        """Segments whose pieces `rank` encodes: all, if nothing else is said."""
        del rank
        return range(self.num_segments)

    def recoded(self, rank: int) -> Sequence[int]:
        """Segments whose sums `rank` encodes with `for_sums`: none, if nothing else is said."""
        del rank
        return ()

    def __call__(
        self,
        bucket: Bucket,
        values: Sequence[tf.Tensor],
        codec: Codec,
        step: tf.Tensor,
        note: tf.Tensor | None,
    ) -> Travelled:
        """Sums one bucket over the ranks.

        Args:
            bucket: what travels.
            values: this rank's gradient of each piece, float32 [elements].
            codec: encodes.
            step: int64 scalar, the same on all ranks.
            note: what everyone is to know, int64 scalar; None: there are no notes.
        """


class Owners(Topology):
    """`ps`."""

    gathers = False
    encodes_sums = False

    def __init__(self, num_ranks: int) -> None:
        """Every rank owns a segment."""
        self.num_segments = num_ranks

    def recoded(self, rank: int) -> Sequence[int]:
        """Its own."""
        return (rank,)

    def __call__(
        self,
        bucket: Bucket,
        values: Sequence[tf.Tensor],
        codec: Codec,
        step: tf.Tensor,
        note: tf.Tensor | None,
    ) -> Travelled:
        """Sums one bucket over the ranks; see `Topology`."""
        rank, count = primitives.rank(), self.num_segments
        targets = [bucket.of(owner) for owner in range(count)]
        # In the order in which an exchange of several rounds sends them; its own it does not send.
        order = [place for after in range(count) for place in targets[(rank + 1 + after) % count]]
        packets = encode_in_turns(bucket, order, values, codec, step)
        parts = [joined([packets[place] for place in places]) for places in targets]
        lengths = [bucket.length(places, codec.compressor) for places in targets]
        received = primitives.exchange(parts, lengths, f"{bucket.label}.packets")
        merged = merge(bucket, targets[rank], received, self.num_segments, codec, step)
        sums = codec.compressor.for_sums
        merged_packets, notes = forwarded(bucket, range(count), merged, sums, note)
        return Travelled(merged_packets, notes, packets[order[-1]])


class Hops(Topology):
    """`ring`, `butterfly` and `blocks`."""

    gathers = False
    encodes_sums = True

    def __init__(self, schedule: Schedule) -> None:
        """Follows a schedule."""
        self._schedule = schedule
        self.num_segments = len(schedule.owners)

    def __call__(
        self,
        bucket: Bucket,
        values: Sequence[tf.Tensor],
        codec: Codec,
        step: tf.Tensor,
        note: tf.Tensor | None,
    ) -> Travelled:
        """Sums one bucket over the ranks; see `Topology`."""
        rank = primitives.rank()
        sums = list(values)
        first = None
        for number, hop in enumerate(self._schedule.hops):
            sends = {one.target: _places(bucket, one.segments) for one in hop if one.source == rank}
            comes = {one.source: _places(bucket, one.segments) for one in hop if one.target == rank}
            order = [place for target in sorted(sends) for place in sends[target]]
            if first is None:
                encoded = encode_in_turns(bucket, order, sums, codec, step)
            else:  # what came decides when
                encoded = {
                    place: codec.encode(bucket.pieces[place], sums[place], step) for place in order
                }
            lengths = [
                bucket.length(sends.get(target, ()), codec.compressor)
                for target in range(primitives.size())
            ]
            sent = joined([encoded[place] for place in order])
            if first is None and order:
                first = sent
            received = primitives.alltoall(sent, lengths, f"{bucket.label}.hop_{number}")
            arrived = [place for source in sorted(comes) for place in comes[source]]
            parts = split(received, bucket.lengths(arrived, codec.compressor))
            added = [
                graph.decode(codec.compressor, packet, bucket.pieces[place].num_elements)
                + sums[place]
                for place, packet in zip(arrived, parts, strict=True)
            ]
            # Grappler would add what came in several hops in an order of its own.
            for place, value in zip(arrived, opaque(added), strict=True):
                sums[place] = value
        owners = self._schedule.owners
        owned = [place for place, one in enumerate(bucket.segments) if owners[one] == rank]
        merged = {place: codec.encode(bucket.pieces[place], sums[place], step) for place in owned}
        packets, notes = forwarded(bucket, owners, merged, codec.compressor, note)
        return Travelled(packets, notes, packets[0] if first is None else first)


class Gather(Topology):
    """`allgather`."""

    gathers = True
    encodes_sums = False
    num_segments = 1

    def __call__(
        self,
        bucket: Bucket,
        values: Sequence[tf.Tensor],
        codec: Codec,
        step: tf.Tensor,
        note: tf.Tensor | None,
    ) -> Travelled:
        """Sums one bucket over the ranks; see `Topology`."""
        places = range(len(bucket.pieces))
        packets = list(encode_in_turns(bucket, places, values, codec, step).values())
        lengths = bucket.lengths(range(len(packets)), codec.compressor)
        if note is not None:
            packets = [*packets, note_bytes(note)]
            lengths.append(NOTE_BYTES)
        sent = joined(packets)
        everything = primitives.allgather(sent, f"{bucket.label}.gathered")
        parts = split(tf.reshape(everything, [primitives.size(), sum(lengths)]), lengths)
        if note is None:
            return Travelled(parts, tf.zeros([0], tf.int64), sent)
        return Travelled(parts[:-1], tf.bitcast(parts[-1], tf.int64), sent)


def encode_in_turns(
    bucket: Bucket,
    places: Sequence[int],
    values: Sequence[tf.Tensor],
    codec: Codec,
    step: tf.Tensor,
) -> dict[int, tf.Tensor]:
    """Packets of this rank's gradients by place, encoded in this order; other work may go between.

    TensorFlow would run all that it can encode before whatever becomes ready later, so that the
    link would wait for the last packet of all and merging for the next bucket.
    """
    packets: dict[int, tf.Tensor] = {}
    gates: list[tf.Tensor] = []
    group: list[tf.Tensor] = []
    filled = 0
    for place in places:
        if filled >= _TURN_ELEMENTS:
            with tf.control_dependencies(group[:-1]):
                gates.append(yielded(group[-1]))
            group, filled = [], 0
        is_late = len(gates) >= _TURNS_AT_ONCE
        with tf.control_dependencies(gates[-_TURNS_AT_ONCE:][:1] if is_late else []):
            value = tf.identity(values[place])
        packets[place] = codec.encode(bucket.pieces[place], value, step)
        group.append(packets[place])
        filled += bucket.pieces[place].num_elements
    return packets


def note_of(bucket: Bucket, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """0, or the bucket's first gradient that is not finite; the first tensor is the largest."""
    # Pieces travel the last tensor first.
    codes = [
        (_LAST_TENSOR - piece.tensor) << 32 | primitives.rank() for piece in reversed(bucket.pieces)
    ]
    return tf.gather(tf.constant([*codes, 0], tf.int64), first_nonfinite(values[::-1]))


def culprit(note: int) -> tuple[int, int]:
    """Position of the gradient, and the rank, that the largest of `Travelled.notes` is about."""
    return _LAST_TENSOR - (note >> 32), note & 0xFFFFFFFF


def note_bytes(note: tf.Tensor) -> tf.Tensor:
    """uint8 [NOTE_BYTES]."""
    return tf.reshape(tf.bitcast(tf.reshape(note, [1]), tf.uint8), [NOTE_BYTES])


def joined(packets: Sequence[tf.Tensor]) -> tf.Tensor:
    """All packets in one tensor, uint8."""
    return tf.concat(packets, 0) if packets else tf.zeros([0], tf.uint8)


def split(packets: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """Cuts the last axis, whose length only `lengths` tell."""
    if not lengths:
        return []
    packets = tf.ensure_shape(packets, [*packets.shape[:-1], sum(lengths)])
    return list(tf.split(packets, list(lengths), axis=-1))


def merge(
    bucket: Bucket,
    places: Sequence[int],
    received: tf.Tensor,
    num_senders: int,
    codec: Codec,
    step: tf.Tensor,
) -> dict[int, tf.Tensor]:
    """Packets of the sums of the pieces at `places`, which came from each sender in this order."""
    if not places:
        return {}
    lengths = bucket.lengths(places, codec.compressor)
    rows = tf.reshape(received, [num_senders, sum(lengths)])
    return {
        place: codec.recode(bucket.pieces[place], part, step)
        for place, part in zip(places, split(rows, lengths), strict=True)
    }


def forwarded(
    bucket: Bucket,
    owners: Sequence[int],
    merged: dict[int, tf.Tensor],
    sums: Compressor,
    note: tf.Tensor | None,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Everyone's merged packets, by place, and notes, on all ranks."""
    own = None if note is None else note_bytes(note)
    lengths = [NOTE_BYTES] * primitives.size()
    packets, notes = handed_on(bucket, owners, merged, sums, own, lengths)
    return packets, tf.bitcast(tf.stack(notes), tf.int64) if notes else tf.zeros([0], tf.int64)


def handed_on(
    bucket: Bucket,
    owners: Sequence[int],
    merged: dict[int, tf.Tensor],
    sums: Compressor,
    note: tf.Tensor | None,
    note_lengths: Sequence[int],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Everyone's merged packets, by place, and what each rank says with them, on all ranks.

    Args:
        bucket: what travels.
        owners: the rank that owns each segment.
        merged: packets of this rank, by place.
        sums: what they were encoded with.
        note: what this rank says, uint8; None: nobody says anything.
        note_lengths: bytes of each rank's note.
    """
    lengths: list[int] = []
    places: list[int | None] = []
    for rank in range(primitives.size()):
        owned = [place for place, one in enumerate(bucket.segments) if owners[one] == rank]
        lengths += bucket.lengths(owned, sums)
        places += owned
        if note is not None:
            lengths.append(note_lengths[rank])
            places.append(None)
    own = [merged[place] for place in sorted(merged)]
    if note is not None:
        own.append(note)
    everything = primitives.allgather(joined(own), f"{bucket.label}.merged")
    parts = split(everything, lengths)
    found = {place: part for place, part in zip(places, parts, strict=True) if place is not None}
    notes = [part for place, part in zip(places, parts, strict=True) if place is None]
    return [found[place] for place in range(len(bucket.pieces))], notes


def _places(bucket: Bucket, segments: Sequence[int]) -> list[int]:
    return [place for segment in segments for place in bucket.of(segment)]
