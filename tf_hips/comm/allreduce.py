# SPDX-License-Identifier: Apache-2.0
"""Exact sums of gradients over the ranks of a party.

Gradients of one type are joined in buckets, one allreduce each; the last gradients, which the
backward pass computes first, travel first.
"""

from collections.abc import Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.partition import BUCKET_ELEMENTS, buckets

# As many as compressed sums have elements; the joined copy stays cheap.
BUCKET_BYTES = 4 * BUCKET_ELEMENTS

HALVES = (tf.float16, tf.bfloat16)
"""Types that are added as float32, and rounded once."""

# What Horovod 0.28.1 cannot sum travels as what it can; halves it would round after each rank.
_CARRIERS = {
    **dict.fromkeys(HALVES, tf.float32),
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


def plain(tensors: Sequence[tf.Tensor], label: str) -> list[tf.Tensor]:
    """Sums each tensor over all ranks, exactly.

    Args:
        tensors: tensors of any numeric types, the same on all ranks; those of known shape travel
            together. Half types, and types that Horovod does not know, travel in a wider one.
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
    for position, tensor in reversed(list(enumerate(tensors))):
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
