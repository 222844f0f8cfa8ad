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
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_hips.errors import PacketError, ToleranceError
from tf_hips.ops import native, native_robust
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Bytes, Doubles, Floats
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
_ALIGNMENT = 64  # bytes
Items: TypeAlias = npt.NDArray[Any]
"""Bytes of packets, or the values themselves, float32."""
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
    rule.check(num_ranks - missing, missing)


@dataclasses.dataclass(frozen=True)
class Share:
    """Pieces of a bucket whose rows lie here, one behind the other.

    What came (`received` below) is one array of all ranks' messages, or one array of each: what a
    `Wire` makes of these pieces.

    Attributes:
        sizes: elements of each.
        lengths: items of a message that belong to each.
        rooms: floats from the beginning of the result of each to that of the next.
        compressor: what the rows were encoded with; None: not at all.
        rule: what is made of the rows.
        num_ranks: how many rows there are.
        scale: what results are multiplied with.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    rooms: tuple[int, ...]
    compressor: Compressor | None
    rule: Aggregator
    num_ranks: int
    scale: float = 1.0

    def merged(self, *received: Items) -> tuple[Floats, Bytes]:
        """The results of a rule of coordinates.

        Args:
            received: of each rank the values of all pieces, or their packets and a byte for each:
                whether its gradient is not finite.

        Returns:
            The results, float32 [sum(rooms)], 0 where too few rows are left; faults, [pieces,
            ranks].
        """
        results = self._nothing()
        faults = np.zeros((len(self.sizes), self.num_ranks), np.uint8)
        messages = self._messages(received)
        if not self._is_merged_whole(messages, results):
            self._merge_pieces(messages, results, faults)
        return self._scaled(results), faults

    def _is_merged_whole(self, messages: Sequence[Items], results: Floats) -> bool:
        """Makes the results of all pieces at once, if rows need no decoding and none is refused.

        Between pieces honest rows have zeros; nobody reads what becomes of them.
        """
        if self.compressor is not None:
            return False
        try:
            return not self.rule.run(messages, limits=_OF_A_PIECE, out=results).rejected
        except ToleranceError:
            return False

    def _merge_pieces(self, messages: Sequence[Items], results: Floats, faults: Bytes) -> None:
        everyone = range(self.num_ranks)
        room = self._room(self.num_ranks)
        pieces = zip(self._pieces(messages), self._parts(results), strict=True)
        for place, ((packets, flags), out) in enumerate(pieces):
            rows, faults[place] = self._rows(packets, flags, room, out.size, everyone)
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

    def measured(self, *received: Items) -> Doubles:
        """What `Decider` must know of the rows of each piece, [pieces, measures_of(ranks)].

        Args:
            received: as for `merged`.
        """
        found = np.zeros((len(self.sizes), measures_of(self.num_ranks)))
        everyone = range(self.num_ranks)
        room = self._room(self.num_ranks)
        pieces = zip(self._pieces(self._messages(received)), self.sizes, strict=True)
        for place, ((packets, flags), size) in enumerate(pieces):
            rows, faults = self._rows(packets, flags, room, size, everyone)
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

    def applied(self, *received: Items, decision: Decision | None) -> Floats:
        """The results of a decision, as those of `merged`; zeros where there is none.

        Args:
            received: as for `merged`.
            decision: of `Decider`.
        """
        results = self._nothing()
        if decision is None:
            return results
        messages = self._messages(received)
        if self.compressor is None:
            self.rule.apply(decision, messages, out=results)
            return self._scaled(results)
        # The others need not be decoded.
        used = np.flatnonzero(decision.mixing.astype(np.float32).any(axis=0)).tolist() or [0]
        needed = [decision.accepted[place] for place in used]
        nothing = np.zeros(0, np.float32)
        room = self._room(len(needed))
        pieces = zip(self._pieces(messages), self._parts(results), strict=True)
        for (packets, flags), out in pieces:
            rows, _ = self._rows(packets, flags, room, out.size, needed)
            given = [rows.get(rank, nothing) for rank in range(self.num_ranks)]
            self.rule.apply(decision, given, out=out)
        return self._scaled(results)

    def _nothing(self) -> Floats:
        """Zeros in the place of all results, at an address that TensorFlow need not copy from."""
        room = np.zeros(sum(self.rooms) + _ALIGNMENT // 4, np.float32)
        begin = -room.ctypes.data % _ALIGNMENT // 4
        return room[begin : begin + sum(self.rooms)]

    def _scaled(self, results: Floats) -> Floats:
        if self.scale != 1:
            results *= np.float32(self.scale)
        return results

    def _parts(self, whole: Floats) -> list[Floats]:
        ends = np.cumsum(self.rooms).tolist()
        return [
            whole[end - room : end - room + size]
            for size, room, end in zip(self.sizes, self.rooms, ends, strict=True)
        ]

    def _messages(self, received: Sequence[Items]) -> list[Items]:
        """What came of each rank."""
        if len(received) == self.num_ranks:
            return list(received)
        [together] = received
        return list(together.reshape(self.num_ranks, -1))

    def _pieces(self, messages: Sequence[Items]) -> list[tuple[list[Items], list[bool]]]:
        """Of each piece what came of all ranks, and whether their gradients are not finite."""
        ends = np.cumsum(self.lengths).tolist()
        return [
            (
                [one[end - length : end] for one in messages],
                [self.compressor is not None and one[ends[-1] + place] != 0 for one in messages],
            )
            for place, (length, end) in enumerate(zip(self.lengths, ends, strict=True))
        ]

    def _room(self, count: int) -> Floats:
        """Memory for so many rows of any piece; new memory for each would cost as much again."""
        size = 0 if self.compressor is None else max(self.sizes, default=0)
        return np.empty((count, size), np.float32)

    def _rows(
        self,
        packets: Sequence[Items],
        flags: Sequence[bool],
        room: Floats,
        size: int,
        ranks: Sequence[int],
    ) -> tuple[dict[int, Floats], Bytes]:
        """The rows of a piece by rank, without those that say that they are none; faults of all.

        Args:
            packets: what came of the piece, of all ranks.
            flags: of all ranks.
            room: as many rows as `ranks`; what is decoded is there.
            size: elements of the piece.
            ranks: whose rows are wanted.
        """
        faults = np.where(flags, NOT_FINITE, SOUND).astype(np.uint8)
        rows = {}
        for rank, out in zip(ranks, room, strict=True):
            if faults[rank] != SOUND:
                continue
            if self.compressor is None:
                rows[rank] = packets[rank][:size]
                continue
            try:
                rows[rank] = native.decode(self.compressor, packets[rank], size, out[:size])
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
