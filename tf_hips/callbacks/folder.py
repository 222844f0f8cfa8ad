# SPDX-License-Identifier: Apache-2.0
"""A folder of backups: each is a folder of its own, there as a whole or not at all.

    00000007-epoch-2-step-40/   a whole backup: the next step is step 40 of epoch 2
    .writing-00000008-.../      one that is being written, or was when everything stopped
    .deleting-00000006-.../     one that is being deleted
    began.json                  which run began here, where its trainer says so

A backup is whole when it has its name, which a rename gives it after everything inside is on the
disk. Ranks write into it together; rank 0 names, lists and deletes.
"""

import collections
import contextlib
import dataclasses
import json
import operator
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.errors import ConfigError

_NAME = re.compile(r"(\d{8,})-epoch-(\d+)-step-(\d+)")
_WRITING, _DELETING = ".writing-", ".deleting-"
_PROBE = ".probe-"
_BEGAN = "began.json"
# A remote file system may show a new file late.
_PATIENCE_S = 10.0
_over: collections.Counter[Path] = collections.Counter()
_kept: set[Path] = set()  # left full by a run that is over, until this process has left its server


@dataclasses.dataclass(frozen=True, order=True)
class Backup:
    """A whole backup, or the name of one.

    Attributes:
        number: backups of one folder are numbered as they are written, from 1.
        epoch: the epoch that goes on with it.
        step: the next step of that epoch; 0 is its beginning.
    """

    number: int
    epoch: int
    step: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.number:08d}-epoch-{self.epoch}-step-{self.step}"


class BackupFolder:
    """The backups under one directory."""

    def __init__(self, directory: str | Path) -> None:
        """Looks at `directory`, which need not exist."""
        self.path = Path(directory)

    @property
    def num_over(self) -> int:
        """How many runs have left it empty in this process."""
        return _over[self.path.resolve()]

    def note_over(self) -> None:
        """A run that used it is over, and leaves nothing."""
        _over[self.path.resolve()] += 1

    def keep(self) -> None:
        """What is in it leads only a process that comes back to the end of a run that is over."""
        _kept.add(self.path.resolve())

    def clear_kept(self) -> None:
        """Deletes what `keep` has kept, before another run of this process uses the folder."""
        if self.path.resolve() in _kept:
            self.clear()

    def began(self, run: str, facts: dict[str, Any]) -> str:
        """The name with which a run began that is not over; `run` where it begins now.

        Args:
            run: its name in this session.
            facts: JSON values; with others it is another run.

        Raises:
            OSError: the directory cannot be written.
        """
        path, known = self.path / _BEGAN, {}
        with contextlib.suppress(FileNotFoundError, ConfigError):
            # Each by its facts: one that is refused here later takes nothing from the others.
            known = read_json(path)
        told = json.dumps(facts, sort_keys=True)
        if isinstance(known.get(told), str):
            return str(known[told])
        self.path.mkdir(parents=True, exist_ok=True)
        config.write_whole(json.dumps({**known, told: run}), path)
        return run

    def write_probe(self) -> str:
        """Makes the directory and a file in it; returns the file's name."""
        self.path.mkdir(parents=True, exist_ok=True)
        name = f"{_PROBE}{uuid.uuid4().hex}"
        (self.path / name).touch()
        return name

    def find_probe(self, name: str) -> None:
        """Looks for what another rank wrote.

        Raises:
            FileNotFoundError: it is not there.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.path / name).exists():
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    "`directory` must be on a file system that all ranks share. Received: "
                    f"{self.path}, where a rank does not see what rank 0 wrote"
                )
            time.sleep(0.1)

    def drop_probe(self, name: str) -> None:
        """Deletes the file that `write_probe` made."""
        (self.path / name).unlink(missing_ok=True)

    def backups(self) -> list[Backup]:
        """All whole backups, oldest first."""
        if not self.path.is_dir():
            return []
        found = [named(entry.name) for entry in self.path.iterdir()]
        return sorted(backup for backup in found if backup is not None)

    def place(self, backup: Backup) -> Path:
        """Where a whole backup is."""
        return self.path / backup.name

    def newest(self) -> Path:
        """Where the newest one is.

        Raises:
            FileNotFoundError: there is none.
        """
        backups = self.backups()
        if not backups:
            raise FileNotFoundError("no backup was made yet")
        return self.place(backups[-1])

    def start(self, backup: Backup) -> Path:
        """Makes the folder to write a backup into; an unfinished one of that name is dropped."""
        place = self.draft(backup)
        if place.exists():
            shutil.rmtree(place)
        place.mkdir(parents=True)
        return place

    def draft(self, backup: Backup) -> Path:
        """Where a backup is while it is written."""
        return self.path / f"{_WRITING}{backup.name}"

    def drop(self, backup: Backup) -> None:
        """Deletes what was written into `draft`, as far as it can be."""
        shutil.rmtree(self.draft(backup), ignore_errors=True)

    def finish(self, backup: Backup) -> None:
        """Makes whole what was written into `draft`."""
        draft = self.draft(backup)
        for entry in draft.iterdir():
            sync(entry)
        sync(draft)
        draft.rename(self.place(backup))
        sync(self.path)

    def prune(self, keep: int, protected: Backup | None = None) -> None:
        """Deletes all but the newest `keep` backups, and what a stopped process left behind.

        Args:
            keep: how many stay, at least 1.
            protected: one that stays, too.
        """
        for backup in self.backups()[:-keep]:
            if backup != protected:
                self.place(backup).rename(self.path / f"{_DELETING}{backup.name}")
        self._sweep()

    def clear(self) -> None:
        """Deletes all backups, and the directory if nothing else is in it."""
        for backup in self.backups():
            self.place(backup).rename(self.path / f"{_DELETING}{backup.name}")
        self._sweep()
        # And what a process that was killed has left of it.
        for path in (self.path / _BEGAN, *self.path.glob(f".{_BEGAN}.*")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
        _kept.discard(self.path.resolve())

    def _sweep(self) -> None:
        if not self.path.is_dir():
            return
        for entry in self.path.iterdir():
            for prefix in (_WRITING, _DELETING):
                if entry.name.startswith(prefix) and _NAME.fullmatch(
                    entry.name.removeprefix(prefix)
                ):
                    shutil.rmtree(entry)


def named(name: str) -> Backup | None:
    """The backup whose folder has that name; None: it is no backup's."""
    match = _NAME.fullmatch(name)
    return Backup(*map(int, match.groups())) if match else None


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 1 on, Python's or NumPy's."""
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        return False


def sync(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """What one of a backup's files says.

    Raises:
        ConfigError: it is damaged.
    """
    text = path.read_bytes()
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise TypeError
    except (ValueError, TypeError) as error:
        raise damaged(path, error) from error
    return found


def damaged(path: Path, why: Exception | str) -> ConfigError:
    """What is raised where a file of a backup cannot be read, or is not what was written."""
    text = why if isinstance(why, str) else type(why).__name__
    return ConfigError(
        "A backup must be whole; move it elsewhere to go on from the one before. Received: "
        f"{path}, damaged ({text})"
    )
