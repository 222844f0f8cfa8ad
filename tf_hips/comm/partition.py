# SPDX-License-Identifier: Apache-2.0
"""Who owns which chunk, and which gradients travel together: arithmetic, the same on every rank.

Owners hold whole chunks, cut contiguously in model order, so what an owner receives from one sender
is one run of bytes. Buckets join neighbouring gradients of one type, because a collective costs
about a millisecond whatever it carries.

Invariant: both are functions of sizes alone. Two ranks that agree about the model agree about the
    plan.
"""

import bisect
import itertools
from collections.abc import Hashable, Sequence


def owners(chunk_sizes: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Cuts chunks into `size` contiguous ranges of nearly equal weight.

    Each cut is put where the chunks before it are nearest to their share, so no range weighs more
    than its share plus one chunk.

    Args:
        chunk_sizes: weight of each chunk (elements), in model order.
        size: number of owners, at least 1.

    Returns:
        `(start, stop)` of each owner's chunks; together they cover all chunks in order. Some may be
        empty.

    Raises:
        ValueError: `size` is below 1 or a chunk has a negative weight.
    """
    if size < 1:
        raise ValueError(f"`size` must be at least 1. Received: size={size}")
    if any(weight < 0 for weight in chunk_sizes):
        raise ValueError(f"`chunk_sizes` must not be negative. Received: chunk_sizes={chunk_sizes}")
    ends = [0, *itertools.accumulate(chunk_sizes)]
    total = ends[-1]
    cuts = [0]
    for index in range(1, size):
        # Scaled by `size`, so that everything stays an integer and no rank rounds differently.
        share = index * total
        after = bisect.bisect_left(ends, share, key=lambda end: end * size)
        before = max(after - 1, 0)
        nearest = before if share - ends[before] * size <= ends[after] * size - share else after
        cuts.append(max(nearest, cuts[-1]))
    cuts.append(len(chunk_sizes))
    return list(itertools.pairwise(cuts))


def buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], limit_bytes: int
) -> list[list[int]]:
    """Groups positions of one kind into buckets of at most `limit_bytes`, keeping their order.

    A tensor larger than the limit gets a bucket of its own.

    Args:
        sizes_bytes: bytes of each tensor, in position order.
        kinds: what must not be mixed in one bucket (the data type), in the same order.
        limit_bytes: the most a bucket may hold, unless one tensor alone is larger.

    Returns:
        Positions of each bucket; the buckets are in order of their first position.

    Raises:
        ValueError: the two lists have different lengths or the limit is not positive.
    """
    if len(sizes_bytes) != len(kinds):
        raise ValueError(
            "`kinds` must have one entry per tensor. "
            f"Received: {len(sizes_bytes)} sizes, {len(kinds)} kinds"
        )
    if limit_bytes < 1:
        raise ValueError(f"`limit_bytes` must be positive. Received: limit_bytes={limit_bytes}")
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for position, (num_bytes, kind) in enumerate(zip(sizes_bytes, kinds, strict=True)):
        group, filled = open_groups.get(kind, (None, 0))
        if group is None or filled + num_bytes > limit_bytes:
            group, filled = [], 0
            groups.append(group)
        group.append(position)
        open_groups[kind] = (group, filled + num_bytes)
    return groups
