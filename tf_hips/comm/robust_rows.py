# SPDX-License-Identifier: Apache-2.0
"""What a rank does with everyone's packets of some pieces: rows, a rule, and who is refused.

    rules of coordinates   `Share.merged`: each piece by itself
    other rules            `Share.measured`: what the rule must know of the rows of each piece;
                           `Decider`: what follows from all pieces of the step, on every rank;
                           `Share.applied`: the result of each piece

A row of a piece that cannot take part has a fault: its packet cannot be decoded, its sender says
itself that its gradient is not finite (a codec would hide it), it holds NaN or an infinity, or is
too long. NumPy only; nothing here raises because of what another rank sent.

Invariant: who is refused, and what is decided, is a function of bytes that all ranks have.
"""

import dataclasses
import math
import threading
from collections.abc import Sequence

import numpy as np

from tf_hips.errors import PacketError, ToleranceError
from tf_hips.ops import native, native_robust
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Bytes, Floats
from tf_hips.ops.native_robust import Doubles
from tf_hips.robust import Aggregator, Limits, Rejected
from tf_hips.robust.aggregator import Decision, Measures
from tf_hips.robust.rows import refused, totals

SOUND, NOT_FINITE, BROKEN, TOO_LONG = range(4)
"""Faults of a row of a piece."""
REASONS = {
    NOT_FINITE: "NaN or infinity",
    BROKEN: "a packet that cannot be decoded",
    TOO_LONG: "a norm over 1e18",
}
# In one piece nothing is absurd beside the others: that of a bias is often 0 on most ranks.
_OF_A_PIECE = Limits(max_ratio=math.inf)
# Over the square of any row that is not too long: sums of such over all pieces stay finite.
_MOST_SQUARE = 1e37


def check(rule: Aggregator, num_ranks: int, missing: int = 0) -> None:
    """Looks whether a rule bears what it is told to.

    Args:
        rule: any.
        num_ranks: whose rows it gets, refused ones among them.
        missing: how many of these are refused.

    Raises:
        ToleranceError: it does not; says the formula.
    """
    if missing == num_ranks:
        raise ToleranceError(f"{rule} needs n >= 1. Received: n=0 ({missing} refused)")
    rule.run(np.zeros((num_ranks - missing, 1), np.float32), missing=missing)


