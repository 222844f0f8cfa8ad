# SPDX-License-Identifier: Apache-2.0
"""Orders of numbers and what is chosen by them, in NumPy: sort, top_k, scatter."""

import numpy as np

from compll.ir.functions import Value
from compll.packet import PacketError

_SIGN = np.uint32(0x80000000)
_NAN = np.uint32(0x7FC00000)


def _keys(values: Value) -> Value:
    """Words in the order of floats, -0 before 0."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return np.where(words & _SIGN, ~words, words | _SIGN)


def sort(values: Value, is_descending: bool) -> Value:
    """A vector in order; NaNs, which become one, are last either way."""
    values = np.asarray(values)
    if values.dtype != np.float32:
        ascending = np.sort(values)
        return ascending[::-1] if is_descending else ascending
    is_nan = np.isnan(values)
    words = np.sort(_keys(values[~is_nan]))
    words = words[::-1] if is_descending else words
    plain = np.where(words & _SIGN, words & ~_SIGN, ~words)
    tail = np.full(np.count_nonzero(is_nan), _NAN, np.uint32)
    return np.concatenate([plain, tail]).astype(np.uint32).view(np.float32)


def top_k(values: Value, count: int) -> Value:
    """Indices, ascending, of the `count` largest floats; the first of equals, NaN below all."""
    values = np.asarray(values, np.float32)
    keys = np.where(np.isnan(values), np.uint32(0), _keys(values + np.float32(0)))
    order = np.argsort(~keys, kind="stable")[: max(0, count)]
    return np.sort(order).astype(np.int64)


def scatter(size: int, indices: Value, values: Value, used: int | None) -> Value:
    """Zeros [size] with values[k] + 0 at indices[k], for k < used.

    Raises:
        PacketError: the indices do not ascend strictly within 0 .. size - 1, or there are fewer
            than `used`.
    """
    most = min(len(indices), len(values))
    used = most if used is None else used
    if not 0 <= used <= most:
        raise PacketError(f"the packet must have at most {most} values. Received: {used}")
    places = indices[:used]
    before = np.concatenate([np.full(min(1, used), -1, np.int64), places[:-1]])
    wrong = np.flatnonzero((places <= before) | (places >= size))
    if wrong.size:
        raise PacketError(
            f"the indices of a packet must ascend within 0 .. {size - 1}. "
            f"Received: {places[wrong[0]]} at place {wrong[0]}"
        )
    out = np.zeros(max(0, size), np.float32)
    out[places] = values[:used] + np.float32(0)
    return out
