# SPDX-License-Identifier: Apache-2.0
"""Small values of all children, for all children: what each sends, in child order, unchanged.

    child 0 --label, payload--+
    child 1 --label, payload--+--> [payload 0, payload 1, payload 2] to every child
    child 2 --label, payload--+

The server adds nothing up: it knows no types. A gather has a number, one more for each; a child
gives its payload for number n once, then asks for n + 1. So the children are at most one gather
apart. Gathers that all have gone on from are kept for children that come back and ask for them
again, up to a limit of bytes: the prologue, which is what came before the first round, and what
came since the oldest backup.

Up travels one packet: u16 bytes of label | label, UTF-8 | payload. Down travels one packet for each
payload that is not empty, its child for a chunk number.

Invariants:
- (number, child) counts once. What is delivered again must be the same, and is dropped.
- Memory is at most three payloads a child (one that comes in, one delivered, one kept), and the
  limit for older ones. A length is checked before memory is taken for it.
"""

import struct
from collections.abc import Iterable

from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.wire import Assembler, Buffer

LABEL_BYTES = 1000
_LENGTH = struct.Struct("<H")


def to_packet(label: str, payload: Buffer) -> bytes:
    """The packet that `Upload` reads.

    Raises:
        ValueError: the label is empty or too long.
    """
    name = label.encode()
    if not 0 < len(name) <= LABEL_BYTES:
        raise ValueError(f"`label` must have 1 to {LABEL_BYTES} bytes. Received: {len(name)} bytes")
    return b"".join((_LENGTH.pack(len(name)), name, payload))


class Upload:
    """The payload of one child, as it comes in over one connection."""

    def __init__(self, limit: int) -> None:
        """Nothing has come.

        Args:
            limit: greatest length of the payload in bytes.
        """
        self._limit = limit
        self._assembler: Assembler | None = Assembler([_LENGTH.size + LABEL_BYTES + limit])
        self._packet: memoryview | None = None

    def feed(self, message: Buffer) -> None:
        """Takes in a message.

        Raises:
            ProtocolError: it is no part of one packet, or too long.
            PeerError: the child has come again over another connection.
        """
        assembler = self._assembler
        if assembler is None:
            raise PeerError("The site has come again over another connection.")
        for _, packet in assembler.feed(message):
            if self._packet is not None:
                raise ProtocolError("A gather has one packet of each site. Received: more")
            self._packet = packet

    def finish(self) -> tuple[str, memoryview] | None:
        """Label and payload; None where nothing came.

        Raises:
            ProtocolError: what came is no such packet.
        """
        if self._assembler is None:
            raise PeerError("The site has come again over another connection.")
        self._assembler.finish()
        packet = self._packet
        if packet is None:
            return None
        length = _LENGTH.unpack_from(packet)[0] if len(packet) >= _LENGTH.size else 0
        payload = packet[_LENGTH.size + length :]
        if not 0 < length <= min(LABEL_BYTES, len(packet) - _LENGTH.size):
            raise ProtocolError(f"A label must have 1 to {LABEL_BYTES} bytes. Received: {length}")
        if len(payload) > self._limit:
            raise ProtocolError(too_long(len(payload), self._limit))
        try:
            return str(packet[_LENGTH.size : _LENGTH.size + length], "utf-8"), payload
        except UnicodeDecodeError as error:
            raise ProtocolError(f"A label must be UTF-8: {error}") from error

    def give_up(self) -> None:
        """Frees the memory; what comes after it is refused."""
        self._assembler, self._packet = None, None


def too_long(num_bytes: int, limit: int) -> str:
    """What is said about a payload beyond the limit."""
    return (
        f"An exact value must have at most {limit} bytes, the server's `max_gather_bytes` "
        f"(`--max-gather-mb`). Received: {num_bytes} bytes"
    )


class _Gather:
    """One gather: what has come, by child."""

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}
        self.payloads: dict[int, memoryview] = {}

    @property
    def num_bytes(self) -> int:
        return sum(len(payload) for payload in self.payloads.values())


