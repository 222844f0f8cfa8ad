# SPDX-License-Identifier: Apache-2.0
"""A loss is divided by the number of replicas once, however many losses it is made of.

Gradients of all workers are summed, so a mean over one worker's rows must be divided by their
number. Keras does that where it makes the mean of a loss's values. It passes by a loss that comes
as one number already (`Dice`, a function that ends in a mean), and of losses that call losses it
may divide a part only, or a part twice.
"""

import contextvars
from collections.abc import Callable
from typing import Any

from keras.src.losses import loss as keras_losses

# Reductions to a mean over rows. A sum is that of all workers' rows as it is.
MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")

_is_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("tf_hips_in_loss", default=False)
_scale = keras_losses.scale_loss_for_distribution


def install() -> None:
    """Lets Keras divide nothing of what `divided` will divide."""
    keras_losses.scale_loss_for_distribution = _of_outermost


def divided(keras_method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `keras_method` returns, a mean over this worker's rows, as its share of that of all."""
    token = _is_inside.set(True)
    try:
        value = keras_method(*args, **kwargs)
    finally:
        _is_inside.reset(token)
    return _of_outermost(value)


def _of_outermost(value: Any) -> Any:
    return value if _is_inside.get() else _scale(value)
