# SPDX-License-Identifier: Apache-2.0
"""What the way down is encoded by where nobody has chosen: as the way up, mostly.

A threshold is chosen for what goes up. What comes down of a rule that makes steps is mostly lr
times that, which would not reach the threshold for many rounds, and then pass at most the
threshold.
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
        `up.for_sums`; fp32 where that has a threshold and smaller steps come down.
    """
    down = up.for_sums
    if down.has_threshold and rule is not None and _makes_smaller(rule):
        return compressors.parse("fp32")
    return down


def _makes_smaller(rule: UpdateRule) -> bool:
    """Whether steps come down that may be smaller than what goes up."""
    is_as_large = rule.name in ("asgd", "fedavg") and float(rule["learning_rate"]) >= 1.0
    return rule.gives_steps and not is_as_large
