# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds below a server that has another one above it.

Children wait for nobody. After every `period` updates of a chunk, what these have moved goes up,
and what comes down from there is a step for all:

    update of a child -> total, drift          drift: what went up is not in it
    every `period`-th -> packet = encode(drift); drift - packet; the packet waits for its answer
    answer from above -> total - packet + answer

So a chunk's total is what all have agreed on above, what is on its way there, and the drift. What a
packet has missed stays in the drift, which is the error feedback of the way up; children get what
comes from above as they get each other's steps, in the difference to what they have received.

Invariants:
- The number of packets that go up, and what is in them but for answers, follows from updates alone:
  children that make as many updates elsewhere send as many rounds, however fast links are.
- Updates and answers of a chunk apply in the order of their records, so a server that is restored
  makes the same packets again.
- Nobody runs ahead for long: while more than `AHEAD` whole rounds wait for answers, answers to
  children wait, too. Packets of children are taken in, so no chunk of an older round is held up.

Memory: the model's size for the drift, beside that of `asynchronous`, and the packets on the way.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tf_hips.errors import NonFiniteError, PacketError, ProtocolError
from tf_hips.ops import native, native_updates
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rounds.lanes import Lane, LaneRound
from tf_hips.ps.rounds.round import Packet
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.rules.arrivals import Moved
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Entry, Kind
from tf_hips.ps.transport.wire import Buffer

# One round may be on its way while another is whole: links are never idle, and none runs away.
AHEAD = 1


@dataclasses.dataclass(frozen=True)
class Above:
    """What a server has to know of the one above it.

    Attributes:
        site: its own name there.
        uplink: what it sends up with.
        downlink: what comes down with.
        period: updates of a chunk, of all children together, after which it goes up.
        is_mean: whether the rule there averages its children; this one stands for its own.
    """

    site: str
    uplink: Compressor
    downlink: Compressor
    period: int
    is_mean: bool


