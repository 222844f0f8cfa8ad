# SPDX-License-Identifier: Apache-2.0
"""What `hadamard` computes, in NumPy: the same bits everywhere (decision 0070).

A segment of m = 2^k elements goes through k stages of butterflies, of strides 1, 2, 4, .. m / 2: of
each two elements a and b that are a stride apart, a + b and a - b take their places. In the end all
are multiplied by the binary32 that is nearest to 2^(-k / 2). Each step is rounded once. Every back
end follows these steps in this order (tf_hips/cc/runtime/hadamard.h for C++,
tf_hips/cc/cuda/hadamard.cuh).
"""

from typing import Any

import numpy as np

Value = Any  # an array of np.float32

# 2^(-k / 2) as binary32: for an odd k the one next to sqrt(1/2), and powers of two of it.
_SQRT_HALF = np.float32(0.70710678118654752)


def scale(length: int) -> np.float32:
    """What a segment of `length` elements, a power of two, is multiplied by."""
    k = length.bit_length() - 1
    power = np.float32(2.0 ** -(k // 2))
    return power * _SQRT_HALF if k % 2 else power


def segments(length: int, block: int) -> list[tuple[int, int]]:
    """Begin and end of what is transformed at once behind the last whole block of a vector.

    `length`: of the vector.
    """
    found = []
    begin, left = length // block * block, length % block
    while left:
        size = 1 << (left.bit_length() - 1)
        found.append((begin, begin + size))
        begin, left = begin + size, left - size
    return found


def hadamard(values: Value, block: int) -> Value:
    """The transform of each `block` elements of a vector, and of the segments of the last block.

    Args:
        values: float32 [n].
        block: a power of two.

    Returns:
        float32 [n].
    """
    values = np.asarray(values, np.float32)
    whole = values.size // block * block
    parts = [_transformed(values[:whole].reshape(-1, block))]
    for begin, end in segments(values.size, block):
        parts.append(_transformed(values[begin:end].reshape(1, -1)))
    return np.concatenate([part.reshape(-1) for part in parts])


def _transformed(rows: Value) -> Value:
    """The transforms of rows of a power of two of elements."""
    count, length = rows.shape
    stride = 1
    while stride < length:
        pairs = rows.reshape(count, length // (2 * stride), 2, stride)
        first, second = pairs[:, :, 0, :], pairs[:, :, 1, :]
        rows = np.stack([first + second, first - second], axis=2).reshape(count, length)
        stride *= 2
    return rows * scale(length)
