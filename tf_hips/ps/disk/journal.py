# SPDX-License-Identifier: Apache-2.0
"""A run on disk: a folder that one process holds, a journal that grows, snapshots that bound it.

    DIR/RUN/lock               held by the server that serves the run
    DIR/RUN/snapshot-000007    the state when journal 7 began; not there if the run began with it
    DIR/RUN/journal-000007     what was accepted since

`append` only puts a record in a queue. One thread writes what has queued up, syncs it, and says so:
records that come while it syncs share the next sync. A snapshot begins with `rotate`: from there on
records go to a new journal. The new snapshot counts from the moment it has its name; until then the
older one and both journals are the state.

Knows bytes and kinds of records, and no session.
"""

import contextlib
import fcntl
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tf_hips import log
from tf_hips.errors import ConfigError, StateError
from tf_hips.ps.disk.file_format import RECORD, Facts, Header, Reader, to_mark, to_record
from tf_hips.ps.transport.wire import Buffer

COMPLETE = 255  # the kind of a snapshot's last record: how many stand before it

_COUNT = struct.Struct("<Q")
_NAME = re.compile(r"(journal|snapshot|results)-([0-9]{6,})")
_MAX_PIECES = 512  # of one writev; Linux takes 1024
_BLOCK_BYTES = 1 << 20
_ROOM_BYTES = 1 << 20  # without which nothing is begun or goes on


