# SPDX-License-Identifier: Apache-2.0
"""A worker's end of ESync's state server: a question before every local step.

One connection is kept for all questions, and made anew where it has broken, with the certificate
that the files hold then. A question that got no answer is asked again until its deadline, once the
server has answered any: asking twice changes nothing but the moment.
"""

import contextlib
import http.client
import json
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable

from tf_hips import log
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, PeerError, ProtocolError
from tf_hips.ps.security import expiry, tls
from tf_hips.ps.transport.sockets import is_loopback, split_address

_MAX_ANSWER_BYTES = 1 << 16
_MOST_PAUSE_S = 2.0


class StateClient:
    """One worker's questions. Used by one thread at a time."""

    def __init__(
        self,
        address: str,
        rank: int,
        identity: Tls | None = None,
        *,
        deadline_s: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A client that has not connected yet.

        Args:
            address: `host:port` of the state server.
            rank: number of this worker, from 0.
            identity: of this party; None: plain text, to loopback only.
            deadline_s: seconds in which a question must be answered.
            clock: this worker's wall clock, in seconds.

        Raises:
            ConfigError: the address is none, plain text would leave this machine, or a certificate
                cannot be used.
        """
        try:
            self._host, self._port = split_address(address)
        except ValueError as error:
            raise ConfigError(f"`state_server` is wrong. {error}") from error
        if identity is None and not is_loopback(self._host):
            raise ConfigError(f"Plain text is for loopback only. Received: {address!r}")
        self._address = address
        self._rank = rank
        self._deadline_s = deadline_s
        self._clock = clock
        self._contexts = (
            None
            if identity is None
            else tls.Renewed(identity, _context, lambda text: log.warning("%s", text))
        )
        self._own = expiry.own(identity)
        self._has_answered = False
        self._connection: _Connection | None = None

    def init(self, num_workers: int, epsilon: float) -> None:
        """Begins a table; the worker of rank 0 does, before anybody asks.

        Raises:
            PeerError: the state server cannot be reached.
            ProtocolError: it refuses.
        """
        self._post("init", num_workers=num_workers, epsilon=epsilon)

    def apply(self, steps: int, step_s: float, ended: float | None = None) -> bool:
        """Whether to aggregate now.

        Args:
            steps: local steps done in this round.
            step_s: seconds of the last one.
            ended: this worker's wall clock at its end; None: now.

        Raises:
            PeerError: the state server cannot be reached.
            ProtocolError: it refuses, or answers something else.
        """
        te = self._clock() if ended is None else ended
        answer = self._post("apply", r=self._rank, k=steps, c=step_s, te=te)
        try:
            ready = json.loads(answer)["ready"]
        except (ValueError, KeyError, TypeError, RecursionError):
            ready = None
        if type(ready) is not int or ready not in (0, 1):
            raise ProtocolError(
                f"State server {self._address}: an answer must be ready = 0 or 1. Received: "
                f"{answer[:40]!r}"
            )
        return bool(ready)

    def reset(self, round: int) -> None:
        """Says that this worker has the model of `round`, the first being 1.

        Raises:
            PeerError: the state server cannot be reached.
            ProtocolError: it refuses.
        """
        self._post("reset", r=self._rank, t=round, te=self._clock())

    def close(self) -> None:
        """Closes the connection; a question opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, path: str, **fields: float) -> bytes:
        self._own.look()
        body = urllib.parse.urlencode({name: repr(value) for name, value in fields.items()})
        ends = time.monotonic() + self._deadline_s
        attempt = 0
        while True:
            is_new = self._connection is None
            try:
                answer = self._once(path, body, max(0.001, ends - time.monotonic()))
                self._has_answered = True
                return answer
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # One that was idle may have been closed by the other side; a new one says more.
                pause_s = min(_MOST_PAUSE_S, 0.05 * 2**attempt) if is_new else 0.0
                may_pass = self._has_answered or not is_new
                if not may_pass or time.monotonic() + pause_s > ends:
                    raise PeerError(
                        f"State server {self._address}, /{path}/: no answer: "
                        f"{str(error) or type(error).__name__}"
                    ) from error
                if attempt == 0 and is_new:
                    log.warning(
                        "No connection to the state server %s: %s. Trying again.",
                        self._address,
                        error,
                    )
                attempt += is_new
                time.sleep(pause_s)

    def _once(self, path: str, body: str, timeout_s: float) -> bytes:
        if self._connection is None:
            context = None if self._contexts is None else self._contexts.get()
            self._connection = _Connection(self._host, self._port, context)
        self._connection.wait(timeout_s)
        self._connection.request(
            "POST", f"/{path}/", body, {"Content-Type": "application/x-www-form-urlencoded"}
        )
        answer = self._connection.getresponse()
        content = answer.read(_MAX_ANSWER_BYTES)
        if answer.status != http.client.OK:
            text = content[:300].decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                text = str(json.loads(content)["error"])[:300]
            self.close()
            raise ProtocolError(f"State server {self._address}, /{path}/: {answer.status}: {text}")
        return content


def _context(identity: Tls) -> ssl.SSLContext:
    tls.check_pair(identity)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(identity.authority)
    tls.load_pair(context, identity)
    return context


class _Connection(http.client.HTTPConnection):
    """A connection whose other end shows the certificate of a server, whatever its address is."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        super().__init__(host, port)
        self._context = context

    def wait(self, timeout_s: float) -> None:
        """From now on each step may take so many seconds."""
        self.timeout = timeout_s
        if self.sock is not None:
            self.sock.settimeout(timeout_s)

    def connect(self) -> None:
        """Connects, with a handshake where there is a context."""
        super().connect()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            self.sock = self._context.wrap_socket(
                self.sock, server_hostname=tls.server_name(tls.SERVER_ROLE)
            )
