# SPDX-License-Identifier: Apache-2.0
"""The sockets under gRPC: addresses, and how many bytes have crossed them.

gRPC hides its sockets. `Meter` finds those that lead to the server among the process's own
descriptors and keeps a duplicate of each, so that the kernel's counters (TCP_INFO) can still be
read after gRPC has closed its own. They count all payload of TCP: handshakes, TLS and HTTP/2
framing, first synchronisation, retransmissions.
"""

import contextlib
import dataclasses
import ipaddress
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

# Offsets in the kernel's `struct tcp_info` (linux/tcp.h); fields are only ever added at its end.
_STATE, _BYTES_ACKED, _BYTES_RECEIVED, _BYTES_SENT = 0, 120, 128, 200
_CLOSED = 7
_SCAN_WAIT_S = 0.2
# A connection in TLS takes a few round trips. One that takes longer may have met a server that is
# silent, for which nobody else has to wait.
_TURN_WAIT_S = 2.0


@dataclasses.dataclass(frozen=True)
class WireBytes:
    """Bytes of TCP payload since the client was made."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: "WireBytes") -> "WireBytes":
        """The sum of both."""
        return WireBytes(self.sent + other.sent, self.received + other.received)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`.

    Raises:
        ValueError: `text` is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"An address must be host:port. Received: {text!r}")
    if lacks_brackets(host):
        raise ValueError(f"An IPv6 address must be in brackets, as [::1]:7070. Received: {text!r}")
    return host.strip("[]"), int(port)


def lacks_brackets(host: str) -> bool:
    """Whether the host of a `host:port` is an IPv6 address whose end nobody can tell."""
    return ":" in host and not (host.startswith("[") and host.endswith("]"))


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine's loopback interface, without asking a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Turns:
    """Lets one client of a process connect to a server at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, wait_s: float) -> Iterator[bool]:
        """Whether it is the caller's turn, for which it waits no longer than `wait_s`."""
        is_taken = self._lock.acquire(timeout=wait_s)
        try:
            yield is_taken
        finally:
            if is_taken:
                self._lock.release()


