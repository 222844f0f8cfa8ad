# SPDX-License-Identifier: Apache-2.0
"""Backups of a trainer, whose errors are one line: a folder that is full, or of another run."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tf_hips import callbacks, config
from tf_hips.callbacks.folder import BackupFolder
from tf_hips.errors import ConfigError


def has_backup(directory: str | Path, told: config.Run) -> bool:
    """Whether a folder of backups has one for this process to take up.

    Args:
        directory: what `Backup` is given.
        told: what this process is told about its run.
    """
    return bool(_folder(directory, told).backups())


def began(directory: str | Path, told: config.Run, facts: dict[str, Any]) -> str:
    """The name with which a run began that goes on, perhaps from its first step.

    Args:
        directory: what `Backup` is given.
        told: what this process is told about its run.
        facts: what is trained.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        return _folder(directory, told).began(told.run, facts)
    except OSError as error:
        raise ConfigError(
            f"Backups cannot be written in {directory}: {error.strerror or error}"
        ) from error


def _folder(directory: str | Path, told: config.Run) -> BackupFolder:
    site = told.uplink.site if told.uplink is not None else ""
    return BackupFolder(Path(directory) / site)


class Backup(callbacks.BackupAndRestore):
    """`BackupAndRestore` that says what is wrong with its folder as a `ConfigError`.

    What was backed up before stays whole in any case.
    """

    def __init__(self, directory: str | Path, left: Callable[[], int], **options: Any) -> None:
        """Plans backups.

        Args:
            directory: where they are.
            left: how many steps are still to be made; the last may be in the middle of an epoch.
            options: of `BackupAndRestore`.
        """
        super().__init__(directory, **options)
        self._left = left

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the folder; takes no step where all were made before.

        Raises:
            ConfigError: more were made than this run has, so that its end is not theirs.
        """
        with self._in_one_line("read"):
            super().on_train_begin(logs)
        if self._resumed is None:
            return
        if self._left() < 0:
            raise ConfigError(
                "A run that goes on must have all the steps that were made. Received: "
                f"{-self._left()} more are backed up in {self._directory}; give more `--epochs` or "
                "`--max-steps`, or another folder"
            )
        if self._left() == 0:
            self.model._initial_epoch = self.params["epochs"]
            if self._peers.rank == 0:
                sys.stdout.write("all steps were made before\n")
                sys.stdout.flush()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Takes up a backup, if there is one."""
        with self._in_one_line("taken up"):
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, if that is due."""
        with self._in_one_line("written"):
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves, if that is due."""
        with self._in_one_line("written"):
            super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Saves what was stopped, or deletes what is over."""
        with self._in_one_line("written"):
            super().on_train_end(logs)

    def _has_ended(self) -> bool:
        return self._left() <= 0 or super()._has_ended()

    @contextlib.contextmanager
    def _in_one_line(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"Backups cannot be {what} in {self._directory}: {error.strerror or error}; those "
                "that were made before are whole"
            ) from error
        except ValueError as error:
            raise ConfigError(f"--backup-dir: {error}") from error
