# SPDX-License-Identifier: Apache-2.0
"""Part `table` of `make bench-robust`: rules by attacks, levels of servers and codecs, on digits.

What is trained: `robust_levels.py`. Each figure is the mean accuracy of the last step over seeds.
What the package refuses to do is in the table with its reason and no figure. Two processes train,
one thread each; the learning rate is one for all rules but majorities and is not tuned to any.
Every run is a function of its seed, so the table is the same on every machine but for rounding.

Three of its cells are trained again by real processes (`robust_processes.py`).

`python -m benchmarks.robust_table` prints the table alone.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness, obedience, robust_levels, robust_processes
from benchmarks.collectives_jobs import Row, row
from benchmarks.ps_processes import Process
from benchmarks.robust_levels import (
    ATTACKS,
    CODECS,
    LEVELS,
    MEAN,
    MORE_CODECS,
    STEPS,
    WORKERS,
    Cell,
)

PROCESSES = 2
SEEDS = 3
# What one process is given at a time, in runs.
BLOCK = 12
RULES = (
    MEAN,
    "median",
    "trimmed_mean(f=1)",
    "meamed(f=1)",
    "majority",
    "krum(f=1)",
    "multi_krum(f=1)",
    "bulyan(f=1)",
    "geometric_median(f=1)",
    "centred_clipping(f=1)",
    "mda(f=1)",
    "cge(f=1)",
    "nnm(f=1) >> trimmed_mean(f=1)",
    "nnm(f=1) >> krum(f=1)",
)
NONE = next(iter(ATTACKS))
# One thread each: sums of BLAS must not depend on how many there are.
_ALONE = {
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TF_HIPS_NUM_THREADS": "1",
}


@dataclasses.dataclass(frozen=True)
class Line:
    """One rule at one level with one codec.

    Attributes:
        rule: text of the rule.
        level: where it is, and who lies.
        codec: name of the codec.
        why_not: why the package refuses it; None: it does not.
        accuracy: in percent by attack, means over seeds.
    """

    rule: str
    level: str
    codec: str
    why_not: str | None
    accuracy: dict[str, float]

    @property
    def worst(self) -> str:
        """The attack that costs most, or brings least."""
        return min((name for name in self.accuracy if name != NONE), key=self.accuracy.__getitem__)

    @property
    def shown(self) -> str:
        """Clean and worst accuracy in a few words."""
        if self.why_not is not None:
            return "refused"
        lying = self.accuracy[self.worst]
        return f"{self.accuracy[NONE]:.1f} / {lying:.1f} {self.worst}"


class Trainer:
    """A process that trains cells."""

    def train(self, cells: list[dict[str, str]], seeds: list[int], steps: int) -> dict[str, Any]:
        """Accuracies of cells, one after the other, and seconds of each run."""
        found, seconds = [], []
        for cell in cells:
            accuracies = []
            for seed in seeds:
                began = time.perf_counter()
                accuracies.append(robust_levels.trained(Cell(**cell), seed, steps))
                seconds.append(time.perf_counter() - began)
            found.append(statistics.mean(accuracies))
        return {"accuracies": found, "seconds": seconds}


@contextlib.contextmanager
def trainers(count: int = PROCESSES) -> Iterator[list[Process]]:
    """Processes that train; killed at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hips-bench")))
        made = []
        for number in range(count):
            command = [sys.executable, "-m", "benchmarks.robust_table", "trainer"]
            one = Process(command, log=folder / f"trainer {number}.log", settings=_ALONE)
            stack.callback(one.end)
            made.append(one)
        yield made


