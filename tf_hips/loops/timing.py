# SPDX-License-Identifier: Apache-2.0
"""How long local steps last, measured by the process that makes them, on its monotonic clock."""

import statistics
import time
from collections.abc import Callable

import tensorflow as tf

# A step that waits for a validation is as long as many. One of a phase is left out; if all long
# ones were, what a busy machine costs would be missing from the mean.
_ODD = 5.0


class Stopwatch:
    """The times of one local phase after the other.

    The first execution of each length is not counted: it compiles.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins a phase."""
        self._clock = clock
        self._has_gpu = bool(tf.config.list_logical_devices("GPU"))
        self._known: set[int] = set()
        self._last_s = 0.0
        self.begin()

    def begin(self) -> None:
        """A phase begins."""
        self._began = self._newest = self._clock()
        self._steps = 0
        self._lasted: list[tuple[int, float]] = []

    def go_on(self) -> float:
        """The phase goes on after a break, such as that between two `fit`s, which is in no step.

        Returns:
            Seconds of the break.
        """
        before, self._newest = self._newest, self._clock()
        return self._newest - before

    def ran(self, steps: int) -> None:
        """An execution has ended; `steps` of the phase have been made."""
        if self._has_gpu:
            tf.experimental.sync_devices()  # a step is over when the device has made it
        now = self._clock()
        made = steps - self._steps
        if made > 0:
            self._last_s = (now - self._newest) / made
            if made in self._known:
                self._lasted.append((made, now - self._newest))
            self._known.add(made)
        self._steps, self._newest = steps, now

    @property
    def elapsed_s(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._began

    @property
    def last_s(self) -> float:
        """Seconds of a step of the newest execution; 0 before the first."""
        return self._last_s

    @property
    def step_s(self) -> float:
        """Seconds of a step on the mean, without one execution that lasted as long as many.

        0: not known.
        """
        if not self._lasted:
            return 0.0
        each = sorted((seconds / made, made) for made, seconds in self._lasted)
        if len(each) > 1 and each[-1][0] > _ODD * statistics.median(one for one, _ in each[:-1]):
            each.pop()
        return sum(one * made for one, made in each) / sum(made for _, made in each)
