# SPDX-License-Identifier: Apache-2.0
"""The default rule on one clock, that of whoever sees all arrivals.

    round r closes        close = last arrival of round r
    round r + 1           child i arrives at a_i with n_i steps, of s_i seconds as it says, in b_i
                          seconds from the first step's begin to the last one's end
    what is learnt        c_i = s_i, at most (a_i - close) / n_i; before the first
                          round closes, all being there takes the place of a close
                          o_i = max(0, a_i - close - b_i): the way down, up, and all between;
                          not the first one, which holds what is made once, as tracing is
    close of r + 1        plan(c, o): the steps of round r + 2, which go down with its model

A child says durations only, and these are bounded by what the server's clock has seen, so clocks
of children may show any time: an offset changes nothing. A child tells its seconds of a step apart
from b_i, because the first step of a program may compile it.

Early stops: with its steps a child gets the seconds that these may last, on its own clock; it
begins none that would end after that by more than half. A child that all others wait for, or that
half of them wait for after the deadline, is told to end its local steps with the one that it is in.
So a step that lasts longer than expected costs steps, not time. What counts are the steps that a
child says it has done. A child without steps has no data left: nobody's steps are cut for it, and
it is in no plan; nor does one count that has missed the round before. One that has missed three
rounds, as when a quorum goes on without it, is in no plan until it is there again: nobody's rounds
are as long as the steps of who is gone.

The state is soft: after a restart times are learnt anew from the next arrivals.
"""

import dataclasses
import math

from tf_hips.esync.rule import Average, Pace, Plan, Times, plan

_KEPT_ROUNDS = 3
MAX_STEPS = 1 << 31


@dataclasses.dataclass(frozen=True)
class Report:
    """What a child says of its local steps when it arrives.

    Attributes:
        steps: how many it has done; 0 of one that takes no part.
        step_s: seconds of one, without what comes once, as compiling does; 0: not known.
        busy_s: seconds from the begin of the first to the end of the last, all between included:
            what grows with the number of steps must not be taken for a transfer.
    """

    steps: int
    step_s: float
    busy_s: float

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: one of them cannot be.
        """
        are_right = 0 <= self.steps < MAX_STEPS and all(
            0 <= value < math.inf for value in (self.step_s, self.busy_s)
        )
        if not are_right:
            raise ValueError(
                f"A report must have steps >= 0 and finite seconds >= 0. Received: {self}"
            )


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What comes down with the model.

    Attributes:
        steps: how many local steps this child should take now, at most.
        local_s: how long they may last, in seconds; infinite where there is no deadline.
        mean_steps: how many all children take on the mean.
        round_s: how long the round should last, in seconds.
    """

    steps: int
    local_s: float
    mean_steps: float
    round_s: float

    def is_over(self, steps: int, elapsed_s: float) -> bool:
        """Whether local steps end here.

        Args:
            steps: how many have been done, one at least.
            elapsed_s: seconds since the first of them began.
        """
        step_s = elapsed_s / max(steps, 1)
        return steps >= self.steps or (steps > 0 and elapsed_s + step_s / 2 > self.local_s)


class _Round:
    """Arrivals of one round, and the plan that was made at its close."""

    def __init__(self) -> None:
        self.arrivals: dict[int, float] = {}
        self.reports: dict[int, Report] = {}
        self.is_closed = False
        self.plan: Plan | None = None
        self.places: dict[int, int] = {}  # of the children in the plan


