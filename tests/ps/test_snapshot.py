# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a run: what they hold, what waits for them, what a full disk leaves of them."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ps.served import (
    FEEDBACK,
    MODEL,
    NOISE,
    PATIENCE_S,
    Served,
    rounds,
    undisturbed,
)
from tests.support.eventually import eventually
from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.disk import durable
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport import wire


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot at the beginning of every round."""
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)


def finished(served: Served) -> None:
    """Waits until no snapshot is being written."""
    writer = served.session._recorder._writer  # type: ignore[attr-defined]
    if writer is not None:
        writer.join(PATIENCE_S)
        assert not writer.is_alive()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("texts", [(FEEDBACK, FEEDBACK), ("fp32", NOISE)], ids=["onebit", "noise"])
def test_a_snapshot_is_the_state(tmp_path: Path, texts: tuple[str, str]) -> None:
    expected = undisturbed(5, texts)
    with Served(tmp_path, texts=texts) as first:
        first.join()
        first.agree()
        first.gather(0, 0, b"", wait=False)
        first.gather(0, 1, b"one", wait=True)
        first.gather(1, 1, b"more", wait=False)
        for number in range(4):
            first.begin(number)
            finished(first)
            first.deliver(rounds(number, number))
        first.killed(tmp_path / "merged")
        first.begin(4)
        first.session.fail(first.caller(1), "tired")
        finished(first)
        first.killed(tmp_path / "begun")
    files = sorted(path.name for path in (tmp_path / "begun/state/job").iterdir())
    assert files == ["journal-000005", "lock", "results-000001", "snapshot-000005"]
    with Served(tmp_path / "merged", texts=texts) as second:
        assert second.results(3) == expected[3]
        assert second.train(3, 5) == expected[3:]
        assert second.gather(1, 0, b"", wait=True) == [b"more"]
    with Served(tmp_path / "begun", texts=texts) as third:
        assert third.session._waiting.failures() == {1: "tired"}
        assert third.results(3) == expected[3]  # a slow child asks
        assert third.train(4, 5) == expected[4:]
    events = log.read_events(tmp_path / "events")
    written = [event for event in events if event["event"] == "snapshot"]
    assert [event["round"] for event in written] == [1, 2, 3, 4]
    assert all(event["bytes"] > 0 < event["duration_us"] for event in written)
    restored = log.read_events(tmp_path / "begun/events")[0]
    assert (restored["event"], restored["round"], restored["cut_bytes"]) == ("restored", 4, 0)


@pytest.mark.heavy
@pytest.mark.usefixtures("eager")
def test_a_kill_between_any_two_steps_of_a_snapshot_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each sync, name and deletion the folder is copied, as a kill would leave it."""
    copies: list[Path] = []
    lock = threading.RLock()

    def copying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with lock:
                copies.append(tmp_path / f"copy{len(copies)}")
                shutil.copytree(tmp_path / "first/state", copies[-1] / "state")
                return operation(*arguments)

        return run

    texts = (FEEDBACK, FEEDBACK)
    expected = undisturbed(5, texts)
    with Served(tmp_path / "first", texts=texts) as first:
        first.join()
        first.agree()
        assert first.train(0, 1) == expected[:2]
        finished(first)
        with monkeypatch.context() as patch:
            patch.setattr(journals.os, "fsync", copying(os.fsync))
            for name in ("rename", "unlink"):
                patch.setattr(Path, name, copying(getattr(Path, name)))
            for number in (2, 3):
                assert first.train(number, number) == expected[number : number + 1]
                finished(first)
    seen = {tuple(sorted(path.name for path in (one / "state/job").iterdir())) for one in copies}
    assert len(seen) >= 8
    for one in copies:
        with Served(one, texts=texts) as second:
            store = second.session.store
            assert store is not None
            oldest = min(store._rounds)
            assert oldest <= 3
            assert second.train(oldest, 5) == expected[oldest:]
            finished(second)
        # All but the state itself is gone.
        names = sorted(path.name for path in (one / "state/job").iterdir())
        kinds = ["journal", "lock", "results", "snapshot"]
        assert sorted({name.split("-")[0] for name in names}) == kinds
        assert sum(name.startswith(("journal", "snapshot")) for name in names) == 2


