# SPDX-License-Identifier: Apache-2.0
"""What a worker makes of the times of its own steps."""

import pytest

from tf_hips.loops.timing import Stopwatch

pytestmark = pytest.mark.tf


def watch(*lasted: tuple[int, float]) -> Stopwatch:
    """A watch of two phases; the first has executions of 1 and 3 steps, which compile."""
    now = [0.0]
    made = Stopwatch(lambda: now[0])
    for steps, seconds in ((1, 60.0), (3, 90.0)):
        now[0] += seconds
        made.ran(steps if steps == 1 else 4)
    assert made.step_s == 0.0  # both have compiled
    now[0] += 5.0
    made.begin()
    total = 0
    for steps, seconds in lasted:
        now[0] += seconds
        total += steps
        made.ran(total)
    return made


def test_the_mean_of_steps() -> None:
    made = watch((1, 1.0), (1, 2.0), (3, 6.0))
    assert made.step_s == pytest.approx(9 / 5)
    assert made.last_s == 2.0
    assert made.elapsed_s == 9.0


def test_one_that_waits_for_a_validation_is_left_out() -> None:
    assert watch((1, 1.0), (1, 30.0), (1, 1.2)).step_s == pytest.approx(1.1)


def test_a_busy_machine_is_not_left_out() -> None:
    assert watch(*([(1, 1.0), (1, 9.0)] * 4)).step_s > 4


def test_a_length_that_is_new_compiles() -> None:
    made = watch((2, 50.0), (1, 1.0))
    assert made.step_s == 1.0
    assert made.elapsed_s == 51.0


def test_an_execution_without_data_is_none() -> None:
    assert watch((1, 1.0), (0, 7.0)).step_s == 1.0