class Gathers:
    """The gathers of one run. Not thread-safe: the session's lock guards it."""

    def __init__(self, num_children: int, limit: int, past_bytes: int = 0) -> None:
        """No gather has begun.

        Args:
            num_children: how many children there are.
            limit: greatest length of a payload in bytes.
            past_bytes: limit of gathers that all have gone on from.
        """
        self.limit = limit
        self._past_limit = past_bytes
        self._num_children = num_children
        self._gathers = {0: _Gather()}
        self._needed = 0
        self.prologue = 0  # gathers before this one are what every process begins with
        self._live = [0]  # the two newest
        self._past_bytes = 0  # of the others
        self._uploads: dict[int, Upload] = {}

    def begin(self, child: int, number: int) -> Upload:
        """Takes in a call for gather `number`; an older one of the same child is given up.

        Raises:
            ProtocolError: it is not the gather's turn.
        """
        newest = self.newest
        if number == newest + 1 and not self.missing(newest):
            self._add(number)
        if number not in self._gathers:
            due, oldest = self._next(child), min(self._gathers)
            kept = f"one of {oldest} to {due}" if oldest < due else f"{due}"
            raise ProtocolError(
                f"The gather must be {kept}, which is next. Received: gather {number}"
            )
        if child in self._uploads:
            self._uploads[child].give_up()
        self._uploads[child] = Upload(self.limit)
        return self._uploads[child]

    def end(self, child: int, upload: Upload) -> None:
        """A call is over, or has come in."""
        if self._uploads.get(child) is upload:
            del self._uploads[child]

    def has(self, child: int, number: int) -> bool:
        """Whether the payload of `child` is there."""
        return number in self._gathers and child in self._gathers[number].payloads

    def labels(self, number: int) -> dict[int, str]:
        """What each child that has come calls gather `number`."""
        return self._gathers[number].labels if number in self._gathers else {}

    def end_prologue(self) -> None:
        """Rounds begin: what came so far is what every process begins with."""
        over = self.newest + 1 if not self.missing(self.newest) else self.newest
        # What was restored stands: the model is told again before the gathers are there.
        self.prologue = max(self.prologue, over)

    @property
    def newest(self) -> int:
        """The newest gather that has begun."""
        return max(self._gathers)

    def need(self, number: int) -> None:
        """Gathers after the prologue and before `number` are not needed any more."""
        self._needed = max(self._needed, number)
        self._trim()

    @property
    def oldest(self) -> int:
        """The oldest gather that is kept."""
        return min(self._gathers)

    def deliver(
        self, child: int, number: int, label: str, payload: memoryview, *, is_again: bool = False
    ) -> bool:
        """Takes the payload of a child, the first time.

        Args:
            child: who sends it.
            number: the gather.
            label: what it is.
            payload: the bytes.
            is_again: whether the child has come back and may do what it has done before. What it
                sent then stands, whatever it sends now.

        Returns:
            Whether it was new.

        Raises:
            ProtocolError: the child has delivered something else under this number before. Others
                may have it, so none of the two can stand for the other.
        """
        gather = self._gathers.get(number)
        if gather is None:
            return False
        if child in gather.payloads:
            before = gather.labels[child], gather.payloads[child]
            if before != (label, payload) and not (is_again and label == before[0]):
                raise ProtocolError(
                    f"Gather {number} of a site must stay what it was when it is sent again: "
                    f"`{before[0]}`, {len(before[1])} bytes. Received: `{label}`, {len(payload)} "
                    "other bytes"
                )
            return False
        gather.labels[child], gather.payloads[child] = label, payload
        return True

    def kept(self) -> list[tuple[int, int, str, memoryview]]:
        """Child, number, label and payload of all that is there, oldest gather first."""
        return [
            (child, number, gather.labels[child], payload)
            for number, gather in sorted(self._gathers.items())
            for child, payload in gather.payloads.items()
        ]

    def restore(self, child: int, number: int, label: str, payload: memoryview) -> None:
        """Takes a payload that was kept; gathers before the first of them are over."""
        if number not in self._gathers:
            if not any(gather.payloads for gather in self._gathers.values()):
                self._gathers.clear()
                self._live, self._past_bytes = [], 0
            self._add(number)
        self.deliver(child, number, label, payload)

    def missing(self, number: int) -> set[int]:
        """The children whose payload has not come."""
        if number not in self._gathers:
            return set()  # all had come, and gone on
        return set(range(self._num_children)) - set(self._gathers[number].payloads)

    def answer(self, number: int, have: Iterable[int] = ()) -> list[tuple[int, Buffer]]:
        """Pairs of child and payload, in child order, but those in `have` and empty ones.

        Raises:
            ProtocolError: the gather is over, and all have gone on.
        """
        if number not in self._gathers:
            raise ProtocolError(f"Gather {number} is over. All sites have gone on.")
        payloads = self._gathers[number].payloads
        known = set(have)
        return [
            (child, payloads[child]) for child in sorted(set(payloads) - known) if payloads[child]
        ]

    def _add(self, number: int) -> None:
        """Makes a gather ready; the one before the newest is over for all."""
        self._gathers[number] = _Gather()
        self._live.append(number)
        if len(self._live) > 2:
            self._past_bytes += self._gathers[self._live.pop(0)].num_bytes
        self._trim()

    def _trim(self) -> None:
        older = [number for number in sorted(self._gathers) if number < self._live[0]]
        # Those of the prologue go last.
        older.sort(key=lambda number: number < self.prologue)
        for number in older:
            is_needed = number < self.prologue or number >= self._needed
            if is_needed and self._past_bytes <= self._past_limit:
                return
            self._past_bytes -= self._gathers.pop(number).num_bytes

    def _next(self, child: int) -> int:
        kept = [*self._gathers, max(self._gathers) + 1]
        return min(number for number in kept if not self.has(child, number))
