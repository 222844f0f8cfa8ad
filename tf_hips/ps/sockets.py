# SPDX-License-Identifier: Apache-2.0
"""The sockets under gRPC: how many bytes crossed them, and why a connection fails.

gRPC hides its sockets. `Meter` finds those that lead to the server among the process's own
descriptors and keeps a duplicate of each, so that the kernel's counters (TCP_INFO) can still be
read after gRPC has closed its own. They count all payload of TCP: handshakes, TLS and HTTP/2
framing, first synchronisation, retransmissions.

A client sees nothing but "Socket closed" when a handshake fails. `diagnose` connects once more with
`ssl` and says what is wrong in one sentence.
"""

import contextlib
import dataclasses
import ipaddress
import os
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from tf_hips.config import Tls

# Offsets in the kernel's `struct tcp_info` (linux/tcp.h); fields are only ever added at its end.
_STATE, _BYTES_ACKED, _BYTES_RECEIVED, _BYTES_SENT = 0, 120, 128, 200
_CLOSED = 7
_CLIENT_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_TLS_ALERT, _TLS_HANDSHAKE = 0x15, 0x16
# OpenSSL's X509_V_ERR_* values.
_VERIFY_NOT_YET, _VERIFY_EXPIRED, _VERIFY_PURPOSE, _VERIFY_HOST = 9, 10, 26, 62


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
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine's loopback interface, without asking a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Meter:
    """Counts the bytes of all connections of one client to one server. Thread-safe."""

    # Two clients of one process may have the same server (tests do): a socket belongs to the one
    # that saw it first.
    _claimed: dict[int, "Meter"] = {}  # noqa: RUF012 - by socket inode, shared by all meters on purpose
    _lock = threading.Lock()
    _one_connects = threading.Lock()

    def __init__(self, host: str, port: int) -> None:
        """A meter of connections to `host:port`."""
        self._host = host
        self._port = port
        self._live: dict[int, socket.socket] = {}
        self._past = WireBytes()

    def scan(self) -> None:
        """Looks for new sockets, and settles those that are closed."""
        with Meter._lock:
            peers = self._peers()
            found = _socket_descriptors()
            open_inodes = {inode for inode, _ in found}
            for inode in [one for one, owner in Meter._claimed.items() if owner is self]:
                if inode not in open_inodes:
                    del Meter._claimed[inode]
            for inode, number in found:
                if inode in Meter._claimed:
                    continue
                copy = _duplicate(number)
                if copy is None:
                    continue
                try:
                    is_ours = copy.getpeername()[:2] in peers
                except OSError:
                    is_ours = False
                if is_ours:
                    Meter._claimed[inode] = self
                    self._live[inode] = copy
                else:
                    copy.close()
            for inode in [
                one for one, copy in self._live.items() if _tcp_info(copy)[_STATE] == _CLOSED
            ]:
                self._settle(inode)

    @contextlib.contextmanager
    def connecting(self) -> Iterator[None]:
        """While one client of a process connects no other does: new sockets are its own."""
        with Meter._one_connects:
            yield
            self.scan()

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

    def _peers(self) -> set[tuple[str, int]]:
        peers = set()
        with contextlib.suppress(OSError):
            for *_, address in socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM):
                peers.add((str(address[0]), int(address[1])))
        # gRPC opens IPv6 sockets for IPv4 addresses too, where the kernel has them.
        return peers | {(f"::ffff:{host}", port) for host, port in peers if "." in host}


