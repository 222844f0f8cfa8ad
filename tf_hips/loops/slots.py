# SPDX-License-Identifier: Apache-2.0
"""The slots of an optimizer as they were before its first step."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_hips.callbacks import snapshot


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

    def restore(self) -> None:
        """Gives slots and counts their first values; learning rates and loss scales stay.

        The number of steps stays, too, where the learning rate depends on it.
        """
        snapshot.build_optimizer(self._model)
        optimizer = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self._optimizer is not inner:
            self._optimizer, self._values = inner, self._first(inner)
        for variable, value in zip(inner.variables, self._values, strict=True):
            if value is not None:
                variable.assign(np.broadcast_to(value, variable.shape))
        # The mean that `use_ema` keeps begins with the weights, also where steps go on counting.
        for mean, weight in zip(*_averaged(inner), strict=True):
            mean.assign(weight)

    def _first(self, inner: keras.optimizers.Optimizer) -> list[np.ndarray | None]:
        twin = type(inner).from_config(inner.get_config())
        twin.build([_like(one) for one in self._model.trainable_variables])
        is_scheduled = isinstance(
            getattr(inner, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule
        )
        kept = [getattr(inner, "_learning_rate", None)]
        if is_scheduled:
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


def _averaged(inner: keras.optimizers.Optimizer) -> tuple[list[Any], list[Any]]:
    if not inner.use_ema:
        return [], []
    return inner._model_variables_moving_average, inner._trainable_variables


def _like(variable: keras.Variable) -> keras.Variable:
    return keras.Variable(tf.zeros(variable.shape), dtype=variable.dtype, name=variable.name)
