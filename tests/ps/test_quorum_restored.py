# SPDX-License-Identifier: Apache-2.0
"""What a server that is restored knows of absent children, and what it does not."""

from pathlib import Path
from typing import Any

import pytest

from tests.ps.quorums import MODEL, PATIENCE_S, SHAPES, Run
from tests.ps.served import accepted
from tf_hips.ps.disk import durable
from tf_hips.ps.rounds.partial import MOST_BEGUN, Partial
from tf_hips.ps.terms.quorum import NEXT, Quorum
from tf_hips.ps.terms.recorder import Kind


def test_a_lost_child_that_a_restored_server_hears_is_lost_when_it_goes_again(
    tmp_path: Path,
) -> None:
    first, quorum = tmp_path / "first", Quorum(2, 1.0)
    first.mkdir()
    with Run(quorum, base=first).begin() as run:
        run.rounds(0, 0)
        with run.session.changed:
            run.session._lose(2)
        second = run.killed(tmp_path / "second")
    with Run(quorum, base=second) as run:
        presence = run.session._presence
        assert 2 not in presence._timers  # it may be away for as long as it likes
        run.processes[2] = "another"
        assert run.join(2)["is_back"]
        assert run.session.describe()["children"][2]["state"] == "away"
        assert 2 in presence._timers  # it must show that it is there, as every child


def test_a_restored_server_does_not_take_what_it_finds_for_early(tmp_path: Path) -> None:
    first, quorum = tmp_path / "first", Quorum(2)
    first.mkdir()
    with Run(quorum, base=first).begin() as run:
        run.rounds(0, 0)
        run.deliver(0, 1)
        second = run.killed(tmp_path / "second")
    with Run(quorum, base=second) as run:
        run.deliver(1, 1, chunks=[])
        run.clock.advance(2.0)
        for child in (1, 2):
            run.deliver(child, 1)
        assert run.session._closing is not None
        recorded = [0.0] * 3  # of the round that was over
        assert list(run.session._closing._arrivals._offsets) == [*recorded, 2.0, 2.0]
        assert run.results(0, 1) is not None


