# SPDX-License-Identifier: Apache-2.0
"""How a `make bench-*` ends: its two tables, what is stored, and how many targets are met."""

import contextlib
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence

from benchmarks import collectives_jobs, harness
from benchmarks.collectives_jobs import Row

# Columns of the two tables that are printed.
FIGURES = ("part", "what", "link", "measured", "unit", "interval", "against")
TARGETS = ("id", "what", "link", "measured", "interval", "target", "against", "met")


def conclude(
    theme: str,
    rows: Sequence[Row],
    *,
    command: str,
    note: str,
    is_complete: bool,
    figures: Sequence[str] = FIGURES,
    columns: Sequence[str] = TARGETS,
    stores_noisy: bool = True,
) -> None:
    """Prints figures and targets, stores both, and says how many targets are met.

    Args:
        theme: of the result, as in `make bench-THEME`.
        rows: what was measured.
        command: the command behind the targets.
        note: what is stored beside the figures.
        is_complete: whether they are all that there are to store.
        figures: columns of the first table.
        columns: columns of the second one.
        stores_noisy: whether that a machine was too busy for a target is stored, too.
    """
    bound = targets(rows, command)
    noisy = [row["id"] for row in bound if row["met"] == "noisy"]
    if noisy:
        print(f"bench-{theme}: the machine was too busy to tell of {', '.join(noisy)}")
    if rows:
        harness.show(theme, [only(row, figures) for row in rows])
    harness.show("targets", [only(row, columns) for row in bound])
    if is_complete and (stores_noisy or not noisy):
        harness.write(theme, [*rows, *bound], command=command, note=note, is_shown=False)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    print(f"bench-{theme}: {num_met} of {len(bound)} targets met")


def told(rows: Iterator[Row], began: float) -> Iterator[Row]:
    """The same rows, each printed as it comes, `began` being when the program did."""
    for row in rows:
        print(f"{time.monotonic() - began:5.0f} s  {in_words(row)}", flush=True)
        yield row


def targets(rows: Sequence[Row], command: str) -> list[Row]:
    """One row per target of the program behind `command`; what was not measured is not met."""
    path = harness.ROOT / "benchmarks/targets.toml"
    found = []
    for target in tomllib.loads(path.read_text(encoding="utf-8"))["target"]:
        if target["command"] != command:
            continue
        figures = [row for row in rows if row["about"] == target["id"]]
        is_least = "at_least" in target
        limit = target["at_least"] if is_least else target["at_most"]
        if not figures:
            row, met = collectives_jobs.row("", "not measured", 0.0, target["unit"]), "no"
        else:
            row = (min if is_least else max)(figures, key=lambda one: one["measured"])
            is_met = row["measured"] >= limit if is_least else row["measured"] <= limit
            met = "noisy" if harness.is_noisy(row, limit) else "yes" if is_met else "no"
        bound = f"{'>=' if is_least else '<='} {limit} {target['unit']}".rstrip()
        found.append({**row, "id": target["id"], "about": "", "target": bound, "met": met})
    return found


def only(row: Row, columns: Sequence[str]) -> Row:
    """Some columns of a row."""
    return {column: row[column] for column in columns}


def in_words(row: Row) -> str:
    """A figure in one line."""
    return "  ".join(str(row[column]) for column in FIGURES if row[column] != "")


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Ends as Control-C does when the process is told to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
