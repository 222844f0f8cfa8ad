# SPDX-License-Identifier: Apache-2.0
"""A child that does something else than most others, where these need not wait for it."""

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ps import quorums
from tests.ps.quorums import PATIENCE_S, Run, oracle_sum
from tests.ps.test_quorum import same
from tests.support.eventually import eventually
from tf_hips.errors import ProtocolError
from tf_hips.ps.rounds import gather
from tf_hips.ps.terms.quorum import DROP, Quorum
from tf_hips.ps.transport import wire

pytestmark = pytest.mark.heavy  # calls wait in threads

QUORUM = Quorum(2, 1000.0, late=DROP)


@pytest.fixture
def run() -> Iterator[Run]:
    with Run(QUORUM).begin() as made:
        made.rounds(0, 0)
        yield made
        made.session.end("The test is over.")


def lost(run: Run) -> list[tuple[str, str]]:
    return [(event["child_site"], event["reason"]) for event in run.told("lost")]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_who_gathers_something_else_is_lost_by_name(run: Run, place: int) -> None:
    order = [0, 2]
    order.insert(place, 1)
    for child in order:
        with contextlib.suppress(ProtocolError):  # it hears of it at once where it comes last
            run.gather(child, 0, bytes([child]), "y" if child == 1 else "x")
    assert run.session.ended is None
    why = "Site `b` waits in exact value 0 (`y`), most others in exact value 0 (`x`)."
    assert lost(run) == [("b", why)]
    for child in (0, 2):  # at once, long before the deadline
        assert run.gather(child, 0, bytes([child])) == [b"\0", None, b"\2"]
    with pytest.raises(ProtocolError, match="closed without site `b`, as `x`"):
        run.gather(1, 0, b"\1", "y")
    assert run.gather(1, 0, b"\1") == [b"\0", None, b"\2"]  # as one that was late
    for child in (0, 1):
        assert run.gather(child, 1, bytes([child])) is None
    assert run.gather(2, 1, b"\2") == [b"\0", b"\1", b"\2"]


def test_without_a_majority_it_ends_for_all(run: Run) -> None:
    assert run.gather(0, 0, b"", "x") is None
    assert run.gather(1, 0, b"", "y") is None
    assert run.session.ended is None  # who is odd the third one decides
    with pytest.raises(ProtocolError, match=r"site `b` waits in exact value 0 \(`y`\); site `c`"):
        run.gather(2, 0, b"", "z")


def test_two_of_which_one_differs_end_when_no_other_is_to_come(run: Run) -> None:
    with run.session.changed:
        run.session._lose(2)
    assert run.gather(0, 0, b"", "x") is None
    with pytest.raises(ProtocolError, match="wait for each other in different calls"):
        run.gather(1, 0, b"", "y")


def test_before_the_end_of_the_first_round_it_ends_for_all() -> None:
    with Run(QUORUM).begin() as run:
        run.gather(0, 0, b"", "x")
        with pytest.raises(ProtocolError, match="wait for each other in different calls"):
            run.gather(1, 0, b"", "y")


def test_who_gathers_while_most_are_in_a_round_is_lost(run: Run) -> None:
    def wait(child: int) -> Any:
        store: Any = run.deliver(child, 1)
        call = run.caller(child)
        return run.session.wait_results(call, store, 1, 0, lambda: False, 0)

    def wait_gather() -> Any:
        call = run.caller(2)
        upload = run.session.begin_gather(call, 0)
        for message in wire.bundle([(0, gather.to_packet("y", b"1"))]):
            upload.feed(message)
        return run.session.wait_gather(call, 0, upload)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        odd = pool.submit(wait_gather)
        others = [pool.submit(wait, child) for child in (0, 1)]
        eventually(lambda: bool(lost(run)), PATIENCE_S, changed=run.session.changed)
        run.clock.advance(0.0)  # what `lose` has left to another thread
        for one in others:
            assert one.result(PATIENCE_S)[0] > 0
        assert run.session.ended is None
        assert [site for site, _ in lost(run)] == ["c"]
        assert same(run.results(0, 1), oracle_sum("fp32", 1, [0, 1], []))
        for child in (0, 1):
            run.gather(child, 0, b"", "x")
        run.clock.advance(0.0)
        with pytest.raises(ProtocolError, match="closed without site `c`, as `x`"):
            odd.result(PATIENCE_S)


