# SPDX-License-Identifier: Apache-2.0
"""When a run with a quorum is over, and what adaptive deadlines know after a restart."""

from pathlib import Path
from typing import Any

import pytest

from tests.ps.quorums import PATIENCE_S, Run, oracle_sum
from tests.ps.test_quorum import same
from tf_hips.errors import ProtocolError
from tf_hips.ps.disk import durable
from tf_hips.ps.terms.quorum import RETURN_S, Quorum


def test_fewer_than_a_quorum_end_no_run_by_leaving() -> None:
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        session = run.session
        run.rounds(0, 1)
        for child in (1, 2):
            with session.changed:
                session._lose(child)
        session.leave(run.caller(0), None)
        run.clock.advance(29.0)
        assert not session.is_over
        assert session.describe()["state"] == "training"
        # One that was lost does what it has missed, and leaves: that makes two.
        run.processes[1] = "another"
        assert run.join(1)["is_back"]
        session.agree_model(run.caller(1), [[3, 5], [], [70], [9]])
        assert same(run.results(1, 1), oracle_sum("fp32", 1, [0, 1, 2], []))
        run.clock.advance(100.0)
        assert not session.is_over
        session.leave(run.caller(1), None)
        assert session.is_over
        assert session.ended is None


def test_a_call_that_was_on_its_way_when_its_process_left_brings_nobody_back() -> None:
    """As a `Watch` whose thread is slow: others waited for `--lost-after` again."""
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        run.rounds(0, 1)
        session = run.session
        for child in (1, 2):
            session.leave(run.caller(child), "OSError: its disk is full")
        with pytest.raises(ProtocolError, match="Site `c` has left this run"):
            next(session.watch(run.caller(2), 0.01))
        assert session.state.members.lost == [1, 2]
        run.processes[1] = "another"
        assert run.join(1)["is_back"]
        assert session.state.members.lost == [2]
        session.leave(run.caller(1), "OSError: it is full again")
        run.clock.advance(31.0)
        assert session.is_below_quorum


def test_a_run_whose_lost_children_stay_away_ends_below_its_quorum() -> None:
    with Run(Quorum(2, 1.0, below_s=30.0)).begin() as run:
        run.rounds(0, 1)
        for child in (1, 2):
            with run.session.changed:
                run.session._lose(child)
        run.session.leave(run.caller(0), None)
        run.clock.advance(31.0)
        assert run.session.is_over
        assert run.session.is_below_quorum
        assert "Site `c` was lost" in str(run.session.ended)


def test_one_of_a_quorum_of_one_ends_the_run_by_leaving() -> None:
    with Run(Quorum(1, 1.0)).begin() as run:
        run.rounds(0, 1)
        for child in (1, 2):
            with run.session.changed:
                run.session._lose(child)
        run.session.leave(run.caller(0), None)
        assert run.session.is_over


def test_where_too_few_are_to_come_who_has_left_is_needed() -> None:
    """Else who waits for it would not hear of it, and wait until its patience is over."""
    with Run(Quorum(2, 1.0)).begin() as run:
        run.rounds(0, 0)
        closing = run.session._closing
        assert closing is not None
        children = run.session.state.members.children
        children[2].has_left = True
        assert closing.needed([1, 2]) == [1]
        children[1].has_left = True
        assert closing.needed([1, 2]) == [1, 2]


@pytest.mark.parametrize("has_snapshots", [False, True])
def test_adaptive_deadlines_outlive_their_server(
    tmp_path: Path, has_snapshots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_snapshots:
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_BYTES", 0)
        monkeypatch.setattr(durable, "SNAPSHOT_AFTER_SNAPSHOTS", 0)
    first, quorum = tmp_path / "first", Quorum(2)
    first.mkdir()
    with Run(quorum, base=first).begin() as run:
        for number in range(6):
            for child in range(3):
                run.deliver(child, number)
                run.clock.advance(0.25 * (1 + child))
        assert run.session._closing is not None
        run.rounds(6, 6, (0, 1))
        run.clock.advance(100.0)
        run.deliver(2, 6)
        assert run.results(2, 6) is not None  # it has arrived, after the round was closed
        if has_snapshots:  # that of round 6 was written, and that of round 7 begins
            recorder: Any = run.session._recorder
            recorder._writer.join(PATIENCE_S)
        run.rounds(7, 7)
        offsets = list(run.session._closing._arrivals._offsets)
        deadline_s = run.session.describe()["deadline_s"]
        second = run.killed(tmp_path / "second")
    assert len(offsets) == 18 + 3 + 3
    with Run(quorum, base=second) as run:
        assert run.session._closing is not None
        assert list(run.session._closing._arrivals._offsets) == offsets  # each once
        assert run.session.describe()["deadline_s"] == deadline_s
        # So one that does not come holds nobody up for longer, but for the time to come back.
        for number, more_s in ((8, RETURN_S), (9, 0.0)):
            run.deliver(0, number)
            run.deliver(1, number)
            due_s = run.session.describe()["deadline_s"] + more_s
            run.clock.advance(0.99 * due_s)
            assert run.results(0, number) is None
            run.clock.advance(0.02 * due_s)
            assert same(run.results(0, number), oracle_sum("fp32", number, [0, 1], []))


def test_fixed_deadlines_record_no_arrivals(tmp_path: Path) -> None:
    with Run(Quorum(2, 1.0), base=tmp_path).begin() as run:
        run.rounds(0, 2)
        assert run.session._closing is not None
        assert run.session._closing.capture() == []
        journal = b"".join(path.read_bytes() for path in (tmp_path / "state/job").glob("journal-*"))
        assert b'"seconds"' not in journal
