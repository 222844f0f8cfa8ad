# SPDX-License-Identifier: Apache-2.0
"""One list of gradients on its way through a sum: checked, flattened, summed, shaped again.

Gradients are known by their position in the list that the optimizer hands over: Keras' names differ
between ranks.

Invariant: every sum takes its turn (`Turns`), so one has ended on this rank before the next begins.
The order is that of construction, equal on all ranks, and two collectives of one name never meet.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_hips.errors import NonFiniteError
from tf_hips.strategies.failures import Failures

NONFINITE_MODES = ("raise", "zero", "propagate")

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]
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


class Turns:
    """Lets computations that contain collectives run in the order of their construction.

    To TensorFlow a Horovod operation is a pure function: it drops one whose result this rank does
    not use, and computes one of constants at optimisation time, once for all steps. The other
    ranks would wait. So results are witnessed here, and inputs must be made `opaque`.
    """

    def __init__(self, make_variable: MakeVariable) -> None:
        """Starts with turn 0."""
        self._turn = make_variable(tf.constant(0, tf.int64), "turn")
        self._witness = Witness(make_variable)

    def __call__(self, compute: Callable[[tf.Tensor], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns what `compute` returns, after all turns before it and before all after it.

        Args:
            compute: gets the number of its turn, an int64 scalar that no optimiser can know.
        """
        turn = self._turn.read_value()
        with tf.control_dependencies([turn]):
            outputs = compute(turn)
        with tf.control_dependencies([*outputs, *self._witness(outputs)]):
            done = self._turn.assign_add(1, read_value=True)
        with tf.control_dependencies([done]):
            return [tf.identity(output) for output in outputs]


class Witness:
    """Uses values for the sake of using them."""

    def __init__(self, make_variable: MakeVariable) -> None:
        """Has seen nothing."""
        self._seen = make_variable(tf.constant(0.0), "witness")

    def __call__(self, values: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Makes sure that `values` are computed; returns what runs after them in a graph."""
        firsts = [
            tf.cast(tf.reshape(value, [-1])[0], tf.float32)
            for value in values
            if value.shape.num_elements()
        ]
        if not firsts:
            return []
        done = self._seen.assign(tf.add_n(firsts), read_value=False)
        return [] if done is None else [done]


def opaque(value: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """`value` as a vector that no optimiser takes for a constant; costs nothing.

    Args:
        value: a tensor of known shape.
        number: an int64 scalar that is read from a variable and is never negative.
    """
    size = value.shape.num_elements()
    vector = tf.reshape(value, tf.reshape(size + tf.minimum(number, 0), [1]))
    vector.set_shape([size])
    return vector


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
