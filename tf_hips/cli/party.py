# SPDX-License-Identifier: Apache-2.0
"""`tf-hips party`: starts the workers of one site, here or through `horovodrun` on its hosts.

The run's configuration goes to the workers as a file in a private folder (`TF_HIPS_CONFIG`).
Workers on other hosts cannot read that folder; `tf_hips.cli.worker` hands them the same text
through the environment.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_hips import config
from tf_hips.cli import arguments, output, quota, uplinks
from tf_hips.cli.children import Failure, worker_role
from tf_hips.cli.processes import Job

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
# What horovodrun takes as a host; it ends with a traceback where it gets another one.
_HOST = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_LINE = re.compile(r"(\S+)(?:\s+slots=(\S+))?")
_SLOTS = re.compile(r"0*[1-9][0-9]{0,5}")
# Seconds between SIGTERM and SIGKILL. `horovodrun` ends the workers of other hosts on SIGTERM and
# gives them 5 s; killed before, it would leave them behind.
_GRACE_S = 5.0
_HOROVODRUN_GRACE_S = 15.0
_LAST_WORD_S = 1.0  # for which somebody is waited for who reads what ended the job
_DEADLINE_S = config.Uplink.deadline_s


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "party",
        help="start the workers of one site",
        description="Starts the workers of one site. Without --server the site trains alone.",
        usage="tf-hips party [options] -- train.py ...",
    )
    parser.add_argument(
        "--server",
        type=arguments.endpoints,
        metavar="HOST:PORT,...",
        help="the server above this site; all of them, in the order of their shards, where several "
        "share the model",
    )
    parser.add_argument(
        "--server-role",
        choices=config.SERVER_ROLES,
        help="role of that server's certificate: `server` is one of a party (default "
        "global-server)",
    )
    parser.add_argument(
        "--intra",
        choices=config.INTRAS,
        help="what the script gets for `HierarchicalPS(intra=...)` if it does not say: ps where "
        "this site is a worker below the server of its party; it may not say another",
    )
    parser.add_argument(
        "--site",
        type=arguments.site,
        default="local",
        metavar="NAME",
        help="the site's name, as the server lists it (default local)",
    )
    parser.add_argument(
        "--run",
        dest="run_name",
        type=arguments.site,
        metavar="NAME",
        default="local",
        help="the run to join (default local)",
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, metavar="N", help="seed of the run (default 0)"
    )
    parser.add_argument(
        "--deadline",
        type=arguments.seconds,
        metavar="S",
        help="seconds that the site waits for an answer of the server "
        f"(default {_DEADLINE_S:g}); at least as long as the server waits for the others",
    )
    parser.add_argument(
        "--compression",
        type=arguments.codec,
        metavar="TEXT",
        help="how gradients are encoded if the script does not say; it may not say another",
    )
    parser.add_argument(
        "--rule",
        type=arguments.rule,
        metavar="TEXT",
        help="what the server makes of gradients if the script does not say",
    )
    parser.add_argument("--log-dir", metavar="DIR", help="folder for event logs")
    parser.add_argument(
        "--announce",
        metavar="FILE",
        help="write the number of workers to FILE once they are started",
    )
    parser.add_argument(
        "-np",
        "--num-proc",
        type=arguments.count,
        metavar="N",
        help="number of workers (default: all slots of the hosts; 1 without hosts)",
    )
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts of the site, as horovodrun takes them; one slot where none are said",
    )
    parser.add_argument(
        "--hostfile", metavar="FILE", help="the same as a file: one `HOST slots=N` per line"
    )
    parser.add_argument(
        "--interface",
        metavar="NAME,...",
        help="network interfaces that workers on several hosts meet over (default: those that all "
        "of them have)",
    )
    arguments.add_max_restarts(parser, "the workers of the site")
    arguments.add_identity(parser, "the site")
    parser.add_argument("script", help="the training script, or a program")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="its arguments"
    ).required = False
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Starts the workers, waits, and returns the exit code of the job."""
    command = arguments.script_command(options.script, options.arguments)
    uplink = None
    if options.server is not None:
        tls = arguments.identity(options)
        arguments.check_loopback("--server", options.server, tls)
        uplinks.check_site(options.site, tls)
        uplink = config.Uplink(
            options.server,
            options.site,
            tls,
            options.deadline or _DEADLINE_S,
            options.server_role or config.Uplink.server_role,
        )
    elif options.insecure or options.authority or options.certificate or options.key:
        raise arguments.UsageError("--authority, --certificate, --key and --insecure need --server")
    elif options.max_restarts:
        raise arguments.UsageError(
            "--max-restarts is for a site whose run goes on without it and needs --server"
        )
    elif options.deadline is not None:
        raise arguments.UsageError("--deadline is for the server's answers and needs --server")
    elif options.server_role is not None:
        raise arguments.UsageError("--server-role is that of a --server, which it needs")
    hosts = _hosts(options)
    slots = sum(number for _, number in hosts) if hosts else options.num_proc or 1
    number = options.num_proc or slots
    if number > slots:
        raise arguments.UsageError(
            f"-np must be at most the {slots} slots of the hosts. Received: {number}"
        )
    if options.interface is not None and all(_is_here(host) for host, _ in hosts):
        raise arguments.UsageError(
            f"--interface is for workers on other hosts (-H, --hostfile). Received: "
            f"{options.interface!r}"
        )
    if options.intra == "ps" and (number > 1 or options.server_role != "server"):
        raise arguments.UsageError(
            "--intra ps is for one worker below the server of its party: --server-role server, "
            f"and no -np above 1. Received: {number} workers, --server-role "
            f"{options.server_role or config.Uplink.server_role}"
        )
    if options.log_dir is not None:
        arguments.check_log_dir(options.log_dir)
    if options.announce is not None:
        arguments.check_output("--announce", options.announce)
    told = config.Run(
        run=options.run_name,
        seed=options.seed,
        uplink=uplink,
        log_dir=str(Path(options.log_dir).resolve()) if options.log_dir else None,
        compression=options.compression,
        rule=options.rule,
        intra=options.intra,
    )
    with tempfile.TemporaryDirectory(prefix="tf-hips-") as folder, contextlib.ExitStack() as stack:
        is_local = all(_is_here(host) for host, _ in hosts)
        grace_s = _GRACE_S if is_local else _HOROVODRUN_GRACE_S
        job = stack.enter_context(Job(progress_role=worker_role(options.site, 0), grace_s=grace_s))
        if is_local:
            start_local_workers(
                job,
                stack,
                told,
                site=options.site,
                number=number,
                processes=number,
                command=command,
                folder=Path(folder),
                max_restarts=options.max_restarts,
            )
        else:
            _start_remote_workers(job, options, told, hosts, number, command)
        if options.announce:
            many = "workers" if number > 1 else "worker"
            config.write_whole(f"{number} {many}\n", options.announce)
        failure = job.wait()
    return report(failure)


