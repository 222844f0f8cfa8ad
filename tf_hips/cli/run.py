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
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.cli import arguments, certs, party, party_servers, uneven, votes
from tf_hips.cli.children import Failure, worker_role
from tf_hips.cli.processes import Job

_SERVER = "server"
# The certificates go away with the run; a connection can be made anew for as long as they hold.
_CERTIFICATE_DAYS = 90
_MAX_WORKERS = 1000  # a slip of the finger must not fill the machine with processes


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
        help=f"workers per party (default 2); of all parties at most {_MAX_WORKERS}",
    )
    parser.add_argument(
        "--server",
        action="store_true",
        help="start a server for one party, too, as --servers, --intra ps, --compression, --rule, "
        "--approach, --deadline and --max-restarts do",
    )
    parser.add_argument(
        "--servers",
        type=arguments.count,
        metavar="N",
        help="start N servers, which share the model (default 1), for one party, too",
    )
    parser.add_argument(
        "--intra",
        choices=config.INTRAS,
        help="how the workers of a party meet: by Horovod, or each as a process of its own at a "
        "server of the party (default: horovod)",
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, metavar="N", help="seed of the run (default 0)"
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
    votes.add(parser)
    parser.add_argument(
        "--deadline",
        type=arguments.seconds,
        metavar="S",
        help="seconds that a party waits for the others, in a round and to join (default 600)",
    )
    arguments.add_max_restarts(parser, "the workers of a party, the server or the evaluator")
    party_servers.add(parser)
    uneven.add(parser)
    parser.add_argument("--log-dir", metavar="DIR", help="folder for event logs")
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start the script once more as the run's evaluator (TF_HIPS_ROLE=evaluator), which is "
        "to end after training has",
    )
    parser.add_argument("script", help="the training script, or a program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments"
    ).required = False
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Starts everything, waits, and returns the exit code of the job."""
    command = arguments.script_command(options.script, options.arguments)
    check_size(options)
    options.rule = votes.rule_of(options)
    if options.log_dir is not None:
        arguments.check_log_dir(options.log_dir)
    party_servers.check(options)  # says at once what is wrong, and so does
    uneven.environments(options, options.parties * options.workers)
    with tempfile.TemporaryDirectory(prefix="tf-hips-") as folder, contextlib.ExitStack() as stack:
        first = party_servers.leaf("party0", 0) if options.intra == "ps" else "party0"
        job = stack.enter_context(Job(progress_role=worker_role(first, 0)))
        failure = _start(job, stack, options, command, Path(folder)) or job.wait()
    return party.report(failure, _server_options(options))


def check_size(options: argparse.Namespace) -> None:
    """Looks whether one machine can have so many workers.

    Raises:
        UsageError: nobody means as many.
    """
    workers = options.parties * options.workers
    if workers > _MAX_WORKERS:
        raise arguments.UsageError(
            f"--parties times --workers must be at most {_MAX_WORKERS}, all on this machine. "
            f"Received: {workers}"
        )


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
        intra=options.intra,
        servers_end=True,
    )
    # A server that nobody joins would wait for ever, and `CompressedRing` never joins one.
    uplinks: list[config.Uplink] | list[None] = [None]
    if options.parties > 1 or _server_options(options):
        started = _start_servers(job, options, run, sites, folder)
        if started is None:
            return job.wait()
        uplinks = started
    if options.intra == "ps":
        sites = [leaf for site in sites for leaf in _leaves(options, site)]
    more = uneven.environments(options, options.parties * options.workers)
    number = 1 if options.intra == "ps" else options.workers
    for place, (site, uplink) in enumerate(zip(sites, uplinks, strict=True)):
        party.start_local_workers(
            job,
            stack,
            dataclasses.replace(run, uplink=uplink, saves=site == sites[0]),
            site=site,
            number=number,
            processes=options.parties * options.workers,
            command=command,
            folder=folder,
            first=place * number,
            max_restarts=options.max_restarts if uplink is not None else 0,
            more=more[place * number : (place + 1) * number],
        )
    if options.evaluator:
        number = options.parties * options.workers
        party.start_evaluator(job, run, number, command, folder, options.max_restarts)
    return None


def _server_options(options: argparse.Namespace) -> list[str]:
    """The options given that start a server for one party, too; those that the help names."""
    given = {
        "--server": options.server,
        "--servers": options.servers,
        "--intra ps": options.intra == "ps",
        "--compression": options.compression,
        # `--approach` has become one.
        "--rule" if options.approach is None else "--approach": options.rule,
        "--deadline": options.deadline,
        "--max-restarts": options.max_restarts,
    }
    return [name for name, value in given.items() if value]


def _start_servers(
    job: Job, options: argparse.Namespace, run: config.Run, sites: list[str], folder: Path
) -> list[config.Uplink] | None:
    """How each site, or each leaf, reaches its servers once they listen; None when one failed.

    Raises:
        TimeoutError: one did not listen in time.
    """
    from tf_hips.ps.security import tls

    is_ps = options.intra == "ps"
    leaves = [leaf for site in sites for leaf in _leaves(options, site)] if is_ps else []
    servers_of = sites if is_ps else []
    made = certs.make(
        folder / "certificates",
        server=_SERVER,
        parties=[*sites, *leaves],
        party_servers=servers_of,
        days=_CERTIFICATE_DAYS,
        authority_days=_CERTIFICATE_DAYS,
    )
    names = [(tls.SERVER_ROLE, _SERVER), *((tls.CHILD_ROLE, one) for one in (*sites, *leaves))]
    names += [(tls.PARTY_SERVER_ROLE, site) for site in servers_of]
    identities = dict(zip(names, made, strict=True))
    environment = {
        **os.environ,
        **party.thread_defaults(os.environ, options.parties * options.workers),
    }
    server = [sys.executable, "-m", "tf_hips.cli", "server"]
    server += ["--parties", ",".join(sites), *party_servers.options_of(options, run)]
    server += party_servers.identity_of(identities[tls.SERVER_ROLE, _SERVER])
    server += ["--compression", options.compression] if options.compression else []
    server += ["--rule", options.rule] if options.rule else []
    number = options.servers or 1
    files = [folder / f"address{index}" for index in range(number)]
    lead: str | None = None
    for index, file in enumerate(files):
        command = [*server, "--announce", str(file), "--shard", f"{index}/{number}"]
        command += ["--state", str(folder / f"state{index}")] if options.max_restarts else []
        command += ["--lead", lead] if lead is not None else []
        role = _SERVER if number == 1 else f"{_SERVER}{index}"
        # One that ends with an error has ended the run.
        start = party_servers.starting(job, role, command, environment, file)
        job.start_group(role, start, options.max_restarts, only_killed=True)
        if index == 0 and number > 1:  # the others are told where it is
            found = party_servers.wait_for(job, files[:1])
            if found is None:
                return None
            [lead] = found
    addresses = party_servers.wait_for(job, files)
    if addresses is None:
        return None
    deadline_s = config.Uplink.deadline_s if options.deadline is None else options.deadline
    uplinks = [
        config.Uplink(",".join(addresses), site, identities[tls.CHILD_ROLE, site], deadline_s)
        for site in sites
    ]
    if options.intra != "ps":
        return uplinks
    below = [
        party_servers.PartyServer(
            uplink,
            identities[tls.PARTY_SERVER_ROLE, uplink.site],
            {one: identities[tls.CHILD_ROLE, one] for one in _leaves(options, uplink.site)},
        )
        for uplink in uplinks
    ]
    return party_servers.start(job, options, run, below, environment, folder)


def _leaves(options: argparse.Namespace, site: str) -> list[str]:
    return [party_servers.leaf(site, worker) for worker in range(options.workers)]
