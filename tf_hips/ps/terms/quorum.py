# SPDX-License-Identifier: Apache-2.0
"""Quorums: how many children make a round, how long it waits for the others, and what it knows.

    opened -----child a-----child b-----------------deadline           child c, late
                                        closed at the deadline by a and b

A deadline is fixed, or median + K MAD of past arrivals: the seconds from the opening of a round
to a child's complete update (hivemind #676 has the form). Plain values and numbers: no thread here.
"""

import dataclasses
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

NEXT, DROP = "next", "drop"
"""What becomes of an update that is complete after its round was closed."""

ADAPTIVE = "adaptive"
DEFAULT_MADS = 5.0
DEFAULT_BELOW_S = 300.0

# Rounds of all children that an adaptive deadline looks at, and how many it needs.
WINDOW_ROUNDS = 16
FIRST_ROUNDS = 4
# By how much adaptive deadlines of the first round, and the time of a child that votes to hear that
# it is asked, are longer after a restart: children look for their server every 2 s at least, and
# find out first why it was gone.
RETURN_S = 10.0
# Arrivals that are all alike have a MAD of 0, and the next one is a little later.
_FLOOR_S = 0.05
_FLOOR_SHARE = 0.05


_LATE = ", late updates: "  # in a `text`


def drops_late(text: str) -> bool:
    """Whether late updates count nowhere under the quorum that has this `text`."""
    return text.rpartition(_LATE)[2] == DROP


@dataclasses.dataclass(frozen=True)
class Quorum:
    """When a round closes without some of its children.

    Attributes:
        least: children whose updates must be complete.
        deadline_s: seconds from the opening of a round after which `least` are enough; None:
            adaptive.
        mads: of an adaptive deadline, how many MADs it lies beyond the median.
        late: NEXT or DROP.
        below_s: seconds that fewer than `least` children may be there before the run ends.
    """

    least: int
    deadline_s: float | None = None
    mads: float = DEFAULT_MADS
    late: str = NEXT
    below_s: float = DEFAULT_BELOW_S

    @property
    def text(self) -> str:
        """What decides on who is in a round, in words; equal where that is equal."""
        if self.deadline_s is None:
            when = f"at an adaptive deadline of {self.mads:g} MADs"
        else:
            when = f"after {self.deadline_s:g} s"
        return f"{self.least} children {when}{_LATE}{self.late}"


def from_options(
    num_children: int,
    quorum: int | None,
    round_deadline: float | str | None,
    deadline_mads: float | None,
    late: str | None,
    close_at: int | None,
    below_quorum_s: float | None,
) -> Quorum | None:
    """What a server is told, as one value; None: rounds wait for all.

    Raises:
        ValueError: an option is out of range, or means nothing beside the others.
    """
    for name, count in (("quorum", quorum), ("close_at", close_at)):
        if count is not None and not 1 <= count <= num_children:
            raise ValueError(
                f"`{name}` must be from 1 to the number of parties, {num_children}. Received: "
                f"{name}={count}"
            )
    if close_at is not None:
        for name, value in (
            ("quorum", quorum),
            ("round_deadline", round_deadline),
            ("deadline_mads", deadline_mads),
        ):
            if value is not None:
                raise ValueError(
                    f"`close_at` closes a round with that arrival, so it excludes `{name}`. "
                    f"Received: close_at={close_at}, {name}={value}"
                )
    least = close_at if close_at is not None else quorum
    if least is None or least == num_children:
        for name, value in (
            ("round_deadline", round_deadline),
            ("deadline_mads", deadline_mads),
            ("late", late),
            ("below_quorum_s", below_quorum_s),
        ):
            if value is not None:
                raise ValueError(
                    f"`{name}` needs a `quorum` or `close_at` below the number of parties, "
                    f"{num_children}. Received: {name}={value}"
                )
        return None
    if late not in (None, NEXT, DROP):
        raise ValueError(f"`late` must be {NEXT} or {DROP}. Received: late={late!r}")
    is_adaptive = close_at is None and round_deadline in (None, ADAPTIVE)
    if deadline_mads is not None and not is_adaptive:
        raise ValueError(
            f"`deadline_mads` is of adaptive deadlines. Received: deadline_mads={deadline_mads}, "
            f"round_deadline={round_deadline}"
        )
    fixed = None if is_adaptive or close_at is not None else round_deadline
    if fixed is not None and (isinstance(fixed, str) or not 0 < fixed < math.inf):
        raise ValueError(
            f"`round_deadline` must be {ADAPTIVE} or a number of seconds > 0. Received: "
            f"round_deadline={fixed!r}"
        )
    for name, value in (("deadline_mads", deadline_mads), ("below_quorum_s", below_quorum_s)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`{name}` must be > 0 and finite. Received: {name}={value}")
    deadline_s = 0.0 if close_at is not None else None if fixed is None else float(fixed)
    return Quorum(
        least,
        deadline_s,
        DEFAULT_MADS if deadline_mads is None else float(deadline_mads),
        late or NEXT,
        DEFAULT_BELOW_S if below_quorum_s is None else float(below_quorum_s),
    )


class Arrivals:
    """How long after the opening of a round updates were complete, of the last rounds."""

    def __init__(self, num_children: int) -> None:
        """Nothing has arrived."""
        self._enough = FIRST_ROUNDS * num_children
        self._offsets: deque[float] = deque(maxlen=WINDOW_ROUNDS * num_children)
        self._news: list[float] = []

    def note(self, offset_s: float) -> None:
        """An update was complete so many seconds after its round was opened."""
        self._offsets.append(offset_s)
        self._news.append(round(offset_s, 6))

    def news(self) -> list[float]:
        """What was noted since the last call."""
        found, self._news = self._news, []
        return found

    def kept(self) -> list[float]:
        """What `restore` takes."""
        return [round(one, 6) for one in self._offsets]

    def restore(self, offsets: Iterable[float]) -> None:
        """Takes what another one has noted."""
        self._offsets.extend(offsets)

    def deadline_s(self, mads: float) -> float | None:
        """Seconds after the opening: median + `mads` MADs; None: too little has arrived.

        The MAD counts as 5 % of the median at least, and as 50 ms.
        """
        if len(self._offsets) < self._enough:
            return None
        median = statistics.median(self._offsets)
        mad = statistics.median(abs(one - median) for one in self._offsets)
        return median + mads * max(mad, _FLOOR_SHARE * median, _FLOOR_S)


class Clock(Protocol):
    """Tells seconds, and calls later."""

    def now(self) -> float:
        """Seconds since some moment."""

    def after(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        """Calls `action` in so many seconds, in a thread of its own; returns what prevents it."""


class SystemClock:
    """The clock of a real server."""

    def now(self) -> float:
        """Seconds by the monotonic clock."""
        return time.monotonic()

    def after(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        """Calls `action` in so many seconds."""
        timer = threading.Timer(min(max(0.0, seconds), threading.TIMEOUT_MAX), action)
        timer.daemon = True
        timer.start()
        return timer.cancel
