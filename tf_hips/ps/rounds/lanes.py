# SPDX-License-Identifier: Apache-2.0
"""The rounds of each child where nobody waits for anybody: what has come of them, and the answers.

What an update makes of the model is the store's (`asynchronous`). Here is which rounds a child may
begin, which packets of them count, and which answers may be told.

Invariants:
- A child has one open round. The one before it is over, and its answers are in the past (`past`)
  for a child that comes back.
- An answer is told when the records that it was made of are durable.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Protocol

from tf_hips.errors import NonFiniteError, ProtocolError
from tf_hips.ops.native import Floats
from tf_hips.ps.rounds.round import Packet
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.past import Past
from tf_hips.ps.terms.recorder import AheadError, Recorder
from tf_hips.ps.transport.wire import Buffer


class Updated(Protocol):
    """What takes the packets of lanes, a store."""

    @property
    def model(self) -> Model:
        """The model all children have agreed on."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Which of its chunks are here."""

    @property
    def rule(self) -> UpdateRule:
        """What becomes of an update."""

    @property
    def changed(self) -> threading.Condition:
        """Notified when there is anything new; its lock is that of all lanes."""

    @property
    def recorder(self) -> Recorder:
        """Is told each packet that is taken."""

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """Greatest length of a packet of round `number` in bytes, by chunk number."""

    def take(self, lane: "Lane", number: int, chunk: int, data: Buffer | Packet) -> int:
        """Takes one packet of a child; 1 if it is new. Raises as `Lane.add`."""


class LaneRound:
    """One round of one child: what has come of it, and the answers."""

    def __init__(self, number: int, num_chunks: int) -> None:
        self.number = number
        self.delivered: set[int] = set()
        self.results: list[Packet | None] = [None] * num_chunks
        self.positions = [0] * num_chunks  # of each packet's record
        self.order: list[int] = []  # chunk numbers in the order of their answers
        self.refusals: list[tuple[int, NonFiniteError]] = []  # each with the packet's position


