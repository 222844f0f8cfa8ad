# SPDX-License-Identifier: Apache-2.0
"""How long a server waits for its children, and for the server above it, if there is one.

A call waits first for the children here, then for what comes from above; each of the two has its
own patience, the second a little more than the server above has itself. So whoever is missing is
named by the server that misses it. Children are told the sum of both.
"""

import dataclasses
import threading
import time

from tf_hips.config import MOST_SECONDS, Uplink
from tf_hips.errors import ConfigError, PeerError, TfHipsError
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.passage import read_terms
from tf_hips.ps.client.shards import SEPARATOR
from tf_hips.ps.security import tls
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.session.waiting import STOPPED
from tf_hips.ps.transport.sockets import split_address

# Seconds that a server waits for longer than the one above it: an answer has to travel.
_MARGIN_S = 10.0
# For which an answer is used on. Each costs a connection, and one of the calls that the server
# above lets this one have, whose children may ask without end.
_FRESH_S = 5.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long one server waits in a join and in a round, and how long a payload may be."""

    join_timeout_s: float
    round_timeout_s: float
    max_gather_bytes: int

    @classmethod
    def above(cls, link: Link, timeout_s: float) -> "Limits":
        """Of the server above, which is asked over a connection of its own, closed then.

        Raises:
            TfHipsError: it cannot be reached, or refuses this server.
        """
        try:
            terms = read_terms(link.control("Terms", b"", timeout_s))
        finally:
            link.close()
        return cls(terms["join_timeout_s"], terms["round_timeout_s"], terms["max_gather_bytes"])

    def under(self, above: "Limits") -> "Limits":
        """How long each of two waits may take: for the children, then for the server above."""
        return Limits(
            max(self.join_timeout_s, above.join_timeout_s + _MARGIN_S),
            max(self.round_timeout_s, above.round_timeout_s + _MARGIN_S),
            min(self.max_gather_bytes, above.max_gather_bytes),
        )

    def told(self, above: "Limits") -> "Limits":
        """What children must know: both waits together."""
        each = self.under(above)
        return Limits(2 * each.join_timeout_s, 2 * each.round_timeout_s, each.max_gather_bytes)


class Waits:
    """How long a server waits, which depends on the one above it, if there is one. Thread-safe."""

    def __init__(self, config: ServerConfig) -> None:
        """What it was told itself, until it has asked."""
        self._config = config
        self._own = Limits(
            float(config.join_timeout_s), float(config.round_timeout_s), config.max_gather_bytes
        )
        self.here = self.told = self._own
        self._lock = threading.Lock()  # one asks at a time
        self._fresh_until = 0.0  # of `time.monotonic`, as the next one
        self._failed_at = 0.0
        self._failure: TfHipsError | None = None
        self._link: Link | None = None  # over which it is asked
        self._is_closed = False
        self.uplink = config.uplink
        if config.uplink is not None:
            # It must not give up before the children that it waits for are missed here.
            own_s = min(MOST_SECONDS, config.round_timeout_s + _MARGIN_S)
            deadline_s = max(config.uplink.deadline_s, own_s)
            self.uplink = dataclasses.replace(config.uplink, deadline_s=deadline_s)

    def ask(self, timeout_s: float) -> Limits:
        """What a child must know; asks the server above for what that is told.

        Those who ask while one does share its answer, or its error.

        Raises:
            TfHipsError: it cannot be reached, or refuses this server.
        """
        if self.uplink is None:
            return self.told
        began = time.monotonic()
        if not self._lock.acquire(timeout=timeout_s):
            raise PeerError(f"The server above has not answered within {timeout_s:.0f} s.")
        try:
            if self._failure is not None and self._failed_at > began:
                raise self._failure
            if time.monotonic() >= self._fresh_until:
                self._ask(self.uplink, timeout_s)
            return self.told
        finally:
            self._lock.release()

    def close(self) -> None:
        """Asks no more; who waits for an answer hears that the server was stopped."""
        self._is_closed = True
        link = self._link
        if link is not None:
            link.close()

    def _ask(self, uplink: Uplink, timeout_s: float) -> None:
        try:
            self._link = link = _link_above(uplink, self._config.run)
            if self._is_closed:
                link.close()
            above = Limits.above(link, timeout_s)
        except TfHipsError as error:
            self._failure = PeerError(STOPPED) if self._is_closed else error
            self._failed_at = time.monotonic()
            raise self._failure from None
        finally:
            self._link = None
        self.here, self.told = self._own.under(above), self._own.told(above)
        self._fresh_until, self._failure = time.monotonic() + _FRESH_S, None


def _link_above(uplink: Uplink, run: str) -> Link:
    try:
        credentials = tls.channel_credentials(uplink.tls) if uplink.tls is not None else None
    except ConfigError as error:  # of this server, which its children can do nothing about
        raise PeerError(f"The way up of `{uplink.site}` cannot be used: {error}") from error
    # Servers that share a model were told the same.
    server = uplink.server.partition(SEPARATOR)[0].strip()
    uplink = dataclasses.replace(uplink, server=server)
    return Link(uplink, split_address(server), credentials, run, "terms")
