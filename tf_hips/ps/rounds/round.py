# SPDX-License-Identifier: Apache-2.0
"""One synchronous round; and what the calls of one child see of rounds, whoever's these are."""

from collections.abc import Sequence
from typing import Protocol

from tf_hips.errors import NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ps.rounds.partial import Key, Late, Partial
from tf_hips.ps.rules.whole import Ruling
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.past import Packet
from tf_hips.ps.transport.wire import Buffer

__all__ = ["MAX_ROUND", "Packet", "Round", "Rounds", "TooFewRowsError"]

MAX_ROUND = 1 << 31
"""Numbers of rounds are steps of keys, which have 32 bits."""


class TooFewRowsError(ToleranceError, NonFiniteError):
    """A robust rule makes nothing of a round; to children it is a ToleranceError.

    In the server it goes the way of a sum that is refused.
    """


class Round:
    """One round: for each chunk the packets that have come, then the result."""

    def __init__(self, number: int, num_chunks: int, num_children: int) -> None:
        """Nothing has come."""
        self.number = number
        self.packets: list[dict[int, Packet]] = [{} for _ in range(num_chunks)]
        self.delivered: list[set[int]] = [set() for _ in range(num_children)]
        self.results: list[Packet | None] = [None] * num_chunks
        self.positions = [0] * num_chunks  # of the record of each chunk's newest packet
        self.num_merged = 0
        self.order: list[int] = []  # chunk numbers in the order in which they were merged
        self.refusals: list[tuple[int, NonFiniteError]] = []  # each with the chunk's position
        self.weights: dict[int, float] = {}  # what children stand for, of those that have said so
        self._cleared: set[int] = set()  # those whose weights are of before `clear`
        self.ups: dict[int, Packet] = {}  # merged for the server above, which has not answered
        self.up_order: list[int] = []
        # Of rounds that are closed, where they may be without some children:
        self.counted: tuple[int, ...] | None = None
        self.late: dict[Key, Late] = {}
        self.share: float | None = None
        self.ruling: Ruling | None = None  # of a rule of whole rounds, once it has decided

    def close(
        self,
        partial: Partial,
        counted: Sequence[int],
        late: Sequence[Key],
        chunks: Sequence[int],
    ) -> list[tuple[int, dict[int, Packet]]]:
        """Decides who counts; what others have delivered is late from now on.

        Args:
            partial: who has missed rounds.
            counted: the children, whose updates are complete.
            late: updates of older rounds that count, too.
            chunks: those that are here.

        Returns:
            Pairs of chunk and packets that are to be merged.

        Raises:
            ValueError: a late update is not there.
        """
        self.late = partial.claim(late)
        self.counted = tuple(counted)
        self.share = partial.share([*counted, *(child for child, _ in self.late)])
        absent = [child for child in range(len(self.delivered)) if child not in counted]
        came: dict[int, dict[int, Packet]] = {child: {} for child in absent}
        for child in absent:
            self.delivered[child] = set(chunks)  # what may come is `partial`'s
            for chunk in chunks:
                if child in self.packets[chunk]:
                    came[child][chunk] = self.packets[chunk].pop(child)
        partial.miss(self.number, came, self.weights)
        return [(chunk, self.packets[chunk]) for chunk in chunks]

    def weigh(self, child: int, site: str, weight: float, num_chunks: int) -> bool:
        """Notes what a child stands for, before its first packet; whether it is new.

        Raises:
            ProtocolError: it has said something else before.
        """
        is_anew = child in self._cleared and not self.delivered[child]
        self._cleared.discard(child)
        delivered = len(self.delivered[child])
        said = None if is_anew else self.weights.get(child)
        if said == weight or delivered == num_chunks:
            return False
        if delivered or said is not None:
            raise ProtocolError(
                f"The weight of site `{site}` in round {self.number} must stay what it was, "
                f"{1.0 if said is None else said:g}. Received: {weight:g}"
            )
        self.weights[child] = weight
        return True

    def complete(self, chunks: Sequence[int]) -> list[tuple[int, dict[int, Packet]]]:
        """All of `chunks` with their packets, once all children have delivered all of them.

        Each of them depends on the packet that came last.
        """
        if any(len(held) < len(chunks) for held in self.delivered):
            return []
        self.positions = [max(self.positions)] * len(self.positions)
        return [(chunk, self.packets[chunk]) for chunk in chunks]

    def clear(self) -> None:
        """Nothing has come: children do the round again, and may stand for something else.

        What one has said counts until it says something again.
        """
        self._cleared = set(self.weights)
        for packets in self.packets:
            packets.clear()
        for delivered in self.delivered:
            delivered.clear()

    def told(self, after: int, durable: int) -> tuple[int, list[tuple[int, Packet]]]:
        """Results after the first `after`, as far as records up to `durable` give them."""
        news: list[tuple[int, Packet]] = []
        for chunk in self.order[after:]:
            result = self.results[chunk]
            if self.positions[chunk] > durable:
                break
            after += 1
            if result is not None:
                news.append((chunk, result))
        return after, news

    def told_up(self, after: int, durable: int) -> tuple[int, list[tuple[int, Packet]]]:
        """The same of what waits for the server above."""
        news: list[tuple[int, Packet]] = []
        for chunk in self.up_order[after:]:
            if chunk in self.ups and self.positions[chunk] > durable:
                break
            after += 1
            if chunk in self.ups:
                news.append((chunk, self.ups[chunk]))
        return after, news


class Rounds(Protocol):
    """The rounds of one child; see `Store` and `asynchronous.Lane` for what each method does."""

    model: Model
    chunks: tuple[int, ...]  # those that are here
    first_round: int

    @property
    def round(self) -> int:
        """The newest round that has begun."""

    @property
    def oldest(self) -> int:
        """The oldest round whose results are kept."""

    def is_past(self, number: int) -> bool:
        """Whether round `number` is over, and nothing of it is taken in any more."""

    def past_results(self, number: int) -> list[tuple[int, Packet]]:
        """The results of a round that is over: pairs of chunk number and packet."""

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """Greatest length of a packet of round `number` in bytes, by chunk number."""

    def begin(self, number: int) -> bool:
        """Makes round `number` ready for packets; whether it is new."""

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Notes what `child` stands for in round `number`; whether it is new."""

    def add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        """Takes packets of `child`; how many of them were new."""

    def results(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """What may be told of round `number` after the first `after` chunks."""

    def refusals(self, number: int) -> list[NonFiniteError]:
        """Why chunks of round `number` had to be delivered anew, oldest first."""

    def has_refused(self, number: int) -> bool:
        """Whether chunks of round `number` have to be delivered anew."""

    def delivered(self, number: int, child: int) -> frozenset[int]:
        """The chunks that `child` has delivered in round `number`."""

    def awaits(self, number: int, child: int) -> bool:
        """Whether `child` gets results of a round when its late update is complete."""

    def is_merged(self, number: int) -> bool:
        """Whether all chunks of round `number` have results that may be told."""

    def missing(self, number: int) -> dict[str, int]:
        """Children that owe chunks of round `number`, by name, with how many have come."""
