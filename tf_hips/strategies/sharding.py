# SPDX-License-Identifier: Apache-2.0
"""`shard` deals rows out to the workers of a strategy; `gather` puts what came of them in order.

Of the strategy only the number of this worker's group, the number of groups and the seed of the run
are asked; the batches are `tf_hips.data`'s.
"""

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_hips import data as batches
from tf_hips.errors import ProtocolError
from tf_hips.strategies import hooks

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy


def shard(
    data: Any,
    batch_size: int,
    *,
    shuffle: bool | int = True,
    drop_remainder: bool = True,
    seed: int | None = None,
    strategy: Any = None,
) -> tf.data.Dataset:
    """This worker's batches of `data`, which all workers have.

        model.fit(tf_hips.shard((x, y), 32), epochs=3)
        model.evaluate(tf_hips.shard((x, y), 32, shuffle=False, drop_remainder=False))

    The k-th batches of all workers together are the k-th batch of one process with the joined batch
    size: worker g of N has the positions g, g + N, ... of an order that is a function of the seed
    and the epoch. Every pass through the dataset is the next epoch; `fit` counts its own epochs,
    and see `set_epoch`. Where workers vote in groups (docs/detox.md), g is with
    `drop_remainder` the group that a worker sits in, of all N of the tree; of groups that are drawn
    that of the step.

    Args:
        data: an array, or a tuple, list or dict of arrays of equally many rows, such as (x, y) or
            (x, y, sample_weight); or a `tf.data.Dataset` of single rows that gives the same rows in
            the same order on every worker.
        batch_size: rows of one worker's batch.
        shuffle: whether every epoch has another order. Arrays are shuffled as a whole, a dataset
            in a buffer of 10000 rows, or of as many as this says.
        drop_remainder: True gives all workers equally many batches, all full, as training needs;
            what is left out is said once. False leaves nothing out, and workers may have different
            numbers of rows and steps, as `evaluate` and `predict` allow.
        seed: of the shuffling, the same on all workers; None takes the run's.
        strategy: whose workers; None takes that of the scope, or else the only one of this process,
            or any of several that have the same workers and seed.

    Returns:
        A dataset of batches with the structure of `data`, for `fit`, `evaluate`, `predict` or a
        loop. Its length is known where that of `data` is.

    Raises:
        ValueError: the arrays have different lengths, there are too few rows for all workers, the
            dataset is batched or shuffled already, or an argument is out of range.
    """
    strategy = _found(strategy)
    group, groups = strategy.sample_group() if drop_remainder else strategy._row_group()
    seats = strategy.seats if drop_remainder else None
    if seats is not None:
        group, groups = 0, seats.groups
    return batches.shard(
        data,
        batch_size,
        group=group,
        groups=groups,
        shuffle=shuffle,
        drop_remainder=drop_remainder,
        seed=strategy.config.seed if seed is None else seed,
        make_variable=strategy.make_variable,
        seats=seats,
    )


def set_epoch(dataset: tf.data.Dataset, epoch: int) -> None:
    """Makes the next pass through a dataset of `shard` the pass of epoch number `epoch`.

    For loops that are taken up again; passes count up by themselves.

    Args:
        dataset: what `shard` returned, or what was chained to it.
        epoch: from 0.

    Raises:
        ValueError: the dataset does not come from `shard`.
    """
    positions = batches.positions_of(dataset)
    if not positions:
        raise ValueError(
            "`dataset` must come from `tf_hips.shard`, with or without `.map`, `.prefetch` and the "
            f"like behind it. Received: {dataset}"
        )
    for position in positions:
        position.set(epoch)