class Pacer:
    """Learns how fast children are, and says how many steps each takes. Not thread-safe."""

    def __init__(self, pace: Pace, num_children: int, began: float | None = None) -> None:
        """Nothing is known.

        Args:
            pace: parameters of the rule.
            num_children: how many children there are.
            began: seconds of the one clock at which all were there; infinite: not known, and
                nothing is learnt of the first round; None: what is said of that is believed.
        """
        self._pace = pace
        self._began = began  # a moment before which nothing of the newest round was done
        self._averages = [Average(pace.smoothing) for _ in range(num_children)]
        self._has_travelled = [False] * num_children
        self._rounds: dict[int, _Round] = {}
        self._newest: int | None = None
        self._ended: frozenset[int] = frozenset()  # children that had no steps in the newest round

    @property
    def pace(self) -> Pace:
        """Parameters of the rule."""
        return self._pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._pace = pace
        for average in self._averages:
            average.smoothing = pace.smoothing

    def times(self, child: int) -> Times | None:
        """What is known of a child."""
        return self._averages[child].times

    def arrived(self, child: int, number: int, now: float, report: Report) -> None:
        """A child's share of round `number` has come, or more of it; the last call counts.

        Args:
            child: the child.
            number: the round.
            now: seconds of the one clock.
            report: the child's own words.
        """
        newest = self._newest
        if newest is None or number > newest:
            if newest is not None:
                self._close(newest)
            self._newest = number
            for old in [one for one in self._rounds if one <= number - _KEPT_ROUNDS]:
                del self._rounds[old]
        elif number not in self._rounds or self._rounds[number].is_closed:
            return  # of a round that is over: a retry, or a child that does it again
        current = self._rounds.setdefault(number, _Round())
        current.arrivals[child] = now
        current.reports[child] = report

    def assignment(self, child: int, number: int) -> Assignment | None:
        """What `child` does after round `number`, which has closed; None: nothing is known.

        The first call closes the round for this class: what comes later does not count.
        """
        if number not in self._rounds:
            return None
        current = self._close(number)
        place = current.places.get(child)
        if current.plan is None or place is None:
            return None
        found, times = current.plan, self._averages[child].times
        local_s = math.inf
        if self.pace.deadline and times is not None:
            local_s = self.pace.deadline * found.round_s - times.transfer_s
        return Assignment(found.steps[place], local_s, found.mean_steps, found.round_s)

    def to_stop(self, number: int, now: float) -> frozenset[int]:
        """Children that should end their local steps for round `number` now."""
        current = self._rounds.get(number)
        if current is None or current.is_closed:
            return frozenset()
        arrived = {child for child, report in current.reports.items() if report.steps}
        before = self._rounds.get(number - 1)
        there = range(len(self._averages)) if before is None else before.reports.keys()
        missing = frozenset(there) - current.reports.keys() - self._ended
        if not arrived or not missing:
            return frozenset()
        deadline = self.deadline(number)
        is_late = deadline is not None and now >= deadline and len(arrived) >= len(missing)
        return missing if len(missing) == 1 or is_late else frozenset()

    def deadline(self, number: int) -> float | None:
        """When children may be late for round `number`; None: never."""
        before = self._rounds.get(number - 1)
        if before is None or before.plan is None or not self.pace.deadline:
            return None
        return max(before.arrivals.values()) + self.pace.deadline * before.plan.round_s

    def _close(self, number: int) -> _Round:
        """Learns from a round and plans the next, once."""
        current = self._rounds[number]
        if not current.is_closed:
            current.is_closed = True
            self._learn(current, self._rounds.get(number - 1))
            self._began = max(current.arrivals.values())
            self._ended = frozenset(
                child for child, report in current.reports.items() if not report.steps
            )
            there = {child for one in self._rounds.values() for child in one.reports}
            there -= self._ended
            known = [
                (child, average.times)
                for child, average in enumerate(self._averages)
                if average.times is not None and child in there
            ]
            if known:
                current.places = {child: place for place, (child, _) in enumerate(known)}
                current.plan = plan([times for _, times in known], self.pace)
        return current

    def _learn(self, current: _Round, before: _Round | None) -> None:
        for child, report in current.reports.items():
            if report.steps == 0:
                continue
            step_s = report.step_s
            transfer_s: float | None = None
            if self._began is not None:
                span_s = current.arrivals[child] - self._began
                if span_s <= 0:
                    continue  # it did not wait for the answer: a child that comes back
                step_s = min(step_s, span_s / report.steps)
                if before is not None:
                    if self._has_travelled[child]:
                        transfer_s = max(0.0, span_s - report.busy_s)
                    self._has_travelled[child] = True
            if step_s > 0:
                self._averages[child].add(step_s, transfer_s)
