# SPDX-License-Identifier: Apache-2.0
"""The parameter server over gRPC: beside Flower, and beside what memory and links allow.

    flower       rounds of a dense model of 100 MB and 4 children over loopback, both with TLS, ours
                 durable (`--state`), beside Flower's FedAvg over gRPC; the two take turns
    slow         the same where each child has a link of 100 Mbit/s, ours with onebit both ways
    aggregation  one core of the server: decode, sum, encode again; beside a copy of memory
    process      how fast a server starts, and what memory it takes
    load         64 children on one server for 1,000 rounds: memory, and how long rounds take
    bytes        what the interface counts beside what is computed, beside dense, beside a flat tree
    accuracy     time to an accuracy on digits at 1, 10, 100 Mbit/s and without limit
    longer       what onebit both ways costs in the end, after twice as many steps

Children are NumPy processes, and a round lasts from the gradients to the decoded sums: a child
encodes, sends, receives and decodes; Flower's clients serialise and parse. Models, rates and what
is counted stand at the head of each part's file. Interfaces and rates are those of network
namespaces (`network.py`), so `slow`, `bytes` and `accuracy` need root.

A ratio is the median of the rounds', and `interval` holds the median of other rounds in nine cases
of ten. A target of `benchmarks/targets.toml` that speaks of several figures counts the worst; one
whose interval is wide and holds the bound is "noisy", and not met.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks import closing, ps_accuracy, ps_bytes, ps_server, ps_speed
from benchmarks.collectives_jobs import Row
from benchmarks.network import why_not
from benchmarks.ps_options import Options

COMMAND = "make bench-ps"
PARTS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "flower": ps_speed.flower,
    "slow": ps_speed.slow,
    "aggregation": ps_server.aggregation,
    "process": ps_server.process,
    "load": ps_server.load,
    "bytes": ps_bytes.measured,
    "accuracy": ps_accuracy.measured,
    "longer": ps_accuracy.longer,
}
NEED_ROOT = ("slow", "bytes", "accuracy")


def main() -> int:
    """Measures, prints and stores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", help="some parts; nothing is stored, unless --update"
    )
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="of every comparison")
    parser.add_argument(
        "--tensors",
        type=int,
        default=Options.tensors,
        help="of 4 MB each, of the model; nothing is stored, unless 25",
    )
    parser.add_argument(
        "--load-rounds", type=int, default=Options.load_rounds, help="of many children"
    )
    parser.add_argument("--dry-run", action="store_true", help="nothing is stored")
    closing.add_update(parser)
    arguments = parser.parse_args()
    if arguments.update:
        closing.stored("ps")
    chosen = arguments.only or list(PARTS)
    if (why := why_not()) and any(part in NEED_ROOT for part in chosen):
        print(f"bench-ps: {why}")
        return 0
    options = Options(
        rounds=arguments.rounds,
        tensors=arguments.tensors,
        load_rounds=arguments.load_rounds,
        is_full=os.environ.get("FULL", "") not in ("", "0"),
    )
    began = time.monotonic()
    rows: list[Row] = []
    with closing.terminable():
        for part in PARTS:
            if part in chosen:
                rows += closing.told(PARTS[part](options), began)
    note = (
        f"{time.monotonic() - began:.0f} s, {options.rounds} rounds. What the figures are: see "
        "the head of `benchmarks/ps.py` and of its parts."
    )
    is_all = arguments.only is None or arguments.update
    closing.conclude(
        "ps",
        rows,
        command=COMMAND,
        note=note,
        is_complete=is_all and options.is_complete and not arguments.dry_run,
        updates=arguments.only or () if arguments.update else (),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