class PeriodicLane(Lane):
    """The rounds of one child, whose answers wait while too much waits for the server above."""

    def results(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """The answers of round `number` after the first `after`, as far as they may be told."""
        with self._changed:
            return (after, []) if self._is_early() else super().results(number, after)

    def is_merged(self, number: int) -> bool:
        """Whether all chunks of round `number` are answered and may be told."""
        with self._changed:
            return (self.is_past(number) or not self._is_early()) and super().is_merged(number)

    def _is_early(self) -> bool:
        store = self._store
        return isinstance(store, PeriodicStore) and store.num_waiting > AHEAD


class PeriodicStore(AsynchronousStore):
    """What all children have moved, and what of it has gone up. Thread-safe."""

    lane: ClassVar[type[Lane]] = PeriodicLane

    def __init__(
        self,
        model: Model,
        sites: Sequence[str],
        uplink: Compressor,
        downlink: Compressor,
        seed: int,
        rule: UpdateRule,
        *,
        above: Above,
        **more: Any,
    ) -> None:
        """A store in which nothing has moved; `above` as it says, the rest as above of it."""
        super().__init__(model, sites, uplink, downlink, seed, rule, **more)
        self._above = above
        self._num_sites = len(sites)
        self._up_seed = above.uplink.encoder_seed(seed, f"party/{above.site}")
        self._drift = {
            chunk: np.zeros(model.chunks[chunk].size, np.float32) for chunk in self.chunks
        }
        self._updates = dict.fromkeys(self.chunks, 0)  # since the last packet
        self._sent = dict.fromkeys(self.chunks, 0)  # packets that were made
        self._answered = dict.fromkeys(self.chunks, 0)  # of these, by the server above
        # By round and chunk, each with the position of the record that it depends on.
        self._on_way: dict[tuple[int, int], tuple[int, Packet]] = {}
        self._orders: dict[int, list[int]] = {}
        self._num_whole = 0
        self._next_up = 0
        self._overflow: NonFiniteError | None = None  # of an answer, whenever it was applied

    @property
    def next_up(self) -> int:
        """The oldest round that the server above has not answered whole."""
        return self._next_up

    @property
    def num_waiting(self) -> int:
        """Rounds that are whole here, and not answered whole."""
        return self._num_whole - self._next_up

    def due(self) -> int | None:
        """The round of which something waits for the server above."""
        with self.changed:
            return self._next_up if self.ups(self._next_up, 0)[1] else None

    def weight(self, number: int) -> float | None:
        """What this server stands for, its children, if the rule above takes a mean."""
        del number
        return float(self._num_sites) if self._above.is_mean else None

    def ups(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """What waits for the server above, in the order of its making, after the first `after`.

        Only what was made of records that are durable: made again of others, it would be another.

        Returns:
            The value for `after` next time, and pairs of chunk number and packet.

        Raises:
            NonFiniteError: an answer was not applied, so nothing more may go up.
        """
        with self.changed:
            if self._overflow is not None:
                raise self._overflow
            news: list[tuple[int, Packet]] = []
            for chunk in self._order(number)[after:]:
                is_open = self._answered[chunk] == number
                waiting = self._on_way.get((number, chunk)) if is_open else None
                if waiting is not None and waiting[0] > self.recorder.durable:
                    break
                after += 1
                if waiting is not None:
                    news.append((chunk, waiting[1]))
            return after, news

    def finish(self, number: int, chunk: int, data: Buffer | Packet) -> None:
        """Takes the answer to a packet from the server above; the first one counts.

        Raises:
            PacketError: it is none; nothing has changed then.
            NonFiniteError: with it the chunk would not be finite.
        """
        packet = np.frombuffer(data, np.uint8)
        with self.changed:
            if self._answered[chunk] != number:
                return
        # Before it is recorded: a server that is restored takes all that was.
        answer = self._answer_of(number, chunk, packet)
        with self._turns[chunk]:
            with self.changed:
                if self._answered[chunk] != number:
                    return
                if (number, chunk) not in self._on_way:
                    raise ProtocolError(f"Chunk {chunk} of round {number} has not gone up.")
                if self.recorder.is_keeping:
                    self.recorder.add(Kind.PASSED_DOWN, packet.data, round=number, chunk=chunk)
                self._answered[chunk] += 1
                self._count()
                if self._is_held:
                    self._waiting.append(lambda: self._take_late(number, chunk, packet))
                    return
                self._num_applying += 1
            self._take(number, chunk, answer)

    def restore(self, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
        """Takes an entry of `capture`, or an answer from above.

        Raises:
            ValueError: it does not fit the model or the rule.
        """
        chunk = fields.get("chunk", 0)
        match kind:
            case Kind.PASSED_DOWN:
                with contextlib.suppress(NonFiniteError):  # `ups` ends the run, if that is on
                    self.finish(fields["round"], chunk, data)
            case Kind.DRIFT:
                self._drift[chunk] = self._floats(chunk, data)
                self._updates[chunk] = fields["updates"]
                self._sent[chunk], self._answered[chunk] = fields["sent"], fields["answered"]
                self._count()
            case Kind.ON_WAY:
                self._on_way[fields["round"], chunk] = 0, np.frombuffer(data, np.uint8)
            case _:
                super().restore(kind, fields, data)

    def _captured(
        self, rounds: list[tuple[Lane, int, list[tuple[int, Packet]] | LaneRound]]
    ) -> Iterator[Entry]:
        yield from super()._captured(rounds)
        for chunk, drift in self._drift.items():
            # Answers that wait for the end of the snapshot are in the journal behind it.
            with self.changed:
                late = [key for key in self._on_way if key[1] == chunk]
                answered = min((number for number, _ in late), default=self._sent[chunk])
                on_way = [(number, self._on_way[number, chunk][1]) for number, _ in sorted(late)]
            fields = {"chunk": chunk, "updates": self._updates[chunk], "sent": self._sent[chunk]}
            yield Kind.DRIFT, {**fields, "answered": answered}, drift.data.cast("B")
            for number, packet in on_way:
                yield Kind.ON_WAY, {"chunk": chunk, "round": number}, packet.data

    def _move(self, chunk: int, after: Moved, position: int) -> None:
        step = native_updates.add_scaled(after.total, self._moved[chunk].total, -1.0)
        drift = native_updates.add_scaled(self._drift[chunk], step, 1.0)
        packet = None
        if self._updates[chunk] + 1 >= self._above.period:
            number, where = self._sent[chunk], self.model.chunks[chunk]
            codec = self._up_codec(number, chunk)
            key = native.Key(self._up_seed, number, where.tensor, where.offset)
            packet = native.encode(codec, drift, key)
            sent = native.decode(codec, packet, where.size)
            drift = native_updates.add_scaled(drift, sent, -1.0)
        super()._move(chunk, after, position)
        self._drift[chunk] = drift
        with self.changed:
            self._updates[chunk] += 1
            if packet is not None:
                order = self._order(number)
                self._updates[chunk] = 0
                self._sent[chunk] += 1
                self._on_way[number, chunk] = position, packet
                order.append(chunk)
                self._count()

    def _take_late(self, number: int, chunk: int, packet: Packet) -> None:
        # Other chunks wait for the same snapshot; `ups` tells of it.
        with contextlib.suppress(NonFiniteError), self._turns[chunk]:
            self._take(number, chunk, self._answer_of(number, chunk, packet))

    def _answer_of(self, number: int, chunk: int, packet: Packet) -> Floats:
        """The values of an answer from above.

        Raises:
            PacketError: it is none.
        """
        down = self.model.codec(self._above.downlink.at(number), chunk).codec
        try:
            return native.decode(down, packet, self.model.chunks[chunk].size)
        except PacketError as error:
            raise PacketError(
                f"The server above, round {number}, {self.model.describe(chunk)}: {error}"
            ) from error

    def _take(self, number: int, chunk: int, answer: Floats) -> None:
        """Applies the values of an answer from above in its turn."""
        size, before = self.model.chunks[chunk].size, self._moved[chunk]
        try:
            up = self._on_way[number, chunk][1]
            sent = native.decode(self._up_codec(number, chunk), up, size)
            left = native_updates.add_scaled(before.total, sent, -1.0)
            total = native_updates.add_scaled(left, answer, 1.0)
            self._moved[chunk] = Moved(total, before.version + 1, before.slots)
        except NonFiniteError as error:
            self._overflow = error
            raise
        finally:
            with self.changed:
                del self._on_way[number, chunk]
                self._num_applying -= 1
                self.changed.notify_all()

    def _order(self, number: int) -> list[int]:
        """Chunks of a round in the order of their packets, those that are answered included."""
        if number not in self._orders:
            self._orders[number] = [one for one in self.chunks if self._sent[one] > number]
        return self._orders[number]

    def _count(self) -> None:
        self._num_whole = min(self._sent.values(), default=0)
        self._next_up = min(self._answered.values(), default=0)
        for number in [one for one in self._orders if one < self._next_up]:
            del self._orders[number]

    def _up_codec(self, number: int, chunk: int) -> Compressor:
        # What its error feedback would keep stays in the drift.
        return self.model.codec(self._above.uplink.at(number), chunk).codec
