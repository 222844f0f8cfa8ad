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

A gather may be closed without some children (`quorum`): their payloads are absent for all, also
for themselves, and what they deliver later is dropped. There some may come with another label than
more than half of all children; their payloads stand in none's way, and are never counted.

Up travels one packet: u16 bytes of label | label, UTF-8 | payload. Down travels one packet for each
payload that is not empty, its leaf for a chunk number; and where leaves are absent, a bit for each
of them, as of one leaf more.

In a tree of servers these are the payloads of all leaves: what a party server sends up is the
bundle of those below it (`tree.bundle`), what it gets is the answer to its children, unchanged.

Invariants:
- (number, child) counts once. What is delivered again must be the same, and is dropped.
- Memory is at most three payloads a child (one that comes in, one delivered, one kept), and the
  limit for older ones. A length is checked before memory is taken for it.
"""

import collections
import struct
from collections import deque
from collections.abc import Iterable, Sequence

from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.terms import tree
from tf_hips.ps.terms.past import MOST_IN_MEMORY
from tf_hips.ps.terms.recorder import AheadError
from tf_hips.ps.transport.wire import Assembler, Buffer

LABEL_BYTES = 1000
_LENGTH = struct.Struct("<H")
# Of Python's objects, beside the bytes that have come.
_GATHER_BYTES, _PAYLOAD_BYTES = 512, 512


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


def to_bits(are_absent: Sequence[bool]) -> bytes:
    """Which leaves are absent: bit i of byte i // 8, the least one first."""
    number = sum(1 << place for place, is_absent in enumerate(are_absent) if is_absent)
    return number.to_bytes(bits_bytes(len(are_absent)), "little")


def bits_bytes(num_leaves: int) -> int:
    """Length of `to_bits` for so many leaves."""
    return (num_leaves + 7) // 8


def from_bits(bits: Buffer, num_leaves: int) -> list[bool]:
    """Reads what `to_bits` made."""
    number = int.from_bytes(bits, "little")
    return [bool(number >> place & 1) for place in range(num_leaves)]


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
        self.answer: list[memoryview | None] | None = None  # of the server above, for all leaves
        self.counted: frozenset[int] | None = None  # children, if it was closed without some

    @property
    def num_bytes(self) -> int:
        """About what it takes in memory: payloads may be of a few bytes each."""
        payloads = [*self.payloads.values(), *(one for one in self.answer or () if one is not None)]
        return _GATHER_BYTES + sum(_PAYLOAD_BYTES + len(payload) for payload in payloads)


