# SPDX-License-Identifier: Apache-2.0
"""The optimizer of the server's side of a loop, where no server makes its steps.

With a server whose rule makes the steps, there is nothing to do here. With one that gives back what
it has merged (`sum`, `mean`), and without one, every worker makes the same step of it, by the
server's own code: so the bits are the same on all of them, and those that a server would send.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tf_hips.comm.compressed import MakeVariable
from tf_hips.errors import ConfigError
from tf_hips.ps import rules
from tf_hips.ps.rules import UpdateRule, steps
from tf_hips.strategies.party import PartyStrategy


def chosen_outer(given: UpdateRule | str | None, strategy: PartyStrategy) -> UpdateRule | None:
    """The rule that workers apply to what comes down; None: it comes as a step.

    Args:
        given: what a loop was told; None takes the server's, else "fedavg".
        strategy: that of the loop.

    Raises:
        ValueError, TypeError: it is no rule.
        ConfigError: the server makes other steps, or only a server could follow it.
    """
    chosen = None if given is None else rules.resolve(given, "server_optimizer")
    above = strategy.rule
    if above is not None and above.gives_steps:
        if chosen is not None and chosen != above:
            raise ConfigError(
                "`server_optimizer` must be the rule of the server, or the server's must be `sum` "
                f"or `mean`. Received: {chosen} here, {above} at the server"
            )
        return None
    if chosen is not None and chosen.is_robust and chosen != above:
        raise ConfigError(
            "A robust `server_optimizer` must be the rule of the server: "
            f'HierarchicalPS(rule="{chosen}"). Received: {chosen} here, {above} at the server'
        )
    if chosen is None:
        return rules.parse("fedavg")
    if chosen.is_asynchronous:
        raise ConfigError(
            "An asynchronous `server_optimizer` must be the rule of a server: "
            f'HierarchicalPS(rule="{chosen}"). Received: {chosen} without one'
        )
    if not chosen.gives_steps:
        return rules.parse("fedavg")
    return chosen


class Outer:
    """Steps of merged movements, and what the optimizer keeps of them."""

    def __init__(self, rule: UpdateRule | None) -> None:
        """Has made no step.

        Args:
            rule: as of `chosen_outer`.
        """
        self.rule = rule
        self._slots: list[list[tf.Variable]] = []
        self._count: tf.Variable | None = None

    @property
    def text(self) -> str:
        """The rule in words, for what must be equal where a backup is taken up."""
        return "the server's" if self.rule is None else str(self.rule)

    def make(self, shapes: Sequence[tf.TensorShape], make: MakeVariable) -> None:
        """Makes what the optimizer keeps of tensors of these shapes."""
        if self.rule is None or not steps.num_slots(self.rule):
            return
        self._count = make(tf.constant(0, tf.int64), "outer_count")
        for place, shape in enumerate(shapes):
            first = steps.first_slots(self.rule, int(shape.num_elements()))
            self._slots.append(
                [
                    make(tf.constant(array), f"outer_{number}_{place}")
                    for number, array in enumerate(first.arrays)
                ]
            )

    def step(self, place: int, merged: tf.Tensor) -> tf.Tensor:
        """What one tensor loses, where tensors take their steps apart; no rule that counts steps.

        Raises:
            NonFiniteError: it would not be finite.
        """
        if self.rule is None:
            return merged
        slots = self._slots[place] if self._slots else []
        arrays = tuple(slot.numpy() for slot in slots)
        step, after = steps.advance(self.rule, merged.numpy(), steps.Slots(0, arrays))
        for slot, array in zip(slots, after.arrays, strict=True):
            slot.assign(array, read_value=False)
        return tf.constant(step)

    def steps(self, merged: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What the weights lose for merged movements.

        Raises:
            NonFiniteError: it would not be finite.
        """
        if self.rule is None:
            return list(merged)
        count = 0 if self._count is None else int(self._count.numpy())
        made = []
        for place, one in enumerate(merged):
            arrays = tuple(slot.numpy() for slot in (self._slots[place] if self._slots else ()))
            flat = np.ascontiguousarray(tf.cast(one, tf.float32).numpy()).reshape(-1)
            step, slots = steps.advance(self.rule, flat, steps.Slots(count, arrays))
            made.append((step.reshape(one.shape), slots.arrays))
        # One that is refused leaves all as it was.
        for place, (_, arrays) in enumerate(made):
            for slot, array in zip(self._slots[place] if self._slots else (), arrays, strict=True):
                slot.assign(array, read_value=False)
        if self._count is not None:
            self._count.assign_add(1, read_value=False)
        return [tf.constant(step) for step, _ in made]
