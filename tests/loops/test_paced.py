# SPDX-License-Identifier: Apache-2.0
"""The default rule without a server: every worker computes the same of what all have said."""

from typing import Any

import pytest

from tf_hips.comm import primitives
from tf_hips.errors import ConfigError, ProtocolError
from tf_hips.esync.pacer import Report
from tf_hips.esync.rule import Pace
from tf_hips.loops.paced import Asked, Paced

pytestmark = pytest.mark.tf

PACE = Pace(slowest_steps=2, most_slowest_steps=2, margin=0.0, link_share=1.0)


def said(step_s: float, local_s: float, span_s: float, pace: Pace = PACE) -> dict[str, Any]:
    return {"step_s": step_s, "local_s": local_s, "span_s": span_s, "pace": pace.text}


now = [100.0]


def begun(elapsed_s: float) -> Paced:
    """One that has trained so long, on the clock `now`."""
    one = Paced(PACE, lambda: now[0])
    one.begin(is_shared=False)
    now[0] += elapsed_s
    return one


def test_all_compute_the_same_plan_whatever_their_clocks_say() -> None:
    plans = []
    for begins in (0.0, 1e6):  # of each worker's own clock
        now = [begins]
        members = [Paced(PACE, lambda now=now: now[0]) for _ in range(2)]
        assert [one.begin(is_shared=False) for one in members] == [2, 2]
        words = [said(1.0, 4.0, 0.0), said(0.25, 1.0, 0.0)]
        now[0] += 4.0
        for own, one in enumerate(members):
            one.hear(0, own, [(4, told) for told in words])
        steps = [one.begin(is_shared=False) for one in members]
        # Half a second of the slow one's rounds is its way, of which the first does not count.
        words = [said(1.0, 2.0, 2.5), said(0.25, 2.0, 2.0)]
        for number in (1, 2):
            now[0] += 2.5
            for own, one in enumerate(members):
                one.hear(number, own, [(2, words[0]), (8, words[1])])
        plans.append((steps, [one.begin(is_shared=False) for one in members]))
    assert plans == [([2, 8], [2, 10])] * 2


@pytest.mark.parametrize("claim", [1e9, 1e12, 9e15])
@pytest.mark.parametrize("steps", [1, 4])
def test_one_claimed_time_gives_nobody_steps_without_end(claim: float, steps: int) -> None:
    """Nobody's step, or way between two meetings, is longer than this worker has seen pass."""
    one = begun(4.0)
    lie = steps, said(claim, claim, claim)
    one.hear(0, 0, [(4, said(1.0, 4.0, 0.0)), lie])
    made = [one.begin(is_shared=False)]
    for number in range(1, 6):
        now[0] += 8.0
        one.hear(number, 0, [(8, said(1.0, 8.0, 8.0)), lie])
        made.append(one.begin(is_shared=False))
        assert one.assigned is not None and one.assigned.round_s <= 2 * 8.0 + 1e-6
    # Two steps of one that makes a step in all of a round.
    assert max(made) <= 2 * 8, made


def test_what_is_over_when_a_meeting_ends_was_before_this_worker_heard_of_it() -> None:
    one = begun(4.0)
    one.hear(0, 0, [(4, said(1.0, 4.0, 0.0)), (4, said(1.0, 4.0, 0.0))])
    now[0] += 2.0
    one.hear(1, 0, [(2, said(1.0, 2.0, 2.0)), (2, said(1.5, 3.0, 3.0))])
    assert one._pacer is not None
    times = one._pacer.times(1)
    assert times is not None and times.step_s == 1.0


def test_the_span_is_from_one_meeting_to_the_next() -> None:
    now = [100.0]  # its own
    one = Paced(PACE, lambda: now[0])
    assert one.arrived(0, Report(1, 1.0, 1.0), None) == 0.0
    now[0] = 103.0
    one.hear(0, 0, [(1, said(1.0, 1.0, 0.0))])
    now[0] = 107.5
    assert one.arrived(1, Report(1, 1.0, 1.0), None) == 4.5


def test_steps_end_by_number_before_anything_is_assigned() -> None:
    one = Paced(PACE)
    assert not one.is_over(3, 99.0, planned=4)
    assert one.is_over(4, 0.0, planned=4)