def lines(
    texts: Sequence[str] = RULES,
    *,
    levels: Sequence[str] = LEVELS,
    codecs: Sequence[str] = tuple(CODECS),
    seeds: int = SEEDS,
    steps: int = STEPS,
) -> tuple[list[Line], list[float]]:
    """The table, and seconds of all runs."""
    plans = [
        (rule, level, codec, Cell(rule, level, codec, NONE).why_not())
        for rule in texts
        for level in levels
        for codec in codecs
    ]
    cells = [
        cell
        for rule, level, codec, why_not in plans
        if why_not is None
        for attack in ATTACKS
        if (cell := Cell(rule, level, codec, attack)).why_not() is None
    ]
    each = max(1, BLOCK // seeds)
    blocks = [cells[first : first + each] for first in range(0, len(cells), each)]
    with trainers() as processes, concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for process in processes:
            idle.put(process)

        def trained(block: list[Cell]) -> dict[str, Any]:
            process = idle.get()
            given = [dataclasses.asdict(cell) for cell in block]
            order = {"do": "train", "cells": given, "seeds": list(range(seeds)), "steps": steps}
            process.tell(json.dumps(order))
            answer = process.hear()
            idle.put(process)
            return answer

        answers = list(pool.map(trained, blocks))
    accuracies = dict(
        zip(cells, (one for answer in answers for one in answer["accuracies"]), strict=True)
    )
    found = []
    for rule, level, codec, why_not in plans:
        mine = {
            attack: accuracies[cell]
            for attack in ATTACKS
            if (cell := Cell(rule, level, codec, attack)) in accuracies
        }
        found.append(Line(rule, level, codec, why_not, mine))
    return found, [one for answer in answers for one in answer["seconds"]]


def measured(seeds: int = SEEDS) -> Iterator[Row]:
    """Every line of the table, what a run takes, and three cells by real processes."""
    began = time.monotonic()
    found, seconds = lines(seeds=seeds)
    for line in found:
        yield _row(line)
    show(found)
    run_s = statistics.median(seconds)
    yield row(
        "table", f"a run of {STEPS} steps, {WORKERS} workers in one process", run_s, "s",
        against=f"{len(seconds)} runs, the longest {max(seconds):.3g} s",
        about="robust-table-run",
    )  # fmt: skip
    minutes = (time.monotonic() - began) / 60
    what = f"the table, {PROCESSES} processes"
    yield row("table", what, minutes, "min", about="robust-table-minutes")
    by_place = {(line.rule, line.level, line.codec): line for line in found}

    def table(cell: Cell) -> float:
        return by_place[cell.rule, cell.level, cell.codec].accuracy[cell.attack]

    yield from robust_processes.measured(seeds, table)


def _row(line: Line) -> Row:
    what = f"{line.rule}, {line.level}, {line.codec}"
    if line.why_not is not None:
        return row("table", what, 0.0, "refused", against=line.why_not)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in line.accuracy.items())
    return row(
        "table", f"{what}, worst: {line.worst}", line.accuracy[line.worst], "%", against=shown
    )


def compact(found: Sequence[Line]) -> list[dict[str, str]]:
    """A row for each rule and level, a column for each codec: clean / worst."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for line in found:
        first = {"rule": line.rule, "level": line.level}
        table.setdefault((line.rule, line.level), first)[line.codec] = line.shown
    return list(table.values())


def show(found: Sequence[Line]) -> None:
    """Prints the compact table."""
    harness.show("accuracy in %: clean / worst attack", compact(found))


def markdown(found: Sequence[Line]) -> str:
    """The compact table as docs/attacks.md has it, without its head."""
    rows = [{**row, "rule": f"`{row['rule']}`"} for row in compact(found)]
    return "".join("| " + " | ".join(row.values()) + " |\n" for row in rows)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", nargs="?", choices=["trainer"], help="a process of the benchmark's")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    known = [*CODECS, *MORE_CODECS]
    parser.add_argument("--codecs", nargs="+", choices=known, default=list(CODECS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--markdown", action="store_true", help="print rows for the docs, too")
    arguments = parser.parse_args()
    if arguments.role:
        obedience.obey(Trainer())
    found, seconds = lines(
        arguments.rules,
        levels=arguments.levels,
        codecs=arguments.codecs,
        seeds=arguments.seeds,
        steps=arguments.steps,
    )
    show(found)
    if arguments.markdown:
        print(markdown(found))
    if seconds:
        longest, total = max(seconds), sum(seconds)
        print(f"{len(seconds)} runs: {statistics.median(seconds):.3g} s each, {longest:.3g} s the")
        print(f"longest, {total / 60:.3g} minutes in all")
    if arguments.json:
        text = json.dumps([dataclasses.asdict(line) for line in found], indent=1)
        arguments.json.write_text(text + os.linesep, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
