# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation on the CPU: beside reading the rows once, TensorFlow's sort, and ByzFL.

    read      rules over the time of a kernel that reads all rows once (codecs_stream.cc)
    sort      a median by `tf.sort` in a tf.function, of rows or of columns, whichever is faster,
              over ours
    byzfl     rules of ByzFL (PyPI, PyTorch on the CPU, `byzfl/app.py`) over ours
    step      a step over ranks on links of 1 Gbit/s with a rule, over one with a mean
              (robust_step.py); needs root
    server    a round of a server with a rule, over one with a mean, on such links
              (robust_server.py); needs root
    votes     what a server of children that vote receives, by digest (robust_votes.py)
    accuracy  digits under attack, and what DETOX is worth (robust_accuracy.py)
    table     the same with two levels of servers and codecs (robust_table.py); takes longest

A rule is a whole call, with the look for NaN and absurd norms; the result goes to memory that is
there. f is the greatest that the rule bears with n rows, but for NNM and multi-Krum, where it is
n // 5. Everything has 2 threads. Rows are normal noise. What is compared alternates, round by
round (beside peers calls of one follow each other for a while, and the first does not count); a
ratio is the median of the rounds', and `interval` holds the median of other rounds in nine
cases of ten. Targets count the worst figure of d >= 1e7 beside one read, and of d >= 1e6 beside
peers: smaller rows stay in caches, where reading costs next to nothing. Without FULL=1, n d is at
most 4.5e8 for our rules and 1.7e8 for the peers.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import (
    closing,
    codecs,
    robust_accuracy,
    robust_server,
    robust_step,
    robust_table,
    robust_votes,
)
from benchmarks.collectives_jobs import Row, ratio_row

COMMAND = "make bench-robust"
THREADS = 2
ROUNDS = 9
BYZFL_ROUNDS = 5  # at most
SEEDS = robust_table.SEEDS  # of trainings, at most
BLOCK_S = 0.05  # of calls one after the other, where the other one has threads of its own
COUNTS = (5, 10, 15, 16, 23, 45, 100)
LENGTHS = (100_000, 1_000_000, 10_000_000, 25_000_000)
PEER_COUNTS = (15, 45)
PEER_LENGTHS = (100_000, 1_000_000, 11_000_000)
MOST, MOST_FULL = 450_000_000, 1_000_000_000
PEER_MOST, PEER_MOST_FULL = 170_000_000, 500_000_000
# Of figures that targets are about.
LEAST_LENGTH = {"read": 10_000_000, "sort": 1_000_000, "byzfl": 1_000_000}
RULES = (
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "geometric_median",
    "nnm",
    "meamed",
    "bulyan",
    "mda",
    "centred_clipping",
)
_BYZFL = ("median", "krum", "trimmed_mean", "geometric_median")
# What a rule is measured for; n <= 16 unless it says otherwise.
_TARGETS = {
    "median": "robust-median",
    "trimmed_mean": "robust-trimmed-mean",
    "krum": "robust-krum",
    "multi_krum": "robust-multi-krum",
    "geometric_median": "robust-geometric-median",
    "nnm": "robust-nnm",
}
BYZFL_TARGETS = ("robust-byzfl-krum", "robust-byzfl-krum-45")
FIGURES = ("part", "what", "measured", "unit", "interval", "against")
TARGETS = ("id", "what", "measured", "interval", "target", "against", "met")


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", help="some parts; nothing is stored, unless --update"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every comparison")
    parser.add_argument("--most", type=int, help="elements of all rows; nothing is stored")
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    closing.add_update(parser)
    arguments = parser.parse_args()
    if arguments.update:
        closing.stored("robust")
    # Read when the library makes its threads and when TensorFlow is imported.
    os.environ["TF_HIPS_NUM_THREADS"] = str(THREADS)
    of_tensorflow = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    os.environ.update(dict.fromkeys(of_tensorflow, str(THREADS)), TF_CPP_MIN_LOG_LEVEL="2")
    is_full = os.environ.get("FULL", "") not in ("", "0")
    began = time.monotonic()
    rows: list[Row] = []
    not_run: list[str] = []
    with closing.terminable():
        for part in arguments.only or PARTS:
            most = (
                (MOST_FULL if is_full else MOST)
                if part == "read"
                else (PEER_MOST_FULL if is_full else PEER_MOST)
            )
            found = PARTS[part](arguments.rounds, min(most, arguments.most or most))
            try:
                rows += closing.told(found, began)
            except closing.NotRunError as error:
                print(error, flush=True)
                not_run += error.targets
    note = (
        f"{time.monotonic() - began:.0f} s, {rounds_told(arguments.rounds)}, {THREADS} threads. "
        "What the figures are: see the head of `benchmarks/robust.py`."
    )
    is_all = arguments.only is None or arguments.update
    is_complete = is_all and arguments.most is None and not arguments.dry_run
    closing.conclude(
        "robust",
        rows,
        command=COMMAND,
        note=note,
        is_complete=is_complete and arguments.rounds >= ROUNDS,
        figures=FIGURES,
        columns=TARGETS,
        updates=arguments.only or () if arguments.update else (),
        not_run=not_run,
    )
    return 0


