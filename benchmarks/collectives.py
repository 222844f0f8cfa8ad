# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over four ranks: beside what the link and the cores allow, and Horovod's own.

    wire      VGG19's gradients, onebit and TBQ with error feedback, 1 Gbit/s and 100 Mbit/s per
              rank: the time of a step over the larger of (bytes on the wire / bandwidth) and (its
              encoding, merging and decoding alone on these cores, no packet copied); Horovod's
              fp32 and fp16 allreduce over it, also where links have no limit and segmentation
              offload is on, as on loopback
    plan      the time that the cost model predicts over what is measured; what the planner chooses
              over the best of the fixed choices
    loopback  the same without a limit, on this machine's loopback, over Horovod's allreduce
    train     a Keras CNN at 100 Mbit/s, images per second over a hand-written Horovod loop's;
              accuracy on handwritten digits with compression and without; the target is held by
              onebit after a warm-up, what it costs without one stands beside it

Ranks are hosts of `benchmarks.network`, with one compute thread each. Bytes are those that the
interface of a rank sent or received, whichever is more, frames and acknowledgements included. A
step lasts from a barrier until the last rank has all sums. What is compared alternates, round by
round, except for steps that take more than half a minute, which are made once (`1 step`), and the
points of `plan`; a ratio is the median of the rounds', and `interval` holds the median of other
rounds in nine cases of ten.

Horovod's allreduce runs in processes of its own that never import tf_hips, with Horovod's own
settings: each gradient by itself, which Horovod fuses, or all as one group, whichever is faster at
that rate (steps of more than half a minute: at the rate before).
A target of `benchmarks/targets.toml` that speaks of several figures counts the worst; one whose
interval is wide and holds the bound is "noisy", and not met.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks import closing, collectives_parts
from benchmarks.collectives_jobs import Options, Row
from benchmarks.collectives_parts import PARTS
from benchmarks.network import why_not

COMMAND = "make bench-collectives"


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
    with closing.terminable():
        if arguments.timeline:
            print(collectives_parts.timeline(options, arguments.timeline.resolve()))
            return 0
        began = time.monotonic()
        rows: list[Row] = []
        for part in PARTS:
            if arguments.only is None or part in arguments.only:
                rows += closing.told(collectives_parts.measured(part, options), began)
    note = (
        f"{time.monotonic() - began:.0f} s, {options.ranks} ranks with one compute thread each, "
        f"{options.rounds} rounds. What the figures are: see the head of "
        "`benchmarks/collectives.py`."
    )
    is_complete = arguments.only is None and options.is_complete and not arguments.dry_run
    closing.conclude("collectives", rows, command=COMMAND, note=note, is_complete=is_complete)
    return 0


if __name__ == "__main__":
    sys.exit(main())
