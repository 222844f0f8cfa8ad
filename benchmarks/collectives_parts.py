# SPDX-License-Identifier: Apache-2.0
"""What `make bench-collectives` measures, part by part; see `collectives`."""

import contextlib
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives_jobs import (
    DEADLINE_S,
    ONEBIT,
    RATES,
    SETTINGS,
    WORKER,
    Bench,
    Options,
    Row,
    Steps,
    bench_of,
    link_of,
    ratio_row,
    row,
    step_rows,
)
from benchmarks.collectives_wire import wire
from benchmarks.jobs import Job, job
from benchmarks.network import network

PARTS = ("wire", "plan", "loopback", "train")

DGC = "dgc(ratio=0.001)"
CANDIDATES = (ONEBIT,)  # of the planner
MODELS = ("vgg19", "resnet50")
PROFILE_S = 8.0
TOLERANCE = 0.2  # of a prediction
SEEDS, EPOCHS = 3, 16
# On digits an epoch of four ranks is 22 steps; one bit from the first of so few steps on costs
# accuracy, which is told beside the target: exact for a quarter of them, as for DGC.
DIGITS = {
    "exact": None,
    "onebit": ONEBIT,
    "onebit after 4 exact epochs": f"warmup({ONEBIT}, steps=88)",
}

_KERAS = "benchmarks.keras_worker"


def measured(part: str, options: Options) -> Iterator[Row]:
    """The figures of one part, as they come."""
    yield from {"wire": wire, "plan": _plan, "loopback": _loopback, "train": _train}[part](options)


def _auto_seconds(options: Options) -> Iterator[Row]:
    """How long training waits for a plan when it begins: in jobs that have done nothing before."""
    for mbit in RATES:
        with bench_of(options, has_peer=False) as bench:
            bench.load(MODELS[0])
            bench.limit(mbit)
            took = bench.ask(do="measure", candidates=list(CANDIDATES))
        yield row(
            "plan",
            'the profile of plan="auto"',
            took["seconds"],
            "s",
            link=link_of(mbit),
            about="collectives-auto-seconds",
        )


def _plan(options: Options) -> Iterator[Row]:
    yield from _auto_seconds(options)
    hits = []
    with bench_of(options, has_peer=False) as bench:
        for model in MODELS:
            bench.load(model)
            for mbit in RATES:
                bench.limit(mbit)
                took = bench.ask(do="measure", candidates=[ONEBIT, DGC], seconds=PROFILE_S)
                yield row("plan", "the profile", took["seconds"], "s", link=link_of(mbit))
                is_slow = mbit == RATES[0]
                points: dict[str, list[list[Any]] | None] = {
                    "fp32": None,
                    "onebit": [[ONEBIT, "ps", 1]],
                }
                fixed = {}
                if is_slow:
                    points["dgc"] = [[DGC, "ps", 1]]
                    last = "blocks" if options.ranks & (options.ranks - 1) else "butterfly"
                    fixed = {
                        f"onebit, {topology}": [[ONEBIT, topology, 1]]
                        for topology in ("ring", last, "allgather")
                    }
                    auto = bench.ask(do="plan", candidates=list(CANDIDATES))
                medians: dict[str, float] = {}
                for title, choices in {**points, **fixed}.items():
                    bench.make("way", "sum", choices=choices)
                    bench.limit(mbit)
                    steps = bench.steps("way")
                    bench.drop("way")
                    medians[title] = steps.median
                    yield from step_rows("plan", f"{model}, {title}", mbit, steps)
                    predicted = bench.ask(do="predict", choices=choices)["seconds"]
                    ratio = predicted / steps.median
                    if title in points:
                        hits.append(abs(ratio - 1) <= TOLERANCE)
                    yield row(
                        "plan",
                        f"{model}, {title}: predicted over measured",
                        ratio,
                        "x",
                        link=link_of(mbit),
                        against=f"{predicted:.3g} s predicted",
                    )
                if is_slow:
                    del medians["dgc"]  # the planner was not offered it
                    known = {**points, **fixed}
                    yield from _auto_over_best(bench, model, mbit, auto, medians, known)
    yield row(
        "plan",
        f"predictions within {TOLERANCE:.0%} of what is measured",
        sum(hits),
        f"of {len(hits)}",
        about="collectives-predicted",
    )


