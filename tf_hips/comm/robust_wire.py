# SPDX-License-Identifier: Apache-2.0
"""What ranks send each other for a robust rule: packets, or the values themselves.

    Packets   uint8: the packet of each piece, then a byte for each: whether the sender's gradient
              is not finite there, which a codec would hide
    Values    float32: the elements of each piece; where nothing is encoded, packets would only be
              copies

Values are cut into smaller pieces than chunks: an exchange takes as long as the largest share of a
bucket, and small pieces are shared out evenly. A piece of values begins at a line of 64 bytes, so
that TensorFlow takes a part of a tensor without a copy, and rows are read by whole lines.

Invariant: how a message is laid out is a function of the sizes of its pieces.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.partition import Piece
from tf_hips.comm.topologies import Bucket, Codec, encode_in_turns, handed_on, joined
from tf_hips.ops.compressor import CHUNK, Compressor
from tf_hips.ops.flow import all_finite

_LINE = 16  # floats


class Wire(Protocol):
    """How rows and results travel.

    Attributes:
        grain: elements of a piece at most.
        bucket_elements: of a bucket, more or less.
        compressor: what rows are encoded with; None: not at all.
    """

    grain: int
    bucket_elements: int
    compressor: Compressor | None

    def lengths(self, pieces: Sequence[Piece]) -> list[int]:
        """Items of a message that belong to each piece."""

    def rooms(self, pieces: Sequence[Piece]) -> list[int]:
        """Floats from the beginning of the result of each piece to that of the next."""

    def length(self, pieces: Sequence[Piece]) -> int:
        """Items of a message about these pieces."""

    def messages(
        self,
        bucket: Bucket,
        targets: Sequence[Sequence[int]],
        order: Sequence[int],
        values: Sequence[tf.Tensor],
        step: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """What this rank sends of a bucket.

        Args:
            bucket: what travels.
            targets: places of the pieces of each message.
            order: the messages in the order in which they are wanted.
            values: this rank's gradient of each piece, float32 [elements].
            step: number of the step.

        Returns:
            The messages, and what is there when the last one that is wanted is.
        """

    def results(
        self, bucket: Bucket, places: Sequence[int], vector: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """The results of all owners, by place, on all ranks, as they travel.

        Args:
            bucket: what has travelled.
            places: pieces that this rank owns.
            vector: their results, float32 [sum(rooms)].
            step: number of the step.
        """


class Packets(Wire):
    """Packets of a compressor on the way to owners, and of its `for_sums` on the way back."""

    grain = CHUNK
    # Fewer than of a sum: decoding and ruling take longer than the link does, and overlap.
    bucket_elements = 1 << 22

    def __init__(
        self, codec: Codec, recode: Callable[[Piece, tf.Tensor, tf.Tensor], tf.Tensor]
    ) -> None:
        """Takes what encodes gradients, and what encodes results.

        Args:
            codec: encodes gradients.
            recode: makes the packet of the result of a piece that this rank owns, of the piece, its
                value and the step; called once per step.
        """
        self._codec = codec
        self._recode = recode
        self.compressor: Compressor = codec.compressor

    def lengths(self, pieces: Sequence[Piece]) -> list[int]:
        """Bytes of each packet."""
        return [self.compressor.chunk_packet_bytes(piece.num_elements) for piece in pieces]

    def rooms(self, pieces: Sequence[Piece]) -> list[int]:
        """The elements of each."""
        return [piece.num_elements for piece in pieces]

    def length(self, pieces: Sequence[Piece]) -> int:
        """Bytes of all packets, and one for each."""
        return sum(self.lengths(pieces)) + len(pieces)

    def messages(
        self,
        bucket: Bucket,
        targets: Sequence[Sequence[int]],
        order: Sequence[int],
        values: Sequence[tf.Tensor],
        step: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Encodes; see `Wire`."""
        wanted = [place for one in order for place in targets[one]]
        packets = encode_in_turns(bucket, wanted, values, self._codec, step)
        told = [tf.cast(tf.reshape(~all_finite([one]), [1]), tf.uint8) for one in values]
        messages = [
            joined([*(packets[place] for place in places), *(told[place] for place in places)])
            for places in targets
        ]
        return messages, packets[wanted[-1]]

    def results(
        self, bucket: Bucket, places: Sequence[int], vector: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Packets; see `Wire`."""
        own = [bucket.pieces[place] for place in places]
        values = parts(vector, own, self.rooms(own))
        packets = {
            place: self._recode(piece, value, step)
            for place, piece, value in zip(places, own, values, strict=True)
        }
        found, _ = handed_on(
            bucket, range(primitives.size()), packets, self.compressor.for_sums, None, []
        )
        return found


class Values(Wire):
    """The elements themselves, both ways."""

    grain = 1 << 17
    # The link takes longer than a rule does, and stands still for a while behind each round of an
    # exchange.
    bucket_elements = 1 << 24
    compressor = None

    def lengths(self, pieces: Sequence[Piece]) -> list[int]:
        """Floats of each, up to a whole line."""
        return [_lines(piece.num_elements) for piece in pieces]

    def rooms(self, pieces: Sequence[Piece]) -> list[int]:
        """The same."""
        return self.lengths(pieces)

    def length(self, pieces: Sequence[Piece]) -> int:
        """Floats of all pieces."""
        return sum(self.lengths(pieces))

    def messages(
        self,
        bucket: Bucket,
        targets: Sequence[Sequence[int]],
        order: Sequence[int],
        values: Sequence[tf.Tensor],
        step: tf.Tensor,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Copies once; see `Wire`."""
        del bucket, step
        messages = []
        for places in targets:
            items = [item for place in places for item in _padded(values[place])]
            messages.append(tf.concat(items, 0) if items else tf.zeros([0]))
        # A rank does not send its own.
        return messages, messages[order[-2] if len(order) > 1 else order[-1]]

    def results(
        self, bucket: Bucket, places: Sequence[int], vector: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Values; see `Wire`."""
        del places, step
        order = [place for rank in range(primitives.size()) for place in bucket.of(rank)]
        pieces = [bucket.pieces[place] for place in order]
        rooms = self.rooms(pieces)
        everything = primitives.allgather(vector, f"{bucket.label}.results")
        everything = tf.ensure_shape(everything, [sum(rooms)])
        found: Mapping[int, tf.Tensor] = dict(
            zip(order, parts(everything, pieces, rooms), strict=True)
        )
        return [found[place] for place in range(len(order))]


def parts(vector: tf.Tensor, pieces: Sequence[Piece], rooms: Sequence[int]) -> list[tf.Tensor]:
    """The elements of each piece of a vector in which each has its room."""
    found, begin = [], 0
    for piece, room in zip(pieces, rooms, strict=True):
        found.append(tf.slice(vector, [begin], [piece.num_elements]))
        begin += room
    return found


def _lines(num_floats: int) -> int:
    return -(-num_floats // _LINE) * _LINE


def _padded(vector: tf.Tensor) -> list[tf.Tensor]:
    """A vector, and what is missing to a whole line."""
    size = int(vector.shape[0])
    missing = _lines(size) - size
    return [vector, tf.zeros([missing])] if missing else [vector]
