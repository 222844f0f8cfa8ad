# SPDX-License-Identifier: Apache-2.0
"""How a `make bench-*` ends: its two tables, what is stored, and how many targets are met."""

import argparse
import contextlib
import json
import signal
import sys
import time
import tomllib
from collections.abc import Collection, Iterator, Sequence

from benchmarks import collectives_jobs, harness
from benchmarks.collectives_jobs import Row

NOT_RUN = "not run"
"""What is said of a target that this machine cannot measure."""
# Columns of the two tables that are printed.
FIGURES = ("part", "what", "link", "measured", "unit", "interval", "against")
TARGETS = ("id", "what", "link", "measured", "interval", "target", "against", "met")


class NotRunError(Exception):
    """A part of a benchmark cannot be run on this machine.

    Attributes:
        targets: ids of those that only this part measures.
    """

    def __init__(self, what: str, reason: str, targets: Sequence[str]) -> None:
        """What was not run, why, and whose targets then have no figure."""
        super().__init__(f"{what}: not run ({' '.join(reason.split())})")
        self.targets = tuple(targets)


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
    updates: Collection[str] = (),
    not_run: Collection[str] = (),
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
        updates: parts whose figures take the place of those in the stored result; none: what is
            stored is all new.
        not_run: ids of targets that could not be measured here; then nothing is stored.
    """
    if updates:
        rows, note = _updated(theme, rows, note, updates)
    bound = targets(rows, command, not_run)
    noisy = [row["id"] for row in bound if row["met"] == "noisy"]
    if noisy:
        print(f"bench-{theme}: the machine was too busy to tell of {', '.join(noisy)}")
    if rows:
        harness.show(theme, [only(row, figures) for row in rows])
    harness.show("targets", [only(row, columns) for row in bound])
    if is_complete and not not_run and (stores_noisy or not noisy):
        harness.write(theme, [*rows, *bound], command=command, note=note, is_shown=False)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    num_not_run = sum(row["met"] == NOT_RUN for row in bound)
    more = f", {num_not_run} not run" if num_not_run else ""
    print(f"bench-{theme}: {num_met} of {len(bound)} targets met{more}")


def add_update(parser: argparse.ArgumentParser) -> None:
    """Declares `--update`, for programs with `--only`."""
    parser.add_argument(
        "--update",
        action="store_true",
        help="with --only: these parts take their places in the stored result",
    )


def _updated(
    theme: str, rows: Sequence[Row], note: str, parts: Collection[str]
) -> tuple[list[Row], str]:
    """The newest stored figures, with those of some parts in their places, and a note of that."""
    paths = sorted(harness.RESULTS.glob(f"{theme}_*.json"))
    if not paths:
        raise SystemExit(f"bench-{theme}: --update needs a stored result. Received: none")
    stored = json.loads(paths[-1].read_text(encoding="utf-8"))
    before = [row for row in stored["rows"] if not row.get("id") and row["part"] not in parts]
    facts = stored["environment"]
    others = ", ".join(dict.fromkeys(row["part"] for row in before))
    told = (
        f"Parts measured anew: {', '.join(parts)} ({note.strip()}) Of {facts['date']}, commit "
        f"{facts['commit']}: {others}. {stored['note']}"
    )
    return [*before, *rows], told


def told(rows: Iterator[Row], began: float) -> Iterator[Row]:
    """The same rows, each printed as it comes, `began` being when the program did."""
    for row in rows:
        print(f"{time.monotonic() - began:5.0f} s  {in_words(row)}", flush=True)
        yield row


def targets(rows: Sequence[Row], command: str, not_run: Collection[str] = ()) -> list[Row]:
    """One row per target of the program behind `command`; what was not measured is not met.

    Args:
        rows: what was measured.
        command: as for `conclude`.
        not_run: as for `conclude`.
    """
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
            met = NOT_RUN if target["id"] in not_run else met
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
