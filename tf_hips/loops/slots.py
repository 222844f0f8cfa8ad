# SPDX-License-Identifier: Apache-2.0
"""The slots of an optimizer as they were before its first step.

Where slots begin anew, so does what counts their steps: Adam divides a mean of j gradients by
1 - beta^j. Where the learning rate is a schedule, the optimizer's own count goes on for it, and the
step at which the slots began is kept beside it (`hooks.begun`).
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.callbacks import snapshot
from tf_hips.strategies import hooks


class FirstSlots:
    """First values of a model's optimizer; a slot of one number takes the memory of one."""

    def __init__(self, model: keras.Model) -> None:
        """Remembers the optimizer; looks at nothing yet.

        Args:
            model: a compiled model.
        """
        self._model = model
        self._optimizer: Any = None  # that the values are of: a model may be compiled again
        self._values: list[np.ndarray | None] = []
        self._begun: tf.Variable | None = None  # as of `hooks`, where a backup finds it
        self._counted: Any = None  # the optimizer that it is of

    def make(self, make_variable: Callable[..., tf.Variable]) -> None:
        """Makes what is kept; what a backup has of it goes into it here."""
        self._begun = make_variable(tf.zeros([], tf.int64), "slots_begun")

    def count(self) -> None:
        """Lets the optimizer count the steps of its slots; before its first step here."""
        inner = self._inner()
        if self._begun is None or self._counted is inner or not _is_scheduled(inner):
            return
        known = hooks.begun(inner)
        if self._counted is None and int(self._begun.numpy()):  # of a backup
            known.assign(self._begun)
        self._begun.assign(known)
        self._counted = inner

    def restore(self) -> None:
        """Gives slots and counts their first values; learning rates and loss scales stay.

        The number of steps stays, too, where the learning rate depends on it; the slots count
        theirs from here.
        """
        snapshot.build_optimizer(self._model)
        inner = self._inner()
        if self._optimizer is not inner:
            self._optimizer, self._values = inner, self._first(inner)
        for variable, value in zip(inner.variables, self._values, strict=True):
            if value is not None:
                variable.assign(np.broadcast_to(value, variable.shape))
        if _is_scheduled(inner):
            hooks.begun(inner).assign(inner._iterations.value)
            if self._begun is not None:
                self._begun.assign(inner._iterations.value)
        # The mean that `use_ema` keeps begins with the weights, also where steps go on counting.
        for mean, weight in zip(*_averaged(inner), strict=True):
            mean.assign(weight)

    def _inner(self) -> Any:
        optimizer = self._model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    def _first(self, inner: keras.optimizers.Optimizer) -> list[np.ndarray | None]:
        twin = type(inner).from_config(inner.get_config())
        twin.build([_like(one) for one in self._model.trainable_variables])
        kept = [getattr(inner, "_learning_rate", None)]
        if _is_scheduled(inner):
            kept.append(inner.iterations)
        values: list[np.ndarray | None] = []
        for variable, first in zip(inner.variables, twin.variables, strict=True):
            if any(variable is one for one in kept):
                values.append(None)
                continue
            value = np.asarray(first.numpy())
            is_one_number = value.size > 1 and bool(np.all(value == value.flat[0]))
            values.append(value.reshape(-1)[:1].copy() if is_one_number else value)
        return values


def _is_scheduled(inner: keras.optimizers.Optimizer | None) -> bool:
    rate = getattr(inner, "_learning_rate", None)
    return isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)


def _averaged(inner: keras.optimizers.Optimizer) -> tuple[list[Any], list[Any]]:
    if not inner.use_ema:
        return [], []
    return inner._model_variables_moving_average, inner._trainable_variables


def _like(variable: keras.Variable) -> keras.Variable:
    return keras.Variable(tf.zeros(variable.shape), dtype=variable.dtype, name=variable.name)
