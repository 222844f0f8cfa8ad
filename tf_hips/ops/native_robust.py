# SPDX-License-Identifier: Apache-2.0
"""What robust aggregation computes of all rows, for processes without TensorFlow, through ctypes.

Rows are float32 arrays of one length, wherever they are; nothing is copied. Each function is one
pass over memory and releases the GIL. Results depend neither on the number of threads nor on the
processor. Sums are given by chunk of 2^20 elements: servers that hold other chunks put theirs
together and have what one server would have. Definitions stand in cc/runtime/robust.h.
"""

import ctypes
import enum
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_hips.ops import library
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.native import OUT_OF_MEMORY, Doubles, Floats

Rows: TypeAlias = Sequence[Floats] | Floats

MAX_ROWS = 1024
"""Rows of one call at most."""


class CoordinateRule(enum.IntEnum):
    """What becomes of the sorted values of one coordinate. Numbers are those of robust.h."""

    MEDIAN = 0
    TRIMMED = 1
    NEAREST = 2
    MAJORITY = 3


def coordinate(
    rows: Rows,
    rule: CoordinateRule,
    drop: int = 0,
    mixing: Floats | None = None,
    out: Floats | None = None,
) -> tuple[Floats, Doubles]:
    """Applies a rule to each coordinate.

    Args:
        rows: n of d elements.
        rule: which one.
        drop: values left out at each end (TRIMMED), or in all (NEAREST); 0 of others.
        mixing: [m, n]: not the rows are sorted, but m weighted sums of them.
        out: float32 [d] to write, none of the rows; made when None.

    Returns:
        The result, [d], and the sums of squares of the rows, [chunks, n]; a row whose sum is not
        finite has spoilt the result.

    Raises:
        ValueError: rows differ in length, or `drop` leaves nothing.
        TypeError: a row is not a float32 array of one dimension.
    """
    pointers, n, d = _pointers(rows)
    if not 0 <= drop < MAX_ROWS:  # the library has 32 bits for it
        raise ValueError(f"`drop` must be in [0, {MAX_ROWS}). Received: drop={drop}")
    result = _target(out, d)
    squares = np.zeros((_num_chunks(d), n), np.float64)
    weights = None if mixing is None else _weights(mixing, n)
    status = _functions()["coordinate"](
        pointers,
        n,
        d,
        None if weights is None else weights.ctypes.data,
        0 if weights is None else weights.shape[0],
        rule,
        drop,
        result.ctypes.data,
        squares.ctypes.data,
    )
    _check(status, f"n={n}, drop={drop}")
    return result, squares


