# SPDX-License-Identifier: Apache-2.0
"""`tf-hips certs`: an authority, and the certificates of a server and its parties."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_hips.cli import arguments
from tf_hips.config import Tls

_AUTHORITY_KEY = "authority.key"


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "certs",
        help="make an authority and certificates",
        description="Makes certificates for mutual TLS. An authority that DIR holds already "
        "signs the new ones, too.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--server", type=arguments.site, metavar="NAME", help="name of the global server"
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="H",
        help="name or address of the server; may be repeated",
    )
    parser.add_argument(
        "--party",
        type=arguments.site,
        action="append",
        default=[],
        metavar="NAME",
        help="a party; may be repeated",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes the certificates and says where they are."""
    if options.server is None and not options.party:
        raise arguments.UsageError("at least one of --server and --party is needed")
    if options.host and options.server is None:
        raise arguments.UsageError("--host belongs to the server's certificate and needs --server")
    if len(set(options.party)) != len(options.party):
        raise arguments.UsageError(
            f"every --party must be named once. Received: {', '.join(options.party)}"
        )
    made = make(Path(options.out), server=options.server, hosts=options.host, parties=options.party)
    for identity in made:
        sys.stdout.write(f"{identity.certificate}  {identity.key}\n")
    sys.stdout.write(
        f"signed by {made[0].authority}; "
        f"keep {Path(options.out) / _AUTHORITY_KEY} away from servers and parties\n"
    )
    return 0


def make(
    folder: Path, *, server: str | None, hosts: Sequence[str], parties: Sequence[str]
) -> list[Tls]:
    """Makes the certificate of `server`, if any, then of every party; the authority if need be.

    Args:
        folder: where to write; made, for its owner alone, if need be.
        server: name of the global server, or None.
        hosts: names and addresses of the server.
        parties: names of the parties.

    Raises:
        UsageError: a certificate is there already.
        ConfigError: the package `cryptography` is not installed.
    """
    from tf_hips.ps import tls

    wanted = [(tls.SERVER_ROLE, server, tuple(hosts))] if server is not None else []
    wanted += [(tls.CHILD_ROLE, party, ()) for party in parties]
    for role, site, _ in wanted:
        path = folder / f"{role}-{site}.pem"
        if path.exists():
            raise arguments.UsageError(f"{path} is there already; remove it to make a new one")
    if not (folder / _AUTHORITY_KEY).exists():
        tls.make_authority(folder)
    return [tls.make_certificate(role, site, names, folder=folder) for role, site, names in wanted]
