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
from benchmarks.network import Network, network

NOT_RUN = "not run"
"""What is said of a target that this machine cannot measure."""
NOT_MEASURED = "not measured"
"""What is said of a target that no figure is about; nothing is stored with such a one."""
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
        is_complete: whether they are all that there are to store; nothing is, if a target has no
            figure.
        figures: columns of the first table.
        columns: columns of the second one.
        stores_noisy: whether that a machine was too busy for a target is stored, too. A narrow
            interval that holds a bound is stored as "noisy" all the same: that is what there is.
        updates: parts whose figures take the place of those in the stored result; none: what is
            stored is all new.
        not_run: ids of targets that could not be measured here; then nothing is stored.
    """
    facts = harness.environment()
    of_run = {key: facts[key] for key in harness.PART_FACTS} | {"note": note}
    parts = {row["part"]: of_run for row in rows}
    if updates:
        rows, parts, note = *_updated(theme, rows, parts, updates), ""
    bound = targets(rows, command, not_run)
    busy = [row["id"] for row in bound if row["met"] == "noisy" and row["is_busy"]]
    if busy:
        print(f"bench-{theme}: the machine was too busy to tell of {', '.join(busy)}")
    without = [row["id"] for row in bound if row["met"] in (NOT_RUN, NOT_MEASURED)]
    bound = [{key: row[key] for key in row if key != "is_busy"} for row in bound]
    if rows:
        harness.show(theme, [only(row, figures) for row in rows])
    harness.show("targets", [only(row, columns) for row in bound])
    if is_complete and not (without or not_run) and (stores_noisy or not busy):
        found = [*rows, *bound]
        harness.write(theme, found, command=command, note=note, is_shown=False, parts=parts)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    counts = ((kind, sum(row["met"] == kind for row in bound)) for kind in (NOT_RUN, NOT_MEASURED))
    more = "".join(f", {count} {kind}" for kind, count in counts if count)
    print(f"bench-{theme}: {num_met} of {len(bound)} targets met{more}")


def add_update(parser: argparse.ArgumentParser) -> None:
    """Declares `--update`, for programs with `--only`."""
    parser.add_argument(
        "--update",
        action="store_true",
        help="with --only: these parts take their places in the stored result",
    )


def stored(theme: str) -> Row:
    """The newest stored result of a theme that is of a machine like this one.

    Raises:
        SystemExit: there is none.
    """
    here = harness.environment()
    machines, found = [], []
    for path in sorted(harness.RESULTS.glob(f"{theme}_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        facts = result["environment"]
        if result["theme"] != theme:
            continue
        machines.append(f"{path.name} of {_named(facts)}")
        if harness.is_machine(facts, here):
            found.append(result)
    if not found:
        raise SystemExit(
            f"bench-{theme}: --update needs a stored result of this machine, {_named(here)}. "
            f"Received: {'; '.join(machines) or 'none'}"
        )
    newest: Row = max(found, key=lambda result: harness.when(result["environment"]))
    return newest


def _named(facts: Row) -> str:
    return f"{harness.named(facts)}, {facts['cores']} cores"


def _updated(
    theme: str, rows: Sequence[Row], parts: dict[str, Row], updates: Collection[str]
) -> tuple[list[Row], dict[str, Row]]:
    """The newest stored figures with those of some parts in their places, and whence each is."""
    result = stored(theme)
    before = [row for row in result["rows"] if not row.get("id") and row["part"] not in updates]
    # The first results tell of their last run only.
    facts = result["environment"]
    of_run = {key: facts.get(key, "") for key in harness.PART_FACTS} | {"note": result["note"]}
    known = result.get("parts", {})
    others = {row["part"]: known.get(row["part"], of_run) for row in before}
    return [*before, *rows], {**others, **parts}


def told(rows: Iterator[Row], began: float) -> Iterator[Row]:
    """The same rows, each printed as it comes, `began` being when the program did."""
    for row in rows:
        print(f"{time.monotonic() - began:5.0f} s  {in_words(row)}", flush=True)
        yield row


def targets(rows: Sequence[Row], command: str, not_run: Collection[str] = ()) -> list[Row]:
    """One row per target of the program behind `command`, with `is_busy`: was the machine?

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
        is_busy = False
        if not figures:
            row = collectives_jobs.row("", NOT_MEASURED, None, target["unit"])
            met = NOT_RUN if target["id"] in not_run else NOT_MEASURED
        else:
            row = (min if is_least else max)(figures, key=lambda one: one["measured"])
            met, is_busy = harness.verdict(row, target), harness.is_noisy(row, limit)
        bound = f"{'>=' if is_least else '<='} {limit} {target['unit']}".rstrip()
        more = {"id": target["id"], "about": "", "target": bound, "met": met, "is_busy": is_busy}
        found.append({**row, **more})
    return found


def only(row: Row, columns: Sequence[str]) -> Row:
    """Some columns of a row."""
    return {column: row[column] for column in columns}


def in_words(row: Row) -> str:
    """A figure in one line."""
    return "  ".join(harness.cell(row[column]) for column in FIGURES if row[column] != "")


@contextlib.contextmanager
def network_of(hosts: int, what: str, about: Sequence[str]) -> Iterator[Network]:
    """A network of so many hosts, for a part of a benchmark.

    Args:
        hosts: how many.
        what: is measured there.
        about: ids of the targets that only this part measures.

    Raises:
        NotRunError: there can be none here.
    """
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(network(hosts))
        except OSError as error:
            raise NotRunError(what, str(error), about) from error
        yield made


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Ends as Control-C does when the process is told to end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