def distances(rows: Rows, with_pairs: bool = True) -> tuple[Doubles, Doubles]:
    """Returns sums of squares of rows, and of differences of each two rows.

    Args:
        rows: n of d elements.
        with_pairs: False: sums of rows only.

    Returns:
        [chunks, n], and [chunks, n (n - 1) / 2] in the order of `numpy.triu_indices(n, 1)`.

    Raises:
        ValueError, TypeError: as for `coordinate`.
    """
    pointers, n, d = _pointers(rows)
    squares = np.zeros((_num_chunks(d), n), np.float64)
    pairs = np.zeros((_num_chunks(d), n * (n - 1) // 2 if with_pairs else 0), np.float64)
    at = pairs.ctypes.data if with_pairs else None
    status = _functions()["distances"](pointers, n, d, squares.ctypes.data, at)
    _check(status, f"n={n}")
    return squares, pairs


def mix(rows: Rows, weights: Floats, out: Floats | None = None) -> Floats:
    """Returns `weights` [m, n] times rows [n, d]: m weighted sums, in the order of rows.

    Args:
        rows: n of d elements.
        weights: float32 [m, n].
        out: float32 [d] to write where m is 1, none of the rows; made when None.

    Raises:
        ValueError, TypeError: as for `coordinate`.
    """
    pointers, n, d = _pointers(rows)
    given = _weights(weights, n)
    if out is not None and given.shape[0] != 1:
        raise ValueError(f"`out` is for one weighted sum. Received: {given.shape[0]}")
    result = np.empty((given.shape[0], d), np.float32) if out is None else _target(out, d)[None]
    targets, _, _ = _pointers(result)
    status = _functions()["mix"](pointers, n, d, given.ctypes.data, given.shape[0], targets)
    _check(status, f"n={n}, m={given.shape[0]}")
    return result


def add_sketches(
    rows: Rows,
    halves: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], Doubles]],
) -> None:
    """Adds rows to the sums of random projections; definition in cc/runtime/sketch.h.

    Args:
        rows: n of d elements.
        halves: of each half ceil(d / 64) words of signs; the turns, in [0, width), of ceil(d /
            width) blocks; and the sums that are added to, float64 [n, 2 width].

    Raises:
        ValueError: rows differ in length, or a half does not fit them.
        TypeError: a row is not a float32 array of one dimension.
    """
    pointers, n, d = _pointers(rows)
    told = (_Half * len(halves))()
    for place, (signs, turns, sums) in enumerate(halves):
        width = sums.shape[-1] // 2
        fits = sums.shape == (n, 2 * width) and width > 0
        if not fits or signs.size != -(-d // 64) or turns.size != -(-d // width):
            raise ValueError(
                f"a half must have sums [{n}, 2 width], a sign for each of {d} elements and a turn "
                f"for each block. Received: sums of shape {list(sums.shape)}, {signs.size} words "
                f"of signs, {turns.size} turns"
            )
        for array, kind in ((signs, np.uint64), (turns, np.int64), (sums, np.float64)):
            if array.dtype != kind or not array.flags.c_contiguous:
                raise ValueError(
                    f"an array of a half must be contiguous {np.dtype(kind)}. Received: "
                    f"{array.dtype}, strides={array.strides}"
                )
        if not sums.flags.writeable:
            raise ValueError("sums of a half must be writable. Received: a read-only array")
        told[place] = _Half(signs.ctypes.data, turns.ctypes.data, width, sums.ctypes.data)
    status = _functions()["sketch"](pointers, n, d, ctypes.addressof(told), len(halves))
    if status == OUT_OF_MEMORY:
        raise MemoryError("there is no memory to make sketches")
    if status != 0:
        raise ValueError("turns must be in [0, width). Received: another one")


class _Half(ctypes.Structure):
    """TfHipsSketchHalf."""

    _fields_ = (
        ("signs", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("sums", ctypes.c_void_p),
    )


def _num_chunks(d: int) -> int:
    return -(-d // CHUNK)


def _pointers(rows: Rows) -> tuple[Any, int, int]:
    """Addresses of the rows, how many there are, and their length."""
    n = len(rows)
    if not 1 <= n <= MAX_ROWS:
        raise ValueError(f"there must be 1 to {MAX_ROWS} rows. Received: {n}")
    d = rows[0].size
    for number, row in enumerate(rows):
        if row.dtype != np.float32 or row.ndim != 1 or not row.flags.c_contiguous:
            raise TypeError(
                "rows must be contiguous float32 arrays of one dimension. Received: row "
                f"{number}, {row.dtype} of shape {row.shape}, strides={row.strides}"
            )
        if row.size != d:
            raise ValueError(
                f"rows must have {d} elements, as the first one. Received: {row.size} of row "
                f"{number}"
            )
    return (ctypes.c_void_p * n)(*(row.ctypes.data for row in rows)), n, d


def _target(out: Floats | None, d: int) -> Floats:
    if out is None:
        return np.empty(d, np.float32)
    if out.dtype != np.float32 or out.shape != (d,) or not out.flags.carray:
        raise ValueError(
            f"`out` must be contiguous, aligned, writable float32 of shape [{d}]. Received: "
            f"{out.dtype} of shape {list(out.shape)}, strides={out.strides}, "
            f"writeable={out.flags.writeable}"
        )
    return out


def _weights(weights: Floats, n: int) -> Floats:
    given = np.ascontiguousarray(weights, np.float32)
    if given.ndim != 2 or given.shape[1] != n or not 1 <= given.shape[0] <= MAX_ROWS:
        raise ValueError(f"weights must be of shape [m, {n}]. Received: {given.shape}")
    return given


def _check(status: int, received: str) -> None:
    if status == OUT_OF_MEMORY:
        raise MemoryError("there is no memory to aggregate rows")
    if status != 0:
        raise ValueError(f"a rule must leave a value of each coordinate. Received: {received}")


@functools.cache
def _functions() -> dict[str, Any]:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    rows = (pointer, i32, i64)
    signatures: dict[str, tuple[Any, ...]] = {
        "coordinate": (*rows, pointer, i32, i32, i32, pointer, pointer),
        "distances": (*rows, pointer, pointer),
        "mix": (*rows, pointer, i32, pointer),
        "sketch": (*rows, pointer, i32),
    }
    return library.functions("tf_hips_robust_", signatures, "robust aggregation")
