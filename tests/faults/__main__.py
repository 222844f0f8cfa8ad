# SPDX-License-Identifier: Apache-2.0
"""`make test-faults` and `make soak`: kills every role in every phase, then at random.

    cases       each role killed in each phase, restarted after 0 and 5 s: the global server, one
                shard of several, the server of a party, children of each
    links       a link cut at 90 % of a transfer, of a child or of a party's server; what travels
                again
    refusals    a full disk, a torn tail, a damaged snapshot, another version, another model
    schedules   faults drawn from a seed: kills at places and at moments, cuts, kills of a server
                that is just restoring; of one server, of two, of a tree, of a tree below two
    keras       Keras trainings of a tree, of which all roles are killed (soak)

Servers and children are processes; a kill is SIGKILL, by number. Each job must end by
itself, with weights bit-identical to those of a run in which nothing happens (`training`), and with
journals that hold each update once. What fails prints the command that repeats it.
"""

import argparse
import concurrent.futures
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults import links, refusals
from tests.faults.keras_runs import KerasRun
from tests.faults.schedule import Schedule, cases

PARTS = ("cases", "links", "refusals", "schedules")
SOAK = ("keras", "schedules")
KERAS_RUNS = 10
_ALONE = frozenset(one.name for one in links.CUTS)
Named = tuple[str, str, Callable[[Path], str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make test-faults ARGS=",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=sorted({*PARTS, *SOAK}), nargs="+", default=PARTS)
    parser.add_argument("--case", metavar="TEXT", help="only what has TEXT in its name")
    parser.add_argument(
        "--seed", type=int, default=int(os.environ.get("SEED") or 0), help="of the first schedule"
    )
    parser.add_argument(
        "--count",
        type=int,
        default=int(os.environ.get("COUNT") or 200),
        help="schedules, of this seed and those after it",
    )
    parser.add_argument("--jobs", type=int, default=3, help="at the same time")
    options = parser.parse_args()
    chosen = [
        one
        for one in everything(options.only, options.seed, options.count)
        if not options.case or options.case in one[0]
    ]
    return run(chosen, options.jobs)


def everything(parts: Sequence[str], seed: int, count: int) -> list[Named]:
    """Name, what repeats it, and what runs it, of all jobs."""
    found: list[Named] = []
    if "cases" in parts:
        found += [(one.name, f"--case {one.name}", one.run) for one in cases()]
    if "links" in parts:
        found += [(one.name, f"--case {one.name}", one.run) for one in links.CUTS]
    if "refusals" in parts:
        found += [(name, f"--case {name}", one) for name, one in refusals.REFUSALS.items()]
    if "schedules" in parts:
        for number in range(seed, seed + count):
            one = Schedule.of(number)
            found.append((one.name, f"--only schedules --seed {number} --count 1", one.run))
    if "keras" in parts:
        for number in range(seed, seed + min(count, KERAS_RUNS)):
            keras = KerasRun.of(number)
            found.append((keras.name, f"--only keras --seed {number} --count 1", keras.run))
    return found


def run(chosen: Sequence[Named], num_jobs: int) -> int:
    """Runs all, tells of each; the exit code."""
    began = time.monotonic()
    failed = 0
    # Bytes that are on their way when a link is cut are more on a busy machine.
    alone = [one for one in chosen if one[0] in _ALONE]
    others = [one for one in chosen if one[0] not in _ALONE]
    for jobs, at_once in ((alone, 1), (others, num_jobs)):
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for (name, repeat, _), (seconds, text, error) in zip(
                jobs, pool.map(_one, jobs), strict=True
            ):
                failed += error is not None
                print(f"{'FAILED' if error else 'ok':6} {seconds:5.1f} s  {name}: {error or text}")
                if error:
                    print(f"       again: make test-faults ARGS='{repeat}'")
                sys.stdout.flush()
    took = time.monotonic() - began
    print(f"test-faults: {len(chosen) - failed} of {len(chosen)} passed in {took:.0f} s")
    return 1 if failed else 0


def _one(named: Named) -> tuple[float, str, str | None]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hips-faults") as base:
        try:
            text, error = named[2](Path(base)), None
        except Exception as caught:  # noqa: BLE001 - told, and counted
            text, error = "", f"{type(caught).__name__}: {caught}"
    return time.monotonic() - began, text, error


if __name__ == "__main__":
    sys.exit(main())
