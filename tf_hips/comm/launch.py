# SPDX-License-Identifier: Apache-2.0
"""The environment of Horovod ranks that all live on this machine, without horovodrun.

Horovod's own launcher goes through ssh and a shell; for ranks on one machine a rendezvous server
and a few variables are all it takes. The server listens on loopback and the ranks are named by it:
nothing needs to be seen from outside.

Imports no TensorFlow: the launcher and the tests that use it stay light.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_slot_env_vars
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tf_hips.errors import ConfigError

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def local_rank_environments(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Serves the rendezvous of `num_ranks` local ranks while the context is open.

    Args:
        num_ranks: ranks of the job, at least 1.

    Yields:
        For each rank the variables to add to its environment.

    Raises:
        ValueError: `num_ranks` is below 1.
        ConfigError: this host's name has no address (see `_check_host_name`).
    """
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` must be at least 1. Received: num_ranks={num_ranks}")
    if num_ranks > 1:
        _check_host_name()
    slots = get_host_assignments(parse_hosts(f"{LOOPBACK}:{num_ranks}"), num_ranks)
    # Horovod's RendezvousServer would listen on all interfaces; its HTTP server takes an address.
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    server.init(slots)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
    )
    thread.start()
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
    }
    try:
        yield [{**create_slot_env_vars(slot), **shared} for slot in slots]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _check_host_name() -> None:
    # Horovod 0.28.1 gives HOROVOD_GLOO_IFACE to its first Gloo context only; those of process sets,
    # the global one included, take what the host's name resolves to, and die deep inside Gloo where
    # it resolves to nothing.
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise ConfigError(
            f"This host's name, {name}, must have an address for Horovod. Received: {error}. "
            f"Add the line `{LOOPBACK} {name}` to /etc/hosts."
        ) from error
