# SPDX-License-Identifier: Apache-2.0
"""Robust rules of a server: each coordinate of a chunk is that of most children.

A chunk is merged as soon as all children have delivered it, so rules must not look at whole rows:
by distances each chunk would be of other children. What children say that they stand for is not
looked at: whoever lies would say that it stands for much.
"""

import re

import numpy as np
import numpy.typing as npt

from tf_hips.ops import native, native_robust
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.ps.quorum import DROP, Quorum
from tf_hips.ps.rules.value import UpdateRule, parse

# Codecs that send few elements, each child others: most values of a coordinate are 0 then, and
# their median is.
_SPARSE = re.compile(r"\b(?:bisparse|dgc|graddrop|randomk|topk)\b")
_RULES = {
    "median": CoordinateRule.MEDIAN,
    "trimmed_mean": CoordinateRule.TRIMMED,
    "meamed": CoordinateRule.NEAREST,
    "majority": CoordinateRule.MAJORITY,
}


class Rows:
    """The rows of all children side by side, and of each coordinate what most of them say.

    Memory: a chunk of float32 for each child, while it is merged.
    """

    needs_rows = True

    def __init__(self, rule: UpdateRule, compressor: Compressor) -> None:
        """A robust rule for packets of `compressor`."""
        self._rule = rule
        self._compressor = compressor
        self._num_elements = 0
        self._packets: dict[int, npt.NDArray[np.uint8]] = {}

    def begin(self, num_elements: int) -> None:
        """Starts a chunk of `num_elements` elements."""
        self._num_elements = num_elements
        self._packets = {}

    def add(self, child: int, packet: npt.NDArray[np.uint8]) -> None:
        """Takes the packet of `child`."""
        self._packets[child] = packet

    def finish(self) -> npt.NDArray[np.float32]:
        """The result, shape [num_elements]; not finite where a mean of huge values overflows."""
        packets, self._packets = self._packets, {}
        n = self._num_elements
        rows = [native.decode(self._compressor, packets[child], n) for child in sorted(packets)]
        kind = _RULES[self._rule.name]
        drops = kind in (CoordinateRule.TRIMMED, CoordinateRule.NEAREST)
        drop = _bad(self._rule, len(rows)) if drops else 0
        result, _ = native_robust.coordinate(rows, kind, drop)
        return result


def why_not(
    text: str, children: int, compression: str | None, quorum: Quorum | None = None
) -> str | None:
    """Why a rule cannot bear what it is told to with so many children; None: it can.

    Args:
        text: of any rule.
        children: how many there are.
        compression: what they send is encoded with; None: not known yet.
        quorum: when a round closes without some; None: it waits for all.
    """
    rule = parse(text)
    if not rule.is_robust:
        return None
    n = children if quorum is None else quorum.least
    f = _bad(rule, n)
    if n < 2 * f + 1:
        return f"Rule {rule} needs n >= 2 f + 1 children in a round. Received: n={n}, f={f}"
    if quorum is not None and quorum.late != DROP:
        return (
            f"Rule {rule} needs late={DROP}: what comes late is added to a result, past the rule. "
            f"Received: late={quorum.late}"
        )
    if compression is not None and _SPARSE.search(compression):
        return (
            f"Rule {rule} needs packets of all elements: where each child sends others, most "
            f"values are 0. Received: {compression}"
        )
    return None


def _bad(rule: UpdateRule, children: int) -> int:
    """How many children may lie."""
    f = int(rule["f"])
    return f if f >= 0 else (children - 1) // 2
