# SPDX-License-Identifier: Apache-2.0
"""Sums of sparse gradients (`tf.IndexedSlices`) over the ranks of a party, exactly.

Every rank sends the rows it has, and everyone gets the rows of all ranks in rank order: what one
process would have on the joined batch. A dense table is never made for that.

    rows       how many rows each rank has of each table, one allgather for all tables
    indices    the rows' indices, one allgather for all tables
    values     the rows, one allgather for each type

Where only the sum over equal indices matters ("additive"), rows of equal index are added up before
they are sent and after they have come, and a table goes dense, by an allreduce, in each step in
which that moves fewer bytes. All ranks know the same numbers of rows, so all go the same way.

Invariant: equal indices are added in rank order, and within a rank in the order they came in, by
one thread, so the sums are equal bit for bit on all ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_hips.comm import primitives

# Bytes of an index as it travels.
_INDEX_BYTES = 4
# A table of so many bytes at most goes dense at once: to ask would take longer than to send it.
SMALL_TABLE_BYTES = 2**20


def is_small(shape: Sequence[int], dtype: tf.DType) -> bool:
    """Whether a table is always cheaper to sum as it is than to find out about its rows."""
    return math.prod(shape) * dtype.size <= SMALL_TABLE_BYTES


def is_cheaper(num_rows: Any, shape: Sequence[int], dtype: tf.DType) -> Any:
    """Whether rows cost fewer bytes than their table.

    An allreduce passes the table on twice (sums on their way together, and back); an allgather
    passes each row on once.

    Args:
        num_rows: rows of all ranks, a number or an int64 tensor.
        shape: shape of the table.
        dtype: its type.
    """
    row_bytes = math.prod(shape[1:]) * dtype.size
    return num_rows * (row_bytes + _INDEX_BYTES) < 2 * shape[0] * row_bytes


def deduplicated(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up rows of equal index, in their order; the indices come in order of first appearance.

    TensorFlow adds rows of equal index to a variable from several threads, in the order that
    chance makes; after this there are none.
    """
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def sparse_sum(
    slices: Sequence[tf.IndexedSlices],
    shapes: Sequence[Sequence[int]],
    label: str,
    *,
    is_additive: bool,
) -> list[tf.IndexedSlices]:
    """Sums each over all ranks.

    Args:
        slices: one for each table, values [rows, *shape[1:]] of any floating type that Horovod
            knows; the same tables on all ranks, each with rows of its own, possibly none.
        shapes: shapes of the tables.
        label: part of the collectives' names.
        is_additive: whether only the sum over equal indices matters. If not, all rows of all ranks
            come back as they are, in rank order.

    Returns:
        Slices like `slices`, equal on all ranks; without equal indices if `is_additive`.
    """
    if primitives.size() == 1 or not slices:
        return list(slices)
    if not is_additive:
        counts = _row_counts(slices, label) if len(slices) > 1 else None
        return _gathered(slices, shapes, counts, label)
    slices = [deduplicated(one) for one in slices]
    counts = _row_counts(slices, label)
    totals = tf.unstack(tf.reduce_sum(counts, 0))
    sparse = [
        is_cheaper(total, shape, one.values.dtype)
        for total, shape, one in zip(totals, shapes, slices, strict=True)
    ]
    sent = [
        _first_rows(one, tf.where(choice, count, 0))
        for one, choice, count in zip(
            slices, sparse, tf.unstack(counts[primitives.rank()]), strict=True
        )
    ]
    gathered = _gathered(sent, shapes, tf.where(tf.stack(sparse), counts, 0), label)
    return [
        _chosen(choice, come, one, shape, f"{label}.table.{index}")
        for index, (choice, come, one, shape) in enumerate(
            zip(sparse, gathered, slices, shapes, strict=True)
        )
    ]


def _chosen(
    is_sparse: tf.Tensor,
    gathered: tf.IndexedSlices,
    own: tf.IndexedSlices,
    shape: Sequence[int],
    name: str,
) -> tf.IndexedSlices:
    """The sum as rows, or as a table that is given as all of its rows."""

    def rows() -> tuple[tf.Tensor, tf.Tensor]:
        total = deduplicated(gathered)
        return total.values, total.indices

    def table() -> tuple[tf.Tensor, tf.Tensor]:
        dense = tf.math.unsorted_segment_sum(own.values, own.indices, shape[0])
        total = primitives.allreduce(tf.reshape(dense, [-1]), name)
        return tf.reshape(total, shape), tf.range(shape[0], dtype=own.indices.dtype)

    values, indices = tf.cond(is_sparse, rows, table)
    return tf.IndexedSlices(tf.reshape(values, [-1, *shape[1:]]), indices, own.dense_shape)


def _first_rows(slices: tf.IndexedSlices, num_rows: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(slices.values[:num_rows], slices.indices[:num_rows], slices.dense_shape)


def _row_counts(slices: Sequence[tf.IndexedSlices], label: str) -> tf.Tensor:
    """Rows of each rank and table, int64 [ranks, tables]."""
    own = tf.stack([tf.size(one.indices, tf.int64) for one in slices])
    return tf.reshape(primitives.allgather(own, f"{label}.rows"), [primitives.size(), len(slices)])


def _gathered(
    slices: Sequence[tf.IndexedSlices],
    shapes: Sequence[Sequence[int]],
    counts: tf.Tensor | None,
    label: str,
) -> list[tf.IndexedSlices]:
    """The rows of all ranks, in rank order.

    Args:
        slices: this rank's.
        shapes: shapes of the tables.
        counts: rows of each rank and table; may be None for one table.
        label: part of the collectives' names.
    """
    widths = [math.prod(one.values.shape[1:]) for one in slices]
    types = [one.values.dtype for one in slices]
    is_wide = any(shape[0] > tf.int32.max for shape in shapes)
    all_indices = _joined(
        [tf.cast(one.indices, tf.int64 if is_wide else tf.int32) for one in slices],
        counts,
        [1] * len(slices),
        f"{label}.indices",
    )
    all_values: list[Any] = [None] * len(slices)
    for dtype in dict.fromkeys(types):
        group = [place for place, one in enumerate(types) if one == dtype]
        vectors = _joined(
            [tf.reshape(slices[place].values, [-1]) for place in group],
            None if counts is None else tf.gather(counts, group, axis=1),
            [widths[place] for place in group],
            f"{label}.values.{dtype.name}",
        )
        for place, vector in zip(group, vectors, strict=True):
            all_values[place] = vector
    return [
        tf.IndexedSlices(
            tf.reshape(values, [-1, *shape[1:]]),
            tf.cast(indices, one.indices.dtype),
            one.dense_shape,
        )
        for one, shape, values, indices in zip(slices, shapes, all_values, all_indices, strict=True)
    ]


def _joined(
    vectors: Sequence[tf.Tensor], counts: tf.Tensor | None, widths: Sequence[int], name: str
) -> list[tf.Tensor]:
    """Gathers several vectors at once; each comes back with the parts of all ranks joined."""
    everything = primitives.allgather(tf.concat(vectors, 0), name)
    if len(vectors) == 1:
        return [everything]
    lengths = tf.reshape(counts * tf.constant(widths, tf.int64), [-1])
    parts = tf.split(everything, lengths, num=primitives.size() * len(vectors))
    return [tf.concat(parts[place :: len(vectors)], 0) for place in range(len(vectors))]
