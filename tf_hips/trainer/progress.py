# SPDX-License-Identifier: Apache-2.0
"""What a trainer says while it trains: a bar or lines, events, and trees as the seeds write them.

An interval is what lies between two tests: a pass through the data, or `eval_duration` steps.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tf_hips import log
from tf_hips.callbacks.peers import Peers
from tf_hips.report import trees
from tf_hips.strategies import hooks
from tf_hips.trainer import resuming

_ACCURACY = "accuracy"


class StopAt(keras.callbacks.Callback):
    """Ends training after a number of steps, on all workers at the same."""

    def __init__(self, num_steps: int) -> None:
        """Counts the optimizer's steps, those of a run that is taken up again included."""
        super().__init__()
        self._num_steps = num_steps

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model and who trains it."""
        super().set_model(model)
        self._peers = Peers(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks whether it was the last."""
        del batch, logs
        if self._peers.steps_made(self.model.optimizer) >= self._num_steps:
            self.model.stop_training = True


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the lines and logs of a run are about.

    Attributes:
        num_steps: of the whole run, of this worker; where workers make different numbers of steps,
            those of all.
        steps_of_pass: in which all rows are seen once.
        batch_size: samples of a step of one worker.
        workers: how many train, over all parties.
        samples_of_step: of all workers, in the time of a step of this one.
        learning_rate: for `net.meta`.
        tree: HOST/DEVICE folder of trees, or None.
        is_first: whether this worker speaks for the run.
        begin_s: when a run that is taken up began, seconds since 1970; None: it begins now.
        batches: of a step of this process; more than one where it plays several workers.
    """

    num_steps: int
    steps_of_pass: int
    batch_size: int
    workers: int
    samples_of_step: float
    learning_rate: float
    tree: Path | None
    is_first: bool
    begin_s: float | None = None
    batches: int = 1


class Progress(keras.callbacks.Callback):
    """One event, one line and, if asked for, one file of a tree for each interval."""

    def __init__(
        self,
        plan: Plan,
        write_event: Callable[..., None],
        rounds_s: Callable[[], float] | None,
        *,
        is_own: bool = False,
    ) -> None:
        """Begins to count when `fit` does.

        Args:
            plan: what the run is.
            write_event: of the strategy or of a log of this process's own.
            rounds_s: seconds that rounds with other parties have taken so far, on rank 0; None:
                there are no others.
            is_own: whether every worker knows these itself.
        """
        super().__init__()
        self._plan = plan
        self._write_event = write_event
        self._rounds_s = rounds_s
        self._is_own = is_own
        self._bar: Any = None
        self._number = 0
        self._files: tuple[int, float] | None = None  # of the tree, before the first epoch here

    def set_model(self, model: keras.Model) -> None:
        """Remembers the model and who trains it."""
        super().set_model(model)
        self._peers = Peers(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock and, on a terminal, the bar."""
        del logs
        self._begin = time.monotonic()
        self._files = None
        self._begin_s = time.time() if self._plan.begin_s is None else self._plan.begin_s
        if self._plan.is_first and sys.stdout.isatty():
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._task = self._bar.add_task("", total=self._plan.num_steps)
            self._bar.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an interval."""
        del logs
        self._number = epoch + 1
        self._step_before = self._peers.steps_made(self.model.optimizer)
        if self._plan.tree is not None:
            self._number = self._count_files(self._plan.tree, epoch)
        self._all_before = self.steps_of_all()
        self._rounds_before = self._rounds_s() if self._rounds_s is not None else 0.0
        self._evaluation_s: float | None = None
        self._interval = self._end_of_steps = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Moves the bar."""
        del logs
        self._end_of_steps = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done(self._step_before + batch + 1))

    def on_test_begin(self, logs: Any = None) -> None:
        """Begins a test."""
        del logs
        self._test = time.monotonic()

    def on_test_end(self, logs: Any = None) -> None:
        """Ends a test."""
        del logs
        self._evaluation_s = time.monotonic() - self._test

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tells what the interval came to."""
        logs = dict(logs or {})
        step = self._peers.steps_made(self.model.optimizer)
        seconds = self._end_of_steps - self._interval
        steps = step - self._step_before
        rounds_s: float | None = None
        if self._rounds_s is not None:
            rounds_s = float(self._rounds_s() - self._rounds_before)
            if not self._is_own:
                # The others of a party wait for its rank 0 while that waits for other parties.
                rounds_s = float(self._peers.gather(rounds_s)[0])
        accuracy = logs.get(f"val_{_ACCURACY}")
        values = {
            "loss": _finite(logs.get("loss")),
            "test_loss": _finite(logs.get("val_loss")),
            "test_accuracy": _finite(accuracy),
        }
        self._write_event(
            "epoch",
            epoch=epoch + 1,
            step=step,
            steps=steps,
            samples=steps * self._plan.batches * self._plan.batch_size,
            seconds=seconds,
            rounds_s=rounds_s,
            evaluation_s=self._evaluation_s,
            **values,
        )
        if self._plan.tree is not None:
            # The format has a number there in any case; what is waited for inside a party is not
            # measured.
            waited_s = rounds_s or 0.0
            self._write_tree(self._plan.tree, step, steps, seconds, waited_s, accuracy)
        if self._plan.is_first:
            self._say(step, steps, seconds, values)

    def on_train_end(self, logs: Any = None) -> None:
        """Takes the bar away."""
        del logs
        self.end()

    def end(self) -> None:
        """Takes the bar away, also when training failed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def steps_of_all(self) -> int | None:
        """Steps of all workers, where they make different numbers of them; else None."""
        return None

    def _done(self, step: int) -> int:
        """What of `num_steps` is done at a step of this worker."""
        of_all = self.steps_of_all()
        return step if of_all is None else min(of_all, self._plan.num_steps)

    def _say(self, step: int, steps: int, seconds: float, values: dict[str, float | None]) -> None:
        of_all = self.steps_of_all()
        if of_all is None:
            shown = [f"step {step}/{self._plan.num_steps}"]
            done, samples = float(step), steps * self._plan.samples_of_step
        else:
            shown = [f"steps of all {of_all}/{self._plan.num_steps}  here {step}"]
            done = of_all / self._plan.workers
            samples = float((of_all - (self._all_before or 0)) * self._plan.batch_size)
        shown += [
            f"pass {done / self._plan.steps_of_pass:.2f}",
            *(
                f"{name.replace('_', ' ')} {value:.4f}" if value is not None else f"{name} nan"
                for name, value in values.items()
                if value is not None or name == "loss"
            ),
        ]
        if samples and seconds > 0:
            shown.append(f"{samples / seconds:.0f} samples/s")
        text = "  ".join(shown)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done(step))
            self._bar.console.print(text, highlight=False)
        else:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def _count_files(self, folder: Path, epoch: int) -> int:
        """Number of the interval that begins: it and the clock go on behind the files there."""
        if self._files is None:
            # Of weights alone it is not known which interval they were in.
            made = epoch if self._plan.begin_s is None else None
            try:
                found = trees.go_on(folder, made if self._step_before else 0)
            except OSError as error:
                found = 0, 0.0
                log.warning("What is in %s cannot be gone on with: %s", folder, error)
            self._files, self._epoch = found, epoch
        return self._files[0] + 1 + epoch - self._epoch

    def _write_tree(
        self, folder: Path, step: int, steps: int, seconds: float, rounds_s: float, accuracy: Any
    ) -> None:
        before_s = 0.0 if self._files is None else self._files[1]
        total_s = before_s + time.monotonic() - self._begin
        is_told = accuracy is not None and self._peers.rank == 0
        try:
            trees.write_iteration(
                folder,
                self._number,
                computing_s=max(0.0, seconds - rounds_s),
                aggregation_s=rounds_s,
                evaluation_s=self._evaluation_s,
                num_samples=steps * self._plan.batches * self._plan.batch_size,
                total_s=total_s,
                accuracy=float(accuracy) if is_told else None,
            )
            if is_told:
                # Before what says that they are there. Every party has some of its own.
                with hooks.local():
                    resuming.save(self.model, folder.parent)
                trees.write_meta(
                    folder.parent,
                    iterations=step,
                    accuracy=float(accuracy),
                    learning_rate=self._plan.learning_rate,
                    batch_size=self._plan.batch_size,
                    begin_s=self._begin_s,
                )
        except OSError as error:
            log.warning("The log of interval %d is not written: %s", self._number, error)


def _finite(value: Any) -> float | None:
    """A number for JSON, which knows no NaN."""
    if value is None or not math.isfinite(float(value)):
        return None
    return float(value)
