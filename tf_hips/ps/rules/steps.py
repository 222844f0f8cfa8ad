# SPDX-License-Identifier: Apache-2.0
"""Optimizers of servers: the merged gradient of one chunk in, a step out; the state between them.

Nothing is changed in place: a step that is refused leaves the state as it was.
"""

import dataclasses
import math

import numpy as np

from tf_hips.ops import native_updates
from tf_hips.ops.native import Floats
from tf_hips.ops.native_updates import SecondMoment
from tf_hips.ps.rules.value import UpdateRule

_SECOND_MOMENTS = {
    "fedadagrad": SecondMoment.ADAGRAD,
    "fedadam": SecondMoment.ADAM,
    "fedyogi": SecondMoment.YOGI,
}
_VELOCITY = ("momentum", "fedavgm", "diloco")


@dataclasses.dataclass(frozen=True)
class Slots:
    """What an optimizer keeps of one chunk: how many steps it has taken, and its arrays."""

    count: int = 0
    arrays: tuple[Floats, ...] = ()


def num_slots(rule: UpdateRule) -> int:
    """Arrays of the size of the model that the optimizer of `rule` keeps."""
    if rule.name in _VELOCITY or rule.name == "fedadagrad":
        return 1
    return 2 if rule.name in ("adam", "fedadam", "fedyogi") else 0


def first_slots(rule: UpdateRule, num_elements: int) -> Slots:
    """The state before the first step."""
    arrays = tuple(np.zeros(num_elements, np.float32) for _ in range(num_slots(rule)))
    if rule.name in _SECOND_MOMENTS:
        # Algorithm 2 of FedOpt begins with v >= tau^2.
        arrays[-1].fill(np.float32(rule["tau"]) * np.float32(rule["tau"]))
    return Slots(0, arrays)


def advance(rule: UpdateRule, gradient: Floats, slots: Slots) -> tuple[Floats, Slots]:
    """The step that children subtract, and the new state.

    Args:
        rule: one with an optimizer; "sum" and "mean" return the gradient itself.
        gradient: of one chunk, merged; or how far children have moved, w_before - w_after.
        slots: the state of the chunk.

    Raises:
        NonFiniteError: the step or the state would not be finite.
    """
    count = slots.count + 1
    match rule.name:
        case "sum" | "mean":
            return gradient, slots
        case "sgd" | "fedavg":
            return native_updates.scale(gradient, rule["learning_rate"]), slots
        case "momentum" | "fedavgm" | "diloco":
            is_nesterov = rule.name == "diloco" or bool(rule.get("nesterov", 0))
            step, velocity = native_updates.momentum(
                gradient,
                slots.arrays[0],
                rate=rule["learning_rate"],
                beta=rule["momentum"],
                nesterov=is_nesterov,
            )
            return step, Slots(count, (velocity,))
        case "adam":
            beta_1, beta_2 = rule["beta_1"], rule["beta_2"]
            corrected = math.sqrt(1.0 - beta_2**count) / (1.0 - beta_1**count)
            step, *moments = native_updates.adam(
                gradient,
                *slots.arrays,
                rate=rule["learning_rate"] * corrected,
                beta_1=beta_1,
                beta_2=beta_2,
                epsilon=rule["epsilon"],
            )
            return step, Slots(count, tuple(moments))
        case "fedadagrad" | "fedadam" | "fedyogi":
            first = slots.arrays[0] if len(slots.arrays) == 2 else None
            step, new_first, new_second = native_updates.adaptive(
                gradient,
                first,
                slots.arrays[-1],
                rate=rule["learning_rate"],
                beta_1=rule.get("beta_1", 0.0),
                beta_2=rule.get("beta_2", 0.0),
                tau=rule["tau"],
                kind=_SECOND_MOMENTS[rule.name],
            )
            kept = (new_second,) if new_first is None else (new_first, new_second)
            return step, Slots(count, kept)
        case _:
            raise ValueError(f"a rule must have an optimizer to make a step. Received: {rule}")
