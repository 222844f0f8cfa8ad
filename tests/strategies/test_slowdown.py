# SPDX-License-Identifier: Apache-2.0
"""Workers that are made slow: texts, and how long is waited."""

import pytest

from tf_hips.errors import ConfigError
from tf_hips.strategies.slowdown import VARIABLE, Padding, Slowdown, asked_for

pytestmark = pytest.mark.tf


def waits(text: str, *lasted: tuple[float, int]) -> list[float]:
    waited: list[float] = []
    padding = Padding(Slowdown.parse(text), waited.append)
    for seconds, steps in lasted:
        padding.pad(seconds, steps)
    return waited


def test_a_factor_is_of_the_quickest_step_so_far() -> None:
    # The third step waits for others: what it lasts is long enough.
    assert waits("20x", (3.0, 1), (0.1, 1), (9.0, 1), (0.2, 1)) == pytest.approx([57.0, 1.9, 1.8])
    assert waits("2x", (0.4, 4)) == pytest.approx([0.4])
    assert waits("1x", (0.4, 4)) == []


def test_a_time_is_the_least_of_a_step() -> None:
    assert waits("50ms", (0.01, 1), (0.2, 1), (0.1, 4)) == pytest.approx([0.04, 0.1])
    assert waits("0.5s", (0.1, 1)) == pytest.approx([0.4])


def test_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert asked_for() is None
    monkeypatch.setenv(VARIABLE, "20x")
    assert asked_for() == Slowdown(factor=20.0)


@pytest.mark.parametrize("text", ["", "20", "0.5x", "-1s", "0s", "infs", "1..2x", "x", "1e999s"])
def test_texts_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="A slowdown must be a factor"):
        Slowdown.parse(text)
