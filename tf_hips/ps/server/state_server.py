# SPDX-License-Identifier: Apache-2.0
"""ESync's state server: the paper's rule over the HTTP of the original.

    POST /init/     num_workers, epsilon          a new table; empty answer
    POST /apply/    r, k, c, te                   {"ready": 0 or 1}
    POST /reset/    r, t, te                      empty answer
    GET  /          the status page, JSON

Fields are those of a form, as browsers and `requests.post(data=...)` send them; what is left out of
`/init/` has the original's value. Rules are those of `esync.compat`, on this machine's clock.

The original answers whoever reaches its port. This one binds loopback only, unless it has a
certificate: then it speaks TLS and asks for one of a party, or of an operator for the status page,
that is not revoked. That is looked at for every request.

Invariants: a request that is refused changes nothing; a body, a line and a number are bounded, as
connections and times are by `bounded_http`; requests are answered one at a time.
"""

import dataclasses
import http
import http.server
import json
import math
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
from tf_hips.ps.security.revocation import Revocations
from tf_hips.ps.server.bounded_http import (
    BoundedHandler,
    BoundedServer,
    common_name_of,
    fingerprint_of,
)
from tf_hips.ps.server.listening import check_free
from tf_hips.ps.transport.sockets import is_loopback, split_address

_MAX_BODY_BYTES = 4096
_MAX_FIELDS = 8
_MAX_DIGITS = 40
_POLL_S = 0.05  # how soon it notices that it is to stop
_WRITERS = (tls.CHILD_ROLE,)
_READERS = (tls.CHILD_ROLE, tls.OPERATOR_ROLE)


@dataclasses.dataclass(frozen=True)
class StateServerConfig:
    """What a state server is told.

    Attributes:
        bind: `host:port` to listen at; port 0 takes a free one.
        tls: identity of the server, of role `global-server`; None: plain text, on loopback only.
        revoked: a file of certificates that are refused (`security.revocation`); None: none is.
    """

    bind: str = "127.0.0.1:10010"
    tls: Tls | None = None
    revoked: str | None = None

    def __post_init__(self) -> None:
        """Checks the address.

        Raises:
            ConfigError: it is none, or plain text would leave this machine, or has no certificates
                that could be revoked.
        """
        try:
            host, _ = split_address(self.bind)
        except ValueError as error:
            raise ConfigError(f"The state server's configuration is wrong. {error}") from error
        if self.tls is None and not is_loopback(host):
            raise ConfigError(f"Plain text is for loopback only. Received: bind={self.bind!r}")
        if self.tls is None and self.revoked is not None:
            raise ConfigError(
                f"`revoked` lists certificates, and plain text has none. Received: {self.revoked}"
            )


class StateServer:
    """A state server, listening once started."""

    def __init__(self, config: StateServerConfig, clock: Callable[[], float] = time.time) -> None:
        """A server that does not listen yet; `clock` tells the seconds that `te` is compared to."""
        self._config = config
        self._states = _States(clock)
        self._server: _Server | None = None
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
                used, or the list of the revoked cannot be read.
        """
        identity = self._config.tls
        if identity is not None:
            check_server(identity, tls.SERVER_ROLE)
        check_free(self._config.bind)
        host, port = split_address(self._config.bind)
        revocations = None
        if self._config.revoked is not None:
            revocations = Revocations(self._config.revoked, lambda text: log.warning("%s", text))
        self._server = _Server((host, port), self._states, identity, revocations)
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


class _Server(BoundedServer):
    """The connections, and what their requests are about."""

    def __init__(
        self,
        address: tuple[str, int],
        states: _States,
        identity: Tls | None,
        revocations: Revocations | None,
    ) -> None:
        super().__init__(address, _Handler, identity)
        self.states = states
        self.revocations = revocations


class _Handler(BoundedHandler):
    """Requests of one connection."""

    server_version = "tf_hips"
    sys_version = ""
    server: _Server

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
        if not self.server.has_certificates:
            return True
        found = tls.Identity.parse(common_name_of(self.connection))
        if found is None or found.role not in roles:
            self._answer(
                http.HTTPStatus.FORBIDDEN,
                f"the certificate must be of role {' or '.join(roles)}. Received: {found}",
            )
            return False
        revocations = self.server.revocations
        line = None if revocations is None else revocations.find(fingerprint_of(self.connection))
        if line is not None:
            self.close_connection = True
            self._answer(
                http.HTTPStatus.FORBIDDEN, f"the certificate of {found} was revoked on {line.day}"
            )
        return line is None

    def _fields(self) -> dict[str, str] | None:
        """The fields of a form; None: it was refused."""
        if "Transfer-Encoding" in self.headers:
            # Its length is told piece by piece; without them it would be a form without fields.
            self.close_connection = True
            self._answer(http.HTTPStatus.LENGTH_REQUIRED, "a body must have a Content-Length")
            return None
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
        if len(body) < int(length):
            # Cut off within a number, it would be another number.
            self.close_connection = True
            self._answer(
                http.HTTPStatus.BAD_REQUEST,
                f"the body must have the {length} bytes that were announced. Received: {len(body)}",
            )
            return None
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
        self.end_headers()
        self.wfile.write(body)


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