def _auto_over_best(
    bench: Bench,
    model: str,
    mbit: int,
    auto: dict[str, Any],
    medians: dict[str, float],
    known: dict[str, Any],
) -> Iterator[Row]:
    best = min(medians, key=lambda title: medians[title])
    bench.make("auto", "sum", choices=auto["choices"])
    bench.make("best", "sum", choices=known[best])
    bench.limit(mbit)
    ratios, seconds = [], []
    for _ in range(bench.options.rounds):
        steps = bench.ours("auto")
        seconds += steps.seconds
        ratios.append(steps.median / bench.ours("best").median)
    bench.drop("auto", "best")
    yield from step_rows("plan", f"{model}, auto", mbit, Steps(seconds, 0.0))
    yield ratio_row(
        "plan",
        f"{model}, auto over the best fixed choice",
        ratios,
        link=link_of(mbit),
        against=f"{best}; auto: {in_short(auto['choices'])}",
        about=f"collectives-auto-{model}-{mbit}",
    )


def in_short(choices: Sequence[Sequence[Any]]) -> str:
    """How many gradients go which way."""
    counts: dict[str, int] = {}
    for compression, topology, _ in choices:
        way = "exact" if compression is None else f"{compression} {topology}"
        counts[way] = counts.get(way, 0) + 1
    return ", ".join(f"{count} {way}" for way, count in counts.items())


def _loopback(options: Options) -> Iterator[Row]:
    with bench_of(options, has_network=False) as bench:
        bench.ask(do="measure", candidates=list(CANDIDATES), seconds=PROFILE_S)
        for model in MODELS:
            bench.load(model)
            auto = bench.ask(do="plan", candidates=list(CANDIDATES))
            bench.make("auto", "sum", choices=auto["choices"])
            for name, grouped in (("each", False), ("grouped", True)):
                bench.make(name, "horovod", precision="fp32", grouped=grouped)
            found: dict[str, list[float]] = {"auto": [], "each": [], "grouped": []}
            for number in range(2 * options.rounds):
                order = ("auto", "each", "grouped")
                for name in order if number % 2 else reversed(order):
                    steps = bench.ours(name) if name == "auto" else bench.theirs(name)
                    found[name] += steps.seconds
            bench.drop("auto")
            for name, seconds in found.items():
                title = "auto" if name == "auto" else f"Horovod, {name}"
                yield from step_rows(
                    "loopback", f"{model}, {title}", None, Steps(seconds, 0.0), "loopback"
                )
            best = min(("each", "grouped"), key=lambda name: statistics.median(found[name]))
            ratios = [a / b for a, b in zip(found["auto"], found[best], strict=True)]
            yield ratio_row(
                "loopback",
                f"{model}, auto over Horovod",
                ratios,
                link="loopback",
                against=f"{best}; auto: {in_short(auto['choices'])}",
                about=f"collectives-loopback-{model}",
            )


def _train(options: Options) -> Iterator[Row]:
    mbit = RATES[0]
    ways = {"ours": ONEBIT, "tape": None, "grouped": None}
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(options.ranks, mbit))
        jobs = {
            way: stack.enter_context(
                job(options.ranks, module=_KERAS, threads=1, settings=SETTINGS, network=net)
            )
            for way in ways
        }
        for way, text in ways.items():
            jobs[way].ask(do="start", strategy=way == "ours", compression=text)
            jobs[way].ask(do="begin", model="cnn", variant=way)
            jobs[way].ask(do="block", model="cnn", variant=way, steps=3, deadline_s=DEADLINE_S)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                answers = jobs[way].ask(do="block", model="cnn", variant=way, steps=8)
                found[way].append(max(statistics.median(a["steps"]) for a in answers))
        batch = 16 * options.ranks
        for way, seconds in found.items():
            title = "CompressedRing, onebit" if way == "ours" else f"Horovod loop, {way}"
            images = batch / statistics.median(seconds)
            yield row("train", f"CNN, {title}", images, "images/s", link=link_of(mbit))
        best = min(("tape", "grouped"), key=lambda way: statistics.median(found[way]))
        yield ratio_row(
            "train",
            "CNN, images/s over plain Horovod's",
            [b / a for a, b in zip(found["ours"], found[best], strict=True)],
            link=link_of(mbit),
            against=f"the loop `{best}`",
            about="collectives-train-images",
        )
        net.limit(None)
        yield from _accuracy(jobs["ours"])


