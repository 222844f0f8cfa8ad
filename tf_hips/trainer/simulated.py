# SPDX-License-Identifier: Apache-2.0
"""One process that plays all workers, so that liars know all gradients, as their papers assume.

    n workers --> one batch for each, or for each group --> n gradients --> lies in liars' places
              --> vote, buckets, rule --> one step

Gradients of a step are computed one after the other with the same weights; members of a group
compute the same, so theirs is computed once. Who sits in which group is drawn from the run's seed.
Nothing is encoded, and nothing travels.
"""

import dataclasses
import os
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips import config
from tf_hips.callbacks.optimizers import counter
from tf_hips.data import sets, splits
from tf_hips.errors import ConfigError, ToleranceError
from tf_hips.ops.native import Floats
from tf_hips.robust import detox
from tf_hips.robust import mean as mean_rule
from tf_hips.robust.adversary import Adversary
from tf_hips.robust.aggregator import Aggregation
from tf_hips.robust.detox import Detox, Vote
from tf_hips.robust.rows import Rejected
from tf_hips.strategies.party import PartyStrategy
from tf_hips.trainer import sources
from tf_hips.trainer.settings import Training
from tf_hips.trainer.verdicts import Verdicts
from tf_hips.trainer.ways import WORKERS_VARIABLE, Way, local_optimizer


def crowd(settings: Training, run: config.Run) -> Way:
    """Workers of one process.

    Raises:
        ConfigError: a launcher has started several processes.
    """
    import tf_hips

    if run.uplink is not None or int(os.environ.get(WORKERS_VARIABLE, "1")) > 1:
        raise ConfigError(
            "Simulated workers are one process: start it without a launcher. Received: one of "
            "several processes"
        )
    told = settings.robust
    made = Crowd(
        told.simulated_workers or 1,
        told.detox() or Detox(1, mean_rule()),
        told.adversary(run.seed),
        settings.batch_size,
        run.seed,
    )
    ring = tf_hips.CompressedRing(config=run)
    with ring.scope():
        return Way(ring, local_optimizer(settings), crowd=made)


