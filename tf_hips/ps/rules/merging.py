# SPDX-License-Identifier: Apache-2.0
"""The mean of all children's packets, weighted by what each child has said that it stands for."""

from collections.abc import Mapping

import numpy as np

from tf_hips.ops import native, native_updates
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats
from tf_hips.ps.rules.robust import Rows
from tf_hips.ps.rules.rule import Keeping, Rule, Sum
from tf_hips.ps.rules.value import UpdateRule


class Mean(Keeping):
    """sum of p_i x_i in child order, p_i = n_i / n; a child without a weight has n_i = 1.

    Where nobody has anything to say, all weights 0, the mean is 0.
    """

    needs_rows = False

    def __init__(self, compressor: Compressor, weights: Mapping[int, float]) -> None:
        """A rule for packets of `compressor`, of children with `weights`."""
        super().__init__(compressor)
        self._weights = weights

    def finish(self) -> Floats:
        """The mean, shape [num_elements]."""
        packets, self._packets = self._packets, {}
        children = sorted(packets)
        weights = [self._weights.get(child, 1.0) for child in children]
        n = self._num_elements
        if len(set(weights)) == 1:
            # One fused pass over all packets; then the one factor that they have in common.
            share = 1.0 / len(weights) if weights[0] else 0.0
            rows = [packets[child] for child in children]
            return native_updates.scale(native.merge(self._compressor, rows, n), share)
        total = sum(weights)
        merged = np.zeros(n, np.float32)
        row = np.empty(n, np.float32)
        for child, weight in zip(children, weights, strict=True):
            native.decode(self._compressor, packets[child], n, out=row)
            merged = native_updates.add_scaled(merged, row, weight / total)
        return merged


def merging(
    rule: UpdateRule,
    compressor: Compressor,
    weights: Mapping[int, float],
    of: int | None = None,
) -> Rule:
    """What merges the packets of one chunk for `rule`; `of` as for `Rows`."""
    if rule.robust is not None:
        return Rows(rule.robust, compressor, weights, of)
    return Mean(compressor, weights) if rule.is_mean else Sum(compressor)
