# SPDX-License-Identifier: Apache-2.0
"""What a strategy of ours costs beside plain Keras and beside a hand-written Horovod loop.

    one worker   `fit` under HierarchicalPS over `fit` of plain Keras, which runs in a process that
                 never imports tf_hips; 2 compute threads each; several pairs of processes, as two
                 of plain Keras differ, too (by 2 %, by hand), and stay so
    two workers  `fit` under HierarchicalPS over the fastest of four hand-written Horovod loops: one
                 `grouped_allreduce`, or a `DistributedGradientTape`; with Horovod's own settings
                 (fusion 128 MiB, cycle 1 ms) and with our cycle of 0.5 ms; one compute thread per
                 rank
    tracing      from the call of a fresh model's `fit` to the end of its first step, less a later
                 step; over plain Keras, in processes that have traced before
    imports      what `import tf_hips` adds to `import tensorflow`, and what the first use of
                 `tf_hips.HierarchicalPS` adds to that and `import keras`

All variants of a comparison alternate in short blocks, in another order in each round, and those
that do not run stand still. What else runs on a machine only ever adds to a step, so a block's time
is the lower quartile of its steps without the first one. A machine's pace changes over minutes, so
a result is the median of the rounds' ratios, with an interval that holds nine tenths of what other
choices of the same pairs and rounds give (bootstrap); the times beside it are medians of the
rounds, too, and their ratio need not be the same. Rounds, or pairs, go on until the interval of a
step of the `cnn` is narrow, or the time is over. Models, weights, batches and optimizer (Adam) are
the same, and so must what was trained be at the end, bit for bit.

Targets stand for the `cnn` (0.6 million weights, batch 16); the `mlp` (7 thousand weights, batch
32), where nearly all is overhead, and the `transformer` (one block, 0.2 million weights, batch 16)
are told beside it. A figure whose interval holds its target is "noisy", and not met; if that of a
ratio is wider than `NOISE` as well, the machine was busy, and nothing is stored.
"""

import argparse
import contextlib
import dataclasses
import math
import signal
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.jobs import Job, job

WORKER = "benchmarks.keras_worker"
MODELS = ("mlp", "cnn", "transformer")
BOUND = "cnn"  # the model that targets are about
BLOCK = {"mlp": 100, "cnn": 5, "transformer": 6}  # steps
ROUNDS = 20  # at least
PAIRS = 5  # of processes, at least
SECONDS = 200.0  # and then no more rounds of one comparison
TRACES = {"mlp": 5, "cnn": 7, "transformer": 5}
IMPORTS = 5
# An interval that is wider says that the machine did something else meanwhile.
NOISE = {"step": 0.05, "trace": 0.15}
BOOTSTRAPS = 500
CYCLE = {"HOROVOD_CYCLE_TIME": "0.5"}  # what tf_hips sets


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train a model.

    Attributes:
        title: how the table calls it.
        job: whose processes do it.
        kind: what the worker calls it.
    """

    title: str
    job: Job
    kind: str


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Ours over a baseline's.

    Attributes:
        ours: seconds, the median of the rounds.
        baseline: its.
        low: lower end of the interval of their ratio.
        middle: their ratio.
        high: upper end of the interval.
        title: the baseline's.
        cpu: ratio of the processors' time.
        rounds: how many there were.
    """

    ours: float
    baseline: float
    low: float
    middle: float
    high: float
    title: str
    cpu: float
    rounds: int


@dataclasses.dataclass
class Taken:
    """What the rounds of a pair of variants have taken.

    Attributes:
        ours: seconds of the steps of each block.
        our_cpu: seconds of the processors for each block.
        baseline: as `ours`, of the baseline's blocks.
        baseline_cpu: as `our_cpu`.
    """

    ours: list[list[float]] = dataclasses.field(default_factory=list)
    our_cpu: list[float] = dataclasses.field(default_factory=list)
    baseline: list[list[float]] = dataclasses.field(default_factory=list)
    baseline_cpu: list[float] = dataclasses.field(default_factory=list)

    def add(
        self, ours: list[float], our_cpu: float, baseline: list[float], baseline_cpu: float
    ) -> None:
        """A round: a block of each."""
        self.ours.append(ours)
        self.our_cpu.append(our_cpu)
        self.baseline.append(baseline)
        self.baseline_cpu.append(baseline_cpu)


