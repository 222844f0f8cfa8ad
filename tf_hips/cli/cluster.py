# SPDX-License-Identifier: Apache-2.0
"""`tf-hips sync`, `up` and `down`: all servers and parties of a `cluster.yaml`, over ssh."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_hips import tables
from tf_hips.cli import arguments, config_file, party, server
from tf_hips.log import printable

_PATIENCE_S = 60.0
# A launcher gives horovodrun 15 s to end the workers of other hosts.
_GRACE_S = 30.0


def add(commands: Any) -> None:
    """Declares the three sub-commands."""
    sync = _add(
        commands,
        "sync",
        "copy a cluster's files to its machines",
        "Copies to each machine the script's folder, or server.yaml and the specifications that "
        "it names, and the certificate and key of its own site, by tar over ssh.",
    )
    sync.set_defaults(run=_sync)
    up = _add(
        commands,
        "up",
        "start a cluster's servers and parties",
        "Starts servers, then parties, on their machines and leaves them there. One that runs "
        "already is not started again.",
    )
    up.add_argument(
        "--wait",
        type=arguments.seconds,
        default=_PATIENCE_S,
        metavar="S",
        help=f"seconds that each may take to be ready (default {_PATIENCE_S:g})",
    )
    up.set_defaults(run=_up)
    down = _add(
        commands,
        "down",
        "end a cluster's servers and parties",
        "Ends parties, then servers, on their machines.",
    )
    down.add_argument(
        "--grace",
        type=arguments.seconds,
        default=_GRACE_S,
        metavar="S",
        help=f"seconds between SIGTERM and SIGKILL (default {_GRACE_S:g})",
    )
    down.set_defaults(run=_down)


def load(path: str) -> Any:
    """The cluster of a file, its options of servers and parties checked as the commands would.

    Raises:
        ConfigError: the file, or what it says, is wrong.
    """
    from tf_hips.cluster import description

    found = description.load(path)
    parsers = argparse.ArgumentParser().add_subparsers()
    own = [(f"party_servers.{one.site}.options", one.options) for one in found.party_servers]
    for name, module, sections in (
        ("server", server, [("server", found.server), *own]),
        ("party", party, [("party", found.party)]),
    ):
        module.add(parsers)
        parser = parsers.choices[name]
        keys = parser.get_default("file") or config_file.ConfigFile(parser)
        # Specifications that a text names lie beside the script.
        folder = Path(found.script).parent
        for section, values in sections:
            keys.checked(values, f"{path}: {section}", folder, moves_paths=False)
    return found


def add_source(parser: argparse.ArgumentParser) -> None:
    """Adds `--from`."""
    parser.add_argument(
        "--from",
        dest="source",
        default="cluster.yaml",
        metavar="FILE",
        help="the cluster (default cluster.yaml)",
    )


def _add(commands: Any, name: str, short: str, long: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=short, description=long)
    add_source(parser)
    parser.add_argument(
        "--site",
        dest="sites",
        action="append",
        type=arguments.site,
        metavar="NAME",
        help="only the server or party of this site; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and end")
    return parser


def _sync(options: argparse.Namespace) -> int:
    from tf_hips.cluster import fleet

    return _carry_out(options, lambda cluster, roles, tell: fleet.sync(cluster, roles, tell))


def _up(options: argparse.Namespace) -> int:
    from tf_hips.cluster import fleet

    return _carry_out(
        options, lambda cluster, roles, tell: fleet.up(cluster, roles, options.wait, tell)
    )


def _down(options: argparse.Namespace) -> int:
    from tf_hips.cluster import fleet

    return _carry_out(
        options, lambda cluster, roles, tell: fleet.down(cluster, roles, options.grace, tell)
    )


def _carry_out(options: argparse.Namespace, act: Callable[[Any, Any, Any], None]) -> int:
    """Does it for all chosen roles; 1 if one of them is not as it was asked for."""
    from tf_hips.cluster import fleet, layout

    cluster = load(options.source)
    roles = _chosen(cluster, options.sites)
    if options.dry_run:
        for line in fleet.plan(cluster, options.command, roles):
            sys.stdout.write(f"{printable(line)}\n")
        return 0
    heard: list[fleet.Outcome] = []
    try:
        act(cluster, roles, heard.append)
    finally:  # what is known when it is interrupted is known
        _show(heard, [(layout.role_name(role), host) for role, host in fleet.places(roles)])
    return 0 if all(outcome.is_good for outcome in heard) else 1


def _chosen(cluster: Any, sites: list[str] | None) -> list[Any]:
    roles = list(cluster.roles)
    if sites is None:
        return roles
    known = {role.site for role in roles}
    unknown = [site for site in sites if site not in known]
    if unknown:
        raise arguments.UsageError(
            f"--site must be one of {', '.join(sorted(known))}. Received: {unknown[0]!r}"
        )
    return [role for role in roles if role.site in sites]


def _show(heard: list[Any], order: list[tuple[str, str]]) -> None:
    columns = [tables.Column(name) for name in ("role", "host", "state")]
    rows = [
        (outcome.role, outcome.host, printable(outcome.state), printable(outcome.detail))
        for outcome in sorted(heard, key=lambda one: order.index((one.role, one.host)))
    ]
    tables.show([*columns, tables.Column("", folds=True)], rows)