def test_a_gather_with_an_odd_one_outlives_the_server(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    with Run(QUORUM, base=first).begin() as run:
        run.rounds(0, 0)
        run.gather(1, 0, b"", "y")
        run.gather(0, 0, b"\0", "x")
        second = run.killed(tmp_path / "second")
    third = tmp_path / "third"
    third.mkdir()
    with Run(QUORUM, base=second) as run:
        assert run.gather(2, 0, b"\2", "x") == [b"\0", None, b"\2"]
        assert [site for site, _ in lost(run)] == ["b"]
        third = run.killed(third)
    with Run(QUORUM, base=third) as run:
        assert run.gather(0, 0, b"\0", "x") == [b"\0", None, b"\2"]
        assert run.session.ended is None


@pytest.mark.parametrize("is_restored", [False, True])
def test_who_was_odd_comes_back_as_a_process_that_does_what_most_do(
    tmp_path: Path, is_restored: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with Run(QUORUM, base=first).begin() as run:
        run.rounds(0, 0)
        run.gather(1, 0, b"old", "y")
        for child in (0, 2):
            run.gather(child, 0, bytes([child]))
        assert lost(run)
        second = run.killed(second)
        if not is_restored:
            come_back_corrected(run)
    if is_restored:
        with Run(QUORUM, base=second) as run:
            come_back_corrected(run)


def come_back_corrected(run: Run) -> None:
    run.processes[1] = "corrected"
    assert run.join(1)["is_back"]
    assert not run.session.has_payload(run.caller(1), 0)  # it is not spared to say what it does
    assert run.gather(1, 0, b"new") == [b"\0", None, b"\2"]
    with pytest.raises(ProtocolError, match=r"closed without site `b`, as `x`\. Received: `y`"):
        run.gather(1, 0, b"old", "y")
    assert run.gather(0, 0, b"\0") == [b"\0", None, b"\2"]
    # What counted it must still repeat.
    run.gather(0, 1, b"", "x")
    run.gather(1, 1, b"", "x")
    run.processes[1] = "another"
    run.join(1)
    with pytest.raises(ProtocolError, match=r"must do what it did before\. Exact value 1 was `x`"):
        run.gather(1, 1, b"", "y")


def test_who_is_late_is_not_odd_because_another_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorums, "SITES", tuple("abcde"))
    monkeypatch.setattr(quorums, "WORKERS", (1,) * 5)
    with Run(Quorum(3, 1.0, late=DROP)).begin() as run:
        run.rounds(0, 0, range(5))
        run.gather(1, 0, b"\1", "y")
        for child in (0, 2, 3):
            run.gather(child, 0, bytes([child]))
        run.clock.advance(2.0)
        expected = [b"\0", None, b"\2", b"\3", None]
        assert run.gather(0, 0, b"\0") == expected
        assert run.gather(4, 0, b"\4") == expected


@pytest.mark.parametrize("lacks", ["LOST", "GATHER_CLOSED"])
@pytest.mark.parametrize("is_sent", [False, True])
def test_a_server_killed_before_it_decided_decides_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, is_sent: bool
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    with Run(QUORUM, base=first).begin() as run:
        run.rounds(0, 0)
        run.gather(0, 0, b"\0", "x")
        run.gather(1, 0, b"\1", "y")
        # What it would have written after the last payload, it never does.
        if lacks == "LOST":
            monkeypatch.setattr(run.session._waiting, "settle", lambda whats: None)
        monkeypatch.setattr(run.session._closing, "look_at_gather", lambda: None)
        assert run.gather(2, 0, b"\2", "x") is None
        assert len(lost(run)) == (lacks == "GATHER_CLOSED")
        second = run.killed(tmp_path / "second")
    with Run(QUORUM, base=second) as run:
        caller = run.caller(0, 0.0)
        if is_sent:
            told = run.gather(0, 0, b"\0", "x")
        else:  # all that the server has of it
            assert run.session.has_payload(caller, 0)
            upload = run.session.begin_gather(caller, 0)
            found = run.session.wait_gather(caller, 0, upload)
            assert found is not None
            told = [dict(found).get(leaf) for leaf in range(3)]
            assert gather.from_bits(dict(found)[3], 3) == [False, True, False]
        assert told == [b"\0", None, b"\2"]
        assert run.gather(2, 0, b"\2", "x") == [b"\0", None, b"\2"]
        with pytest.raises(ProtocolError, match="closed without site `b`, as `x`"):
            run.gather(1, 0, b"\1", "y")
        assert run.session.ended is None