class Lane:
    """The rounds of one child. Its lock is the store's."""

    def __init__(
        self,
        store: Updated,
        child: int,
        site: str,
        *,
        seed: int,
        first_round: int,
        past_bytes: int,
    ) -> None:
        """A child that has got nothing; `seed`: of what encodes its answers."""
        self.first_round = first_round
        self.model = store.model
        self.site = site
        self.seed = seed
        self.chunks = store.chunks
        num_chunks = len(self.model.chunks)
        self.current = LaneRound(first_round, num_chunks)
        self.received: list[Floats | None] = [None] * num_chunks  # None: zeros
        self.seen = [0] * num_chunks  # versions of the answers
        self.past = Past(past_bytes)
        self._store = store
        self._child = child
        self._changed = store.changed

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """Greatest length of a packet of round `number` in bytes, by chunk number."""
        return self._store.packet_limits(number)

    def begin(self, number: int) -> bool:
        """Makes round `number` ready for packets; one that is there already is left as it is.

        Returns:
            Whether it is new.

        Raises:
            ProtocolError: it is neither the child's newest round nor the next one, or that one is
                not answered yet.
        """
        with self._changed:
            newest = self.current.number
            if number == newest or self.past.has(number):
                return False
            if number != newest + 1:
                text = (
                    f"The round of site `{self.site}` must be one of {self.oldest} to "
                    f"{newest + 1}. Received: round {number}"
                )
                if number > newest:
                    raise AheadError(text, f"round {number}", f"round {newest}")
                raise ProtocolError(text)
            num_chunks = len(self.chunks)
            if len(self.current.order) < num_chunks:
                raise ProtocolError(
                    f"Round {number} cannot begin before round {newest} is answered: "
                    f"{len(self.current.order)} of {num_chunks} chunks are."
                )
            self.replace(number)
            return True

    def replace(self, number: int) -> None:
        """Makes `number` the newest round, and the one before it past; with the lock held."""
        before = self.current
        if len(before.order) == len(self.chunks):
            self.past.append(before.number, self._ordered(before))
        self.current = LaneRound(number, len(self.model.chunks))

    @property
    def round(self) -> int:
        """The newest round of the child."""
        return self.current.number

    @property
    def oldest(self) -> int:
        """The oldest round whose answers are kept."""
        with self._changed:
            older = self.past.oldest
            return self.current.number if older is None else older

    def is_past(self, number: int) -> bool:
        """Whether round `number` is over, and nothing of it is taken in any more."""
        with self._changed:
            return number != self.current.number and self.past.has(number)

    def past_results(self, number: int) -> list[tuple[int, Packet]]:
        """The answers of a round that is over: pairs of chunk number and packet.

        Raises:
            ProtocolError: they are no longer kept.
        """
        try:
            return list(self.past.results(number))
        except KeyError as error:
            raise self._not_kept(number) from error

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Refuses weights: updates that come one by one are not averaged."""
        raise ProtocolError(
            f"Rule {self._store.rule} takes no weights of children. Received: {weight:g} from "
            f"site `{self.site}`"
        )

    def add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        """Takes packets of round `number`: pairs of chunk number and packet.

        Returns:
            How many of them were new.

        Raises:
            PacketError: a packet is cut off, too long or of another codec; those before it are
                taken.
            NonFiniteError: a packet, or what it makes of the weights, holds NaN or an infinity.
            ProtocolError: the round was not begun.
        """
        try:
            return sum(self._store.take(self, number, *packet) for packet in packets)
        finally:
            with self._changed:
                self._changed.notify_all()

    def results(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """The answers of round `number`, in their order, after the first `after`.

        Returns:
            The value for `after` next time, and pairs of chunk number and packet.
        """
        with self._changed:
            current = self.get(number)
            durable = self._store.recorder.durable
            news: list[tuple[int, Packet]] = []
            for chunk in current.order[after:]:
                result = current.results[chunk]
                if current.positions[chunk] > durable or result is None:
                    break
                after += 1
                news.append((chunk, result))
            return after, news

    def refusals(self, number: int) -> list[NonFiniteError]:
        """Why chunks of round `number` had to be delivered anew, oldest first."""
        with self._changed:
            if self.is_past(number):
                return []
            durable = self._store.recorder.durable
            return [error for position, error in self.get(number).refusals if position <= durable]

    def has_refused(self, number: int) -> bool:
        """Whether chunks of round `number` have to be delivered anew, also if nobody may know."""
        with self._changed:
            return not self.is_past(number) and bool(self.get(number).refusals)

    def delivered(self, number: int, child: int) -> frozenset[int]:
        """The chunks that the child has delivered in round `number`."""
        with self._changed:
            if self.is_past(number):
                return frozenset(self.chunks)
            return frozenset(self.get(number).delivered)

    def awaits(self, number: int, child: int) -> bool:
        """Never: no update is late."""
        return False

    def is_merged(self, number: int) -> bool:
        """Whether all chunks of round `number` are answered and may be told."""
        with self._changed:
            if self.is_past(number):
                return True
            current = self.get(number)
            if len(current.order) < len(self.chunks):
                return False
            recorder = self._store.recorder
            return not recorder.is_keeping or max(current.positions, default=0) <= recorder.durable

    def missing(self, number: int) -> dict[str, int]:
        """The child itself, if it owes chunks of round `number`, with how many have come."""
        with self._changed:
            if self.is_past(number):
                return {}
            count = len(self.get(number).delivered)
            return {self.site: count} if count < len(self.chunks) else {}

    def get(self, number: int) -> LaneRound:
        """Round `number`; the store's lock must be held.

        Raises:
            ProtocolError: it is not the newest one.
        """
        if number != self.current.number:
            raise self._not_kept(number)
        return self.current

    def rounds(self) -> list[tuple[int, list[tuple[int, Packet]] | LaneRound]]:
        """All that is kept, oldest first: older rounds by their answers, and the newest one."""
        numbers = range(self.oldest, self.current.number)
        return [
            *((number, self.past_results(number)) for number in numbers),
            (self.current.number, self.current),
        ]

    def _not_kept(self, number: int) -> ProtocolError:
        return ProtocolError(
            f"Rounds {self.oldest} to {self.current.number} of site `{self.site}` are kept. "
            f"Received: round {number}"
        )

    @staticmethod
    def _ordered(finished: LaneRound) -> list[tuple[int, Packet]]:
        answers = [(chunk, finished.results[chunk]) for chunk in finished.order]
        return [(chunk, packet) for chunk, packet in answers if packet is not None]

    @property
    def child(self) -> int:
        """Position of the child."""
        return self._child


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One packet, as it was recorded.

    Attributes:
        lane: of its child.
        round: which of the child's.
        chunk: its number.
        packet: the bytes that came.
        present: children that could bring updates at that moment.
    """

    lane: Lane
    round: LaneRound
    chunk: int
    packet: Packet
    present: int