def rounds_told(rounds: int) -> str:
    """How often each part was measured."""
    least = min(rounds, BYZFL_ROUNDS)
    return f"{rounds} rounds (byzfl: {least}; accuracy and table: {min(rounds, SEEDS)} seeds)"


def text_of(rule: str, n: int) -> str:
    """The rule that is measured with n rows."""
    if rule == "nnm":
        return f"nnm(f={n // 5}) >> trimmed_mean(f={n // 5})"
    if rule == "multi_krum":
        return f"multi_krum(f={n // 5})"
    return f"mda(f={min(n // 5, 4)})" if rule == "mda" else rule


def about(part: str, rule: str, n: int, d: int) -> str:
    """The id of the target that a figure is about; "": none."""
    if d < LEAST_LENGTH[part]:
        return ""
    if part == "read":
        stem = _TARGETS.get(rule, "")
        if n <= 16:
            return stem
        return f"{stem}-45" if n == 45 and rule in ("median", "trimmed_mean") else ""
    if part == "sort":
        return f"robust-sort-{16 if n <= 16 else 45}"
    if rule != "krum":
        return ""
    return BYZFL_TARGETS[0] if n <= 16 else BYZFL_TARGETS[1]


def read(rounds: int, most: int) -> Iterator[Row]:
    """Our rules beside one read."""
    helper = codecs.build_helper()
    for n in COUNTS:
        for d in LENGTHS:
            if n * d > most:
                continue
            rows = _noise(n, d)

            def bound(rows: np.ndarray = rows) -> None:
                at = rows.ctypes.data
                helper.stream(at, rows.nbytes, 1, None, 0, None, 0, THREADS)

            for rule in RULES:
                if rule not in _TARGETS and d != LEAST_LENGTH["read"]:
                    continue
                ours = _ours(rule, rows)
                times = _by_turns(ours, bound, rounds)
                ratios = [mine / once for mine, once in times]
                yield _row("read", rule, n, d, ratios, times, "one read")


