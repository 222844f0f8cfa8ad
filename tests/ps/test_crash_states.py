# SPDX-License-Identifier: Apache-2.0
"""Whatever a crash leaves of a run's folder is a state that was promised, and has what was told.

`Disk` stands between a journal and its folder. It knows what processes see, and what of it would be
there after a loss of power: of a file what was synced, and more or less of what was not; of names
and deletions those before the last sync of the folder, and some of those behind it. Before and
after each operation all that can be left is restored. Then once more for each operation, which
fails; where it is a sync, what it was about never gets to the disk unless it is written again.
"""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ps.test_journal import FACTS
from tf_hips.ps.disk.journal import Folder, Journal, Recovery, SnapshotWriter

pytestmark = pytest.mark.heavy  # a store is broken off at each of its operations

STATE = 20  # the kind of a snapshot's record: how many records it stands for
Image = dict[str, bytes]  # files of a folder, by name
Names = dict[str, "File"]


class File:
    """One file: what is seen of it, what is held for sure, and what was written since."""

    def __init__(self) -> None:
        self.seen = self.held = b""
        self.dirty: list[tuple[int, bytes | None]] = []  # None: it was cut off there

    def write(self, offset: int, data: bytes | None) -> None:
        self.seen = _written(self.seen, offset, data)
        self.dirty.append((offset, data))

    def sync(self) -> None:
        for change in self.dirty:
            self.held = _written(self.held, *change)
        self.dirty = []

    def left(self) -> list[bytes]:
        """What may be there: nothing that is not held, part of it, or the last of it alone."""
        found = [self.held]
        for offset, data in self.dirty:
            if data:
                found.append(_written(found[-1], offset, data[: len(data) // 2]))
            found.append(_written(found[-1 - bool(data)], offset, data))
        if self.dirty:
            found.append(_written(self.held, *self.dirty[-1]))
        return found


def _written(before: bytes, offset: int, data: bytes | None) -> bytes:
    if data is None:
        return before[:offset]
    return before[:offset].ljust(offset, b"\0") + data + before[offset + len(data) :]


class Disk:
    """The disk below one folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.fails_at = -1  # which operation
        self.count = 0
        self.look: Callable[[], None] = lambda: None  # called around each operation
        self._folder = folder
        self._turn = threading.Lock()  # a journal writes while a snapshot is being written
        self._files: dict[int, File] = {}  # by inode
        self._held: Names = {}
        self._changes: list[Callable[[Names], Any]] = []  # of names, since the last sync
        self._real = {name: getattr(os, name) for name in ("open", "writev", "pwrite", "ftruncate")}
        for name in self._real:
            patch.setattr(os, name, getattr(self, f"_{name}"))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)
        rename, unlink = Path.rename, Path.unlink
        patch.setattr(Path, "rename", lambda one, other: self._rename(rename, one, other))
        patch.setattr(Path, "unlink", lambda one, **more: self._unlink(unlink, one, **more))

    def least(self) -> Iterator[Image]:
        """What is left by a kill, and by a loss of power that leaves nothing but what is held."""
        yield {name: file.seen for name, file in _named(self._held, self._changes).items()}
        yield {name: file.held for name, file in self._held.items()}

    def images(self) -> Iterator[Image]:
        """What may be left by a kill or a loss of power."""
        yield from self.least()
        orders = [self._changes[:end] for end in range(len(self._changes) + 1)]
        for names in [_named(self._held, one) for one in [*orders, *([c] for c in self._changes)]]:
            for parts in itertools.product(*(file.left() for file in names.values())):
                yield dict(zip(names, parts, strict=True))

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        with self._turn:
            self.look()
            self.count += 1
            if self.count == self.fails_at:
                raise OSError(errno.EIO, "Input/output error")
            yield
            self.look()

    def _name(self, path: object) -> str | None:
        """The name of a file of a run; None: it is another one."""
        is_ours = isinstance(path, Path) and path.parent == self._folder
        return path.name if is_ours and "-" in path.name else None

    def _open(self, path: Any, flags: int, *more: Any) -> int:
        name = self._name(path)
        if name is None or not flags & os.O_CREAT:
            return int(self._real["open"](path, flags, *more))
        with self._operation():
            descriptor = int(self._real["open"](path, flags, *more))
            file = self._files[os.fstat(descriptor).st_ino] = File()
            self._changes.append(lambda names: names.__setitem__(name, file))
            return descriptor

    def _writev(self, descriptor: int, pieces: list[memoryview]) -> int:
        with self._operation():
            file = self._files[os.fstat(descriptor).st_ino]
            file.write(len(file.seen), b"".join(pieces))
            return int(self._real["writev"](descriptor, pieces))

    def _pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        with self._operation():
            self._files[os.fstat(descriptor).st_ino].write(offset, data)
            return int(self._real["pwrite"](descriptor, data, offset))

    def _ftruncate(self, descriptor: int, size: int) -> None:
        with self._operation():
            self._files[os.fstat(descriptor).st_ino].write(size, None)
            self._real["ftruncate"](descriptor, size)

    def _sync(self, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == self._folder:
            with self._operation():
                self._held, self._changes = _named(self._held, self._changes), []
            return
        file = self._files.get(os.fstat(descriptor).st_ino)
        if file is None:  # another folder
            return
        try:
            with self._operation():
                file.sync()
        except OSError:
            file.dirty = []  # Linux takes these bytes for written, and does not try again
            raise

    def _rename(self, rename: Any, path: Path, other: Path) -> None:
        def change(names: Names) -> None:
            names.pop(path.name, None)
            names[other.name] = file

        with self._operation():
            file = _named(self._held, self._changes)[path.name]
            rename(path, other)
            self._changes.append(change)

    def _unlink(self, unlink: Any, path: Path, **more: Any) -> None:
        with self._operation():
            if path.exists():
                self._files.pop(path.stat().st_ino, None)  # which another file may get
            unlink(path, **more)
            self._changes.append(lambda names: names.pop(path.name, None))


def _named(held: Names, changes: list[Callable[[Names], Any]]) -> Names:
    names = dict(held)
    for change in changes:
        change(names)
    return names


class Run:
    """Runs in one folder, one after the other, and how much of the newest was told."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.number = 0
        self.is_new = False  # whether all know that the one before it is over
        self.told = self.accepted = 0
        self._positions: list[int] = []
        self._before = 0  # records that were there when this journal was taken up
        self._journal: Journal | None = None

    def begin(self) -> None:
        self.number, self.is_new = self.number + 1, False
        self._begin()

    def _begin(self) -> None:
        self.told = self.accepted = 0
        self._use(Journal.begin(self._folder))
        self.is_new = True

    def resume(self) -> None:
        """As a server that is started again, or goes on when its disk has failed."""
        recovery = Recovery(self._folder)
        number, count = expanded(list(recovery.records()), self.number)
        if recovery.is_empty or number != self.number:
            assert not self.is_new
            self._begin()
            return
        assert self.told <= count
        self.accepted = count
        self._use(recovery.resume())
        self.told = count  # a server that goes on tells what it has found

    def _use(self, journal: Journal) -> None:
        self._journal, self._positions, self._before = journal, [], self.accepted
        journal.start(self._note, lambda text: None)

    def _note(self) -> None:
        durable = self._journal.durable if self._journal else 0
        self.told = self._before + sum(position <= durable for position in self._positions)

    def add(self, count: int = 1) -> None:
        """Records that may share a sync."""
        assert self._journal is not None
        for _ in range(count):
            self.accepted += 1
            data = b"%d.%d" % (self.number, self.accepted)
            self._positions.append(self._journal.append(1, [data]))
        self._settle()

    def snapshot(self) -> None:
        """As `JournalRecorder` makes one; another record comes meanwhile."""
        journal = self._journal
        assert journal is not None
        number, position = journal.rotate()
        count, writer = self.accepted, None
        try:
            writer = SnapshotWriter(self._folder, number)
            writer.add(STATE, [b"%d.%d" % (self.number, count)])
            if journal.settle(position):
                self.add()
                writer.finish()
        except OSError as error:
            journal.fail("snapshot", error)
        finally:
            if writer is not None:
                writer.close()
        self._settle()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _settle(self) -> None:
        assert self._journal is not None
        if not self._journal.settle():
            raise OSError(errno.EIO, self._journal.failure)


def expanded(records: list[tuple[int, bytes]], newest: int) -> tuple[int, int]:
    """Which run `records` are of, and how many of it; a snapshot stands for those before it."""
    number, count = newest, 0
    for kind, data in records:
        number, place = map(int, data.split(b"."))
        assert kind == STATE or place == count + 1, records
        count = place
    return number, count


def live(run: Run) -> None:
    """What happens in a folder: all operations that there are."""
    run.begin()
    run.add()
    run.add(3)
    run.snapshot()
    run.add(2)
    run.close()
    run.resume()
    run.add()
    run.snapshot()
    run.add()
    run.close()
    run.begin()  # the one before it is over
    run.add(2)
    run.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "first", FACTS)
    yield made
    made.close()


class Looker:
    """Restores what may be left, and says what is wrong with it."""

    def __init__(self, base: Path, disk: Disk, run: Run) -> None:
        self.num_images = 0
        self._disk, self._run = disk, run
        self._folder = Folder(base, FACTS)
        self._seen: set[tuple[object, ...]] = set()
        self.wrong: list[str] = []

    def look(self, images: Iterator[Image] | None = None) -> None:
        run = self._run
        for image in images or self._disk.images():
            key = (*sorted(image.items()), run.number, run.is_new, run.told)
            if key not in self._seen:
                self._seen.add(key)
                self.num_images += 1
                self._restore(image)

    def _restore(self, image: Image) -> None:
        for path in self._folder.path.glob("*-*"):
            os.remove(path)  # noqa: PTH107 - the disk stands before Path's
        for name, data in image.items():
            (self._folder.path / name).write_bytes(data)
        run = self._run
        try:
            recovery = Recovery(self._folder)
            if recovery.is_empty:
                number, count = run.number, 0
            else:
                number, count = expanded(list(recovery.records()), run.number)
            if number == run.number:
                assert run.told <= count <= run.accepted
            else:  # it was over, and the new one has not begun for anybody
                assert not run.is_new
        except Exception as error:  # noqa: BLE001 - of another thread, too
            self.wrong.append(f"{type(error).__name__}: {error} at {sorted(image)}")


def test_whatever_a_crash_leaves_is_a_state_that_was_promised(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, run = Disk(folder.path, monkeypatch), Run(folder)
    looker = Looker(tmp_path / "second", disk, run)
    disk.look = looker.look
    live(run)
    assert not looker.wrong
    assert looker.num_images > 200


def test_an_operation_that_fails_loses_nothing_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on, and then its machine loses power."""
    for fails_at in itertools.count(1):
        folder = Folder(tmp_path / str(fails_at), FACTS)
        with contextlib.closing(folder), monkeypatch.context() as patch:
            disk, run = Disk(folder.path, patch), Run(folder)
            disk.fails_at = fails_at
            try:
                live(run)
            except OSError:
                run.close()
                looker = Looker(tmp_path / f"{fails_at}-left", disk, run)
                looker.look(disk.least())
                disk.look = lambda one=looker, disk=disk: one.look(disk.least())  # type: ignore[misc]
                run.resume()
                run.add(2)
                run.snapshot()
                run.add()
                run.close()
                assert not looker.wrong, f"operation {fails_at}"
            if disk.count < fails_at:
                break
    assert fails_at > 60
