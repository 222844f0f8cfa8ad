# SPDX-License-Identifier: Apache-2.0
"""How the modes with local steps train: which loop, how long its rounds are, when tests are made.

Tests, lines and checkpoints come right after a meeting, when all have the same weights. Where all
rounds have the same length an epoch of Keras is some of them. ESync's have not: there is one epoch,
and everybody tests after the same meeting, which all find out from what all have said in it.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable
from typing import Any

import keras

import tf_hips
from tf_hips import callbacks, config
from tf_hips.comm import primitives
from tf_hips.errors import ConfigError
from tf_hips.loops import ESync, Loop
from tf_hips.loops.meeting import Meeting
from tf_hips.strategies.loan import PARTY, WORKER
from tf_hips.strategies.party import PartyStrategy
from tf_hips.trainer.backing_up import Backup
from tf_hips.trainer.progress import Plan, Progress
from tf_hips.trainer.settings import Training
from tf_hips.trainer.sources import Source
from tf_hips.trainer.ways import (
    WORKERS_VARIABLE,
    Way,
    check_has_server,
    local_optimizer,
    parties_of,
    ring_of,
)

DILOCO_STEPS = 50
HFA_STEPS, HFA_ROUNDS = 20, 10
FRAGMENTS, OVERLAP = 5, 5
_WITHOUT_END = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The loop of one worker, and what its rounds are.

    Attributes:
        loop: of `tf_hips.loops`.
        steps: of this worker in each round; None: ESync, whose rounds differ.
        epochs: passes of its own rows in each round, where that is what a round is.
    """

    loop: Loop
    steps: int | None = None
    epochs: int | None = None

    def interval(self, settings: Training, steps_of_pass: int, num_steps: int) -> int:
        """Steps between two tests, a whole number of rounds; with ESync more than there can be."""
        if self.steps is None:
            return _WITHOUT_END
        # Equal for all, as a backup of one party must fit the others': where rounds are passes of
        # rows of one's own, `steps` is not.
        default = 1 if self.epochs else max(1, round(steps_of_pass / self.steps))
        rounds = settings.eval_duration or default
        return min(rounds * self.steps, num_steps)


def fedavg(settings: Training, run: config.Run) -> Way:
    """FedAvg and what others have added; HiPS' own mean with the rule `compat`."""
    local = settings.local

    def make(model: keras.Model, source: Source) -> Rounds:
        epochs = local.local_epochs or (1 if local.local_steps is None else None)
        steps = local.local_steps
        if steps is None:
            steps = (epochs or 1) * _steps_of_own_pass(way, source, settings.batch_size)
        loop = tf_hips.FedAvg(
            model,
            way.strategy,
            local_steps=steps,
            server_optimizer=local.outer,
            weighting=local.weighting,
            prox_mu=local.prox_mu or 0.0,
            scaffold=local.scaffold,
            normalise=local.normalise,
            participation=1.0 if local.participation is None else local.participation,
            compat=local.is_compat,
        )
        return Rounds(loop, steps, epochs)

    way = _way(settings, run, make, is_of_workers=local.is_compat)
    return way


def diloco(settings: Training, run: config.Run) -> Way:
    """FedAvg with many steps and DiLoCo's outer optimizer; each member counts the same."""
    local = settings.local

    def make(model: keras.Model, source: Source) -> Rounds:
        del source
        steps = local.local_steps or DILOCO_STEPS
        rule = way.strategy.rule
        waits = rule is None or not rule.is_asynchronous
        loop = tf_hips.FedAvg(
            model,
            way.strategy,
            local_steps=steps,
            server_optimizer=_outer(settings, way.strategy, "diloco"),
            weighting=local.weighting or ("uniform" if waits else None),
            participation=1.0 if local.participation is None else local.participation,
        )
        return Rounds(loop, steps)

    way = _way(settings, run, make)
    return way


