# SPDX-License-Identifier: Apache-2.0
"""Who counts in rounds that close without some of their children, and updates that come late.

    closed by a and b      c has missed the round
    late is "drop"         what c delivers of it is taken for nothing, and c gets the results
    late is "next"         it is kept; when it is whole it goes into the next round that closes

A round that c has missed is done by c like every other: it delivers, and gets the results that all
others got. So its replica stays equal with theirs.

Not thread-safe: the store's lock guards it.

Invariants:
- An update counts whole or not at all, in one round, once.
- What is here follows from the packets and closings that were recorded, in their order.
- Of each child at most `MOST_BEGUN` late updates have begun and are not whole, and at most one of
  which only the weight is known. Where one more begins, that of the oldest round is dropped: an
  honest child finishes a round before it begins the next, and one that never finishes any must not
  fill the memory.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tf_hips.ps.terms.past import Packet
from tf_hips.ps.terms.spans import Span, Spans

TOO_LATE = (
    ". This site is too far behind: the results of older rounds are not kept. Started again with "
    "BackupAndRestore it goes on from another site's backup; or let the server keep more "
    "(`--past-mb`) or wait longer (`--round-deadline`)"
)

Key = tuple[int, int]  # child, and the round of its update

MOST_BEGUN = 2
"""Late updates of one child of which packets have come, but not all: that which it was sending when
it was killed, and that which it sends now."""


@dataclasses.dataclass
class Late:
    """What has come of one late update.

    Attributes:
        packets: by chunk.
        weight: what the child stands for.
    """

    packets: dict[int, Packet] = dataclasses.field(default_factory=dict)
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class LatePacket:
    """A packet of an update that counts in a later round than it was made for."""

    child: int
    number: int
    packet: Packet
    weight: float


class Partial:
    """The rounds that children have missed, and their late updates."""

    def __init__(self, workers: Sequence[int], chunks: Sequence[int], *, carries: bool) -> None:
        """Nobody has missed a round.

        Args:
            workers: of each child, by which sums are scaled.
            chunks: that make an update whole.
            carries: whether late updates go into the next round; else they are dropped.
        """
        self._workers = tuple(workers)
        self._chunks = frozenset(chunks)
        self._carries = carries
        self._missed: dict[int, Spans] = collections.defaultdict(Spans)  # of each child
        self._late: dict[Key, Late] = {}
        self._pending: set[Key] = set()
        self._dropped: set[Key] = set()  # unfinished ones; for messages only
        self._positions: dict[Key, int] = {}  # of the newest record of each late update

    def has_missed(self, number: int, child: int) -> bool:
        """Whether round `number` was closed without `child`, and its update has not come since."""
        return child in self._missed and number in self._missed[child]

    def awaits(self, number: int, child: int, durable: int | None = None) -> bool:
        """Whether a late update of `child` is to be taken before it gets its results.

        Args:
            number: the round.
            child: who is late.
            durable: the position up to which records are; a whole update counts as taken when it
                is there. None: whatever is.
        """
        if self._carries and self.has_missed(number, child):
            return True
        position = self._positions.get((child, number))
        if durable is None or position is None:
            return False
        if position <= durable:
            del self._positions[child, number]
        return position > durable

    def takes(self, number: int, child: int, chunk: int) -> bool:
        """Whether a packet of a round that `child` has missed is new and wanted."""
        return self.awaits(number, child) and chunk not in self.delivered(number, child)

    def delivered(self, number: int, child: int) -> frozenset[int]:
        """The chunks of a round that `child` has missed which need not come any more."""
        if not self.awaits(number, child):
            return self._chunks
        late = self._late.get((child, number))
        return frozenset(late.packets) if late is not None else frozenset()

    def take(self, number: int, child: int, chunk: int, packet: Packet, position: int = 0) -> None:
        """Keeps a packet of a late update; a whole one waits for the next round that closes.

        Args:
            number: the round.
            child: who is late.
            chunk: of the update.
            packet: what has come.
            position: of its record.
        """
        self._positions[child, number] = position
        self._keep(number, child, chunk, packet)
        self._bound(child)

    def was_dropped(self, number: int, child: int) -> bool:
        """Whether a late update was dropped because it was not finished when others began."""
        return (child, number) in self._dropped

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Notes what `child` stands for in its late update; whether it is new."""
        late = self._late.get((child, number))
        if late is None:
            if weight == 1.0:
                return False  # what it stands for if it says nothing
            self._forget_weights(child)
            self._late[child, number] = Late(weight=weight)
            return True
        if late.weight == weight:
            return False
        late.weight = weight
        return True

    def miss(
        self, number: int, packets: Mapping[int, dict[int, Packet]], weights: Mapping[int, float]
    ) -> None:
        """A round is closed without some children.

        Args:
            number: the round.
            packets: of each such child what has come of its update, by chunk.
            weights: what children have said to stand for.
        """
        if not packets:
            return
        for child in packets:
            self._missed[child].add(number)
        if self._carries:
            for child, held in packets.items():
                if not held and child in weights:
                    self._forget_weights(child)
                if held or child in weights:
                    self._late[child, number] = Late(dict(held), weights.get(child, 1.0))
                    self._bound(child)

    @property
    def pending(self) -> list[Key]:
        """Late updates that are whole and count in the next round, in their order."""
        return sorted(self._pending)

    def claim(self, keys: Iterable[Key]) -> dict[Key, Late]:
        """Takes late updates out, for the round that they count in.

        Raises:
            ValueError: one of them is not there.
        """
        claimed = {}
        for key in sorted(keys):
            if key not in self._pending:
                raise ValueError(f"the late update {key} is not whole")
            self._pending.discard(key)
            claimed[key] = self._late.pop(key)
        return claimed

    def share(self, children: Iterable[int]) -> float | None:
        """What a sum over `children` is multiplied by, to stand for all; None: by nothing.

        Args:
            children: whose updates are in the sum, as often as they are.
        """
        total, counted = sum(self._workers), sum(self._workers[child] for child in children)
        return None if counted == total else total / counted

    def forget_before(self, oldest: int) -> None:
        """Rounds before `oldest` are not kept any more: nobody delivers in them."""
        for child, number in list(self._late):
            if number < oldest and self.has_missed(number, child):
                del self._late[child, number]
        for spans in self._missed.values():
            spans.drop_before(oldest)
        for key in [key for key in self._positions if key[1] < oldest]:
            del self._positions[key]
        self._dropped = {key for key in self._dropped if key[1] >= oldest}

    def kept(self) -> tuple[list[tuple[int, list[Span]]], list[tuple[Key, Late]]]:
        """What is restored: children with the rounds that they have missed, and late updates."""
        missed = [(child, list(spans)) for child, spans in sorted(self._missed.items())]
        return missed, sorted(self._late.items())

    def restore_missed(self, child: int, spans: Iterable[Span]) -> None:
        """Takes the rounds that `child` has missed, of `kept`."""
        self._missed[child] = Spans(spans)

    def restore_packet(self, number: int, child: int, chunk: int, packet: Packet) -> None:
        """Takes a packet of a late update of `kept`; none is dropped, for some are not yet whole.

        Args:
            number: the round.
            child: whose update it is.
            chunk: of the update.
            packet: what was kept.
        """
        self._keep(number, child, chunk, packet)

    def _keep(self, number: int, child: int, chunk: int, packet: Packet) -> None:
        late = self._late.setdefault((child, number), Late())
        late.packets[chunk] = packet
        if late.packets.keys() == self._chunks:
            self._pending.add((child, number))
            self._missed[child].discard(number)

    def _bound(self, child: int) -> None:
        """Drops what is too much of the unfinished updates of `child`: those of oldest rounds.

        Rounds decide, not times of arrival, which a server that is restored does not know.
        """
        begun = sorted(
            number
            for (one, number), late in self._late.items()
            if one == child and late.packets and (one, number) not in self._pending
        )
        for number in begun[:-MOST_BEGUN]:
            del self._late[child, number]
            self._positions.pop((child, number), None)
            self._missed[child].discard(number)
            self._dropped.add((child, number))

    def _forget_weights(self, child: int) -> None:
        """Forgets updates of `child` of which only the weight is known: each call says it anew."""
        for key in [key for key, late in self._late.items() if key[0] == child]:
            if not self._late[key].packets:
                del self._late[key]


def late_packets(late: Mapping[Key, Late], chunk: int) -> Iterator[LatePacket]:
    """The packets of one chunk of late updates, in their order."""
    for (child, number), one in sorted(late.items()):
        yield LatePacket(child, number, one.packets[chunk], one.weight)
