# SPDX-License-Identifier: Apache-2.0
"""Rules of whole rounds: they look at all packets of all children, and then make each chunk.

    all children have delivered all chunks, or the round is closed
    decide(round)        once: decodes chunk by chunk and puts down what it must know, n x n numbers
    apply(chunk)         for each chunk, of the packets that the decision asks for

So a chunk waits for the others. What a round needs is its packets, as they came, and one chunk of
float32 for each child.

Invariant: a ruling is a function of packets, of what the rule keeps, and of (seed, round). A server
that is restored decides again as it did.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.native import Floats
from tf_hips.ps.rules.value import UpdateRule
from tf_hips.ps.terms.past import Packet
from tf_hips.robust import Aggregator
from tf_hips.robust.aggregator import Decision, Measures
from tf_hips.robust.rows import Limits, refused, totals

# Of a chunk, what a child has sent, and where its values go.
Decode = Callable[[int, int, Packet, Floats], None]
Reference = Callable[[int], Floats | None]


class WholeRound:
    """All packets of one round. What is decoded is decoded when it is asked for."""

    def __init__(
        self,
        number: int,
        children: Sequence[int],
        packets: Mapping[int, Mapping[int, Packet]],
        sizes: Mapping[int, int],
        decode: Decode,
        reference: Reference,
        missing: Mapping[int, str],
    ) -> None:
        """Nothing is decoded.

        Args:
            number: the round.
            children: those that take part, in their order.
            packets: by chunk, each by child.
            sizes: elements, by chunk.
            decode: writes the values of a child's packet of a chunk.
            reference: the result of the round before, by chunk; None: there was none.
            missing: children that take no part because something is wrong with them, with what.
        """
        self.number = number
        self.children = tuple(children)
        self.packets = packets
        self.sizes = sizes
        self.reference = reference
        self.missing = missing
        self._decode = decode

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks, in their order."""
        return tuple(sorted(self.packets))

    @functools.cached_property
    def _room(self) -> Floats:
        longest = max(self.sizes.values(), default=0)
        return np.empty((len(self.children), min(longest, CHUNK)), np.float32)

    def rows(self, chunk: int, places: Sequence[int] | None = None) -> list[Floats]:
        """A chunk of rows, valid until the next call.

        Args:
            chunk: which.
            places: of the children that are asked for; the others' rows are anything. None: all.
        """
        size = self.sizes[chunk]
        wanted = range(len(self.children)) if places is None else places
        for place in wanted:
            child = self.children[place]
            self._decode(chunk, child, self.packets[chunk][child], self._room[place, :size])
        return [row[:size] for row in self._room]


class Ruling(Protocol):
    """What is left to do once a round is decided.

    Attributes:
        refused: children whose rows take no part, with the reason; those that are missing too.
        accepted: children whose rows take part.
        selected: of these, whose rows the result is made of, where the rule chooses some.
    """

    refused: Mapping[int, str]
    accepted: tuple[int, ...]
    selected: tuple[int, ...] | None

    def apply(self, chunk: int) -> Floats:
        """The result of a chunk, [elements], in memory of its own."""


class Undecided(ToleranceError):
    """Nothing can be made of the rows of a round.

    Attributes:
        refused: children whose rows a rule has refused, with the reason.
    """

    def __init__(self, text: str, refused: Mapping[int, str]) -> None:
        """`text` says what is needed, and whose rows were refused."""
        super().__init__(text)
        self.refused = refused


class RoundRule(Protocol):
    """A rule that decides about whole rounds."""

    def decide(self, round: WholeRound) -> Ruling:
        """Looks at all packets of a round that has at least one child.

        Raises:
            Undecided: nothing can be made of them; says whose rows were refused and why.
        """


