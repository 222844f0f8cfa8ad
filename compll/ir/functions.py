# SPDX-License-Identifier: Apache-2.0
"""What the built-in functions that no standard fixes compute, in NumPy: the same bits everywhere.

Libraries of mathematics differ in their last bits, so exp2 and log2 are written out here: steps on
bits, exact operations, and a polynomial whose products and sums are rounded one by one. Every back
end follows these steps in this order (tf_hips/cc/runtime/functions.h for C++).
"""

from typing import Any

import numpy as np

Value = Any  # np.float32 | np.int64 | np.bool_ or an array of one of them

# exp2(f) = 1 + f (c0 + f (c1 + ...)) for |f| <= 1/2, to 2^-24: Moshier, Cephes, exp2f.
EXP2 = (
    6.931472028550421e-1,
    2.402264791363012e-1,
    5.550332471162809e-2,
    9.618437357674640e-3,
    1.339887440266574e-3,
    1.535336188319500e-4,
)
# log2((1 + s) / (1 - s)) = s (c0 + s^2 (c1 + ...)), |s| < 0.18: the series 2 / ((2 k + 1) ln 2).
LOG2 = (
    2.885390081777927,
    0.9617966939259757,
    0.5770780163555854,
    0.4121985831111324,
    0.32059889797532524,
)
NAN_BITS = 0x7FC00000
_SQRT_HALF = 0x3F3504F3  # the bits of the binary32 next to sqrt(1/2)


def sign(x: Value) -> Value:
    """1, -1 or 0 of x's type; 0 for NaN."""
    one = np.asarray(x).dtype.type(1)
    return np.where(np.greater(x, 0), one, np.where(np.less(x, 0), -one, one - one))[()]


def float_bits(x: Value) -> Value:
    """The bits of a binary32, as int64; every NaN as 0x7FC00000."""
    words = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    return np.where(np.isnan(x), np.int64(NAN_BITS), words)[()]


def bits_float(x: Value) -> Value:
    """The binary32 whose bits are the low 32 of an int64."""
    words = np.bitwise_and(np.asarray(x, np.int64), np.int64(0xFFFFFFFF)).astype(np.uint32)
    return words.view(np.float32)[()]


def exp2(x: Value) -> Value:
    """2^x: exact where x is an integer, else within two units of the last place."""
    x = np.asarray(x, np.float32)
    # Beyond these ends the result is infinity or 0 already; NaN goes the way of the lower one.
    low, high = np.float32(-151), np.float32(129)
    held = np.where(x > low, np.where(x < high, x, high), low)
    half = np.where(held < 0, np.float32(-0.5), np.float32(0.5))
    whole = np.trunc(held + half)
    rest = held - whole
    power = _polynomial(EXP2, rest) * rest + np.float32(1)
    k = whole.astype(np.int64)
    first = k >> 1
    # Two factors, because 2^k alone may be too small or too large; only the second product rounds.
    scaled = power * _power_of_two(first) * _power_of_two(k - first)
    return np.where(np.isnan(x), np.float32(np.nan), scaled)[()]


def log2(x: Value) -> Value:
    """The logarithm to base 2: exact where x is a power of two; NaN below 0, -infinity at 0."""
    x = np.asarray(x, np.float32)
    is_tiny = x < np.float32(2.0**-126)
    normal = np.where(is_tiny, x * np.float32(2.0**24), x)
    # 2^e m with m from sqrt(1/2) to sqrt(2): near 1 the difference m - 1 is exact.
    shifted = normal.view(np.uint32).astype(np.int64) - _SQRT_HALF
    e = (shifted >> 23) - np.where(is_tiny, 24, 0)
    m = ((shifted & 0x007FFFFF) + _SQRT_HALF).astype(np.uint32).view(np.float32)
    over = m - np.float32(1)
    s = over / (over + np.float32(2))
    value = e.astype(np.float32) + _polynomial(LOG2, s * s) * s
    value = np.where(x == np.float32(np.inf), x, value)
    value = np.where(x == 0, np.float32(-np.inf), value)
    return np.where(x >= 0, value, np.float32(np.nan))[()]


def _power_of_two(k: Value) -> Value:
    return ((k + 127) << 23).astype(np.uint32).view(np.float32)


def _polynomial(coefficients: tuple[float, ...], x: Value) -> Value:
    """c0 + x (c1 + x (c2 + ...)), from the inside out."""
    value = np.float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + np.float32(coefficient)
    return value
