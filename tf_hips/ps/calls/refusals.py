# SPDX-License-Identifier: Apache-2.0
"""How many refused calls a peer may make, and how many of them are worth a line in the log.

A peer is a certificate. One that is refused again and again, by mistake or not, costs the server a
line of log and a thread each time. So beyond a number of refusals within a minute its calls are
turned away unread, until a minute has passed.

Invariant: memory is bounded; the peers that were refused longest ago are forgotten first.
"""

import collections
import threading
import time
from collections.abc import Callable

PERIOD_S = 60.0
_MAX_PEERS = 1024


class Refusals:
    """Counts the refused calls of peers. Thread-safe."""

    def __init__(
        self,
        limit: int,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody was refused.

        Args:
            limit: refused calls that a peer may make within a period.
            period_s: seconds of a period.
            clock: tells seconds.
        """
        self._limit = limit
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        # When the period of a peer began, and its refused calls since.
        self._peers: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()

    def note(self, peer: str) -> bool:
        """Counts a refused call; whether it is the last one before the peer is turned away."""
        with self._lock:
            now = self._clock()
            began, count = self._peers.get(peer, (now, 0))
            if now - began >= self._period_s:
                began, count = now, 0
            self._peers[peer] = began, count + 1
            self._peers.move_to_end(peer)
            while len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
            return count + 1 == self._limit

    def wait_s(self, peer: str) -> float:
        """Seconds for which calls of a peer are turned away; 0: they are not."""
        with self._lock:
            began, count = self._peers.get(peer, (0.0, 0))
            if count < self._limit:
                return 0.0
            return max(0.0, began + self._period_s - self._clock())