def _socket_descriptors() -> list[tuple[int, int]]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
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
    # bytes_sent counts retransmissions and is there since Linux 4.19; bytes_acked is the older
    # neighbour.
    sent = _BYTES_SENT if len(info) >= _BYTES_SENT + 8 else _BYTES_ACKED
    return WireBytes(*(struct.unpack_from("=Q", info, at)[0] for at in (sent, _BYTES_RECEIVED)))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Why a connection does not come about; `may_pass` says whether trying again can help."""

    text: str
    may_pass: bool


def diagnose(
    host: str,
    port: int,
    tls: Tls | None,
    name: str,
    *,
    meter: Meter | None = None,
    timeout_s: float = 5.0,
) -> Diagnosis:
    """Connects once to find out what is wrong between a client and `host:port`.

    Args:
        host: host of the server.
        port: port of the server.
        tls: the client's identity, or None for plain text.
        name: the DNS name that the server's certificate must carry.
        meter: counts the bytes of the probe.
        timeout_s: seconds for each step.
    """
    where = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except socket.gaierror as error:
        return Diagnosis(f"The host of {where} is not known: {error.strerror}.", may_pass=False)
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Diagnosis(f"Nothing listens at {where} ({reason}).", may_pass=True)
    with connection:
        try:
            if tls is None:
                return _diagnose_plain(connection, where)
            return _diagnose_tls(connection, where, tls, name)
        finally:
            if meter is not None:
                with contextlib.suppress(OSError):
                    meter.count(connection)


def _diagnose_plain(connection: socket.socket, where: str) -> Diagnosis:
    try:
        connection.sendall(_CLIENT_PREFACE)
        answer = connection.recv(9)
    except OSError:
        answer = b""
    if len(answer) >= 4 and answer[3] == 4 and answer[0] == 0:
        return Diagnosis(
            f"{where} answers in plain text now; the connection was lost before.", may_pass=True
        )
    if answer[:1] == bytes((_TLS_ALERT,)) or (
        not answer and _speaks_tls(connection.getpeername()[:2])
    ):
        return Diagnosis(
            f"{where} speaks TLS and this side plain text. Give this side certificates "
            f"(`uplink.tls`).",
            False,
        )
    return Diagnosis(
        f"{where} is no tf_hips server: it answered {answer!r} to HTTP/2.", may_pass=not answer
    )


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection(address, 5.0) as raw, context.wrap_socket(raw):
            return True
    except ssl.SSLError as error:
        return "ALERT" in str(error).upper()
    except OSError:
        return False


def _diagnose_tls(connection: socket.socket, where: str, tls: Tls, name: str) -> Diagnosis:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    try:
        context.load_verify_locations(tls.authority)
        context.load_cert_chain(tls.certificate, tls.key)
    except (OSError, ssl.SSLError) as error:
        return Diagnosis(
            f"The own certificate {tls.certificate} cannot be used: {error}.", may_pass=False
        )
    try:
        with context.wrap_socket(connection, server_hostname=name) as secure:
            # With TLS 1.3 the server judges our certificate when our side is done.
            secure.sendall(_CLIENT_PREFACE)
            if secure.recv(9):
                return Diagnosis(
                    f"{where} accepts TLS now; the connection was lost before.", may_pass=True
                )
    except ssl.SSLCertVerificationError as error:
        return Diagnosis(_explain_verification(where, error, tls, name), may_pass=False)
    except ssl.SSLError as error:
        text = str(error).upper()
        if "WRONG_VERSION" in text or "RECORD" in text:
            return Diagnosis(f"{where} speaks plain text and this side TLS.", may_pass=False)
        if "ALERT" not in text:
            return Diagnosis(f"The TLS handshake with {where} failed: {error}.", may_pass=True)
        reason = _own_fault(tls) or f"it sent an alert ({str(error)[:120]})"
    except OSError as error:
        return Diagnosis(
            f"{where} broke off the TLS handshake ({error.strerror or error}); "
            "it may speak plain text.",
            may_pass=True,
        )
    else:
        # gRPC closes the connection without an alert when it refuses a certificate.
        found = _own_fault(tls)
        if found is None:
            return Diagnosis(
                f"{where} closed the connection after the TLS handshake.", may_pass=True
            )
        reason = found
    return Diagnosis(
        f"{where} refuses our certificate {tls.certificate}: {reason}.", may_pass=False
    )


def _own_fault(tls: Tls) -> str | None:
    """What a server with our authority finds wrong with our certificate; None: nothing.

    Shows the certificate to such a server in memory, so the verdict is that of a real handshake.
    """
    judge, shower = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    judge.verify_mode = ssl.CERT_REQUIRED
    judge.load_verify_locations(tls.authority)
    shower.check_hostname = False
    shower.verify_mode = ssl.CERT_NONE
    for context in (judge, shower):
        context.load_cert_chain(tls.certificate, tls.key)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (shower.wrap_bio(down, up), judge.wrap_bio(up, down, server_side=True))
    for _ in range(4):  # a handshake needs fewer turns
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                if error.verify_code == _VERIFY_EXPIRED:
                    return "it has expired"
                if error.verify_code == _VERIFY_NOT_YET:
                    return "it is not valid yet: are the clocks right?"
                return f"it does not come from {tls.authority} ({error.verify_message})"
            except ssl.SSLError as error:
                return f"it cannot be used ({error.reason})"
    return None


def _explain_verification(
    where: str, error: ssl.SSLCertVerificationError, tls: Tls, name: str
) -> str:
    if error.verify_code == _VERIFY_EXPIRED:
        return f"The certificate of {where} has expired."
    if error.verify_code == _VERIFY_NOT_YET:
        return f"The certificate of {where} is not valid yet: are the clocks right?"
    if error.verify_code in (_VERIFY_HOST, _VERIFY_PURPOSE):
        role = name.partition(".")[0]
        return (
            f"The certificate of {where} must be one of role {role}: it does not carry "
            f"the name {name}."
        )
    return (
        f"The certificate of {where} must come from the authority {tls.authority}. "
        f"Received: one that does not ({error.verify_message})."
    )
