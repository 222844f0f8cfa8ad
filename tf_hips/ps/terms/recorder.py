# SPDX-License-Identifier: Apache-2.0
"""What a session accepts, in the words of a journal; and the recorder that keeps nothing.

A record is what a child has brought and the session has taken in, never what the session made of
it: who has joined, models, first weights, values of gathers, packets, who has left, how the run
ended. Fed to another session in the same order, they make the same state, bit for bit. A snapshot
adds what would take all rounds to make again: residuals, what rules keep, and the results of the
last round.

    payload = u32 bytes of JSON | JSON, an object | bytes
"""

import enum
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.past import Past
from tf_hips.ps.transport.wire import Buffer

_LENGTH = struct.Struct("<I")


@enum.unique
class Kind(enum.IntEnum):
    """What a record says. Numbers are part of the format."""

    JOINED = 1  # all children, when the last one has come
    MODEL = 2  # shapes and first round of one child
    DESCRIBED = 3  # what the first weights are
    WEIGHTS = 4  # bytes of them
    GATHERED = 5  # the payload of one child
    ROUND = 6  # a round has begun
    PACKET = 7  # of one child and chunk
    FAILED = 8  # a step of one child ended with an error
    LEFT = 9  # one child
    ENDED = 10  # the run, for a reason
    RETURNED = 11  # another process of one child
    BACKED_UP = 12  # one child can come back to a round and a gather
    WEIGHT = 13  # what one child stands for in a round
    CLOSED = 14  # a round, by the updates of some children
    LOST = 15  # one child, or that it is there again
    GATHER_CLOSED = 16  # a gather, without some children
    ARRIVED = 17  # updates, so many seconds after the opening of their round
    # Of children that vote:
    VOTED = 40  # what one child says its packets are, in a round
    TALLIED = 41  # whose packets are in a round, and which groups are not
    REPLICA = 42  # what decides on the bits of one child
    # Of a shard whose rule looks at whole rows:
    RULED = 50  # a round, by the verdict of shard 0
    # Of trees that are decided on sketches:
    SKETCHED = 51  # norms and sketches of one party's leaves, in a round
    WEIGHED = 52  # what the topmost server has given each leaf of a party, in a round
    # Of a server with one above it, what that one has answered:
    PASSED_DOWN = 30  # a chunk of a round
    ANSWERED = 31  # a gather, the payloads of all leaves
    LEFT_ABOVE = 32  # it knows that the run is over here
    # Of snapshots only:
    NEWEST = 20  # the round that begins
    RESULT = 21  # a chunk of the round before it
    RESIDUAL = 22  # of a chunk
    SLOT = 23  # of a rule, of a chunk
    TOTAL = 24  # of all steps, of a chunk; asynchronous rounds
    RECEIVED = 25  # what a child has of that
    MISSED = 26  # rounds, by children whose updates have not come
    LATE = 27  # a packet of an update that may count in a later round
    DRIFT = 28  # of a chunk, what has not gone up; asynchronous rounds below a server
    ON_WAY = 29  # a packet of a chunk that the server above has not answered
    BUFFERED = 33  # a packet of a row that waits for others; asynchronous rounds, a robust rule


Entry = tuple[Kind, dict[str, Any], Buffer]


class AheadError(ProtocolError):
    """A child comes to what is not the next thing yet; `what` that is, and `end` what is newest."""

    def __init__(self, text: str, what: str, end: str) -> None:
        super().__init__(text)
        self.what = what
        self.end = end


def to_payload(fields: dict[str, Any], data: Buffer) -> list[Buffer]:
    """The pieces of a record's payload."""
    head = json.dumps(fields, separators=(",", ":")).encode()
    return [_LENGTH.pack(len(head)), head, data]


def from_payload(payload: bytes) -> tuple[dict[str, Any], memoryview]:
    """Reads what `to_payload` wrote.

    Raises:
        ValueError: `payload` is something else.
    """
    if len(payload) < _LENGTH.size:
        raise ValueError(f"a record must have {_LENGTH.size} bytes or more")
    end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
    try:
        fields = json.loads(payload[_LENGTH.size : end])
    except RecursionError as error:
        raise ValueError("a record's object must not be nested without end") from error
    if not isinstance(fields, dict):
        raise ValueError("a record must begin with an object")
    return fields, memoryview(payload)[end:]


class Recorder:
    """Where a session tells what it accepts; this one keeps nothing, so nothing waits for it."""

    is_keeping = False
    restored_from: str | None = None
    """Where the session comes from; None: it has begun here."""
    is_disowned = False
    """Whether what is kept turned out to be older than the run."""

    @property
    def durable(self) -> int:
        """What depends on a record at this position, or one before it, may be told."""
        return 0

    def add(self, kind: Kind, data: Buffer = b"", **fields: Any) -> int:
        """Takes down one record; its position. `data` must not change later."""
        return 0

    def settle(self) -> str | None:
        """Waits until all that was taken down is durable; why it will never be, or None."""
        return None

    def disown(self, reason: str) -> None:
        """What is kept is older than the run, which ends: it stays as it is, without that end."""

    def make_past(self, limit_bytes: int) -> Past:
        """Where the results of a session's older rounds are kept."""
        return Past(limit_bytes)

    def begin_round(
        self,
        capture: Callable[[], Iterator[Entry]],
        done: Callable[[], None],
        archive: Callable[[], None],
    ) -> None:
        """A round has begun, and nothing was delivered in it: the time for a snapshot, if any.

        Args:
            capture: the whole state. What may change is copied when it is called; what it yields
                later does not change until `done` is called.
            done: called, by any thread, when all of it was read; not called without `capture`.
            archive: moves older rounds into the past, which must be durable when the snapshot is.
        """
