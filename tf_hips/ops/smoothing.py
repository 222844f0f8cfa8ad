# SPDX-License-Identifier: Apache-2.0
"""Momentum at the sender: what is encoded is a running mean of its gradients.

    momentum(error_feedback(onebit), beta=0.9)

    m <- 0.9 m + 0.1 g          float32, 0 at first, a row of what encoding keeps
    packet of m                 by the inner compressor, which adds its residual to m

Rows of honest senders that are running means of many gradients lie nearer to each other than
gradients do, so robust rules leave less room for a lie (Karimireddy et al., 2021; Farhadkhani et
al., 2022). There is no correction of the first steps, in which m is short. A mean of such rows,
with plain SGD behind it, is SGD with momentum at a learning rate of (1 - beta) times as much.

Here are the parameters, and in NumPy what the arithmetic is. Encoders have it in C++, chunk by
chunk before the codec (cc/runtime/momentum.h), and on a GPU in TensorFlow's operations (ops.graph).

Invariant: all make the same bits. A GPU or a thread may take denormals for 0: so what is at most
    TINY becomes 0, and above it a denormal summand changes nothing.
Invariant: m is finite.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tf_hips.ops import registry
from tf_hips.ops.registry import Parameter

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

MOMENTUM = "momentum"

PARAMETERS = (Parameter("beta", default=0.9, minimum=0.0, maximum=0.9999),)

TINY = np.float32(2**-96)


def checked(
    inner: "Compressor | None", given: Mapping[str, int | float]
) -> tuple[tuple[str, int | float], ...]:
    """Returns (name, value) of the parameters of momentum before `inner`.

    Raises:
        TypeError: a value is not a number of the right kind.
        ValueError: a parameter is unknown, or its value out of range, or `inner` is none to wrap.
    """
    values = registry.checked(MOMENTUM, PARAMETERS, given)
    if inner is None or inner.name == MOMENTUM:
        raise ValueError(
            f"`{MOMENTUM}` must wrap one compressor without momentum. "
            f"Received: inner={inner and inner.text}"
        )
    if inner.is_warmup or inner.is_mixed:
        raise ValueError(
            f"`{MOMENTUM}` must stand inside of `{inner.name}`: write "
            f"{inner.name}({MOMENTUM}(...), ...). Received: {inner.text}"
        )
    if not inner.makes_packets:
        raise ValueError(
            f"`{MOMENTUM}` must wrap what makes packets: give the optimizer a momentum, which "
            f"does the same to sums of low rank. Received: {inner.text}"
        )
    if inner.has_state and not inner.has_residual:
        raise ValueError(
            f"`{MOMENTUM}` must wrap a codec without state, with error feedback or without: one "
            f"with state has a momentum of its own, or may have. Received: {inner.text}"
        )
    return tuple(values.items())


def shown(params: Mapping[str, int | float]) -> str:
    """The parameters as text."""
    return f"beta={PARAMETERS[0].shown(params['beta'])}"


def shares(compressor: "Compressor") -> tuple[np.float32, np.float32]:
    """What m and a gradient are multiplied with."""
    beta = np.float32(dict(compressor.params)["beta"])
    return beta, np.float32(1) - beta


def moved(
    compressor: "Compressor", momentum: npt.NDArray[np.float32], gradient: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Takes a gradient into m.

    Args:
        compressor: the momentum.
        momentum: m, float32 [n], updated in place; 0 where that would not be finite, as residuals.
        gradient: float32 [n].

    Returns:
        What is to be encoded, float32 [n]: the gradient where that is not finite, elsewhere m
        before what is not finite in it became 0.
    """
    beta, rest = shares(compressor)
    with np.errstate(all="ignore"):
        new = momentum * beta + gradient * rest
        new = np.where(np.abs(new) <= TINY, np.float32(0), new)
    momentum[...] = np.where(np.isfinite(new), new, np.float32(0))
    return np.where(np.isfinite(gradient), new, gradient)