def main() -> int:
    """Measures, prints and stores; the exit code says whether all targets were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of blocks, at least")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--only", choices=("imports", "one", "two"), help="one comparison; nothing is stored"
    )
    arguments = parser.parse_args()
    # Jobs that stand still do not notice that their driver has gone: it must end them.
    signal.signal(signal.SIGTERM, _end)
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    if arguments.only in (None, "imports"):
        rows += imports()
    if arguments.only in (None, "one"):
        rows += one_worker(arguments.models, arguments.rounds)
    if arguments.only in (None, "two"):
        rows += two_workers(arguments.models, arguments.rounds)
    is_complete = arguments.only is None and arguments.models == list(MODELS)
    rows = [with_target(row) for row in rows]
    note = (
        f"{time.monotonic() - began:.0f} s. Medians of the rounds' ratios, with 90 % intervals; "
        "`cpu` is the same of the processors' time. Times: medians of the rounds. "
        "Baselines: see the head of `benchmarks/keras_overhead.py`."
    )
    is_busy = any(row["met"] == "noisy" and was_busy(row) for row in rows)
    if is_complete and not is_busy:
        harness.write("keras", rows, command="make bench-keras", note=note)
    else:
        harness.show("keras (not stored)", rows)
    if is_busy:
        print("bench-keras: the machine was too busy to measure; nothing is stored")
    bound = [row for row in rows if row["target"]]
    num_met = sum(row["met"] == "yes" for row in bound)
    print(f"bench-keras: {num_met} of {len(bound)} targets met")
    return 0 if num_met == len(bound) else 1


def _end(number: int, frame: Any) -> None:
    """Ends the driver once: `make` passes on a signal that its whole group gets."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def imports() -> list[dict[str, Any]]:
    """Seconds of the imports, each time in a process of its own."""
    results = []
    for _ in range(IMPORTS):
        with job(1, module=WORKER, threads=2) as process:
            results += process.ask(do="imports")
    median = {name: statistics.median(one[name] for one in results) for name in results[0]}

    def row(name: str, figure: str, measured: str, baseline: str) -> dict[str, Any]:
        values = [one[measured] for one in results]
        before = median[baseline] + (median["keras"] if measured == "HierarchicalPS" else 0)
        return _row(
            name,
            figure,
            median[measured],
            ours=f"{before + median[measured]:.2f} s",
            baseline=f"{before:.2f} s",
            interval=harness.interval_text(values),
        )

    return [
        row(
            "keras-import-seconds",
            "tf_hips after tensorflow",
            "tf_hips",
            "tensorflow",
        ),
        row(
            "keras-import-touched-seconds",
            "strategy after + keras",
            "HierarchicalPS",
            "tensorflow",
        ),
    ]


