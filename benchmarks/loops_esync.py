# SPDX-License-Identifier: Apache-2.0
"""Part `esync` of `make bench-loops`: two parties of uneven speed, and how soon they learn.

    sync      a meeting after each step
    fixed     20 local steps of both
    compat    the paper's rule with its 0.5 s
    fedbuff   20 local steps of both, nobody waits; the server makes a step of every two updates
    ours      ESync as it comes: every parameter has its default

Steps of the quick party are padded by sleep to 25 ms, those of the slow one to as many times that
as the level says. Models have 0.3 million weights, local steps are those of plain SGD of one rate
for all methods and data (batches of 32, 0.05). Data: handwritten digits, and synthetic pictures of
28 x 28 pixels; split evenly, or by class: five classes each. Seconds are those until the model of a
meeting has an accuracy of 0.9 on held-out samples; a training that has not got there when its time
is over counts with that time, which flatters it. `idle` is the share of the time in which a party
waits for the other one, on the mean of both, from the third meeting on.

Is ours as good as the paper's rule? A ratio is the median of the seeds', of the times as they are.
Either time is known to a round only, since nobody has seen a model between two meetings: it is the
later end for both ("known to"), and a ratio next to 1 does not tell who was first.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import loops_trainings
from benchmarks.collectives_jobs import Row, row
from benchmarks.loops_trainings import Crew, Trained, Training

STEP_S = 0.025
LEVELS = (1, 4, 20, 100)
FIXED_STEPS = 20
GOAL = 0.9
SEATS = 8  # parties that train side by side
SEEDS = (0, 1, 2)
RATE = 0.05
SKEW_S = 5.0
SKEW_LEVEL = 100  # below it the paper's rule has one step each with any clock
SECONDS = {1: 15.0, 4: 25.0, 20: 50.0, 100: 50.0}  # of a training, at most
SYNC_SECONDS = 90.0  # of a meeting after each step where a target is about it
SYNC_LEVEL = 20
MEETINGS = 9  # before a training may end: six of them count
METHODS: dict[str, dict[str, Any]] = {
    "sync": {"kind": "fedavg", "local_steps": 1, "weighting": "uniform"},
    "fixed": {"kind": "fedavg", "local_steps": FIXED_STEPS, "weighting": "uniform"},
    "compat": {"kind": "esync", "rule": "compat"},
    "fedbuff": {"kind": "fedavg", "local_steps": FIXED_STEPS},
    "ours": {"kind": "esync"},
}
REPEATED = ("compat", "ours")  # with every seed


@dataclasses.dataclass(frozen=True)
class Case:
    """One method on one task.

    Attributes:
        data, split, level: the task.
        method: one of `METHODS`.
        seed: of the training.
        skew_s: by which the slow party's clock is wrong.
    """

    data: str
    split: str
    level: int
    method: str
    seed: int = 0
    skew_s: float = 0.0

    @property
    def task(self) -> tuple[str, str, int]:
        """What methods are compared on."""
        return self.data, self.split, self.level

    @property
    def is_about_sync(self) -> bool:
        """Whether ours is compared with it as with a meeting after each step."""
        return (self.method, self.level, self.split) == ("sync", SYNC_LEVEL, "iid")

    @property
    def training(self) -> Training:
        """What is trained."""
        waits = self.method in REPEATED
        return Training(
            step_s=(STEP_S * self.level, STEP_S),
            loop=METHODS[self.method],
            rule="fedbuff(k=2)" if self.method == "fedbuff" else "fedavg(1.0)",
            has_state_server=self.method == "compat",
            data=self.data,
            split=self.split,
            seed=self.seed,
            skew_s=self.skew_s,
            goal=GOAL,
            seconds=SYNC_SECONDS if self.is_about_sync else SECONDS[self.level],
            least_meetings=MEETINGS if waits and not self.seed else 0,
            rate=RATE,
        )


def cases() -> list[Case]:
    """All of them, those that take equally long beside each other."""
    tasks = [("digits", "iid", level) for level in LEVELS]
    tasks += [(*more, level) for more in (("digits", "class"), ("synthetic", "iid"))
              for level in (4, 20)]  # fmt: skip
    found = [
        Case(*task, method, seed)
        for task in tasks
        for method in METHODS
        for seed in (SEEDS if method in REPEATED else SEEDS[:1])
    ]
    found += [Case("digits", "iid", SKEW_LEVEL, method, skew_s=-SKEW_S) for method in REPEATED]
    return sorted(found, key=_expected_s)


def _expected_s(case: Case) -> tuple[int, int]:
    order = ("ours", "fedbuff", "compat", "fixed", "sync")
    return case.level, order.index(case.method)


def measured(levels: Sequence[int] = LEVELS) -> Iterator[Row]:
    """All trainings, then what is concluded."""
    found: dict[Case, Trained] = {}
    with loops_trainings.crew(SEATS) as crew:
        chosen = [case for case in cases() if case.level in levels]
        for case, trained in zip(chosen, _trained(crew, chosen), strict=True):
            found[case] = trained
            yield _row(case, trained)
    yield from concluded(found)


def _trained(crew: Crew, chosen: Sequence[Case]) -> Iterator[Trained]:
    return crew.all_of([case.training for case in chosen])


def _name(case: Case) -> str:
    split = "iid" if case.split == "iid" else "by class"
    clocks = f", clocks {SKEW_S:g} s apart" if case.skew_s else ""
    seed = f", seed {case.seed}" if case.seed else ""
    return f"{case.data} {split}, {case.level}x: {case.method}{clocks}{seed}"


def _row(case: Case, one: Trained) -> Row:
    is_there = math.isfinite(one.goal_s)
    shown = [
        f"{one.goal_meetings} meetings, known to {one.last_round_s:.3g} s"
        if is_there
        else f"not reached, best {one.best:.3f}",
        f"{one.steps_per_s:.3g} steps/s",
    ]
    if math.isfinite(one.round_s):
        shown += [f"round {one.round_s:.3g} s", f"idle {100 * one.idle_share:.2g} %"]
    shown.append(f"a step by itself {one.step_ms:.2g} ms")
    return row("esync", f"{_name(case)}, to {GOAL:g}", _time(case, one), "s",
               against="; ".join(shown))  # fmt: skip


def _time(case: Case, one: Trained) -> float:
    return one.goal_s if math.isfinite(one.goal_s) else case.training.seconds


def concluded(found: dict[Case, Trained]) -> Iterator[Row]:
    """The figures that targets are about."""
    tasks = list(dict.fromkeys(case.task for case in found if not case.skew_s))
    for data, split, level in tasks:
        on = f"{data} {'iid' if split == 'iid' else 'by class'}, {level}x"

        def of(method: str, task: tuple[str, str, int] = (data, split, level)) -> list[Case]:
            chosen = [case for case in found if case.task == task and not case.skew_s]
            return [case for case in chosen if case.method == method]

        idle = [found[case].idle_share for case in of("ours")]
        idle = [one for one in idle if math.isfinite(one)]
        if idle:
            yield row("esync", f"{on}: idle share of ours", 100 * statistics.median(idle), "%",
                      about="loops-esync-idle")  # fmt: skip
        pairs = [(found[a], found[b], a) for a, b in zip(of("compat"), of("ours"), strict=True)]
        ratios = [_time(case, compat) / ours.goal_s for compat, ours, case in pairs]
        yield row("esync", f"{on}: time of compat over ours", statistics.median(ratios), "x",
                  against=", ".join(f"{one:.3g}" for one in ratios),
                  about="loops-esync-compat")  # fmt: skip
        if level == SYNC_LEVEL:
            [case] = of("sync")
            ours_s = statistics.median(_time(one, found[one]) for one in of("ours"))
            # By class nobody but the slow party knows half of the classes, and it makes no more
            # steps in a second under any method: there the ratio is told, and no target.
            about = "loops-esync-sync" if split == "iid" else ""
            yield row("esync", f"{on}: time of sync over ours", _time(case, found[case]) / ours_s,
                      "x", about=about)  # fmt: skip
    yield from _skewed(found)


def _skewed(found: dict[Case, Trained]) -> Iterator[Row]:
    """Steps in a second with clocks that are right over those with wrong ones."""
    for method in REPEATED:
        with_skew = [found[case] for case in found if case.skew_s and case.method == method]
        right = [
            found[case]
            for case in found
            if case.task == ("digits", "iid", SKEW_LEVEL) and case.method == method
            and not case.skew_s and not case.seed
        ]  # fmt: skip
        for wrong, plain in zip(with_skew, right, strict=True):
            yield row(
                "esync",
                f"digits iid, {SKEW_LEVEL}x: steps/s of {method} over those with clocks "
                f"{SKEW_S:g} s apart",
                plain.steps_per_s / wrong.steps_per_s,
                "x",
                about=f"loops-esync-clocks-{method}",
            )
