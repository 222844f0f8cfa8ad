# SPDX-License-Identifier: Apache-2.0
"""The order of collectives inside graphs.

Every computation that contains collectives takes its turn, so one has ended on this rank before the
next begins. The order is that of construction, equal on all ranks, and two collectives of one name
never meet.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tf_hips.comm import primitives, watchdog

MakeVariable = Callable[[tf.Tensor, str], tf.Variable]


class Turns:
    """Lets computations that contain collectives run in the order of their construction.

    To TensorFlow a Horovod operation is a pure function: it drops one whose result this rank does
    not use, and computes one of constants at optimisation time, once for all steps. The other
    ranks would wait. So results are witnessed here, and inputs must be made `opaque`.

    The watchdog is told, by a variable, that a turn has its inputs: what remains is to wait.
    """

    def __init__(self, make_variable: MakeVariable) -> None:
        """Starts with turn 0."""
        self._turn = make_variable(tf.constant(0, tf.int64), "turn")
        # The turn that was entered last, and which label it has. It goes on until it is counted.
        self._entered = make_variable(tf.constant([-1, 0], tf.int64), "entered")
        self._labels: list[tuple[str, str]] = []
        self._witness = Witness(make_variable)
        watchdog.watch(self)

    def __call__(
        self, compute: Callable[[tf.Tensor], list[tf.Tensor]], label: str = ""
    ) -> list[tf.Tensor]:
        """Returns what `compute` returns, after all turns before it and before all after it.

        Args:
            compute: gets the number of its turn, an int64 scalar that no optimiser can know.
            label: what is computed, for a reader who waits for it.
        """
        if tf.executing_eagerly():
            # Each collective marks itself; this is the name that a reader knows it by.
            with watchdog.named(label):
                return self._take(compute, label)
        return self._take(compute, label)

    def _take(self, compute: Callable[[tf.Tensor], list[tf.Tensor]], label: str) -> list[tf.Tensor]:
        turn = self._turn.read_value()
        with (
            tf.control_dependencies([turn]),
            primitives.built_names() as names,
            _made_opaque() as inputs,
        ):
            outputs = compute(turn)
        entered = [] if tf.executing_eagerly() else self._enter(turn, inputs, label, names)
        with tf.control_dependencies([*outputs, *self._witness(outputs), *entered]):
            done = self._turn.assign_add(1, read_value=True)
        with tf.control_dependencies([done]):
            return [tf.identity(output) for output in outputs]

    def _enter(
        self, turn: tf.Tensor, inputs: list[tf.Tensor], label: str, names: list[str]
    ) -> list[tf.Operation]:
        """What marks, in a graph, that `turn` has its inputs.

        The collectives do not wait for it, so it costs them nothing; the end of the turn does.
        """
        if not names:
            return []
        # Keras' names differ between ranks; those of collectives are what Horovod pairs.
        entry = (label or f"`{names[0]}`", " ".join(names))
        if entry not in self._labels:
            self._labels.append(entry)
        graph = tf.compat.v1.get_default_graph()
        here = [tensor for tensor in inputs if tensor.graph is graph]
        with tf.control_dependencies([turn, *here]):
            number = tf.constant(self._labels.index(entry), tf.int64)
            mark = self._entered.assign(tf.stack([turn, number]), read_value=False)
        return [] if mark is None else [mark]

    def where(self) -> tuple[int, tuple[str, str] | None]:
        """Turns begun, and the text and the key of the one that waits, if any does."""
        with tf.init_scope():
            entered, number = (int(one) for one in self._entered.numpy())
            turn = int(self._turn.numpy())
        return (turn + 1, self._labels[number]) if entered == turn else (turn, None)

    def leave(self) -> None:
        """Forgets a turn that has ended with an error."""
        with tf.init_scope():
            self._entered.assign([-1, 0])


_opaque = threading.local()


@contextlib.contextmanager
def _made_opaque() -> Iterator[list[tf.Tensor]]:
    """Collects what this thread makes opaque meanwhile."""
    before = getattr(_opaque, "inputs", None)
    inputs: list[tf.Tensor] = []
    _opaque.inputs = inputs
    try:
        yield inputs
    finally:
        _opaque.inputs = before


class Witness:
    """Uses values for the sake of using them."""

    def __init__(self, make_variable: MakeVariable) -> None:
        """Has seen nothing."""
        self._seen = make_variable(tf.constant(0.0), "witness")

    def __call__(self, values: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Makes sure that `values` are computed; returns what runs after them in a graph."""
        firsts = [
            tf.reduce_sum(tf.cast(tf.reshape(value, [-1])[:1], tf.float32))
            for value in values
            if value.shape.num_elements() != 0
        ]
        if not firsts:
            return []
        done = self._seen.assign(tf.add_n(firsts), read_value=False)
        return [] if done is None else [done]


def opaque(value: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """`value` as a vector that no optimiser takes for a constant; costs nothing.

    Args:
        value: a tensor.
        number: an int64 scalar that is read from a variable and is never negative.
    """
    inputs = getattr(_opaque, "inputs", None)
    if inputs is not None:
        inputs.append(value)
    size = value.shape.num_elements()
    begin = tf.reshape(tf.minimum(number, 0), [1])
    # A slice of the whole is not copied. A reshape to a shape that is not known would not do:
    # TensorFlow computes that of constants all the same.
    vector = tf.slice(tf.reshape(value, [-1]), begin, [-1 if size is None else size])
    vector.set_shape([size])
    return vector