class Folder:
    """The files of one run; locked while open."""

    def __init__(self, base: str | Path, facts: Facts) -> None:
        """Makes the folder `base`/`facts.run`, for this user alone, and locks it.

        Raises:
            ConfigError: it cannot be made or locked, or a running server holds it.
        """
        self.path = Path(base) / facts.run
        self.facts = facts
        self._has_warned = False
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
            for parent in (self.path.parent, self.path.parent.parent):
                sync_folder(parent)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"`state` must be a folder that this user can write to. Received: {base} "
                f"({error.strerror})"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if not isinstance(error, BlockingIOError):  # as of Lustre that is mounted without them
                raise ConfigError(
                    f"`state` must be a folder on a file system that has locks (`flock`). "
                    f"Received: {base} ({error.strerror})"
                ) from error
            raise ConfigError(
                f"`state` must be a folder that no running server uses for run `{facts.run}`. "
                f"Received: {base}, which another process has locked"
            ) from error

    def close(self) -> None:
        """Gives up the lock."""
        os.close(self._lock)

    def file(self, what: str, number: int) -> Path:
        """The path of a `journal`, a `snapshot` or `results`."""
        return self.path / f"{what}-{number:06d}"

    def numbers(self, what: str) -> list[int]:
        """The numbers of the files of a kind, as of `file`, that are there, in order."""
        names = [_NAME.fullmatch(path.name) for path in self.path.iterdir()]
        return sorted(int(name[2]) for name in names if name and name[1] == what)

    def last(self) -> int:
        """The greatest number in use, or 0."""
        return max([0, *self.numbers("journal"), *self.numbers("snapshot")])

    def make(self, number: int, *, is_first: bool = False) -> tuple[int, Header]:
        """Makes a journal, durable before it has its name; its descriptor and header."""
        header = Header(self.facts, is_first)
        path = self.file("journal", number)
        descriptor = self.make_unnamed(path)
        try:
            write(descriptor, [header.to_bytes()])
            os.fsync(descriptor)
            self.name(path)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                self.remove_unnamed(path)
            raise
        return descriptor, header

    def make_unnamed(self, path: Path) -> int:
        """A new file that `name` will call `path`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        return os.open(path.with_name(f".{path.name}"), flags, 0o600)

    def remove_unnamed(self, path: Path) -> None:
        """Deletes the file that `name` would have called `path`."""
        path.with_name(f".{path.name}").unlink(missing_ok=True)

    def name(self, path: Path) -> None:
        """Gives the file its name, durably."""
        path.with_name(f".{path.name}").rename(path)
        self.sync()

    def sync(self) -> None:
        """Makes names and deletions durable."""
        sync_folder(self.path)

    def try_room(self) -> None:
        """Looks whether the disk takes anything at all.

        Raises:
            OSError: it does not.
        """
        path = self.path / "room"
        descriptor = self.make_unnamed(path)
        try:
            write(descriptor, [bytes(_ROOM_BYTES)])
            os.fsync(descriptor)  # some file systems look for the blocks only then
        finally:
            os.close(descriptor)
            self.remove_unnamed(path)

    def remove_before(self, number: int) -> None:
        """Deletes what a state that begins with `number` does not need.

        What cannot be deleted counts no more, is told once, and is tried again the next time.

        Raises:
            OSError: names cannot be made durable.
        """
        kinds = ("journal", "snapshot")
        old = [self.file(what, one) for what in kinds for one in self.numbers(what) if one < number]
        used = [f".{what}-{number:06d}" for what in kinds]
        old += [path for path in self.path.glob(".*-*") if path.name not in used]
        for path in old:
            self.delete(path)
        self.sync()

    def delete(self, path: Path) -> None:
        """Deletes a file that nobody needs, as far as it can be.

        The first one that stays is told: such a folder grows until the disk is full.
        """
        try:
            path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "%s is not needed any more and cannot be deleted (%s). Further ones of run %s "
                    "are not told.",
                    path,
                    error.strerror or error,
                    self.facts.run,
                )


class Recovery:
    """The records that a folder holds, in order."""

    def __init__(self, folder: Folder) -> None:
        """Looks for where the state begins.

        Raises:
            StateError: there are files, and none to begin with.
        """
        self.num_records = 0
        self.num_bytes = 0
        self.cut_bytes = 0
        self.place = ""  # file and byte of the newest record
        self._folder = folder
        self._end = self._marked = 0
        self._header: Header | None = None
        journals = folder.numbers("journal")
        snapshots = folder.numbers("snapshot")
        self.is_empty = not journals and not snapshots
        self._first = 0 if self.is_empty else self._find_first(journals, snapshots)
        self._journals = [number for number in journals if number >= self._first]
        self._has_snapshot = self._first in snapshots

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Pairs of kind and payload: of the snapshot, then of the journals.

        Raises:
            StateError: a file is damaged, missing, or belongs to another run or server.
        """
        if self._has_snapshot:
            yield from self._snapshot()
        for number in self._journals:
            with contextlib.closing(self._open("journal", number)) as reader:
                yield from self._counted(reader)
                if reader.torn_bytes and number != self._journals[-1]:
                    raise reader.damaged("a record is missing before a newer journal", reader.end)
                self.cut_bytes, self._end = reader.torn_bytes, reader.end
                self._marked = reader.marked
                self._header = reader.header

    def resume(self) -> "Journal":
        """The journal, after all records were read: without its torn tail, and durable.

        Raises:
            OSError: it cannot be written to.
        """
        assert self._header is not None, "records() comes first"  # noqa: S101
        number = self._journals[-1]
        path = self._folder.file("journal", number)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            if self.cut_bytes:
                os.ftruncate(descriptor, self._end)
            # A process that was killed may have written what it had not synced. And what a sync
            # that failed has not taken to the disk is read from memory, but no later sync takes it
            # there unless it is written again.
            _write_again(path, self._marked, self._end)
            os.fsync(descriptor)
            self._folder.remove_before(self._first)
        except BaseException:
            os.close(descriptor)
            raise
        return Journal(self._folder, number, descriptor, self._header, self._end)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the snapshot, or 0."""
        path = self._folder.file("snapshot", self._first)
        return path.stat().st_size if self._has_snapshot else 0

    def _find_first(self, journals: list[int], snapshots: list[int]) -> int:
        for number in sorted({*journals, *snapshots}, reverse=True):
            if number in snapshots:
                break
            reader = self._open("journal", number)
            reader.close()
            if reader.header.is_first:
                break
        else:
            raise StateError(
                f"{self._folder.path} must hold the beginning of a run or a snapshot. Received: "
                f"journals {journals}. Nothing was changed."
            )
        expected = list(range(number, max([*journals, number]) + 1))
        if [one for one in journals if one >= number] != expected:
            raise StateError(
                f"{self._folder.path} must hold the journals {expected}. Received: {journals}. "
                "Nothing was changed."
            )
        return number

    def _open(self, what: str, number: int) -> Reader:
        reader = Reader(self._folder.file(what, number))
        wanted, found = self._folder.facts, reader.header.facts
        for name in Facts.__dataclass_fields__:
            if getattr(found, name) != getattr(wanted, name):
                reader.close()
                raise StateError(
                    f"{reader.path} must be of a server with {name}={getattr(wanted, name)}, as "
                    f"this one. Received: {name}={getattr(found, name)}. Nothing was changed; "
                    "give the new run another name or folder."
                )
        return reader

    def _counted(self, reader: Reader) -> Iterator[tuple[int, bytes]]:
        for kind, payload in reader.records():
            self.num_records += 1
            self.num_bytes += RECORD.size + len(payload)
            self.place = f"{reader.path}, byte {reader.end}"
            yield kind, payload

    def _snapshot(self) -> Iterator[tuple[int, bytes]]:
        with contextlib.closing(self._open("snapshot", self._first)) as reader:
            count, is_complete = 0, False
            for kind, payload in self._counted(reader):
                if kind == COMPLETE:
                    is_complete = payload == _COUNT.pack(count)
                    continue
                count += 1
                yield kind, payload
            # It was whole and durable before it had its name.
            if reader.torn_bytes or not is_complete:
                raise reader.damaged("a snapshot must be whole", reader.end)


class Journal:
    """Takes records, and makes them durable in the background. Thread-safe."""

    def __init__(
        self, folder: Folder, number: int, descriptor: int, header: Header, size: int
    ) -> None:
        """A journal that goes on after byte `size` of its file; `start` makes it write."""
        self.failure: str | None = None
        self._folder = folder
        self._number = number  # of the file that the thread writes
        self._descriptor = descriptor
        self._header = header
        self._size = size  # as written
        self._lock = threading.Condition()
        self._queue: list[tuple[int, Sequence[Buffer]] | None] = []  # None: a new file
        self._position = 0
        self._durable = 0
        self._next = number  # of the file that the next record goes to
        self._grown = size
        self._is_closing = False
        self._on_durable: Callable[[], None] = lambda: None
        self._on_failure: Callable[[str], None] = lambda text: None
        self._thread = threading.Thread(target=self._run, name="tf_hips-journal", daemon=True)

    @classmethod
    def begin(cls, folder: Folder) -> "Journal":
        """A journal in which a run begins; what was there before is deleted.

        Raises:
            OSError: it cannot be written.
        """
        number = folder.last() + 1
        descriptor, header = folder.make(number, is_first=True)
        # The new name is durable already, and what is half deleted is no state to go back to.
        with contextlib.suppress(OSError):
            folder.remove_before(number)
        return cls(folder, number, descriptor, header, len(header.to_bytes()))

    def start(self, on_durable: Callable[[], None], on_failure: Callable[[str], None]) -> None:
        """Begins to write.

        Args:
            on_durable: called after each sync.
            on_failure: called once with what failed, when nothing more can be kept.
        """
        self._on_durable, self._on_failure = on_durable, on_failure
        self._thread.start()

    @property
    def durable(self) -> int:
        """The position up to which records are on disk."""
        return self._durable

    @property
    def grown_bytes(self) -> int:
        """Bytes of the file that the next record goes to, those that wait included."""
        return self._grown

    def append(self, kind: int, pieces: Sequence[Buffer]) -> int:
        """Queues a record; its position, to compare with `durable`. The pieces must not change."""
        with self._lock:
            self._position += 1
            if self.failure is None:
                self._queue.append((kind, pieces))
                self._grown += RECORD.size + sum(len(piece) for piece in pieces)
                self._lock.notify_all()
            return self._position

    def rotate(self) -> tuple[int, int]:
        """Lets later records go to a new file; its number, and the position when it is there."""
        with self._lock:
            self._position += 1
            self._next += 1
            self._grown = 0
            if self.failure is None:
                self._queue.append(None)
                self._lock.notify_all()
            return self._next, self._position

    def settle(self, position: int | None = None) -> bool:
        """Waits until `position`, or all that was appended before, is durable.

        Returns:
            Whether it is; not so after a failure.
        """
        with self._lock:
            wanted = self._position if position is None else position
            self._lock.wait_for(lambda: self._durable >= wanted or self.failure is not None)
            return self._durable >= wanted

    def fail(self, what: str, error: Exception) -> None:
        """Gives up: nothing more is durable. What is on disk stays as it is."""
        text = error.strerror if isinstance(error, OSError) else None
        text = text or f"{type(error).__name__}: {error}"
        self.give_up(f"The server cannot keep the run: {what}: {text}.")

    def give_up(self, reason: str) -> None:
        """Keeps nothing more, for a reason; the first one stands. What is on disk is left alone."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = reason
            self._queue.clear()
            self._lock.notify_all()
        self._on_failure(self.failure)

    def close(self) -> None:
        """Writes what waits, and closes the file."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            self.failure = self.failure or "The server has closed its journal."
            self._lock.notify_all()
        os.close(self._descriptor)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                batch, self._queue, position = self._queue, [], self._position
            path = self._folder.file("journal", self._number)
            try:
                self._write(batch)
            except Exception as error:  # noqa: BLE001 - all who wait for this thread hear of it
                self.fail(f"{getattr(error, 'filename', None) or path}", error)
                continue
            batch = []  # packets that are on disk and merged need no memory
            with self._lock:
                self._durable = position
                self._lock.notify_all()
            self._on_durable()
            try:
                self._size += write(self._descriptor, [to_mark(self._header.mark, self._size)])
            except OSError as error:
                self.fail(f"{self._folder.file('journal', self._number)}", error)

    def _write(self, batch: Sequence[tuple[int, Sequence[Buffer]] | None]) -> None:
        pieces: list[Buffer] = []
        for entry in batch:
            if entry is None:
                self._sync(pieces)
                pieces = []
                descriptor, header = self._folder.make(self._number + 1)
                os.close(self._descriptor)
                self._descriptor, self._header = descriptor, header
                self._number += 1
                self._size = len(header.to_bytes())
            else:
                pieces += (to_record(*entry), *entry[1])
        self._sync(pieces)

    def _sync(self, pieces: Sequence[Buffer]) -> None:
        self._size += write(self._descriptor, pieces)
        os.fdatasync(self._descriptor)


class SnapshotWriter:
    """Writes the state with which journal `number` begins."""

    def __init__(self, folder: Folder, number: int) -> None:
        """Makes the file, without its name.

        Raises:
            OSError: it cannot be made.
        """
        self.path = folder.file("snapshot", number)
        self.num_bytes = 0
        self._folder = folder
        self._number = number
        self._count = 0
        self._is_finished = False
        self._descriptor = folder.make_unnamed(self.path)
        try:
            self.num_bytes += write(self._descriptor, [Header(folder.facts).to_bytes()])
        except BaseException:
            self.close()
            raise

    def add(self, kind: int, pieces: Sequence[Buffer]) -> None:
        """Writes one record."""
        self.num_bytes += write(self._descriptor, [to_record(kind, pieces), *pieces])
        self._count += 1

    def finish(self) -> None:
        """Makes the snapshot the state, and deletes what is older. Its journal must be durable."""
        self.add(COMPLETE, [_COUNT.pack(self._count)])
        os.fsync(self._descriptor)
        self._folder.name(self.path)
        self._is_finished = True
        self._folder.remove_before(self._number)

    def close(self) -> None:
        """Closes the file; one that was not finished is deleted, for the room that it takes."""
        os.close(self._descriptor)
        if not self._is_finished:
            with contextlib.suppress(OSError):
                self._folder.remove_unnamed(self.path)


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable.

    Raises:
        OSError: they cannot be.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        # Who may pass through a folder need not be allowed to read it, as in `/home` of mode 711.
        os.sync()
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_again(path: Path, start: int, end: int) -> None:
    """Writes bytes `start` to `end` of a file once more, as they are and where they are."""
    descriptor = os.open(path, os.O_RDWR)  # in a file that is appended to they would come twice
    try:
        while block := os.pread(descriptor, min(_BLOCK_BYTES, end - start), start):
            start += os.pwrite(descriptor, block, start)
    finally:
        os.close(descriptor)


def write(descriptor: int, pieces: Sequence[Buffer]) -> int:
    """Writes all of `pieces`, views of any type; how many bytes they have."""
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    total = 0
    for start in range(0, len(views), _MAX_PIECES):
        left = views[start : start + _MAX_PIECES]
        while left:
            done = os.writev(descriptor, left)
            total += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]
    return total
