# SPDX-License-Identifier: Apache-2.0
"""The options of a server that has another server above it: where that is, and as whom to join."""

import argparse
import contextlib

from tf_hips import config
from tf_hips.cli import arguments
from tf_hips.errors import ConfigError

_TOLD = (
    *("site", "uplink_authority", "uplink_certificate", "uplink_key", "uplink_compression"),
    "period",
)


def add(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    group = parser.add_argument_group("the server of a party, below another server", "docs/tree.md")
    group.add_argument(
        "--uplink",
        type=arguments.endpoints,
        metavar="HOST:PORT,...",
        help="the server above this one, which is then the server of the party --site; all of "
        "them, in the order of their shards, where several share a model",
    )
    group.add_argument(
        "--site", type=arguments.site, metavar="NAME", help="the party, as that server lists it"
    )
    group.add_argument(
        "--uplink-role",
        choices=config.SERVER_ROLES,
        help="role of that server's certificate (default global-server)",
    )
    group.add_argument(
        "--uplink-compression",
        type=arguments.codec,
        metavar="TEXT",
        help="how sums are encoded for that server (default: what the children wish for, or else "
        "what they send with)",
    )
    group.add_argument(
        "--period",
        type=arguments.count,
        metavar="N",
        help="with an asynchronous --rule of its own: after how many updates of the model by its "
        "parties what they have moved goes up (default: as many as there are parties)",
    )
    group.add_argument(
        "--uplink-authority",
        metavar="FILE",
        help="PEM of the authority of that server (default: --authority)",
    )
    group.add_argument(
        "--uplink-certificate", metavar="FILE", help="PEM of the certificate `party/SITE`"
    )
    group.add_argument("--uplink-key", metavar="FILE", help="PEM of its private key")


def of(options: argparse.Namespace) -> config.Uplink | None:
    """The way up that the options describe; None where there is no server above.

    Raises:
        UsageError: options are missing, there are some without `--uplink`, or plain text would
            go to another machine.
    """
    if options.uplink is None:
        for name in (*_TOLD, "uplink_role"):
            if getattr(options, name) is not None:
                raise arguments.UsageError(f"--{name.replace('_', '-')} needs --uplink")
        return None
    if options.site is None:
        raise arguments.UsageError("--uplink needs --site, the party that this server is of")
    tls = arguments.identity(
        argparse.Namespace(
            authority=options.uplink_authority or (None if options.insecure else options.authority),
            certificate=options.uplink_certificate,
            key=options.uplink_key,
            insecure=options.insecure,
        ),
        prefix="uplink-",
    )
    arguments.check_loopback("--uplink", options.uplink, tls)
    check_site(options.site, tls, prefix="uplink-")
    return config.Uplink(
        options.uplink, options.site, tls, server_role=options.uplink_role or "global-server"
    )


def check_site(site: str, tls: config.Tls | None, prefix: str = "") -> None:
    """Looks whether a certificate speaks for the site that joins, before anything is started.

    Args:
        site: what `--site` says, or is without it.
        tls: what `arguments.identity` made of the options; None: plain text.
        prefix: of the options' names in messages.

    Raises:
        UsageError: it is another's, whom the server above would not take for `site`.
    """
    if tls is None:
        return
    from tf_hips.ps.security import diagnosis
    from tf_hips.ps.security.tls import CHILD_ROLE, Identity

    wanted = held = Identity(CHILD_ROLE, site)
    # What else is wrong with it depends on the server, and is said where it is shown to that.
    with contextlib.suppress(ConfigError):
        held = diagnosis.own_identity(tls)
    if held != wanted:
        raise arguments.UsageError(
            f"--{prefix}certificate must be for `{wanted}`: the site is what --site says. "
            f"Received: {tls.certificate}, which is for `{held}`"
        )
