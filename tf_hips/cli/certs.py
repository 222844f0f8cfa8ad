# SPDX-License-Identifier: Apache-2.0
"""`tf-hips certs`: an authority; certificates of servers and parties made, shown and revoked."""

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tf_hips import tables
from tf_hips.cli import arguments
from tf_hips.config import SERVER_ROLES, Tls
from tf_hips.log import printable

# Of `ps.security.authority`, which is not imported to say what a command is for.
_DAYS = 30
_AUTHORITY_DAYS = 3650
_DESCRIPTION = """\
Makes certificates for mutual TLS. DIR is the folder of an authority; its authority.key never
leaves it. Servers and parties get authority.pem, and each its own certificate and key."""


def add(commands: Any) -> None:
    """Declares the sub-command and its own."""
    parser = commands.add_parser(
        "certs", help="make, show and revoke certificates", description=_DESCRIPTION
    )
    own = parser.add_subparsers(metavar="COMMAND", required=True)

    init = own.add_parser("init", help="make an authority", description="Makes an authority.")
    init.add_argument("folder", metavar="DIR", help="folder to write to")
    init.add_argument(
        "--days",
        type=days,
        default=_AUTHORITY_DAYS,
        metavar="N",
        help=f"days that it is valid (default {_AUTHORITY_DAYS})",
    )
    init.set_defaults(run=_init)

    issue = own.add_parser(
        "issue",
        help="make certificates",
        description="Makes certificates, each with a key of its own. Without --renew a file that "
        "is there already is an error.",
    )
    issue.add_argument("folder", metavar="DIR", help="folder of the authority")
    issue.add_argument(
        "--server", type=arguments.site, metavar="NAME", help="name of the global server"
    )
    issue.add_argument(
        "--party-server",
        type=arguments.site,
        action="append",
        default=[],
        metavar="NAME",
        help="a party with a server of its own, for that server's children; may be repeated",
    )
    issue.add_argument(
        "--party",
        type=arguments.site,
        action="append",
        default=[],
        metavar="NAME",
        help="a party; may be repeated",
    )
    issue.add_argument(
        "--operator",
        type=arguments.site,
        action="append",
        default=[],
        metavar="NAME",
        help="somebody who may ask for the status of runs; may be repeated",
    )
    issue.add_argument(
        "--days",
        type=days,
        default=_DAYS,
        metavar="N",
        help=f"days that they are valid (default {_DAYS})",
    )
    issue.add_argument(
        "--renew",
        action="store_true",
        help="replace certificates and keys that are there; who uses the files goes on with them",
    )
    issue.set_defaults(run=_issue)

    show = own.add_parser(
        "show",
        help="say what certificates are for, and how long",
        description="Says what certificates are for, how long they are valid, and whether they are "
        "revoked. Exits with 1 if one of them cannot be used now.",
    )
    show.add_argument("paths", nargs="+", metavar="PATH", help="a folder or a certificate")
    show.set_defaults(run=_show)

    revoke = own.add_parser(
        "revoke",
        help="make servers refuse certificates",
        description="Writes certificates to DIR/revoked.txt. A server that is given the file "
        "(--revoked) refuses the next call of their holders; it looks at the file for every call.",
    )
    revoke.add_argument("folder", metavar="DIR", help="folder of the authority")
    revoke.add_argument(
        "which",
        nargs="+",
        metavar="WHICH",
        help="ROLE/SITE (all that it holds), the file or the fingerprint of a certificate",
    )
    revoke.add_argument("--reason", default="", metavar="TEXT", help="why, in one line")
    revoke.set_defaults(run=_revoke)


def _init(options: argparse.Namespace) -> int:
    from tf_hips.ps.security import authority

    made = authority.make_authority(Path(options.folder), days=options.days)
    sys.stdout.write(
        f"{made}\nkeep {made.parent / authority.KEY_FILE} away from servers and parties\n"
    )
    return 0


