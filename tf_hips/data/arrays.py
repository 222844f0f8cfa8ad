# SPDX-License-Identifier: Apache-2.0
"""Sharded batches of arrays that are in memory, gathered by their row numbers."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.data.position import Position
from tf_hips.data.seats import Seats

# Batches that are gathered at once and ahead of the step. tf.data's own choice is off under our
# strategies (docs/decisions/0010).
_PARALLEL = 2
_AHEAD = 2


def to_tensors(data: Any) -> Any:
    """Arrays as tensors on the host, in tuples for lists.

    Floats become Keras' `floatx`, as in `fit`.

    Raises:
        ValueError: something is no dense array, or their first axes differ.
    """
    data = _tuples(data)
    tensors = tf.nest.map_structure(_to_tensor, data)
    flat = tf.nest.flatten(tensors)
    if not flat:
        raise ValueError(f"`data` must hold at least one array. Received: data={data!r}")
    if any(not tensor.shape.rank for tensor in flat) or len({one.shape[0] for one in flat}) > 1:
        raise ValueError(
            "The arrays of `data` must have the same number of rows. Received shapes: "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in flat)}"
        )
    return tensors


def num_rows(tensors: Any) -> int:
    """Length of the first axis that the tensors have in common."""
    return int(tf.nest.flatten(tensors)[0].shape[0])


def batches(
    tensors: Any,
    batch_size: int,
    *,
    group: int,
    groups: int,
    drop_remainder: bool,
    is_shuffled: bool,
    seed: int,
    position: Position,
    seats: Seats | None = None,
) -> tf.data.Dataset:
    """Batches of one group's rows.

    Args:
        tensors: a structure of tensors with equal first axes.
        batch_size: rows of a batch.
        group: takes the positions group, group + groups, ... of the order.
        groups: number of groups.
        drop_remainder: whether all groups get equally many batches, all of them full.
        is_shuffled: whether the order is a permutation, another one in every epoch.
        seed: of the permutations.
        position: tells the epoch.
        seats: instead of `group`, the group of each step, of equally many and full batches.
    """
    length = num_rows(tensors)
    joined = groups * batch_size
    num_used = length // joined * joined if drop_remainder else length
    num_own = len(range(group, num_used, groups))
    num_whole, rest = divmod(num_own, batch_size)

    def rows_of(epoch: tf.Tensor) -> tf.data.Dataset:
        rows = tf.range(length, dtype=tf.int64)
        if is_shuffled:
            # Not `index_shuffle`, which needs no memory: it is slower than this and, at any number
            # of rows, far from uniform.
            rows = tf.random.experimental.stateless_shuffle(
                rows, tf.stack([tf.constant(seed, tf.int64), epoch])
            )
        if seats is not None:
            steps = num_used // joined
            blocks = tf.reshape(rows[:num_used], [steps, batch_size, groups])
            return seats.applied(
                tf.data.Dataset.from_tensor_slices(blocks),
                position,
                lambda block, seat: tf.ensure_shape(block[:, seat], [batch_size]),
            )
        own = rows[group:num_used:groups]
        whole = tf.reshape(own[: num_whole * batch_size], [num_whole, batch_size])
        dataset = tf.data.Dataset.from_tensor_slices(whole)
        if rest:
            last = tf.reshape(own[num_whole * batch_size :], [1, rest])
            dataset = dataset.concatenate(tf.data.Dataset.from_tensor_slices(last))
        return dataset

    @tf.autograph.experimental.do_not_convert
    def gather(rows: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), tensors)

    # What rewrites a dataset for an iterator makes a copy of the arrays.
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return (
        position.passes(rows_of)
        .map(gather, num_parallel_calls=_PARALLEL, deterministic=True)
        .apply(tf.data.experimental.assert_cardinality(num_whole + bool(rest)))
        .with_options(options)
        .prefetch(_AHEAD)
    )


def _tuples(data: Any) -> Any:
    """`data` with tuples for lists, and without the `None`s that end a tuple: (x, y, None)."""
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    if isinstance(data, list) or type(data) is tuple:
        parts = list(data)
        while parts and parts[-1] is None:
            parts.pop()
        return tuple(_tuples(part) for part in parts)
    return data


def _to_tensor(array: Any) -> tf.Tensor:
    if isinstance(array, np.ndarray) and array.dtype == object:
        array = array.astype(str)
    if isinstance(array, tf.SparseTensor | tf.RaggedTensor) or not hasattr(array, "__array__"):
        # A list of arrays is several inputs, as in Keras; so numbers in lists are no array.
        remedy = ""
        if isinstance(array, int | float):
            remedy = "; of numbers in lists `np.array` makes an array"
        elif isinstance(array, keras.utils.PyDataset | Iterable) and not isinstance(array, str):
            remedy = (
                ". What makes batches by itself is divided where it makes them: each worker gives "
                "`fit` its own, by `strategy.global_rank` and `strategy.num_replicas_in_sync`"
            )
        raise ValueError(
            "`data` must be made of dense arrays, or be a `tf.data.Dataset` of single rows. "
            f"Received: {type(array).__name__}{remedy}"
        )
    with tf.device("/cpu:0"):
        tensor = tf.convert_to_tensor(
            array if isinstance(array, tf.Tensor | tf.Variable) else np.asarray(array)
        )
        floatx = tf.as_dtype(keras.config.floatx())
        return tf.cast(tensor, floatx) if tensor.dtype.is_floating else tensor
