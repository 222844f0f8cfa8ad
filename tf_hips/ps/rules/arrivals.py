# SPDX-License-Identifier: Apache-2.0
"""Asynchronous rules: the gradient of one child changes one chunk as soon as it is there.

No weights are here. `total` is the sum of all steps so far, which all children will have subtracted
when they have got everything; `received` is what one child has. So received - total is how far the
weights have moved since that child's: the w - w_bak of DC-ASGD, with the child's own reference for
the shadow copy.

Nothing is changed in place: an update that is refused leaves everything as it was.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tf_hips.errors import NonFiniteError
from tf_hips.ops import native_updates
from tf_hips.ops.native import Floats
from tf_hips.ps.rules import steps
from tf_hips.ps.rules.steps import Slots
from tf_hips.ps.rules.value import CONSTANT, POLYNOMIAL, UpdateRule
from tf_hips.ps.terms.past import Packet

# In the authors' code, under the root with the mean square.
_DC_EPSILON = 1e-7


@dataclasses.dataclass(frozen=True)
class Row:
    """What one child has sent of one chunk, for a rule that looks at several children at once.

    Attributes:
        packet: as it came.
        number: the child's round, on which its codec may depend.
        since: the version of the chunk that the child had when it made this.
    """

    packet: Packet
    number: int
    since: int


@dataclasses.dataclass(frozen=True)
class Moved:
    """What a server knows of one chunk.

    Attributes:
        total: sum of all steps.
        version: how many updates have changed `total`.
        slots: what the rule keeps; of fedbuff what has come since, and how many.
        rows: what waits for the rows of other children, by child (`buffers`).
        coming: the same of updates of which not all chunks have come.
    """

    total: Floats
    version: int
    slots: Slots
    rows: Mapping[int, Row] = dataclasses.field(default_factory=dict)
    coming: Mapping[int, Row] = dataclasses.field(default_factory=dict)


def num_slots(rule: UpdateRule) -> int:
    """Arrays of the size of the model that `rule` keeps beside the total and the references."""
    if rule.is_robust:
        return int(rule.keeps_reference)
    if rule.name == "dc_asgd":
        return int(bool(rule["adaptive"]) or bool(rule["compat"]))
    return 1 if rule.name == "fedbuff" else steps.num_slots(rule)


def unmoved(rule: UpdateRule, num_elements: int) -> Moved:
    """A chunk before the first update."""
    # What a robust rule begins with in its next step is there when it has made one.
    count = 0 if rule.is_robust else num_slots(rule)
    zeros = [np.zeros(num_elements, np.float32) for _ in range(1 + count)]
    return Moved(zeros[0], 0, Slots(0, tuple(zeros[1:])))


def staleness_weight(rule: UpdateRule, staleness: int) -> float:
    """s(tau): what an update counts that others have overtaken `staleness` times."""
    if rule.name == "fedbuff":
        return float((1.0 + staleness) ** -rule["exponent"])
    kind = int(rule["staleness"])
    if kind == CONSTANT:
        return 1.0
    if kind == POLYNOMIAL:
        return float((1.0 + staleness) ** -rule["a"])
    late = staleness - rule["b"]
    return 1.0 if late <= 0 else float(1.0 / (rule["a"] * late + 1.0))


def apply(
    rule: UpdateRule, gradient: Floats, before: Moved, received: Floats, staleness: int
) -> Moved:
    """What a chunk is after the update of one child.

    Args:
        rule: an asynchronous one.
        gradient: of the chunk, of the child's own weights; or how far these have moved, w_before -
            w_after.
        before: the chunk.
        received: how much of all steps the child has.
        staleness: updates that have changed the chunk since the child got that.

    Raises:
        NonFiniteError: it would not be finite.
    """
    total, slots = before.total, before.slots
    match rule.name:
        case "asgd":
            total = native_updates.add_scaled(total, gradient, rule["learning_rate"])
        case "dc_asgd":
            total, slots = _delayed(rule, gradient, before, received)
        case "fedasync":
            alpha = rule["alpha"] * staleness_weight(rule, staleness)
            total = native_updates.mix(gradient, total, received, alpha=alpha)
        case "fedbuff":
            weight = staleness_weight(rule, staleness)
            try:
                held = native_updates.add_scaled(slots.arrays[0], gradient, weight)
                if slots.count + 1 < rule["k"]:
                    return Moved(total, before.version, Slots(slots.count + 1, (held,)))
                total = native_updates.add_scaled(total, held, rule["learning_rate"] / rule["k"])
            except NonFiniteError:
                # Only their sum is kept, so that nobody can say whose it is.
                peak = np.abs(slots.arrays[0]).max(initial=0.0)
                raise NonFiniteError(
                    f"the sum of {slots.count + 1} updates since the last step, of which this is "
                    "the last, and the step that it makes must be finite. Received: an overflow; "
                    f"the largest value of the sum before it is {peak:.3g}"
                ) from None
            slots = Slots(0, (np.zeros_like(held),))
        case _:
            step, slots = steps.advance(rule, gradient, slots)
            total = native_updates.add_scaled(total, step, 1.0)
    return Moved(total, before.version + 1, slots)


def _delayed(
    rule: UpdateRule, gradient: Floats, before: Moved, received: Floats
) -> tuple[Floats, Slots]:
    """DC-ASGD: the compensation looks at what the child has, or in MXNet's form at one update."""
    is_adaptive, is_compat = bool(rule["adaptive"]), bool(rule["compat"])
    total, square = native_updates.delayed(
        gradient,
        before.total,
        before.slots.arrays[0] if is_compat else received,
        before.slots.arrays[0] if is_adaptive else None,
        rate=rule["learning_rate"],
        strength=rule["compensation"],
        decay=rule.get("decay", 0.0),
        epsilon=_DC_EPSILON,
    )
    count = before.slots.count + 1
    if is_compat:
        return total, Slots(count, (before.total,))
    return total, Slots(count, () if square is None else (square,))
