# SPDX-License-Identifier: Apache-2.0
"""Synchronous rounds: packets of all children in, one merged packet per chunk out.

No socket, no clock, no file. Packets are told to a recorder; a result, or the refusal of a sum, is
seen when the packets that it was made of are durable.

    child 0 --packet--+
    child 1 --packet--+--> rule (sum in child order) --> residual + sum --> encode --> result, kept
    child 2 --packet--+       or an optimizer's step

How packets of a chunk are combined, and the state that this leaves behind, is `combining`'s; what
is told of rounds is `progress`'s; here is which packets of which round.

A chunk is merged as soon as all children have delivered it, whatever the other chunks do; a round
that may close without some children (`partial`) is merged when it is closed, of the same children
in all chunks; and a rule of whole rounds (`whole`) merges one when it is complete, or closed.
The result is kept while a child may still need it: when round r + 2 begins, r is over for all, or
for all but those that are late; its results go to the past (`past`), for these and for children
that come back.

With a server above there is no result yet: the encoded sum goes up, and what comes down from there
is the result (`finish`). Its residual, what the way up has missed, is kept here in the same way.

Invariants:
- (round, child, chunk) counts once. What was delivered before is taken for the same packet and
  dropped.
- Results depend on the packets, not on the order or the time of their arrival: packets merge in
  child order, the downlink's noise comes from (seed, round, tensor, element), the residual of a
  chunk belongs to that chunk.
- A packet that does not decode, or decodes to something that is not finite, never enters a round.
  Its sender may deliver a better one; the others notice nothing.
- Who counts in a round that closes without some is recorded, before any result is told.
"""

import contextlib
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from tf_hips.errors import NonFiniteError, ProtocolError
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.rounds.combining import Combining
from tf_hips.ps.rounds.norms import Norms, Note
from tf_hips.ps.rounds.partial import TOO_LATE, Key, Partial, late_packets
from tf_hips.ps.rounds.progress import Telling
from tf_hips.ps.rounds.round import Packet, Round
from tf_hips.ps.rounds.whole import Choose, Deciding, Refuse
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.past import Past
from tf_hips.ps.terms.recorder import AheadError, Kind, Recorder
from tf_hips.ps.transport.wire import Buffer

KEPT_ROUNDS = 2


# A round, one of its chunks, and the packets of the children that count.
Job = tuple[Round, int, dict[int, Packet]]


