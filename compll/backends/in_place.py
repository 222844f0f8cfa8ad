# SPDX-License-Identifier: Apache-2.0
"""Encoders with state that write it over what it was before the call.

The vectors of state are as long as the gradient, so writing them elsewhere costs as much traffic
again, and memory. An encoder may write in place when no loop reads an element of the old state that
an earlier loop, or an earlier element of the same loop, has overwritten, and when nothing can fail
any more once it writes. For others the entry keeps a copy of the chunk's state.
"""

from compll.backends.blocks import encode_groups, is_shared, roots
from compll.backends.feedback import reads
from compll.backends.kept import can_fail
from compll.backends.masks import masks
from compll.ir import nodes


def is_in_place(plan: nodes.Plan) -> bool:
    """Whether an encoder's own loops may write its state in place."""
    encode = plan.program.encode
    if encode is None or not encode.updates:
        return False
    if masks(plan) is not None:
        return True
    states = [update.state for update in encode.updates]
    is_written = False
    for group in encode_groups(plan):
        if is_written and (can_fail(group) or any(_reads_any(step, states) for step in group)):
            return False
        for step in group:
            if not isinstance(step, nodes.Sweep):
                continue
            if any(write.field >= len(encode.fields) for write in step.writes):
                if is_shared(group) or not all(_is_near(step, state) for state in states):
                    return False
                is_written = True
    scalars = [value for value in encode.fields if not isinstance(value, nodes.Elementwise)]
    return not any(reads(value, state) for value in scalars for state in states)


def _reads_any(step: nodes.Step, states: list[nodes.Var]) -> bool:
    return any(reads(root, state) for root in roots(step) for state in states)


def _is_near(step: nodes.Sweep, state: nodes.Var) -> bool:
    """Whether a loop reads element i of a state for element i only."""
    parts = [reduce.source for _, reduce in step.reduces] + [write.value for write in step.writes]
    return all(
        isinstance(part, nodes.Elementwise) and not reads(part, state, part.position)
        for part in parts
    ) and not any(reads(reduce.init, state) for _, reduce in step.reduces)
