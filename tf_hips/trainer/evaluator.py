# SPDX-License-Identifier: Apache-2.0
"""Evaluates checkpoints of a training run, in order, while it goes on.

One line of JSON for each: `step`, `epoch`, `loss`, `top1`, `top5`, `rows`, `seconds`, `time_us`; or
`step` and `skipped`, why it was not evaluated; and the `folder` and the `run` of the checkpoint. A
run of the evaluator that is started again goes on behind the last line of this folder and run.
"""

import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import keras

from tf_hips import config, log, models
from tf_hips.callbacks.checkpoint_folder import Checkpoint, CheckpointFolder, DamagedError
from tf_hips.data import sets
from tf_hips.errors import ConfigError, PeerError
from tf_hips.trainer import sources
from tf_hips.trainer.settings import Evaluation

OUTPUT = "evaluations.jsonl"
# A checkpoint that is copied to here by other means may be seen before it is whole.
_DAMAGED_FOR_S = 10.0
_TOP = 5


class Followed:
    """Checkpoints of a folder as they appear, in order."""

    def __init__(self, settings: Evaluation, after: int, run: str | None = None) -> None:
        """Begins behind step `after`; ends where `run` has, or if that is None whoever trains."""
        self.folder = CheckpointFolder(settings.model_dir)
        self._run = run
        self._settings = settings
        self._after = after
        self._pause = threading.Event()
        self._damaged: tuple[int, float] | None = None

    def __iter__(self) -> Iterator[tuple[int, Checkpoint | str]]:
        """Yields each due step with its checkpoint, or why there is none.

        Raises:
            PeerError: none came for `timeout_s` seconds.
        """
        waiting_since = time.monotonic()
        while True:
            # Read before the folder is: what was written before the end is then seen.
            ended = self.folder.ended(self._run)
            found = self._next()
            if found is not None:
                self._after = found[0]
                yield found
                waiting_since = time.monotonic()
                continue
            is_damaged = self._damaged is not None
            if (ended is not None or not self._settings.follow) and not is_damaged:
                return
            limit_s = self._settings.timeout_s
            if limit_s is not None and time.monotonic() - waiting_since > limit_s:
                raise PeerError(
                    f"Training must write checkpoints to {self._settings.model_dir}, or say that "
                    f"it has ended. Received: nothing for {limit_s:g} s"
                )
            self._pause.wait(self._settings.poll_s)

    def _next(self) -> tuple[int, Checkpoint | str] | None:
        """The first due step that is there; None while there is none, or it is not whole yet."""
        every = self._settings.eval_freq
        due = (
            step
            for step in self.folder.steps()
            if step > self._after and step // every > self._after // every
        )
        step = next(due, None)
        if step is None:
            self._damaged = None
            return None
        try:
            checkpoint = self.folder.read(step)
        except FileNotFoundError:
            if self.folder.place(step).exists():
                return self._wait_for(step, "a file of it is missing")
            self._damaged = None
            return step, "deleted"
        except (DamagedError, OSError) as error:
            return self._wait_for(step, str(error))
        self._damaged = None
        return step, checkpoint

    def _wait_for(self, step: int, why: str) -> tuple[int, str] | None:
        """Gives what is damaged some time to become whole."""
        now = time.monotonic()
        if self._damaged is None or self._damaged[0] != step:
            self._damaged = (step, now)
        if now - self._damaged[1] < _DAMAGED_FOR_S and self._settings.follow:
            return None
        self._damaged = None
        return step, f"damaged: {why}"


def run(settings: Evaluation) -> int:
    """Evaluates; returns how many checkpoints there were, skipped ones included.

    Raises:
        ConfigError: the folder, the network or the data set is not what it must be.
        PeerError: no checkpoint came in time.
    """
    folder = Path(settings.model_dir)
    if not folder.is_dir() and not settings.follow:
        raise ConfigError(f"`model_dir` must be a folder of checkpoints. Received: {folder}")
    if settings.output is None:
        folder.mkdir(parents=True, exist_ok=True)
    output = Path(settings.output) if settings.output is not None else folder / OUTPUT
    told, launched = config.current(), run_of_launcher()
    events = log.EventLog(
        settings.log_dir or told.log_dir, run=told.run, role="evaluator", site="local", rank=0
    )
    named: str | None = None  # the run whose checkpoints these are, if it has a name
    number = 0
    judge: _Judge | None = None
    try:
        lines = output.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    try:
        with lines:
            after = _last_step(lines, str(folder.resolve()), CheckpointFolder(folder).runs())
            for step, found in Followed(settings, after, launched):
                if isinstance(found, str):
                    values: Mapping[str, Any] = {"step": step, "skipped": found}
                else:
                    judge = judge or _Judge(settings, found)
                    values = judge.evaluate(found)
                if not number:
                    sys.stdout.write(f"{'step':>8} {'loss':>10} {'top-1':>8} {'top-5':>8}\n")
                if not isinstance(found, str):
                    named = found.facts.get("run")
                whose = {"folder": str(folder.resolve()), "run": named}
                lines.write(json.dumps({**values, **whose}) + "\n")
                lines.flush()
                events.write("evaluation", **values, run=named or told.run)
                sys.stdout.write(_row(values))
                sys.stdout.flush()
                number += 1
    finally:
        events.close()
    if not number:
        behind = f" after step {after}" if after else ""
        every = settings.eval_freq
        left = sum(step > after for step in CheckpointFolder(folder).steps())
        wide = f": `--eval-freq {every}` leaves out all of {left}" if left and every > 1 else ""
        sys.stdout.write(f"nothing to evaluate{behind}{wide}\n")
    ended = CheckpointFolder(settings.model_dir).ended(launched)
    if ended is not None and ended.get("reason"):
        sys.stdout.write(f"training failed after step {ended['last_step']}: {ended['reason']}\n")
    return number


