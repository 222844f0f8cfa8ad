# SPDX-License-Identifier: Apache-2.0
"""Two jobs on the same hosts whose steps `make bench-collectives` compares, and its rows."""

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from benchmarks import harness
from benchmarks.jobs import Job, job
from benchmarks.network import Network, network

# Of steps of one way after its first.
LONG_S = 30.0
# Of one command; fp32 VGG19 takes 70 s per step at 100 Mbit/s, and the first steps of ways trace.
DEADLINE_S = 420.0

RATES = (100, 1000)  # Mbit/s
ONEBIT = "error_feedback(onebit)"

WORKER = "benchmarks.collectives_worker"
SETTINGS = {"TF_HIPS_STALL_S": "900"}

Row: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        ranks: hosts.
        scale: models are that many times narrower.
        rounds: of every comparison.
        is_full: long steps, too, are made as often.
    """

    ranks: int = 4
    scale: int = 1
    rounds: int = 5
    is_full: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the result may be stored."""
        return (self.ranks, self.scale) == (4, 1) and self.rounds >= Options.rounds


def row(part: str, what: str, measured: float | None, unit: str, **more: Any) -> Row:
    """One figure, as it was measured: it is compared so, and rounded where it is shown."""
    return {
        "id": "",
        "about": "",
        "part": part,
        "what": what,
        "link": "",
        "measured": None if measured is None else float(measured),
        "unit": unit,
        "interval": "",
        "against": "",
        "target": "",
        "met": "",
        **more,
    }


def ratio_row(part: str, what: str, ratios: Sequence[float], **more: Any) -> Row:
    """A ratio: the median of the rounds', and its interval where there are several."""
    interval = harness.interval_text(ratios)
    return row(part, what, statistics.median(ratios), "x", interval=interval, **more)


def bound_s(num_bytes: float, mbit: float, codecs_s: float) -> float:
    """Seconds that a step takes at least: what the link takes, or what the codecs take alone."""
    return max(num_bytes * 8 / (mbit * 1e6), codecs_s)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps of one way of summing.

    Attributes:
        seconds: of each, the slowest rank's.
        num_bytes: that a rank sent or received in each, whichever is more, the busiest rank's.
    """

    seconds: list[float]
    num_bytes: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Bench:
    """Our job, and perhaps one of Horovod alone on the same hosts. One runs at a time."""

    def __init__(self, options: Options, jobs: dict[bool, Job], net: Network | None) -> None:
        self.options, self.net, self._jobs = options, net, jobs
        for is_ours, started in self._jobs.items():
            started.ask(do="start", ours=is_ours)

    def load(self, model: str) -> None:
        for started in self._jobs.values():
            started.ask(do="load", model=model, scale=self.options.scale, deadline_s=DEADLINE_S)

    def make(self, name: str, kind: str, **how: Any) -> None:
        """Makes a way; its first step has no limit, else tracing and sending are one figure."""
        self.limit(None)
        is_ours = kind != "horovod"
        self._jobs[is_ours].ask(do="make", name=name, kind=kind, deadline_s=DEADLINE_S, **how)

    def drop(self, *names: str) -> None:
        for name in names:
            self._jobs[True].ask(do="drop", name=name)

    def limit(self, mbit: float | None) -> None:
        """What links let through; None: all, and frames are as large as on loopback."""
        if self.net is not None:
            self.net.limit(mbit)
            self.net.offload(mbit is None)

    def ours(self, name: str, steps: int = 1) -> Steps:
        return self._block(True, name, steps)

    def theirs(self, name: str, steps: int = 1) -> Steps:
        return self._block(False, name, steps)

    def ask(self, **command: Any) -> dict[str, Any]:
        """What rank 0 of our job answers."""
        return self._jobs[True].ask(deadline_s=DEADLINE_S, **command)[0]

    def rounds(self, first: Steps) -> int:
        """How many more steps are made after the first."""
        more = self.options.rounds - 1
        return more if self.options.is_full else min(more, int(LONG_S / first.median))

    def steps(self, name: str, is_ours: bool = True) -> Steps:
        """One step, and the rounds' others as far as they take no longer than `LONG_S`."""
        first = self._block(is_ours, name, 1)
        more = self.rounds(first)
        if not more:
            return first
        rest = self._block(is_ours, name, more)
        num_bytes = (first.num_bytes + more * rest.num_bytes) / (more + 1)
        return Steps(first.seconds + rest.seconds, num_bytes)

    def _block(self, is_ours: bool, name: str, steps: int) -> Steps:
        before = self.net.counters() if self.net else []
        answers = self._jobs[is_ours].ask(
            do="block", name=name, steps=steps, deadline_s=DEADLINE_S * steps
        )
        after = self.net.counters() if self.net else []
        moved = [
            late - early
            for first, last in zip(before, after, strict=True)
            for early, late in zip(first, last, strict=True)
        ]
        seconds = [max(ranks) for ranks in zip(*(a["seconds"] for a in answers), strict=True)]
        return Steps(seconds, max(moved, default=0) / steps)


@contextlib.contextmanager
def bench_of(
    options: Options, *, has_network: bool = True, has_peer: bool = True
) -> Iterator[Bench]:
    """Starts the jobs, on hosts of a network or on loopback; `has_peer`: Horovod's, too."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(options.ranks)) if has_network else None
        jobs = {
            is_ours: stack.enter_context(
                job(options.ranks, module=WORKER, threads=1, settings=SETTINGS, network=net)
            )
            for is_ours in ([True, False] if has_peer else [True])
        }
        yield Bench(options, jobs, net)


def link_of(mbit: float | None) -> str:
    return "unlimited" if mbit is None else f"{mbit:.0f} Mbit/s"


def step_rows(
    part: str, what: str, mbit: float | None, steps: Steps, link: str = ""
) -> Iterator[Row]:
    """Seconds and bytes of steps; `link`: what it is called, if not by its rate."""
    link, count = link or link_of(mbit), len(steps.seconds)
    low, high = harness.interval(steps.seconds)
    interval = f"{low:.4g} - {high:.4g}" if count > 1 else "1 step"
    yield row(part, what, steps.median, "s", link=link, interval=interval)
    if steps.num_bytes:
        yield row(part, what, steps.num_bytes / 1e6, "MB", link=link)