class Store(Telling):
    """The rounds of one model over a fixed list of children. Thread-safe."""

    def __init__(
        self,
        model: Model,
        sites: Sequence[str],
        uplink: Compressor,
        downlink: Compressor,
        seed: int,
        *,
        first_round: int = 0,
        updates: Updates | None = None,
        changed: threading.Condition | None = None,
        recorder: Recorder | None = None,
        shard: Shard = WHOLE,
        past: Past | None = None,
        site: str | None = None,
        partial: Partial | None = None,
        refuse: Refuse | None = None,
        choose: Choose | None = None,
        note_absurd: Note | None = None,
    ) -> None:
        """A store with all residuals zero.

        Args:
            model: the model all children have agreed on.
            sites: names of the children in child order, for messages and for the order of sums.
            uplink: what the children's packets are encoded with; of a warm-up the stage of the
                round.
            downlink: what results are encoded with, in the same way; error feedback, if any, is
                kept here.
            seed: seed of the run.
            first_round: the first round to be merged.
            updates: the rule, with its state; None: the sum.
            changed: notified, with its lock held, whenever a result or a refusal is new; its lock
                is the store's.
            recorder: is told each packet that is taken.
            shard: which of the model's chunks are here; the others are other servers'.
            past: keeps the results of rounds that are over; None keeps none.
            site: name towards the server above, which makes the results of what is encoded with
                `downlink` here; None: there is none.
            partial: who has missed rounds, where they may close without some children; None: they
                are merged when all have delivered.
            refuse: hears of rows that a rule of whole rounds has refused, without the lock; None:
                nobody does.
            choose: hears of rows that such a rule has chosen, in the same way.
            note_absurd: hears of rows of absurd norms that a robust rule of coordinates has borne,
                in the same way.
        """
        self.partial = partial
        self.model = model
        self.chunks = shard.chunks(model)
        self._is_here = frozenset(self.chunks)
        self.first_round = first_round
        self._sites = tuple(sites)
        self._uplink = uplink
        self._downlink = downlink
        self.is_passed_up = site is not None
        seed = downlink.encoder_seed(seed, "server" if site is None else f"party/{site}")
        norms = Norms(len(self.chunks), note_absurd) if note_absurd is not None else None
        self._combining = Combining(
            model, self.chunks, self._sites, uplink, downlink, seed, updates, norms
        )
        self._rule = self._combining.updates.rule
        self.residuals, self.residual_rms = self._combining.residuals, self._combining.residual_rms
        self.slots = self._combining.slots
        self.restore_residual = self._combining.restore_residual
        self.restore_slot = self._combining.restore_slot
        self.changed = changed if changed is not None else threading.Condition()
        self._deciding: Deciding | None = None
        if self._combining.updates.whole is not None:
            can_redo = partial is None
            self._deciding = Deciding(
                self._combining, self.changed, refuse, choose, can_redo=can_redo
            )
        self._recorder = recorder if recorder is not None else Recorder()
        self.past = past if past is not None else Past(0)
        self._archiving = threading.Lock()
        self._rounds = {first_round: self._new_round(first_round)}
        self._is_held = False
        self._waiting: list[Job] = []  # complete, not merged

    @property
    def uplink_text(self) -> str:
        """What the children's packets are encoded with."""
        return self._uplink.text

    @property
    def downlink_text(self) -> str:
        """What results are encoded with."""
        return self._downlink.text

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """Greatest length of a packet of round `number` in bytes, by chunk number; 0: not here."""
        lengths = self.model.packet_bytes(self._uplink.at(number))
        if len(self.chunks) == len(lengths):
            return lengths
        return tuple(size * (chunk in self._is_here) for chunk, size in enumerate(lengths))

    def begin(self, number: int) -> bool:
        """Makes round `number` ready for packets; one that is there already is left as it is.

        Returns:
            Whether it is new.

        Raises:
            ProtocolError: the round is neither kept nor the next one, or the round before it is not
                merged yet.
        """
        with self.changed:
            if number in self._rounds or self.past.has(number):
                return False
            newest = max(self._rounds)
            if number != newest + 1:
                advice = TOO_LATE if self.partial is not None and number < self.oldest else ""
                text = (
                    f"The round must be one of {self.oldest} to {newest + 1}. "
                    f"Received: round {number}{advice}"
                )
                if number > newest:
                    raise AheadError(text, f"round {number}", f"round {newest}")
                raise ProtocolError(text)
            if self._rounds[newest].num_merged < len(self.chunks):
                raise ProtocolError(
                    f"Round {number} cannot begin before round {newest} is merged: "
                    f"{self._rounds[newest].num_merged} of {len(self.chunks)} chunks are."
                )
            self._rounds[number] = self._new_round(number)
            return True

    def archive(self) -> None:
        """Moves rounds that all children have finished into the past, where they are read from.

        Writing takes a while, so the lock is free meanwhile.
        """
        with self._archiving:
            with self.changed:
                newest = max(self._rounds)
                over = [one for one in sorted(self._rounds) if one <= newest - KEPT_ROUNDS]
                finished = [(one, self._ordered(self._rounds[one])) for one in over]
            for number, results in finished:
                self.past.append(number, results)
                with self.changed:
                    self._rounds.pop(number, None)

    def of(self, child: int) -> "Store":
        """What `child` sees of the rounds: here all children see the same."""
        del child
        return self

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Notes what `child` stands for in round `number`, before its first packet.

        Returns:
            Whether it is new.

        Raises:
            ProtocolError: the rule takes no weights, or the child has said something else before.
        """
        if not self._rule.is_mean:
            raise ProtocolError(
                f"Rule {self._rule} takes no weights of children. Received: {weight:g} "
                f"from site `{self._sites[child]}`"
            )
        with self.changed:
            if self.partial is not None and self.partial.has_missed(number, child):
                late = self.partial
                return late.awaits(number, child) and late.weigh(number, child, weight)
            if self.is_past(number):
                return False
            return self._get(number).weigh(child, self._sites[child], weight, len(self.chunks))

    def add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        """Takes packets of `child` for round `number`: pairs of chunk number and packet.

        Returns:
            How many of them were new.

        Raises:
            PacketError: a packet is cut off, too long or of another codec; those before it are
                taken.
            NonFiniteError: a packet, or the sum of a chunk's packets, decodes to NaN or an
                infinity.
            ProtocolError: the round was not begun.
        """
        try:
            return self._add(number, child, packets)
        finally:
            # Once for all of a message's chunks: their results can share a message too.
            with self.changed:
                self.changed.notify_all()

    def _add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        num_new = 0
        for chunk, data in packets:
            packet = np.frombuffer(data, np.uint8)
            if not self._wants(number, child, chunk):
                continue
            self._combining.check(number, child, chunk, packet)
            with self.changed:
                if not self._wants(number, child, chunk):
                    continue  # the same child, over an older connection; or the round was closed
                num_new += 1
                position = 0
                if self._recorder.is_keeping:
                    position = self._recorder.add(
                        Kind.PACKET, packet.data, round=number, child=child, chunk=chunk
                    )
                if self.partial is not None and self.partial.has_missed(number, child):
                    self.partial.take(number, child, chunk, packet, position)
                    continue
                current = self._get(number)
                current.delivered[child].add(chunk)
                current.packets[chunk][child] = packet
                current.positions[chunk] = position
                if self.partial is not None:
                    continue
                if self._deciding is not None:
                    complete = current.complete(self.chunks)
                else:
                    held = current.packets[chunk]
                    complete = [(chunk, held)] if len(held) == len(self._sites) else []
                jobs: list[Job] = [(current, *one) for one in complete]
                if self._is_held:
                    self._waiting += jobs
                    continue
            self._merge_all(jobs)
        return num_new

    def _wants(self, number: int, child: int, chunk: int) -> bool:
        """Whether a packet is new, and counts when it is taken."""
        with self.changed:
            if self.partial is not None and self.partial.has_missed(number, child):
                return self.partial.takes(number, child, chunk)
            # Of a round that is past, all was delivered before.
            return not self.is_past(number) and chunk not in self._get(number).delivered[child]

    def close(self, number: int, children: Iterable[int], late: Iterable[Key]) -> list[Job]:
        """Decides who counts in a round; the first decision stands.

        Args:
            number: the round.
            children: whose updates are complete.
            late: updates of older rounds that count in this one.

        Returns:
            What `merge` does, without the lock.

        Raises:
            ValueError: an update is not complete.
        """
        partial = self.partial
        with self.changed:
            current = self._get(number)
            if partial is None or current.counted is not None:
                return []
            position, counted, late = 0, sorted(children), sorted(late)
            if not set(counted) <= set(self.whole(number)):
                raise ValueError(f"the updates of children {counted} in round {number}")
            jobs = [(current, *one) for one in current.close(partial, counted, late, self.chunks)]
            if self._recorder.is_keeping:
                keys = [list(key) for key in late]
                position = self._recorder.add(
                    Kind.CLOSED, round=number, children=counted, late=keys
                )
            current.positions = [position] * len(current.positions)
            if not self._is_held:
                return jobs
            self._waiting += jobs
            return []

    def merge(self, jobs: Iterable[Job]) -> None:
        """Merges what `close` has given; who waits is told of a sum that is refused."""
        with contextlib.suppress(NonFiniteError):
            self._merge_all(list(jobs))
        with self.changed:
            self.changed.notify_all()

    def _merge_all(self, jobs: Sequence[Job]) -> None:
        """Merges all that there is of a round; raises the first error when all is done."""
        if self._deciding is not None and jobs:
            packets = {chunk: held for _, chunk, held in jobs}
            self._deciding.decide(jobs[0][0], packets, len(self._sites))
        self._merge_each(jobs)

    def _merge_each(self, jobs: Sequence[Job]) -> None:
        """Merges chunks of a round that is decided, where that must be; errors as before."""
        refusal: NonFiniteError | None = None
        for job in jobs:
            try:
                self._merge(*job)
            except NonFiniteError as error:
                refusal = refusal if refusal is not None else error
            if len(jobs) > 1:  # whoever waits need not wait for the last of many
                with self.changed:
                    self.changed.notify_all()
        if self._deciding is not None and jobs:
            jobs[0][0].ruling = None  # it holds the packets
        if refusal is not None:
            raise refusal

    def finish(self, number: int, chunk: int, data: Buffer | Packet) -> None:
        """Takes the result of a chunk from the server above; the first one counts."""
        packet = np.frombuffer(data, np.uint8)
        with self.changed:
            current = self._get(number)
            if current.results[chunk] is not None:
                return
            if self._recorder.is_keeping:
                current.positions[chunk] = self._recorder.add(
                    Kind.PASSED_DOWN, packet.data, round=number, chunk=chunk
                )
            current.ups.pop(chunk, None)
            self._tell(current, chunk, packet)
            self.changed.notify_all()

    def hold(self) -> tuple[int, list[tuple[int, Packet]]]:
        """Holds merges back until `release`; a round has begun, and nothing of it is merged.

        Returns:
            The round, and the results of the one before it: pairs of chunk number and packet.
        """
        with self.changed:
            self._is_held = True
            newest = max(self._rounds)
            before = self._rounds.get(newest - 1)
            results = before.results if before is not None else []
            return newest, [
                (one, packet) for one, packet in enumerate(results) if packet is not None
            ]

    def release(self) -> None:
        """Merges what was held back, in the thread that calls, and what comes from now on."""
        with self.changed:
            self._is_held = False
            waiting, self._waiting = self._waiting, []
            self.changed.notify_all()
        self.merge(waiting)

    def restore_round(self, number: int) -> None:
        """Makes `number` the newest round, and the one before it, if there was one, merged."""
        with self.changed:
            self._rounds = {number: self._new_round(number)}
            if number > self.first_round:
                before = self._rounds[number - 1] = self._new_round(number - 1)
                before.delivered = [set(self.chunks) for _ in self._sites]
                before.counted = () if self.partial is not None else None
        self.past.restore(number - 1, len(self.chunks))

    def restore_result(self, number: int, chunk: int, packet: Buffer) -> None:
        """Gives a chunk of a merged round its result."""
        with self.changed:
            current = self._get(number)
            current.results[chunk] = np.frombuffer(packet, np.uint8)
            current.order.append(chunk)
            current.num_merged += 1

    def _new_round(self, number: int) -> Round:
        return Round(number, len(self.model.chunks), len(self._sites))

    def _ordered(self, finished: Round) -> list[tuple[int, Packet]]:
        results = [(chunk, finished.results[chunk]) for chunk in finished.order]
        return [(chunk, packet) for chunk, packet in results if packet is not None]

    def _merge(self, current: Round, chunk: int, packets: dict[int, Packet]) -> None:
        result: Packet | None = None
        try:
            late = list(late_packets(current.late, chunk))
            result = self._combining.combine(
                current.number,
                chunk,
                packets,
                current.weights,
                late,
                current.share,
                current.ruling,
            )
        except NonFiniteError as error:
            with self.changed:
                # Not `error` itself: while that is kept, so are the packets on its frames.
                current.refusals.append((current.positions[chunk], type(error)(str(error))))
            raise
        finally:
            with self.changed:
                current.packets[chunk] = {}
                for one in current.late.values():
                    one.packets.pop(chunk, None)
                if result is None and current.counted is not None:
                    pass  # it is decided who counts: the run ends (`session.round_call`)
                elif result is None:
                    # The children may deliver other packets: the chunk is as if none had come.
                    for delivered in current.delivered:
                        delivered.discard(chunk)
                elif not self.is_passed_up:
                    self._tell(current, chunk, result)
                elif current.results[chunk] is None:
                    current.ups[chunk] = result
                    current.up_order.append(chunk)

    def _tell(self, current: Round, chunk: int, result: Packet) -> None:
        current.results[chunk] = result
        current.order.append(chunk)
        current.num_merged += 1
