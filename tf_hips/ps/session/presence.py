# SPDX-License-Identifier: Apache-2.0
"""Which children are there: each holds one call open for as long as it takes part.

A child that computes calls nobody for minutes, so its silence says nothing. The end of the call it
holds open does: the process has ended or the link is broken. The child then has some time to come
back over another connection; when that is over it is lost.

Not thread-safe but for the timers it starts: the session's lock guards it.
"""

import threading
from collections.abc import Callable, Iterable


class Presence:
    """Who is there, and since when somebody is not."""

    def __init__(
        self, changed: threading.Condition, lost_after_s: float, lose: Callable[[int], None]
    ) -> None:
        """Nobody is expected yet.

        Args:
            changed: guards all methods; `lose` is called with its lock held.
            lost_after_s: seconds that a child may be away.
            lose: gets the child that was away for longer.
        """
        self._changed = changed
        self._lost_after_s = lost_after_s
        self._lose = lose
        self._calls: dict[int, list[object]] = {}
        self._timers: dict[int, threading.Timer] = {}

    def expect(self, children: Iterable[int]) -> None:
        """From now on each of `children` must be there."""
        for child in children:
            if not self._calls.setdefault(child, []):
                self._await(child)

    def arrive(self, child: int, call: object) -> None:
        """A call by which `child` shows that it is there."""
        if child in self._calls:
            self._calls[child].append(call)
            self._stop_timer(child)

    def is_there(self, child: int) -> bool:
        """Whether `child` shows that it is there."""
        return bool(self._calls.get(child))

    def is_newest(self, child: int, call: object) -> bool:
        """Whether no such call has come since; older ones may be of dead connections."""
        calls = self._calls.get(child)
        return not calls or calls[-1] is call

    def depart(self, child: int, call: object) -> None:
        """The end of such a call; another one, over a newer connection, may be there."""
        if child in self._calls:
            self._calls[child].remove(call)
            if not self._calls[child]:
                self._await(child)

    def release(self, child: int) -> None:
        """`child` has left and may be away."""
        self._calls.pop(child, None)
        self._stop_timer(child)

    def excuse(self, child: int) -> None:
        """`child` may be away, and may come back."""
        self._stop_timer(child)

    def stop(self) -> None:
        """Everybody may be away."""
        for child in list(self._calls):
            self.release(child)

    def _await(self, child: int) -> None:
        self._stop_timer(child)
        timer = threading.Timer(self._lost_after_s, lambda: self._time_is_up(child, timer))
        timer.daemon = True
        self._timers[child] = timer
        timer.start()

    def _stop_timer(self, child: int) -> None:
        timer = self._timers.pop(child, None)
        if timer is not None:
            timer.cancel()

    def _time_is_up(self, child: int, timer: threading.Timer) -> None:
        with self._changed:
            if self._timers.get(child) is timer:  # else it came back while we waited for the lock
                self._lose(child)
