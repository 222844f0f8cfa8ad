# SPDX-License-Identifier: Apache-2.0
"""What the way down is encoded by where nobody has chosen: as the way up, mostly.

A threshold is chosen for gradients. What comes down of a rule that makes steps is lr times that,
which would not reach the threshold for many rounds, and then pass at most the threshold.
"""

from tf_hips.ops import compressor as compressors
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.rules.value import UpdateRule

SAME = "same"


def as_up(up: Compressor, rule: UpdateRule | None) -> Compressor:
    """What `SAME` stands for.

    Args:
        up: what the way up is encoded by.
        rule: what the server makes of that; None: what one above it says.

    Returns:
        `up.for_sums`; fp32 where that has a threshold and steps come down.
    """
    down = up.for_sums
    if down.has_threshold and rule is not None and rule.gives_steps:
        return compressors.parse("fp32")
    return down
