# SPDX-License-Identifier: Apache-2.0
"""What a rule over the ranks costs beside their mean, on links of 1 Gbit/s.

ResNet-50's gradients on ranks that are hosts of `benchmarks.network`, with one compute thread each:
four of them, which the target is about, and two, so that each has a core of this machine (what a
rank computes for a rule of coordinates does not depend on how many ranks there are).
A step lasts from a barrier until the last rank has all results; there is no backward pass that
would hide a part of it. The mean is that of `CompressedRing()`: Horovod's allreduce in our buckets;
the rules have float32 packets, which are as many bytes. Two more figures are of no target: beside a
mean of the same packets, by the same owners; and both with packets of one bit, where the cores
decide, which all ranks share here.
"""

import contextlib
import itertools
from collections.abc import Iterator

from benchmarks import closing
from benchmarks.collectives_jobs import (
    SETTINGS,
    Bench,
    Options,
    Row,
    Steps,
    link_of,
    ratio_row,
    step_rows,
)
from benchmarks.jobs import job

RANKS = 4
MBIT = 1000
MODEL = "resnet50"
WORKER = "benchmarks.robust_worker"
TARGET = "robust-step"
ONEBIT = "error_feedback(onebit)"
# With 4 rows Krum and its like bear f = 0, but compute what they always do.
RULES = ("median", "trimmed_mean(f=1)", "geometric_median", "nnm(f=1) >> trimmed_mean(f=1)")
ONEBIT_RULES = ("median", "geometric_median")
TWO_RULES = ("median", "geometric_median")


def measured(rounds: int, ranks: int = RANKS, scale: int = 1) -> Iterator[Row]:
    """Steps of rules over steps of a mean, side by side.

    Args:
        rounds: of each.
        ranks: hosts.
        scale: the model is that many times narrower; then the figures are of no target.

    Raises:
        NotRunError: there can be no network here.
    """
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(closing.network_of(ranks, "steps over ranks", (TARGET,)))
        options = Options(ranks=ranks, rounds=rounds, scale=scale)
        started = job(ranks, module=WORKER, threads=1, settings=SETTINGS, network=net)
        bench = Bench(options, {True: stack.enter_context(started)}, net)
        bench.load(MODEL)
        rules = RULES if ranks > 2 else TWO_RULES
        about = TARGET if (ranks, scale) == (RANKS, 1) else ""
        means = {"the mean": None, "a mean of packets": [["fp32", "ps", 1]]}
        yield from _beside(bench, "fp32", means, rules, about=about)
        if ranks == 2:
            return
        means = {"a mean of packets": [[ONEBIT, "ps", 1]]}
        yield from _beside(bench, ONEBIT, means, ONEBIT_RULES)


def _beside(
    bench: Bench,
    text: str,
    means: dict[str, list[list[object]] | None],
    rules: tuple[str, ...],
    about: str = "",
) -> Iterator[Row]:
    """Rules over means; the first of these is the one that a target is about."""
    names = {title: f"way_{place}" for place, title in enumerate((*means, *rules))}
    for title, choices in means.items():
        bench.make(names[title], "sum", choices=choices)
    for rule in rules:
        bench.make(names[rule], "robust", rule=rule, text=text, topology="ps")
    bench.limit(MBIT)
    found: dict[str, list[Steps]] = {title: [] for title in names}
    for number in range(bench.options.rounds):
        order = list(names)
        for title in order if number % 2 else reversed(order):
            found[title].append(bench.ours(names[title]))
    bench.drop(*names.values())
    for title, steps in found.items():
        seconds = [second for step in steps for second in step.seconds]
        joined = Steps(seconds, steps[-1].num_bytes)
        what = f"{MODEL}, {text}, {bench.options.ranks} ranks, {title}"
        yield from step_rows("step", what, MBIT, joined)
    for place, (title, rule) in enumerate(itertools.product(means, rules)):
        ratios = [
            mine.median / mean.median for mine, mean in zip(found[rule], found[title], strict=True)
        ]
        yield ratio_row(
            "step",
            f"{MODEL}, {text}, n={bench.options.ranks}: {rule} over {title}",
            ratios,
            link=link_of(MBIT),
            against=f"{len(ratios)} rounds",
            about=about if place < len(rules) else "",
        )
