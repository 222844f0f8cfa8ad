# SPDX-License-Identifier: Apache-2.0
"""What a server of children that go on by themselves keeps of a run, and until when."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ps.served import FEEDBACK, MODEL, Served, packet_of, rounds
from tf_hips.ps.rounds.periods import PeriodicStore
from tf_hips.ps.session.members import Child, Terms
from tf_hips.ps.session.state import State
from tf_hips.ps.terms.recorder import Recorder
from tf_hips.ps.terms.tree import Place

ALONE = "fedasync(0.6)"


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_first_child_is_needed_until_its_first_round(tmp_path: Path, has_begun: bool) -> None:
    """It sends the first weights, for which the others would wait without end."""
    with Served(tmp_path, rule=ALONE) as one:
        one.join()
        one.agree()
        if has_begun:
            one.deliver([(0, 0, chunk) for chunk in range(len(MODEL.chunks))])
        one.session.leave(one.caller(0), "no")
        assert (one.session.ended is None) == has_begun


def _leaves(one: Served) -> None:
    one.session.leave(one.caller(1), "no")


def _is_lost(one: Served) -> None:
    with one.session.changed:
        one.session._lose(1)


@pytest.mark.parametrize("goes", [_leaves, _is_lost])
def test_rounds_of_a_child_that_has_gone_are_forgotten(
    tmp_path: Path, goes: Callable[[Served], None]
) -> None:
    """Nobody comes back to them; those of the others are kept."""
    with Served(tmp_path, rule=ALONE) as one:
        one.join()
        one.agree()
        one.deliver(rounds(0, 4))
        store: Any = one.session.store
        assert [store.of(child).past.oldest for child in (0, 1)] == [0, 0]
        goes(one)
        assert one.session.ended is None
        assert [store.of(child).past.oldest for child in (0, 1)] == [0, None]


def party_state(period: int | None) -> State:
    """The state of a server with a rule of its own below another one; two children have agreed."""
    terms = Terms(("a", "b"), None, None, 1 << 20, rule=ALONE, site="west", period=period)
    state = State(terms, threading.Condition(), Recorder())
    for child in range(2):
        state.members.children[child] = Child(f"p{child}", 1, FEEDBACK, FEEDBACK, 7, ALONE)
    leaves = (("a", 1), ("b", 1))
    state.start(Place(0, leaves, FEEDBACK, FEEDBACK, "fedavg", "s", 0, 2))
    state.weights.describe(["<f4[1]"], 4)
    state.weights.take(0, bytes(4))
    for child in range(2):
        state.agree(child, MODEL, 0)
    return state


@pytest.mark.parametrize(("period", "wanted"), [(None, 2), (5, 5)])
def test_a_period_is_one_update_of_each_child_where_none_is_said(
    period: int | None, wanted: int
) -> None:
    store = party_state(period).store
    assert isinstance(store, PeriodicStore)
    assert store._above.period == wanted


def test_first_weights_are_kept_until_the_server_above_has_gone_on() -> None:
    """It may not have got them, however many rounds are over here."""
    state = party_state(None)
    store: Any = state.store
    for child in range(2):
        for number in range(2):
            store.of(child).begin(number)
            for chunk in range(len(MODEL.chunks)):
                store.of(child).add(
                    number, child, [(chunk, packet_of(FEEDBACK, number, child, chunk))]
                )
        state.note_backup(child, 1, 0)
        assert store.of(child).oldest == 1
    state.archive()
    assert state.weights.are_whole
    store._next_up = 1  # of a round that it has answered
    state.archive()
    assert state.weights.is_forgotten
