# SPDX-License-Identifier: Apache-2.0
"""`tf-hips profile`: what codecs and collectives cost on these machines, as YAML and as a table.

Under horovodrun each process is one of the ranks that measure; without it, `-np N` starts ranks on
this machine, also in a batch script of Slurm. The ranks are `python -m tf_hips.comm.profiling`.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_hips import config, tables
from tf_hips.cli import arguments, party
from tf_hips.cli.processes import Job
from tf_hips.comm import launchers

if TYPE_CHECKING:
    from tf_hips.comm.profile import Profile

_MODULE = "tf_hips.comm.profiling"
_DEFAULT_SECONDS = 10.0
_DEFAULT_FILE = "profile.yaml"
_SHOWN_BYTES = 1 << 20


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "profile",
        help="measure codecs and collectives, for `tf-hips plan`",
        description="Measures codecs and collectives: as one rank under horovodrun, else with "
        "ranks on this machine.",
    )
    parser.add_argument(
        "-np",
        "--num-proc",
        type=arguments.count,
        metavar="N",
        help="ranks to start on this machine (default 2); not under horovodrun",
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        action="append",
        metavar="TEXT",
        help="a compressor to measure; may be given several times (default error_feedback(onebit))",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.seconds,
        default=_DEFAULT_SECONDS,
        metavar="S",
        help=f"about how long to measure (default {_DEFAULT_SECONDS:g}), on a slow link more",
    )
    parser.add_argument(
        "-o",
        "--output",
        default=_DEFAULT_FILE,
        metavar="FILE",
        help=f"where to write it (default {_DEFAULT_FILE})",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, writes and prints."""
    from tf_hips.comm.planner import DEFAULT_CANDIDATES
    from tf_hips.comm.profile import Profile

    output = Path(options.output).resolve()
    arguments.check_output("--output", options.output)
    command = [sys.executable, "-m", _MODULE, "--output", str(output)]
    command += ["--seconds", str(options.seconds)]
    for text in dict.fromkeys(options.compression or DEFAULT_CANDIDATES):
        command += ["--compression", text]
    rank = launched_rank(os.environ)
    if rank is not None:
        if options.num_proc is not None:
            raise arguments.UsageError(
                f"-np is for ranks on this machine, without a launcher. Received: "
                f"{options.num_proc}, as rank {rank} of a launcher's"
            )
        code = subprocess.run(command, check=False).returncode
        code = 128 - code if code < 0 else code
    else:
        if options.num_proc is None:
            launchers.check_alone(os.environ)
        number = options.num_proc or 2
        sys.stderr.write(
            f"tf-hips profile: {number} rank{'s' if number > 1 else ''} start here, which takes a "
            f"while, and measure for about {options.seconds:g} s\n"
        )
        code = _run_here(command, number)
    if code == 0 and not rank:
        show(Profile.read(output))
        sys.stdout.write(f"wrote {options.output}\n")
    return code


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """Which rank Horovod's launcher says that this process is; None where it says nothing."""
    size, rank = (environment.get(name, "") for name in launchers.HOROVOD)
    return int(rank) if size and rank.isdecimal() else None


def _run_here(command: list[str], number: int) -> int:
    with tempfile.TemporaryDirectory(prefix="tf-hips-") as folder, contextlib.ExitStack() as stack:
        job = stack.enter_context(Job())
        party.start_local_workers(
            job,
            stack,
            config.Run(),
            site="profile",
            number=number,
            processes=number,
            command=command,
            folder=Path(folder),
        )
        failure = job.wait()
    return party.report(failure)


def show(profile: "Profile") -> None:
    """Prints a profile: what a million elements, or a mebibyte, cost."""
    console = tables.console()
    console.print(
        f"{profile.num_ranks} ranks, at most {profile.ranks_per_host} on a host of "
        f"{profile.cores} cores"
    )
    million = 1 << 20
    codecs = [
        (
            codec.compression,
            f"{codec.encode(million) * 1e3:.2f} ms",
            f"{codec.decode(million) * 1e3:.2f} ms",
            f"{codec.recode(million, profile.num_ranks) * 1e3:.2f} ms",
            f"{codec.packet(million) / 1024:.0f} KiB",
        )
        for codec in profile.codecs
    ]
    links = []
    for name in ("allreduce", "alltoall", "allgather", "broadcast"):
        cost = getattr(profile, name)
        seconds = cost.delay + cost(0), cost.delay + cost(_SHOWN_BYTES)
        links.append((name, *(f"{one * 1e3:.2f} ms" for one in seconds)))
    console.print(f"\nfor {million} elements")
    columns = tables.numbers("encode", "decode", "merge", "bytes")
    tables.show((tables.Column("compression", folds=True), *columns), codecs)
    console.print("\nfor bytes of one rank")
    tables.show((tables.Column("collective"), *tables.numbers("latency", "1 MiB")), links)
