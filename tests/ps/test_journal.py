# SPDX-License-Identifier: Apache-2.0
"""Journals without a session: cut at any byte, flipped at any byte, full disks, two servers."""

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tf_hips.errors import ConfigError, StateError
from tf_hips.ps.disk import file_format
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.file_format import VERSION, Facts, Reader
from tf_hips.ps.disk.journal import Folder, Journal, Recovery, SnapshotWriter

FACTS = Facts("job", ("a", "b"), "error_feedback(onebit)", None)
PAYLOADS = [b"", b"one", bytes(range(256)) * 3, b"\0" * 40, b"last"]
Kept = list[tuple[int, bytes]]
KEPT: Kept = [(kind + 1, payload) for kind, payload in enumerate(PAYLOADS)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path, FACTS)
    yield made
    made.close()


def started(journal: Journal) -> Journal:
    journal.start(lambda: None, lambda text: None)
    return journal


def fill(journal: Journal, kept: Kept = KEPT) -> None:
    """One sync, and one mark, for each record."""
    for kind, payload in kept:
        journal.append(kind, [payload[:2], payload[2:]])
        assert journal.settle()


def content(folder: Folder) -> Kept:
    return list(Recovery(folder).records())


def whole(folder: Folder) -> tuple[bytes, list[int]]:
    """The file of a journal with KEPT, and where each record and its mark end."""
    journal = started(Journal.begin(folder))
    path = folder.file("journal", 1)
    ends = [path.stat().st_size]
    for kind, payload in KEPT:
        journal.append(kind, [payload])
        assert journal.settle()
        ends.append(ends[-1] + file_format.RECORD.size + len(payload))
        ends.append(ends[-1] + len(file_format.to_mark(bytes(16), 0)))
    journal.close()
    data = path.read_bytes()
    assert len(data) == ends[-1]
    return data, ends


