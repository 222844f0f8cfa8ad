# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the ranks of a party: plain, or compressed through owners (`ps`).

Plain: gradients of one type are joined in buckets, one allreduce each. Compressed, with W ranks:

    encode     every rank encodes each tensor (its gradient plus its residual), chunk by chunk
    alltoall   each packet goes to the rank that owns its chunk
    merge      the owner sums the W packets of a chunk in rank order, adds its own residual, and
               encodes again, with the compressor's `for_sums`
    allgather  the merged packets go to everyone, and everyone decodes the same bytes

Two collectives whatever the number of tensors, each sending about one encoded model per rank. What
either encoding drops stays in a residual where it was dropped, so over the steps nothing is lost.

Invariant: all ranks decode the same bytes in the same order, so their sums are equal bit for bit.

Follows CaSync-PS of HiPress (SOSP 2021), with servers on the ranks themselves.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.partition import buckets, owners
from tf_hips.ops import graph
from tf_hips.ops.compressor import CHUNK, Compressor, chunk_sizes

# Large enough that a collective's fixed cost vanishes, small enough that the joined copy stays
# cheap.
BUCKET_BYTES = 64 * 2**20

# What Horovod 0.28.1 cannot sum travels as what it can.
_CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]


def plain(tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Sums each tensor over all ranks, exactly.

    Args:
        tensors: tensors of any numeric types, the same on all ranks; those of known shape travel
            together. Types that Horovod does not know travel in a wider one.
        label: part of the collectives' names.

    Returns:
        Tensors like `tensors`, equal on all ranks.
    """
    if primitives.size() == 1:
        return [tf.identity(tensor) for tensor in tensors]
    sums = _plain([_carried(tensor) for tensor in tensors], label)
    return [_restored(total, tensor.dtype) for total, tensor in zip(sums, tensors, strict=True)]


def _carried(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    return tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype))


def _restored(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype.is_complex:
        return tf.complex(total[..., 0], total[..., 1])
    return tf.cast(total, dtype)


def _plain(tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    results = list(tensors)
    known = []
    for position, tensor in enumerate(tensors):
        if tensor.shape.is_fully_defined():
            known.append(position)
        else:
            results[position] = primitives.allreduce(tensor, f"{label}.sum.alone.{position}")
    sizes = [tensors[position].shape.num_elements() for position in known]
    kinds = [tensors[position].dtype for position in known]
    sizes_bytes = [size * kind.size for size, kind in zip(sizes, kinds, strict=True)]
    for index, group in enumerate(
        buckets(sizes_bytes, [kind.name for kind in kinds], BUCKET_BYTES)
    ):
        lengths = [sizes[place] for place in group]
        if sum(lengths) == 0:
            continue
        members = [tensors[known[place]] for place in group]
        joined = tf.concat([_flat(member) for member in members], 0)
        total = primitives.allreduce(joined, f"{label}.sum.{index}")
        parts = tf.split(total, lengths)
        for place, member, part in zip(group, members, parts, strict=True):
            results[known[place]] = (
                part if member.shape.rank == 1 else tf.reshape(part, member.shape)
            )
    return results


def _flat(tensor: tf.Tensor) -> tf.Tensor:
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring chunks of one tensor that one rank owns.

    Attributes:
        tensor: position of the tensor.
        offset: index in the tensor of the first element.
        num_elements: elements of all its chunks.
        num_bytes: bytes of all its packets.
    """

    tensor: int
    offset: int
    num_elements: int
    num_bytes: int


def segments(sizes: Sequence[int], compressor: Compressor, num_owners: int) -> list[list[Segment]]:
    """Cuts tensors of `sizes` elements into what each owner holds, in model order.

    Empty tensors have no chunks and appear nowhere.
    """
    chunks = [
        Segment(tensor, index * CHUNK, count, compressor.chunk_packet_bytes(count))
        for tensor, size in enumerate(sizes)
        for index, count in enumerate(chunk_sizes(size) if size else [])
    ]
    plan = []
    for start, stop in owners([chunk.num_elements for chunk in chunks], num_owners):
        owned = []
        for tensor, group in itertools.groupby(chunks[start:stop], key=lambda chunk: chunk.tensor):
            parts = list(group)
            owned.append(
                Segment(
                    tensor,
                    parts[0].offset,
                    sum(part.num_elements for part in parts),
                    sum(part.num_bytes for part in parts),
                )
            )
        plan.append(owned)
    return plan


class CompressedSum:
    """The compressed sum of one list of float32 vectors, with the residuals that belong to it.

    Make it once per list of gradients, outside of graphs, on every rank alike.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        compressor: Compressor,
        *,
        label: str,
        worker_seed: int,
        owner_seed: int,
        make_variable: MakeVariable,
        shares: "CompressedSum | None" = None,
    ) -> None:
        """Plans the owners and makes the residuals.

        Args:
            sizes: elements of each vector.
            compressor: how to encode, on the way to the owners and back; no warm-up (see
                `reducers`).
            label: part of the collectives' names.
            worker_seed: seed of this rank's encoder of gradients.
            owner_seed: seed of this rank's encoder of sums.
            make_variable: makes a non-trainable variable from an initial value and a name.
            shares: another sum of vectors of the same sizes, by a compressor that keeps the same:
                its residuals are these, too.
        """
        self._sizes = list(sizes)
        self._compressor = compressor
        self._label = label
        self._worker_seed = worker_seed
        self._owner_seed = owner_seed
        self._plan = segments(sizes, compressor, primitives.size())
        self._owned = self._plan[primitives.rank()]
        self._sums = sums = compressor.for_sums
        self.residuals: dict[int, tf.Variable] = {}
        self.owner_residuals: list[tf.Variable] = []
        if shares is not None:
            self.residuals, self.owner_residuals = shares.residuals, shares.owner_residuals
            return
        if compressor.has_state and primitives.size() > 1:
            kept = "residual" if compressor.has_residual else "state"
            self.residuals = {
                tensor: make_variable(tf.zeros(compressor.state_shape([size])), f"{kept}_{tensor}")
                for tensor, size in enumerate(sizes)
                if size
            }
        if sums.has_state and primitives.size() > 1:
            self.owner_residuals = [
                make_variable(
                    tf.zeros(sums.state_shape([part.num_elements])), f"owner_residual_{part.tensor}"
                )
                for part in self._owned
            ]

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums `vectors` over the ranks.

        Args:
            vectors: float32 [sizes[i]] each.
            step: int64 scalar, the same on all ranks; with the seed and the position it determines
                the noise.

        Returns:
            Vectors like `vectors`, equal on all ranks; exactly `vectors` where there is one rank.
        """
        if primitives.size() == 1 or not any(self._sizes):
            return [tf.identity(vector) for vector in vectors]
        mine = self._encode(graph.clip(self._compressor, vectors, primitives.size()), step)
        owner_bytes = [sum(part.num_bytes for part in owned) for owned in self._plan]
        received = primitives.alltoall(mine, owner_bytes, f"{self._label}.packets")
        merged = self._merge(
            tf.reshape(received, [primitives.size(), owner_bytes[primitives.rank()]]), step
        )
        everything = primitives.allgather(merged, f"{self._label}.merged")
        num_bytes = sum(self._sums.wire_bytes(size) for size in self._sizes if size)
        return self._decode(tf.ensure_shape(everything, [num_bytes]))

    def _encode(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        packets = []
        for position, (vector, size) in enumerate(zip(vectors, self._sizes, strict=True)):
            if not size:
                continue
            kept = self.residuals.get(position)
            packet, new_kept = graph.encode(
                self._compressor,
                vector,
                seed=self._worker_seed,
                step=step,
                tensor_id=position,
                kept=None if kept is None else kept.read_value(),
            )
            if kept is not None:
                kept.assign(new_kept)
            packets.append(packet)
        return tf.concat(packets, 0)

    def _merge(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        if not self._owned:
            # Nothing came, but what is sent on must come from it: TensorFlow drops a collective
            # whose result is not used, and the other ranks would wait for this one.
            return tf.reshape(rows, [0])
        merged = []
        begin = 0
        for index, part in enumerate(self._owned):
            residual = self.owner_residuals[index] if self.owner_residuals else None
            packet, new_residual = graph.recode_sum(
                self._compressor,
                rows[:, begin : begin + part.num_bytes],
                part.num_elements,
                None if residual is None else residual.read_value(),
                seed=self._owner_seed,
                step=step,
                tensor_id=part.tensor,
                offset=part.offset,
            )
            if residual is not None:
                residual.assign(new_residual)
            merged.append(packet)
            begin += part.num_bytes
        return tf.concat(merged, 0)

    def _decode(self, packets: tf.Tensor) -> list[tf.Tensor]:
        vectors = []
        begin = 0
        for size in self._sizes:
            if not size:
                vectors.append(tf.zeros([0]))
                continue
            num_bytes = self._sums.wire_bytes(size)
            packet = packets[begin : begin + num_bytes]
            vectors.append(graph.decode(self._sums, packet, size))
            begin += num_bytes
        return vectors
