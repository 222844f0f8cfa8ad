# SPDX-License-Identifier: Apache-2.0
"""One list of gradients on its way through a sum: checked, flattened, summed, shaped again.

Gradients are known by their position in the list that the optimizer hands over: Keras' names differ
between ranks.

Invariant: every sum takes its turn (see `turns`), so one has ended on this rank before the next
begins.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_hips.errors import NonFiniteError
from tf_hips.strategies.failures import Failures
from tf_hips.strategies.turns import MakeVariable, opaque

NONFINITE_MODES = ("raise", "zero", "propagate")

# Vectors and the number of the step in, sums out.
Reducer = Callable[[Sequence[tf.Tensor], tf.Tensor], list[tf.Tensor]]


def check_nonfinite(mode: str) -> None:
    """Raises `ValueError` unless `mode` is one that a strategy knows."""
    if mode not in NONFINITE_MODES:
        known = ", ".join(repr(one) for one in NONFINITE_MODES)
        raise ValueError(f"`nonfinite` must be one of {known}. Received: nonfinite={mode!r}")


@dataclasses.dataclass(frozen=True)
class Gradient:
    """What is known of one gradient before it has a value.

    Attributes:
        name: name of its variable, for messages only.
        shape: its shape.
        dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return int(np.prod(self.shape, dtype=np.int64))


class GradientSum:
    """The sum of one optimizer's gradients over all workers, with the number of its step."""

    def __init__(
        self,
        gradients: Sequence[Gradient],
        reducer: Reducer,
        *,
        only_float32: bool,
        nonfinite: str,
        first_step: int,
        make_variable: MakeVariable,
        failures: Failures,
        rank: int,
    ) -> None:
        """Prepares a sum.

        Args:
            gradients: what comes, in order.
            reducer: sums vectors; gets the number of the step.
            only_float32: whether `reducer` takes nothing but float32; otherwise float64 stays as it
                is.
            nonfinite: what to do about NaN and infinities: "raise", "zero" or "propagate".
            first_step: number of the first step.
            make_variable: makes a non-trainable variable.
            failures: where exceptions raised in a step are kept.
            rank: rank of this worker, for messages.

        Raises:
            TypeError: a gradient is of no floating type.
        """
        for position, gradient in enumerate(gradients):
            if not gradient.dtype.is_floating:
                raise TypeError(
                    f"Gradient {position} ({gradient.name}) must be of a floating type. "
                    f"Received: dtype={gradient.dtype.name}"
                )
        self.gradients = list(gradients)
        self.step = make_variable(tf.constant(first_step, tf.int64), "step")
        self._reducer = reducer
        self._only_float32 = only_float32
        self._nonfinite = nonfinite
        self._complain = failures.kept(functools.partial(self._raise_nonfinite, "of rank"))
        self._complain_sum = failures.kept(
            functools.partial(self._raise_nonfinite, "summed over all workers, on rank")
        )
        self._rank = rank

    def __call__(self, values: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor]:
        """Sums `values` over the workers and counts the step.

        Sparse gradients (`tf.IndexedSlices`) are made dense: the codecs here are for dense ones.

        Returns:
            Dense tensors of the gradients' shapes and types, equal on all workers.
        """
        step = self.step.read_value()
        vectors = [
            self._flat(value, gradient, step)
            for value, gradient in zip(values, self.gradients, strict=True)
        ]
        vectors = self._checked(vectors, step, self._complain)
        sums = self._reducer(vectors, step)
        if self._nonfinite == "raise":
            # Finite gradients can overflow when they are added, to each other or to a residual.
            sums = self._checked(sums, step, self._complain_sum)
        with tf.control_dependencies(sums):
            counted = self.step.assign_add(1, read_value=True)
        with tf.control_dependencies([counted]):
            return [
                tf.cast(tf.reshape(total, gradient.shape), gradient.dtype)
                for total, gradient in zip(sums, self.gradients, strict=True)
            ]

    def _flat(
        self, value: tf.Tensor | tf.IndexedSlices, gradient: Gradient, step: tf.Tensor
    ) -> tf.Tensor:
        vector = opaque(tf.ensure_shape(tf.convert_to_tensor(value), gradient.shape), step)
        # Half types are widened for exactness; Horovod's Gloo sums them one rounding per rank.
        keep = gradient.dtype == tf.float64 and not self._only_float32
        return vector if keep else tf.cast(vector, tf.float32)

    def _checked(
        self, vectors: list[tf.Tensor], step: tf.Tensor, complain: Callable[..., np.int64]
    ) -> list[tf.Tensor]:
        if self._nonfinite == "propagate" or not vectors:
            return vectors
        if self._nonfinite == "zero":
            return [
                tf.where(tf.math.is_finite(vector), vector, tf.zeros_like(vector))
                for vector in vectors
            ]
        flags = tf.stack([tf.reduce_all(tf.math.is_finite(vector)) for vector in vectors])
        passed = tf.cond(
            tf.reduce_all(flags),
            lambda: tf.constant(0, tf.int64),
            lambda: tf.numpy_function(complain, [flags, step], tf.int64),
        )
        with tf.control_dependencies([passed]):
            return [tf.identity(vector) for vector in vectors]

    def _raise_nonfinite(self, whose: str, flags: np.ndarray, step: np.int64) -> np.int64:
        position = int(np.argmin(flags))
        gradient = self.gradients[position]
        others = int(np.sum(~flags)) - 1
        more = f" and {others} more" if others else ""
        raise NonFiniteError(
            f"Gradient {position} ({gradient.name}, shape {list(gradient.shape)}){more} {whose} "
            f"{self._rank} must be finite. Received: NaN or infinity in step {int(step)}. "
            '`nonfinite="zero"` drops such values, "propagate" lets them pass.'
        )
