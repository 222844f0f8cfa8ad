# SPDX-License-Identifier: Apache-2.0
"""What a server learns from arrivals, and whom it tells to stop."""

import pytest

from tf_hips.esync.pacer import Assignment, Pacer, Report
from tf_hips.esync.rule import Pace, Times

PACE = Pace(slowest_steps=2, most_slowest_steps=2, margin=0.0, link_share=1.0, deadline=1.5)


def first_round(pacer: Pacer) -> None:
    """Two children, steps of 1 s and .25 s; round 0 closes at 10 s."""
    pacer.arrived(0, 0, 10.0, Report(4, 1.0, 6.0))  # 2 s of it for compiling
    pacer.arrived(1, 0, 7.0, Report(4, 0.25, 3.0))


def test_the_first_round_knows_no_transfers() -> None:
    pacer = Pacer(PACE, 2)
    assert pacer.assignment(0, 0) is None
    first_round(pacer)
    assert pacer.assignment(0, 0) == Assignment(2, 3.0, 5.0, 2.0)
    assert pacer.assignment(1, 0) == Assignment(8, 3.0, 5.0, 2.0)


def test_a_round_ends_with_its_last_arrival_and_transfers_are_the_rest() -> None:
    pacer = Pacer(PACE, 2)
    first_round(pacer)
    pacer.assignment(0, 0)
    pacer.arrived(0, 1, 19.5, Report(2, 1.0, 2.0))  # 7.5 s for the first time
    pacer.arrived(1, 1, 19.0, Report(8, 0.25, 2.0))
    pacer.assignment(0, 1)
    assert [pacer.times(0), pacer.times(1)] == [Times(1.0, 0.0), Times(0.25, 0.0)]
    pacer.arrived(0, 2, 22.0, Report(2, 1.0, 2.0))  # .5 s on the way
    pacer.arrived(1, 2, 21.5, Report(8, 0.25, 2.0))
    pacer.assignment(0, 2)
    assert pacer.times(0) == Times(1.0, 0.5)
    assert pacer.times(1) == Times(0.25, 0.0)


def test_local_steps_end_by_number_or_by_time() -> None:
    given = Assignment(4, 3.0, 4.0, 3.2)
    assert not given.is_over(3, 2.4)  # .8 s a step: 2.4 + .4 is not more than 3
    assert given.is_over(4, 1.0)
    assert given.is_over(3, 2.6)  # 2.6 + .43
    assert not given.is_over(0, 9.0)  # one step at least
    assert given.is_over(1, 9.0)


def test_a_child_s_transfer_is_no_time_for_steps() -> None:
    pacer = Pacer(PACE, 1)
    pacer.arrived(0, 0, 10.0, Report(4, 1.0, 4.0))
    pacer.arrived(0, 1, 13.0, Report(2, 1.0, 2.0))
    assert pacer.assignment(0, 1) == Assignment(2, 1.5 * 2.0, 2.0, 2.0)
    pacer.arrived(0, 2, 16.0, Report(2, 1.0, 2.0))
    assert pacer.assignment(0, 2) == Assignment(2, 1.5 * 3.0 - 1.0, 2.0, 3.0)


def test_what_a_child_says_is_bounded_by_what_the_server_has_seen() -> None:
    pacer = Pacer(Pace(smoothing=1.0), 1)
    pacer.arrived(0, 0, 10.0, Report(1, 1.0, 1.0))
    pacer.arrived(0, 1, 14.0, Report(4, 1e6, 1e9))
    pacer.assignment(0, 1)
    assert pacer.times(0) == Times(1.0, 0.0)


def test_an_assignment_is_made_once() -> None:
    pacer = Pacer(PACE, 2)
    first_round(pacer)
    made = pacer.assignment(1, 0)
    pacer.arrived(1, 0, 11.0, Report(4, 9.0, 36.0))  # once more, after the close
    assert pacer.assignment(1, 0) == made
    assert pacer.times(1) == Times(0.25, 0.0)


def test_a_round_nobody_asked_about_is_learnt_from_all_the_same() -> None:
    pacer = Pacer(PACE, 2)
    first_round(pacer)
    pacer.arrived(1, 1, 12.0, Report(4, 0.25, 1.0))
    assert pacer.times(0) == Times(1.0, 0.0)
    assert pacer.assignment(0, 0) == Assignment(2, 3.0, 5.0, 2.0)


def test_who_is_missing_keeps_what_is_known_of_it() -> None:
    pacer = Pacer(PACE, 3)
    first_round(pacer)
    assert pacer.assignment(2, 0) is None
    assert pacer.assignment(1, 0) == Assignment(8, 3.0, 5.0, 2.0)
    pacer.arrived(0, 1, 12.0, Report(2, 1.0, 2.0))
    assert pacer.assignment(1, 1) == Assignment(8, 3.0, 5.0, 2.0)


def test_a_child_without_steps_says_nothing_of_its_speed() -> None:
    pacer = Pacer(PACE, 2)
    pacer.arrived(0, 0, 1.0, Report(0, 0.0, 0.0))
    pacer.arrived(1, 0, 1.0, Report(2, 0.5, 1.0))
    assert pacer.times(0) is None
    assert pacer.assignment(1, 0) == Assignment(2, 1.5, 2.0, 1.0)


def test_old_rounds_are_forgotten() -> None:
    pacer = Pacer(PACE, 1)
    for number in range(20):
        pacer.arrived(0, number, float(number), Report(1, 1.0, 1.0))
    assert pacer.assignment(0, 2) is None
    assert len(pacer._rounds) <= 3


