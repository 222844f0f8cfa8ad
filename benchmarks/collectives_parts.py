# SPDX-License-Identifier: Apache-2.0
"""What `make bench-collectives` measures, part by part; see `collectives`."""

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import harness
from benchmarks.jobs import Job, job
from benchmarks.network import Network, network

PARTS = ("wire", "plan", "loopback", "train")

ONEBIT = "error_feedback(onebit)"
CODECS = {"onebit": ONEBIT, "tbq": "error_feedback(tbq)"}
DGC = "dgc(ratio=0.001)"
CANDIDATES = (ONEBIT,)  # of the planner
RATES = (100, 1000)  # Mbit/s
MODELS = ("vgg19", "resnet50")
PROFILE_S = 8.0  # `plan="auto"` has 10 s
TOLERANCE = 0.2  # of a prediction
SEEDS, EPOCHS = 3, 16
# A step that takes longer is made once.
LONG_S = 30.0
# Of one command; fp32 VGG19 takes 70 s per step at 100 Mbit/s, and the first steps of ways trace.
DEADLINE_S = 420.0

_WORKER = "benchmarks.collectives_worker"
_KERAS = "benchmarks.keras_worker"
_SETTINGS = {"TF_HIPS_STALL_S": "900"}
_NO_LIMIT = "unlimited"

Row: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        ranks: hosts.
        scale: models are that many times narrower.
        rounds: of every comparison.
        is_full: long steps, too, are made in every round.
    """

    ranks: int = 4
    scale: int = 1
    rounds: int = 5
    is_full: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the result may be stored."""
        return (self.ranks, self.scale) == (4, 1) and self.rounds >= Options.rounds


def row(part: str, what: str, measured: float, unit: str, **more: Any) -> Row:
    """One figure."""
    return {
        "id": "",
        "about": "",
        "part": part,
        "what": what,
        "link": "",
        "measured": float(f"{measured:.4g}"),
        "unit": unit,
        "interval": "",
        "against": "",
        "target": "",
        "met": "",
        **more,
    }


def ratio_row(part: str, what: str, ratios: Sequence[float], **more: Any) -> Row:
    """A ratio: the median of the rounds', and its interval where there are several."""
    low, high = harness.interval(ratios)
    interval = f"{low:.3g} - {high:.3g}" if len(ratios) > 1 else ""
    return row(part, what, statistics.median(ratios), "x", interval=interval, **more)


def bound_s(num_bytes: float, mbit: float, codecs_s: float, packets_s: float) -> float:
    """Seconds that a step takes at least: what the link takes, or what the cores take."""
    return max(num_bytes * 8 / (mbit * 1e6), codecs_s + packets_s)


def measured(part: str, options: Options) -> Iterator[Row]:
    """The figures of one part, as they come."""
    yield from {"wire": _wire, "plan": _plan, "loopback": _loopback, "train": _train}[part](options)


@dataclasses.dataclass(frozen=True)
class _Steps:
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


class _Bench:
    """Two jobs on the same hosts: ours, and one of Horovod alone. One runs at a time."""

    def __init__(self, options: Options, ours: Job, theirs: Job, net: Network | None) -> None:
        self.options, self.net, self._jobs = options, net, {True: ours, False: theirs}
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
        if self.net is not None:
            self.net.limit(mbit)

    def ours(self, name: str, steps: int = 1) -> _Steps:
        return self._block(True, name, steps)

    def theirs(self, name: str, steps: int = 1) -> _Steps:
        return self._block(False, name, steps)

    def ask(self, **command: Any) -> dict[str, Any]:
        """What rank 0 of our job answers."""
        return self._jobs[True].ask(deadline_s=DEADLINE_S, **command)[0]

    def rounds(self, first: _Steps) -> int:
        """How many more steps are made after the first."""
        if first.median > LONG_S and not self.options.is_full:
            return 0
        return self.options.rounds - 1

    def steps(self, name: str, is_ours: bool = True) -> _Steps:
        """One step, and the rounds' others if it is short."""
        first = self._block(is_ours, name, 1)
        more = self.rounds(first)
        if not more:
            return first
        rest = self._block(is_ours, name, more)
        num_bytes = (first.num_bytes + more * rest.num_bytes) / (more + 1)
        return _Steps(first.seconds + rest.seconds, num_bytes)

    def _block(self, is_ours: bool, name: str, steps: int) -> _Steps:
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
        return _Steps(seconds, max(moved, default=0) / steps)


@contextlib.contextmanager
def _bench(options: Options, has_network: bool = True) -> Iterator[_Bench]:
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(options.ranks)) if has_network else None
        ours, theirs = (
            stack.enter_context(
                job(options.ranks, module=_WORKER, threads=1, settings=_SETTINGS, network=net)
            )
            for _ in range(2)
        )
        yield _Bench(options, ours, theirs, net)


def _link(mbit: float | None) -> str:
    return _NO_LIMIT if mbit is None else f"{mbit:.0f} Mbit/s"


def _step_rows(part: str, what: str, mbit: float | None, steps: _Steps) -> Iterator[Row]:
    """Seconds and bytes of steps."""
    link, count = _link(mbit), len(steps.seconds)
    low, high = harness.interval(steps.seconds)
    interval = f"{low:.4g} - {high:.4g}" if count > 1 else "1 step"
    yield row(part, what, steps.median, "s", link=link, interval=interval)
    if steps.num_bytes:
        yield row(part, what, steps.num_bytes / 1e6, "MB", link=link)


# Parts.


