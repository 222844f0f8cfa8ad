# SPDX-License-Identifier: Apache-2.0
"""The ballots of one round, and what children say of their replicas, without a session."""

import json
import threading
from types import SimpleNamespace

import pytest

from tests.ps.quorums import ManualClock
from tf_hips.errors import ProtocolError
from tf_hips.ps.robust import replicas
from tf_hips.ps.robust.asked import Asked
from tf_hips.ps.robust.ballots import Ballots
from tf_hips.ps.robust.voted import VotingStore


def test_the_first_ballot_of_a_child_counts() -> None:
    """Else one that lies could say something else when it sees who is asked."""
    ballots = Ballots([(0, 1, 2)])
    one, other = b"a" * 32, b"b" * 32
    assert ballots.say(0, one)
    assert not ballots.say(0, other)
    assert ballots.said == {0: one}
    assert ballots.say(1, one)
    assert not ballots.say(1, other)
    assert ballots.agreed(ballots.groups[0]) == [0, 1]
    ballots.close()
    assert not ballots.say(2, one)
    assert ballots.vote(ballots.groups[0]).absent == (2,)


@pytest.mark.parametrize(("present", "wins"), [((0,), False), ((0, 1), True)])
def test_half_of_a_group_is_no_majority_where_others_are_absent(
    present: tuple[int, ...], wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two who is alone would be believed whatever it sends."""
    ballots = Ballots([(0, 1)])
    for child in present:
        ballots.say(child, bytes([child + 1]) * 32)
    ballots.close()
    [group] = ballots.groups
    store = VotingStore.__new__(VotingStore)
    store.changed, store._is_comparing, store._due = threading.Condition(), False, [(0, group)]
    store.chunks = ()
    row = SimpleNamespace(packets={})
    for name, made in (("_of", ballots), ("_get", row), ("_is_decided", False), ("_look", [])):
        monkeypatch.setattr(store, name, lambda number, made=made: made)
    monkeypatch.setattr(store, "_alike", lambda *_: present)  # rows of all who are there
    assert store._compare() == []
    assert (group.winner, group.is_dropped) == ((0, False) if wins else (None, True))


@pytest.mark.parametrize("are_alike", [True, False])
def test_a_restored_group_keeps_the_packets_that_it_has(are_alike: bool) -> None:
    """Who is looked at first may be another one than then; equal packets are the same outcome."""
    ballots, one = Ballots([(0, 1, 2)]), b"a" * 32
    for child in (0, 1):
        ballots.say(child, one)
    assert ballots.deliver(1, one)
    assert not ballots.deliver(0, one)  # what it sends is kept no more
    ballots.settle({0: 0}, [], are_alike=are_alike)
    assert ballots.winners() == {0: 1 if are_alike else 0}
    ballots.settle({}, [0], are_alike=are_alike)
    assert ballots.winners() == {}


@pytest.mark.parametrize(
    "facts",
    [{f"n{k}": "x" for k in range(65)}, {"n" * 201: "x"}, {"n": "x" * 201}, {"n": 1}, ["n"]],
    ids=["many", "name", "text", "number", "list"],
)
def test_what_a_child_says_of_its_replica_is_bounded(facts: object) -> None:
    with pytest.raises(ProtocolError, match="must be texts by name"):
        replicas.read(json.dumps(facts))
    most = {f"{k:0200}": "x" * 200 for k in range(64)}
    assert replicas.read(json.dumps(most)) == most


def test_who_was_asked_in_rounds_that_are_over_is_forgotten() -> None:
    asked = Asked(ManualClock())
    for number in range(3):
        asked.pass_over((0, number), is_lost=True)
    asked.forget_before(2)
    assert [asked.is_silent((0, number)) for number in range(3)] == [False, False, True]
    assert [asked.end(number, [0]) for number in range(3)] == [[], [], [0]]
