# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rounds under a robust rule: updates wait for each other, children for nobody.

    packet of a child -> row of that child (`rules.buffers`) -> k rows -> a step of the total
                      -> its answer, at once: what others have moved and the child has not got

Invariants, beside those of `asynchronous`:
- A child has one row in a step, its newest; an answer never waits for a step.
- Under a rule of whole rows all chunks have one turn: packets are applied in the order of their
  records, whatever chunk they are of, and a step is made in all of them with the packet that
  completes it. So a server that is restored decides the same, of the same rows.
- A row that was refused is gone; the others wait on. So is, of a rule of coordinates, the row with
  the largest value of a step that would not be finite: its child is named, not whoever came last.

Memory, beside that of `asynchronous`: the packets of one update of each child, as they came, and of
one more that is coming; in a step a chunk of float32 for each row, and with a rule of whole rows
the new total beside the old one.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tf_hips import log
from tf_hips.log import Tell
from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rounds.lanes import Arrival, Lane, LaneRound
from tf_hips.ps.rounds.round import Packet
from tf_hips.ps.rounds.whole import Choose
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.rules.arrivals import Moved, Row
from tf_hips.ps.rules.buffers import Buffers
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import Entry, Kind
from tf_hips.ps.transport.wire import Buffer

# Hears of children whose rows a rule has refused: the step, why, and their rounds, by child.
Refuse = Callable[[int, Mapping[int, str], Mapping[int, int]], None]


class BufferedStore(AsynchronousStore):
    """What all children have moved, and what waits for a robust rule. Thread-safe."""

    def __init__(
        self,
        model: Model,
        sites: Sequence[str],
        uplink: Compressor,
        downlink: Compressor,
        seed: int,
        rule: UpdateRule,
        *,
        present: Callable[[], int] | None = None,
        refuse: Refuse | None = None,
        choose: Choose | None = None,
        tell: Tell | None = None,
        **more: Any,
    ) -> None:
        """A store in which nothing has moved.

        Args:
            model: as above of it, and what is not named here.
            sites: names of the children in child order.
            uplink: what the children's packets are encoded with.
            downlink: what answers are encoded with.
            seed: seed of the run.
            rule: a robust one before `fedbuff`.
            present: how many children may bring updates; called with the lock held, and a function
                of what was recorded. None: all.
            refuse: hears of rows that the rule has refused; None: nobody does.
            choose: hears of rows that the rule has chosen; None: nobody does.
            tell: writes an event; None: nobody does.
            more: as above of it.
        """
        super().__init__(model, sites, uplink, downlink, seed, rule, **more)
        sizes = {chunk: model.chunks[chunk].size for chunk in self.chunks}
        self._buffers = Buffers(rule, sites, seed, sizes, self._read)
        self._present = present
        self._refuse = refuse
        self._choose = choose
        self._tell = tell
        self._is_short = False  # it was said that too few children are left
        if self._buffers.is_whole:
            self._turns = [threading.Lock()] * len(model.chunks)

    def restore(self, kind: Kind, fields: dict[str, Any], data: Buffer) -> None:
        """Takes an entry of `capture`; entries come in its order.

        Raises:
            ValueError: it does not fit the model or the rule.
        """
        if kind != Kind.BUFFERED:
            super().restore(kind, fields, data)
            return
        child, chunk = fields["child"], fields["chunk"]
        row = Row(np.frombuffer(data, np.uint8), fields["round"], fields["since"])
        before = self._moved[chunk]
        if fields["is_coming"]:
            after = dataclasses.replace(before, coming={**before.coming, child: row})
        else:
            after = dataclasses.replace(before, rows={**before.rows, child: row})
        self._moved[chunk] = after

    def _captured(
        self, rounds: list[tuple[Lane, int, list[tuple[int, Packet]] | LaneRound]]
    ) -> Iterator[Entry]:
        yield from super()._captured(rounds)
        for chunk, held in self._moved.items():
            for is_coming, rows in ((False, held.rows), (True, held.coming)):
                for child, row in rows.items():
                    whose = {"chunk": chunk, "child": child, "is_coming": is_coming}
                    fields = {**whose, "round": row.number, "since": row.since}
                    yield Kind.BUFFERED, fields, row.packet.data

    def _changes(self, arrival: Arrival, gradient: Floats, received: Floats) -> Mapping[int, Moved]:
        del gradient, received  # its values are read again when there are enough rows
        chunk, lane = arrival.chunk, arrival.lane
        outcome = self._buffers.add(
            self._moved,
            chunk,
            lane.child,
            Row(arrival.packet, arrival.round.number, lane.seen[chunk]),
            is_last=len(arrival.round.order) + 1 == len(self.chunks),
            present=arrival.present,
        )
        self._warn(arrival.present)
        if outcome.refused and self._refuse is not None:
            self._refuse(outcome.step, outcome.refused, outcome.rounds)
        if outcome.selected is not None and self._choose is not None:
            self._choose(outcome.step, outcome.selected, outcome.accepted)
        return outcome.changes

    def _num_present(self) -> int:
        return super()._num_present() if self._present is None else self._present()

    def _read(self, chunk: int, row: Row, out: Floats) -> None:
        """Writes the values of a row; they were looked at when it came."""
        codec = self.model.codec(self._uplink.at(row.number), chunk)
        native.decode(codec, row.packet, out.size, out=out)

    def _warn(self, present: int) -> None:
        """Says once that steps have come to their end."""
        if present < self._buffers.least and not self._is_short:
            self._is_short = True
            if self._tell is not None:
                self._tell("too_few_rows", needed=self._buffers.least, present=present)
            log.warning(
                "No more steps: rule %s needs rows of %d children, and %d are left. These go on "
                "with what there is.",
                self.rule,
                self._buffers.least,
                present,
            )
