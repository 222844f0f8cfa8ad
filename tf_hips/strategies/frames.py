# SPDX-License-Identifier: Apache-2.0
"""What Keras does not tell a strategy, read from the frames of the callers.

Keras passes neither the model nor the optimizer to the strategy: `optimizer_call` tells gradients
from other reductions, `model_in` finds the model in `compile` and `fit`, `length_of_fit` how long a
`fit` that begins is going to be.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import keras

_MAX_FRAMES = 80


def optimizer_call(num_values: int) -> tuple[list[Any], Any] | None:
    """The variables whose gradients a Keras optimizer is reducing right now, and the optimizer."""
    for frame in _frames():
        if frame.f_code.co_name == "_all_reduce_sum_gradients":
            pairs = frame.f_locals.get("filtered_grads_and_vars", [])
            if len(pairs) != num_values:
                return None
            return [variable for _, variable in pairs], frame.f_locals["self"]
    return None


def model_in(*methods: str) -> keras.Model | None:
    """The Keras model that runs one of `methods` on the call stack, the nearest one, or None."""
    for frame in _frames():
        if frame.f_code.co_name in methods:
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.Model):
                return owner
    return None


def length_of_fit() -> tuple[int | None, int] | None:
    """Steps per epoch (None: unknown) and epochs of a `fit` that makes its iterator right now.

    Returns:
        None where no `fit` is, or where the one there is makes its iterator for validation.
    """
    steps: int | None = None
    for frame in _frames():
        owner = frame.f_locals.get("self")
        is_iterator = frame.f_code.co_name == "__init__" and hasattr(owner, "num_batches")
        if owner is not None and is_iterator:
            steps = owner.num_batches
        if frame.f_code.co_name == "fit" and isinstance(owner, keras.Model):
            if "epoch_iterator" in frame.f_locals:
                return None
            epochs = frame.f_locals["epochs"] - frame.f_locals["initial_epoch"]
            return (None if steps is None else int(steps)), int(epochs)
    return None


def _frames() -> Iterator[types.FrameType]:
    """The frames of the callers, nearest first."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
