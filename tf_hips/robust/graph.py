# SPDX-License-Identifier: Apache-2.0
"""Robust aggregation in TensorFlow: the three passes as ops, and a whole rule.

The same bits as ops.native_robust. Ops run on the CPU; `aggregate` runs the rule in the program
that made the graph, outside of it, so it cannot be saved with a model or compiled by XLA.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.ops import library
from tf_hips.ops.flow import Tensor
from tf_hips.robust.aggregator import Aggregator

_RULES = ("median", "trimmed_mean", "nearest", "majority")


def coordinate(rows: Tensor, rule: str, drop: int = 0) -> tuple[Tensor, Tensor]:
    """Applies a rule to each coordinate.

    Args:
        rows: float32 [n, d].
        rule: "median", "trimmed_mean", "nearest": the mean of the n - drop values nearest to the
            median, or "majority": -1, 0 or 1, the sign of the sum of signs.
        drop: values left out at each end ("trimmed_mean"), or in all ("nearest").

    Returns:
        float32 [d], and float64 [chunks, n]: sums of squares by chunk of 2^20 elements. A row whose
        sum is not finite has spoilt the result.
    """
    if rule not in _RULES:
        raise ValueError(f"`rule` must be one of {', '.join(_RULES)}. Received: rule={rule!r}")
    result = library.ops(tf).tf_hips_robust_coordinate(rows, rule=rule, drop=drop)
    return result.result, result.squares


def distances(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of squares of rows, and of differences of each two; as `native_robust.distances`."""
    result = library.ops(tf).tf_hips_robust_distances(rows)
    return result.squares, result.distances


def mix(rows: Tensor, weights: Tensor) -> Tensor:
    """`weights` [m, n] times `rows` [n, d], float32."""
    return library.ops(tf).tf_hips_robust_mix(rows, weights)


def aggregate(aggregator: Aggregator, rows: Tensor, *, seed: int = 0, step: Tensor = 0) -> Tensor:
    """What `aggregator(rows)` is, [d].

    Args:
        aggregator: a rule.
        rows: float32 [n, d].
        seed: of the run; what is drawn comes from it.
        step: of the run, an int or an integer scalar.

    Raises:
        tf.errors.InvalidArgumentError: in a graph, the rule refuses the rows; the message is its
            own. In eager code the rule's own error, such as `ToleranceError`.
    """

    def run(values: Any, number: Any) -> Any:
        return aggregator(np.asarray(values), seed=seed, step=int(number))

    result = tf.numpy_function(run, [rows, step], tf.float32)
    result.set_shape(rows.shape[1:])
    return result
