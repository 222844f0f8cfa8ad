# SPDX-License-Identifier: Apache-2.0
"""A robust rule in front of FedBuff: one row of each child, until there are enough of them.

    update of a child -> its row, in place of one that waits
                                 |  k children have one
    total - lr R(s_1 x_1, ..., s_k x_k)          s_i: what staleness makes of a row; R: the rule

Rules of coordinates have a buffer for each chunk. Rules of whole rows have one for the model: an
update counts when all of it has come, and the rule decides once for all chunks.

A child that comes again before the buffer is full replaces its own row. So nobody has two rows in a
step, however often it sends; all rows are of one update each, as alike as the rule expects; and
what waits is one packet of each child and chunk, as it came.

No rows are here: they are in `Moved`, which is never changed. What a step becomes is a function of
these rows, and of (seed, number of the step).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tf_hips.errors import NonFiniteError, ToleranceError
from tf_hips.ops import native_updates
from tf_hips.ops.native import Floats
from tf_hips.ps.rules.arrivals import Moved, Row, staleness_weight
from tf_hips.ps.rules.robust import of_coordinates
from tf_hips.ps.rules.steps import Slots
from tf_hips.ps.rules.value import FEDBUFF, UpdateRule
from tf_hips.ps.rules.whole import Undecided, WholeRound, rule_of
from tf_hips.ps.terms.past import Packet
from tf_hips.robust import Aggregator

# Writes the values of a row of a chunk.
DecodeRow = Callable[[int, Row, Floats], None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an update makes of the chunks of a model.

    Attributes:
        changes: chunks that are other ones now, that of the update among them.
        step: number of the step that was to be made.
        refused: children whose rows the rule has refused in it, with the reason.
        rounds: their rounds.
        selected: children whose rows the step is made of, where the rule chooses some.
        accepted: children whose rows it has looked at for that.
    """

    changes: Mapping[int, Moved]
    step: int = 0
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)
    rounds: Mapping[int, int] = dataclasses.field(default_factory=dict)
    selected: tuple[int, ...] | None = None
    accepted: tuple[int, ...] = ()