def gather(rows: Any, *, strategy: Any = None) -> Any:
    """What all workers made of their shards, in the order of the data, on all workers.

        shard = tf_hips.shard(x, 32, shuffle=False, drop_remainder=False)
        y = tf_hips.gather(model.predict(shard))

    All workers call it.

    Args:
        rows: this worker's array of shape [number of its rows, ...], or a structure of them; the
            rows of worker g of N are g, g + N, ... of the whole.
        strategy: as in `shard`.

    Returns:
        NumPy arrays of shape [number of all rows, ...], in the structure of `rows`.

    Raises:
        ValueError: the workers' rows are not those of shards of one whole.
        ProtocolError: the server's quorum has gone on without a party.
    """
    strategy = _found(strategy)
    own = [np.asarray(part) for part in tf.nest.flatten(rows)]
    group, groups = strategy._row_group()
    kinds = [[part.dtype.name, list(part.shape[:1]), list(part.shape[1:])] for part in own]
    everyone = strategy.gather_objects([group, kinds], "the rows to gather")
    if None in everyone:
        raise ProtocolError(
            "`gather` needs the rows of all parties, and the server's quorum has gone on without "
            f"{everyone.count(None)} of {len(everyone)} workers."
        )
    if len({number for number, _ in everyone}) < groups:
        raise ValueError(
            "`gather` needs all workers that share the data, and parties of an asynchronous run "
            f"do not wait for each other. Received: rows of {len(everyone)} of {groups} workers"
        )
    # Workers of one group have the same rows; the first of them speaks for it.
    speakers = [[one for one, _ in everyone].index(number) for number in range(groups)]
    whole = []
    for place, part in enumerate(own):
        lengths = _lengths([kinds for _, kinds in everyone], place, speakers)
        joined = strategy.gather(tf.convert_to_tensor(part), axis=0).numpy()
        parts = np.split(joined, np.cumsum(lengths)[:-1])
        result = np.empty((sum(lengths[one] for one in speakers), *part.shape[1:]), joined.dtype)
        for number, speaker in enumerate(speakers):
            result[number::groups] = parts[speaker]
        whole.append(result)
    return tf.nest.pack_sequence_as(rows, whole)


def _lengths(everyone: list[Any], place: int, speakers: list[int]) -> list[int]:
    """Rows of each worker's array number `place`, after a check that they fit together."""
    told = "; ".join(
        f"worker {worker}: " + ", ".join(f"{dtype} {first + rest}" for dtype, first, rest in kinds)
        for worker, kinds in enumerate(everyone)
    )
    if (
        any(
            [dtype, len(first), rest] != [own_dtype, 1, own_rest]
            for kinds in everyone
            for (dtype, first, rest), (own_dtype, _, own_rest) in zip(
                kinds, everyone[0], strict=False
            )
        )
        or len({len(kinds) for kinds in everyone}) > 1
    ):
        raise ValueError(
            "`rows` must be arrays of rows of the same shape and type on all workers. Received: "
            f"{told}"
        )
    lengths = [kinds[place][1][0] for kinds in everyone]
    total, groups = sum(lengths[one] for one in speakers), len(speakers)
    if [lengths[one] for one in speakers] != [
        len(range(number, total, groups)) for number in range(groups)
    ]:
        raise ValueError(
            "`rows` must be those of a shard that drops nothing, in order: `tf_hips.shard(..., "
            "shuffle=False, drop_remainder=False)`, where no worker has more than one row more "
            f"than another. Received: {told}"
        )
    return lengths


def _found(strategy: Any) -> "PartyStrategy":
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None:
        if len(hooks.live()) > 1:
            gc.collect()  # a strategy that was made anew may have left the old one in a cycle
        live = hooks.live()
        live = [one for one in live if not one._is_closed] or live
        if len({(one.sample_group(), one.config.seed) for one in live}) != 1:
            raise ValueError(
                "`strategy` must say whose workers share the data, unless this process has made "
                "one strategy, or several with the same workers and seed. Received: strategy=None, "
                f"{len(live)} strategies made"
            )
        strategy = live[0]
    found = hooks.ours(strategy)
    if found is None:
        raise ValueError(
            f"`strategy` must be one of tf_hips. Received: strategy={type(strategy).__name__}"
        )
    return found