def _issue(options: argparse.Namespace) -> int:
    from tf_hips.ps.security import authority

    several = ("party", "party-server", "operator")
    names = {name: getattr(options, name.replace("-", "_")) for name in several}
    if options.server is None and not any(names.values()):
        raise arguments.UsageError(
            "at least one of --server, --party-server, --party and --operator is needed"
        )
    for name, given in names.items():
        if len(set(given)) != len(given):
            raise arguments.UsageError(
                f"every --{name} must be named once. Received: {', '.join(given)}"
            )
    folder = Path(options.folder)
    if not (folder / authority.KEY_FILE).exists():
        raise arguments.UsageError(
            f"{folder} must hold an authority: `tf-hips certs init {folder}` makes one"
        )
    made = make(
        folder,
        server=options.server,
        parties=options.party,
        operators=options.operator,
        party_servers=options.party_server,
        days=options.days,
        renew=options.renew,
    )
    for identity in made:
        sys.stdout.write(f"{identity.certificate}  {identity.key}\n")
    sys.stdout.write(f"signed by {made[0].authority}; valid for {options.days} days\n")
    return 0


def _show(options: argparse.Namespace) -> int:
    columns = [tables.Column(name) for name in ("certificate", "of", "until", "fingerprint")]
    columns.append(tables.Column("state", folds=True))
    rows = []
    now = datetime.datetime.now(datetime.UTC)
    is_good = True
    for path, one, why in _shown([Path(path) for path in options.paths]):
        left = one.ends - now
        wrong = why
        if not wrong and left.total_seconds() < 0:
            wrong = "expired"
        elif not wrong and one.begins > now:
            wrong = "not valid yet"
        is_good &= not wrong
        state = printable(wrong) or f"{left.days} days left"
        name = "the authority" if one.is_authority else printable(one.name)
        rows.append(
            (printable(path.name), name, f"{one.ends:%Y-%m-%d}", one.fingerprint[:12], state)
        )
    tables.show(columns, rows)
    return 0 if is_good else 1


def _shown(paths: Sequence[Path]) -> list[tuple[Path, Any, str]]:
    """File, certificate, and why it is revoked, of all certificates in files and folders."""
    from tf_hips.ps.security import authority

    found = []
    for path in paths:
        files = sorted(path.glob("*.pem")) if path.is_dir() else [path]
        if not files:
            raise arguments.UsageError(f"{path} must hold certificates (*.pem)")
        for file in files:
            revoked = authority.revoked(file.parent)
            for one in authority.show(file):
                line = revoked.get(one.fingerprint)
                why = "" if line is None else f"revoked {line.day} {line.reason}".rstrip()
                found.append((file, one, why))
    return found


def _revoke(options: argparse.Namespace) -> int:
    from tf_hips.ps.security import authority

    folder = Path(options.folder)
    lines = authority.revoke(folder, options.which, options.reason)
    if any(line.name.partition("/")[0] in SERVER_ROLES for line in lines):
        sys.stderr.write(
            "tf-hips certs: warning: parties read no such list, so a server's certificate counts "
            "for them until it ends\n"
        )
    for line in lines:
        sys.stdout.write(f"revoked {line.name}  {line.fingerprint[:12]}\n")
    sys.stdout.write(f"give {folder / authority.REVOKED_FILE} to every server (--revoked)\n")
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
    operators: Sequence[str] = (),
    party_servers: Sequence[str] = (),
    authority_days: int = _AUTHORITY_DAYS,
    renew: bool = False,
) -> list[Tls]:
    """Makes the certificate of `server`, if any, then of every party; the authority if need be.

    Args:
        folder: where to write; made, for its owner alone, if need be.
        server: name of the global server, or None.
        parties: names of the parties.
        days: how long the certificates are valid.
        operators: names of operators, whose certificates come after those of parties.
        party_servers: names of parties whose own servers get certificates, which come last.
        authority_days: how long an authority is valid that has to be made.
        renew: certificates that are there are replaced.

    Raises:
        UsageError: a certificate is there already.
        ConfigError: the package `cryptography` is not installed.
    """
    from tf_hips.ps.security import authority, tls

    wanted = [(tls.SERVER_ROLE, server)] if server is not None else []
    wanted += [(tls.CHILD_ROLE, party) for party in parties]
    wanted += [(tls.OPERATOR_ROLE, operator) for operator in operators]
    wanted += [(tls.PARTY_SERVER_ROLE, party) for party in party_servers]
    for role, site in wanted:
        path = folder / f"{role}-{site}.pem"
        if path.exists() and not renew:
            raise arguments.UsageError(f"{path} is there already; --renew replaces it")
    if not (folder / authority.KEY_FILE).exists():
        authority.make_authority(folder, days=authority_days)
    return [
        authority.make_certificate(role, site, folder=folder, days=days) for role, site in wanted
    ]