def _wire(options: Options) -> Iterator[Row]:
    with _bench(options) as bench:
        bench.load("vgg19")
        medians = {}
        for name, text in CODECS.items():
            bench.make(name, "sum", choices=[[text, "ps", 1]])
            bench.make("codecs", "codecs", of=name)
            bench.make("packets", "packets", text=text)
            found: dict[tuple[str, int | None], list[_Steps]] = {}
            for _ in range(options.rounds):
                bench.limit(None)
                for way in ("codecs", "packets", name):
                    found.setdefault((way, None), []).append(bench.ours(way))
                for mbit in RATES:
                    bench.limit(mbit)
                    found.setdefault((name, mbit), []).append(bench.ours(name))
            bench.drop(name, "codecs", "packets")
            for (way, mbit), steps in found.items():
                joined = _joined(steps)
                title = name if way == name else f"{way} of {name}"
                yield from _step_rows("wire", title, mbit, joined)
                medians[way, mbit] = joined.median
            alone = list(zip(found["codecs", None], found["packets", None], strict=True))
            for mbit in RATES:
                ratios = [
                    step.median / bound_s(step.num_bytes, mbit, codecs.median, packets.median)
                    for step, (codecs, packets) in zip(found[name, mbit], alone, strict=True)
                ]
                wire_s = statistics.median(step.num_bytes for step in found[name, mbit])
                wire_s *= 8 / (mbit * 1e6)
                cores_s = medians["codecs", None] + medians["packets", None]
                yield ratio_row(
                    "wire",
                    f"{name} over its bound",
                    ratios,
                    link=_link(mbit),
                    against=f"wire {wire_s:.3g} s, cores {cores_s:.3g} s",
                    about=f"collectives-bound-{name}-{mbit}",
                )
        for precision in ("fp32", "fp16"):
            bench.make(precision, "horovod", precision=precision, grouped=False)
            for mbit in (None, *reversed(RATES)):
                bench.limit(mbit)
                steps = bench.steps(precision, is_ours=False)
                yield from _step_rows("wire", f"Horovod {precision}", mbit, steps)
                for name in CODECS:
                    ours = medians[name, mbit]
                    is_target = (precision, mbit) == ("fp32", RATES[0])
                    yield row(
                        "wire",
                        f"{precision} allreduce over {name}",
                        steps.median / ours,
                        "x",
                        link=_link(mbit),
                        against=f"{len(steps.seconds)} step(s) of Horovod {precision}",
                        about=f"collectives-faster-{name}" if is_target else "",
                    )


def _joined(blocks: Sequence[_Steps]) -> _Steps:
    """Blocks of one step each."""
    return _Steps(
        [second for block in blocks for second in block.seconds],
        statistics.median(block.num_bytes for block in blocks),
    )


def _plan(options: Options) -> Iterator[Row]:
    hits = []
    with _bench(options) as bench:
        for model in MODELS:
            bench.load(model)
            for mbit in RATES:
                bench.limit(mbit)
                bench.ask(do="measure", candidates=[ONEBIT, DGC], seconds=PROFILE_S)
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
                    yield from _step_rows("plan", f"{model}, {title}", mbit, steps)
                    predicted = bench.ask(do="predict", choices=choices)["seconds"]
                    ratio = predicted / steps.median
                    if title in points:
                        hits.append(abs(ratio - 1) <= TOLERANCE)
                    yield row(
                        "plan",
                        f"{model}, {title}: predicted over measured",
                        ratio,
                        "x",
                        link=_link(mbit),
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
    bench: _Bench,
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
    yield from _step_rows("plan", f"{model}, auto", mbit, _Steps(seconds, 0.0))
    yield ratio_row(
        "plan",
        f"{model}, auto over the best fixed choice",
        ratios,
        link=_link(mbit),
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
    with _bench(options, has_network=False) as bench:
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
                yield from _step_rows("loopback", f"{model}, {title}", None, _Steps(seconds, 0.0))
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
                job(options.ranks, module=_KERAS, threads=1, settings=_SETTINGS, network=net)
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
            yield row("train", f"CNN, {title}", images, "images/s", link=_link(mbit))
        best = min(("tape", "grouped"), key=lambda way: statistics.median(found[way]))
        yield ratio_row(
            "train",
            "CNN, images/s over plain Horovod's",
            [b / a for a, b in zip(found["ours"], found[best], strict=True)],
            link=_link(mbit),
            against=f"the loop `{best}`",
            about="collectives-train-images",
        )
        net.limit(None)
        yield from _accuracy(jobs["ours"])


def _accuracy(started: Job) -> Iterator[Row]:
    means = {}
    for title, text in (("none", None), ("onebit", ONEBIT)):
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
    yield row(
        "train",
        "accuracy that compression costs",
        100 * (means["none"] - means["onebit"]),
        "points",
        against=f"mean of {SEEDS} seeds, {EPOCHS} epochs",
        about="collectives-train-accuracy",
    )


def timeline(options: Options, path: Path) -> str:
    """Writes Horovod's timeline of two steps of onebit at 1 Gbit/s; says what it shows."""
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(options.ranks))
        settings = {**_SETTINGS, "HOROVOD_TIMELINE": str(path)}
        ours = stack.enter_context(
            job(options.ranks, module=_WORKER, threads=1, settings=settings, network=net)
        )
        ours.ask(do="start", ours=True)
        ours.ask(do="load", model="vgg19", scale=options.scale, deadline_s=DEADLINE_S)
        choices = [[ONEBIT, "ps", 1]]
        ours.ask(do="make", name="step", kind="sum", choices=choices, deadline_s=DEADLINE_S)
        net.limit(RATES[-1])
        ours.ask(do="block", name="step", steps=1, deadline_s=DEADLINE_S)
        ours.ask(do="stop")
    events = json.loads(path.read_text(encoding="utf-8"))
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    return f"{path}: {len(events)} events of {len(names)} tensors"
