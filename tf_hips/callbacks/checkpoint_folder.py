# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints by step, which one process writes and another follows.

    model_step_50/model.weights.h5     weights, as Keras writes them
    model_step_50/checkpoint.json      the step, the epoch, what the model is, size and SHA-256 of
                                       the weights
    training_ended.json                the last step, why training ended if it failed, and the run

Invariant: a folder gets its name after everything inside is on the disk. So a checkpoint is whole
or not there, and one that is not whole was damaged on its way here. It imports no TensorFlow.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tf_hips import config, log
from tf_hips.callbacks.folder import sync
from tf_hips.errors import ConfigError

WEIGHTS = "model.weights.h5"
_META = "checkpoint.json"
_ENDED = "training_ended.json"
_NAME = re.compile(r"model_step_(\d+)")
_WRITING = ".writing-"
_BLOCK_BYTES = 1 << 20


class DamagedError(Exception):
    """A checkpoint is not what was written; says what differs."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        step: training steps that made it.
        epoch: the epoch of `fit` that made the last of them, from 1; 0: none of this `fit`.
        facts: what the model is, as `StepCheckpoint` was told.
        weights: the file.
    """

    step: int
    epoch: int
    facts: Mapping[str, Any]
    weights: Path


class CheckpointFolder:
    """The checkpoints under one directory."""

    def __init__(self, directory: str | Path) -> None:
        """Looks at `directory`, which need not exist."""
        self.path = Path(directory)
        self._has_warned = False

    def steps(self) -> list[int]:
        """Steps of all checkpoints, in their order; none where the directory is not there."""
        try:
            names = [entry.name for entry in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = (_NAME.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def place(self, step: int) -> Path:
        """Where a checkpoint is."""
        return self.path / f"model_step_{step}"

    def begin(self, step: int, run: str | None = None) -> None:
        """Makes the directory ready for a run whose next checkpoints come after `step`.

        A run that goes on from a backup may find later ones, which it made before it was stopped
        and makes again.

        Args:
            step: where the run is; 0: at its beginning.
            run: its identity, if it has one that is also that of its earlier attempts: what
                checkpoints call `began`, or else `run`.

        Raises:
            ConfigError: another run has written here, or the directory cannot be written.
        """
        there = self.steps()
        if step == 0 and there and not (run is not None and self._began(there[-1]) == run):
            raise ConfigError(
                "The checkpoints of a run that begins need a folder without those of another. "
                f"Received: {self.path}, with step {there[-1]}"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for entry in self.path.iterdir():
                if not entry.name.startswith((_WRITING, f".{_ENDED}.")):
                    continue
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:  # of one that was killed while it wrote it
                    entry.unlink()
            (self.path / _ENDED).unlink(missing_ok=True)
            probe = self.path / f"{_WRITING}probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"Checkpoints cannot be written to {self.path}: {error.strerror or error}"
            ) from error

    def runs(self) -> set[str]:
        """The runs that have written here, of those that have a name."""
        found = {self._facts(step).get("run") for step in self.steps()}
        return {run for run in found if isinstance(run, str)}

    def _began(self, step: int) -> Any:
        facts = self._facts(step)
        return facts.get("began", facts.get("run"))

    def _facts(self, step: int) -> Mapping[str, Any]:
        try:
            told = json.loads((self.place(step) / _META).read_text(encoding="utf-8"))
            return dict(told["facts"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(
        self, step: int, epoch: int, facts: Mapping[str, Any], save: Callable[[Path], None]
    ) -> None:
        """Writes a checkpoint; one of that step that is there is replaced.

        Args:
            step: training steps so far.
            epoch: as `Checkpoint` has it.
            facts: JSON values.
            save: writes the weights to the path it gets.

        Raises:
            OSError: the disk is full, or the like; nothing is left behind.
        """
        draft = self.path / f"{_WRITING}model_step_{step}"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            draft.mkdir()
            save(draft / WEIGHTS)
            size, digest = _digest(draft / WEIGHTS)
            meta = {
                "step": step,
                "epoch": epoch,
                "facts": dict(facts),
                "weights_bytes": size,
                "weights_sha256": digest,
                "time_us": time.time_ns() // 1000,
            }
            (draft / _META).write_text(json.dumps(meta) + "\n", encoding="utf-8")
            for name in (WEIGHTS, _META):
                sync(draft / name)
            sync(draft)
            shutil.rmtree(self.place(step), ignore_errors=True)
            draft.rename(self.place(step))
            sync(self.path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def prune(self, keep: int) -> None:
        """Deletes all but the last `keep` checkpoints, as it can; what stays is told once."""
        for step in self.steps()[:-keep]:
            # Under its old name it would be seen without its weights.
            gone = self.path / f"{_WRITING}deleted_{step}"
            try:
                self.place(step).rename(gone)
                shutil.rmtree(gone)
            except FileNotFoundError:
                pass  # whoever follows the folder may delete it, too
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning(
                        "The checkpoint of step %d, or what is left of it, cannot be deleted (%s: "
                        "%s). Further ones of %s are not told.",
                        step, error.strerror or error, error.filename, self.path,
                    )  # fmt: skip

    def read(self, step: int) -> Checkpoint:
        """A checkpoint, whose weights were compared with what was written.

        Raises:
            FileNotFoundError: it is not there, or was deleted meanwhile.
            DamagedError: it is not whole.
        """
        place = self.place(step)
        text = (place / _META).read_text(encoding="utf-8", errors="replace")
        try:
            meta = json.loads(text)
            known = meta["step"], meta["weights_bytes"], meta["weights_sha256"]
            checkpoint = Checkpoint(
                int(meta["step"]), int(meta["epoch"]), dict(meta["facts"]), place / WEIGHTS
            )
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{place / _META} is not whole") from error
        if known != (step, *_digest(place / WEIGHTS)):
            raise DamagedError(f"{place / WEIGHTS} is not what was written")
        return checkpoint

    def end(self, step: int, reason: str | None, run: str | None = None) -> None:
        """Says to who follows that no more checkpoints come from `run`, if that has a name.

        Raises:
            OSError: the disk is full, or the like; nothing is left behind.
        """
        told = {"last_step": step, "reason": reason, "run": run}
        config.write_whole(json.dumps(told) + "\n", self.path / _ENDED)

    def ended(self, run: str | None = None) -> Mapping[str, Any] | None:
        """What `end` said; None while training goes on.

        Args:
            run: the one that is followed: what another has left there does not count.
        """
        try:
            found: Mapping[str, Any] = json.loads((self.path / _ENDED).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        is_other = run is not None and found.get("run") not in (None, run)
        return None if is_other else found


def _digest(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