def test_what_was_settled_is_read_again(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    journal.close()
    assert content(folder) == KEPT
    recovery = Recovery(folder)
    list(recovery.records())
    again = started(recovery.resume())
    fill(again)
    again.close()
    assert content(folder) == KEPT + KEPT
    assert (recovery.num_records, recovery.cut_bytes) == (len(KEPT), 0)


def test_files_are_private(tmp_path: Path) -> None:
    (tmp_path / FACTS.run).mkdir(mode=0o755)  # one that was there is made so
    folder = Folder(tmp_path, FACTS)
    journal = started(Journal.begin(folder))
    fill(journal)
    journal.close()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    assert modes == {"lock": 0o600, "journal-000001": 0o600}
    folder.close()


@pytest.mark.heavy
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_journal_that_is_cut_anywhere_has_the_records_before(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content_, ends = _written(tmp_path_factory)
    cut = data.draw(st.integers(ends[0], ends[-1]))
    with _Copy(tmp_path_factory, content_[:cut]) as copy:
        recovery = Recovery(copy)
        expected = [one for one, end in zip(KEPT, ends[1::2], strict=True) if end <= cut]
        assert list(recovery.records()) == expected
        assert recovery.cut_bytes == cut - max(end for end in ends if end <= cut)
        again = started(recovery.resume())
        fill(again, [(9, b"after")])
        again.close()
        assert content(copy) == [*expected, (9, b"after")]


@pytest.mark.heavy
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_flipped_bit_is_refused_and_never_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content_, ends = _written(tmp_path_factory)
    place = data.draw(st.integers(0, ends[-1] - 1))
    broken = bytearray(content_)
    broken[place] ^= 1 << data.draw(st.integers(0, 7))
    with _Copy(tmp_path_factory, bytes(broken)) as copy:
        if place >= ends[-2]:  # the last mark: it promises what is all there
            assert content(copy) == KEPT
            return
        with pytest.raises(StateError, match=r"journal-000001"):
            content(copy)
        assert copy.file("journal", 1).read_bytes() == broken


_WRITTEN: list[tuple[bytes, list[int]]] = []


def _written(factory: pytest.TempPathFactory) -> tuple[bytes, list[int]]:
    if not _WRITTEN:
        made = Folder(factory.mktemp("whole"), FACTS)
        _WRITTEN.append(whole(made))
        made.close()
    return _WRITTEN[0]


class _Copy:
    """A folder with one journal of these bytes, for as long as it is open."""

    def __init__(self, factory: pytest.TempPathFactory, data: bytes) -> None:
        self._base = factory.mktemp("copy")
        self._folder = Folder(self._base, FACTS)
        self._folder.file("journal", 1).write_bytes(data)

    def __enter__(self) -> Folder:
        return self._folder

    def __exit__(self, *_: object) -> None:
        self._folder.close()
        shutil.rmtree(self._base)


def test_a_packet_cannot_look_like_a_mark(folder: Folder) -> None:
    """A torn tail stays one, whatever a child has sent behind it."""
    journal = started(Journal.begin(folder))
    fill(journal, [(1, b"first")])
    journal.close()
    path = folder.file("journal", 1)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\xff" * 7 + b"torn" + file_format.to_mark(bytes(16), size + 11))
    assert content(folder) == [(1, b"first")]
    # With the right 16 bytes it would be one.
    reader = Reader(path)
    reader.close()
    with path.open("ab") as file:
        file.write(file_format.to_mark(reader.header.mark, path.stat().st_size))
    with pytest.raises(StateError, match=rf"journal-000001 is damaged at byte {size}: "):
        content(folder)


def test_a_mark_is_found_across_blocks(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = started(Journal.begin(folder))
    fill(journal, [(1, bytes(1000))] * 5)
    journal.close()
    path = folder.file("journal", 1)
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    for size in (16, 17, 61, 1000):
        monkeypatch.setattr(file_format, "_BLOCK_BYTES", size)
        with pytest.raises(StateError, match="damaged"):
            content(folder)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (Facts("job", ("a", "c"), FACTS.compression, None), r"parties=\('a', 'c'\), as this one"),
        (Facts("job", ("a", "b"), None, None), r"compression=None.* Received: compression=error_"),
        (Facts("job", ("a", "b"), FACTS.compression, "fp32"), "downlink=fp32"),
    ],
)
def test_a_state_of_other_terms_is_refused(tmp_path: Path, facts: Facts, text: str) -> None:
    first = Folder(tmp_path, FACTS)
    Journal.begin(first).close()
    first.close()
    other = Folder(tmp_path, facts)
    with pytest.raises(StateError, match=text):
        content(other)
    other.close()
    again = Folder(tmp_path, FACTS)
    assert content(again) == []
    again.close()


def test_a_file_of_another_run_is_refused(tmp_path: Path, folder: Folder) -> None:
    Journal.begin(folder).close()
    other = Folder(tmp_path, Facts("other", *list(vars(FACTS).values())[1:]))
    shutil.copy(folder.file("journal", 1), other.file("journal", 1))
    with pytest.raises(StateError, match=r"run=other, as this one\. Received: run=job\."):
        content(other)
    other.close()


def test_other_files_and_formats_are_refused(folder: Folder) -> None:
    Journal.begin(folder).close()
    path = folder.file("journal", 1)
    data = path.read_bytes()
    path.write_bytes(data[:8] + (VERSION - 1).to_bytes(4, "little") + data[12:])
    text = rf"must have format {VERSION}\. Received: format {VERSION - 1}"
    with pytest.raises(StateError, match=text):
        content(folder)
    path.write_bytes(b"#!/bin/sh\nexit\n     ")
    with pytest.raises(StateError, match="must be a file of a server's state"):
        content(folder)
    path.write_bytes(b"")
    with pytest.raises(StateError, match="must be a file of a server's state"):
        content(folder)


def test_a_folder_has_one_server(tmp_path: Path, folder: Folder) -> None:
    with pytest.raises(ConfigError, match="which another process has locked"):
        Folder(tmp_path, FACTS)
    Folder(tmp_path, Facts("other", ("a",), None, None)).close()
    folder.close()
    Folder(tmp_path, FACTS).close()
    folder._lock = os.open(os.devnull, os.O_RDONLY)  # the fixture closes it


def test_a_file_system_without_locks_is_no_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(journals.fcntl, "flock", unknown)
    with pytest.raises(ConfigError, match=r"that has locks .*\(Function not implemented\)"):
        Folder(tmp_path, FACTS)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`state` must be a folder that this user can write to"):
        Folder(tmp_path / "file", FACTS)


def test_folders_around_it_need_not_be_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `/home` of mode 711. Root, who may run this test, reads that; so it is told to us here."""
    opened, synced = os.open, []

    def guarded(path: Path, flags: int, mode: int = 0o777) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(journals.os, "open", guarded)
    monkeypatch.setattr(journals.os, "sync", lambda: synced.append("all"))
    folder = Folder(tmp_path / "state", FACTS)
    journal = started(Journal.begin(folder))
    fill(journal)
    journal.close()
    assert content(folder) == KEPT
    assert synced == ["all"]  # names that are new there are durable, too
    folder.close()


def test_records_wait_for_the_disk_and_share_a_sync(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_go, count = threading.Event(), threading.Event(), []
    sync = os.fdatasync

    def slow(descriptor: int) -> None:
        count.append(descriptor)
        entered.set()
        assert may_go.wait(30)
        sync(descriptor)

    monkeypatch.setattr(journals.os, "fdatasync", slow)
    journal = started(Journal.begin(folder))
    journal.append(1, [b"first"])
    assert entered.wait(30)
    for number in range(100):
        journal.append(2, [b"%d" % number])
    assert journal.durable == 0
    may_go.set()
    assert journal.settle()
    assert (journal.durable, len(count)) == (101, 2)
    journal.close()
    assert len(content(folder)) == 101


def test_a_full_disk_is_told_and_what_was_durable_stays(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    journal = Journal.begin(folder)
    journal.start(lambda: None, told.append)
    fill(journal)
    writev = os.writev

    def full(descriptor: int, pieces: list[memoryview]) -> int:
        if sum(map(len, pieces)) > 100:
            writev(descriptor, [b"half a record"])
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(descriptor, pieces)

    monkeypatch.setattr(journals.os, "writev", full)
    journal.append(1, [bytes(1000)])
    assert not journal.settle()
    path = folder.file("journal", 1)
    assert told == [f"The server cannot keep the run: {path}: No space left on device."]
    journal.append(1, [b"too late"])
    assert not journal.settle()
    journal.close()
    assert told == told[:1]
    recovery = Recovery(folder)
    assert list(recovery.records()) == KEPT
    assert recovery.cut_bytes == len(b"half a record")


def test_a_run_begins_though_the_one_before_it_cannot_be_deleted(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    writer = snapshot(folder, journal, [(20, b"state")])
    writer.finish()
    writer.close()
    journal.close()
    deleted: list[str] = []
    unlink = Path.unlink

    def broken(path: Path) -> None:
        """The disk fails when half of it is gone."""
        if deleted:
            raise OSError(errno.EIO, "Input/output error")
        deleted.append(path.name)
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", broken)
        again = started(Journal.begin(folder))
    assert deleted == ["journal-000002"]
    fill(again, [(1, b"new")])
    again.close()
    recovery = Recovery(folder)
    assert list(recovery.records()) == [(1, b"new")]
    recovery.resume().close()
    assert (folder.numbers("journal"), folder.numbers("snapshot")) == ([3], [])


def test_what_can_never_be_deleted_ends_no_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at its first snapshot nor when its server starts again."""
    journal = started(Journal.begin(folder))
    fill(journal)
    journal.close()
    unlink = Path.unlink

    def refused(path: Path, **more: bool) -> None:
        if path.name == "journal-000001":
            raise OSError(errno.EPERM, "Operation not permitted")
        unlink(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        journal = started(Journal.begin(folder))
        fill(journal, [(1, b"new")])
        writer = snapshot(folder, journal, [(20, b"state")])
        writer.finish()
        writer.close()
        journal.close()
        recovery = Recovery(folder)
        assert list(recovery.records()) == [(20, b"state")]
        recovery.resume().close()
    assert (folder.numbers("journal"), folder.numbers("snapshot")) == ([1, 3], [3])
    recovery.resume().close()
    assert folder.numbers("journal") == [3]


def test_any_failure_of_the_writer_is_told(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    journal = Journal.begin(folder)
    journal.start(lambda: None, told.append)

    def no_memory(kind: int, pieces: object) -> bytes:
        raise MemoryError("none left")

    monkeypatch.setattr(journals, "to_record", no_memory)
    journal.append(1, [b"one"])
    assert not journal.settle()
    assert "MemoryError: none left" in (journal.failure or "")
    journal.close()
    assert told == [journal.failure]


def test_what_failed_leaves_no_files_and_no_descriptors(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = started(Journal.begin(folder))
    before = sorted(path.name for path in folder.path.iterdir())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))

    def full(descriptor: int, pieces: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(journals, "write", full)
        for make in (lambda: SnapshotWriter(folder, 2), lambda: folder.make(2)):
            with pytest.raises(OSError, match="No space"):
                make()
    writer = SnapshotWriter(folder, 2)
    writer.close()
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    journal.close()


def test_a_sync_that_fails_is_not_tried_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second fdatasync may succeed and have dropped the data."""
    count: list[int] = []

    def broken(descriptor: int) -> None:
        count.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(journals.os, "fdatasync", broken)
    journal = started(Journal.begin(folder))
    for _ in range(3):
        journal.append(1, [b"x"])
        assert not journal.settle()
    assert len(count) == 1
    assert "Input/output error" in (journal.failure or "")
    journal.close()


def snapshot(folder: Folder, journal: Journal, kept: Kept) -> SnapshotWriter:
    """A snapshot that holds `kept`, not finished."""
    number, position = journal.rotate()
    writer = SnapshotWriter(folder, number)
    for kind, payload in kept:
        writer.add(kind, [payload])
    assert journal.settle(position)
    return writer


def test_a_snapshot_replaces_what_is_older(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    writer = snapshot(folder, journal, [(20, b"state")])
    fill(journal, [(1, b"new")])
    # It has no name yet: both journals are the state.
    assert content(folder) == [*KEPT, (1, b"new")]
    writer.finish()
    writer.close()
    assert content(folder) == [(20, b"state"), (1, b"new")]
    assert folder.numbers("journal") == folder.numbers("snapshot") == [2]
    journal.close()
    recovery = Recovery(folder)
    assert list(recovery.records()) == [(20, b"state"), (1, b"new")]
    assert recovery.snapshot_bytes == writer.num_bytes
    Journal.begin(folder).close()
    assert content(folder) == []
    assert (folder.numbers("journal"), folder.numbers("snapshot")) == ([3], [])


def test_a_snapshot_that_was_cut_short_does_not_count(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    snapshot(folder, journal, [(20, b"state")]).close()
    fill(journal, [(1, b"new")])
    journal.close()
    recovery = Recovery(folder)
    assert list(recovery.records()) == [*KEPT, (1, b"new")]
    resumed = started(recovery.resume())
    assert not list(folder.path.glob(".snapshot*"))
    fill(resumed, [(2, b"newer")])
    resumed.close()
    assert content(folder) == [*KEPT, (1, b"new"), (2, b"newer")]


def test_older_files_that_were_not_deleted_yet_do_not_count(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    old = folder.file("journal", 1).read_bytes()
    writer = snapshot(folder, journal, [(20, b"state")])
    writer.finish()
    writer.close()
    journal.close()
    folder.file("journal", 1).write_bytes(old)
    recovery = Recovery(folder)
    assert list(recovery.records()) == [(20, b"state")]
    recovery.resume().close()
    assert folder.numbers("journal") == [2]


def test_files_that_are_missing_or_damaged_are_refused(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    for _ in range(2):
        journal.rotate()
        fill(journal)
    journal.close()
    first, second = (folder.file("journal", number) for number in (1, 2))
    data = second.read_bytes()
    second.unlink()
    with pytest.raises(StateError, match=r"must hold the journals \[1, 2, 3\]\. Received: \[1, 3"):
        content(folder)
    second.write_bytes(data[:-100])
    with pytest.raises(StateError, match="a record is missing before a newer journal"):
        content(folder)
    second.write_bytes(data)
    assert content(folder) == KEPT * 3
    first.unlink()
    with pytest.raises(StateError, match="must hold the beginning of a run or a snapshot"):
        content(folder)


def test_a_damaged_snapshot_is_refused(folder: Folder) -> None:
    journal = started(Journal.begin(folder))
    writer = snapshot(folder, journal, KEPT)
    writer.finish()
    writer.close()
    journal.close()
    path = folder.file("snapshot", 2)
    data = path.read_bytes()
    assert content(folder) == KEPT
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(StateError, match="snapshot-000002"):
            content(folder)
    for cut in (len(data) - 1, len(data) - 17, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(StateError, match="snapshot-000002"):
            content(folder)


def test_what_cannot_be_deleted_is_told_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2, 3):
        started(Journal.begin(folder)).close()
        assert folder.numbers("journal") == [number]
    unlink = Path.unlink

    def refuse(path: Path) -> None:
        if path.name.startswith("journal-"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        for _ in range(2):
            started(Journal.begin(folder)).close()
    told = [one.getMessage() for one in caplog.records]
    assert told == [
        f"{folder.file('journal', 3)} is not needed any more and cannot be deleted (Operation not "
        "permitted). Further ones of run job are not told."
    ]
    started(Journal.begin(folder)).close()  # which can, and has all that was left
    assert folder.numbers("journal") == [6]
