# SPDX-License-Identifier: Apache-2.0
"""Local training under the loops of tf_hips.

    overhead     a local step under FedAvg beside one of plain Keras; what a meeting takes

A ratio is the median of the rounds', and `interval` holds the median of other rounds in nine cases
of ten. A target of `benchmarks/targets.toml` whose interval is wide and holds the bound is "noisy",
and not met.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks import collectives, harness, keras_overhead, loops_overhead
from benchmarks.collectives_jobs import Row

COMMAND = "make bench-loops"
PARTS: dict[str, Callable[[tuple[str, ...], int], Iterator[Row]]] = {
    "overhead": loops_overhead.measured,
}


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, nargs="+", help="some parts; nothing is stored")
    parser.add_argument(
        "--rounds", type=int, default=keras_overhead.ROUNDS, help="of every comparison, at least"
    )
    parser.add_argument(
        "--models", nargs="+", choices=keras_overhead.MODELS, default=list(keras_overhead.MODELS)
    )
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows: list[Row] = []
    with collectives.terminable():
        for part in arguments.only or PARTS:
            for row in PARTS[part](tuple(arguments.models), arguments.rounds):
                print(f"{time.monotonic() - began:5.0f} s  {collectives.in_words(row)}")
                sys.stdout.flush()
                rows.append(row)
    bound = collectives.targets(rows, COMMAND)
    noisy = [row["id"] for row in bound if row["met"] == "noisy"]
    if noisy:
        print(f"bench-loops: the machine was too busy to tell of {', '.join(noisy)}")
    harness.show("loops", [collectives.only(row, collectives.FIGURES) for row in rows])
    harness.show("targets", [collectives.only(row, collectives.TARGETS) for row in bound])
    is_whole = arguments.only is None and set(arguments.models) == set(keras_overhead.MODELS)
    is_whole = is_whole and arguments.rounds >= keras_overhead.ROUNDS
    if is_whole and not noisy and not arguments.dry_run:
        note = (
            f"{time.monotonic() - began:.0f} s. What the figures are: see the head of "
            "`benchmarks/loops.py` and of its parts."
        )
        harness.write("loops", [*rows, *bound], command=COMMAND, note=note, is_shown=False)
    else:
        print("nothing is stored")
    num_met = sum(row["met"] == "yes" for row in bound)
    print(f"bench-loops: {num_met} of {len(bound)} targets met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