class Distances:
    """Any aggregator of `robust`: the distances of whole rows, then one weighted sum."""

    def __init__(
        self, rule: Aggregator, sites: Sequence[str], seed: int, of: int | None = None
    ) -> None:
        """A rule.

        Args:
            rule: what to do.
            sites: names of the children, for messages.
            seed: of the run; what is drawn comes from it and the round.
            of: how many rows there could be in a round; None: as many as come.
        """
        self._of = of
        self._rule = rule
        self._sites = sites
        self._seed = seed

    def decide(self, round: WholeRound) -> Ruling:
        """As of `RoundRule`."""
        measures, with_reference = self.measure(round)
        decision = self.judge(
            round.number, measures, round.children, round.missing, with_reference=with_reference
        )
        return self.ruling(decision, round)

    def measure(self, round: WholeRound) -> tuple[Measures, bool]:
        """What `judge` must know of the chunks that are here.

        Returns:
            The measures, by chunk, and whether the last row of them is the reference.
        """
        parts, with_reference = [], False
        for chunk in round.chunks:
            before = round.reference(chunk)
            with_reference = before is not None
            parts.append(
                self._rule.measure(
                    round.rows(chunk), reference=[before] if before is not None else []
                )
            )
        measures = Measures(
            np.concatenate([one.squares for one in parts]),
            np.concatenate([one.pairs for one in parts]),
        )
        return measures, with_reference

    def judge(
        self,
        number: int,
        measures: Measures,
        children: Sequence[int],
        missing: Mapping[int, str],
        *,
        with_reference: bool,
    ) -> Decision:
        """Which rows take part in a round, and with which weights.

        Args:
            number: the round.
            measures: of all chunks of the model.
            children: whose rows they are of, in their order.
            missing: as of `WholeRound`.
            with_reference: whether the last row of `measures` is the reference.

        Raises:
            ToleranceError: as of `RoundRule.decide`.
            NonFiniteError: the reference is not finite.
        """
        # Packets are finite: whoever is refused is so for its norm.
        rows = [np.empty(0, np.float32)] * len(children)
        try:
            return self._rule.decide(
                measures,
                rows=rows,
                seed=self._seed,
                step=number,
                missing=len(missing),
                of=self._of,
                with_reference=with_reference,
            )
        except ToleranceError as error:
            found = refused(rows, totals(measures.squares)[: len(children)], Limits())
            whose = {children[one.row]: one.reason for one in found}
            raise Undecided(f"{error}{self._whose(children, missing)}", whose) from None

    def ruling(self, decision: Decision, round: WholeRound) -> Ruling:
        """What is left to do with a round, or with the part of it that is here."""
        return _Weighted(self._rule, decision, round)

    def _whose(self, children: Sequence[int], missing: Mapping[int, str]) -> str:
        rows = ", ".join(
            f"row {row} is site `{self._sites[child]}`" for row, child in enumerate(children)
        )
        gone = "; ".join(
            f"site `{self._sites[child]}` is missing: {why}"
            for child, why in sorted(missing.items())
        )
        return f" ({rows}{'; ' if gone else ''}{gone})"


def rule_of(
    rule: UpdateRule, sites: Sequence[str], seed: int, of: int | None = None
) -> RoundRule | None:
    """What decides about whole rounds for a rule; None: its chunks are merged each by itself.

    Args:
        rule: of a server.
        sites: names of the children, for messages.
        seed: of the run.
        of: as for `Distances`.
    """
    aggregator = rule.robust
    if aggregator is None or not rule.is_whole:
        return None
    return Distances(aggregator, sites, seed, of)


class _Weighted:
    """A decision about rows, which is applied chunk by chunk."""

    def __init__(self, rule: Aggregator, decision: Decision, round: WholeRound) -> None:
        self._rule = rule
        self._decision = decision
        self._round = round
        children = round.children
        self.refused: Mapping[int, str] = dict(round.missing) | {
            children[one.row]: one.reason for one in decision.rejected
        }
        self.accepted = tuple(children[row] for row in decision.accepted)
        self.selected: tuple[int, ...] | None = None
        if decision.selected is not None:
            self.selected = tuple(children[row] for row in decision.selected)
        accepted = decision.accepted
        used = np.flatnonzero(decision.mixing.astype(np.float32).any(axis=0))
        # The first one is read where all weights are 0.
        self._places = [accepted[i] for i in used if i < len(accepted)] or [accepted[0]]

    def apply(self, chunk: int) -> Floats:
        """As of `Ruling`."""
        # Who is not asked for need not be decoded: of Krum's rows one is.
        rows = self._round.rows(chunk, self._places)
        before = self._round.reference(chunk)
        return self._rule.apply(self._decision, rows, reference=before).vector
