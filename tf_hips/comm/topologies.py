# SPDX-License-Identifier: Apache-2.0
"""How the packets of one bucket become the packets of its sum, the same ones on all ranks.

    ps         every rank sends each packet to the owner of its chunk (alltoall); the owner merges
               the packets of all ranks in rank order and encodes the sum
    ring, butterfly, blocks
               hop by hop (see `schedules`) a rank decodes the partial sum that it gets, adds its
               own gradient and encodes the result; the owner does so last
    allgather  every rank sends all of its packets to everyone; nothing is encoded a second time

All end with one allgather, which hands packets on unchanged. It also carries, where that is asked
for, which gradient of which rank was not finite: a codec would hide it from the others.

    bytes per rank and element's packet (N ranks, b bytes)    collectives    encodings of an element
    ps            2 b (N - 1) / N                             2              2
    ring          2 b (N - 1) / N                             N              N, one on each rank
    butterfly     2 b (N - 1) / N                             1 + log2 N     N, one on each rank
    allgather     b (N - 1)                                   1              1

Follows CaSync of HiPress (Bai et al., Gradient Compression Supercharged High-Performance Data
Parallel DNN Training, SOSP 2021, section 3), whose ring was never released.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import tensorflow as tf

from tf_hips.comm import primitives, schedules
from tf_hips.comm.partition import Piece
from tf_hips.comm.schedules import Schedule
from tf_hips.ops import graph
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.flow import first_nonfinite, opaque

PS = "ps"
ALLGATHER = "allgather"
SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "ring": schedules.ring,
    "butterfly": schedules.butterfly,
    "blocks": schedules.blocks,
}
COMPRESSED = (PS, *SCHEDULES, ALLGATHER)

# Bytes of a note about what is not finite.
_NOTE_BYTES = 8
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


@dataclasses.dataclass(frozen=True)
class Travelled:
    """What came of a bucket.

    Attributes:
        packets: of the sum, for each piece: uint8 [bytes]; with `allgather` those of all ranks,
            uint8 [ranks, bytes], whose merged values are the sum.
        notes: int64 [ranks], 0 or what `culprit` reads; empty where nothing was noted.
    """

    packets: list[tf.Tensor]
    notes: tf.Tensor


def num_segments(topology: str, num_ranks: int) -> int:
    """How many segments a bucket is cut into.

    Raises:
        ValueError: there is no such topology, or it does not take so many ranks.
    """
    if topology not in COMPRESSED:
        raise ValueError(
            f"`topology` must be one of {', '.join(COMPRESSED)}. Received: topology={topology!r}"
        )
    if topology in SCHEDULES:
        return len(SCHEDULES[topology](num_ranks).owners)
    return num_ranks


def travel(
    topology: str,
    bucket: Bucket,
    values: Sequence[tf.Tensor],
    codec: Codec,
    step: tf.Tensor,
    *,
    notes: bool,
) -> Travelled:
    """Sums one bucket over the ranks.

    Args:
        topology: one of `COMPRESSED`.
        bucket: what travels.
        values: this rank's gradient of each piece, float32 [elements].
        codec: encodes.
        step: int64 scalar, the same on all ranks.
        notes: whether to tell everyone of gradients that are not finite.
    """
    note = _note(bucket, values) if notes else None
    if topology == ALLGATHER:
        packets = [
            codec.encode(piece, value, step)
            for piece, value in zip(bucket.pieces, values, strict=True)
        ]
        return _gathered(bucket, packets, codec.compressor, note)
    if topology == PS:
        owners = tuple(range(primitives.size()))
        sums = codec.compressor.for_sums
        merged = _merged(bucket, values, codec, step)
    else:
        schedule = SCHEDULES[topology](primitives.size())
        owners, sums = schedule.owners, codec.compressor
        merged = _hopped(bucket, values, codec, step, schedule)
    return _forwarded(bucket, owners, merged, sums, note)


def culprit(note: int) -> tuple[int, int]:
    """Position of the gradient, and the rank, that the largest of `Travelled.notes` is about."""
    return _LAST_TENSOR - (note >> 32), note & 0xFFFFFFFF


def _note(bucket: Bucket, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """0, or the bucket's first gradient that is not finite; the first tensor is the largest."""
    # Pieces travel the last tensor first.
    codes = [
        (_LAST_TENSOR - piece.tensor) << 32 | primitives.rank() for piece in reversed(bucket.pieces)
    ]
    return tf.gather(tf.constant([*codes, 0], tf.int64), first_nonfinite(values[::-1]))


def _merged(
    bucket: Bucket, values: Sequence[tf.Tensor], codec: Codec, step: tf.Tensor
) -> dict[int, tf.Tensor]:
    """Packets of the sums of the pieces that this rank owns, by place."""
    num_ranks = primitives.size()
    compressor = codec.compressor
    order = [place for owner in range(num_ranks) for place in bucket.of(owner)]
    packets = [codec.encode(bucket.pieces[place], values[place], step) for place in order]
    lengths = [
        sum(_bytes(compressor, bucket.pieces[place]) for place in bucket.of(owner))
        for owner in range(num_ranks)
    ]
    received = primitives.alltoall(tf.concat(packets, 0), lengths, f"{bucket.label}.packets")
    owned = bucket.of(primitives.rank())
    if not owned:
        return {}
    rows = tf.reshape(received, [num_ranks, lengths[primitives.rank()]])
    parts = _split(rows, [_bytes(compressor, bucket.pieces[place]) for place in owned])
    return {
        place: codec.recode(bucket.pieces[place], part, step)
        for place, part in zip(owned, parts, strict=True)
    }