@dataclasses.dataclass(frozen=True)
class Share:
    """Pieces of a bucket whose rows lie here, one behind the other.

    Attributes:
        sizes: elements of each.
        lengths: bytes of the packet of each.
        compressor: what the rows were encoded with.
        rule: what is made of them.
        num_ranks: how many rows there are.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    compressor: Compressor
    rule: Aggregator
    num_ranks: int

    def merged(self, received: Bytes) -> tuple[Floats, Bytes]:
        """The results of a rule of coordinates.

        Args:
            received: of each rank the packets of all pieces, and a byte for each: whether its
                gradient is not finite.

        Returns:
            The results, concatenated, 0 where too few rows are left; faults, [pieces, ranks].
        """
        results = np.zeros(sum(self.sizes), np.float32)
        faults = np.zeros((len(self.sizes), self.num_ranks), np.uint8)
        everyone = range(self.num_ranks)
        room = self._room(self.num_ranks)
        pieces = zip(self._pieces(received), self._parts(results), strict=True)
        for place, ((packets, flags), out) in enumerate(pieces):
            rows, faults[place] = self._rows(packets, flags, room[:, : out.size], everyone)
            # One that is not there is refused as any other.
            for bad in np.flatnonzero(faults[place]):
                rows[int(bad)] = np.full(out.size, np.nan, np.float32)
            given = [rows[rank] for rank in everyone]
            try:
                rejected = self.rule.run(given, limits=_OF_A_PIECE, out=out).rejected
            except ToleranceError:  # every rank will find it in the faults
                out[:] = 0
                squares, _ = native_robust.distances(given, with_pairs=False)
                rejected = refused(given, totals(squares), _OF_A_PIECE)
            for one in rejected:
                faults[place, one.row] = faults[place, one.row] or _fault(given[one.row])
        return results, faults

    def measured(self, received: Bytes) -> Doubles:
        """What `Decider` must know of the rows of each piece, [pieces, measures_of(ranks)].

        Args:
            received: as for `merged`.
        """
        found = np.zeros((len(self.sizes), measures_of(self.num_ranks)))
        everyone = range(self.num_ranks)
        room = self._room(self.num_ranks)
        pieces = zip(self._pieces(received), self.sizes, strict=True)
        for place, ((packets, flags), size) in enumerate(pieces):
            rows, faults = self._rows(packets, flags, room[:, :size], everyone)
            given = [
                rows[rank] if rank in rows else np.zeros(size, np.float32) for rank in everyone
            ]
            measures = self.rule.measure(given)
            squares = measures.squares[0]
            spoilt = ~np.isfinite(squares) & (faults == SOUND)
            for rank in np.flatnonzero(spoilt):
                faults[rank] = _fault(given[rank])
            squares = np.where(faults == SOUND, squares, np.inf)
            pairs = np.zeros(self.num_ranks * (self.num_ranks - 1) // 2)
            pairs[: measures.pairs.shape[1]] = measures.pairs[0]
            found[place] = np.concatenate([squares, pairs, faults])
        return found

    def applied(self, received: Bytes, decision: Decision | None) -> Floats:
        """The results of a decision, concatenated; zeros where there is none.

        Args:
            received: as for `merged`.
            decision: of `Decider`.
        """
        results = np.zeros(sum(self.sizes), np.float32)
        if decision is None:
            return results
        # The others need not be decoded.
        used = np.flatnonzero(decision.mixing.astype(np.float32).any(axis=0)).tolist() or [0]
        needed = [decision.accepted[place] for place in used]
        nothing = np.zeros(0, np.float32)
        room = self._room(len(needed))
        pieces = zip(self._pieces(received), self._parts(results), strict=True)
        for (packets, flags), out in pieces:
            rows, _ = self._rows(packets, flags, room[:, : out.size], needed)
            given = [rows.get(rank, nothing) for rank in range(self.num_ranks)]
            self.rule.apply(decision, given, out=out)
        return results

    def _parts(self, whole: Floats) -> list[Floats]:
        ends = np.cumsum(self.sizes).tolist()
        return [whole[end - size : end] for size, end in zip(self.sizes, ends, strict=True)]

    def _pieces(self, received: Bytes) -> list[tuple[Bytes, Bytes]]:
        """Of each piece the packets of all ranks, and whether their gradients are not finite."""
        of_rank = received.reshape(self.num_ranks, -1)
        ends = np.cumsum(self.lengths).tolist()
        return [
            (of_rank[:, end - length : end], of_rank[:, ends[-1] + place])
            for place, (length, end) in enumerate(zip(self.lengths, ends, strict=True))
        ]

    def _room(self, count: int) -> Floats:
        """Memory for so many rows of any piece; new memory for each would cost as much again."""
        return np.empty((count, max(self.sizes, default=0)), np.float32)

    def _rows(
        self, packets: Bytes, flags: Bytes, room: Floats, ranks: Sequence[int]
    ) -> tuple[dict[int, Floats], Bytes]:
        """The rows of a piece by rank, without those that say that they are none; faults of all.

        Args:
            packets: of all ranks.
            flags: of all ranks.
            room: as many rows as `ranks`, and elements as the piece has; rows are there.
            ranks: whose packets are decoded.
        """
        faults = np.where(flags != 0, NOT_FINITE, SOUND).astype(np.uint8)
        rows = {}
        for rank, out in zip(ranks, room, strict=True):
            if faults[rank] == SOUND:
                try:
                    rows[rank] = native.decode(self.compressor, packets[rank], out.size, out)
                except PacketError:
                    faults[rank] = BROKEN
        return rows, faults


def measures_of(num_ranks: int) -> int:
    """Numbers that are measured of each piece: squares, squared distances, faults."""
    return 2 * num_ranks + num_ranks * (num_ranks - 1) // 2


@dataclasses.dataclass(frozen=True)
class Refused:
    """A rank whose row takes no part in a step, or in some pieces of it.

    Attributes:
        rank: whose.
        reason: what is wrong.
        tensors: positions of the gradients that it is wrong with; none: with all of them together.
    """

    rank: int
    reason: str
    tensors: tuple[int, ...] = ()


def by_rank(faults: Bytes, tensors: Sequence[int]) -> list[Refused]:
    """Whose rows have faults, ascending.

    Args:
        faults: [pieces, ranks].
        tensors: position of the gradient that each piece is of.
    """
    found = []
    for rank in np.flatnonzero(faults.any(axis=0)).tolist():
        places = np.flatnonzero(faults[:, rank]).tolist()
        bad = sorted({tensors[place] for place in places})
        first = min(places, key=lambda place: tensors[place])
        reason = REASONS.get(int(faults[first, rank]), "an unknown fault")
        found.append(Refused(rank, reason, tuple(bad)))
    return found


def most_refused(faults: Bytes) -> int:
    """The most rows that have faults in one piece."""
    return int(np.count_nonzero(faults, axis=1).max(initial=0))


class Decider:
    """A decision of each step, made once; used by several threads."""

    def __init__(self, rule: Aggregator, num_ranks: int, seed: int) -> None:
        """For a rule and as many rows; `seed` is of the run."""
        self._rule = rule
        self._num_ranks = num_ranks
        self._seed = seed
        self._nothing = [np.zeros(0, np.float32)] * num_ranks
        self._lock = threading.Lock()
        self._last: tuple[bytes, int] | None = None
        self._decision: Decision | None = None

    def __call__(self, measures: Doubles, step: int) -> Decision | None:
        """What follows from `measured` of all pieces; None: too few rows are left.

        Args:
            measures: [pieces, measures_of(ranks)], in any order, the same on all ranks.
            step: number of the step.
        """
        key = measures.tobytes(), step
        with self._lock:
            if key != self._last:
                self._decision, self._last = self._decided(measures, step), key
            return self._decision

    def rejected(self, measures: Doubles) -> tuple[Rejected, ...]:
        """The rows that take no part."""
        squares = _sane(measures, self._num_ranks).squares
        return refused(self._nothing, totals(squares), Limits())

    def refused(self, measures: Doubles, tensors: Sequence[int]) -> list[Refused]:
        """The same with what is wrong; arguments as for `by_rank`."""
        n = self._num_ranks
        told = np.where(np.isfinite(measures[:, -n:]), measures[:, -n:], 255)
        faults = np.clip(told, 0, 255).astype(np.uint8)
        known = {one.rank: one for one in by_rank(faults, tensors)}
        return [
            known.get(one.row) or Refused(one.row, one.reason) for one in self.rejected(measures)
        ]

    def _decided(self, measures: Doubles, step: int) -> Decision | None:
        try:
            return self._rule.decide(
                _sane(measures, self._num_ranks), rows=self._nothing, seed=self._seed, step=step
            )
        except ToleranceError:  # every rank will find it in the measures
            return None


def _sane(measures: Doubles, n: int) -> Measures:
    """Measures as they can be: whoever owns pieces may send anything.

    A square that no honest row can have is an infinity: else sums over pieces overflow. A squared
    distance is at most twice the sum of the two squares, but for rounding.
    """
    positive = np.where((measures >= 0) & (measures < _MOST_SQUARE), measures, np.inf)
    squares, pairs = positive[:, :n], positive[:, n:-n]
    first, second = np.triu_indices(n, 1)
    return Measures(squares, np.minimum(pairs, 2.001 * (squares[:, first] + squares[:, second])))


def _fault(row: Floats) -> int:
    """What is wrong with a row that is refused."""
    return TOO_LONG if np.isfinite(row).all() else NOT_FINITE