def sort(rounds: int, most: int) -> Iterator[Row]:
    """A median in TensorFlow ops over ours."""
    import tensorflow as tf

    for n in PEER_COUNTS:
        for d in PEER_LENGTHS:
            if n * d > most:
                continue
            rows = _noise(n, d)
            given = tf.constant(rows)
            columns = tf.transpose(given)
            of_rows = tf.function(lambda x, n=n: tf.sort(x, axis=0)[n // 2])
            of_columns = tf.function(lambda x, n=n: tf.sort(x, axis=1)[:, n // 2])
            ways = [
                lambda of=of_rows, x=given: of(x),
                lambda of=of_columns, x=columns: of(x),
            ]
            for way in ways:
                way()
            theirs = min(ways, key=_seconds)
            times = _by_turns(_ours("median", rows), theirs, rounds, in_blocks=True)
            ratios = [other / mine for mine, other in times]
            yield _row("sort", "median", n, d, ratios, times, "tf.sort")


def byzfl(rounds: int, most: int) -> Iterator[Row]:
    """ByzFL's rules over ours.

    Raises:
        NotRunError: it cannot be installed here.
    """
    try:
        python = _interpreter()
    except OSError as error:
        raise closing.NotRunError("ByzFL", str(error), BYZFL_TARGETS) from error
    with _byzfl(python) as ask:
        for n in PEER_COUNTS:
            for d in PEER_LENGTHS:
                if n * d > most:
                    continue
                rows = _noise(n, d)
                for rule in _BYZFL:
                    f = (n - 3) // 2 if rule == "krum" else (n - 1) // 2
                    order = {"rule": rule, "n": n, "d": d, "f": f, "least_s": BLOCK_S}
                    ours = _ours(rule, rows)
                    ours(), ask(order)
                    times = [
                        (_of_block(ours), ask(order)) for _ in range(min(rounds, BYZFL_ROUNDS))
                    ]
                    ratios = [theirs / mine for mine, theirs in times]
                    yield _row("byzfl", rule, n, d, ratios, times, "ByzFL")


PARTS: dict[str, Callable[[int, int], Iterator[Row]]] = {
    "read": read,
    "sort": sort,
    "byzfl": byzfl,
    "step": lambda rounds, _: itertools.chain.from_iterable(
        robust_step.measured(min(rounds, ROUNDS), ranks) for ranks in (robust_step.RANKS, 2)
    ),
    "server": lambda rounds, _: robust_server.measured(min(rounds, robust_server.ROUNDS)),
    "votes": lambda *_: robust_votes.measured(),
    "accuracy": lambda rounds, _: robust_accuracy.measured(min(rounds, SEEDS)),
    "table": lambda rounds, _: robust_table.measured(min(rounds, robust_table.SEEDS)),
}


def _row(
    part: str,
    rule: str,
    n: int,
    d: int,
    ratios: list[float],
    times: list[tuple[float, float]],
    against: str,
) -> Row:
    ours, theirs = (sorted(one)[len(times) // 2] * 1e3 for one in zip(*times, strict=True))
    what = f"{text_of(rule, n)}, n={n}, d={d:.3g}"
    shown = f"{ours:.3g} ms; {against} {theirs:.3g} ms"
    return ratio_row(part, what, ratios, against=shown, about=about(part, rule, n, d))


def _noise(n: int, d: int) -> np.ndarray:
    generator = np.random.default_rng(n)
    rows = np.empty((n, d), np.float32)
    for row in rows:
        generator.standard_normal(out=row, dtype=np.float32)
    return rows


def _ours(rule: str, rows: np.ndarray) -> Callable[[], object]:
    from tf_hips import robust

    aggregator = robust.parse(text_of(rule, len(rows)))
    out = np.zeros(rows.shape[1], np.float32)
    return lambda: aggregator.run(rows, out=out)


def _by_turns(
    ours: Callable[[], object], other: Callable[[], object], rounds: int, *, in_blocks: bool = False
) -> list[tuple[float, float]]:
    """Seconds of both, once each per round, after one that is not counted.

    Args:
        ours, other: what is called.
        rounds: how often.
        in_blocks: whether several calls of one follow each other, and the first does not count:
            the other one's rows are in the caches, and its threads look for work for a while.
    """
    ours(), other()
    timed = _of_block if in_blocks else _seconds
    return [(timed(ours), timed(other)) for _ in range(rounds)]


def _of_block(call: Callable[[], object]) -> float:
    """Mean seconds of calls that follow each other for a while, behind one that does not count."""
    call()
    count, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < BLOCK_S or not count:
        call()
        count += 1
    return elapsed / count


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextlib.contextmanager
def _byzfl(python: Path) -> Iterator[Callable[[dict[str, object]], float]]:
    """ByzFL in a process of its own; a call sends an order and returns the seconds."""
    process = subprocess.Popen(
        [str(python), str(Path(__file__).parent / "byzfl" / "app.py"), str(THREADS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None  # noqa: S101
    stdin, stdout = process.stdin, process.stdout

    def ask(order: dict[str, object]) -> float:
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return float(json.loads(stdout.readline())["seconds"])

    try:
        stdout.readline()  # it has imported everything
        yield ask
    finally:
        process.kill()
        process.wait()


def _interpreter() -> Path:
    """The Python that has ByzFL; installs it the first time.

    Raises:
        OSError: it cannot be installed.
    """
    requirements = Path(__file__).parent / "byzfl" / "requirements.txt"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tf_hips"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = cache / f"byzfl-{wanted}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"`{' '.join(command)}` must succeed. Received: {done.stderr[-500:]}")
        (folder / "complete").touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