def start_local_workers(
    job: Job,
    stack: contextlib.ExitStack,
    told: config.Run,
    *,
    site: str,
    number: int,
    processes: int,
    command: Sequence[str],
    folder: Path,
    first: int = 0,
    max_restarts: int = 0,
    more: Sequence[Mapping[str, str]] = (),
) -> None:
    """Starts the workers of one site as processes of this machine.

    Args:
        job: the job they belong to.
        stack: keeps the site's rendezvous open for as long as the job lasts, or until the workers
            are started again.
        told: what the workers are told about the run.
        site: name of the site.
        number: workers of the site.
        processes: workers of all sites on this machine, which share its cores.
        command: program and arguments of each worker.
        folder: private folder for the configuration file.
        first: number of the site's first worker among those of all sites on this machine.
        max_restarts: how often all of them are started again when one fails.
        more: further variables of each worker, by rank; none where it is empty.
    """
    from tf_hips.comm import launch

    rendezvous = stack.enter_context(contextlib.ExitStack())

    def start(attempt: int) -> None:
        rendezvous.close()  # that of the workers before, all of which have ended
        path = folder / f"{site}-{attempt}.yaml"
        config.dump(_attempt(told, attempt, max_restarts), path)
        common = {
            **thread_defaults(os.environ, processes),
            config.CONFIG_VARIABLE: str(path),
            config.ROLE_VARIABLE: "worker",
        }
        environments = rendezvous.enter_context(launch.local_rank_environments(number))
        for rank, environment in enumerate(environments):
            own = {config.LOCAL_WORKER_VARIABLE: str(first + rank), **(more[rank] if more else {})}
            role = worker_role(site, rank)
            pid = job.start(role, command, {**os.environ, **common, **environment, **own})
            quota.start(job, role, pid, own)

    job.start_group(site, start, max_restarts)


def start_evaluator(
    job: Job,
    told: config.Run,
    processes: int,
    command: Sequence[str],
    folder: Path,
    max_restarts: int = 0,
) -> None:
    """Starts the process that evaluates checkpoints; it meets nobody and joins no server.

    Args:
        job: the job it belongs to.
        told: what it is told about the run.
        processes: workers of all sites on this machine, which share its cores.
        command: program and arguments.
        folder: private folder for the configuration file.
        max_restarts: how often it is started again when it fails.
    """
    path = folder / "evaluator.yaml"
    config.dump(dataclasses.replace(told, uplink=None, rule=None, intra=None), path)
    environment = {
        **os.environ,
        **thread_defaults(os.environ, processes),
        config.CONFIG_VARIABLE: str(path),
        config.ROLE_VARIABLE: "evaluator",
        "CUDA_VISIBLE_DEVICES": "-1",  # the GPUs are the workers'
    }

    def start(attempt: int) -> None:
        del attempt  # it goes on after its last line
        job.start("evaluator", command, environment, is_follower=True)

    job.start_group("evaluator", start, max_restarts)


def _attempt(told: config.Run, attempt: int, max_restarts: int) -> config.Run:
    return dataclasses.replace(told, attempt=attempt, comes_back=attempt < max_restarts)


