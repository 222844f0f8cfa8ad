# SPDX-License-Identifier: Apache-2.0
"""Each worker's batches: to train on, split as asked for, and to test on, all rows once."""

import dataclasses
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tf_hips import data as batches
from tf_hips.comm import primitives
from tf_hips.data import sets, splits
from tf_hips.data.position import make_plain_variable
from tf_hips.data.seats import Seats
from tf_hips.errors import ConfigError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.robust.attacks import flip_labels
from tf_hips.strategies.loan import PARTY
from tf_hips.trainer.settings import Training

_WHITE = 255.0


class Worker(Protocol):
    """What is asked of a strategy."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Workers over which gradients are summed."""

    @property
    def welcome(self) -> Welcome | None:
        """What the server has said; None: there is none."""

    @property
    def seats(self) -> Seats | None:
        """In which group this worker sits in each round; None: in the same for ever."""

    def sample_group(self) -> tuple[int, int]:
        """Whose rows this worker reads: the number of its group, and how many there are."""

    def replica(self) -> int:
        """Number of this worker among those over which gradients are summed."""

    def make_variable(self, value: tf.Tensor, name: str) -> tf.Variable:
        """A variable that is not trained."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What one worker reads.

    Attributes:
        train: batches without end.
        test: batches of this worker's part of the test rows; those of all replicas are all rows.
        steps_of_pass: steps in which all workers together see as many rows as there are.
        samples_of_pass: rows of those steps, of this worker.
        num_rows: rows to train on that this worker has.
    """

    train: tf.data.Dataset
    test: tf.data.Dataset
    steps_of_pass: int
    samples_of_pass: int
    num_rows: int


def make(
    settings: Training,
    data: sets.DataSet,
    strategy: Worker,
    seed: int,
    level: str | None = None,
    *,
    flips_labels: bool = False,
) -> Source:
    """Batches for this worker.

    Args:
        settings: batch sizes and the split.
        data: the same on all workers.
        strategy: a strategy of tf_hips.
        seed: of split and order, the same on all workers.
        level: in modes with local steps, within what workers stay equal: "party" or "worker".
        flips_labels: whether this worker's rows to train on have wrong labels.

    Raises:
        ConfigError: some worker would have fewer rows than a batch, or rows of its own though it
            votes in groups that change; or rows are split over one party.
    """
    group, groups = strategy.sample_group()
    seats = strategy.seats
    if seats is not None:
        group, groups = 0, seats.groups
    size = settings.batch_size
    split = splits.parse(settings.split)
    make_variable = strategy.make_variable
    common: dict[str, Any] = {"seed": seed, "make_variable": make_variable}
    rows = data.train
    labels = flip_labels(rows.y, data.classes) if flips_labels else rows.y
    if len(rows) < groups * size:
        raise ConfigError(
            f"{data.name} must have a batch for each of {groups} workers, {groups * size} rows. "
            f"Received: {len(rows)} rows"
        )
    if split.kind == "iid":
        train = batches.shard(
            (rows.x, labels), size, group=group, groups=groups, seats=seats, **common
        )
        num_rows = len(range(group, len(rows), groups))
    elif seats is not None:
        raise ConfigError(
            "`split` must be iid where workers vote in groups that change: all have all rows. "
            f"Received: {split.text}"
        )
    else:
        parties = _parties(strategy, groups)
        if settings.split_over == PARTY and len(parties) == 1:
            raise ConfigError(
                "`split_over` party must have several parties: one has all rows, and its workers "
                f"random ones of them, as with the split iid. Received: split={split.text} over "
                "one party; take --split-over worker"
            )
        parts = splits.parts(rows.y, split, parties, seed=seed, level=settings.split_over)
        short = [worker for worker, part in enumerate(parts) if len(part) < size]
        if short:
            raise ConfigError(
                f"Every worker must have a batch of {size} rows. Received: {len(parts[short[0]])} "
                f"rows for worker {short[0]} of {groups}, split by {split.text}; take a smaller "
                f"batch, {split.remedies}, or fewer workers"
            )
        own = np.sort(parts[group]) if not split.is_compat else parts[group]
        num_rows = len(own)
        train = batches.shard(
            (rows.x[own], labels[own]),
            size,
            group=0,
            groups=1,
            shuffle=not split.is_compat,
            **common,
        )
    steps = len(rows) // (groups * size)
    # Where each party, or worker, is a world of its own, it tests on all rows.
    replica, replicas = strategy.replica(), strategy.num_replicas_in_sync
    if level is not None:
        replica, replicas = (primitives.rank(), primitives.size()) if level == PARTY else (0, 1)
    return Source(
        train=scaled(train.repeat(), data),
        test=test_batches(data, settings.eval_batch_size, replica, replicas, make_variable),
        steps_of_pass=steps,
        samples_of_pass=steps * size,
        num_rows=num_rows,
    )


def test_batches(
    data: sets.DataSet,
    batch_size: int,
    replica: int = 0,
    replicas: int = 1,
    make_variable: Any = make_plain_variable,
) -> tf.data.Dataset:
    """One replica's batches of the test rows, in order, without leaving any out."""
    dataset = batches.shard(
        (data.test.x, data.test.y),
        batch_size,
        group=replica,
        groups=replicas,
        seed=0,
        shuffle=False,
        drop_remainder=False,
        make_variable=make_variable,
    )
    return scaled(dataset, data)


def scaled(dataset: tf.data.Dataset, data: sets.DataSet) -> tf.data.Dataset:
    """Images as floats in [0, 1]; texts as they are."""
    if data.is_text:
        return dataset
    return dataset.map(
        lambda x, y: (tf.cast(x, tf.float32) / _WHITE, y), num_parallel_calls=1
    ).prefetch(2)


def num_workers(strategy: Worker) -> int:
    """Workers of all parties; where groups of them have the same batches, more than batches."""
    welcome = strategy.welcome
    return strategy.sample_group()[1] if welcome is None else sum(welcome.workers)


def _parties(strategy: Worker, groups: int) -> tuple[int, ...]:
    """Workers of each party that has rows of its own: of parties in a group that stays, of one."""
    welcome = strategy.welcome
    if welcome is None:
        return (groups,)
    if groups == num_workers(strategy):
        return tuple(welcome.workers)
    each = welcome.workers[0]  # those that vote have equally many
    return (each,) * (groups // each)
