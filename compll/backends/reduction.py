# SPDX-License-Identifier: Apache-2.0
"""Reductions in the order that every back end follows.

Floats: blocks of 1024 elements, the last one padded with the reducer's neutral value; in a block,
lane l of 16 folds elements l, l + 16, ... from its first; lanes combine l with l + 8, then + 4, +
2, + 1; blocks combine pairwise, an odd one being carried up; the initial value comes first of all.
No elements: the initial value. Integers wrap, so their order does not matter.

`block_reduce` reduces blocks of 16 to 1024 elements, each like one of these cut to its length.
"""

import numpy as np

from compll.ir import semantics
from compll.ir.functions import Value
from compll.ir.reducers import IDENTITY

BLOCK = 1024
LANES = 16


def combine(reducer: str, x: Value, y: Value) -> Value:
    """One step of a reducer."""
    match reducer:
        case "sum":
            return np.add(x, y)
        case "prod":
            return np.multiply(x, y)
        case "max":
            return semantics.maximum(x, y)
        case "min":
            return semantics.minimum(x, y)
        case _:
            raise ValueError(
                f"`reducer` must be sum, prod, min or max. Received: reducer={reducer!r}"
            )


def reduce_int(reducer: str, init: Value, values: Value) -> Value:
    """Reduces a vector of integers; for count, and, or also one of floats."""
    values = np.asarray(values)
    match reducer:
        case "sum":
            return np.add(init, np.sum(values, dtype=np.int64))
        case "prod":
            return np.multiply(init, np.prod(values, dtype=np.int64))
        case "count":
            return np.add(init, np.int64(np.count_nonzero(values != 0)))
        case "and":
            return np.int64(bool(init != 0) and bool(np.all(values != 0)))
        case "or":
            return np.int64(bool(init != 0) or bool(np.any(values != 0)))
        case _:
            return (
                combine(reducer, init, values.max() if reducer == "max" else values.min())
                if values.size
                else init
            )


def reduce_float(reducer: str, init: Value, values: Value) -> Value:
    """Reduces a vector of float32 in the fixed tree."""
    values = np.asarray(values, np.float32)
    if values.size == 0:
        return init
    level = _blocks(reducer, values, BLOCK)
    while level.size > 1:
        paired = combine(reducer, level[0 : level.size - 1 : 2], level[1::2])
        level = np.concatenate([paired, level[-1:]]) if level.size % 2 else paired
    return combine(reducer, init, level[0])


def reduce_blocks(reducer: str, block: int, init: Value, values: Value, is_float: bool) -> Value:
    """The reduction of each `block` neighbouring elements; the last block may be shorter."""
    values = np.asarray(values)
    if is_float:
        return combine(reducer, init, _blocks(reducer, values.astype(np.float32), block))
    parts = [reduce_int(reducer, init, values[k : k + block]) for k in range(0, values.size, block)]
    return np.array(parts, np.int64)


def _blocks(reducer: str, values: Value, block: int) -> Value:
    """Each block without an initial value."""
    blocks = -(-values.size // block)
    padded = np.full(blocks * block, IDENTITY[reducer], np.float32)
    padded[: values.size] = values
    rows = padded.reshape(blocks, block // LANES, LANES)
    lanes = rows[:, 0, :]
    for row in range(1, block // LANES):
        lanes = combine(reducer, lanes, rows[:, row, :])
    width = LANES // 2
    while width:
        lanes = combine(reducer, lanes[:, :width], lanes[:, width : 2 * width])
        width //= 2
    return lanes[:, 0]
