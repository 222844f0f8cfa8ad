# SPDX-License-Identifier: Apache-2.0
"""The rule of synchronous rounds with its state of each chunk.

Memory: one array of the model's size for each slot of the optimizer. Not thread-safe as a whole:
the store makes one step of a chunk at a time.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tf_hips.ops.compressor import Compressor
from tf_hips.ps.rule import Rule
from tf_hips.ps.rules import merging, steps
from tf_hips.ps.rules.steps import Floats, Slots
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.wire import Buffer


class Updates:
    """What merged gradients become, chunk by chunk."""

    def __init__(
        self,
        sizes: Sequence[int],
        rule: UpdateRule | None = None,
        shares: Mapping[int, float] | None = None,
    ) -> None:
        """No step has been made.

        Args:
            sizes: elements of each chunk.
            rule: a synchronous one; None: the sum.
            shares: what children stand for, by child, where they are averaged for a rule that
                takes no weights, as those do whose children wait for nobody; None: as `rule` says.
        """
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
        return merging.merging(self.rule, compressor, weights)

    def step(self, chunk: int, merged: Floats) -> tuple[Floats, Slots | None]:
        """What goes down for a merged gradient, and the state to `keep` when it does.

        Raises:
            NonFiniteError: it would not be finite.
        """
        if not self.rule.gives_steps:
            return merged, None
        before = self._slots.get(chunk)
        if before is None:
            before = steps.first_slots(self.rule, self._sizes[chunk])
        return steps.advance(self.rule, merged, before)

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
        is_next = len(arrays) == place < steps.num_slots(self.rule)
        if not is_next or array.size != self._sizes[chunk]:
            raise ValueError(f"slot {place} of chunk {chunk} has {array.size} elements")
        self._slots[chunk] = Slots(count, (*arrays, array))
