# SPDX-License-Identifier: Apache-2.0
"""Weights that are made while a function is traced, and whether they have values when it runs.

A `tf.function` that makes variables is traced twice, and gives them their values between the two
traces: there is time to make them equal. Where a first value depends on what comes into the
function it is another way: both traces become branches of one graph, and the variable gets its
value as the graph runs. No trace can see it, so nobody could make it equal before it is used.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_hips.errors import ProtocolError
from tf_hips.strategies.changes import is_ready


class Born:
    """Remembers in which trace variables were made."""

    def __init__(self) -> None:
        """Knows no variable."""
        self._graphs: dict[int, tuple[weakref.ref[tf.Variable], weakref.ref[tf.Graph]]] = {}

    def add(self, variable: tf.Variable) -> None:
        """Remembers where a new variable is being made."""
        self._graphs.pop(id(variable), None)  # of one that is gone
        for graph in functions_being_traced()[:1]:
            self._graphs[id(variable)] = weakref.ref(variable), weakref.ref(graph)

    def is_made_in(self, variable: tf.Variable, graph: tf.Graph) -> bool:
        """Whether a variable was made while `graph` was traced, which may not be over."""
        born = self._graphs.get(id(variable))
        return born is not None and born[0]() is variable and born[1]() is graph

    def check(self, trained: Sequence[tf.Variable], graphs: Sequence[tf.Graph]) -> None:
        """Raises where weights without values are trained in another trace than that made them.

        Args:
            trained: whose gradients are being reduced.
            graphs: what `functions_being_traced` says there.
        """
        for variable in trained:
            if is_ready(variable) or any(self.is_made_in(variable, one) for one in graphs):
                continue
            raise ProtocolError(
                "Weights must have their values before a step computes gradients with them. "
                f"Received: {variable.name}, made inside of a `tf.function` from what comes into "
                "it, which is another value on other workers. Build the model before the loop, or "
                "make the variable's first value from what is no input of the step."
            )


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