def thread_defaults(environment: Mapping[str, str], processes: int) -> dict[str, str]:
    """What a worker gets where the user has not chosen: no buffering, and its share of the cores.

    Two threads between operators are the least with which one may wait for the network while
    another computes.
    """
    share = str(max(1, len(os.sched_getaffinity(0)) // processes))
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": share,
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": str(max(2, int(share))),
        # Its warnings would tell an error that is raised in a round twice more, with all frames.
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    return {name: value for name, value in defaults.items() if name not in environment}


def report(failure: Failure | None, server_options: Sequence[str] = ()) -> int:
    """Says in one last line who failed first; returns the exit code of the job.

    Args:
        failure: who failed first, and why; None: nobody.
        server_options: names of the options given that start a server for one party, too.
    """
    if failure is None:
        return 0
    if failure.role == "launcher":
        # Whoever has sent the signal waits for the end, and may be the only one who is there.
        if output.takes_soon(sys.stderr, _LAST_WORD_S):
            sys.stderr.write(f"tf-hips: {failure.reason}; all processes ended\n")
    else:
        if failure.is_stuck:
            without = f" without {' and '.join(server_options)}" if server_options else ""
            sys.stderr.write(
                "tf-hips: the workers have ended, and the run is not over for the server. A script "
                "that makes no step with HierarchicalPS joins no server; --parties 1"
                f"{without} starts none\n"
            )
        sys.stderr.write(
            f"tf-hips: {failure.role} failed first ({failure.reason}); all processes ended\n"
        )
    return failure.code


def _hosts(options: argparse.Namespace) -> list[tuple[str, int]]:
    if options.hosts and options.hostfile:
        raise arguments.UsageError("-H and --hostfile exclude each other")
    if options.hosts:
        return [_host(part, *part.strip().partition(":")[::2]) for part in options.hosts.split(",")]
    if options.hostfile:
        try:
            lines = Path(options.hostfile).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise arguments.UsageError(
                f"--hostfile {options.hostfile} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise arguments.UsageError(
                f"--hostfile {options.hostfile} must be text in UTF-8. Received: {error}"
            ) from error
        lines = [left for line in lines if (left := line.partition("#")[0].strip())]
        if not lines:
            raise arguments.UsageError(
                f"--hostfile must name a host at least. Received: {options.hostfile!r}, empty"
            )
        return [_host(line, *_words(line)) for line in lines]
    return []


def _words(line: str) -> tuple[str, str]:
    """Name and slots in a line of a hostfile; neither where there is something else in it."""
    found = _LINE.fullmatch(line)
    return ("", "") if found is None else (found[1], found[2] or "")


def _host(text: str, name: str, slots: str) -> tuple[str, int]:
    is_host = name in _LOOPBACK_NAMES or _HOST.fullmatch(name)
    if not is_host or (slots and not _SLOTS.fullmatch(slots)):
        raise arguments.UsageError(
            f"a host must be HOST:SLOTS, or `HOST slots=N` in a file. Received: {text!r}"
        )
    return name, int(slots or 1)


def _is_here(host: str) -> bool:
    return host in (*_LOOPBACK_NAMES, socket.gethostname())


def _warn_of_own_name(name: str) -> None:
    """Says so where workers on this host would offer others an address that leads nowhere."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        why = f"resolves to no address here ({error.strerror or error}), which Gloo would offer"
    else:
        if not address.startswith("127."):
            return
        why = "resolves to a loopback address here, and Gloo would offer that"
    sys.stderr.write(
        f"tf-hips party: warning: {name} {why} to the other hosts; give it its real address in "
        "/etc/hosts\n"
    )


def _start_remote_workers(
    job: Job,
    options: argparse.Namespace,
    told: config.Run,
    hosts: Sequence[tuple[str, int]],
    number: int,
    command: Sequence[str],
) -> None:
    program = shutil.which("horovodrun") or shutil.which(
        "horovodrun", path=str(Path(sys.executable).parent)
    )
    if program is None:
        raise arguments.UsageError(
            "workers on other hosts need the program `horovodrun` on the path"
        )
    here = str(Path.cwd())
    if not re.fullmatch(r"[\w@%+=:,./~#-]+", here):
        raise arguments.UsageError(
            "workers on other hosts are started in this folder by `cd`, which horovodrun does not "
            f"quote: its path must have no spaces and signs of a shell. Received: {here!r}"
        )
    _warn_of_own_name(socket.gethostname())
    # Its own parsers end with a traceback where a host has no slots or a file a comment.
    where = ["-H", ",".join(f"{host}:{slots}" for host, slots in hosts)]
    from tf_hips.cli import worker

    line = [program, "--gloo", "-np", str(number), *where]
    line += ["--network-interfaces", options.interface] if options.interface else []
    line += [sys.executable, "-m", worker.__name__, *command]

    def start(attempt: int) -> None:
        environment = worker.environment(_attempt(told, attempt, options.max_restarts))
        job.start(
            options.site,
            line,
            {**os.environ, **thread_defaults(os.environ, number), **environment},
            # It ends what it started on other hosts when it is told to; killed, it could not.
            death_signal=signal.SIGTERM,
        )

    job.start_group(options.site, start, options.max_restarts)
