# SPDX-License-Identifier: Apache-2.0
"""The order of collectives inside graphs.

Every computation that contains collectives takes its turn, so one has ended on this rank before the
next begins. The order is that of construction, equal on all ranks, and two collectives of one name
never meet.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tf_hips.comm import primitives, watchdog
from tf_hips.comm.compressed import MakeVariable
from tf_hips.ops.flow import opaque


class Turns:
    """Lets computations that contain collectives run in the order of their construction.

    The watchdog is told, by a variable, that a turn has its inputs: what remains is to wait.
    """

    def __init__(self, make_variable: MakeVariable) -> None:
        """Starts with turn 0."""
        self._turn = make_variable(tf.constant(0, tf.int64), "turn")
        # The turn that was entered last, and which label it has. It goes on until it is counted.
        self._entered = make_variable(tf.constant([-1, 0], tf.int64), "entered")
        self._labels: list[tuple[str, str]] = []
        self._eager = 0  # turns whose collectives count themselves
        watchdog.watch(self)

    def __call__(self, compute: Callable[[], list[tf.Tensor]], label: str = "") -> list[tf.Tensor]:
        """Returns what `compute` returns, after all turns before it and before all after it.

        Args:
            compute: builds the computation.
            label: what is computed, for a reader who waits for it.
        """
        if tf.executing_eagerly():
            # Each collective marks itself; this is the name that a reader knows it by.
            with watchdog.named(label):
                outputs = compute()
            self._turn.assign_add(1, read_value=False)
            self._eager += 1
            return outputs
        turn = self._turn.read_value()
        with tf.control_dependencies([turn]), primitives.building() as built:
            outputs = compute()
        # Those in branches of this graph end with the branch.
        graph = tf.compat.v1.get_default_graph()
        here = [one for one in built if one.output.graph is graph]
        names = [one.name for one in built]
        # What the others get may come from what the first one brings.
        entered = self._enter(turn, [one.input for one in here[:1]], label, names)
        results = [one.output for one in here]
        with tf.control_dependencies([*outputs, *results, *entered]):
            done = self._turn.assign_add(1, read_value=True)
        with tf.control_dependencies([done]):
            return opaque(outputs)

    def _enter(
        self, turn: tf.Tensor, inputs: Sequence[tf.Tensor], label: str, names: Sequence[str]
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
        with tf.control_dependencies([turn, *inputs]):
            number = tf.constant(self._labels.index(entry), tf.int64)
            mark = self._entered.assign(tf.stack([turn, number]), read_value=False)
        return [] if mark is None else [mark]

    def where(self) -> tuple[int, tuple[str, str] | None]:
        """Turns of graphs begun, and the text and the key of the one that waits, if any does."""
        with tf.init_scope():
            entered, number = (int(one) for one in self._entered.numpy())
            turn = int(self._turn.numpy())
        begun = turn - self._eager
        return (begun + 1, self._labels[number]) if entered == turn else (begun, None)

    def leave(self) -> None:
        """Forgets a turn that has ended with an error."""
        with tf.init_scope():
            self._entered.assign([-1, 0])
