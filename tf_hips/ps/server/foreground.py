# SPDX-License-Identifier: Apache-2.0
"""A server in the foreground, from its start to the end of its run."""

import contextlib
import os
import sys
from pathlib import Path

from tf_hips import log, streams
from tf_hips.config import write_whole
from tf_hips.errors import PeerError, StateError
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.settings import ServerConfig


def serve(config: ServerConfig, announce: str | Path | None = None) -> None:
    """Runs a server until its run is over (`once`) or the process is told to end.

    Told by `SystemExit`, as by a machine that goes down, a server that keeps its run leaves it to
    the one that starts next: the process ends at once, and nobody hears of an end. Any other error,
    `KeyboardInterrupt` among them, ends the run for all.

    A run that ends below its quorum ends the process, too: somebody has to look.

    Args:
        config: what the server is told.
        announce: file that gets the address, `host:port` and a line feed, as soon as the server
            listens.

    Raises:
        PeerError: with `once`, when the run ended for a reason; or it ended below its quorum.
        StateError: the state that it was restored from is older than the run; it stays as it is.
    """
    streams.fill()
    server = Server(config)
    server.start()
    try:
        if announce is not None:
            write_whole(f"{server.address}\n", announce)
        reason = server.wait()
    except SystemExit:
        if server.can_be_left():
            log.info(
                "The server stops. Run %s goes on when it is started again with the same options",
                config.run,
            )
            _vanish()
        raise
    finally:
        server.stop()
    if reason is not None:
        raise StateError(reason) if server.has_older_state else PeerError(reason)


def _vanish() -> None:
    """Ends the process as a kill would: what a restored run rests on is shown for that."""
    for stream in (sys.stdout, sys.stderr):
        # None where it was closed before the process began, as for a daemon; and a pipe may have
        # lost its reader. An error here would end the run for all.
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(0)
