# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run`: a whole run on this machine: global servers and P parties of W workers.

One party has nobody to meet: it gets a server only where one is asked for.

Certificates are made on the spot in a private folder that goes away with the run. The workers of
all parties are direct children of this process, so that whoever fails first can be told from those
who fail because of it.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.cli import arguments, certs, party
from tf_hips.cli.processes import Failure, Job

_SERVER = "server"
_SERVER_START_S = 30.0
# The certificates go away with the run; a connection can be made anew for as long as they hold.
_CERTIFICATE_DAYS = 90


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "run",
        help="train on this machine: one server, several parties",
        description="Starts a global server and the workers of all parties on this machine.",
        usage="tf-hips run [options] train.py ...",
    )
    parser.add_argument(
        "--parties",
        type=arguments.count,
        default=2,
        metavar="N",
        help="number of parties (default 2); one trains alone, without a server",
    )
    parser.add_argument(
        "--workers",
        type=arguments.count,
        default=2,
        metavar="N",
        help="workers per party (default 2)",
    )
    parser.add_argument(
        "--server",
        action="store_true",
        help="start a server for one party, too, as --compression, --rule and --deadline do",
    )
    parser.add_argument(
        "--servers",
        type=arguments.count,
        metavar="N",
        help="start N servers, which share the model (default 1), for one party, too",
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, help="seed of the run (default 0)"
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        metavar="TEXT",
        help="how gradients are encoded if the script does not say; the server takes no other",
    )
    parser.add_argument(
        "--rule",
        type=arguments.rule,
        metavar="TEXT",
        help="what the server makes of gradients, such as momentum(learning_rate=0.1); it takes no "
        "other",
    )
    parser.add_argument(
        "--deadline",
        type=arguments.seconds,
        metavar="S",
        help="seconds that a party waits for the others, in a round and to join (default 600)",
    )
    arguments.add_max_restarts(parser, "the workers of a party, or the server,")
    parser.add_argument("--log-dir", metavar="DIR", help="folder for event logs")
    parser.add_argument("script", help="the training script, or a program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments"
    ).required = False
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Starts everything, waits, and returns the exit code of the job."""
    command = arguments.script_command(options.script, options.arguments)
    with tempfile.TemporaryDirectory(prefix="tf-hips-") as folder, contextlib.ExitStack() as stack:
        job = stack.enter_context(Job(progress_role=party.worker_role("party0", 0)))
        failure = _start(job, stack, options, command, Path(folder)) or job.wait()
    return party.report(failure)


def _start(
    job: Job,
    stack: contextlib.ExitStack,
    options: argparse.Namespace,
    command: list[str],
    folder: Path,
) -> Failure | None:
    sites = [f"party{index}" for index in range(options.parties)]
    run = config.Run(
        run=f"run-{uuid.uuid4().hex[:12]}",
        seed=options.seed,
        log_dir=str(Path(options.log_dir).resolve()) if options.log_dir else None,
        compression=options.compression,
        rule=options.rule,
    )
    # A server that nobody joins would wait for ever, and `CompressedRing` never joins one.
    uplinks: list[config.Uplink] | list[None] = [None]
    if _needs_server(options):
        started = _start_servers(job, options, run, sites, folder)
        if started is None:
            return job.wait()
        uplinks = started
    for site, uplink in zip(sites, uplinks, strict=True):
        party.start_local_workers(
            job,
            stack,
            dataclasses.replace(run, uplink=uplink, saves=site == sites[0]),
            site=site,
            number=options.workers,
            processes=options.parties * options.workers,
            command=command,
            folder=folder,
            max_restarts=options.max_restarts if uplink is not None else 0,
        )
    return None


def _needs_server(options: argparse.Namespace) -> bool:
    is_asked_for = options.server or options.servers or options.compression or options.rule
    return bool(
        options.parties > 1 or is_asked_for or options.max_restarts or options.deadline is not None
    )


def _start_servers(
    job: Job, options: argparse.Namespace, run: config.Run, sites: list[str], folder: Path
) -> list[config.Uplink] | None:
    """How each site reaches the servers once they listen; None when one failed before.

    Raises:
        TimeoutError: one did not listen in time.
    """
    own, *others = certs.make(
        folder / "certificates",
        server=_SERVER,
        parties=sites,
        days=_CERTIFICATE_DAYS,
        authority_days=_CERTIFICATE_DAYS,
    )
    environment = {
        **os.environ,
        **party.thread_defaults(os.environ, options.parties * options.workers),
    }
    server = [sys.executable, "-m", "tf_hips.cli", "server"]
    server += ["--parties", ",".join(sites), "--run", run.run, "--once"]
    server += ["--authority", own.authority, "--certificate", own.certificate, "--key", own.key]
    server += ["--compression", options.compression] if options.compression else []
    server += ["--rule", options.rule] if options.rule else []
    server += ["--log-dir", run.log_dir] if run.log_dir else []
    deadline_s = config.Uplink.deadline_s
    if options.deadline is not None:
        server += [f"--{name}-timeout={options.deadline}" for name in ("round", "join")]
        deadline_s = options.deadline
    number = options.servers or 1
    files = [folder / f"address{index}" for index in range(number)]
    for index, file in enumerate(files):
        command = [*server, "--announce", str(file), "--shard", f"{index}/{number}"]
        command += ["--state", str(folder / f"state{index}")] if options.max_restarts else []
        role = _SERVER if number == 1 else f"{_SERVER}{index}"
        # One that ends with an error has ended the run.
        start = _starting(job, role, command, environment, file)
        job.start_group(role, start, options.max_restarts, only_killed=True)
    addresses = []
    for file in files:
        try:
            address = job.wait_for_file(file, _SERVER_START_S)
        except TimeoutError as error:
            raise TimeoutError(f"a server did not start: {error}") from error
        if address is None:
            return None
        addresses.append(address)
    return [
        config.Uplink(",".join(addresses), site, identity, deadline_s)
        for site, identity in zip(sites, others, strict=True)
    ]


def _starting(
    job: Job, role: str, command: list[str], environment: dict[str, str], address_file: Path
) -> Callable[[int], None]:
    """Starts a server; started again, it listens where the parties look for it."""

    def start(attempt: int) -> None:
        del attempt
        has_listened = address_file.exists()
        bind = address_file.read_text("ascii").strip() if has_listened else "127.0.0.1:0"
        job.start(role, [*command, "--bind", bind], environment, is_service=True)

    return start
