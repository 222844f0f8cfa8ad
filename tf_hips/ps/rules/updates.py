# SPDX-License-Identifier: Apache-2.0
"""The rule of synchronous rounds with its state of each chunk.

Memory: one array of the model's size for each slot of the optimizer. Not thread-safe as a whole:
the store makes one step of a chunk at a time.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rules import merging, steps
from tf_hips.ps.rules.rule import Rule
from tf_hips.ps.rules.steps import Slots
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.rules.whole import RoundRule
from tf_hips.ps.transport.wire import Buffer


class Updates:
    """What merged gradients become, chunk by chunk."""

    def __init__(
        self,
        sizes: Sequence[int],
        rule: UpdateRule | None = None,
        shares: Mapping[int, float] | None = None,
        whole: RoundRule | None = None,
        of: int | None = None,
    ) -> None:
        """No step has been made.

        Args:
            sizes: elements of each chunk.
            rule: a synchronous one; None: the sum.
            shares: what children stand for, by child, where they are averaged for a rule that
                takes no weights, as those do whose children wait for nobody; None: as `rule` says.
            whole: merges rounds, of a rule that looks at whole ones; None: chunks are merged each
                by itself.
            of: how many children can have a row in a round, at least; None: not known.
        """
        self._of = of
        self.whole = whole
        self.rule = rule if rule is not None else parse("sum")
        self._shares = shares
        self._sizes = sizes
        self._slots: dict[int, Slots] = {}

    def merging(self, compressor: Compressor, weights: Mapping[int, float]) -> Rule:
        """What merges the packets of one chunk.

        Args:
            compressor: what they are encoded with.
            weights: what children stand for, by child.
        """
        if self._shares is not None:
            return merging.Mean(compressor, self._shares)
        return merging.merging(self.rule, compressor, weights, self._of)

    def step(
        self, chunk: int, merged: Floats, *, has_rows: bool = True
    ) -> tuple[Floats, Slots | None]:
        """What goes down for a merged gradient, and the state to `keep` when it does.

        Args:
            chunk: which.
            merged: what the children's rows have become.
            has_rows: False where there were none, and it is zeros for want of them.

        Raises:
            NonFiniteError: it would not be finite.
        """
        count = self._num_optimizer
        step, slots = merged, Slots()
        if self.rule.gives_steps:
            before = self._slots.get(chunk)
            if before is None:
                before = steps.first_slots(self.rule, self._sizes[chunk])
            step, slots = steps.advance(
                self.rule, merged, Slots(before.count, before.arrays[:count])
            )
        if self.rule.keeps_reference:
            before_merge = None if has_rows else self.reference(chunk)
            slots = Slots(
                slots.count, (*slots.arrays, merged if before_merge is None else before_merge)
            )
        return step, slots

    def reference(self, chunk: int) -> Floats | None:
        """What the robust rule made of a chunk in the round before; None: it does not look."""
        if not self.rule.keeps_reference or chunk not in self._slots:
            return None
        return self._slots[chunk].arrays[self._num_optimizer]

    @property
    def _num_optimizer(self) -> int:
        """Arrays of the optimizer; that of the robust rule stands behind them."""
        return steps.num_slots(self.rule)

    def keep(self, chunk: int, slots: Slots | None) -> None:
        """Makes `slots` the state of a chunk."""
        if slots is not None and slots.arrays:
            self._slots[chunk] = slots

    def kept(self) -> Iterator[tuple[int, int, int, Floats]]:
        """Chunk, number of the slot, steps taken and values of all that `restore` takes."""
        for chunk, slots in sorted(self._slots.items()):
            for place, values in enumerate(slots.arrays):
                yield chunk, place, slots.count, values

    def restore(self, chunk: int, place: int, count: int, values: Buffer) -> None:
        """Gives a chunk the values of a slot, float32 as bytes; slots come in order.

        Raises:
            ValueError: the rule has no such slot, or one of another size.
        """
        array = np.frombuffer(values, np.float32).copy()
        arrays = self._slots[chunk].arrays[:place] if chunk in self._slots else ()
        most = self._num_optimizer + self.rule.keeps_reference
        is_next = len(arrays) == place < most
        if not is_next or array.size != self._sizes[chunk]:
            raise ValueError(f"slot {place} of chunk {chunk} has {array.size} elements")
        self._slots[chunk] = Slots(count, (*arrays, array))
