# SPDX-License-Identifier: Apache-2.0
"""The paper's rule beside its formula, and beside the default rule where clocks differ.

Rounds are played event by event: workers of constant step times ask before every step.
"""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips.esync.compat import Record, StateTable
from tf_hips.esync.pacer import Pacer, Report
from tf_hips.esync.rule import Pace

PAPER = [3.5, 3.5, 0.03, 0.03, 0.05, 0.05]
ROUNDS = 8


def play(
    steps_s: list[float], epsilon: float, shifts_s: list[float] | None = None
) -> tuple[list[int], float]:
    """Steps of each worker in the last of some rounds, and how long that was."""
    shifts = shifts_s or [0.0] * len(steps_s)
    table = StateTable(len(steps_s), epsilon)
    done, ready = [0] * len(steps_s), set()
    began, now = 0.0, 0.0
    events = [(0.0, rank) for rank in range(len(steps_s))]
    for t in range(1, ROUNDS + 1):
        done, ready, began = [0] * len(steps_s), set(), now
        for rank, shift in enumerate(shifts):
            table.reset(rank, t, now + shift)
        events = [(now, rank) for rank in range(len(steps_s))]
        heapq.heapify(events)
        while events:
            now, rank = heapq.heappop(events)
            c = steps_s[rank]
            if table.apply(rank, done[rank], c, now + shifts[rank], now):
                ready.add(rank)
                continue
            done[rank] += 1
            heapq.heappush(events, (now + c, rank))
        assert len(ready) == len(steps_s)
    return done, now - began


def paced(steps_s: list[float], pace: Pace, shifts_s: list[float]) -> list[int]:
    """The same with the default rule; workers read their own clocks for what they report."""
    pacer = Pacer(pace, len(steps_s))
    counts, now = [pace.first_steps] * len(steps_s), 0.0
    for number in range(ROUNDS):
        ends = [now + count * one for count, one in zip(counts, steps_s, strict=True)]
        for rank, end in enumerate(ends):
            shift = shifts_s[rank]
            busy_s = (end + shift) - (now + shift)
            pacer.arrived(rank, number, end, Report(counts[rank], busy_s / counts[rank], busy_s))
        now = max(ends)
        assigned = [pacer.assignment(rank, number) for rank in range(len(steps_s))]
        counts = [one.steps for one in assigned if one is not None]
    return counts


@pytest.mark.parametrize(
    ("steps_s", "epsilon", "steps"),
    [
        (PAPER, 0.5, [1, 1, 99, 99, 60, 60]),
        ([3.5, 0.03, 0.05, 0.2], 0.05, [1, 114, 69, 17]),
        ([0.4, 0.03, 0.05], 0.5, [1, 1, 1]),  # faster than epsilon: plain SSGD
        ([0.4, 0.03, 0.05], 0.04, [1, 11, 7]),
        ([1.0, 0.7, 0.3], 0.1, [1, 1, 2]),
    ],
)
def test_the_paper_s_rule_has_a_closed_form(
    steps_s: list[float], epsilon: float, steps: list[int]
) -> None:
    """n = max(1, floor((c_max - e) / c)), but where the quotient is whole: there floats decide."""
    played, _ = play(steps_s, epsilon)
    for one, expected, c in zip(played, steps, steps_s, strict=True):
        quotient = (max(steps_s) - epsilon) / c
        is_whole = abs(quotient - round(quotient)) < 1e-6
        assert abs(one - expected) <= is_whole