class Buffers:
    """Makes steps of the rows of the children of one run."""

    def __init__(
        self,
        rule: UpdateRule,
        sites: Sequence[str],
        seed: int,
        sizes: Mapping[int, int],
        decode: DecodeRow,
    ) -> None:
        """A rule.

        Args:
            rule: a robust one before `fedbuff`.
            sites: names of the children, for messages.
            seed: of the run; what is drawn comes from it and the number of the step.
            sizes: elements, by chunk, of those that are here.
            decode: writes the values of a row.

        Raises:
            ValueError: the rule is another one.
            ToleranceError: its k is too small for its f.
        """
        robust = rule.robust
        if robust is None or rule.name != FEDBUFF:
            raise ValueError(f"a robust rule must stand before `fedbuff`. Received: {rule}")
        self._rule = rule
        self._robust = robust
        self._whole = rule_of(rule, sites, seed)
        self._sizes = sizes
        self._decode = decode
        self._k = int(rule["k"])
        self.least = _least(robust, self._k)

    @property
    def is_whole(self) -> bool:
        """Whether the rule looks at whole rows, so that chunks wait for each other."""
        return self._whole is not None

    def enough(self, present: int) -> int:
        """Rows that a step needs while so many children may bring some.

        k, or all children that are left, if the rule bears with these what it bears with k.
        """
        return max(self.least, min(self._k, present))

    def add(
        self,
        moved: Mapping[int, Moved],
        chunk: int,
        child: int,
        row: Row,
        *,
        is_last: bool,
        present: int,
    ) -> Outcome:
        """Takes what a child has sent of a chunk.

        Args:
            moved: all chunks, as they are.
            chunk: which of them.
            child: whose it is.
            row: what it has sent.
            is_last: whether the child's update is whole with it.
            present: children that may bring rows.

        Raises:
            NonFiniteError: a step would not be finite, and no row has a larger value than this.
        """
        before = moved[chunk]
        if not self.is_whole:
            after = dataclasses.replace(before, rows={**before.rows, child: row})
            if len(after.rows) < self.enough(present):
                return Outcome({chunk: after})
            result = self._of_chunk(chunk, after)
            try:
                return Outcome({chunk: self._stepped(after, result)})
            except NonFiniteError:
                return self._without_largest(chunk, after, child)
        after = dataclasses.replace(before, coming={**before.coming, child: row})
        if not is_last:
            return Outcome({chunk: after})
        changes = {place: _with_whole(one, child) for place, one in {**moved, chunk: after}.items()}
        if len(changes[chunk].rows) < self.enough(present):
            return Outcome(changes)
        return self._decided(changes)

    def _of_chunk(self, chunk: int, held: Moved) -> Floats:
        """What a rule of coordinates makes of the rows of one chunk."""
        rows = []
        for _, row in sorted(held.rows.items()):
            values = np.empty(self._sizes[chunk], np.float32)
            self._read(chunk, row, held.version - row.since, values)
            rows.append(values)
        return of_coordinates(self._robust, rows)[0]

    def _decided(self, moved: Mapping[int, Moved]) -> Outcome:
        """What a rule of whole rows makes of those of all chunks."""
        if self._whole is None:
            raise ValueError(f"Rule {self._rule} does not look at whole rows.")
        some = next(iter(moved.values()))
        children, version = sorted(some.rows), some.version
        rounds = {child: some.rows[child].number for child in children}
        # A row is as stale as its oldest chunk: one weight, so that it keeps its direction.
        staleness = {
            child: version - min(one.rows[child].since for one in moved.values())
            for child in children
        }

        def decode(chunk: int, child: int, packet: Packet, out: Floats) -> None:
            del packet  # of the row
            self._read(chunk, moved[chunk].rows[child], staleness[child], out)

        whole = WholeRound(
            version,
            children,
            {
                chunk: {child: row.packet for child, row in one.rows.items()}
                for chunk, one in moved.items()
            },
            self._sizes,
            decode,
            lambda chunk: next(iter(moved[chunk].slots.arrays), None),
            {},
        )
        try:
            ruling = self._whole.decide(whole)
        except Undecided as error:
            # The others' rows stay, and the next ones to come fill up.
            changes = {chunk: _without(one, error.refused) for chunk, one in moved.items()}
            return Outcome(changes, version, error.refused, rounds)
        changes = {chunk: self._stepped(one, ruling.apply(chunk)) for chunk, one in moved.items()}
        return Outcome(changes, version, ruling.refused, rounds, ruling.selected, ruling.accepted)

    def _without_largest(self, chunk: int, held: Moved, newest: int) -> Outcome:
        """No step, and no row of the child with the largest value; the others' wait on.

        Whoever comes last is not to blame for what others have sent before.

        Raises:
            NonFiniteError: no row has a larger value than that of `newest`.
        """
        peaks = {}
        values = np.empty(self._sizes[chunk], np.float32)
        for child, row in sorted(held.rows.items()):
            self._decode(chunk, row, values)
            peaks[child] = float(np.abs(values).max(initial=0.0))
        largest = max(peaks, key=peaks.__getitem__)
        if peaks[newest] == peaks[largest]:
            raise NonFiniteError(
                f"a step of {len(peaks)} rows, of which this is the last, must be finite. "
                "Received: an overflow, and no row with larger values"
            )
        reason = (
            f"a step with it would not be finite, and its largest value, {peaks[largest]:.3g}, is "
            "that of all rows"
        )
        without = {chunk: _without(held, {largest: reason})}
        rounds = {largest: held.rows[largest].number}
        return Outcome(without, held.version, {largest: reason}, rounds)

    def _read(self, chunk: int, row: Row, staleness: int, out: Floats) -> None:
        """Writes the values of a row, by what they count."""
        self._decode(chunk, row, out)
        weight = staleness_weight(self._rule, staleness)
        if weight != 1.0:
            np.multiply(out, np.float32(weight), out=out)

    def _stepped(self, held: Moved, result: Floats) -> Moved:
        """A chunk after a step of what the rule has made; its buffer is empty."""
        total = native_updates.add_scaled(held.total, result, self._rule["learning_rate"])
        slots = Slots(0, (result,) if self._rule.keeps_reference else ())
        return dataclasses.replace(
            held, total=total, version=held.version + 1, slots=slots, rows={}
        )


def _with_whole(held: Moved, child: int) -> Moved:
    """A chunk whose row of a child counts, since all of the child's update has come."""
    coming = dict(held.coming)
    row = coming.pop(child)
    return dataclasses.replace(held, rows={**held.rows, child: row}, coming=coming)


def _without(held: Moved, children: Mapping[int, str]) -> Moved:
    rows = {child: row for child, row in held.rows.items() if child not in children}
    return dataclasses.replace(held, rows=rows)


def _least(robust: Aggregator, k: int) -> int:
    """The fewest rows with which a rule bears as many bad ones as with k."""
    wanted = robust.budgets(k)
    for n in range(1, k):
        with contextlib.suppress(ToleranceError):
            if all(one >= two for one, two in zip(robust.budgets(n), wanted, strict=True)):
                return n
    return k
