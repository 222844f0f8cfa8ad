# SPDX-License-Identifier: Apache-2.0
"""The servers of parties of `tf-hips run --intra ps`: one for each, below the global servers."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tf_hips import config
from tf_hips.cli import arguments
from tf_hips.cli.processes import Job

START_S = 30.0


@dataclasses.dataclass(frozen=True)
class PartyServer:
    """The server of one party.

    Attributes:
        uplink: how it reaches the global servers, as a party of theirs.
        tls: its identity towards its children.
        leaves: its children, each with its identity.
    """

    uplink: config.Uplink
    tls: config.Tls
    leaves: Mapping[str, config.Tls]


def add(parser: argparse.ArgumentParser) -> None:
    """Adds what only servers of parties are told."""
    parser.add_argument(
        "--robust-local",
        type=arguments.rule,
        metavar="TEXT",
        help="with --intra ps, by which robust rule the server of a party makes one gradient of "
        "its workers', such as krum(f=1), or by votes and one, detox(r=3) >> median; --rule must "
        "take means then, as mean or trimmed_mean do",
    )


def check(options: argparse.Namespace) -> None:
    """Looks at what `add` has added, and at the rule of the global server.

    Raises:
        UsageError: there are no such servers, or they cannot do it, or the rule of the global
            server cannot work with so many parties.
    """
    text = options.robust_local
    if options.rule is not None:
        _check_sketches(options)
        _check_rule(options)
    if text is None:
        return
    from tf_hips.ps import rules

    if options.intra != "ps":
        raise arguments.UsageError(f"`--robust-local` needs `--intra ps`. Received: {text}")
    rule, above = rules.parse(text), rules.parse(options.rule or "sum")
    if not rule.is_robust or rule.gives_steps:
        raise arguments.UsageError(
            "`--robust-local` must be a robust rule alone, such as krum(f=1): what is made of "
            f"gradients, `--rule` says. Received: {text}"
        )
    if not above.is_mean:
        raise arguments.UsageError(
            "With `--robust-local` the `--rule` must take means, as mean or trimmed_mean do. "
            f"Received: {above}"
        )
    # What workers send is encoded as the script says (`local_compression`): the server knows it
    # when they join. `--compression` is of what goes up.
    why_not = rules.why_not(text, options.workers, None)
    if why_not is not None:
        raise arguments.UsageError(f"`--robust-local`: {why_not}")


def _check_sketches(options: argparse.Namespace) -> None:
    """Looks whether the parties have servers that can make sketches, where `--rule` asks for them.

    Raises:
        UsageError: they have none, or those have a rule of their own, or workers are too few.
    """
    from tf_hips.ps import rules
    from tf_hips.ps.rules import leaves

    rule = rules.parse(options.rule)
    if rule.sketch is None:
        return
    if options.intra != "ps" or options.robust_local is not None:
        raise arguments.UsageError(
            "A `--rule` on sketches needs parties with servers, which have no rule of their own: "
            f"`--intra ps`, and no `--robust-local`. Received: {rule}"
        )
    why_not = leaves.why_too_few(options.rule, options.parties * options.workers)
    if why_not is not None:
        raise arguments.UsageError(f"`--rule`: {why_not}")


def _check_rule(options: argparse.Namespace) -> None:
    """Looks whether the rule of the global server can work with so many parties.

    Raises:
        UsageError: it cannot.
    """
    from tf_hips.ps import rules
    from tf_hips.ps.terms.assignment import Shard

    shard = Shard.from_numbers((0, options.servers or 1))
    why_not = rules.why_not(
        options.rule, options.parties, options.compression, shard=shard, is_led=True
    )
    if why_not is not None:
        raise arguments.UsageError(f"`--rule`: {why_not}")


def leaf(site: str, worker: int) -> str:
    """The name of a worker that is a site of its own."""
    return f"{site}-{worker}"


def options_of(options: argparse.Namespace, run: config.Run) -> list[str]:
    """What every server of a run is told."""
    told = ["--run", run.run, "--once"]
    told += ["--log-dir", run.log_dir] if run.log_dir else []
    if options.deadline is not None:
        told += [f"--{name}-timeout={options.deadline}" for name in ("round", "join")]
    return told


def identity_of(identity: config.Tls, prefix: str = "") -> list[str]:
    """The options that say who a server is."""
    names = ("authority", "certificate", "key")
    return [part for name in names for part in (f"--{prefix}{name}", getattr(identity, name))]


def start(
    job: Job,
    options: argparse.Namespace,
    run: config.Run,
    servers: Sequence[PartyServer],
    environment: Mapping[str, str],
    folder: Path,
) -> list[config.Uplink] | None:
    """How each leaf reaches its server once that listens, in order; None when one failed before.

    Raises:
        TimeoutError: one did not listen in time.
    """
    files = []
    for server in servers:
        site = server.uplink.site
        files.append(folder / f"address-{site}")
        command = [sys.executable, "-m", "tf_hips.cli", "server", *options_of(options, run)]
        command += ["--parties", ",".join(server.leaves), *identity_of(server.tls)]
        command += ["--uplink", server.uplink.server, "--site", site]
        command += ["--rule", options.robust_local] if options.robust_local else []
        if server.uplink.tls is not None:
            command += identity_of(server.uplink.tls, "uplink-")
        command += ["--announce", str(files[-1])]
        command += ["--state", str(folder / f"state-{site}")] if options.max_restarts else []
        role = f"{site}/server"
        begin = starting(job, role, command, environment, files[-1])
        job.start_group(role, begin, options.max_restarts, only_killed=True)
    addresses = wait_for(job, files)
    if addresses is None:
        return None
    return [
        config.Uplink(address, name, identity, server.uplink.deadline_s, "server")
        for address, server in zip(addresses, servers, strict=True)
        for name, identity in server.leaves.items()
    ]


def starting(
    job: Job, role: str, command: list[str], environment: Mapping[str, str], address_file: Path
) -> Callable[[int], None]:
    """Starts a server; started again, it listens where its children look for it."""

    def begin(attempt: int) -> None:
        del attempt
        found = address_file.read_text("ascii").strip() if address_file.exists() else ""
        bind = found or "127.0.0.1:0"  # it may have been killed before it listened
        whole = {**os.environ, **environment}
        job.start(role, [*command, "--bind", bind], whole, is_service=True)

    return begin


def wait_for(job: Job, files: Sequence[Path]) -> list[str] | None:
    """The addresses in `files`, once all are there; None when a process failed before.

    Raises:
        TimeoutError: a server did not listen in time.
    """
    addresses = []
    for file in files:
        try:
            address = job.wait_for_file(file, START_S)
        except TimeoutError as error:
            raise TimeoutError(f"a server did not start: {error}") from error
        if address is None:
            return None
        addresses.append(address)
    return addresses