def test_who_is_absent_is_in_no_plan() -> None:
    one = begun(4.0)
    one.hear(0, 0, [(4, said(1.0, 4.0, 0.0)), (0, {}), (4, said(0.25, 1.0, 0.0))])
    assert one.begin(is_shared=False) == 2
    assert one.assigned is not None
    assert one.assigned.mean_steps == 5.0


class Answers:
    """A server's end: notes reports, and has an answer when the test says so."""

    def __init__(self) -> None:
        self.reported: list[tuple[int, int]] = []
        self.is_heard = False
        self.waited_s: list[float] = []

    def report(self, number: int, report: Report) -> None:
        self.reported.append((number, report.steps))

    def is_answered(self, patience_s: float) -> bool:
        self.waited_s.append(patience_s)
        return self.is_heard

    def assignment(self, patience_s: float) -> None:
        del patience_s

    def is_stopped(self) -> bool:
        return False


def test_the_first_round_goes_on_until_all_have_made_their_first_steps() -> None:
    one, server = Paced(PACE), Answers()
    assert one.is_over(2, 2.0, planned=2)
    assert one.goes_on(0, Report(2, 1.0, 2.0), server)  # type: ignore[arg-type]
    assert one.goes_on(0, Report(3, 1.0, 3.0), server)  # type: ignore[arg-type]
    server.is_heard = True
    assert not one.goes_on(0, Report(9, 1.0, 9.0), server)  # type: ignore[arg-type]
    # The server has heard it once, when the first steps were made, and there it waited a moment.
    one.arrived(0, Report(9, 1.0, 9.0), server)  # type: ignore[arg-type]
    assert server.reported == [(0, 2)]
    assert server.waited_s == [0.25, 0.0, 0.0]
    one.arrived(1, Report(4, 1.0, 4.0), server)  # type: ignore[arg-type]
    assert server.reported == [(0, 2), (1, 4)]


def test_the_first_round_ends_without_a_server_or_after_a_minute_or_with_an_assignment() -> None:
    one, server = begun(4.0), Answers()
    assert not one.goes_on(0, Report(2, 1.0, 2.0), None)
    assert not one.goes_on(0, Report(2, 30.0, 60.0), server)  # type: ignore[arg-type]
    one.hear(0, 0, [(4, said(1.0, 4.0, 0.0)), (4, said(0.25, 1.0, 0.0))])
    assert one.assigned is None
    one.begin(is_shared=False)
    assert not one.goes_on(1, Report(2, 1.0, 2.0), server)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_was_assigned_holds_until_something_else_is(is_shared: bool) -> None:
    """Also in another `fit` of a party of several workers, where rank 0's holds for all."""
    primitives.init()
    one = begun(4.0)
    one.hear(0, 1, [(4, said(1.0, 4.0, 0.0)), (4, said(0.25, 1.0, 0.0))])
    assert one.begin(is_shared=is_shared) == 8 and one.assigned is not None
    assert [one.begin(is_shared=is_shared) for _ in range(2)] == [8, 8]


def test_members_of_different_paces_do_not_meet() -> None:
    one = Paced(PACE)
    with pytest.raises(ProtocolError, match="All members must keep one pace"):
        one.hear(0, 0, [(1, said(1.0, 1.0, 0.0)), (1, said(1.0, 1.0, 0.0, Pace()))])


def test_below_a_robust_rule_one_of_another_pace_than_most_does_not_count() -> None:
    from tf_hips.strategies.agreeing import majority

    odd = said(1e3, 1e3, 0.0, Pace())
    told = [(1, said(1.0, 1.0, 0.0)), (1, said(1.0, 1.0, 0.0)), (1, odd)]
    one = begun(4.0)
    one.hear(0, 0, told, most=majority)
    one.begin(is_shared=False)
    assert one.assigned is not None
    assert one.assigned.round_s <= 2 * 4.0
    with pytest.raises(ProtocolError, match="All members must keep one pace"):
        Paced(Pace()).hear(0, 2, told, most=majority)


def test_a_state_server_with_tls_wants_a_certificate() -> None:
    with pytest.raises(ConfigError, match="wants the certificate of a party"):
        Asked("https://127.0.0.1:1", None, 0, 0.5)
