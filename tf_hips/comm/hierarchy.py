# SPDX-License-Identifier: Apache-2.0
"""The topology of two tiers of links: exact inside a node, compressed between nodes.

Where links inside a machine are fast and those between machines are not, codecs pay between
machines only. With H nodes, the smallest of which has G ranks, chunks are spread over G slices:

    inside     the ranks of a node send their gradients of slice g to its g-th rank, which adds them
    packets    the g-th ranks of all nodes encode these sums, and send each packet to its owner,
               which is one of them
    merged     the owner merges, encodes the sum, and sends it to the g-th ranks of all nodes
    everyone   the g-th rank of a node hands all packets of its slice to the ranks of its node

Each is an alltoall in which most ranks send each other nothing (between nodes one for each round of
a large exchange, see `schedules.has_rounds`): links between nodes carry packets only, each once per
node, and the ranks of a node share that work.

Gradients may be sent as float16 inside of a node, half as many bytes; they are added in float32.
That rounds them once more, and no residual keeps the rest: what is below 6e-8 is lost.
What float16 does not reach is sent as its largest number, 65504, with the sign: what is finite
stays finite, and what is infinite stays infinite.

A codec's residuals are those of a node's sum, on the ranks that encode it.

Follows the local aggregation of HiPress (SOSP 2021, section 5) and of BytePS (Jiang et al., OSDI
2020); the slices are those of a reduce-scatter.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.topologies import Bucket, Codec, Topology, Travelled, joined, merge, split
from tf_hips.ops.compressor import Compressor


class Hierarchy(Topology):
    """`hierarchical`, and `hierarchical_fp16`."""

    gathers = False
    encodes_sums = False

    def __init__(self, nodes: Sequence[Sequence[int]], inside: tf.DType = tf.float32) -> None:
        """Plans the slices.

        Args:
            nodes: the ranks of each node, ascending; each rank is in one of them.
            inside: what gradients are sent as inside of a node, float32 or float16.
        """
        self._inside_type = inside
        self._nodes = [tuple(node) for node in nodes]
        self._num_slices = min(len(node) for node in self._nodes)
        self.num_segments = self._num_slices * len(self._nodes)
        self._node_of = {rank: node for node in self._nodes for rank in node}

    def encoded(self, rank: int) -> Sequence[int]:
        """Those of its slice."""
        number = self._slice_of(rank)
        return () if number is None else self._segments(number)

    def recoded(self, rank: int) -> Sequence[int]:
        """The one that it owns."""
        number = self._slice_of(rank)
        if number is None:
            return ()
        return (number * len(self._nodes) + self._holders(number).index(rank),)

    def __call__(
        self,
        bucket: Bucket,
        values: Sequence[tf.Tensor],
        codec: Codec,
        step: tf.Tensor,
        note: tf.Tensor | None,
    ) -> Travelled:
        """Sums one bucket over the ranks; see `topologies.Topology`."""
        rank = primitives.rank()
        node, number = self._node_of[rank], self._slice_of(rank)
        slices = [self._places(bucket, one) for one in range(self._num_slices)]
        sent = tf.concat([values[place] for places in slices for place in places], 0)
        if self._inside_type != sent.dtype:
            sent = _narrowed(sent, self._inside_type)
        sums = self._inside(bucket, sent, slices, node, number)
        own = [] if number is None else self._places(bucket, number)
        packets = [
            codec.encode(bucket.pieces[place], value, step)
            for place, value in zip(own, sums, strict=True)
        ]
        shares = [] if number is None else self._by_rank(bucket, number)
        groups = [sorted(self._holders(one)) for one in range(self._num_slices)]
        owned = [] if number is None else shares[groups[number].index(rank)]
        received = primitives.exchange(
            [joined([packets[own.index(one)] for one in share]) for share in shares],
            [bucket.length(share, codec.compressor) for share in shares],
            f"{bucket.label}.packets",
            groups=groups,
            largest=self._largest(bucket, codec.compressor),
        )
        merged = merge(bucket, owned, received, len(shares), codec, step)
        compressor = codec.compressor.for_sums
        mine = joined([merged[one] for one in owned])
        of_slice = primitives.exchange(
            [mine] * len(shares),
            [bucket.length(owned, compressor)] * len(shares),
            f"{bucket.label}.merged",
            groups=groups,
            largest=self._largest(bucket, compressor),
        )
        everything = primitives.alltoall(
            joined([of_slice] * len(node)) if shares else of_slice,
            self._lengths(dict.fromkeys(node, bucket.length(own, compressor)) if shares else {}),
            f"{bucket.label}.everyone",
        )
        order = [
            place
            for slice_number in range(self._num_slices)
            for share in self._by_rank(bucket, slice_number)
            for place in share
        ]
        parts = dict(zip(order, split(everything, bucket.lengths(order, compressor)), strict=True))
        notes = tf.zeros([0], tf.int64)
        if note is not None:
            notes = primitives.allgather(tf.reshape(note, [1]), f"{bucket.label}.notes")
        return Travelled([parts[place] for place in range(len(bucket.pieces))], notes, sent)

    def _inside(
        self,
        bucket: Bucket,
        sent: tf.Tensor,
        slices: Sequence[Sequence[int]],
        node: Sequence[int],
        number: int | None,
    ) -> list[tf.Tensor]:
        """Sums over the node of the pieces of slice `number`, in the order of its places."""
        sizes = [[bucket.pieces[place].num_elements for place in places] for places in slices]
        lengths = {node[one]: sum(sizes[one]) for one in range(self._num_slices)}
        received = primitives.alltoall(sent, self._lengths(lengths), f"{bucket.label}.inside")
        if number is None:
            return []
        rows = tf.cast(tf.reshape(received, [len(node), sum(sizes[number])]), tf.float32)
        return split(tf.reduce_sum(rows, 0), sizes[number])

    def _slice_of(self, rank: int) -> int | None:
        place = self._node_of[rank].index(rank)
        return place if place < self._num_slices else None

    def _segments(self, number: int) -> Sequence[int]:
        return range(number * len(self._nodes), (number + 1) * len(self._nodes))

    def _holders(self, number: int) -> tuple[int, ...]:
        """The rank of each node that has slice `number`."""
        return tuple(node[number] for node in self._nodes)

    def _by_rank(self, bucket: Bucket, number: int) -> list[list[int]]:
        """Places of the pieces that each holder of a slice owns, in the order of their ranks."""
        owners = zip(self._holders(number), self._segments(number), strict=True)
        return [bucket.of(segment) for _, segment in sorted(owners)]

    def _places(self, bucket: Bucket, number: int) -> list[int]:
        """Places of all pieces of a slice, as its packets are sent: in the order of the owners."""
        return [place for share in self._by_rank(bucket, number) for place in share]

    def _largest(self, bucket: Bucket, compressor: Compressor) -> int:
        """Bytes of the packets of the segment that has most."""
        return max(
            bucket.length(bucket.of(segment), compressor) for segment in range(self.num_segments)
        )

    @staticmethod
    def _lengths(of_target: dict[int, int]) -> list[int]:
        return [of_target.get(rank, 0) for rank in range(primitives.size())]


def _narrowed(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """`values` as another type of floats, nearest to what they were."""
    nearest = tf.clip_by_value(values, -dtype.max, dtype.max)
    return tf.cast(tf.where(tf.math.is_inf(values), values, nearest), dtype)
