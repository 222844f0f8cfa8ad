# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over four ranks: beside what the link and the cores allow, and Horovod's own.

    wire      VGG19's gradients, onebit and TBQ with error feedback, 1 Gbit/s and 100 Mbit/s per
              rank: the time of a step over the larger of (bytes on the wire / bandwidth) and (the
              codecs' work + the same collectives on packets, each alone on these cores, the link
              unlimited); Horovod's fp32 and fp16 allreduce over it
    plan      the time that the cost model predicts over what is measured; what the planner chooses
              over the best of the fixed choices
    loopback  the same without a limit, on this machine's loopback, over Horovod's allreduce
    train     a Keras CNN at 100 Mbit/s, images per second over a hand-written Horovod loop's;
              accuracy on handwritten digits with compression and without; the target is held by
              onebit after a warm-up, what it costs without one stands beside it

Ranks are hosts of `benchmarks.network`, with one compute thread each. Bytes are those that the
interface of a rank sent or received, whichever is more, frames and acknowledgements included. A
step lasts from a barrier until the last rank has all sums. What is compared alternates, round by
round, except for steps that take more than half a minute; a ratio is the median of the rounds', and
`interval` holds the median of other rounds in nine cases of ten.

Horovod's allreduce runs in processes of its own that never import tf_hips, with Horovod's own
settings: each gradient by itself, which Horovod fuses, or all as one group, whichever is faster.
A target of `benchmarks/targets.toml` that speaks of several figures counts the worst; one whose
interval is wide and holds the bound is "noisy", and not met.
"""

import argparse
import contextlib
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import collectives_jobs, collectives_parts, harness
from benchmarks.collectives_jobs import Options, Row
from benchmarks.collectives_parts import PARTS
from benchmarks.network import why_not

COMMAND = "make bench-collectives"

# Columns of the two tables that are printed.
FIGURES = ("part", "what", "link", "measured", "unit", "interval", "against")
TARGETS = ("id", "what", "link", "measured", "interval", "target", "against", "met")


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some parts; nothing is stored")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="of every comparison")
    parser.add_argument(
        "--scale",
        type=int,
        default=1,
        help="models that many times narrower; nothing is stored",
    )
    parser.add_argument("--ranks", type=int, default=4, help="nothing is stored, unless 4")
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="instead of measuring, write Horovod's timeline of two steps (for chrome://tracing)",
    )
    arguments = parser.parse_args()
    if why := why_not():
        print(f"bench-collectives: {why}")
        return 0
    options = Options(
        ranks=arguments.ranks,
        scale=arguments.scale,
        rounds=arguments.rounds,
        is_full=os.environ.get("FULL", "") not in ("", "0"),
    )
    # Ends as Control-C does: networks and ranks are removed.
    with terminable():
        if arguments.timeline:
            print(collectives_parts.timeline(options, arguments.timeline.resolve()))
            return 0
        began = time.monotonic()
        rows = []
        for part in PARTS:
            if arguments.only is None or part in arguments.only:
                for row in collectives_parts.measured(part, options):
                    print(f"{time.monotonic() - began:5.0f} s  {in_words(row)}", flush=True)
                    rows.append(row)
    bound = targets(rows)
    noisy = [row["id"] for row in bound if row["met"] == "noisy"]
    if noisy:
        print(f"bench-collectives: the machine was too busy to tell of {', '.join(noisy)}")
    harness.show("collectives", [only(row, FIGURES) for row in rows])
    harness.show("targets", [only(row, TARGETS) for row in bound])
    is_complete = arguments.only is None and options.is_complete and not arguments.dry_run
    if is_complete:
        note = (
            f"{time.monotonic() - began:.0f} s, {options.ranks} ranks with one compute thread "
            f"each, {options.rounds} rounds. What the figures are: see the head of "
            "`benchmarks/collectives.py`."
        )
        harness.write("collectives", [*rows, *bound], command=COMMAND, note=note, is_shown=False)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    print(f"bench-collectives: {num_met} of {len(bound)} targets met")
    return 0


def targets(rows: Sequence[Row], command: str = COMMAND) -> list[Row]:
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
    import signal

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
