# SPDX-License-Identifier: Apache-2.0
"""Part `simulator` of `make bench-loops`: what is predicted beside what is measured.

Half of the parties make steps of 0.4 s, half of 60 ms (padded by sleep), below one server. The
description comes from the logs of a run of two parties with ESync (`tf_hips.simulation.calibrated`)
and nothing else; counts and methods are then set by hand to those of runs of four and of six, with
ESync (four steps of the slow ones) and with ten local steps of all. What is compared is the length
of a round, on the mean.

Sites by the thousand: five methods, 20 rounds, a quarter of the sites 20 times slower than the
rest.
"""

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import loops_trainings
from benchmarks.collectives_jobs import Row, row
from benchmarks.loops_trainings import Crew, Trained, Training
from tf_hips.simulation import Description, calibrated, simulate
from tf_hips.simulation.description import Group, Method, Server, Traffic

SLOW_S, QUICK_S = 0.4, 0.06
CALIBRATED_ON, JUDGED_ON = 2, (4, 6)
FIXED_STEPS = 10
ESYNC_MEETINGS, FIXED_MEETINGS = 20, 9
SITES = 10_000
# A number of steps of the slowest: where it may grow, a round is as long as one more of them or not
# for a difference of a few milliseconds, in runs and in simulations alike. Nor is it made longer
# for the links, ten times what a meeting takes: on one machine that is what its cores do meanwhile.
PACE = "slowest_steps=4,most_slowest_steps=4,link_share=1"
_LOOPS: dict[str, dict[str, Any]] = {
    "esync": {"kind": "esync", "pace": PACE},
    "fedavg": {"kind": "fedavg", "local_steps": FIXED_STEPS, "weighting": "uniform"},
}
_METHODS = {"esync": Method("esync", pace=PACE), "fedavg": Method("fedavg", steps=FIXED_STEPS)}


def measured() -> Iterator[Row]:
    """Predicted and measured rounds, and the seconds that thousands of sites take."""
    yield from _thousands()
    with (
        loops_trainings.crew(max(JUDGED_ON)) as crew,
        tempfile.TemporaryDirectory(prefix="hips-bench") as folder,
    ):
        log_dir = str(Path(folder, "log"))
        yield from _judged(crew, log_dir)


def predicted(description: Description, parties: int, method: str) -> float:
    """Seconds of a round of so many parties, each group with as many as the others."""
    each = parties // len(description.groups)
    groups = tuple(dataclasses.replace(group, count=each) for group in description.groups)
    [result] = simulate(
        dataclasses.replace(description, groups=groups, methods=(_METHODS[method],))
    )
    return result.round_s


def _judged(crew: Crew, log_dir: str) -> Iterator[Row]:
    first, last = JUDGED_ON
    small, with_four = crew.train(
        [_training(CALIBRATED_ON, "esync", log_dir), _training(first, "esync")]
    )
    found: dict[tuple[int, str], Trained] = {(first, "esync"): with_four}
    [found[last, "esync"]] = crew.train([_training(last, "esync")])
    for parties in JUDGED_ON:
        [found[parties, "fedavg"]] = crew.train([_training(parties, "fedavg")])
    description = calibrated(log_dir)
    yield row(
        "simulator", f"{CALIBRATED_ON} parties, esync: a round, calibrated on", small.round_s, "s"
    )
    for (parties, method), trained in found.items():
        expected_s = predicted(description, parties, method)
        yield row(
            "simulator",
            f"{parties} parties, {method}: a predicted round beside a measured one",
            100 * abs(expected_s / trained.round_s - 1) if trained.round_s else math.inf,
            "%",
            against=f"predicted {expected_s:.4g} s, measured {trained.round_s:.4g} s",
            about="loops-simulator-round",
        )


def _training(parties: int, method: str, log_dir: str | None = None) -> Training:
    half = parties // 2
    return Training(
        step_s=(SLOW_S,) * half + (QUICK_S,) * half,
        loop=_LOOPS[method],
        least_meetings=ESYNC_MEETINGS if method == "esync" else FIXED_MEETINGS,
        log_dir=log_dir,
    )


def thousands(sites: int = SITES) -> Description:
    """Many uneven sites, and all methods."""
    slow = sites // 4
    links = {"up_mbps": 20.0, "down_mbps": 100.0, "latency_ms": 20.0}
    return Description(
        Traffic(parameters=25_600_000, compression="error_feedback(onebit)"),
        (
            Group("quick", sites - slow, 0.05, spread=0.3, jitter=0.1, **links),
            Group("slow", slow, 1.0, spread=0.3, jitter=0.2, clock_s=5.0, **links),
        ),
        (
            Method("sync"),
            Method("fedavg"),
            Method("esync"),
            Method("esync-compat"),
            Method("fedbuff", k=sites // 20),
        ),
        Server(10_000.0, 10_000.0),
    )


def _thousands() -> Iterator[Row]:
    description = thousands()
    began, spent, last = time.perf_counter(), {}, ""

    def tell(label: str) -> None:
        nonlocal last
        if last:
            spent[last] = time.perf_counter() - began - sum(spent.values())
        last = label

    simulate(description, tell)
    tell("")
    shown = ", ".join(f"{label} {seconds:.3g} s" for label, seconds in spent.items())
    yield row(
        "simulator",
        f"{SITES} sites, {description.rounds} rounds of {len(spent)} methods",
        sum(spent.values()),
        "s",
        against=shown,
        about="loops-simulator-sites",
    )