def one_worker(models: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Steps and tracing of one worker over plain Keras."""
    traced: dict[str, Ratio] = {}

    def trace(model: str, ours: Variant, keras: Variant) -> None:
        traced[model] = tracing(model, ours, keras)

    rows = []
    for model, ratio in in_pairs(models, rounds, {"strategy": True}, trace).items():
        rows.append(_of_ratio(f"keras-{model}-step-1-worker", model, "step, 1 worker", ratio))
        name = f"keras-{model}-trace-1-worker"
        rows.append(_of_ratio(name, model, "tracing, 1 worker", traced[model]))
    return rows


def in_pairs(
    models: Sequence[str],
    rounds: int,
    start: Mapping[str, Any],
    behind: Callable[[str, Variant, Variant], None],
) -> dict[str, Ratio]:
    """Step time of one worker over that of plain Keras, by model, in several pairs of processes.

    Args:
        models: which are trained.
        rounds: of each model, at least, in all pairs together.
        start: how the process of ours is started.
        behind: called with each model and both variants behind the rounds of the first pair.
    """
    taken: dict[str, list[Taken]] = {model: [] for model in models}
    end = time.monotonic() + 2 * SECONDS  # half of it is spent on starting processes
    is_over = False
    while not is_over:
        number = max(len(own) for own in taken.values())
        with job(1, module=WORKER, threads=2) as plain, job(1, module=WORKER, threads=2) as hips:
            plain.ask(do="start", strategy=False)
            hips.ask(do="start", **start)
            ours, keras = Variant("ours", hips, "ours"), Variant("plain Keras", plain, "fit")
            for model in models if number < PAIRS else [BOUND]:
                own = Taken()
                with _training(model, [ours, keras]):
                    for _ in range(math.ceil(rounds / PAIRS)):
                        _add_round(model, ours, {keras: own})
                taken[model].append(own)
                if number == 0:
                    behind(model, ours, keras)
        is_over = number + 1 >= PAIRS and (
            time.monotonic() > end
            or all(_is_narrow(model, _ratio(own)) for model, own in taken.items())
        )
    ratios = {model: _ratio(own, "plain Keras") for model, own in taken.items()}
    for model, ratio in ratios.items():
        _say(model, "step", ratio)
    return ratios


def two_workers(models: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Steps of two workers over Horovod's loops; tracing over plain Keras in two processes."""
    with contextlib.ExitStack() as stack:
        hips = stack.enter_context(job(2, module=WORKER, threads=1))
        default = stack.enter_context(job(2, module=WORKER, threads=1))
        quick = stack.enter_context(job(2, module=WORKER, threads=1, settings=CYCLE))
        hips.ask(do="start", strategy=True)
        default.ask(do="start", strategy=False)
        quick.ask(do="start", strategy=False)
        ours = Variant("ours", hips, "ours")
        loops = [
            Variant(f"{kind} {cycle} ms", where, kind)
            for where, cycle in ((default, "1"), (quick, "0.5"))
            for kind in ("grouped", "tape")
        ]
        rows = []
        for model in models:
            ratio = steps(model, ours, loops, rounds)
            rows.append(_of_ratio(f"keras-{model}-step-2-workers", model, "step, 2 workers", ratio))
            ratio = tracing(model, ours, Variant("plain Keras", default, "fit"))
            rows.append(
                _of_ratio(f"keras-{model}-trace-2-workers", model, "tracing, 2 workers", ratio)
            )
    return rows


def steps(model: str, ours: Variant, baselines: Sequence[Variant], rounds: int) -> Ratio:
    """Step time of `ours` over that of the fastest of `baselines`."""
    taken = {variant: Taken() for variant in baselines}
    end = time.monotonic() + SECONDS
    with _training(model, [ours, *baselines]):
        while True:
            _add_round(model, ours, taken)
            if len(taken[baselines[0]].ours) < rounds:
                continue
            ratios = [_ratio([own], variant.title) for variant, own in taken.items()]
            ratio = max(ratios, key=lambda ratio: ratio.middle)
            if _is_narrow(model, ratio) or time.monotonic() > end:
                break
    for one in ratios:
        _say(model, "step", one)
    return ratio


@contextlib.contextmanager
def _training(model: str, variants: Sequence[Variant]) -> Iterator[None]:
    """Variants make blocks of steps when they are asked; all must end with the same weights."""
    for variant in variants:
        _ask(variant, "begin", model)
        _ask(variant, "block", model, steps=BLOCK[model])  # the first block traces
    yield
    digests = {
        answer["digest"] for variant in variants for answer in _ask(variant, "finish", model)
    }
    if len(digests) != 1:
        raise SystemExit(f"bench-keras: the variants of `{model}` did not do the same work.")


def _add_round(model: str, ours: Variant, taken: dict[Variant, Taken]) -> None:
    """A block of each variant."""
    variants = [ours, *taken]
    # Another order in each round: what follows what matters.
    number = len(next(iter(taken.values())).ours)
    turn = number % len(variants)
    order = variants[turn:] + variants[:turn]
    blocks: dict[Variant, tuple[list[float], float]] = {}
    for variant in order if number % 2 else reversed(order):
        answers = _ask(variant, "block", model, steps=BLOCK[model])
        # Steps end on all ranks at once; the mean leaves out who came last.
        ranks = zip(*(answer["steps"][1:] for answer in answers), strict=True)
        cpu = statistics.mean(answer["cpu"] for answer in answers)
        blocks[variant] = [statistics.mean(step) for step in ranks], cpu
    for variant, own in taken.items():
        own.add(*blocks[ours], *blocks[variant])


def _is_narrow(model: str, ratio: Ratio) -> bool:
    """Whether more rounds are not needed: those of the `cnn` are compared with a target."""
    return model != BOUND or ratio.high - ratio.low <= NOISE["step"] / 2


def tracing(model: str, ours: Variant, baseline: Variant) -> Ratio:
    """Time to trace of `ours` over that of `baseline`."""
    taken = Taken()
    for _ in range(TRACES[model]):
        found: list[Any] = []
        for variant in (ours, baseline):
            answers = _ask(variant, "trace", model)
            found.append([max(answer["first"] - answer["later"] for answer in answers)])
            found.append(statistics.mean(answer["cpu"] for answer in answers))
        taken.add(*found)
    ratio = _ratio([taken], baseline.title)
    _say(model, "tracing", ratio)
    return ratio


def _ask(variant: Variant, what: str, model: str, **more: int) -> list[dict[str, Any]]:
    return variant.job.ask(do=what, model=model, variant=variant.kind, **more)


def _ratio(taken: Sequence[Taken], title: str = "") -> Ratio:
    """Of rounds of several pairs of processes, equally many of each."""
    mine, its = (
        np.array([[np.quantile(block, 0.25) for block in blocks] for blocks in of_pairs])
        for of_pairs in ([one.ours for one in taken], [one.baseline for one in taken])
    )
    ratios = mine / its
    random = np.random.default_rng(0)
    pairs = random.integers(len(taken), size=(BOOTSTRAPS, len(taken), 1))
    rounds = random.integers(ratios.shape[1], size=(BOOTSTRAPS, *ratios.shape))
    low, high = np.quantile(np.median(ratios[pairs, rounds], axis=(1, 2)), [0.05, 0.95])
    return Ratio(
        float(np.median(mine)),
        float(np.median(its)),
        float(low),
        float(np.median(ratios)),
        float(high),
        title,
        float(np.median([np.divide(one.our_cpu, one.baseline_cpu) for one in taken])),
        ratios.size,
    )


def _say(model: str, what: str, ratio: Ratio) -> None:
    """A run takes minutes: whoever waits sees it move."""
    print(
        f"{model} {what}: {_ms(ratio.ours)} over {_ms(ratio.baseline)} ({ratio.title}): "
        f"{ratio.middle:.3f} [{harness.between(ratio.low, ratio.high)}], cpu {ratio.cpu:.3f}, "
        f"{ratio.rounds} rounds",
        flush=True,
    )


def _of_ratio(name: str, model: str, what: str, ratio: Ratio) -> dict[str, Any]:
    return _row(
        name,
        f"{model}: {what}",
        ratio.middle,
        ours=_ms(ratio.ours),
        baseline=f"{_ms(ratio.baseline)} {ratio.title}",
        interval=harness.between(ratio.low, ratio.high),
        overhead=_ms(ratio.ours - ratio.baseline),
        cpu=f"{ratio.cpu:.2f}",
    )


def _row(
    name: str,
    figure: str,
    measured: float,
    *,
    ours: str,
    baseline: str,
    interval: str,
    overhead: str = "",
    cpu: str = "",
) -> dict[str, Any]:
    return {
        "id": name,
        "figure": figure,
        "ours": ours,
        "baseline": baseline,
        "overhead": overhead,
        "measured": measured,
        "interval": interval,
        "cpu": cpu,
    }


def with_target(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with its target, where it has one, and whether it is met."""
    path = harness.ROOT / "benchmarks/targets.toml"
    targets = tomllib.loads(path.read_text(encoding="utf-8"))["target"]
    for target in targets:
        if target["id"] == row["id"]:
            met = harness.verdict(row, target)
            return {**row, "target": f"<= {target['at_most']} {target['unit']}", "met": met}
    return {**row, "target": "", "met": ""}


def was_busy(row: dict[str, Any]) -> bool:
    """Whether the interval of a ratio is as wide as on a machine that did something else, too."""
    low, high = (float(value) for value in row["interval"].split(" - "))
    kind = next((kind for kind in NOISE if f"-{kind}-" in row["id"]), None)
    return kind is not None and high - low > NOISE[kind]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{3 if abs(seconds) < 0.01 else 1}f} ms"


if __name__ == "__main__":
    sys.exit(main())