@pytest.mark.usefixtures("eager")
def test_merges_wait_for_a_snapshot_and_packets_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    add = journals.SnapshotWriter.add

    def slow(self: journals.SnapshotWriter, kind: int, pieces: list[wire.Buffer]) -> None:
        if kind == Kind.RESIDUAL:
            assert may_go.wait(30)
        add(self, kind, pieces)

    monkeypatch.setattr(journals.SnapshotWriter, "add", slow)
    with Served(tmp_path, texts=("fp32", NOISE)) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 0))
        first.deliver(rounds(1, 1))
        store = first.session.store
        assert store is not None
        assert store.delivered(1, 1) == set(range(len(MODEL.chunks)))
        assert store._rounds[1].num_merged == 0
        first.killed(tmp_path / "writing")
        may_go.set()
        expected = undisturbed(2, first.texts)
        assert first.results(1) == expected[1]
        finished(first)
        first.killed(tmp_path / "written")
    for name, snapshots in (("writing", 0), ("written", 1)):
        found = list((tmp_path / name / "state/job").glob("snapshot-*"))
        assert len(found) == snapshots
        with Served(tmp_path / name, texts=("fp32", NOISE)) as second:
            assert second.results(1) == expected[1]
            assert second.train(2, 2) == expected[2:]


@pytest.mark.heavy
def test_a_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 4000)
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        largest = 0
        for number in range(60):
            first.begin(number)
            finished(first)
            first.deliver(rounds(number, number))
            assert first.session._recorder.settle() is None
            files = (tmp_path / "state/job").glob("[js]*-*")
            largest = max(largest, sum(path.stat().st_size for path in files))
        snapshot = max(
            event["bytes"]
            for event in log.read_events(tmp_path / "events")
            if event["event"] == "snapshot"
        )
        # The journal before the snapshot, the one since, both snapshots.
        assert largest < 2 * max(4000, 4 * snapshot) + 3 * snapshot


def test_a_journal_grows_to_four_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model would be written anew after a few rounds; also by a server that is restored."""
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    sizes: list[tuple[int, int]] = []
    rotate = journals.Journal.rotate

    def rotating(self: journals.Journal) -> tuple[int, int]:
        sizes.append((self.grown_bytes, recorder._snapshot_bytes))
        return rotate(self)

    monkeypatch.setattr(journals.Journal, "rotate", rotating)
    with Served(tmp_path / "first") as first:
        recorder: Any = first.session._recorder
        first.join()
        first.agree()
        number = 0
        while len(sizes) < 3:
            assert number < 60
            first.begin(number)
            finished(first)
            first.deliver(rounds(number, number))
            number += 1
        first.killed(tmp_path / "second")
        written = recorder._snapshot_bytes
    assert sizes[0][1] == 0  # there was none
    for grown, snapshot in sizes[1:]:
        assert 0 < 4 * snapshot < grown
    with Served(tmp_path / "second") as second:
        assert second.session._recorder._snapshot_bytes == written  # type: ignore[attr-defined]


@pytest.mark.usefixtures("eager")
def test_older_journals_go_when_the_past_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that parties may come back to could be made again from them, and from nothing else."""
    seen: list[tuple[bool, int]] = []
    finish = journals.SnapshotWriter.finish
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        archive = first.session._state.archive

        def finishing(writer: journals.SnapshotWriter) -> None:
            past: Any = first.session.store.past  # type: ignore[union-attr]
            seen.append((past.has(first.session.store.round - 2), len(past._unsynced)))  # type: ignore[union-attr]
            finish(writer)

        def archive_for_a_snapshot() -> None:
            if threading.current_thread().name == "tf_hips-snapshot":
                archive()

        monkeypatch.setattr(journals.SnapshotWriter, "finish", finishing)
        monkeypatch.setattr(first.session._state, "archive", archive_for_a_snapshot)
        for number in range(4):
            first.begin(number)
            finished(first)
            first.deliver(rounds(number, number))
    assert seen == [(False, 0), (True, 0), (True, 0)]


