# SPDX-License-Identifier: Apache-2.0
"""Which variables steps have changed: each is looked at before a step may change it, and again."""

import hashlib
import weakref
from collections.abc import Callable

import tensorflow as tf

from tf_hips.ps.terms.weights import bytes_of
from tf_hips.strategies.replicas import value_of


class Changes:
    """Digests of variables from before the first step that could change them."""

    def __init__(self) -> None:
        """Has looked at nothing."""
        self._digests: dict[int, tuple[weakref.ref[tf.Variable], str]] = {}
        self._new: list[weakref.ref[tf.Variable]] = []
        self._unused: dict[int, weakref.ref[tf.Variable]] = {}

    def add(self, variable: tf.Variable, *, in_step: bool) -> None:
        """Will notice what steps do to a new variable.

        Args:
            variable: the variable.
            in_step: whether a step has made it, which may change it at once.
        """
        self._digests.pop(id(variable), None)  # of one that is gone
        self._unused[id(variable)] = weakref.ref(variable)
        if in_step and tf.executing_eagerly() and is_ready(variable):
            self.look(variable)
        else:
            self._new.append(weakref.ref(variable))

    def look_at_new(self, is_settled: Callable[[tf.Variable], bool]) -> None:
        """Looks at those that a step may change from now on. Eager.

        Args:
            is_settled: whether nobody will ask for a variable.
        """
        self.note_used()
        if not self._new:
            return
        self._digests = {key: one for key, one in self._digests.items() if one[0]() is not None}
        new, self._new = self._new, []
        for variable in (reference() for reference in new):
            if variable is None or is_settled(variable):
                continue
            if is_ready(variable):
                self.look(variable)
            else:
                self._new.append(weakref.ref(variable))

    def look(self, variable: tf.Variable) -> None:
        """Takes what a variable is like now for what no step has changed."""
        self._digests[id(variable)] = weakref.ref(variable), digest_of(variable)

    def forget(self, variable: tf.Variable) -> None:
        """Will not be asked for a variable any more."""
        self._digests.pop(id(variable), None)

    def note_used(self) -> None:
        """From now on steps may have used all variables."""
        self._unused.clear()

    def is_unused(self, variable: tf.Variable) -> bool:
        """Whether no step has begun to run since a variable was made, but one being traced."""
        reference = self._unused.get(id(variable))
        return reference is not None and reference() is variable

    def has(self, variable: tf.Variable) -> bool:
        """Whether a step has changed a variable, on this rank, since it was looked at."""
        reference, digest = self._digests.get(id(variable), (None, ""))
        is_seen = reference is not None and reference() is variable
        return is_seen and digest_of(variable) != digest


def is_ready(variable: tf.Variable) -> bool:
    """Whether a variable has its value, and that is of numbers. Eager."""
    # Variables of other types hold no numbers; those created by a plain tf.function are initialised
    # after its trace.
    is_numeric = variable.dtype not in (tf.string, tf.resource, tf.variant)
    return is_numeric and bool(variable.is_initialized())


def digest_of(variable: tf.Variable) -> str:
    """Tells the values of a variable from others. Eager."""
    # As bytes without a copy of them: hashing knows no types but Python's own.
    return hashlib.sha256(bytes_of(value_of(variable))).hexdigest()
