# SPDX-License-Identifier: Apache-2.0
"""What the children of a server have sent and got, counted as it moves."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator


@dataclasses.dataclass
class ChildTraffic:
    """The counts of one child, since the server began to listen.

    Attributes:
        received_bytes: messages of rounds, gathers and first weights, without HTTP/2 and TLS.
        sent_bytes: the same that went to it.
        rounds: rounds of which it has got all results.
        retries: calls that it made again after a connection had broken.
        last_call_s: when it called last, by the clock; None: never.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    rounds: int = 0
    retries: int = 0
    last_call_s: float | None = None


class Flow:
    """What moves in one call of a child: counted for the call and for the child as it passes.

    Attributes:
        received_bytes: of messages that have come.
        sent_bytes: of those that went.
    """

    def __init__(self, traffic: "Traffic", child: int) -> None:
        """Nothing has moved."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self._traffic = traffic
        self._child = child
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.monotonic() - self._began

    def coming(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """`messages` of the child, counted before each is looked at."""
        for message in messages:
            self.received_bytes += len(message)
            self._traffic.received(self._child, len(message))
            yield message

    def going(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """`messages` to the child, counted before each is sent."""
        for message in messages:
            self.sent_bytes += len(message)
            self._traffic.sent(self._child, len(message))
            yield message

    def told(self) -> dict[str, int]:
        """What an event says of it."""
        return {
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "duration_us": int(1e6 * self.seconds),
        }


class Traffic:
    """The counts of all children. Thread-safe."""

    def __init__(self, num_children: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has moved.

        Args:
            num_children: how many children there are.
            clock: tells seconds.
        """
        self._lock = threading.Lock()
        self._clock = clock
        self._children = [ChildTraffic() for _ in range(num_children)]
        self._began = clock()
        self._refused = 0
        self._round_s = 0.0
        self._rounds = 0

    def called(self, child: int, attempt: int) -> None:
        """A call of a child was taken; `attempt` is 0 the first time that it is made."""
        with self._lock:
            one = self._children[child]
            one.last_call_s = self._clock()
            one.retries += attempt > 0

    def received(self, child: int, num_bytes: int) -> None:
        """A message of a child has come."""
        with self._lock:
            self._children[child].received_bytes += num_bytes

    def sent(self, child: int, num_bytes: int) -> None:
        """A message goes to a child."""
        with self._lock:
            self._children[child].sent_bytes += num_bytes

    def finished_round(self, child: int, seconds: float) -> None:
        """A child has got all of a round, so long after its call came."""
        with self._lock:
            self._children[child].rounds += 1
            self._rounds += 1
            self._round_s += seconds

    def refused(self) -> None:
        """A call was refused."""
        with self._lock:
            self._refused += 1

    def read(self) -> tuple[list[ChildTraffic], dict[str, float]]:
        """The counts of each child, `last_call_s` as seconds ago; and those of all.

        The latter are `uptime_s`, `refused` (calls), `rounds` and `round_s`: calls of rounds that
        have ended well, and the seconds that they took.
        """
        with self._lock:
            now = self._clock()
            children = [
                dataclasses.replace(
                    one, last_call_s=None if one.last_call_s is None else now - one.last_call_s
                )
                for one in self._children
            ]
            return children, {
                "uptime_s": now - self._began,
                "refused": self._refused,
                "rounds": self._rounds,
                "round_s": self._round_s,
            }
