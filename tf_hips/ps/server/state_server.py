# SPDX-License-Identifier: Apache-2.0
"""ESync's state server: the paper's rule over the HTTP of the original.

    POST /init/     num_workers, epsilon          a new table; empty answer
    POST /apply/    r, k, c, te                   {"ready": 0 or 1}
    POST /reset/    r, t, te                      empty answer
    GET  /          the status page, JSON

Fields are those of a form, as browsers and `requests.post(data=...)` send them; what is left out of
`/init/` has the original's value. Rules are those of `esync.compat`, on this machine's clock.

The original answers whoever reaches its port. This one binds loopback only, unless it has a
certificate: then it speaks TLS and asks for one of a party, or of an operator for the status page.

Invariants: a request that is refused changes nothing; a body, a line, a number, the time that a
request may take and the number of connections are bounded; requests are answered one at a time.
"""

import dataclasses
import http
import http.server
import io
import json
import math
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from tf_hips import log
from tf_hips.config import Tls
from tf_hips.errors import ConfigError
from tf_hips.esync.compat import StateTable
from tf_hips.ps.security import tls
from tf_hips.ps.security.diagnosis import check_server
from tf_hips.ps.server.listening import check_free
from tf_hips.ps.transport.sockets import is_loopback, split_address

_MAX_BODY_BYTES = 4096
_MAX_FIELDS = 8
_MAX_DIGITS = 40
_REQUEST_S = 10.0
_IDLE_S = 60.0
_MAX_CONNECTIONS = 512
_POLL_S = 0.05  # how soon it notices that it is to stop
_WRITERS = (tls.CHILD_ROLE,)
_READERS = (tls.CHILD_ROLE, tls.OPERATOR_ROLE)


@dataclasses.dataclass(frozen=True)
class StateServerConfig:
    """What a state server is told.

    Attributes:
        bind: `host:port` to listen at; port 0 takes a free one.
        tls: identity of the server, of role `global-server`; None: plain text, on loopback only.
    """

    bind: str = "127.0.0.1:10010"
    tls: Tls | None = None

    def __post_init__(self) -> None:
        """Checks the address.

        Raises:
            ConfigError: it is none, or plain text would leave this machine.
        """
        try:
            host, _ = split_address(self.bind)
        except ValueError as error:
            raise ConfigError(f"The state server's configuration is wrong. {error}") from error
        if self.tls is None and not is_loopback(host):
            raise ConfigError(f"Plain text is for loopback only. Received: bind={self.bind!r}")