def _accuracy(started: Job) -> Iterator[Row]:
    means = {}
    for title, text in DIGITS.items():
        found = [
            started.ask(
                do="accuracy",
                compression=text,
                seed=seed,
                epochs=EPOCHS,
                deadline_s=DEADLINE_S,
            )[0]["accuracy"]
            for seed in range(SEEDS)
        ]
        means[title] = statistics.mean(found)
        yield row(
            "train",
            f"accuracy on digits, {title}",
            100 * means[title],
            "points",
            against=" ".join(f"{100 * one:.2f}" for one in found),
        )
        if text is not None:
            is_target = text.startswith("warmup")
            yield row(
                "train",
                f"accuracy that {title} costs",
                100 * (means["exact"] - means[title]),
                "points",
                against=f"exact; mean of {SEEDS} seeds, {EPOCHS} epochs",
                about="collectives-train-accuracy" if is_target else "",
            )


def timeline(options: Options, path: Path) -> str:
    """Writes Horovod's timeline of two steps; says what the second, at 1 Gbit/s, shows."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(options.ranks))
        settings = {**SETTINGS, "HOROVOD_TIMELINE": str(path)}
        ours = stack.enter_context(
            job(options.ranks, module=WORKER, threads=1, settings=settings, network=net)
        )
        ours.ask(do="start", ours=True)
        ours.ask(do="load", model="vgg19", scale=options.scale, deadline_s=DEADLINE_S)
        choices = [[ONEBIT, "ps", 1]]
        ours.ask(do="make", name="step", kind="sum", choices=choices, deadline_s=DEADLINE_S)
        net.limit(RATES[-1])
        ours.ask(do="block", name="step", steps=1, deadline_s=DEADLINE_S)
        ours.ask(do="stop")
    events = json.loads(path.read_text(encoding="utf-8"))
    first, last, end, busy = travels(events)
    return (
        f"{path}: packets of the first bucket left after {first:.3g} s, of the last one after "
        f"{last:.3g} s, the last sums came after {end:.3g} s; collectives took {busy:.3g} s"
    )


def travels(events: Sequence[dict[str, Any]]) -> tuple[float, float, float, float]:
    """When collectives ran on rank 0 in the last step of a timeline.

    Args:
        events: of Horovod's timeline, of steps that each begin with an allreduce, the barrier.

    Returns:
        Seconds from the barrier to the begin of the first and of the last alltoall, and to the end
        of the last collective; seconds of all collectives.
    """
    begun: dict[int, list[tuple[str, int]]] = {}
    runs: list[tuple[str, int, int]] = []
    for event in events:
        stack = begun.setdefault(event["pid"], [])
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"]))
        elif event["ph"] == "E":
            name, began = stack.pop()
            if name in ("ALLREDUCE", "ALLTOALL", "ALLGATHER"):
                runs.append((name, began, event["ts"]))
    barrier = max(end for name, _, end in runs if name == "ALLREDUCE")
    runs = [run for run in runs if run[1] >= barrier]
    packets = [began for name, began, _ in runs if name == "ALLTOALL"]
    times = (min(packets), max(packets), max(end for _, _, end in runs))
    busy = sum(end - began for _, began, end in runs)
    first, last, end = ((one - barrier) / 1e6 for one in times)
    return first, last, end, busy / 1e6