@given(
    st.lists(st.integers(1, 400), min_size=2, max_size=6),
    st.integers(0, 40),
)
def test_the_closed_form_holds_for_any_times(milliseconds: list[int], epsilon_ms: int) -> None:
    # Halves keep quotients from being whole.
    steps_s = [one / 64 for one in milliseconds]
    epsilon = (epsilon_ms + 0.5) / 64
    played, _ = play(steps_s, epsilon)
    slowest = max(steps_s)
    for one, c in zip(played, steps_s, strict=True):
        if c != slowest:
            assert one == max(1, int((slowest - epsilon) // c))


def test_a_clock_that_is_behind_breaks_it_and_not_the_default_rule() -> None:
    steps_s = [3.5, 0.03, 0.05]
    same, _ = play(steps_s, 0.51)
    behind, _ = play(steps_s, 0.51, [-5.0, 0.0, 0.0])
    ahead, ahead_s = play(steps_s, 0.51, [5.0, 0.0, 0.0])
    assert same == [1, 99, 59]
    assert behind == [1, 1, 1]  # SSGD
    assert ahead[1] > 115  # the slowest is ready first, and waits for the others
    pace = Pace(slowest_steps=1, most_slowest_steps=1)
    expected = paced(steps_s, pace, [0.0, 0.0, 0.0])
    assert expected == [1, 115, 69]
    for shifts in ([-5.0, 0.0, 0.0], [5.0, 0.0, 0.0], [-5.0, 5.0, 3.0]):
        assert paced(steps_s, pace, shifts) == expected
    assert ahead_s >= 3.5


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3))
def test_no_shift_of_clocks_changes_the_default_rule(shifts: list[float]) -> None:
    steps_s = [0.5, 0.07, 0.011]
    assert paced(steps_s, Pace(), shifts) == paced(steps_s, Pace(), [0.0] * 3)


def test_answers_of_the_original() -> None:
    """A script of requests, with the answers that the original's `views.py` gives."""
    table = StateTable(3, 0.5)
    assert not table.apply(0, 0, 4.0, 100.0, 100.0)  # no step yet
    assert not table.apply(1, 0, 1.0, 100.0, 100.0)
    assert not table.apply(2, 0, 1.0, 100.0, 100.0)
    assert not table.apply(1, 1, 1.0, 101.0, 101.0)  # rest 3 > 1.5
    assert not table.apply(1, 2, 1.0, 102.0, 102.0)  # rest 2 > 1.5
    assert table.apply(1, 3, 1.0, 103.0, 103.0)  # rest 1 < 1.5
    assert table.apply(0, 1, 4.0, 104.0, 104.0)  # the slowest itself
    assert table.apply(2, 4, 1.0, 104.0, 104.1)  # the slowest is ready
    assert table.status() == {
        "num_workers": 3,
        "t": 1,
        "epsilon": 0.5,
        "records": [
            [0, 1, 4.0, 104.0, True, 1],
            [1, 3, 1.0, 103.0, True, 1],
            [2, 4, 1.0, 104.0, True, 1],
        ],
    }
    table.reset(1, 2, 105.0)
    assert [one.ready for one in table.records] == [False] * 3
    assert not table.apply(1, 1, 1.0, 106.0, 106.0)  # the slowest has not got its model
    table.reset(0, 2, 105.5)
    assert table.apply(1, 2, 1.0, 108.5, 108.5)  # rest 4 - 3 = 1
    assert table.records[0] == Record(0, 0, 4.0, 105.5, False, 2)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])), max_size=400)
)
def test_the_slowest_is_the_first_of_the_slowest(said: list[tuple[int, float]]) -> None:
    table = StateTable(5)
    c = [0.0] * 5
    for rank, seconds in said:
        table.apply(rank, 0, seconds, 0.0, 0.0)
        c[rank] = seconds
        assert table._slowest().rank == c.index(max(c))
    assert len(table._slow) <= 4 * 5 + 64


def test_numbers_that_are_refused() -> None:
    with pytest.raises(ValueError, match="`num_workers` must be from 1"):
        StateTable(0)
    with pytest.raises(ValueError, match="`epsilon` must be seconds >= 0"):
        StateTable(2, float("nan"))
    table = StateTable(2)
    with pytest.raises(ValueError, match=r"`r` must be a rank from 0 to 1\. Received: 2"):
        table.apply(2, 1, 1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="`r` must be a rank"):
        table.reset(-1, 1, 0.0)
    with pytest.raises(ValueError, match="`c` and `te` must be finite"):
        table.apply(0, 1, float("inf"), 0.0, 0.0)
    with pytest.raises(ValueError, match="`k` must be a whole number"):
        table.apply(0, -1, 1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="`t` must be"):
        table.reset(0, 1, float("nan"))
