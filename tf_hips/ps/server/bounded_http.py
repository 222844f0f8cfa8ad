# SPDX-License-Identifier: Apache-2.0
"""HTTP whose connections, and the times of whose requests, are bounded.

There are so many connections at most, and of one certificate half as many. One that is idle is
closed after a while; a request must be whole in time, however small the pieces in which it comes.
"""

import collections
import contextlib
import http.server
import io
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from typing import Any

from tf_hips import log
from tf_hips.config import Tls
from tf_hips.ps.security import expiry, tls
from tf_hips.ps.security.diagnosis import check_server

_REQUEST_S = 10.0
_IDLE_S = 60.0
_MAX_CONNECTIONS = 512
_MAX_OF_ONE = _MAX_CONNECTIONS // 2  # of one certificate, which must leave room for others


class BoundedServer(http.server.ThreadingHTTPServer):
    """One thread a connection, of which there are so many at most."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    max_connections = _MAX_CONNECTIONS

    def __init__(
        self,
        address: tuple[str, int],
        handler: type["BoundedHandler"],
        identity: Tls | None,
    ) -> None:
        """A server that listens, and answers nobody before `serve_forever`.

        Args:
            address: where it listens.
            handler: of its requests.
            identity: of the server, which then asks for a certificate; its files are read again
                when they have changed. None: plain text.

        Raises:
            ConfigError: the identity is not that of a global server, or cannot be used.
            OSError: the address cannot be used.
        """
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._contexts = (
            None
            if identity is None
            else tls.Renewed(identity, _context, lambda text: log.warning("%s", text))
        )
        self._own = expiry.own(identity)
        self._lock = threading.Lock()
        self._of_one: collections.Counter[str] = collections.Counter()  # by fingerprint
        self._free = threading.BoundedSemaphore(self.max_connections)
        super().__init__(address, handler)

    @property
    def has_certificates(self) -> bool:
        """Whether whoever is connected has one."""
        return self._contexts is not None

    def server_bind(self) -> None:
        """Binds without asking a name server who this is, as the class above does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def service_actions(self) -> None:
        """Now and then, whoever is connected: connections are kept for a whole run."""
        super().service_actions()
        self._own.look()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands a connection to a thread, or closes it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one connection; the handshake is part of it, so nobody else waits for it."""
        try:
            request.settimeout(_REQUEST_S)
            if self._contexts is None:
                super().process_request_thread(request, client_address)
                return
            request = self._contexts.get().wrap_socket(request, server_side=True)
            with self._counting(fingerprint_of(request)) as has_room:
                if has_room:
                    super().process_request_thread(request, client_address)
                else:
                    self.shutdown_request(request)
        except (OSError, ValueError):
            self.shutdown_request(request)  # no TLS, or no certificate of our authority
        finally:
            self._free.release()

    @contextlib.contextmanager
    def _counting(self, fingerprint: str) -> Iterator[bool]:
        """A connection of a certificate is open meanwhile, if it may have one more."""
        with self._lock:
            has_room = self._of_one[fingerprint] < _MAX_OF_ONE
            self._of_one[fingerprint] += has_room
        try:
            yield has_room
        finally:
            with self._lock:
                self._of_one[fingerprint] -= has_room
                if not self._of_one[fingerprint]:
                    del self._of_one[fingerprint]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is no error of the server."""


class _Timed(io.RawIOBase):
    """What comes over a connection, each request in bounded time, in however small pieces."""

    def __init__(self, connection: socket.socket, idle_s: float) -> None:
        self._connection = connection
        self._idle_s = idle_s
        self._ends: float | None = None  # None: no byte of a request has come

    def begin(self) -> None:
        """Waits for another request."""
        self._ends = None

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Takes what is there.

        Raises:
            TimeoutError: nothing is, or the request has not ended in time.
        """
        left_s = self._idle_s if self._ends is None else self._ends - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError(f"a request must end within {_REQUEST_S:.0f} s")
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(buffer)
        if self._ends is None:
            self._ends = time.monotonic() + _REQUEST_S
        return count


class BoundedHandler(http.server.BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    # Headers and body are two writes; the second one would wait for the other side's delayed
    # acknowledgement, 40 ms before every step.
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Reads by a clock of its own: a socket's counts from each byte anew."""
        super().setup()
        self._timed = _Timed(self.connection, self.timeout)
        self.rfile.close()
        self.rfile = io.BufferedReader(self._timed)

    def handle_one_request(self) -> None:
        """Another request, if one comes."""
        self._timed.begin()
        super().handle_one_request()

    def end_headers(self) -> None:
        """Sends them; for who takes the answer there is a limit, too."""
        self.connection.settimeout(_REQUEST_S)
        super().end_headers()


def _context(identity: Tls) -> ssl.SSLContext:
    check_server(identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(identity.authority)
    tls.load_pair(context, identity)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def fingerprint_of(connection: Any) -> str:
    """That of the other side's certificate.

    Raises:
        ValueError: it cannot be read.
    """
    whole = connection.getpeercert(binary_form=True) or b""
    return tls.fingerprint(ssl.DER_cert_to_PEM_cert(whole).encode())


def common_name_of(connection: Any) -> str:
    """The name in the other side's certificate; empty: it has none, or several."""
    subject = (connection.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else ""
