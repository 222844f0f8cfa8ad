# SPDX-License-Identifier: Apache-2.0
"""Whether anything goes on in a session, so that who waits may wait longer.

What a child brings buys time once, and only as it comes at a least rate on average: so one that
sends the same again, or asks for what is over, keeps nobody waiting, and one that sends a byte now
and then is missed in the end. What comes from servers above and beside is believed.
"""

import dataclasses
import threading
import time
from collections.abc import Iterable

# Seconds after which a child that waits is told that others are still sending.
TELLS_AFTER_S = 10.0
# At which the part of a child must come, or it buys no time. What it brings is seen by whole
# messages, so its link needs one of `wire.MESSAGE_BYTES` more in the time that others wait.
LEAST_BYTES_PER_S = 1024.0
# What a child that has come back does again.
ROUND, GATHER, BACKUP = "round", "gather", "backup"

# Processes of a child that buy time by what they do again while others wait in the same round.
_MOST_PROCESSES = 8


@dataclasses.dataclass
class _Part:
    """What a child has brought of a round.

    Attributes:
        number: the round, and how many refusals there were.
        came: how much of each chunk's packet has come at most, over any connection.
        total: the sum of that.
        bought: how often it has bought time.
    """

    number: tuple[int, int]
    came: dict[int, int] = dataclasses.field(default_factory=dict)
    total: int = 0
    bought: int = 0


@dataclasses.dataclass
class _Again:
    """What a child that has come back does again.

    Attributes:
        process: which one of the child's, counted.
        number: of what it has done last.
        newest: what others waited in.
        count: processes that have bought time since.
    """

    process: int = 0
    number: int = -1
    newest: int = -1
    count: int = 0


class Moves:
    """Whether anything goes on in a session. Thread-safe."""

    def __init__(self) -> None:
        """Nothing has moved."""
        self.count = 0  # approximately: who only reads it takes no lock
        self._lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        self._again: dict[tuple[int, str], _Again] = {}

    def note(self, count: int = 1) -> None:
        """Notes that something goes on.

        Who waits sees it when it wakes, at the latest when it would give up.
        """
        self.count += count

    def brought(
        self,
        child: int,
        number: tuple[int, int],
        pieces: Iterable[tuple[int, int]],
        step_bytes: float,
    ) -> None:
        """Notes what has come of a child's part of a round, so far as it is new.

        Its first byte buys time, and each `step_bytes` after it.

        Args:
            child: who sends.
            number: the round, and how many refusals it has had: after one all is sent again.
            pieces: pairs of chunk, and bytes of its packet that are there.
            step_bytes: what comes at the least rate in the time that others wait.
        """
        with self._lock:
            part = self._parts.get(child)
            if part is None or part.number < number:
                part = self._parts[child] = _Part(number)
            elif number < part.number:
                return
            for chunk, size in pieces:
                part.total += max(0, size - part.came.get(chunk, 0))
                part.came[chunk] = max(size, part.came.get(chunk, 0))
            due = 1 + int(part.total / step_bytes) if part.total else 0
            if due > part.bought:
                part.bought = due
                self.note()

    def done_again(self, child: int, kind: str, process: int, number: int, newest: int) -> None:
        """Notes that a child that has come back does again what was done before, each once.

        Args:
            child: who does it.
            kind: `ROUND`, `GATHER` or `BACKUP`.
            process: how often the child has come back; 0: not at all, and it buys nothing.
            number: of what it does; a process does them in order.
            newest: what others wait in meanwhile.
        """
        with self._lock:
            one = self._again.setdefault((child, kind), _Again())
            if newest > one.newest:
                one.newest, one.count = newest, 0
            if process > one.process:
                one.process, one.number = process, -1
                one.count += 1
            if process == one.process > 0 and number > one.number and one.count <= _MOST_PROCESSES:
                one.number = number
                self.note()

    def tells(self, count: int, since: float) -> bool:
        """Whether it is time to tell a child that others go on.

        Args:
            count: `count` as it was when the child began to wait.
            since: when that was, by the monotonic clock.
        """
        return self.count != count and time.monotonic() > since + TELLS_AFTER_S
