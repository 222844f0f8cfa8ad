# SPDX-License-Identifier: Apache-2.0
"""The default rule: hand-computed plans, and what holds of every plan."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips.esync.rule import Average, Pace, Times, plan

# One step of the slowest, no margin: the rule of the paper without its absolute margin.
PLAIN = Pace(slowest_steps=1, most_slowest_steps=1, margin=0.0)

SECONDS = st.floats(1e-4, 100.0)
TIMES = st.lists(st.builds(Times, SECONDS, st.floats(0.0, 10.0)), min_size=1, max_size=12)


def alone(steps_s: list[float], pace: Pace) -> tuple[int, ...]:
    return plan([Times(one) for one in steps_s], pace).steps


@pytest.mark.parametrize(
    ("steps_s", "pace", "steps", "round_s", "idle_share"),
    [
        # 3.5 / .03 = 116.7, 3.5 / .05 = 70; idle 3.5 - 116 * .03 = .02 in two of six.
        ([3.5, 3.5, 0.03, 0.03, 0.05, 0.05], PLAIN, (1, 1, 116, 116, 70, 70), 3.5, 0.04 / 21),
        # .99 * 3.5 = 3.465: / .03 = 115.5, / .05 = 69.3.
        (
            [3.5, 3.5, 0.03, 0.03, 0.05, 0.05],
            Pace(slowest_steps=1, most_slowest_steps=1, margin=0.01),
            (1, 1, 115, 115, 69, 69),
            3.5,
            0.2 / 21,
        ),
        # One step of the slowest: .7 s cannot gain, a third of the time is lost.
        ([1.0, 0.7, 0.3], PLAIN, (1, 1, 3), 1.0, 0.4 / 3),
        # Seven: 7 / .7 = 10, 7 / .3 = 23.3.
        (
            [1.0, 0.7, 0.3],
            Pace(slowest_steps=7, most_slowest_steps=7, margin=0.0),
            (7, 10, 23),
            7.0,
            0.1 / 21,
        ),
        ([0.2, 0.2], PLAIN, (1, 1), 0.2, 0.0),
        ([2.0], Pace(slowest_steps=5, most_slowest_steps=5), (5,), 10.0, 0.0),
        ([4.0, 1e-9], Pace(slowest_steps=1, most_slowest_steps=1), (1, 100_000), 4.0, 0.49998),
    ],
)  # fmt: skip
def test_plans_that_were_computed_by_hand(
    steps_s: list[float], pace: Pace, steps: tuple[int, ...], round_s: float, idle_share: float
) -> None:
    made = plan([Times(one) for one in steps_s], pace)
    assert made.steps == steps
    assert made.round_s == pytest.approx(round_s)
    assert made.idle_share == pytest.approx(idle_share, abs=1e-4)
    assert made.mean_steps == pytest.approx(sum(steps) / len(steps))


def test_transfers_are_part_of_a_round() -> None:
    # B = max(1 + 2, 0 + 3) = 3: the one with the slow link has 2 s for its steps of .5 s.
    times = [Times(1.0, 1.0), Times(1.5, 0.0), Times(0.5, 1.0), Times(0.5, 0.0)]
    pace = Pace(slowest_steps=2, most_slowest_steps=2, margin=0.0, link_share=1.0)
    assert plan(times, pace).steps == (2, 2, 4, 6)
    assert plan(times, pace).round_s == 3.0


def test_a_slow_link_makes_rounds_longer() -> None:
    # A link that is busy for 1 s may be so for a tenth of the round: 10 s, 9 of them for steps.
    made = plan([Times(0.1, 1.0), Times(0.1, 0.0)], Pace(margin=0.0, link_share=0.1))
    assert (made.steps, made.round_s) == ((90, 100), 10.0)


def test_no_round_is_longer_for_a_link_than_steps_fill() -> None:
    # A tenth of .6 s would do for the link, but nobody has a step of .04 s for the rest of them.
    made = plan([Times(0.5, 0.06), Times(0.025, 0.06)], Pace(margin=0.0, link_share=0.1))
    assert (made.steps, made.round_s) == ((1, 20), 0.56)
    # Two steps do fit into 1.2 s.
    made = plan([Times(0.5, 0.12), Times(0.025, 0.12)], Pace(margin=0.0, link_share=0.1))
    assert (made.steps, made.round_s) == ((2, 40), 1.12)


def test_mild_differences_gain_by_more_steps_of_the_slowest() -> None:
    pace = Pace(slowest_steps=1, most_slowest_steps=32, margin=0.0)
    made = plan([Times(1.0), Times(0.7)], pace)
    assert alone([1.0, 0.7], PLAIN) == (1, 1)  # idle 15 %
    # (1, 1), (2, 2), (3, 4) and (4, 5) leave 15, 15, 3.3 and 6.3 % idle; 4.9 of 5 s leave 1 %.
    assert made.steps == (5, 7)
    assert made.idle_share <= pace.idle_share


@given(TIMES, st.integers(1, 8), st.integers(0, 24), st.floats(0.0, 0.2))
def test_nobody_makes_the_slowest_wait(
    times: list[Times], slowest: int, more: int, margin: float
) -> None:
    pace = Pace(
        slowest_steps=slowest, most_slowest_steps=slowest + more, margin=margin, max_steps=2**30
    )
    made = plan(times, pace)
    longest_s = 0.0
    for steps, one in zip(made.steps, times, strict=True):
        assert slowest <= steps < 2**30
        lasts_s = one.transfer_s + steps * one.step_s
        assert lasts_s <= made.round_s * (1 + 1e-6)
        # Another step would not have fitted.
        assert lasts_s + one.step_s > (1 - margin) * made.round_s * (1 - 1e-6)
        assert one.transfer_s <= 2 * pace.link_share * made.round_s * (1 + 1e-9)
        longest_s = max(longest_s, lasts_s)
    idle = 1 - sum(t.transfer_s + n * t.step_s for n, t in zip(made.steps, times, strict=True)) / (
        len(times) * made.round_s
    )
    assert made.idle_share == pytest.approx(max(0.0, idle), abs=1e-6)


@given(TIMES, st.randoms())
def test_the_order_of_children_is_nobody_s_advantage(times: list[Times], random: object) -> None:
    order = list(range(len(times)))
    random.shuffle(order)  # type: ignore[attr-defined]
    made, other = plan(times, Pace()), plan([times[one] for one in order], Pace())
    assert other.steps == tuple(made.steps[one] for one in order)


@given(TIMES)
def test_who_is_faster_takes_as_many_steps_at_least(times: list[Times]) -> None:
    made = plan(times, Pace())
    for steps, one in zip(made.steps, times, strict=True):
        for others, other in zip(made.steps, times, strict=True):
            if one.step_s <= other.step_s and one.transfer_s <= other.transfer_s:
                assert steps >= others


@given(TIMES, st.integers(-8, 8))
def test_seconds_have_no_unit(times: list[Times], power: int) -> None:
    """No constant of the rule is in seconds: a power of 2 changes no bit of a quotient."""
    scaled = [Times(one.step_s * 2.0**power, one.transfer_s * 2.0**power) for one in times]
    assert plan(scaled, Pace()).steps == plan(times, Pace()).steps


@given(st.lists(SECONDS, min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_an_average_stays_between_what_it_has_seen(seen: list[float], smoothing: float) -> None:
    average = Average(smoothing)
    for one in seen:
        average.add(one, 2 * one)
    assert average.times is not None
    assert min(seen) * (1 - 1e-9) <= average.times.step_s <= max(seen) * (1 + 1e-9)
    assert 2 * min(seen) * (1 - 1e-9) <= average.times.transfer_s <= 2 * seen[-1] * (1 + 1e-9)


def test_an_average_forgets_by_halves() -> None:
    average = Average(0.5)
    for one in (8.0, 4.0, 4.0):
        average.add(one, None)
    assert average.times == Times(5.0)  # 8, 6, 5


def test_a_quicker_transfer_counts_at_once() -> None:
    average = Average(0.5)
    for one in (8.0, 2.0, 4.0):
        average.add(1.0, one)
    assert average.times == Times(1.0, 3.0)  # 8, 2, 3


@given(
    st.builds(
        Pace,
        slowest_steps=st.integers(1, 20),
        most_slowest_steps=st.integers(20, 99),
        margin=st.floats(0, 0.99),
        smoothing=st.floats(0.01, 1.0),
        deadline=st.one_of(st.just(0.0), st.floats(1.0, 1e6)),
    )
)
def test_a_pace_is_read_back(pace: Pace) -> None:
    assert Pace.parse(pace.text) == pace


def test_a_pace_may_leave_parameters_out() -> None:
    assert Pace.parse("") == Pace()
    assert Pace.parse(" margin=0.05, max_steps=9 ") == Pace(margin=0.05, max_steps=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margn=0.1", "must have each of"),
        ("margin=0.1,margin=0.2", "at most once"),
        ("margin", "`margin` must be a number"),
        ("margin=1", r"`margin` must be in \[0, 1\)"),
        ("margin=nan", r"`margin` must be in \[0, 1\)"),
        ("slowest_steps=0", "`slowest_steps` must be a whole number >= 1"),
        ("slowest_steps=1.5", "`slowest_steps` must be a number"),
        ("slowest_steps=40", "`most_slowest_steps` must be >= `slowest_steps`, 40"),
        ("smoothing=0", "`smoothing` must be in"),
        ("deadline=0.5", "`deadline` must be 0 or >= 1"),
        ("link_share=0", "`link_share` must be in"),
    ],
)
def test_a_pace_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pace.parse(text)


@pytest.mark.parametrize("times", [[], [Times(0.0)], [Times(math.nan)], [Times(1.0, -1.0)]])
def test_times_that_are_none(times: list[Times]) -> None:
    with pytest.raises(ValueError, match="Received"):
        plan(times, Pace())