class Crowd:
    """All workers of a run, and what they come to in each step."""

    def __init__(
        self, workers: int, rule: Detox, adversary: Adversary | None, batch_size: int, seed: int
    ) -> None:
        """Has made no step.

        Args:
            workers: how many there are.
            rule: groups, votes, buckets and rule.
            adversary: who lies; None: nobody.
            batch_size: rows of one worker's step.
            seed: of the run; of groups.

        Raises:
            ConfigError: nobody would be honest, or the attack is not defined for so few.
        """
        self.workers = workers
        self._rule = rule
        self._adversary = adversary
        self._batch_size = batch_size
        self._seed = seed
        self.seats = -(-workers // rule.r)
        self._before: Floats | None = None
        self._verdicts: Verdicts
        if adversary is not None:
            try:
                adversary.check(workers)
            except ValueError as error:
                raise ConfigError(f"Liars must fit {workers} simulated workers: {error}") from error

    def source(
        self, settings: Training, data: sets.DataSet, strategy: PartyStrategy, seed: int
    ) -> sources.Source:
        """Batches of all: of each seat, one behind the other.

        Raises:
            ConfigError: some worker would have fewer rows than a batch.
        """
        flipped: tuple[int, ...] = ()
        if self._adversary is not None and self._adversary.attack is None:
            flipped = self._adversary.liars(self.workers)
        data = _shared(data, is_whole=splits.parse(settings.split).kind == "iid")
        each = [
            sources.make(
                settings,
                data,
                _Seat(strategy, seat, self.seats),
                seed,
                flips_labels=seat in flipped,
            )
            for seat in range(self.seats)
        ]
        train = tf.data.Dataset.zip(tuple(one.train for one in each)).map(
            lambda *seats: tuple(tf.concat(parts, 0) for parts in zip(*seats, strict=True)),
            num_parallel_calls=1,
        )
        return sources.Source(
            train=train,
            test=each[0].test,
            steps_of_pass=each[0].steps_of_pass,
            samples_of_pass=sum(one.samples_of_pass for one in each),
            num_rows=sum(one.num_rows for one in each),
        )

    def play(self, model: keras.Model, strategy: PartyStrategy) -> None:
        """Makes training steps of `model` those of all workers."""
        self._verdicts = Verdicts(self.workers, strategy.write_event)
        sizes = [int(np.prod(one.shape, dtype=np.int64)) for one in model.trainable_variables]
        aggregated = strategy.failures.kept(self._aggregated)

        def train_step(self_: keras.Model, data: Any) -> Any:
            x, y = data
            rows, losses, scores = self._gradients(self_, x, y)
            [vector] = tf.numpy_function(aggregated, [rows, counter(self_.optimizer)], [tf.float32])
            vector.set_shape([sum(sizes)])
            gradients = [
                tf.reshape(part, one.shape)
                for part, one in zip(
                    tf.split(vector, sizes), self_.trainable_variables, strict=True
                )
            ]
            self_.optimizer.apply_gradients(zip(gradients, self_.trainable_variables, strict=True))
            number = self.seats * self._batch_size
            self_._loss_tracker.update_state(tf.reduce_mean(losses), sample_weight=number)
            flat = tf.reshape(scores, [number, *scores.shape[2:]])
            return self_.compute_metrics(x, y, flat)

        model.train_step = types.MethodType(train_step, model)

    def _gradients(
        self, model: keras.Model, x: tf.Tensor, y: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Of each seat its gradient, its loss and its scores."""
        shape = [self.seats, self._batch_size]
        variables = model.trainable_variables

        def one(batch: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            rows, labels = batch
            with tf.GradientTape() as tape:
                scores = model(rows, training=True)
                loss = model.compute_loss(x=rows, y=labels, y_pred=scores, training=True)
            found = tape.gradient(
                loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            flat = [tf.reshape(tf.convert_to_tensor(part), [-1]) for part in found]
            return tf.concat(flat, 0), loss, scores

        found: tuple[tf.Tensor, tf.Tensor, tf.Tensor] = tf.map_fn(
            one,
            (tf.reshape(x, [*shape, *x.shape[1:]]), tf.reshape(y, [*shape, *y.shape[1:]])),
            fn_output_signature=(tf.float32, tf.float32, tf.float32),
            parallel_iterations=1,
        )
        return found

    def _aggregated(self, found: np.ndarray, number: np.int64) -> np.ndarray:
        """What all come to in step `number`, of the gradients of all seats."""
        step = int(number)
        groups = detox.groups(self.workers, self._rule.r, self._seed, step, fixed=self._rule.fixed)
        rows: Any = found
        if self._rule.r > 1:
            rows = np.empty((self.workers, found.shape[1]), np.float32)
            for seat, members in enumerate(groups):
                rows[list(members)] = found[seat]
        if self._adversary is not None:
            rows = self._adversary.sent(rows, step, before=self._before)
        vector = self._result(rows, step)
        self._before = vector
        return np.asarray(vector)

    def _result(self, rows: Any, step: int) -> Floats:
        """What the rule makes of the rows of all workers; tells who had no part in it.

        Raises:
            ToleranceError: the rule cannot bear what it was given; says which workers.
        """
        try:
            found, votes = self._run(self._rule, rows, step)
        except ToleranceError as error:
            # A mean bears anything: it tells who was outvoted and refused, and is not used.
            anything = dataclasses.replace(self._rule, then=mean_rule(), buckets=0, q=None)
            rejected: tuple[Rejected, ...] = ()
            try:
                found, votes = self._run(anything, rows, step)
                rejected = found.rejected
            except detox.NoVoteError as none:
                votes = none.votes
            except ToleranceError:
                raise error from None
            told = self._verdicts.stopped(step, rejected, votes)
            if votes is not None:
                self._verdicts.voted(step, votes)
            raise ToleranceError(f"{error}" + (f" ({told})" if told else "")) from error
        if votes is not None:
            self._verdicts.voted(step, votes)
        self._verdicts.refused(step, found.rejected, votes)
        self._verdicts.chosen(step, found, votes)
        return found.vector

    def _run(
        self, rule: Detox, rows: Any, step: int
    ) -> tuple[Aggregation, tuple[Vote, ...] | None]:
        """What a rule comes to, and how groups of several have voted."""
        how: dict[str, Any] = {"reference": self._before, "seed": self._seed, "step": step}
        if rule.r > 1:
            result = rule.run(rows, **how)
            return result.aggregation, result.votes
        # One that sits alone has nobody to agree with; buckets and `q` are as behind any votes.
        return rule.aggregator(self.workers, self.workers).run(rows, **how), None


def _shared(data: sets.DataSet, *, is_whole: bool) -> sets.DataSet:
    """The same data as tensors, of which all seats' pipelines use one copy.

    Args:
        data: as arrays.
        is_whole: whether seats take their rows from all; else each has its own part of an array.
    """
    with tf.device("/cpu:0"):
        test = dataclasses.replace(data.test, x=tf.constant(data.test.x))
        train = dataclasses.replace(data.train, x=tf.constant(data.train.x)) if is_whole else None
    return dataclasses.replace(data, train=train or data.train, test=test)


class _Seat:
    """What `sources` asks of a strategy: one seat of a crowd."""

    num_replicas_in_sync = 1
    welcome = seats = None

    def __init__(self, strategy: PartyStrategy, seat: int, seats: int) -> None:
        self._place = seat, seats
        self.make_variable = strategy.make_variable

    def sample_group(self) -> tuple[int, int]:
        """Seat, and how many there are."""
        return self._place

    @staticmethod
    def replica() -> int:
        """One that is by itself."""
        return 0