def run_of_launcher() -> str | None:
    """The run whose launcher has started this process as its evaluator; None: nobody has."""
    if {config.CONFIG_VARIABLE, config.ROLE_VARIABLE} <= os.environ.keys():
        return config.current().run
    return None


class _Judge:
    """A model and the test rows of its data set."""

    def __init__(self, settings: Evaluation, first: Checkpoint) -> None:
        network = _same("network", settings.network, first, models.canonical)
        dataset = _same("dataset", settings.dataset, first, sets.canonical)
        size = settings.image_size or first.facts.get("image_size")
        data = sets.load(dataset, settings.data_dir, image_size=size)
        self._rows = len(data.test)
        self._test = sources.test_batches(data, settings.eval_batch_size)
        try:
            self._model = models.make(network, data.shape, data.classes)
        except ValueError as error:
            raise ConfigError(f"The data set {dataset} does not fit --network: {error}") from error
        self._what = f"{network} for {dataset}"
        top = min(_TOP, data.classes)
        self._model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="top1"),
                keras.metrics.SparseTopKCategoricalAccuracy(top, name="top5"),
            ],
        )

    def evaluate(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """What a line says."""
        begin = time.monotonic()
        try:
            with warnings.catch_warnings():
                # Keras warns where it finds no weights for a layer, and leaves it as it began.
                warnings.simplefilter("error", UserWarning)
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                self._model.load_weights(checkpoint.weights)
        except FileNotFoundError:
            return {"step": checkpoint.step, "skipped": "deleted"}
        except (OSError, ValueError, UserWarning) as error:
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"The checkpoints must be of {self._what}. Received: {checkpoint.weights.parent}, "
                f"of another model ({first})"
            ) from error
        result = self._model.evaluate(self._test, verbose=0, return_dict=True)
        values = {name: float(result[name]) for name in ("loss", "top1", "top5")}
        return {
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
            **{name: one if math.isfinite(one) else None for name, one in values.items()},
            "rows": self._rows,
            "seconds": time.monotonic() - begin,
            "time_us": time.time_ns() // 1000,
        }


def _same(name: str, given: str | None, checkpoint: Checkpoint, canonical: Any) -> str:
    """What the command line and the checkpoint say, if they agree.

    Raises:
        ConfigError: they do not, or both say nothing.
    """
    told = checkpoint.facts.get(name)
    if given is None and told is None:
        raise ConfigError(f"--{name} is missing; the checkpoints do not say it either")
    wanted = canonical(given if given is not None else told)
    if told is not None and wanted != canonical(told):
        raise ConfigError(
            f"`{name}` must be that of the checkpoints, {told}. Received: {name}={given}"
        )
    return str(wanted)


def _last_step(lines: IO[str], folder: str, runs: set[str]) -> int:
    """The last step that an earlier evaluator wrote; 0 if none did.

    Args:
        lines: of evaluations, perhaps of several folders and runs.
        folder: the checkpoints'.
        runs: that have written there; a line or a checkpoint may say none.
    """
    lines.seek(0)
    last = 0
    text = lines.read()
    for line in text.splitlines():
        try:
            told = json.loads(line)
            step, place, run = int(told["step"]), told.get("folder"), told.get("run")
        except (ValueError, KeyError, TypeError):
            continue  # the evaluator was killed while it wrote
        if place in (None, folder) and (run is None or run in runs):
            last = max(last, step)
    if text and not text.endswith("\n"):
        lines.write("\n")
    return last


def _row(values: Mapping[str, Any]) -> str:
    if "skipped" in values:
        return f"{values['step']:>8} skipped: {values['skipped']}\n"
    loss = "nan" if values["loss"] is None else f"{values['loss']:.4f}"
    top = (f"{values[name] or 0:>8.2%}" for name in ("top1", "top5"))
    return f"{values['step']:>8} {loss:>10} {' '.join(top)}\n"