@pytest.mark.usefixtures("eager")
def test_a_snapshot_that_is_written_buys_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merges wait for it, and calls for these: a large one may take longer than they wait."""
    moves: list[int] = []
    add = journals.SnapshotWriter.add

    def counting(self: journals.SnapshotWriter, kind: int, pieces: list[wire.Buffer]) -> None:
        moves.append(first.session.moves.count)
        add(self, kind, pieces)

    monkeypatch.setattr(journals.SnapshotWriter, "add", counting)
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 0))
        first.begin(1)
        finished(first)
    assert len(moves) > len(MODEL.chunks)
    assert moves == list(range(moves[0], moves[0] + len(moves)))


def full(descriptor: int, pieces: list[memoryview]) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_run_and_the_last_state_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        first.deliver(rounds(0, 0))
        first.killed(tmp_path / "before")
        with monkeypatch.context() as patch:
            patch.setattr(journals.os, "writev", full)
            first.deliver([(1, 0, 0)])
            reason = (
                f"The server cannot keep the run: {tmp_path}/state/job/journal-000001: "
                "No space left on device."
            )
            with pytest.raises(PeerError, match="No space left on device"):
                first.session.settle()
            eventually(lambda: first.session.is_over, PATIENCE_S, changed=first.session.changed)
            assert first.session.ended == reason
            with pytest.raises(PeerError, match=r"The run has ended\. The server cannot keep"):
                first.begin(1)
            with pytest.raises(PeerError, match="The server cannot keep a run in"):
                first.keeper.begin()
            with pytest.raises(PeerError, match="The server cannot keep a run in"):
                Served(tmp_path / "before")  # it would end again in its first round
        shutil.copytree(tmp_path / "state", tmp_path / "after" / "state")
    for name in ("before", "after"):
        with Served(tmp_path / name) as second:
            assert second.is_restored
            second.deliver(rounds(1, 1))
            assert second.results(1) == undisturbed(1, second.texts)[1]


def test_nothing_begins_on_a_disk_that_does_not_take_a_mebibyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it takes the beginning of a journal, and more than that."""
    writev, left = os.writev, [1 << 19]

    def nearly_full(descriptor: int, pieces: list[memoryview]) -> int:
        left[0] -= sum(map(len, pieces))
        return writev(descriptor, pieces) if left[0] >= 0 else full(descriptor, pieces)

    with Served(tmp_path) as first, monkeypatch.context() as patch:
        patch.setattr(journals.os, "writev", nearly_full)
        with pytest.raises(PeerError, match=r"The server cannot keep a run in .*No space left"):
            first.keeper.begin()
    assert left[0] < 0
    with Served(tmp_path) as second:
        second.join()
        second.agree()
        second.deliver(rounds(0, 0))
        assert second.results(0) == undisturbed(0, second.texts)[0]


@pytest.mark.usefixtures("eager")
def test_a_disk_that_is_full_of_a_snapshot_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: journals.SnapshotWriter, kind: int, pieces: list[wire.Buffer]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journals.SnapshotWriter, "add", broken)
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        expected = first.train(0, 0)
        first.begin(1)
        finished(first)
        assert first.session.ended == (
            f"The server cannot keep the run: {tmp_path}/state/job/snapshot-000002: "
            "No space left on device."
        )
    with Served(tmp_path) as second:
        assert second.results(0) == expected[0] == undisturbed(0, second.texts)[0]


@pytest.mark.usefixtures("eager")
def test_without_a_thread_to_spare_there_is_no_snapshot_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def guarded(self: threading.Thread) -> None:
        if self.name == "tf_hips-snapshot":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", guarded)
    with Served(tmp_path) as first:
        first.join()
        first.agree()
        for number in range(3):
            first.deliver(rounds(number, number))
            assert first.results(number) == undisturbed(number, first.texts)[number]
    assert len(list((tmp_path / "state" / "job").glob("journal-*"))) > 1
    with Served(tmp_path) as second:
        assert second.is_restored
        assert second.results(2) == undisturbed(2, second.texts)[2]


@pytest.mark.usefixtures("eager")
def test_the_prologue_outlives_a_snapshot(tmp_path: Path) -> None:
    """A process that comes back begins with what all began with, whatever came since."""

    def gather(served: Served, number: int) -> None:
        served.gather(number, 0, b"%d" % number, wait=False)
        assert served.gather(number, 1, b"%d" % number, wait=True)

    with Served(tmp_path / "first") as first:
        first.join()
        for number in range(3):
            gather(first, number)
        first.agree()
        first.train(0, 2)
        for number in range(3, 8):
            gather(first, number)
        for child in (0, 1):
            first.session.back_up(first.caller(child), first.session.token, 2, 6)
        first.train(3, 4)
        finished(first)
        kept = sorted(first.session._state.gathers._gathers)
        assert kept == [0, 1, 2, 6, 7]
        (tmp_path / "second").mkdir()
        first.killed(tmp_path / "second")
    with Served(tmp_path / "second") as second:
        assert sorted(second.session._state.gathers._gathers) == kept
        assert second.session._state.gathers.prologue == 3


@pytest.mark.usefixtures("eager")
def test_that_the_first_weights_are_gone_outlives_a_snapshot(tmp_path: Path) -> None:
    """A site without a backup hears at once that it cannot come back."""
    with Served(tmp_path / "first") as first:
        first.join()
        first.agree()
        first.session.begin_sync(first.caller(0), ["<f4[2]"], 8)
        first.session.upload(first.caller(0), 0, bytes(8))
        first.train(0, 2)
        for child in (0, 1):
            first.session.back_up(first.caller(child), first.session.token, 2, 0)
        first.train(3, 4)
        finished(first)
        assert first.session._state.weights.is_forgotten
        (tmp_path / "second").mkdir()
        first.killed(tmp_path / "second")
    with Served(tmp_path / "second") as second:
        assert second.session._state.weights.is_forgotten
        with pytest.raises(ProtocolError, match="only from a backup that was made in it"):
            second.session.begin_sync(second.caller(1), ["<f4[2]"], 8)
