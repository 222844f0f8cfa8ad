# SPDX-License-Identifier: Apache-2.0
"""The waiting calls of a run, without a session: who is odd, what buys time, how it ends."""

import threading
from typing import Any

import pytest

from tf_hips.errors import PeerError
from tf_hips.ps.rounds.gather import Gathers
from tf_hips.ps.session import waiting as waits
from tf_hips.ps.session.members import Caller, Child, Members, Terms
from tf_hips.ps.session.waiting import Wait, Waiting

SITES = ("a", "b", "c", "d")


def waiting_of(changed: threading.Condition) -> Waiting:
    """The calls of a run of four that has begun."""
    members = Members(Terms(SITES, None, None, 1 << 20, 60.0))
    members.children = {
        child: Child(f"p{child}", 1, "fp32", "fp32", 7, "sum") for child in range(len(SITES))
    }
    members.is_started = True
    return Waiting(changed, members, lambda: None)


@pytest.mark.parametrize(
    ("whats", "lost", "ends"),
    [("ggrr", [], True), ("gggr", [3], False), ("ggr", [], False), ("gg", [], False)],
)
def test_who_does_something_else_than_more_than_half_of_all_is_odd(
    whats: str, lost: list[int], ends: bool
) -> None:
    """Half of them are no majority: who is odd is not said by whose call came first."""
    waiting, gone = waiting_of(threading.Condition()), []

    def lets_go(child: int, reason: str) -> bool:
        gone.append(child)
        return True

    waiting.bears_losses, waiting.lets_go = lambda: True, lets_go
    with waiting._changed:
        waiting.settle(dict(enumerate(whats)))
    assert gone == lost
    assert (waiting.ended is not None) == ends


@pytest.mark.parametrize(("labels", "agreed"), [("xxyy", None), ("xxy", None), ("xxyx", "x")])
def test_what_more_than_half_of_all_gather_is_agreed(labels: str, agreed: str | None) -> None:
    gathers = Gathers(4, 100)
    for child, label in enumerate(labels):
        gathers.deliver(child, 0, label, memoryview(b""))
    assert gathers.agreed(0) == agreed
    assert gathers.came(0) == [child for child, label in enumerate(labels) if label == agreed]


class _Clock:
    """`time.monotonic` and a condition of which each wait takes as long as it may, at most 4 s."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_waits = 0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += min(seconds, 4.0)
        self.num_waits += 1

    def notify_all(self) -> None:
        """Nobody waits in another thread."""


@pytest.mark.parametrize("num_moves", [0, 3])
def test_what_moves_buys_time(monkeypatch: pytest.MonkeyPatch, num_moves: int) -> None:
    clock: Any = _Clock()
    monkeypatch.setattr(waits, "time", clock)
    waiting = waiting_of(clock)
    moves = lambda: min(clock.num_waits, num_moves)  # noqa: E731
    wait = Wait("it", lambda: False, lambda: "it is not there", progress=moves)
    with pytest.raises(PeerError, match=r"Waited 10 s; it is not there\."):
        waiting.until(Caller(0, "p0", 10.0), wait)
    assert clock.now == 100.0 + 4.0 * num_moves + 10.0


def test_a_reason_is_told_in_printable_characters() -> None:
    """A site says it in words of its own, and all terminals show it."""
    waiting = waiting_of(threading.Condition())
    with waiting._changed:
        waiting.end("bad \x1b[2J\nerror: all is lost")
    assert waiting.ended is not None and waiting.ended.isprintable()
    assert "bad" in waiting.ended and "all is lost" in waiting.ended
