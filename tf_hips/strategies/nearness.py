# SPDX-License-Identifier: Apache-2.0
"""How far values of a variable are apart, and whether rounding may have made that.

measure    of two values that are here
Sketch     of values elsewhere, by a few sums of each: sums of all elements with random signs
are apart by the norm of what the values are apart, in the mean of their squares
(Johnson and Lindenstrauss, 1984)
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tf_hips.strategies.replicas import value_of

# Of a variable's norm. What rounding makes of thousands of steps is hundreds of times less
# (docs/assumptions.md), what was done on one worker alone nearly always more.
TOLERANCE = 1e-3
# The same for types of few digits, in distances from 1 to the next number.
_UNITS = 8
_DISTANCES = {tf.bfloat16: 2.0**-7, tf.float16: 2.0**-10}
# Of what elements of like variables are in the root mean square: a single number may be next to 0
# by chance, and then what rounding has made of it is not small beside it.
_FLOOR = 1e-5
# What is smaller is flushed to 0 by some, and not by others.
_LEAST = 1e-30
_BLOCK = 1 << 18  # elements that are compared at a time, in float64

# Sums in a sketch: their squares' mean is some 50 % off, and a limit of twice as much bears that.
_SUMS = 8
_SLACK = 2.0
_DIGITS = 7


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far the value of a variable is from another one.

    Attributes:
        share: norm of their difference, as a share of the larger one's.
        is_rounding: whether rounding may have made it.
    """

    share: float
    is_rounding: bool


def measure(
    own: npt.NDArray[Any], other: npt.NDArray[Any], scale: float = 0.0, distance: float = 0.0
) -> Gap:
    """Compares two values of a variable.

    Args:
        own: of floating elements.
        other: of the same shape and type.
        scale: root mean square of the elements of variables like this one.
        distance: from 1 to the next number of its type; of float32 and longer ones it may be 0.

    Returns:
        What is not finite on both alike counts as a difference that rounding does not make.
    """
    if not own.size:
        return Gap(0.0, is_rounding=True)
    squares = np.zeros(3)
    for begin in range(0, own.size, _BLOCK):
        mine, theirs = (
            one.reshape(-1)[begin : begin + _BLOCK].astype(np.float64) for one in (own, other)
        )
        with np.errstate(over="ignore", invalid="ignore"):
            parts = (theirs - mine, mine, theirs)
            found = np.array([np.dot(one, one) for one in parts])
        if not np.isfinite(found).all():  # seldom, and far slower
            is_alike = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
            if not np.isfinite((mine, theirs))[:, ~is_alike].all():
                return Gap(math.inf, is_rounding=False)
            is_counted = ~is_alike | np.isfinite(mine)
            with np.errstate(over="ignore"):
                found = np.array([np.dot(one[is_counted], one[is_counted]) for one in parts])
        squares += found
    apart_norm, *norms = np.sqrt(squares)
    root = math.sqrt(own.size)
    norm = max(*norms, root * _LEAST)
    allowed = _allowed(norm, root * scale, distance)
    if not math.isfinite(allowed):  # squares of float64 may be beyond it
        return Gap(math.inf, is_rounding=False)
    return Gap(float(apart_norm / norm), bool(apart_norm <= allowed))


def distance_of(dtype: tf.DType) -> float:
    """What `measure` takes for variables of a type."""
    return _DISTANCES.get(dtype, 0.0)


def _allowed(norm: float, like: float, distance: float) -> float:
    """Greatest norm of a difference that rounding may have made."""
    return max(TOLERANCE, _UNITS * distance) * norm + _FLOOR * like


def sketch(value: npt.NDArray[Any]) -> list[float]:
    """Norm, and sums with random signs, of the finite elements of a value. JSON values."""
    draw = np.random.PCG64(value.size)  # its raw bits are the same in every NumPy
    square, sums = 0.0, np.zeros(_SUMS)
    for begin in range(0, value.size, _BLOCK):
        block = value.reshape(-1)[begin : begin + _BLOCK].astype(np.float64)
        block = np.where(np.isfinite(block), block, 0.0)
        square += float(np.dot(block, block))
        drawn = draw.random_raw(-(-block.size // 8)).astype("<u8").view(np.uint8)[: block.size]
        sums += 2.0 * (block @ np.unpackbits(drawn[:, np.newaxis], axis=1)) - block.sum()
    return [float(f"{one:.{_DIGITS}g}") for one in (math.sqrt(square), *sums)]


def are_sketches_near(
    own: Sequence[float], other: Sequence[float], size: int, scale: float, distance: float
) -> bool:
    """Whether rounding may have made what two sketches are apart.

    Args:
        own: of a value, by `sketch`.
        other: of another one, or between those of several.
        size: elements of the variable.
        scale: as for `measure`.
        distance: as for `measure`.
    """
    if not size:
        return True
    root = math.sqrt(size)
    first, *rest = zip(own, other, strict=True)
    # Not by squares: a liar's numbers may have none in float64.
    apart = math.hypot(*(mine - theirs for mine, theirs in rest)) / math.sqrt(_SUMS)
    allowed = _allowed(max(*first, root * _LEAST), root * scale, distance)
    return apart <= _SLACK * allowed and abs(first[0] - first[1]) <= _SLACK * allowed


def scales_of(variables: Sequence[tf.Variable]) -> dict[bool, float]:
    """Root mean square of an element, by whether its variable is trained: slots may be smaller."""
    return {
        is_weight: _root_mean_square(one for one in variables if one.trainable == is_weight)
        for is_weight in {bool(one.trainable) for one in variables}
    }


def _root_mean_square(variables: Iterable[tf.Variable]) -> float:
    """Of all finite elements of floating variables."""
    total, count = 0.0, 0
    for one in variables:
        if not one.dtype.is_floating:
            continue
        value = value_of(one).reshape(-1)
        for begin in range(0, value.size, _BLOCK):
            block = value[begin : begin + _BLOCK].astype(np.float64)
            block = block[np.isfinite(block)]
            total += float(np.dot(block, block))
            count += block.size
    return math.sqrt(total / count) if count else 0.0
