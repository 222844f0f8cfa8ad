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
_DAYS = 365
_AUTHORITY_DAYS = 3650


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
        "--party",
        type=arguments.site,
        action="append",
        default=[],
        metavar="NAME",
        help="a party; may be repeated",
    )
    parser.add_argument(
        "--days",
        type=days,
        default=_DAYS,
        metavar="N",
        help=f"days that the certificates are valid (default {_DAYS}); "
        f"a new authority is valid for {_AUTHORITY_DAYS}",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes the certificates and says where they are."""
    if options.server is None and not options.party:
        raise arguments.UsageError("at least one of --server and --party is needed")
    if len(set(options.party)) != len(options.party):
        raise arguments.UsageError(
            f"every --party must be named once. Received: {', '.join(options.party)}"
        )
    made = make(Path(options.out), server=options.server, parties=options.party, days=options.days)
    for identity in made:
        sys.stdout.write(f"{identity.certificate}  {identity.key}\n")
    sys.stdout.write(
        f"signed by {made[0].authority}; "
        f"keep {Path(options.out) / _AUTHORITY_KEY} away from servers and parties\n"
    )
    return 0


def days(text: str) -> int:
    """A number of days that a certificate can be valid."""
    value = arguments.count(text)
    if value > _AUTHORITY_DAYS:
        raise argparse.ArgumentTypeError(
            f"must be at most {_AUTHORITY_DAYS}, the days of an authority. Received: {text!r}"
        )
    return value


def make(
    folder: Path,
    *,
    server: str | None,
    parties: Sequence[str],
    days: int,
    authority_days: int = _AUTHORITY_DAYS,
) -> list[Tls]:
    """Makes the certificate of `server`, if any, then of every party; the authority if need be.

    Args:
        folder: where to write; made, for its owner alone, if need be.
        server: name of the global server, or None.
        parties: names of the parties.
        days: how long the certificates are valid.
        authority_days: how long an authority is valid that has to be made.

    Raises:
        UsageError: a certificate is there already.
        ConfigError: the package `cryptography` is not installed.
    """
    from tf_hips.ps import tls

    wanted = [(tls.SERVER_ROLE, server)] if server is not None else []
    wanted += [(tls.CHILD_ROLE, party) for party in parties]
    for role, site in wanted:
        path = folder / f"{role}-{site}.pem"
        if path.exists():
            raise arguments.UsageError(f"{path} is there already; remove it to make a new one")
    if not (folder / _AUTHORITY_KEY).exists():
        tls.make_authority(folder, days=authority_days)
    return [tls.make_certificate(role, site, folder=folder, days=days) for role, site in wanted]
