# SPDX-License-Identifier: Apache-2.0
"""Rounds of a topmost server that are decided on sketches of the rows of all leaves.

    all party servers have said    their leaves' rows cannot change: each hears the seed
    all sketches have come         decide, once: each party server hears the weights of its leaves
    weighted sums of rows          of those who have a weight; added up chunk by chunk, then as ever

What decides is `tf_hips.robust.sketches`; how it travels, `sketch`; the other end,
`sketched_party`.

The seed of a round comes from a secret of this server and the number of the round. Nobody is told
it before all rows are fixed, so nobody can make rows that its sketches do not see.

Invariants:
- A decision is a function of sketches, the secret and the round, and a result of that and of
  packets; sketches and packets are recorded. Who has said that its rows are fixed is not: it says
  so again with every call.
- Packets count when there is a decision, and only those of who has a weight in it.
- Weights of children are not looked at: whoever lies would say that it stands for much.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.robust.sketch import (
    NONE,
    REFUSED,
    ROW,
    PartyRows,
    most_bytes,
    weights_to_bytes,
)
from tf_hips.ps.rounds.round import Packet, TooFewRowsError
from tf_hips.ps.rounds.store import Job, Store
from tf_hips.ps.rounds.whole import Refuse
from tf_hips.ps.rules.robust import OWN_REFUSAL, with_no_row
from tf_hips.ps.rules.rule import Rule, Sum
from tf_hips.ps.rules.updates import Updates
from tf_hips.ps.terms.recorder import Kind
from tf_hips.ps.transport.wire import REFUSED_WEIGHT, Buffer
from tf_hips.robust.sketches import Sketched, most_stretch, seed_of

# Hears of a round the children of whose leaves rows were chosen, all whose rows it has seen, and
# both by leaf.
ChooseLeaves = Callable[
    [int, Sequence[int], Sequence[int], tuple[Sequence[str], Sequence[str]]], None
]


class _Added(Sum):
    """The sum of what party servers have made of their rows; 0 where nobody has a weight."""

    def finish(self) -> Floats:
        """The sum, shape [num_elements]."""
        return super().finish() if self._packets else np.zeros(self._num_elements, np.float32)


class AddingUpdates(Updates):
    """The rule behind a robust one that was decided elsewhere: what comes is added up."""

    def merging(self, compressor: Compressor, weights: Mapping[int, float]) -> Rule:
        """What merges the packets of one chunk."""
        del weights
        return _Added(compressor)


@dataclasses.dataclass
class _Weighing:
    """One round that is not over.

    Attributes:
        said: children whose rows are fixed.
        rows: by child, of those whose sketches have come.
        position: of the newest record of them.
        weights: of the leaves of each child, once it is decided.
    """

    said: set[int] = dataclasses.field(default_factory=set)
    rows: dict[int, PartyRows] = dataclasses.field(default_factory=dict)
    position: int = 0
    weights: list[Floats] | None = None


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """What a decision comes to.

    Attributes:
        weights: of the leaves of each child.
        refused: by child, which leaves were refused and why.
        chosen: the leaves whose rows were, where the rule chooses some, and all that it has seen;
            numbers over all children.
        error: why there is no decision; "": there is one.
    """

    weights: list[Floats]
    refused: Mapping[int, str]
    chosen: tuple[Sequence[int], Sequence[int]] | None = None
    error: str = ""


class WeighingStore(Store):
    """The rounds of one model that are decided on sketches. Thread-safe."""

    def __init__(
        self,
        *model: Any,
        sketched: Sketched,
        leaves: Sequence[Sequence[str]],
        secret: int,
        refuse: Refuse | None = None,
        choose: ChooseLeaves | None = None,
        **options: Any,
    ) -> None:
        """A store in which nothing has come.

        Args:
            model: as for `Store`.
            sketched: the rule, without what stands behind it.
            leaves: paths of the leaves of each child, in their order.
            secret: what seeds are drawn from; nobody else knows it.
            refuse: hears of leaves whose rows are refused, by child; None: nobody does.
            choose: hears of leaves whose rows are chosen, and of their children; None: nobody does.
            options: as for `Store`.
        """
        super().__init__(*model, **options)
        self._sketched = sketched
        sizes = [chunk.size for chunk in self.model.chunks]
        self._most_stretch = most_stretch(sizes, sketched.numbers)
        self._leaves = [tuple(paths) for paths in leaves]
        self._secret = secret
        self._note_refused = refuse
        self._note_chosen = choose
        self._weighings: dict[int, _Weighing] = {}

    @property
    def sketch_chunk(self) -> int:
        """The number by which sketches travel, behind those of all chunks."""
        return len(self.model.chunks)

    def num_leaves(self, child: int) -> int:
        """Leaves of a child."""
        return len(self._leaves[child])

    def packet_limits(self, number: int) -> tuple[int, ...]:
        """As of `Store`; behind the chunks that of sketches."""
        longest = max(len(paths) for paths in self._leaves)
        return (*super().packet_limits(number), most_bytes(longest, self._sketched.numbers))

    def weigh(self, number: int, child: int, weight: float) -> bool:
        """Nobody looks at what a child says that it stands for."""
        del number, child, weight
        return False

    def fix(self, number: int, child: int) -> bool:
        """Notes that the rows of a child's leaves cannot change; whether that is new.

        Raises:
            ProtocolError: the round was not begun.
        """
        with self.changed:
            if self._is_decided(number) or child in self._of(number).said:
                return False
            self._of(number).said.add(child)
            self.changed.notify_all()
            return True

    def seed(self, number: int, child: int) -> bytes | None:
        """The seed of a round, for a child that owes sketches; None: it is not told (yet)."""
        with self.changed:
            if self._is_decided(number) or not self._are_fixed(self._of(number)):
                return None
            if child in self._of(number).rows:
                return None
            return seed_of(self._secret, number)

    def weights_of(self, number: int, child: int) -> bytes | None:
        """The weights of the leaves of a child, as they travel; None: it is not decided yet."""
        with self.changed:
            weighing = self._weighings.get(number)
            if weighing is None or weighing.weights is None:
                return None
            if weighing.position > self._recorder.durable:
                return None
            return weights_to_bytes(weighing.weights[child])

    def missing(self, number: int) -> dict[str, int]:
        """Children that owe something in round `number`, with how many chunks have come."""
        with self.changed:
            if self._is_over(number):
                return {}
            current, weighing = self._get(number), self._of(number)
            if current.counted is not None:
                owing = [
                    child
                    for child in current.counted
                    if len(current.delivered[child]) < len(self.chunks)
                ]
            else:
                there = set(weighing.rows)  # of a server that goes on, without having said so again
                if not self._are_fixed(weighing):
                    there.update(weighing.said)
                owing = [child for child in range(len(self._sites)) if child not in there]
            return {self._sites[child]: len(current.delivered[child]) for child in owing}

    def archive(self) -> None:
        """As of `Store`; what was decided of rounds that are over goes."""
        super().archive()
        with self.changed:
            first = min(self._rounds)
            for number in [one for one in self._weighings if one < first]:
                del self._weighings[number]

    def _add(self, number: int, child: int, packets: Sequence[tuple[int, Buffer | Packet]]) -> int:
        num_new = 0
        for chunk, data in packets:
            packet = np.frombuffer(data, np.uint8)
            if chunk == self.sketch_chunk:
                num_new += self._take_sketches(number, child, packet)
                continue
            if not self._wants(number, child, chunk):
                continue
            self._combining.check(number, child, chunk, packet)
            with self.changed:
                if not self._wants(number, child, chunk):
                    continue  # the same child, over an older connection
                num_new += 1
                position = self._record(Kind.PACKET, packet, number, child, chunk=chunk)
                current = self._get(number)
                current.delivered[child].add(chunk)
                current.packets[chunk][child] = packet
                current.positions[chunk] = position
                held = current.packets[chunk]
                jobs: list[Job] = []
                if current.counted is not None and len(held) == len(current.counted):
                    jobs = [(current, chunk, held)]
                if self._is_held:
                    self._waiting += jobs
                    continue
            self._merge_all(jobs)
        return num_new

    def _wants(self, number: int, child: int, chunk: int) -> bool:
        """Whether a packet is new, and counts when it is taken."""
        with self.changed:
            if self._is_over(number):
                return False
            current = self._get(number)
            counted = current.counted
            return (
                counted is not None and child in counted and chunk not in current.delivered[child]
            )

    def _take_sketches(self, number: int, child: int, packet: Packet) -> bool:
        """Takes the sketches of a child; whether they are new. The last ones decide the round."""
        found = PartyRows.from_bytes(packet.data, len(self._leaves[child]), self._sketched.numbers)
        with self.changed:
            if self._is_decided(number) or child in self._of(number).rows:
                return False
            weighing = self._of(number)
            weighing.rows[child] = found
            weighing.position = self._record(Kind.SKETCHED, packet, number, child)
            rows = [weighing.rows.get(one) for one in range(len(self._sites))]
        whole = [one for one in rows if one is not None]
        if len(whole) == len(self._sites):
            # Whoever came last decides, alone, without the lock.
            outcome = self._outcome(number, whole)
            jobs = self._take_outcome(number, outcome)
            self._merge_all(jobs)
        return True

    def _outcome(self, number: int, rows: Sequence[PartyRows]) -> _Outcome:
        """Decides about a round."""
        names = [path for paths in self._leaves for path in paths]
        known = np.concatenate([one.leaves for one in rows])
        places = np.flatnonzero(known == ROW)
        missing = np.flatnonzero(known == REFUSED)
        refused = {int(leaf): OWN_REFUSAL for leaf in missing}
        weights = np.zeros(len(names), np.float32)
        chosen: tuple[Sequence[int], Sequence[int]] | None = None
        error = ""
        if places.size:
            try:
                decision = self._sketched.decide(
                    np.concatenate([one.squares for one in rows]),
                    np.concatenate([one.sketches for one in rows]),
                    secret=self._secret,
                    step=number,
                    missing=len(missing),
                    of=len(names),
                    most=self._most_stretch,
                )
                accepted = places[list(decision.accepted)]
                weights[accepted] = decision.mixing[0].astype(np.float32)
                refused |= {int(places[one.row]): one.reason for one in decision.rejected}
                if decision.selected is not None:
                    chosen = places[list(decision.selected)].tolist(), accepted.tolist()
            except ToleranceError as failure:
                told = ", ".join(f"row {row} is `{names[leaf]}`" for row, leaf in enumerate(places))
                gone = "".join(f"; `{names[leaf]}`: {OWN_REFUSAL}" for leaf in missing)
                # Who says that it has no row is why there are too few.
                absent = with_no_row([names[leaf] for leaf in np.flatnonzero(known == NONE)])
                error = f"Round {number}: {failure} ({told}{gone}){absent}"
        elif missing.size:
            named = "; ".join(f"`{names[leaf]}`: {OWN_REFUSAL}" for leaf in missing)
            error = f"Round {number}: the rule needs a row. Received: none ({named})"
        weights[list(refused)] = REFUSED_WEIGHT
        cuts = np.cumsum([len(paths) for paths in self._leaves])[:-1]
        by_child: dict[int, list[str]] = {}
        for leaf, why in sorted(refused.items()):
            child = int(np.searchsorted(cuts, leaf, side="right"))
            by_child.setdefault(child, []).append(f"`{names[leaf]}`: {why}")
        return _Outcome(
            np.split(weights, cuts),
            {child: "; ".join(whys) for child, whys in by_child.items()},
            chosen,
            error,
        )

    def _take_outcome(self, number: int, outcome: _Outcome) -> list[Job]:
        """Makes a decision the round's; what is to be merged where nobody has a weight."""
        jobs: list[Job] = []
        with self.changed:
            current, weighing = self._get(number), self._of(number)
            current.positions = [weighing.position] * len(current.positions)
            if outcome.error:
                current.counted = ()
                current.refusals.append((weighing.position, TooFewRowsError(outcome.error)))
                self.changed.notify_all()
                return []
            weighing.weights = outcome.weights
            current.counted = tuple(
                child for child, weights in enumerate(outcome.weights) if weights.any()
            )
            for child, delivered in enumerate(current.delivered):
                if child not in current.counted:
                    delivered.update(self.chunks)
            if not current.counted:
                jobs = [(current, chunk, {}) for chunk in self.chunks]
            if self._is_held:
                self._waiting += jobs
                jobs = []
            self.changed.notify_all()
        if outcome.refused and self._note_refused is not None:
            self._note_refused(number, outcome.refused)
        if outcome.chosen is not None and self._note_chosen is not None:
            # A child is chosen where one of its leaves is.
            whose = [(child, path) for child, paths in enumerate(self._leaves) for path in paths]
            chosen, among = ([whose[leaf] for leaf in part] for part in outcome.chosen)
            self._note_chosen(
                number,
                sorted({child for child, _ in chosen}),
                sorted({child for child, _ in among}),
                ([path for _, path in chosen], [path for _, path in among]),
            )
        return jobs

    def _are_fixed(self, weighing: _Weighing) -> bool:
        return len(weighing.said | weighing.rows.keys()) == len(self._sites)

    def _of(self, number: int) -> _Weighing:
        if number not in self._weighings:
            self._get(number)  # there is such a round
            self._weighings[number] = _Weighing()
        return self._weighings[number]

    def _is_decided(self, number: int) -> bool:
        """Whether nothing that is said changes a round any more, with the lock held."""
        return self._is_over(number) or self._get(number).counted is not None

    def _is_over(self, number: int) -> bool:
        """Whether a round has all its results, with the lock held."""
        if self.is_past(number) or number < min(self._rounds):
            return True
        return self._get(number).num_merged == len(self.chunks) > 0

    def _record(self, kind: Kind, packet: Packet, number: int, child: int, **fields: int) -> int:
        if not self._recorder.is_keeping:
            return 0
        return self._recorder.add(kind, packet.data, round=number, child=child, **fields)
