# SPDX-License-Identifier: Apache-2.0
"""The environment of Horovod ranks that all live on this machine, without horovodrun.

Horovod's own launcher goes through ssh and a shell; for ranks on one machine a rendezvous server
and a few variables are all it takes. The server listens on loopback and the ranks are named by it:
nothing needs to be seen from outside. Ranks in network namespaces of their own have addresses.

Imports no TensorFlow: the launcher and the tests that use it stay light.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

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
    with _served([(LOOPBACK, num_ranks)], LOOPBACK, "lo") as environments:
        yield environments


@contextlib.contextmanager
def rank_environments(
    addresses: Sequence[str], rendezvous: str, interface: str
) -> Iterator[list[dict[str, str]]]:
    """Serves the rendezvous of one rank per address while the context is open.

    Each of these addresses must be what the host's name resolves to where the rank runs, see
    `_check_host_name`.

    Args:
        addresses: of the ranks, all different, in rank order.
        rendezvous: address of this process that they can reach.
        interface: name of the interface that has the rank's address, the same for all ranks.

    Yields:
        For each rank the variables to add to its environment.
    """
    hosts = [(address, 1) for address in addresses]
    with _served(hosts, rendezvous, interface) as environments:
        yield environments


@contextlib.contextmanager
def _served(
    hosts: Sequence[tuple[str, int]], rendezvous: str, interface: str
) -> Iterator[list[dict[str, str]]]:
    """Serves the rendezvous of so many ranks on each host, on the address `rendezvous`."""
    listed = parse_hosts(",".join(f"{name}:{count}" for name, count in hosts))
    slots = get_host_assignments(listed, sum(count for _, count in hosts))
    # Horovod's RendezvousServer would listen on all interfaces; its HTTP server takes an address.
    server = RendezvousHTTPServer((rendezvous, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    server.init(slots)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
    )
    thread.start()
    shared = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": interface,
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