def test_the_last_one_is_told_to_stop_when_all_others_have_arrived() -> None:
    pacer = Pacer(PACE, 3)
    assert pacer.to_stop(0, 0.0) == frozenset()
    pacer.arrived(0, 0, 1.0, Report(1, 1.0, 1.0))
    assert pacer.to_stop(0, 1.0) == frozenset()
    pacer.arrived(2, 0, 2.0, Report(1, 1.0, 1.0))
    assert pacer.to_stop(0, 2.0) == {1}
    pacer.arrived(1, 0, 3.0, Report(1, 1.0, 1.0))
    assert pacer.to_stop(0, 3.0) == frozenset()


def test_whoever_is_late_is_told_to_stop_when_half_of_them_wait() -> None:
    pacer = Pacer(PACE, 4)
    for child in range(4):
        pacer.arrived(child, 0, 10.0, Report(4, 1.0, 4.0))
    pacer.assignment(0, 0)  # rounds of 2 s: the deadline is 3 s after the close
    assert pacer.deadline(1) == 13.0
    pacer.arrived(0, 1, 12.5, Report(2, 1.0, 2.0))
    assert pacer.to_stop(1, 14.0) == frozenset()  # perhaps the models came late to all
    pacer.arrived(1, 1, 12.8, Report(2, 1.0, 2.0))
    assert pacer.to_stop(1, 12.9) == frozenset()
    assert pacer.to_stop(1, 13.0) == {2, 3}
    pacer.arrived(2, 1, 13.0, Report(2, 1.0, 2.0))
    assert pacer.to_stop(1, 13.0) == {3}


def test_nobody_is_cut_for_who_has_no_data_left() -> None:
    pacer = Pacer(PACE, 3)
    for child in range(2):
        pacer.arrived(child, 0, 10.0, Report(4, 1.0, 4.0))
    pacer.arrived(2, 0, 10.0, Report(0, 0.0, 0.0))
    assert pacer.assignment(2, 0) is None
    pacer.arrived(2, 1, 10.1, Report(0, 0.0, 0.0))
    assert pacer.to_stop(1, 99.0) == frozenset()
    pacer.arrived(0, 1, 12.0, Report(2, 1.0, 2.0))
    assert pacer.to_stop(1, 12.0) == {1}  # the last one of those that have data
    pacer.arrived(1, 1, 12.5, Report(0, 0.0, 0.0))
    assert pacer.assignment(0, 1) == Assignment(2, 3.0 - 0.0, 2.0, 2.0)
    pacer.arrived(2, 2, 12.6, Report(0, 0.0, 0.0))
    pacer.arrived(1, 2, 12.6, Report(0, 0.0, 0.0))
    assert pacer.to_stop(2, 99.0) == frozenset()  # one alone goes on


def test_who_has_missed_a_round_is_not_waited_for() -> None:
    pacer = Pacer(PACE, 3)
    for child in range(2):
        pacer.arrived(child, 0, 10.0, Report(4, 1.0, 4.0))
    pacer.assignment(0, 0)  # the round has closed without the third
    pacer.arrived(0, 1, 12.0, Report(2, 1.0, 2.0))
    assert pacer.to_stop(1, 12.0) == {1}


def test_rounds_are_not_as_long_as_steps_of_who_is_gone() -> None:
    pacer = Pacer(PACE, 3)
    first_round(pacer)
    pacer.arrived(2, 0, 10.0, Report(2, 4.0, 8.0))
    wanted = []
    for number in range(1, 5):
        found = pacer.assignment(1, number - 1)
        wanted.append(None if found is None else found.round_s)
        now = 10.0 + 2.0 * number
        pacer.arrived(0, number, now, Report(2, 1.0, 2.0))
        pacer.arrived(1, number, now, Report(8, 0.25, 2.0))
        if number == 4:
            pacer.arrived(2, number, now, Report(2, 4.0, 8.0))
    assert wanted == [8.0, 8.0, 8.0, 2.0]  # it has missed the rounds 1, 2 and 3
    assert pacer.assignment(2, 4) is not None  # it is there again


def test_rounds_are_not_as_long_as_steps_of_who_has_no_data_left() -> None:
    pacer = Pacer(PACE, 2)
    first_round(pacer)
    before = pacer.assignment(1, 0)
    pacer.arrived(0, 1, 12.0, Report(0, 0.0, 0.0))
    pacer.arrived(1, 1, 12.0, Report(8, 0.25, 2.0))
    found = pacer.assignment(1, 1)
    assert before is not None
    assert found is not None
    assert (before.round_s, found.round_s) == (2.0, 0.5)
    assert pacer.assignment(0, 1) is None


def test_there_may_be_no_deadline() -> None:
    pacer = Pacer(Pace(deadline=0.0), 2)
    first_round(pacer)
    pacer.assignment(0, 0)
    assert pacer.deadline(1) is None
    given = pacer.assignment(1, 0)
    assert given is not None
    assert given.local_s == float("inf")
    assert pacer.to_stop(1, 1e9) == frozenset()


def test_one_child_waits_for_nobody() -> None:
    pacer = Pacer(PACE, 1)
    assert pacer.to_stop(0, 1e9) == frozenset()


@pytest.mark.parametrize(
    "values", [(-1, 1.0, 1.0), (1 << 31, 1.0, 1.0), (1, float("nan"), 1.0), (1, 1.0, -1.0)]
)
def test_reports_that_cannot_be(values: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="A report must have"):
        Report(*values)
