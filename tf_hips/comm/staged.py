# SPDX-License-Identifier: Apache-2.0
"""Sums whose way of computing depends on the number of the step: the stages of a warm-up.

Each stage is a reducer of its own, with its collectives, in a branch of one `tf.switch_case`: the
sizes of packets are fixed in each. All ranks are in the same step, so all take the same branch, and
collectives of different branches have different names. What is kept between steps belongs to
variables that the reducers share.

A branch that is not taken costs nothing in a step, but tracing costs as much for each of them.
"""

import bisect
from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.ops.flow import opaque

# Vectors and the number of the step in, sums out.
Reducer = Callable[[Sequence[tf.Tensor], tf.Tensor], list[tf.Tensor]]


class StagedSum:
    """The reducer of the stage that a step belongs to."""

    def __init__(self, stages: Sequence[tuple[int, Reducer]]) -> None:
        """Takes `stages`: first step and reducer of each, the first from step 0 on."""
        self._firsts = [first for first, _ in stages]
        self._reducers = [reducer for _, reducer in stages]
        if self._firsts[:1] != [0] or sorted(set(self._firsts)) != self._firsts:
            raise ValueError(
                f"stages must begin with step 0, and rise. Received: first steps {self._firsts}"
            )

    def __call__(self, vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums `vectors` over the ranks, as the stage of `step` does it.

        Args:
            vectors: of known shapes.
            step: int64 scalar, the same on all ranks.

        Returns:
            Vectors like `vectors`, equal on all ranks.
        """
        if tf.executing_eagerly():
            return self._reducers[bisect.bisect_right(self._firsts, int(step)) - 1](vectors, step)
        if len(self._reducers) == 1 or not vectors:
            return self._reducers[-1](vectors, step)
        stage = tf.reduce_sum(tf.cast(step >= tf.constant(self._firsts, tf.int64), tf.int32)) - 1
        # One operation that has all vectors: from here on a rank can only wait for others.
        inputs = opaque(vectors)

        def branch(reducer: Reducer) -> Callable[[], list[tf.Tensor]]:
            return lambda: [tf.identity(total) for total in reducer(inputs, step)]

        def switch() -> list[tf.Tensor]:
            return list(tf.switch_case(stage, [branch(reducer) for reducer in self._reducers]))

        sums = primitives.built_in_branches(inputs[0], switch)
        return [
            tf.ensure_shape(total, vector.shape)
            for total, vector in zip(sums, vectors, strict=True)
        ]
