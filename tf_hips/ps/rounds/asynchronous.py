# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds: each child has rounds of its own (`lanes`), and waits for nobody.

    packet of a child -> decode -> rule -> total of all steps
                                             |
    received of that child ------> total - received -> encode -> its answer, kept
             ^                                                      |
             +---------------------- + decode <---------------------+

A server keeps no weights, only what they have moved by: the total of all steps, and of each child
what it has received of it. What its answer did not hold is in the difference of the next one, so
the way down has error feedback without a residual; and what a child has is known exactly, which is
the shadow copy that DC-ASGD needs.

Invariants:
- (round, child, chunk) counts once. What was delivered before is taken for the same packet and
  dropped; the answer to it is kept for a child that asks again, and in the past (`past`) for one
  that comes back.
- The packets of a chunk are applied in the order of their records, whichever threads bring them: a
  server that is restored from these records computes the same bits.
- A packet that does not decode, is not finite, or makes something that is not, changes nothing.

Memory: the model's size for the total, for each slot of the rule, and for each child; and answers
of older rounds up to a limit, in snapshots too.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tf_hips.errors import NonFiniteError, PacketError
from tf_hips.ops import native, native_updates
from tf_hips.ops.compressor import CHUNK, Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rounds.lanes import Arrival, Lane, LaneRound
from tf_hips.ps.rounds.round import Packet
from tf_hips.ps.rules import UpdateRule, arrivals
from tf_hips.ps.rules.arrivals import Moved
from tf_hips.ps.rules.steps import Slots
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.past import MOST_IN_MEMORY
from tf_hips.ps.terms.recorder import Entry, Kind, Recorder
from tf_hips.ps.transport.wire import Buffer


