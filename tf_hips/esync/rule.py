# SPDX-License-Identifier: Apache-2.0
"""The default rule: how many local steps each child takes in the next round.

A round of child i lasts o_i + n_i c_i: o_i seconds of transfer, n_i steps of c_i seconds. All of
them are to end together, at B. With m steps of the slowest, margin e and link share r:

    L   = max_i o_i / r
    m'  = max( m, min_i floor( (L - o_i) / c_i ) )
    B   = max_i ( o_i + m' c_i )
    n_i = max( m', floor( ((1 - e) B - o_i) / c_i ) )

One step of the slowest is too coarse where devices differ mildly (1 s and 0.7 s would stay in
step), so m grows from `slowest_steps` until the mean idle share that is expected falls to
`idle_share`, at most to `most_slowest_steps`. Slow links make rounds longer, up to about L, by
whole steps of all: in a round of L itself the slowest would wait wherever no step fits any more.

Invariants: n_i >= m >= 1, unless `max_steps` cuts it; a round of n_i steps ends by B, so nobody
makes the slowest wait; no link is busy for more than 2 r of B; who is at least as fast with its
link as another takes at least as many steps.

After ESync (Li et al., IEEE TSC, 2020), which has m = 1, no transfer and an absolute margin.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

# Quotients of floats that should be whole come out a little below.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Pace:
    """The parameters of the rule, equal at all children.

    Attributes:
        slowest_steps: least number of steps of the slowest child in a round.
        most_slowest_steps: how far that may grow to make use of mild differences.
        idle_share: expected idle share of a round, in [0, 1), from which on it need not grow.
        link_share: share of a round, in (0, 1], in which a child's link may be busy; at most twice
            that, where a step of the slowest is longer than what is left of such a round.
        margin: share of a round, in [0, 1), by which others arrive before the slowest.
        smoothing: weight, in (0, 1], of the newest times in the average of each child.
        deadline: times the expected length of a round after which children are late: they begin no
            step that would end after it by more than half, and who still does is told to stop; 0:
            nobody is late.
        first_steps: steps of every child in the first round, of which no times are known; of two
            the second one is timed, as the first compiles.
        max_steps: greatest number of steps of any child.
    """

    slowest_steps: int = 1
    most_slowest_steps: int = 32
    idle_share: float = 0.03
    link_share: float = 0.1
    margin: float = 0.01
    smoothing: float = 0.5
    deadline: float = 1.0
    first_steps: int = 2
    max_steps: int = 100_000

    def __post_init__(self) -> None:
        """Checks all values.

        Raises:
            ValueError: one of them is wrong.
        """
        for name in ("slowest_steps", "most_slowest_steps", "first_steps", "max_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise ValueError(
                    f"`{name}` must be a whole number >= 1. Received: {name}={value!r}"
                )
        for name, is_right, text in (
            ("idle_share", 0 <= self.idle_share < 1, "in [0, 1)"),
            ("link_share", 0 < self.link_share <= 1, "in (0, 1]"),
            ("margin", 0 <= self.margin < 1, "in [0, 1)"),
            ("smoothing", 0 < self.smoothing <= 1, "in (0, 1]"),
            ("deadline", self.deadline == 0 or 1 <= self.deadline < math.inf, "0 or >= 1"),
        ):
            if not is_right:
                raise ValueError(
                    f"`{name}` must be {text}. Received: {name}={getattr(self, name)!r}"
                )
        if self.most_slowest_steps < self.slowest_steps:
            raise ValueError(
                f"`most_slowest_steps` must be >= `slowest_steps`, {self.slowest_steps}. Received: "
                f"most_slowest_steps={self.most_slowest_steps}"
            )

    @property
    def text(self) -> str:
        """All values as a text that `parse` reads, the same for equal ones."""
        fields = dataclasses.fields(self)
        return ",".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields)

    @classmethod
    def parse(cls, text: str) -> "Pace":
        """Reads what `text` says, parameters that are left out have their defaults.

        Raises:
            ValueError: it names something else, or a value is wrong.
        """
        kinds = {name: type(value) for name, value in dataclasses.asdict(cls()).items()}
        values: dict[str, int | float] = {}
        for part in text[:1000].split(",") if text.strip() else ():
            name, _, value = (one.strip() for one in part.partition("="))
            if name not in kinds or name in values:
                raise ValueError(
                    f"a pace must have each of {', '.join(kinds)} at most once. Received: "
                    f"{part[:60]!r}"
                )
            try:
                values[name] = kinds[name](value)
            except ValueError as error:
                raise ValueError(f"`{name}` must be a number. Received: {value[:40]!r}") from error
        return cls(**values)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Times:
    """What is known of a child: seconds of one step, and of all of a round that are no steps."""

    step_s: float
    transfer_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """The next round.

    Attributes:
        steps: of each child.
        round_s: how long it should last, in seconds.
        idle_share: the share of that in which a child is expected to wait, on the mean.
    """

    steps: tuple[int, ...]
    round_s: float
    idle_share: float

    @functools.cached_property
    def mean_steps(self) -> float:
        """Steps of a child on the mean, which normalised averaging brings each delta to."""
        return sum(self.steps) / len(self.steps)


def plan(times: Sequence[Times], pace: Pace) -> Plan:
    """The steps of each child in the next round.

    Args:
        times: of each child, seconds > 0 of a step.
        pace: the rule's parameters.

    Raises:
        ValueError: there is no child, or a time is not one.
    """
    if not times:
        raise ValueError("`times` must have an entry for each child. Received: none")
    for one in times:
        if not (0 < one.step_s < math.inf and 0 <= one.transfer_s < math.inf):
            raise ValueError(
                f"A step must last > 0 s and a transfer >= 0 s. Received: step_s={one.step_s} "
                f"transfer_s={one.transfer_s}"
            )
    best: Plan | None = None
    for slowest_steps in _candidates(pace.slowest_steps, pace.most_slowest_steps):
        found = _plan(times, pace, slowest_steps)
        if found.idle_share <= pace.idle_share:
            return found
        if best is None or found.idle_share < best.idle_share:
            best = found
    if best is None:
        raise AssertionError("there is a candidate always")
    return best


def _candidates(least: int, most: int) -> list[int]:
    """From `least` to `most`, each some 4/3 of the one before: idle shares fall as 1 / m."""
    found = [least]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, found[-1] * 4 // 3)))
    return found


def _plan(times: Sequence[Times], pace: Pace, slowest_steps: int) -> Plan:
    patient_s = max(one.transfer_s for one in times) / pace.link_share
    # Bounded before it is made whole: a step may be so short that the quotient is infinite.
    fitting = min((patient_s - one.transfer_s) / one.step_s for one in times) * (1 + _ROUNDING)
    slowest_steps = max(slowest_steps, math.floor(min(fitting, pace.max_steps)))
    longest_s = max(one.transfer_s + slowest_steps * one.step_s for one in times)
    ready_s = (1 - pace.margin) * longest_s
    steps = []
    idle_s = 0.0
    for one in times:
        fitting = (ready_s - one.transfer_s) / one.step_s
        number = math.floor(min(fitting * (1 + _ROUNDING), pace.max_steps))
        number = min(max(slowest_steps, number), pace.max_steps)
        steps.append(number)
        idle_s += longest_s - one.transfer_s - number * one.step_s
    share = max(0.0, idle_s / (len(times) * longest_s))
    return Plan(tuple(steps), longest_s, share)


class Average:
    """The smoothed times of one child.

    The first of a kind are taken as they are; then each is worth `smoothing`, all before the rest.
    But a transfer that is quicker counts at once: what makes one longer than it need be, as
    something that is made for the first time, is not what the next ones last.
    """

    def __init__(self, smoothing: float) -> None:
        """Nothing is known."""
        self.smoothing = smoothing
        self._step_s: float | None = None
        self._transfer_s: float | None = None

    def add(self, step_s: float, transfer_s: float | None) -> None:
        """Takes the times of one round; None: that of the transfer is not known."""
        self._step_s = self._towards(self._step_s, step_s)
        if transfer_s is not None:
            smoothed = self._towards(self._transfer_s, transfer_s)
            self._transfer_s = min(smoothed, transfer_s)

    @property
    def times(self) -> Times | None:
        """What is known; a transfer that was not seen yet lasts no time."""
        return None if self._step_s is None else Times(self._step_s, self._transfer_s or 0.0)

    def _towards(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.smoothing * (new - old)
