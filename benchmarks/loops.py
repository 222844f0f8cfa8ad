# SPDX-License-Identifier: Apache-2.0
"""Local training under the loops of tf_hips.

    overhead     a local step under FedAvg beside one of plain Keras; what a meeting takes
    esync        parties of uneven speed: waiting, and time to an accuracy, beside a meeting after
                 each step, fixed steps, the paper's rule of ESync and FedBuff
    diloco       bytes of the slow tier and accuracy beside a dense sum in each step
    simulator    predicted rounds beside measured ones; thousands of sites

What the figures are stands at the head of each part's file. A target of `benchmarks/targets.toml`
that speaks of several figures counts the worst; one whose interval is wide and holds the bound is
"noisy", and not met.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks import (
    closing,
    keras_overhead,
    loops_diloco,
    loops_esync,
    loops_overhead,
    loops_simulator,
    loops_trainings,
)
from benchmarks.collectives_jobs import Row

COMMAND = "make bench-loops"
PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "overhead": lambda given: loops_overhead.measured(tuple(given.models), given.rounds),
    "esync": lambda given: loops_esync.measured(tuple(given.levels)),
    "diloco": lambda _: loops_diloco.measured(),
    "simulator": lambda _: loops_simulator.measured(),
}


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", help="some parts; nothing is stored, unless --update"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=keras_overhead.ROUNDS,
        help="of every comparison of `overhead`, at least",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=keras_overhead.MODELS,
        default=list(keras_overhead.MODELS),
        help="of `overhead`",
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        type=int,
        choices=loops_esync.LEVELS,
        default=list(loops_esync.LEVELS),
        help="of `esync`: how many times slower one party is",
    )
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    closing.add_update(parser)
    arguments = parser.parse_args()
    if arguments.update:
        closing.stored("loops")
    began = time.monotonic()
    rows: list[Row] = []
    failed: list[str] = []
    with closing.terminable():
        for part in arguments.only or PARTS:
            try:
                rows += closing.told(PARTS[part](arguments), began)
            except loops_trainings.FailedError as error:
                # What the other parts measure in many minutes must not be lost with it.
                failed.append(part)
                print(f"bench-loops: the part {part} failed.\n{error}")
    is_whole = arguments.only is None or arguments.update
    is_whole = is_whole and not failed and not arguments.dry_run
    is_whole = is_whole and set(arguments.models) == set(keras_overhead.MODELS)
    is_whole = is_whole and set(arguments.levels) == set(loops_esync.LEVELS)
    note = (
        f"{time.monotonic() - began:.0f} s. What the figures are: see the head of "
        "`benchmarks/loops.py` and of its parts."
    )
    closing.conclude(
        "loops",
        rows,
        command=COMMAND,
        note=note,
        is_complete=is_whole and arguments.rounds >= keras_overhead.ROUNDS,
        stores_noisy=False,
        updates=arguments.only or () if arguments.update else (),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
