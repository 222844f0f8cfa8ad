# SPDX-License-Identifier: Apache-2.0
"""The passes of tf_hips/cc/runtime/robust.h in NumPy, bit for bit: what a GPU is compared with.

NumPy has no fused multiply-add. A product of two floats is exact in double; its sum with a third is
rounded to odd, and what is rounded to odd may be rounded again (Boldo and Melquiond, "Emulation of
FMA and correctly rounded sums", IEEE Transactions on Computers, 2008).
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

MEDIAN, TRIMMED, NEAREST, MAJORITY = range(4)
LANES, BLOCK, TASK, CHUNK = 16, 512, 1 << 15, 1 << 20


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c, rounded once; of finite values."""
    product = a.astype(np.float64) * b.astype(np.float64)
    other = c.astype(np.float64)
    total = product + other
    # What the sum has lost (Knuth's two-sum).
    virtual = total - product
    lost = (product - (total - virtual)) + (other - virtual)
    bits = total.view(np.int64)
    is_even = (lost != 0) & (bits % 2 == 0)
    # The neighbour on the side of the exact sum is odd; bits grow with the magnitude.
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    odd: Doubles = np.where(is_even, bits + towards, bits).view(np.float64)
    return odd.astype(np.float32)


def _sums(x: Floats) -> Doubles:
    """Sums of squares by chunk, in the order of robust.h."""
    d = x.size
    tasks = -(-d // TASK)
    blocks = TASK // BLOCK if tasks > 1 else -(-d // BLOCK)
    # [tasks, blocks, steps, lanes]; what is behind the end adds nothing.
    whole = np.zeros(tasks * blocks * BLOCK, np.float32)
    whole[:d] = x
    whole = whole.reshape(tasks, blocks, BLOCK // LANES, LANES)
    lanes = np.zeros((tasks, blocks, LANES), np.float32)
    for step in range(BLOCK // LANES):
        lanes = fused(whole[:, :, step], whole[:, :, step], lanes)
    of_tasks = np.zeros((tasks, LANES))
    for block in range(blocks):
        of_tasks += lanes[:, block]
    width = LANES // 2
    while width:
        of_tasks = of_tasks[:, :width] + of_tasks[:, width : 2 * width]
        width //= 2
    chunks = np.zeros(-(-d // CHUNK))
    for task in range(tasks):
        chunks[task // (CHUNK // TASK)] += of_tasks[task, 0]
    return chunks


def squares(rows: Floats) -> Doubles:
    """Sums of squares, [chunks, n]."""
    return np.stack([_sums(row) for row in rows], axis=1)


def distances(rows: Floats) -> Doubles:
    """Sums of squared differences, [chunks, n (n - 1) / 2]."""
    n = len(rows)
    pairs = [_sums(rows[i] - rows[j]) for i in range(n) for j in range(i + 1, n)]
    return np.stack(pairs, axis=1) if pairs else np.zeros((-(-rows.shape[1] // CHUNK), 0))


def mix(rows: Floats, weights: Floats) -> Floats:
    """Weighted sums, in the order of rows, [m, d]."""
    out = np.empty((len(weights), rows.shape[1]), np.float32)
    for k, some in enumerate(weights):
        out[k] = some[0] * rows[0]
        for weight, row in zip(some[1:], rows[1:], strict=True):
            out[k] = fused(np.full_like(row, weight), row, out[k])
    return out


def coordinate(rows: Floats, rule: int, drop: int) -> Floats:
    """What a rule makes of each coordinate, [d]."""
    n = len(rows)
    if rule == MAJORITY:
        return np.sign(np.sign(rows).sum(axis=0)).astype(np.float32)
    ordered = np.sort(rows + np.float32(0), axis=0)
    high = ordered[n // 2]
    median: Floats = high if n % 2 else (ordered[n // 2 - 1] + high) * np.float32(0.5)
    if rule == MEDIAN:
        return median
    if rule == TRIMMED:
        return _mean(ordered[drop : n - drop], n - 2 * drop)
    keep = n - drop
    kept = np.ones(ordered.shape, bool)
    for i in range(drop):
        is_left = median - ordered[i] > ordered[i + keep] - median
        kept[i] &= ~is_left
        kept[i + keep] &= is_left
    return _mean(np.where(kept, ordered, np.float32(0)), keep)


def _mean(values: Floats, count: int) -> Floats:
    total = np.zeros(values.shape[1], np.float32)
    for row in values:
        total = total + row
    return total / np.float32(count)
