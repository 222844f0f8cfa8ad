# SPDX-License-Identifier: Apache-2.0
"""What `hadamard` computes, in NumPy: the same bits everywhere (decision 0070).

m = 2^k elements go through k stages of butterflies, of strides 1, 2, 4, .. m / 2: of each two
elements a and b that are a stride apart, a + b and a - b take their places. In the end all are
multiplied by the binary32 that is nearest to 2^(-k / 2). Each step is rounded once. Every back end
follows these steps in this order (tf_hips/cc/runtime/hadamard.h for C++,
tf_hips/cc/cuda/hadamard.cuh).

A last block of L elements, L no power of two, goes through C A D B D B D A C, where

    A, B    the transform of its first m elements, and of its last m: m the largest power of two < L
    C       elements j and j + L - h, j < h = L / 2, become (a + b) and (a - b), times sqrt(1 / 2)
    D       element j is negated where bit 31 of j * j * 2654435769 is set

Each keeps lengths and undoes itself, and the order is the same from both ends, so the whole does,
too. Without D, parts that overlap little, or nearly wholly, undo each other: A B A of 1023 elements
leaves the first ones nearly as they were.
"""

from typing import Any

import numpy as np

Value = Any  # an array of np.float32

# 2^(-k / 2) as binary32: for an odd k the one next to sqrt(1/2), and powers of two of it.
_SQRT_HALF = np.float32(0.70710678118654752)


def scale(length: int) -> np.float32:
    """What the transform of `length` elements, a power of two, is multiplied by."""
    k = length.bit_length() - 1
    power = np.float32(2.0 ** -(k // 2))
    return power * _SQRT_HALF if k % 2 else power


def hadamard(values: Value, block: int) -> Value:
    """The transform of each `block` elements of a vector, and of a last block that is shorter.

    Args:
        values: float32 [n].
        block: a power of two.

    Returns:
        float32 [n].
    """
    values = np.array(values, np.float32)
    whole = values.size // block * block
    values[:whole] = _transformed(values[:whole].reshape(-1, block)).reshape(-1)
    if whole < values.size:
        values[whole:] = _last(values[whole:])
    return values


def signs(length: int) -> Value:
    """What D multiplies elements by: float32 [length] of 1 and -1."""
    squares = np.arange(length, dtype=np.uint32) ** 2
    return np.where(squares * np.uint32(2654435769) >> 31, np.float32(-1), np.float32(1))


def _last(values: Value) -> Value:
    """The transform of a last block."""
    length = values.size
    most = 1 << (length.bit_length() - 1)
    if most == length:
        return _transformed(values.reshape(1, -1))[0]
    first, last = slice(0, most), slice(length - most, length)
    values, turns = _pairs(values), signs(length)
    for number, part in enumerate((first, last, last, first)):
        if number:
            values = values * turns
        values[part] = _transformed(values[part].reshape(1, -1))[0]
    return _pairs(values)


def _pairs(values: Value) -> Value:
    """C: each two elements that are half a block apart; a middle one stays."""
    half = values.size // 2
    first, second = values[:half], values[values.size - half :]
    middle = values[half : values.size - half]
    return np.concatenate([(first + second) * _SQRT_HALF, middle, (first - second) * _SQRT_HALF])


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
