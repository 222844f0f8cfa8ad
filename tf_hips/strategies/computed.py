# SPDX-License-Identifier: Apache-2.0
"""Gradients that have their values when ranks make weights equal: of which weights are they?

    eager      always computed before they are handed over: in the step, or before it
    in a graph computed as it runs, so of weights that are equal by then; unless it is fed with
               them, which shows where it reads the weights nowhere before it hands them over

They are right where the weights were the same on all workers already. Where a meeting has made
weights others, gradients from before are of those that are gone: `Moved` remembers which.

A step may also compute with weights that it does not train: a graph tells which it has `read`.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError
from tf_hips.strategies.changes import digest_of


@dataclasses.dataclass(frozen=True)
class Handed:
    """What is seen where a step hands something over to be reduced.

    Attributes:
        computed: gradients that have their values already; None where they are computed as a graph
            runs, or nothing but sums are handed over.
        read: weights that a function which is being traced has read, and ranks have not met over.
    """

    computed: Sequence[Any] | None = None
    read: Sequence[tf.Variable] = ()


class Moved:
    """The weights that meetings have made others, on any rank, and when that was."""

    def __init__(self) -> None:
        """There was no meeting."""
        # The number of a tensor that came later, and of the step, which may have begun before.
        self._since: dict[int, tuple[weakref.ref[tf.Variable], int, int, bool]] = {}
        self._step = 0
        self._inputs: Any = ()

    def begin_step(self, inputs: Any = ()) -> None:
        """A step begins: what it reads are the weights as they are now.

        Args:
            inputs: all that it is called with, in any structure.
        """
        self._step += 1
        self._inputs = inputs

    def end_step(self) -> None:
        """The step is over; what it was called with is kept no longer."""
        self._inputs = ()

    def add(self, variables: Iterable[tf.Variable], *, in_step: bool) -> None:
        """Remembers weights that have become others now. Eager.

        Args:
            variables: the weights.
            in_step: whether a step is in progress, which may have read them before.
        """
        now = _number(tf.constant([0])) or 0
        for variable in variables:
            self._since[id(variable)] = weakref.ref(variable), now, self._step, in_step

    def note(
        self, variables: Sequence[tf.Variable], before: Sequence[str], *, in_step: bool
    ) -> None:
        """Remembers those that have become others on any rank. On all ranks; eager.

        Args:
            variables: the weights that ranks have met over.
            before: their digests from before that.
            in_step: as in `add`.
        """
        own = [digest_of(one) != was for one, was in zip(variables, before, strict=True)]
        everyone = primitives.gather_objects(own, "which weights have become others")
        moved = [any(told) for told in zip(*everyone, strict=True)]
        self.add(itertools.compress(variables, moved), in_step=in_step)

    def check(self, variables: Sequence[tf.Variable], gradients: Sequence[Any]) -> None:
        """Raises if weights have become others since their gradients were computed. Eager.

        Ranks meet only where some have. Zeros, for what is not trained in a step, are right
        whatever the weights were.

        Raises:
            ProtocolError: on all ranks.
        """
        if self.first(variables, gradients) is None:
            return
        own = [not _is_zero(gradient) for gradient in gradients]
        everyone = primitives.gather_objects(own, "gradients from before a meeting")
        are_some = [any(told) for told in zip(*everyone, strict=True)]
        chosen = (list(itertools.compress(each, are_some)) for each in (variables, gradients))
        moved = self.first(*chosen)
        if moved is not None:
            raise ProtocolError(computed_before(moved.name))

    def first(
        self, variables: Sequence[tf.Variable], gradients: Sequence[Any]
    ) -> tf.Variable | None:
        """The first of `variables` that has become another since its gradient was computed.

        Where that was in the middle of this step, it is any gradient: what is made of one (clipped,
        unscaled) is younger than what it is made of. So it is at the beginning of this step, where
        a function is fed with them and the step is called with the like: these may be older. (What
        a step computes itself and feeds into a function is of the weights as they are.)
        """
        for variable, gradient in zip(variables, gradients, strict=True):
            reference, since, step, in_step = self._since.get(id(variable), (None, 0, 0, False))
            if reference is None or reference() is not variable:
                continue
            number = _number(gradient)
            is_of_now = step == self._step and (in_step or self._is_given(_values(gradient)))
            if is_of_now or (number is not None and number < since):
                return variable
        return None

    def _is_given(self, gradient: Any) -> bool:
        """Whether what stands for a gradient in a graph may be what the step is called with."""
        return tf.is_symbolic_tensor(gradient) and any(
            one.dtype.is_floating and gradient.shape.is_compatible_with(one.shape)
            for one in map(_values, tf.nest.flatten(self._inputs))
            if tf.is_tensor(one)
        )


def are_fed(
    gradients: Sequence[Any], trained: Sequence[tf.Variable], known: Iterable[tf.Variable]
) -> bool:
    """Whether the function that is being traced is fed with gradients that it hands over.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
        trained: whose gradients these are.
        known: variables in which ranks look for gradients that steps have kept.

    Returns:
        Whether no function around has read one of `trained` so far, and a gradient depends on
        floats from outside: arguments, tensors that exist already, variables that are not known.
    """
    if read(trained):
        return False
    outside = {id(inner): outer for outer, inner in _captures()}
    looked_at = {id(variable.handle) for variable in known}
    return any(
        source.dtype.is_floating or (source.dtype == tf.resource and id(source) not in looked_at)
        for source in _sources(gradients, outside)
    )


def read(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Those of `variables` that the functions which are being traced have read, or set, so far."""
    handles = {id(outer) for outer, _ in _captures()}
    return [variable for variable in variables if id(variable.handle) in handles]


def computed_before(name: str) -> str:
    """What is said of gradients of other weights than those that all begin with."""
    return (
        "Weights must exist, and be equal on all workers, before gradients are computed with them. "
        f"Received: gradients of {name} and others that have their values already: the weights "
        "were made inside of an eager step, or in `tf_hips.local()`, or the gradients were "
        "computed outside of the step that applies them, with values that are others on other "
        "workers. Build all models before the loop, and call `strategy.run(lambda: None)` on all "
        "workers then, outside of a `tf.function`; or compute gradients and apply them in one "
        "`tf.function`."
    )


def _captures() -> Iterator[tuple[Any, Any]]:
    """Tensors that graphs which are being traced have from outside, and what stands for them.

    Branches and loops are such graphs, too, with tensors from the graph around them.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):
        yield from graph.captures
        graph = graph.outer_graph


def _sources(gradients: Sequence[Any], outside: dict[int, Any]) -> Iterator[Any]:
    """What gradients in a graph depend on and comes from outside of all graphs.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
        outside: by ids of what stands in a graph for a tensor from outside, that tensor.
    """
    waiting = [one for one in map(_values, gradients) if tf.is_tensor(one)]  # others are constants
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in outside:
            waiting.append(outside[id(tensor)])
        elif not tf.is_symbolic_tensor(tensor) or tensor.op.type == "Placeholder":
            yield tensor  # it exists already, or is an argument
        else:
            waiting += tensor.op.inputs


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _is_zero(gradient: Any) -> bool:
    values = _values(gradient)
    return not tf.is_symbolic_tensor(values) and not np.any(np.asarray(values))


def _number(gradient: Any) -> int | None:
    """TensorFlow counts the tensors that it makes: one of a smaller number was there before.

    None of what is no tensor that exists.
    """
    values = _values(gradient)
    return None if tf.is_symbolic_tensor(values) else getattr(values, "_id", None)
