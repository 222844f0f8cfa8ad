# SPDX-License-Identifier: Apache-2.0
"""Sharded batches of a `tf.data.Dataset` of single rows.

Every worker reads and shuffles the whole source alike and keeps its own rows. What is costly (to
decode, to augment) is cheaper when it is chained behind.
"""

import itertools
from typing import Any

import tensorflow as tf

from tf_hips.data.position import Position, ancestry, known_length
from tf_hips.data.seats import Seats

# Rows among which the next one is drawn, where `shuffle` is True.
SHUFFLE_BUFFER = 10_000

_AHEAD = 2
# They pass elements on as they are, so what is behind them tells what comes out.
_PASSING = (
    "PrefetchDataset",
    "OptionsDataset",
    "CacheDataset",
    "ShuffleDataset",
    "TakeDataset",
    "SkipDataset",
    "ShardDataset",
    "RepeatDataset",
    "AssertCardinalityDataset",
    "MapDataset",
    "ParallelMapDataset",
)
_BATCHING = ("BatchDataset", "ParallelBatchDataset", "PaddedBatchDataset")


def check_rows(dataset: tf.data.Dataset) -> None:
    """Refuses what cannot be sharded alike on all workers, as far as that can be seen.

    Raises:
        ValueError: the dataset is batched already, or shuffled anew in every pass.
    """
    for one in ancestry(dataset):
        if _kind(one) == "ShuffleDataset" and (
            getattr(one, "_reshuffle_each_iteration", True) or not _seeds(one)
        ):
            raise ValueError(
                "`data` must give the same rows in the same order on every worker. Received: a "
                "dataset that `.shuffle()` shuffles anew; leave it out and use "
                "`shard(..., shuffle=buffer_size)`"
            )
    for one in itertools.takewhile(
        lambda one: _kind(one) in (*_PASSING, *_BATCHING), ancestry(dataset)
    ):
        if _kind(one) in _BATCHING and _leading(dataset) <= _leading(one):
            raise ValueError(
                "`data` must be a dataset of single rows, for `shard` makes the batches. Received: "
                f"a dataset that is batched already, {dataset.element_spec}; shard it before "
                "`.batch()`, or pass `data.unbatch()`"
            )


def batches(
    dataset: tf.data.Dataset,
    batch_size: int,
    *,
    group: int,
    groups: int,
    drop_remainder: bool,
    seed: int,
    buffer: int,
    position: Position,
    seats: Seats | None = None,
) -> tf.data.Dataset:
    """Batches of one group's rows.

    Args:
        dataset: single rows, the same in the same order on every worker.
        batch_size: rows of a batch.
        group: takes the positions group, group + groups, ... of the order.
        groups: number of groups.
        drop_remainder: whether all groups get equally many batches, all of them full.
        seed: of the shuffling.
        buffer: rows among which the next one is drawn; 1 for the order of the dataset.
        position: tells the epoch.
        seats: instead of `group`, the group of each step, of equally many and full batches.
    """
    length = known_length(dataset)
    is_uncounted = int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    joined = groups * batch_size
    is_tuple = type(dataset.element_spec) is tuple  # whose parts `map` passes one by one
    specs = tf.nest.flatten(dataset.element_spec)
    is_dense = all(isinstance(one, tf.TensorSpec) for one in specs)
    is_sparse = any(isinstance(one, tf.SparseTensorSpec) for one in specs)

    @tf.autograph.experimental.do_not_convert
    def own_of(*parts: Any) -> Any:
        rows = parts if is_tuple else parts[0]
        return tf.nest.map_structure(lambda part: part[group::groups], rows)

    def rows_of(block: Any, seat: tf.Tensor) -> Any:
        return tf.nest.map_structure(
            lambda part: tf.reshape(part, [batch_size, groups, *part.shape[1:]])[:, seat], block
        )

    def pass_of(epoch: tf.Tensor) -> tf.data.Dataset:
        rows = dataset
        if buffer > 1:
            # tf.data mixes a seed with the program's global one, which may differ between ranks.
            # This is the seed of the graph that is being built here, and of no other.
            tf.compat.v1.get_default_graph().seed = 1
            drawn = tf.random.stateless_uniform(
                [], tf.stack([tf.constant(seed, tf.int64), epoch]), 0, 2**31 - 1, tf.int32
            )
            rows = rows.shuffle(buffer, tf.cast(drawn, tf.int64), reshuffle_each_iteration=False)
        if seats is not None:
            if not is_dense:
                raise ValueError(
                    "Groups that change must have rows of dense tensors. Received: "
                    f"{dataset.element_spec}"
                )
            blocks = rows.batch(joined, drop_remainder=True)
            return seats.applied(blocks, position, rows_of)
        if drop_remainder and is_uncounted:
            # Joined batches first, so that no group gets one more than another.
            whole = rows.batch(joined, drop_remainder=True)
            if is_sparse:  # no slices with strides
                own = whole.unbatch().shard(groups, group)
                return own.batch(batch_size, drop_remainder=True)
            return whole.map(own_of)
        if drop_remainder and length is not None:
            rows = rows.take(length // joined * joined)
        return rows.shard(groups, group).batch(batch_size, drop_remainder=drop_remainder)

    # Options of a dataset that comes in through a function would be lost.
    result = position.passes(pass_of).with_options(dataset.options())
    if length is not None:
        num_own = len(range(group, length, groups))
        steps = length // joined if drop_remainder else -(-num_own // batch_size)
        result = result.apply(tf.data.experimental.assert_cardinality(steps))
    return result.prefetch(_AHEAD)


def _kind(dataset: tf.data.Dataset) -> str:
    return type(dataset).__name__.lstrip("_")


def _seeds(dataset: tf.data.Dataset) -> bool:
    return any(int(getattr(dataset, name, 0)) for name in ("_seed", "_seed2"))


def _leading(dataset: tf.data.Dataset) -> set[int | None]:
    """Lengths of the first axes of the components; {-1} where one has none."""
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [getattr(spec, "shape", tf.TensorShape(None)) for spec in specs]
    return {shape[0] if shape.rank else -1 for shape in shapes}