class AsynchronousStore:
    """What all children together have moved, and the rounds of each. Thread-safe."""

    lane: ClassVar[type[Lane]] = Lane

    def __init__(
        self,
        model: Model,
        sites: Sequence[str],
        uplink: Compressor,
        downlink: Compressor,
        seed: int,
        rule: UpdateRule,
        *,
        first_rounds: Sequence[int] = (),
        changed: threading.Condition | None = None,
        recorder: Recorder | None = None,
        past_bytes: int = MOST_IN_MEMORY,
        shard: Shard = WHOLE,
    ) -> None:
        """A store in which nothing has moved.

        Args:
            model: the model all children have agreed on.
            sites: names of the children in child order.
            uplink: what the children's packets are encoded with; of a warm-up the stage of the
                child's round.
            downlink: what answers are encoded with, in the same way; what its error feedback would
                keep is in what a child has not received.
            seed: seed of the run.
            rule: an asynchronous one.
            first_rounds: the first round of each child; () for 0.
            changed: notified, with its lock held, whenever an answer or a refusal is new.
            recorder: is told each packet that is taken.
            past_bytes: limit of older answers, for children that come back; at most 256 MiB count.
            shard: which of the model's chunks are here; the others are other servers'.
        """
        self.model = model
        self.chunks = shard.chunks(model)
        self._is_here = frozenset(self.chunks)
        self.rule = rule
        self.changed = changed if changed is not None else threading.Condition()
        self.recorder = recorder if recorder is not None else Recorder()
        self._uplink = uplink
        self._downlink = downlink
        self._moved = {
            chunk: arrivals.unmoved(rule, model.chunks[chunk].size) for chunk in self.chunks
        }
        # Held from a packet's record until it is applied; never taken with `changed` held.
        self._turns = [threading.Lock() for _ in model.chunks]
        share = min(past_bytes, MOST_IN_MEMORY) // max(1, len(sites))
        firsts = first_rounds or [0] * len(sites)
        self._lanes = [
            self.lane(
                self,
                child,
                site,
                seed=downlink.encoder_seed(seed, f"server/{site}"),
                first_round=first,
                past_bytes=share,
            )
            for child, (site, first) in enumerate(zip(sites, firsts, strict=True))
        ]
        self._num_applying = 0
        self._is_held = False
        self._waiting: list[Callable[[], None]] = []  # apply what is recorded, in its order
        self._scratch = threading.local()

    @property
    def uplink_text(self) -> str:
        """What the children's packets are encoded with."""
        return self._uplink.text

    @property
    def downlink_text(self) -> str:
        """What answers are encoded with."""
        return self._downlink.text

    @property
    def round(self) -> int:
        """The newest round that any child has begun."""
        with self.changed:
            return max(lane.current.number for lane in self._lanes)

    def of(self, child: int) -> Lane:
        """The rounds of `child`."""
        return self._lanes[child]

    def archive(self) -> None:
        """Does nothing: a round is past when its child begins the next one."""

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """Greatest length of a packet of round `number` in bytes, by chunk number."""
        lengths = self.model.packet_bytes(self._uplink.at(number))
        return tuple(size * (chunk in self._is_here) for chunk, size in enumerate(lengths))

    def progress(self, child: int) -> tuple[int, int]:
        """The newest round of which `child` has delivered a chunk, and how many it has.

        The round before the first where it has delivered none.
        """
        with self.changed:
            lane = self._lanes[child]
            current = lane.current
            if current.delivered:
                return current.number, len(current.delivered)
            is_first = current.number == lane.first_round
            return current.number - 1, 0 if is_first else len(self.chunks)

    def residual_rms(self) -> float:
        """Root mean square of what children have not received, over all of them; of about now."""
        total, count = 0.0, 0
        for lane in self._lanes:
            for chunk, received in enumerate(lane.received):
                if received is not None:
                    owed = self._moved[chunk].total - received
                    total += float(np.square(owed, dtype=np.float64).sum())
                    count += owed.size
        return math.sqrt(total / max(1, count))

    def take(self, lane: Lane, number: int, chunk: int, data: Buffer | Packet) -> int:
        """Takes one packet of a child; 1 if it is new. Raises as `Lane.add`."""
        packet = np.frombuffer(data, np.uint8)
        with self.changed:
            if lane.is_past(number):
                return 0  # all of it was delivered before
            current = lane.get(number)
            if chunk in current.delivered:
                return 0
        gradient = self._decoded(lane, number, chunk, packet)
        with self._turns[chunk]:
            with self.changed:
                if chunk in current.delivered:  # the same child, over an older connection
                    return 0
                current.delivered.add(chunk)
                if self.recorder.is_keeping:
                    current.positions[chunk] = self.recorder.add(
                        Kind.PACKET, packet.data, round=number, child=lane.child, chunk=chunk
                    )
                arrival = Arrival(lane, current, chunk, packet, self._num_present())
                if self._is_held:
                    self._waiting.append(functools.partial(self._apply_late, arrival))
                    return 1
                self._num_applying += 1
            self._apply(arrival, gradient)
        return 1

    def capture(self) -> Iterator[Entry]:
        """What `restore` makes this store of; holds updates back until `release`.

        Called with the lock held. Updates that were recorded before are waited for when what
        follows is read, in the thread that reads.
        """
        with self.changed:
            self._is_held = True
            rounds = [(lane, *one) for lane in self._lanes for one in lane.rounds()]
        return self._captured(rounds)

    def _captured(
        self, rounds: list[tuple[Lane, int, list[tuple[int, Packet]] | LaneRound]]
    ) -> Iterator[Entry]:
        with self.changed:
            self.changed.wait_for(lambda: self._num_applying == 0)
        for lane, number, held in rounds:
            yield Kind.NEWEST, {"round": number, "child": lane.child}, b""
            answers = enumerate(held.results) if isinstance(held, LaneRound) else held
            for chunk, answer in answers:
                if answer is not None:
                    fields = {"round": number, "chunk": chunk, "child": lane.child}
                    yield Kind.RESULT, fields, answer.data
        for chunk, moved in self._moved.items():
            fields = {"chunk": chunk, "version": moved.version, "count": moved.slots.count}
            yield Kind.TOTAL, fields, moved.total.data.cast("B")
            for place, values in enumerate(moved.slots.arrays):
                yield Kind.SLOT, {"chunk": chunk, "slot": place}, values.data.cast("B")
        for lane in self._lanes:
            for chunk, received in enumerate(lane.received):
                if received is not None:
                    fields = {"chunk": chunk, "child": lane.child, "seen": lane.seen[chunk]}
                    yield Kind.RECEIVED, fields, received.data.cast("B")

    def release(self) -> None:
        """Applies what was held back, in the order of its records, and what comes from now on."""
        while True:
            with self.changed:
                waiting, self._waiting = self._waiting, []
                if not waiting:
                    self._is_held = False
                    return
                self._num_applying += len(waiting)
            for apply in waiting:
                apply()
                with self.changed:
                    self.changed.notify_all()

    def restore(self, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
        """Takes an entry of `capture`; entries come in its order.

        Raises:
            ValueError: it does not fit the model or the rule.
        """
        match kind:
            case Kind.NEWEST:
                self._lanes[fields["child"]].replace(fields["round"])
            case Kind.RESULT:
                current, chunk = self._lanes[fields["child"]].current, fields["chunk"]
                current.results[chunk] = np.frombuffer(data, np.uint8)
                current.order.append(chunk)
                current.delivered.add(chunk)
            case Kind.TOTAL:
                total = self._floats(fields["chunk"], data)
                slots = Slots(fields["count"])
                self._moved[fields["chunk"]] = Moved(total, fields["version"], slots)
            case Kind.SLOT:
                chunk = fields["chunk"]
                before = self._moved[chunk]
                arrays = (*before.slots.arrays[: fields["slot"]], self._floats(chunk, data))
                slots = Slots(before.slots.count, arrays)
                self._moved[chunk] = Moved(before.total, before.version, slots)
            case Kind.RECEIVED:
                lane, chunk = self._lanes[fields["child"]], fields["chunk"]
                lane.received[chunk] = self._floats(chunk, data)
                lane.seen[chunk] = fields["seen"]
            case _:
                raise ValueError(f"its kind is {kind!r}")

    def _floats(self, chunk: int, data: Buffer) -> Floats:
        values = np.frombuffer(data, np.float32).copy()
        if values.size != self.model.chunks[chunk].size:
            raise ValueError(f"chunk {chunk} has {values.size} elements")
        return values

    def _decoded(self, lane: Lane, number: int, chunk: int, packet: Packet) -> Floats:
        """The finite values of a packet, in memory of this thread."""
        size = self.model.chunks[chunk].size
        if not hasattr(self._scratch, "values"):
            self._scratch.values = np.empty(CHUNK, np.float32)
            self._scratch.owed = np.empty(CHUNK, np.float32)
        values: Floats = self._scratch.values[:size]
        where = f"Site `{lane.site}`, round {number}, {self.model.describe(chunk)}"
        try:
            native.decode(
                self.model.codec(self._uplink.at(number), chunk), packet, size, out=values
            )
        except PacketError as error:
            raise PacketError(f"{where}: {error}") from error
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"{where}: a gradient must be finite. Received: "
                f"{int(np.count_nonzero(~np.isfinite(values)))} values that are not"
            )
        return values

    def _apply_late(self, arrival: Arrival) -> None:
        """Applies what was held back."""
        gradient = self._decoded(arrival.lane, arrival.round.number, arrival.chunk, arrival.packet)
        # The child is told of a refusal when it looks for results.
        with contextlib.suppress(NonFiniteError), self._turns[arrival.chunk]:
            self._apply(arrival, gradient)

    def _apply(self, arrival: Arrival, gradient: Floats) -> None:
        """Applies one update in its turn, and answers it."""
        current, chunk = arrival.round, arrival.chunk
        answer: Packet | None = None
        refusal = (
            f"Site `{arrival.lane.site}`, round {current.number}, {self.model.describe(chunk)}: "
        )
        try:
            answer = self._answer(arrival, gradient)
        except NonFiniteError as error:
            refusal += (
                f"{error}; the largest value of this gradient is {np.abs(gradient).max():.3g}"
            )
            raise NonFiniteError(refusal) from None
        finally:
            with self.changed:
                self._num_applying -= 1
                if answer is None:
                    current.delivered.discard(chunk)  # as if it had not come
                    current.refusals.append((current.positions[chunk], NonFiniteError(refusal)))
                else:
                    current.results[chunk] = answer
                    current.order.append(chunk)
                if self._num_applying == 0:
                    self.changed.notify_all()  # a snapshot waits for it

    def _answer(self, arrival: Arrival, gradient: Floats) -> Packet:
        lane, chunk, number = arrival.lane, arrival.chunk, arrival.round.number
        where = self.model.chunks[chunk]
        received = lane.received[chunk]
        if received is None:
            received = np.zeros(where.size, np.float32)
        changes = self._changes(arrival, gradient, received)
        after = changes[chunk]
        codec = self.model.codec(self._downlink.at(number), chunk).codec
        room = self._scratch.owed[: where.size]
        owed = native_updates.add_scaled(after.total, received, -1.0, out=room)
        packet = native.encode(
            codec, owed, native.Key(lane.seed, number, where.tensor, where.offset)
        )
        decoded = native.decode(codec, packet, where.size, out=room)
        got = native_updates.add_scaled(received, decoded, 1.0)
        for place, one in changes.items():
            self._move(place, one, arrival.round.positions[chunk])
        lane.received[chunk], lane.seen[chunk] = got, after.version
        return packet

    def _changes(self, arrival: Arrival, gradient: Floats, received: Floats) -> Mapping[int, Moved]:
        """What an update makes of chunks, its own among them; nothing is changed yet.

        Args:
            arrival: the update.
            gradient: its values, which stay as they are until it is applied.
            received: what its child has of the chunk.

        Raises:
            NonFiniteError: something of it would not be finite.
        """
        before = self._moved[arrival.chunk]
        staleness = before.version - arrival.lane.seen[arrival.chunk]
        after = arrivals.apply(self.rule, gradient, before, received, staleness)
        return {arrival.chunk: after}

    def _num_present(self) -> int:
        """Children that may bring updates now; with the lock held."""
        return len(self._lanes)

    def _move(self, chunk: int, after: Moved, position: int) -> None:
        """Takes what an update makes of a chunk, in the chunk's turn.

        Args:
            chunk: its number.
            after: what it is now.
            position: of the update's record.

        Raises:
            NonFiniteError: something of it would not be finite; nothing has changed then.
        """
        del position
        self._moved[chunk] = after
