# SPDX-License-Identifier: Apache-2.0
"""Rounds of a party server below one that decides on sketches of the rows of all leaves.

    all packets of all children    the rows are fixed, which goes up as the call of the round
    the seed comes down            a sketch of each row goes up (`tf_hips.robust.sketches`)
    weights come down              their weighted sum of rows goes up, encoded as ever; with none
                                   nothing does, and what the way up has missed so far stays
    results come down              as ever

Invariants:
- What goes up is made of packets that are durable; weights are recorded when they come, so a server
  that is killed makes the same sums with the same residuals.
- Nothing of this server's children hears a seed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_hips.ops import native_robust
from tf_hips.ops.native import Floats
from tf_hips.ps.robust.sketch import NONE, REFUSED, ROW, PartyRows, weights_from_bytes
from tf_hips.ps.rounds.store import Job, Store
from tf_hips.ps.rounds.whole import Choose, Refuse
from tf_hips.ps.rules.robust import OWN_REFUSAL, is_refused
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.rules.value import MEAN, parse
from tf_hips.ps.rules.whole import Ruling, WholeRound
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport.wire import Buffer
from tf_hips.robust.sketches import Sketched, Sketching

_REFUSED_ABOVE = "the topmost server has refused its row"


class Given:
    """The rule of such rounds: the weighted sum by weights that come from above."""

    def __init__(self) -> None:
        """No weights have come."""
        self.weights: dict[int, Floats] = {}  # by round; of each child

    def decide(self, round: WholeRound) -> Ruling:
        """As of `RoundRule`; the weights of the round are there."""
        return _GivenRuling(round, self.weights[round.number])


class _GivenRuling:
    """Weights of one round, which are applied chunk by chunk."""

    def __init__(self, round: WholeRound, weights: Floats) -> None:
        # Whose rows were refused and chosen was told when the weights came.
        self.refused: Mapping[int, str] = {}
        self.accepted = round.children
        self.selected: tuple[int, ...] | None = None
        self._round = round
        self._places = [place for place, child in enumerate(round.children) if weights[child] != 0]
        children = [round.children[place] for place in self._places]
        self._weights = np.ascontiguousarray(weights[children][None])

    def apply(self, chunk: int) -> Floats:
        """As of `Ruling`."""
        rows = self._round.rows(chunk, self._places)
        kept = [rows[place] for place in self._places]
        result: Floats = native_robust.mix(kept, self._weights)[0]
        return result


class SketchingStore(Store):
    """The rounds of one model at a party server that makes sketches. Thread-safe."""

    def __init__(
        self, *model: Any, sketched: Sketched, sizes: Sequence[int], **options: Any
    ) -> None:
        """A store in which nothing has come.

        Args:
            model: as for `Store`.
            sketched: the rule of the topmost server.
            sizes: elements of each chunk.
            options: as for `Store`, without `updates`.
        """
        self._given = Given()
        updates = Updates(sizes, parse(MEAN), whole=self._given)
        super().__init__(*model, updates=updates, **options)
        self._sketched = sketched
        self._note_refused: Refuse | None = options.get("refuse")
        self._note_chosen: Choose | None = options.get("choose")
        self._fixed: dict[int, Sequence[Job]] = {}  # all packets of a round, by round
        self._positions: dict[int, int] = {}  # of the newest packet of a round
        self._rows: dict[int, bytes] = {}  # sketches as they travel, by round

    def weight(self, number: int) -> float | None:
        """Nobody above looks at what the children stand for."""
        del number
        return None

    def due(self) -> int | None:
        """The newest round, if its rows are fixed and it has not all its results."""
        with self.changed:
            newest = max(self._rounds)
            if newest not in self._positions or self._positions[newest] > self._recorder.durable:
                return None
            return newest if self._get(newest).num_merged < len(self.chunks) else None

    def is_weighed(self, number: int) -> bool:
        """Whether the weights of a round are there."""
        with self.changed:
            return number in self._given.weights

    def has_weight(self, number: int) -> bool:
        """Whether one of the children has a weight, so that something goes up."""
        with self.changed:
            return bool(self._given.weights[number].any())

    def sketches(self, number: int, seed: bytes) -> bytes | None:
        """Sketches of the rows of a round that are fixed, as they travel; None: it has weights."""
        with self.changed:
            known, jobs = self._rows.get(number), self._fixed.get(number)
            weights = dict(self._get(number).weights)
        if known is not None or jobs is None:
            return known
        packets = {chunk: held for _, chunk, held in jobs}
        children = range(len(self._sites))
        round = self._combining.weighed_round(number, packets, children, weights)
        present = round.children if round is not None else ()
        making = Sketching(seed, len(present), self._sketched.numbers)
        if round is not None:
            for chunk in round.chunks:
                making.add(chunk, round.rows(chunk))
        leaves = np.full(len(self._sites), NONE, np.uint8)
        leaves[list(present)] = ROW
        leaves[[child for child in children if is_refused(weights.get(child, 1.0))]] = REFUSED
        found = PartyRows(leaves, making.squares(), making.sketches()).to_bytes()
        with self.changed:
            self._rows[number] = found
        return found

    def take_weights(self, number: int, data: Buffer) -> None:
        """Takes the weights of a round, and makes what goes up; the first ones count.

        Raises:
            PacketError: they are no such thing.
        """
        weights = weights_from_bytes(data, len(self._sites))
        with self.changed:
            if self.is_past(number) or number in self._given.weights:
                return
            current = self._get(number)
            jobs = self._fixed.pop(number, ())
            self._given.weights[number] = weights
            self._rows.pop(number, None)
            if self._recorder.is_keeping:
                position = self._recorder.add(Kind.WEIGHED, bytes(data), round=number)
                current.positions = [position] * len(current.positions)
            if not weights.any():
                for chunk in self.chunks:
                    current.packets[chunk] = {}
            self.changed.notify_all()
            said = [current.weights.get(child, 1.0) for child in range(len(self._sites))]
        refused = np.flatnonzero((weights == 0) & np.signbit(weights)).tolist()
        if refused and self._note_refused is not None:
            whys = {
                child: OWN_REFUSAL if is_refused(said[child]) else _REFUSED_ABOVE
                for child in refused
            }
            self._note_refused(number, whys)
        accepted = [one for one, weight in enumerate(said) if weight > 0 and one not in refused]
        if accepted and self._sketched.chooses and self._note_chosen is not None:
            self._note_chosen(number, [one for one in accepted if weights[one]], accepted)
        if weights.any():
            self.merge(jobs)

    def archive(self) -> None:
        """As of `Store`; weights of rounds that are over go."""
        super().archive()
        with self.changed:
            first = min(self._rounds)
            for kept in (self._given.weights, self._fixed, self._positions, self._rows):
                for number in [one for one in kept if one < first]:
                    del kept[number]

    def _merge_all(self, jobs: Sequence[Job]) -> None:
        """Merges a round that has its weights; one that has none yet is fixed."""
        if not jobs:
            return
        current = jobs[0][0]
        with self.changed:
            if current.number not in self._given.weights:
                self._fixed[current.number] = tuple(jobs)
                self._positions[current.number] = max(current.positions)
                self.changed.notify_all()
                return
        super()._merge_all(jobs)