class StateServer:
    """A state server, listening once started."""

    def __init__(self, config: StateServerConfig, clock: Callable[[], float] = time.time) -> None:
        """A server that does not listen yet; `clock` tells the seconds that `te` is compared to."""
        self._config = config
        self._states = _States(clock)
        self._server: _HttpServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """`host:port` the server listens at."""
        port = self._server.server_address[1] if self._server is not None else 0
        return f"{self._config.bind.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Starts to listen.

        Raises:
            ConfigError: the address is taken or not this machine's, or a certificate cannot be
                used.
        """
        identity = self._config.tls
        if identity is not None:
            check_server(identity, tls.SERVER_ROLE)
        check_free(self._config.bind)
        host, port = split_address(self._config.bind)
        self._server = _HttpServer((host, port), self._states, _context(identity))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="tf_hips-state-server",
            daemon=True,
        )
        self._thread.start()
        log.info(
            "State server listens at %s://%s", "http" if identity is None else "https", self.address
        )

    def stop(self) -> None:
        """Stops to listen. A second call does nothing."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _States:
    """The table behind the addresses. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._table: StateTable | None = None

    def post(self, path: str, fields: Mapping[str, str]) -> object:
        """What a request is answered with; None: an empty answer.

        Raises:
            KeyError: there is no such address.
            ValueError: a field is missing or wrong.
            ConfigError: there is no table yet.
        """
        if path == "init":
            _check_known(fields, "num_workers", "epsilon")
            table = StateTable(_whole(fields, "num_workers", "6"), _real(fields, "epsilon", "0.5"))
            with self._lock:
                self._table = table
            return None
        if path == "apply":
            _check_known(fields, "r", "k", "c", "te")
            said = (_whole(fields, "r"), _whole(fields, "k"), _real(fields, "c"))
            te = _real(fields, "te")
            with self._lock:
                return {"ready": int(self._known().apply(*said, te, self._clock()))}
        if path == "reset":
            _check_known(fields, "r", "t", "te")
            rank, t, te = _whole(fields, "r"), _whole(fields, "t"), _real(fields, "te")
            with self._lock:
                self._known().reset(rank, t, te)
            return None
        raise KeyError(path)

    def status(self) -> dict[str, object]:
        """The status page; before `/init/` that of the original."""
        with self._lock:
            if self._table is None:
                return {"num_workers": 0, "t": 1, "epsilon": 0.5, "records": None}
            return self._table.status()

    def _known(self) -> StateTable:
        if self._table is None:
            raise ConfigError("`/init/` must come before `/apply/` and `/reset/`.")
        return self._table


class _HttpServer(http.server.ThreadingHTTPServer):
    """One thread a connection, of which there are so many at most."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], states: _States, context: ssl.SSLContext | None
    ) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self.states = states
        self.context = context
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds without asking a name server who this is, as the class above does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands a connection to a thread, or closes it where there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves one connection; the handshake is part of it, so nobody else waits for it."""
        try:
            request.settimeout(_REQUEST_S)
            if self.context is not None:
                request = self.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:
            self.shutdown_request(request)  # no TLS, or no certificate of our authority
        finally:
            self._free.release()

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


class _Handler(http.server.BaseHTTPRequestHandler):
    """Requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "tf_hips"
    sys_version = ""
    timeout = _IDLE_S
    # Headers and body are two writes; the second one would wait for the other side's delayed
    # acknowledgement, 40 ms before every step.
    disable_nagle_algorithm = True
    server: _HttpServer

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

    def do_GET(self) -> None:
        """The status page."""
        if self.path != "/":
            self._answer(http.HTTPStatus.NOT_FOUND, "there is `/` to get")
        elif self._may(_READERS):
            self._answer(http.HTTPStatus.OK, self.server.states.status())

    def do_POST(self) -> None:
        """One of the three requests."""
        fields = self._fields()
        if fields is None or not self._may(_WRITERS):
            return
        try:
            answer = self.server.states.post(self.path.strip("/"), fields)
        except KeyError:
            self._answer(http.HTTPStatus.NOT_FOUND, "there are /init/, /apply/ and /reset/")
        except ConfigError as error:
            self._answer(http.HTTPStatus.CONFLICT, str(error))
        except ValueError as error:
            self._answer(http.HTTPStatus.BAD_REQUEST, str(error))
        else:
            self._answer(http.HTTPStatus.OK, answer)

    def log_message(self, format: str, *args: Any) -> None:
        """A line for each step of each worker would be of no use."""

    def _may(self, roles: tuple[str, ...]) -> bool:
        if self.server.context is None:
            return True
        found = tls.Identity.parse(_common_name(self.connection))
        if found is not None and found.role in roles:
            return True
        self._answer(
            http.HTTPStatus.FORBIDDEN,
            f"the certificate must be of role {' or '.join(roles)}. Received: {found}",
        )
        return False

    def _fields(self) -> dict[str, str] | None:
        """The fields of a form; None: it was refused."""
        length = self.headers.get("Content-Length", "0")
        is_number = length.isascii() and length.isdigit() and len(length) <= _MAX_DIGITS
        if not is_number or int(length) > _MAX_BODY_BYTES:
            self.close_connection = True  # what follows cannot be told from another request
            self._answer(
                http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body must have a length of at most {_MAX_BODY_BYTES} bytes",
            )
            return None
        body = self.rfile.read(int(length))
        try:
            pairs = urllib.parse.parse_qsl(
                body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS
            )
        except ValueError:
            self._answer(http.HTTPStatus.BAD_REQUEST, "the body must be the fields of a form")
            return None
        return dict(pairs)

    def _answer(self, status: http.HTTPStatus, content: object) -> None:
        if status != http.HTTPStatus.OK:
            content = {"error": content}
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.connection.settimeout(_REQUEST_S)
        self.end_headers()
        self.wfile.write(body)


def _context(identity: Tls | None) -> ssl.SSLContext | None:
    if identity is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(identity.authority)
    context.load_cert_chain(identity.certificate, identity.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _common_name(connection: Any) -> str:
    subject = (connection.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else ""


def _check_known(fields: Mapping[str, str], *names: str) -> None:
    unknown = sorted(set(fields) - set(names))
    if unknown:
        raise ValueError(f"fields must be {', '.join(names)}. Received: {unknown[0][:40]!r}")


def _text(fields: Mapping[str, str], name: str, default: str | None) -> str:
    text = fields.get(name, default)
    if text is None or len(text) > _MAX_DIGITS:
        raise ValueError(f"`{name}` must be a number. Received: {str(text)[:_MAX_DIGITS]!r}")
    return text


def _whole(fields: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _text(fields, name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` must be a whole number. Received: {text!r}") from None


def _real(fields: Mapping[str, str], name: str, default: str | None = None) -> float:
    text = _text(fields, name, default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number. Received: {text!r}")
    return value