class Gathers:
    """The gathers of one run. Not thread-safe: the session's lock guards it."""

    def __init__(self, num_children: int, limit: int, past_bytes: int = 0) -> None:
        """No gather has begun.

        Args:
            num_children: how many children there are.
            limit: greatest length of a payload in bytes.
            past_bytes: limit of gathers that all have gone on from; at most 256 MiB count, for they
                are in memory.
        """
        self.limit = limit
        self._past_limit = min(past_bytes, MOST_IN_MEMORY)
        self._num_children = num_children
        self._widths: list[int | None] = [None] * num_children
        self.is_passed_up = False  # whether the answers are those of a server above
        self._gathers = {0: _Gather()}
        self._needed = 0
        self.prologue = 0  # gathers before this one are what every process begins with
        self._live = [0]  # the two newest
        self._past_bytes = 0  # of the others, which are these, oldest first
        self._older: deque[int] = deque()
        self._opening: deque[int] = deque()  # of the prologue
        self._uploads: dict[int, Upload] = {}

    def shape(self, widths: Sequence[int | None], *, is_passed_up: bool) -> None:
        """All children are known.

        Args:
            widths: of each child that is a party server how many leaves it stands for.
            is_passed_up: whether there is a server above, which answers.
        """
        self._widths, self.is_passed_up = list(widths), is_passed_up

    def begin(self, child: int, number: int) -> Upload:
        """Takes in a call for gather `number`; an older one of the same child is given up.

        Raises:
            ProtocolError: it is not the gather's turn.
        """
        newest = self.newest
        if number == newest + 1 and self.is_over(newest):
            self._add(number)
        if number not in self._gathers:
            due, oldest = self._next(child), min(self._gathers)
            kept = f"one of {oldest} to {due}" if oldest < due else f"{due}"
            text = f"The gather must be {kept}, which is next. Received: gather {number}"
            if number >= due:
                raise AheadError(text, f"gather {number}", f"gather {due}")
            raise ProtocolError(f"{text}. Older ones are not kept: back up more often")
        if child in self._uploads:
            self._uploads[child].give_up()
        self._uploads[child] = Upload(self.limit)
        return self._uploads[child]

    def end(self, child: int, upload: Upload) -> None:
        """A call is over, or has come in."""
        if self._uploads.get(child) is upload:
            del self._uploads[child]

    def has(self, child: int, number: int) -> bool:
        """Whether the payload of `child` is there, or not asked for any more."""
        return number in self._gathers and (
            child in self._gathers[number].payloads or self.is_absent(child, number)
        )

    def is_absent(self, child: int, number: int) -> bool:
        """Whether gather `number` was closed without `child`."""
        gather = self._gathers.get(number)
        return gather is not None and gather.counted is not None and child not in gather.counted

    def is_closed(self, number: int) -> bool:
        """Whether it is decided who counts in gather `number`."""
        return not self.missing(number)

    def came(self, number: int) -> list[int]:
        """The children whose payloads of gather `number` are there, and are what most gather."""
        if number not in self._gathers:
            return []
        labels, agreed = self._gathers[number].labels, self.agreed(number)
        return sorted(child for child, label in labels.items() if label == agreed)

    def agreed(self, number: int) -> str | None:
        """What gather `number` is: what all say that have come, or else more than half of all.

        None where neither is so, perhaps not yet.
        """
        labels = self.labels(number)
        counts = collections.Counter(labels.values())
        [(label, count)] = counts.most_common(1) or [("", 0)]
        is_agreed = 0 < count == len(labels) or 2 * count > self._num_children
        return label if is_agreed else None

    def close(self, number: int, children: Iterable[int]) -> None:
        """Leaves out all but `children`, whose payloads are there, if the gather is kept."""
        gather = self._gathers.get(number)
        if gather is not None and gather.counted is None:
            gather.counted = frozenset(children)

    def closed(self) -> list[tuple[int, list[int]]]:
        """Pairs of number and children of gathers that were closed without some."""
        kept = sorted(self._gathers.items())
        return [(number, sorted(one.counted)) for number, one in kept if one.counted is not None]

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
        return self._live[-1]

    @property
    def are_whole(self) -> bool:
        """Whether all of them are kept, from the first one on."""
        return len(self._gathers) == self.newest + 1

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
        if gather is None or self.is_absent(child, number):
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
        width = self._widths[child]
        if width is not None:
            tree.unbundle(payload, width)  # its leaves' payloads, or an error
        gather.labels[child], gather.payloads[child] = label, payload
        return True

    @property
    def due(self) -> int | None:
        """The gather that the server above must be asked for; None where there is none."""
        newest = self.newest
        is_due = self.is_passed_up and not self.missing(newest) and not self.is_over(newest)
        return newest if is_due else None

    def up(self, number: int) -> tuple[str, bytes]:
        """Label and payload of a gather that all children have come to, for the server above."""
        gather = self._gathers[number]
        return self.agreed(number) or "", tree.bundle(self._leaves(gather))

    def take_answer(self, number: int, payloads: Sequence[Buffer | None]) -> None:
        """Takes the payloads of all leaves of the whole tree, if the gather is kept."""
        gather = self._gathers.get(number)
        if gather is None:
            return
        before = gather.num_bytes
        gather.answer = [None if one is None else memoryview(one) for one in payloads]
        if number not in self._live:  # as it is restored
            self._past_bytes += gather.num_bytes - before

    def answers(self) -> list[tuple[int, list[memoryview | None]]]:
        """Pairs of number and answer of the server above, of all that are kept."""
        kept = sorted(self._gathers.items())
        return [(number, one.answer) for number, one in kept if one.answer is not None]

    def is_over(self, number: int) -> bool:
        """Whether all that is asked for is there."""
        if self.missing(number):
            return False
        gather = self._gathers.get(number)
        return not self.is_passed_up or gather is None or gather.answer is not None

    def _leaves(self, gather: _Gather) -> list[memoryview | None]:
        payloads: list[memoryview | None] = []
        for child in range(self._num_children):
            width = self._widths[child]
            if gather.counted is not None and child not in gather.counted:
                payloads += [None] * (1 if width is None else width)
                continue
            data = gather.payloads[child]
            payloads += [data] if width is None else tree.unbundle(data, width)
        return payloads

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
                self._older.clear()
                self._opening.clear()
            self._add(number)
        self.deliver(child, number, label, payload)

    def missing(self, number: int) -> set[int]:
        """The children whose payload has not come, or is not what most gather."""
        if number not in self._gathers:
            return set()  # all had come, and gone on
        if self._gathers[number].counted is not None:
            return set()  # nobody is waited for
        return set(range(self._num_children)) - set(self.came(number))

    def answer(self, number: int, have: Iterable[int] = ()) -> list[tuple[int, Buffer]]:
        """Pairs of leaf and payload, in their order, but those in `have` and empty ones.

        Where leaves are absent, the last one is (number of leaves, which of them: a bit for each).

        Raises:
            ProtocolError: the gather is over, and all have gone on.
        """
        if number not in self._gathers:
            raise ProtocolError(f"Gather {number} is over. All sites have gone on.")
        gather = self._gathers[number]
        payloads = gather.answer if gather.answer is not None else self._leaves(gather)
        known = set(have)
        told: list[tuple[int, Buffer]] = [
            (leaf, one) for leaf, one in enumerate(payloads) if one and leaf not in known
        ]
        if any(one is None for one in payloads) and len(payloads) not in known:
            told.append((len(payloads), to_bits([one is None for one in payloads])))
        return told

    def _add(self, number: int) -> None:
        """Makes a gather ready; the one before the newest is over for all."""
        self._gathers[number] = _Gather()
        self._live.append(number)
        if len(self._live) > 2:
            self._older.append(self._live.pop(0))
            self._past_bytes += self._gathers[self._older[-1]].num_bytes
        self._trim()

    def _trim(self) -> None:
        while self._older and self._older[0] < self.prologue:
            self._opening.append(self._older.popleft())
        while first := self._older or self._opening:  # those of the prologue go last
            number = first[0]
            is_needed = number < self.prologue or number >= self._needed
            if is_needed and self._past_bytes <= self._past_limit:
                return
            self._past_bytes -= self._gathers.pop(first.popleft()).num_bytes

    def _next(self, child: int) -> int:
        kept = [*self._gathers, max(self._gathers) + 1]
        return min(number for number in kept if not self.has(child, number))