class Meter:
    """Counts the bytes of all connections of one client to one server. Thread-safe."""

    # Two clients of one process may have the same server (tests do): a socket belongs to the one
    # that saw it first.
    _claimed: ClassVar[set[int]] = set()  # socket inodes, shared by all meters on purpose
    _lock = threading.Lock()
    _turns: ClassVar[weakref.WeakValueDictionary[tuple[str, int], _Turns]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, host: str, port: int) -> None:
        """A meter of connections to `host:port`."""
        self._host = host
        self._port = port
        self._peers: frozenset[tuple[str, int]] = frozenset()
        self._live: dict[int, socket.socket] = {}
        self._past = WireBytes()
        with Meter._lock:
            self._connects = Meter._turns.setdefault((host, port), _Turns())

    def scan(self) -> None:
        """Looks for new sockets, and settles those that are closed.

        While another client of this process connects to this server, new sockets are its own: they
        are left alone.
        """
        with self._connects.taken(_SCAN_WAIT_S) as is_taken:
            if is_taken:
                self._scan()

    def _scan(self) -> None:
        with Meter._lock:
            found = _socket_descriptors()
            if found is not None:
                # Also those of others: a meter whose link is closed looks no more.
                Meter._claimed &= {inode for inode, _ in found}
            for inode, number in found or ():
                if inode in Meter._claimed:
                    continue
                copy = _duplicate(number)
                if copy is None:
                    continue
                try:
                    is_ours = copy.getpeername()[:2] in self._peers
                except OSError:
                    is_ours = False
                if is_ours:
                    Meter._claimed.add(inode)
                    self._live[inode] = copy
                else:
                    copy.close()
            for inode in [
                one for one, copy in self._live.items() if _tcp_info(copy)[_STATE] == _CLOSED
            ]:
                self._settle(inode)

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """While one client connects to a server no other does: new sockets are its own.

        Whoever has waited 2 s for another client connects beside it. Then the bytes of the two are
        right only together.
        """
        # A name server may take seconds to answer: it is asked once for each connection.
        self._peers |= self._resolve()
        with self._connects.taken(_TURN_WAIT_S):
            before = {inode for inode, _ in _socket_descriptors() or ()}
            num_live = len(self._live)
            yield
            self._scan()
            if len(self._live) == num_live and is_loopback(self._host):
                self._learn(before)

    def _learn(self, before: set[int]) -> None:
        """Takes the one new socket to the server's port at `::1` for ours.

        With a resolver of its own, which `GRPC_DNS_RESOLVER` may choose, gRPC finds `localhost` at
        `::1` where `/etc/hosts` has 127.0.0.1 alone. A socket that leads elsewhere may be another
        client's, to a server that has the same port.
        """
        found = []
        for inode, number in _socket_descriptors() or ():
            is_new = inode not in before and inode not in Meter._claimed
            copy = _duplicate(number) if is_new else None
            if copy is not None:
                with copy, contextlib.suppress(OSError):
                    peer = copy.getpeername()[:2]
                    if peer == ("::1", self._port):
                        found.append(peer)
        if len(found) == 1:
            self._peers |= {found[0]}
            self._scan()

    def read(self) -> WireBytes:
        """Bytes of all connections so far, closed ones included."""
        self.scan()
        with Meter._lock:
            return sum((_count(copy) for copy in self._live.values()), self._past)

    def count(self, connection: socket.socket) -> None:
        """Adds the bytes of a connection that is not gRPC's, about to be closed."""
        with Meter._lock:
            self._past += _count(connection)

    def settle(self) -> None:
        """Ends all connections and keeps their counts; for when gRPC is done with them."""
        self.scan()
        with Meter._lock:
            for inode in list(self._live):
                self._settle(inode)

    def _settle(self, inode: int) -> None:
        copy = self._live.pop(inode)
        with contextlib.suppress(OSError):
            # A duplicate would keep the connection open after gRPC has closed its own descriptor.
            copy.shutdown(socket.SHUT_RDWR)
        self._past += _count(copy)
        copy.close()  # and stays claimed: gRPC may not have closed its own descriptor yet

    def _resolve(self) -> set[tuple[str, int]]:
        peers = set()
        with contextlib.suppress(OSError):
            for *_, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                peers.add((str(address[0]), int(address[1])))
        # gRPC opens IPv6 sockets for IPv4 addresses too, where the kernel has them.
        return peers | {(f"::ffff:{host}", port) for host, port in peers if "." in host}


def _socket_descriptors() -> list[tuple[int, int]] | None:
    """Inode and number of each; None: they cannot be listed, which takes a descriptor itself."""
    found = []
    try:
        entries = list(Path("/proc/self/fd").iterdir())
    except OSError:  # a count that is late, or that lacks a connection, must end no run
        return None
    for entry in entries:
        with contextlib.suppress(OSError):
            target = entry.readlink().name
            if target.startswith("socket:["):
                found.append((int(target[8:-1]), int(entry.name)))
    return found


def _duplicate(number: int) -> socket.socket | None:
    try:
        copy = os.dup(number)
    except OSError:  # closed since it was listed
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)


def _count(connection: socket.socket) -> WireBytes:
    info = _tcp_info(connection)
    # Emulators such as qemu fill in the first fields alone: no count, but no reason to end a run.
    if len(info) < _BYTES_RECEIVED + 8:
        return WireBytes()
    # bytes_sent counts retransmissions and is there since Linux 4.19; bytes_acked is the older
    # neighbour.
    sent = _BYTES_SENT if len(info) >= _BYTES_SENT + 8 else _BYTES_ACKED
    return WireBytes(*(struct.unpack_from("=Q", info, at)[0] for at in (sent, _BYTES_RECEIVED)))
