# SPDX-License-Identifier: Apache-2.0
"""`tf-hips state-server`: ESync's state server, which speaks the HTTP of the original."""

import argparse
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from tf_hips import config
from tf_hips.cli import arguments, signals

_TURN_S = 0.2  # of waiting


def add(commands: Any) -> None:
    """Declares the sub-command."""
    parser = commands.add_parser(
        "state-server",
        help="serve the paper's rule of ESync over the original's HTTP",
        description="Answers /init/, /apply/ and /reset/ as ESync's state server does, for "
        'tf_hips.ESync(rule="compat") and for workers of the original. The default rule needs '
        "none: it is part of `tf-hips server`.",
    )
    parser.add_argument(
        "--bind",
        type=arguments.endpoint,
        default="127.0.0.1:10010",
        metavar="HOST:PORT",
        help="where to listen (default 127.0.0.1:10010, the original's port)",
    )
    parser.add_argument("--announce", metavar="FILE", help="write HOST:PORT to FILE when listening")
    arguments.add_identity(parser, "the server")
    parser.add_argument(
        "--revoked", metavar="FILE", help="certificates to refuse, as `tf-hips certs revoke` writes"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to end; SIGTERM, or a terminal that is closed, ends in peace."""
    identity = arguments.identity(options)
    arguments.check_loopback("--bind", options.bind, identity)
    if options.insecure and options.revoked is not None:
        raise arguments.UsageError(
            f"--revoked lists certificates, and --insecure has none. Received: {options.revoked}"
        )
    if options.announce is not None:
        arguments.check_output("--announce", options.announce)
    import threading

    from tf_hips.ps.server.state_server import StateServer, StateServerConfig

    server = StateServer(StateServerConfig(options.bind, identity, options.revoked))
    server.start()
    try:
        signals.handle((signal.SIGTERM, signal.SIGHUP), _end)
        if options.announce:
            config.write_whole(f"{server.address}\n", options.announce)
        sys.stderr.write(f"tf-hips state-server: listens at {server.address}\n")
        # In turns: Python does not hear a signal that comes when a wait is about to begin.
        while not threading.Event().wait(_TURN_S):
            pass
    finally:
        server.stop()
    return 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)