def streaming(settings: Training, run: config.Run) -> Way:
    """Streaming DiLoCo."""
    local = settings.local

    def make(model: keras.Model, source: Source) -> Rounds:
        del source
        steps, fragments = local.local_steps or DILOCO_STEPS, local.fragments or FRAGMENTS
        overlap = local.overlap
        if overlap is None:
            overlap = min(OVERLAP, max(0, steps // fragments - 1))
        loop = tf_hips.StreamingDiLoCo(
            model,
            way.strategy,
            local_steps=steps,
            fragments=fragments,
            overlap=overlap,
            server_optimizer=local.outer or "diloco",
        )
        return Rounds(loop, steps)

    # Fragments share one vector on the wire, so what comes down may keep nothing between rounds.
    way = _way(settings, run, make, downlink=None)
    return way


def hfa(settings: Training, run: config.Run) -> Way:
    """HFA: means in parties, more rarely over parties."""
    local = settings.local

    def make(model: keras.Model, source: Source) -> Rounds:
        del source
        steps, meetings = local.local_steps or HFA_STEPS, local.party_rounds or HFA_ROUNDS
        loop = tf_hips.HFA(
            model,
            way.strategy,
            local_steps=steps,
            party_rounds=meetings,
            server_optimizer=local.outer,
            weighting=local.weighting or "uniform",
        )
        return Rounds(loop, steps * meetings)

    way = _way(settings, run, make, is_of_workers=True)
    return way


def esync(settings: Training, run: config.Run) -> Way:
    """ESync, by its own rule or by the paper's."""
    local = settings.local

    def make(model: keras.Model, source: Source) -> Rounds:
        if settings.backup_dir is not None and way.level == WORKER and primitives.size() > 1:
            raise ConfigError(
                "Workers of one party that make different numbers of steps cannot back up "
                "together: let each be a party, or train without `backup_dir`. Received: "
                f"{primitives.size()} workers"
            )
        loop = CountedESync(
            model,
            way.strategy,
            rule="compat" if local.is_compat else "default",
            pace=local.pace,
            averaging=local.averaging,
            weighting=local.weighting,
            server_optimizer=local.outer,
            state_server=local.state_server,
            epsilon=0.5 if local.epsilon is None else local.epsilon,
        )
        loop.steps_of_pass = source.steps_of_pass * way.strategy.sample_group()[1]
        loop.rounds_of_test = settings.eval_duration
        return Rounds(loop)

    way = _way(settings, run, make, is_of_workers=local.is_compat)
    return way


class CountedESync(ESync):
    """ESync that counts the steps of all, and says after which meetings everybody tests.

    Invariant: what it says follows from what all have said to all, so all say the same.
    """

    num_steps = 1  # of all workers, after which training ends
    steps_of_pass = 1  # of all workers together
    rounds_of_test: int | None = None
    made = 0  # steps of all workers up to the last meeting
    tests = 0
    _is_due = False
    _share: float | None = None  # of this worker, in the steps of the last round

    def is_enough(self) -> bool:
        """Whether the local phase ends here: the last round is as long as what is left."""
        is_enough = super().is_enough()
        if is_enough or self._asked is not None:
            return is_enough
        # All that is left, dealt out by speed, ends at the same time for all. The first round may
        # go on for as long as others take: then one worker makes no more than all are to make.
        share = 1.0 if self._share is None else self._share
        return self.steps >= max(1, math.ceil((self.num_steps - self.made) * share))

    def hear(self, meeting: Meeting) -> None:
        """Counts."""
        super().hear(meeting)
        before, made = self.made, sum(one.steps for one in meeting.everyone)
        self.made += made
        self._share = self.steps / made if made else None
        if self.rounds_of_test is not None:
            self._is_due = (self.round + 1) % self.rounds_of_test == 0
        else:
            self._is_due = self.made // self.steps_of_pass > before // self.steps_of_pass

    def is_test_due(self) -> bool:
        """Whether this step was followed by a meeting after which all test."""
        is_due = self.steps == 0 and (self._is_due or self.made >= self.num_steps)
        self._is_due = self._is_due and not is_due
        return is_due

    def place(self) -> dict[str, Any]:
        """Where a backup finds it."""
        return {**super().place(), "made": self.made, "tests": self.tests}

    def go_on(self, place: dict[str, Any]) -> None:
        """Takes up the place that a backup has."""
        super().go_on(place)
        self.made, self.tests = place["made"], place["tests"]


class RoundProgress(Progress):
    """What ESync says while it trains: tests after meetings, and the end when all have done enough.

    Counts steps of all workers: those of one say little where they differ.
    """

    def __init__(
        self, plan: Plan, write_event: Callable[..., None], loop: CountedESync, test: Any
    ) -> None:
        """Tests on the batches `test`; training ends after the steps of the plan."""
        super().__init__(plan, write_event, lambda: loop.seconds_in_meetings, is_own=True)
        self._loop = loop
        self._test_batches = test
        loop.num_steps = plan.num_steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins what lies before the first test, of a run that is taken up again the next one."""
        del epoch
        super().on_epoch_begin(self._loop.tests, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tests, where that is due, and ends training."""
        super().on_train_batch_end(batch, logs)
        if self._loop.is_test_due():
            self._tell(logs)
        if self._loop.made >= self._plan.num_steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells what was not told: another callback has stopped training, or data have ended."""
        del epoch
        if self._peers.steps_made(self.model.optimizer) > self._step_before:
            self._tell(logs)

    def steps_of_all(self) -> int:
        """Up to the last meeting."""
        return self._loop.made

    def _tell(self, logs: Any) -> None:
        began = time.monotonic()
        tested = self.model.evaluate(self._test_batches, verbose=0, return_dict=True)
        self._evaluation_s = time.monotonic() - began
        told = {f"val_{name}": value for name, value in tested.items()}
        super().on_epoch_end(self._loop.tests, {**(logs or {}), **told})
        self._loop.tests += 1
        self.model.reset_metrics()  # loss and accuracy are those since the last test
        self._loop.pause(self._evaluation_s)
        super().on_epoch_begin(self._loop.tests)


class MetCheckpoint(callbacks.StepCheckpoint):
    """Checkpoints of weights that all have: after a meeting, the first one at which one is due."""

    loop: Loop | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes one, if one is due and all have met."""
        if self.loop is None or self.loop.steps == 0:
            super().on_train_batch_end(batch, logs)


class MetBackup(Backup):
    """Backups of ESync: after each test, which all make after the same meeting.

    So parties that all stop have backups of the same round, though not of the same step.
    """

    def __init__(self, directory: str, loop: CountedESync) -> None:
        """Plans backups in `directory`."""
        # Before its first step the loop does not know what a backup has made: then all are left.
        # The last round may make more than all, which is no other run's end.
        super().__init__(
            directory, lambda: max(loop.num_steps - loop.made, 0), save_freq=_WITHOUT_END
        )
        self._loop = loop
        self._tests = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Knows the last test of the run that is taken up."""
        super().on_epoch_begin(epoch, logs)
        self._tests = self._loop.tests

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, if all have just tested."""
        if self._loop.tests != self._tests:
            self._tests = self._loop.tests
            self._steps_since = _WITHOUT_END
        super().on_train_batch_end(batch, logs)

    def _has_ended(self) -> bool:
        return False  # its last backup stays: a run with more epochs goes on from it


def _way(
    settings: Training,
    run: config.Run,
    make: Callable[[keras.Model, Source], Rounds],
    *,
    is_of_workers: bool = False,
    downlink: str | None = "same",
) -> Way:
    """Parties through their server where there is one, else the workers of one Horovod job."""
    if run.uplink is None and int(os.environ.get(WORKERS_VARIABLE, "1")) == 1:
        raise ConfigError(
            f"The mode {settings.mode} is for several workers: `tf-hips run`, `tf-hips party "
            "--server`; one by itself trains with --mode local. Received: one worker"
        )
    strategy: PartyStrategy
    if run.uplink is None:
        check_has_server(settings, run)
        strategy = ring_of(settings, run)
    else:
        strategy = parties_of(settings, run, downlink)

    def made(model: keras.Model, source: Source) -> Rounds:
        try:
            return make(model, source)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"The mode {settings.mode}: {error}") from error

    level = WORKER if run.uplink is None or is_of_workers else PARTY
    with strategy.scope():
        return Way(strategy, local_optimizer(settings), made, level)


def _outer(settings: Training, strategy: PartyStrategy, default: str) -> str | None:
    """The rule of the outer step: what was asked for, the server's own, or the mode's."""
    rule = strategy.rule
    if settings.local.outer is None and rule is not None and rule.gives_steps:
        return None
    return settings.local.outer or default


def _steps_of_own_pass(way: Way, source: Source, batch_size: int) -> int:
    """Steps in which a worker, or where workers keep step their party, sees its own rows once."""
    rows = [source.num_rows]
    if way.level == PARTY:
        rows = primitives.gather_objects(source.num_rows, "rows of the workers of this party")
    return max(1, sum(rows) // (len(rows) * batch_size))
