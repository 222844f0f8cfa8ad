# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of update rules for processes without TensorFlow: float32 arrays, through ctypes.

Each function is one pass over memory, releases the GIL, and writes new arrays: what was given stays
as it was. So a result that is refused has changed nothing. Formulas, and the order of operations
that makes results equal NumPy's bit for bit, stand in cc/runtime/update.h.
"""

import ctypes
import enum
import functools
from typing import Any

import numpy as np

from tf_hips.errors import NonFiniteError
from tf_hips.ops import library
from tf_hips.ops.native import Floats

_NOT_FINITE = 1


class SecondMoment(enum.IntEnum):
    """How `adaptive` keeps squares of gradients. Numbers are those of cc/runtime/update.h."""

    ADAGRAD = 0
    ADAM = 1
    YOGI = 2


def scale(x: Floats, factor: float) -> Floats:
    """Returns `factor` x.

    Raises:
        NonFiniteError: an element of the result is not finite; so with all functions here.
    """
    out = np.empty_like(x)
    _call("scale", x.size, _read(x), factor, out.ctypes.data)
    return out


def add_scaled(base: Floats, x: Floats, factor: float, out: Floats | None = None) -> Floats:
    """Returns base + `factor` x; in `out`, which must not be one of them, if that is given.

    Raises:
        NonFiniteError: as of `scale`.
        ValueError: `out` is read-only.
    """
    target = np.empty_like(base) if out is None else out
    if not target.flags.writeable:
        raise ValueError("`out` must be writable. Received: a read-only array")
    pointers = _read(base), _read(x, base.size), factor, _read(target, base.size)
    _call("add_scaled", base.size, *pointers)
    return target


def momentum(
    gradient: Floats, velocity: Floats, *, rate: float, beta: float, nesterov: bool
) -> tuple[Floats, Floats]:
    """Returns the step and the new velocity, as torch.optim.SGD has them."""
    n = gradient.size
    step, new = _empty(n, 2)
    _call(
        "momentum",
        n,
        _read(gradient),
        _read(velocity, n),
        rate,
        beta,
        nesterov,
        new.ctypes.data,
        step.ctypes.data,
    )
    return step, new


def adam(
    gradient: Floats,
    first: Floats,
    second: Floats,
    *,
    rate: float,
    beta_1: float,
    beta_2: float,
    epsilon: float,
) -> tuple[Floats, Floats, Floats]:
    """Returns the step and the new moments, as Keras' Adam has them.

    Args:
        gradient: float32, as all arrays here.
        first: the first moment.
        second: the second moment.
        rate: the learning rate, corrected for moments that began with 0.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the root of the second moment.
    """
    n = gradient.size
    step, new_first, new_second = _empty(n, 3)
    _call(
        "adam",
        n,
        _read(gradient),
        _read(first, n),
        _read(second, n),
        rate,
        beta_1,
        beta_2,
        epsilon,
        new_first.ctypes.data,
        new_second.ctypes.data,
        step.ctypes.data,
    )
    return step, new_first, new_second


def adaptive(
    gradient: Floats,
    first: Floats | None,
    second: Floats,
    *,
    rate: float,
    beta_1: float,
    beta_2: float,
    tau: float,
    kind: SecondMoment,
) -> tuple[Floats, Floats | None, Floats]:
    """Returns the step and the new moments of Algorithm 2 of FedOpt (Reddi et al., 2021).

    Args:
        gradient: what is averaged of the children, a pseudo-gradient.
        first: the first moment; None: the gradient stands for it.
        second: the second moment.
        rate: the server's learning rate.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        tau: added to the root of the second moment.
        kind: how the second moment is kept.
    """
    n = gradient.size
    step, new_second = _empty(n, 2)
    new_first = None if first is None else np.empty(n, np.float32)
    _call(
        "adaptive",
        n,
        _read(gradient),
        None if first is None else _read(first, n),
        _read(second, n),
        rate,
        beta_1,
        beta_2,
        tau,
        kind,
        None if new_first is None else new_first.ctypes.data,
        new_second.ctypes.data,
        step.ctypes.data,
    )
    return step, new_first, new_second


def delayed(
    gradient: Floats,
    total: Floats,
    received: Floats,
    square: Floats | None,
    *,
    rate: float,
    strength: float,
    decay: float,
    epsilon: float,
) -> tuple[Floats, Floats | None]:
    """Returns the new total of steps and the new mean square of DC-ASGD (Zheng et al., 2017).

    Args:
        gradient: of one child, of weights that others have moved since.
        total: the sum of all steps so far.
        received: what the child had subtracted of it.
        square: the mean square of gradients, with which the strength is divided; None: constant.
        rate: the learning rate.
        strength: of the compensation, lambda.
        decay: of the mean square.
        epsilon: added to the mean square under the root.
    """
    n = gradient.size
    [new_total] = _empty(n, 1)
    new_square = None if square is None else np.empty(n, np.float32)
    _call(
        "delayed",
        n,
        _read(gradient),
        _read(total, n),
        _read(received, n),
        None if square is None else _read(square, n),
        rate,
        strength,
        decay,
        epsilon,
        new_total.ctypes.data,
        None if new_square is None else new_square.ctypes.data,
    )
    return new_total, new_square


def mix(gradient: Floats, total: Floats, received: Floats, *, alpha: float) -> Floats:
    """Returns the new total of steps of FedAsync (Xie et al., 2019).

    Args:
        gradient: how far the child has moved away from the weights that it had.
        total: the sum of all steps so far.
        received: what the child had subtracted of it.
        alpha: share of the child's weights in the new ones.
    """
    n = gradient.size
    [new_total] = _empty(n, 1)
    _call(
        "mix",
        n,
        _read(gradient),
        _read(total, n),
        _read(received, n),
        alpha,
        new_total.ctypes.data,
    )
    return new_total


def _empty(n: int, count: int) -> list[Floats]:
    return [np.empty(n, np.float32) for _ in range(count)]


def _read(array: Floats, n: int | None = None) -> int:
    """The address of an array that C will read."""
    if array.dtype != np.float32 or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(
            "an update must be of contiguous float32 arrays of one dimension. Received: "
            f"{array.dtype} of shape {array.shape}, strides={array.strides}"
        )
    if n is not None and array.size != n:
        raise ValueError(
            f"arrays of an update must have {n} elements, as the first one. Received: {array.size}"
        )
    return int(array.ctypes.data)


def _call(name: str, n: int, *arguments: object) -> None:
    status = _functions()[name](*arguments, n)
    if status == _NOT_FINITE:
        raise NonFiniteError(
            "an update must be finite. Received: an overflow in the server's update rule"
        )
    if status != 0:
        raise ValueError(f"an update must have all of its arrays. Received: status {status}")


@functools.cache
def _functions() -> dict[str, Any]:
    pointer, f32, i32 = ctypes.c_void_p, ctypes.c_float, ctypes.c_int32
    signatures: dict[str, tuple[Any, ...]] = {
        "scale": (pointer, f32, pointer),
        "add_scaled": (pointer, pointer, f32, pointer),
        "momentum": (pointer, pointer, f32, f32, i32, pointer, pointer),
        "adam": (*[pointer] * 3, *[f32] * 4, *[pointer] * 3),
        "adaptive": (*[pointer] * 3, *[f32] * 4, i32, *[pointer] * 3),
        "delayed": (*[pointer] * 4, *[f32] * 4, *[pointer] * 2),
        "mix": (*[pointer] * 3, f32, pointer),
    }
    with_size = {name: (*types, ctypes.c_int64) for name, types in signatures.items()}
    return library.functions("tf_hips_update_", with_size, "update rules")
