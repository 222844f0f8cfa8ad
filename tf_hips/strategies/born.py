# SPDX-License-Identifier: Apache-2.0
"""Weights that are made while a function is traced, and whether they have values when it runs.

A `tf.function` that makes variables is traced twice, and gives them their values between the two
traces: there is time to make them equal. Where a first value depends on what comes into the
function it is another way: both traces become branches of one graph, and the variable gets its
value as the graph runs. No trace can see it, so nobody could make it equal before it is used.

A function around the one that reduces may make them: its second trace finds the inner one traced
already, unless that is made anew each time, and then nobody looks. That is known when it is over.
"""

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from tf_hips.errors import ProtocolError
from tf_hips.strategies.changes import is_ready


class Born:
    """Remembers in which trace variables were made."""

    def __init__(self) -> None:
        """Knows no variable."""
        self._graphs: dict[int, tuple[weakref.ref[tf.Variable], weakref.ref[tf.Graph]]] = {}
        # Reductions that wait for a second trace around them, and for which weights.
        self._waiting: dict[Hashable, list[weakref.ref[tf.Variable]]] = {}

    def add(self, variable: tf.Variable) -> None:
        """Remembers where a new variable is being made."""
        self._graphs.pop(id(variable), None)  # of one that is gone
        for graph in functions_being_traced()[:1]:
            self._graphs[id(variable)] = weakref.ref(variable), weakref.ref(graph)

    def is_made_in(self, variable: tf.Variable, graph: tf.Graph) -> bool:
        """Whether a variable was made while `graph` was traced, which may not be over."""
        born = self._graphs.get(id(variable))
        return born is not None and born[0]() is variable and born[1]() is graph

    def check(
        self, trained: Sequence[tf.Variable], graphs: Sequence[tf.Graph], occasion: Hashable
    ) -> None:
        """Raises where weights without values are trained in another trace than that made them.

        Args:
            trained: whose gradients are being reduced.
            graphs: what `functions_being_traced` says there; of them those in which, or around
                which, `check_met` is going to be called.
            occasion: the reduction, as `note_met` will name it.
        """
        is_outside = False
        for variable in trained:
            if is_ready(variable):
                continue
            if not any(self.is_made_in(variable, one) for one in graphs):
                raise ProtocolError(
                    "Weights must have their values before a step computes gradients with them. "
                    f"Received: {variable.name}, made inside of a `tf.function` where its first "
                    "value, or that of another variable made there, comes from what the function "
                    "is fed, which is another value on other workers; or made in a function around "
                    "the one that reduces. Build the model before the loop, or make first values "
                    "from what is no input of the step."
                )
            is_outside |= not self.is_made_in(variable, graphs[0])
        if is_outside:
            self._waiting[occasion] = [weakref.ref(variable) for variable in trained]

    def note_met(self, occasion: Hashable) -> None:
        """To be called when the weights of a reduction have been made equal."""
        self._waiting.pop(occasion, None)

    def check_met(self, graphs: Sequence[tf.Graph]) -> None:
        """Raises where no second trace has come to a reduction. At the end of a step; eager.

        Args:
            graphs: what `functions_being_traced` says around it.
        """
        for occasion, references in list(self._waiting.items()):
            alive = [one for one in (reference() for reference in references) if one is not None]
            if len(alive) < len(references):
                del self._waiting[occasion]
                continue
            late = next((one for one in alive if self._is_over(one, graphs)), None)
            if late is not None:
                del self._waiting[occasion]
                raise ProtocolError(
                    "Weights must be equal on all workers before a step computes gradients with "
                    f"them. Received: {late.name}, made in a `tf.function` around the one that "
                    "reduces, which is traced once, before they have values. Build the model "
                    "before the loop, or do without the inner `tf.function`."
                )

    def _is_over(self, variable: tf.Variable, graphs: Sequence[tf.Graph]) -> bool:
        """Whether the trace that made a variable is."""
        return is_ready(variable) or not any(self.is_made_in(variable, one) for one in graphs)


def functions_being_traced() -> list[tf.Graph]:
    """The graphs of the functions that are being traced, the innermost one first."""
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    graphs = []
    # Branches and loops are graphs, too; around all is TensorFlow's for code that runs eagerly.
    while hasattr(graph, "outer_graph"):
        if type(graph).__name__ == "FuncGraph":
            graphs.append(graph)
        graph = graph.outer_graph
    return graphs
