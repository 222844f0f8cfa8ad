# SPDX-License-Identifier: Apache-2.0
"""What a server that is restored knows of absent children, and what it does not."""

from pathlib import Path

import pytest

from tests.ps.quorums import Run
from tf_hips.ps import durable
from tf_hips.ps.quorum import Quorum


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