def _hopped(
    bucket: Bucket,
    values: Sequence[tf.Tensor],
    codec: Codec,
    step: tf.Tensor,
    schedule: Schedule,
) -> dict[int, tf.Tensor]:
    """The same, after the hops of `schedule`."""
    rank = primitives.rank()
    sums = list(values)
    for number, hop in enumerate(schedule.hops):
        sends = {one.target: _places(bucket, one.segments) for one in hop if one.source == rank}
        comes = {one.source: _places(bucket, one.segments) for one in hop if one.target == rank}
        packets = [
            codec.encode(bucket.pieces[place], sums[place], step)
            for target in sorted(sends)
            for place in sends[target]
        ]
        lengths = [
            sum(_bytes(codec.compressor, bucket.pieces[place]) for place in sends.get(target, ()))
            for target in range(primitives.size())
        ]
        joined = tf.concat(packets, 0) if packets else tf.zeros([0], tf.uint8)
        received = primitives.alltoall(joined, lengths, f"{bucket.label}.hop_{number}")
        arrived = [place for source in sorted(comes) for place in comes[source]]
        parts = _split(
            received, [_bytes(codec.compressor, bucket.pieces[place]) for place in arrived]
        )
        added = [
            graph.decode(codec.compressor, packet, bucket.pieces[place].num_elements) + sums[place]
            for place, packet in zip(arrived, parts, strict=True)
        ]
        # Grappler would add what came in several hops in an order of its own.
        for place, value in zip(arrived, opaque(added), strict=True):
            sums[place] = value
    owned = [
        place for place, segment in enumerate(bucket.segments) if schedule.owners[segment] == rank
    ]
    return {place: codec.encode(bucket.pieces[place], sums[place], step) for place in owned}


def _forwarded(
    bucket: Bucket,
    owners: Sequence[int],
    merged: dict[int, tf.Tensor],
    sums: Compressor,
    note: tf.Tensor | None,
) -> Travelled:
    """Everyone's merged packets, on all ranks."""
    lengths: list[int] = []
    places: list[int | None] = []
    for rank in range(primitives.size()):
        for place, segment in enumerate(bucket.segments):
            if owners[segment] == rank:
                lengths.append(_bytes(sums, bucket.pieces[place]))
                places.append(place)
        if note is not None:
            lengths.append(_NOTE_BYTES)
            places.append(None)
    own = [merged[place] for place in sorted(merged)]
    if note is not None:
        own.append(_note_bytes(note))
    joined = tf.concat(own, 0) if own else tf.zeros([0], tf.uint8)
    everything = primitives.allgather(joined, f"{bucket.label}.merged")
    parts = _split(everything, lengths)
    found = {place: part for place, part in zip(places, parts, strict=True) if place is not None}
    notes = [part for place, part in zip(places, parts, strict=True) if place is None]
    return Travelled(
        [found[place] for place in range(len(bucket.pieces))],
        _read_notes(tf.stack(notes)) if notes else tf.zeros([0], tf.int64),
    )


def _gathered(
    bucket: Bucket, packets: list[tf.Tensor], compressor: Compressor, note: tf.Tensor | None
) -> Travelled:
    """Everyone's packets, on all ranks."""
    lengths = [_bytes(compressor, piece) for piece in bucket.pieces]
    if note is not None:
        packets = [*packets, _note_bytes(note)]
        lengths.append(_NOTE_BYTES)
    everything = primitives.allgather(tf.concat(packets, 0), f"{bucket.label}.gathered")
    parts = _split(tf.reshape(everything, [primitives.size(), sum(lengths)]), lengths)
    if note is None:
        return Travelled(parts, tf.zeros([0], tf.int64))
    return Travelled(parts[:-1], _read_notes(parts[-1]))


def _places(bucket: Bucket, segments: Sequence[int]) -> list[int]:
    return [place for segment in segments for place in bucket.of(segment)]


def _bytes(compressor: Compressor, piece: Piece) -> int:
    return compressor.chunk_packet_bytes(piece.num_elements)


def _split(joined: tf.Tensor, lengths: Sequence[int]) -> list[tf.Tensor]:
    """Cuts the last axis, whose length only `lengths` tell."""
    if not lengths:
        return []
    joined = tf.ensure_shape(joined, [*joined.shape[:-1], sum(lengths)])
    return list(tf.split(joined, list(lengths), axis=-1))


def _note_bytes(note: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tf.reshape(note, [1]), tf.uint8), [_NOTE_BYTES])


def _read_notes(rows: tf.Tensor) -> tf.Tensor:
    """int64 [ranks] of uint8 [ranks, 8]."""
    return tf.bitcast(rows, tf.int64)