@pytest.mark.parametrize("past_bytes", [1 << 20, 4])
def test_gathers_without_some_outlive_a_server_that_keeps_less(
    tmp_path: Path, past_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum = tmp_path / "first", Quorum(2, 1.0)
    first.mkdir()
    with Run(quorum, base=first).begin() as run:
        run.rounds(0, 0)
        with run.session.changed:
            run.session._lose(2)
        for number in range(4):
            for child in (0, 1):
                run.gather(child, number, bytes([child]) * 8)
            run.clock.advance(0.0)
        run.rounds(1, 2, (0, 1))
        second = run.killed(tmp_path / "second")
    with Run(quorum, base=second, past_bytes=past_bytes) as run:
        assert run.is_restored
        assert run.gather(0, 3, b"\0" * 8) == [b"\0" * 8, b"\1" * 8, None]
        assert run.session.state.gathers.oldest == (0 if past_bytes > 4 else 2)


def partial_of(run: Run) -> Partial:
    store = run.session.store
    assert store is not None
    partial: Partial | None = getattr(store, "partial", None)
    assert partial is not None
    return partial


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_child_has_few_late_updates_that_it_never_finishes(
    tmp_path: Path, is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_eager:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum, last = tmp_path / "first", Quorum(2, 1.0, late=NEXT), 6
    first.mkdir()
    most = range(len(MODEL.chunks) - 1)

    def close(run: Run, number: int) -> None:
        run.rounds(number, number, (0, 1))
        run.clock.advance(1.0)

    with Run(quorum, base=first).begin() as run:
        run.rounds(0, 0)
        for number in range(1, last + 1):
            close(run, number)
        run.deliver(2, last)  # whole: it counts, whatever else has begun
        for number in range(1, last):
            run.deliver(2, number, chunks=most)
            begun = [key for key, late in partial_of(run).kept()[1] if len(late.packets) < 4]
            assert begun == [(2, one) for one in range(1, number + 1)][-MOST_BEGUN:]
        close(run, last + 1)  # a snapshot, if they are made at all
        second = run.killed(tmp_path / "second")
        kept = [(key, set(late.packets)) for key, late in partial_of(run).kept()[1]]
        # It gets the results of what was dropped, like one that is late where late ones are.
        assert run.results(2, 1) == run.results(0, 1)
        assert [one["goes"] for one in run.told("late")] == ["drop"]
        assert run.results(2, last - 1) is None  # that one may still be finished
    with Run(quorum, base=second) as run:
        assert run.is_restored
        assert [(key, set(late.packets)) for key, late in partial_of(run).kept()[1]] == kept
        assert run.results(2, 1) == run.results(0, 1)
        run.deliver(2, last - 1)
        close(run, last + 2)
        assert run.told("closed")[-1]["late"] == [["c", last - 1]]


def told(run: Run) -> dict[str, Any]:
    """What a server must know again of those who are late, lost or back."""
    state = run.session.state
    missed, late = partial_of(run).kept()
    return {
        "children": [
            (one.process, one.num_returns, one.is_lost, one.has_left, one.backup)
            for _, one in sorted(state.members.children.items())
        ],
        "gathers": state.gathers.closed(),
        "late": [(key, one.weight, sorted(one.packets)) for key, one in late],
        "missed": [(child, [tuple(one) for one in spans]) for child, spans in missed],
    }


def test_all_that_is_known_of_children_outlives_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at here is in the snapshot alone: no journal since says it."""
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum = tmp_path / "first", Quorum(2, 1.0, late=NEXT)
    first.mkdir()
    with Run(quorum, base=first, rule="mean").begin() as run:
        recorder: Any = run.session._recorder
        run.rounds(0, 0)
        for child in (0, 1):
            run.session.back_up(run.caller(child), run.session.token, 1, 0)
        with run.session.changed:
            run.session._lose(2)
        run.processes[2] = "another"
        run.join(2)
        run.session.agree_model(run.caller(2), SHAPES)
        for child in (0, 1):
            run.gather(child, 0, bytes([child]))
        run.clock.advance(1.0)
        for number, chunks, weight in ((1, [0], 3.0), (2, [], 5.0)):
            for child in (0, 1):
                run.deliver(child, number, weight=1.0)
            run.clock.advance(1.0)
            run.deliver(2, number, chunks=chunks, weight=weight)  # late, and not whole
        with run.session.changed:
            run.session._lose(2)
        recorder._writer.join(PATIENCE_S)  # while it writes, no other one begins
        run.deliver(0, 3, weight=1.0)
        expected = told(run)
        second = run.killed(tmp_path / "second")
    assert expected == {
        "children": [
            ("p0", 0, False, False, (1, 0)),
            ("p1", 0, False, False, (1, 0)),
            ("another", 1, True, False, None),
        ],
        "gathers": [(0, [0, 1])],
        "late": [((2, 1), 3.0, [0]), ((2, 2), 5.0, [])],
        "missed": [(2, [(1, 3)])],
    }
    assert list(second.glob("state/job/snapshot-*"))
    assert not {Kind.LOST, Kind.LATE, Kind.MISSED} & {kind for kind, _ in accepted(second)}
    with Run(quorum, base=second, rule="mean") as run:
        assert run.is_restored
        assert told(run) == expected


def test_of_weights_without_packets_the_newest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
    monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum = tmp_path / "first", Quorum(2, 1.0, late=NEXT)
    first.mkdir()
    with Run(quorum, base=first, rule="mean").begin() as run:
        for child in range(3):
            run.deliver(child, 0, weight=1.0)
        for number in range(1, 4):
            run.deliver(2, number, chunks=[], weight=2.0)  # before it is closed
            for child in (0, 1):
                run.deliver(child, number, weight=1.0)
            run.clock.advance(1.0)
        for number in (1, 2, 3, 2):
            run.deliver(2, number, chunks=[], weight=3.0)
        for child in (0, 1):
            run.deliver(child, 4, weight=1.0)
        second = run.killed(tmp_path / "second")
        late = partial_of(run).kept()[1]
        assert [(key, one.weight, len(one.packets)) for key, one in late] == [((2, 2), 3.0, 0)]
    with Run(quorum, base=second, rule="mean") as run:
        assert partial_of(run).kept()[1] == late
