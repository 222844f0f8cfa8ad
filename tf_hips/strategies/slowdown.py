# SPDX-License-Identifier: Apache-2.0
"""A worker that is slower than it is: steps of `fit` padded with sleep (`tf-hips run --slowdown`).

    20x     each step lasts 20 times the quickest one so far, its own part included
    0.5s    each step lasts half a second at least

The quickest, because a step may contain waiting for others, whose padding must not be multiplied.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any

import keras

from tf_hips.errors import ConfigError

VARIABLE = "TF_HIPS_SLOWDOWN"
_TEXT = re.compile(r"([0-9.]+(?:e[-+]?[0-9]+)?)(x|s|ms)")


@dataclasses.dataclass(frozen=True)
class Slowdown:
    """How steps are padded: to `factor` times the quickest, and to `least_s` at least."""

    factor: float = 1.0
    least_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Slowdown":
        """Reads `20x`, `0.5s` or `50ms`.

        Raises:
            ConfigError: it is none of them.
        """
        match = _TEXT.fullmatch(text)
        try:
            value = float(match[1]) if match else 0.0
        except ValueError:
            value = 0.0
        if match and match[2] == "x" and 1 <= value < math.inf:
            return cls(factor=value)
        if match and match[2] != "x" and 0 < value < math.inf:
            return cls(least_s=value if match[2] == "s" else value / 1e3)
        raise ConfigError(
            f"A slowdown must be a factor >= 1 such as 20x, or a time such as 0.5s or 50ms. "
            f"Received: {text!r}"
        )


def asked_for() -> Slowdown | None:
    """What the launcher wants of this process.

    Raises:
        ConfigError: the environment says something else.
    """
    text = os.environ.get(VARIABLE)
    return None if text is None else Slowdown.parse(text)


def making(
    slowdown: Slowdown,
    keras_method: Callable[..., Any],
    model: keras.Model,
    step_function: Any,
) -> Any:
    """In the place of Keras' `_make_function`: training steps come padded."""
    function = keras_method(model, step_function)
    if getattr(step_function, "__name__", "") != "train_step":
        return function
    padding = Padding(slowdown)

    @functools.wraps(function)
    def run(iterator: Any) -> Any:
        began = time.monotonic()
        logs = function(iterator)
        padding.pad(time.monotonic() - began, int(model.steps_per_execution))
        return logs

    return run


class Padding:
    """The padding of one function of training steps."""

    def __init__(self, slowdown: Slowdown, sleep: Callable[[float], None] = time.sleep) -> None:
        """Has seen no step; `sleep` waits."""
        self._slowdown = slowdown
        self._sleep = sleep
        self._quickest_s = math.inf

    def pad(self, seconds: float, steps: int) -> None:
        """Waits for what is missing of so many steps that lasted `seconds` together."""
        self._quickest_s = min(self._quickest_s, seconds / steps)
        step_s = max(self._slowdown.factor * self._quickest_s, self._slowdown.least_s)
        missing_s = step_s * steps - seconds
        if missing_s > 0:
            self._sleep(missing_s)
