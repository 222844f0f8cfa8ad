# SPDX-License-Identifier: Apache-2.0
"""The order of collectives inside graphs.

Every computation that contains collectives takes its turn, so one has ended on this rank before the
next begins. The order is that of construction, equal on all ranks, and two collectives of one name
never meet.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]


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
