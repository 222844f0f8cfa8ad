# SPDX-License-Identifier: Apache-2.0
"""Who sends what to whom, hop by hop, so that each part of a sum ends with one rank.

What is summed is cut into segments. In a hop a rank sends its partial sums of some segments; who
gets them adds what it has itself. After the last hop the owner of a segment has the whole sum. This
is the first half of an allreduce (reduce-scatter); in the second half owners send their segments to
everyone.

    ring       N - 1 hops to the neighbour, one segment each
    butterfly  log2 N hops; a half, a quarter, ... of the segments goes to a partner (recursive
               halving); N is a power of two
    blocks     binary blocks: N is cut into powers of two, each block is a butterfly, and then each
               hands what it has to the next larger one; any N

Invariant: a rank sends each segment at most once, after everything that it gets of it, and never
one that it owns. So a rank that encodes what it sends encodes each element once.

Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (IJHPCA
2005), section 4.5; Rabenseifner, Optimization of Collective Reduction Operations (ICCS 2004).
"""

import dataclasses
import functools
from collections.abc import Callable

RING, BUTTERFLY, BLOCKS = "ring", "butterfly", "blocks"

# Bytes. Below, what a collective costs whatever it carries is more than what one receiver at a time
# saves.
_LEAST_ROUND = 1 << 16


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One message of a hop.

    Attributes:
        source: the rank that sends.
        target: the rank that receives.
        segments: whose partial sums it carries, ascending.
    """

    source: int
    target: int
    segments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How partial sums reach the owners of segments.

    Attributes:
        owners: the rank that ends with the sum of each segment.
        hops: the messages of each hop; a hop begins on a rank when the one before it has ended
            there.
    """

    owners: tuple[int, ...]
    hops: tuple[tuple[Transfer, ...], ...]


@functools.cache
def ring(num_ranks: int) -> Schedule:
    """The schedule of a ring of `num_ranks` >= 1 ranks."""
    _check(num_ranks)
    hops = [
        tuple(
            Transfer(rank, (rank + 1) % num_ranks, ((rank - 1 - hop) % num_ranks,))
            for rank in range(num_ranks)
        )
        for hop in range(num_ranks - 1)
    ]
    return Schedule(tuple(range(num_ranks)), tuple(hops))


def butterfly(num_ranks: int) -> Schedule:
    """The schedule of recursive halving.

    Raises:
        ValueError: `num_ranks` is no power of two.
    """
    _check(num_ranks)
    if num_ranks & (num_ranks - 1):
        raise ValueError(
            "a butterfly must have a power of two of ranks; blocks take any number. "
            f"Received: {num_ranks} ranks"
        )
    return blocks(num_ranks)


@functools.cache
def blocks(num_ranks: int) -> Schedule:
    """The schedule of binary blocks, for any `num_ranks` >= 1."""
    _check(num_ranks)
    sizes = [1 << bit for bit in range(num_ranks.bit_length() - 1, -1, -1) if num_ranks >> bit & 1]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    num_segments = sizes[0]
    hops: dict[int, list[Transfer]] = {}
    for start, size in zip(starts, sizes, strict=True):
        for hop, transfers in enumerate(_halving(start, size, num_segments)):
            hops.setdefault(hop, []).extend(transfers)
    # The smallest block is ready first; what it hands on must be there before the next one goes on.
    ready = 0
    for place in range(len(sizes) - 1, 0, -1):
        hop = max(ready, sizes[place - 1].bit_length() - 1)
        hops.setdefault(hop, []).extend(
            _handing_on(starts[place], sizes[place], starts[place - 1], sizes[place - 1], sizes[0])
        )
        ready = hop + 1
    return Schedule(
        tuple(range(num_segments)),
        tuple(
            tuple(sorted(hops[hop], key=lambda one: (one.source, one.target)))
            for hop in sorted(hops)
        ),
    )


HOPS: dict[str, Callable[[int], Schedule]] = {RING: ring, BUTTERFLY: butterfly, BLOCKS: blocks}
"""Schedules of so many ranks, by the name of their topology."""


def has_rounds(num_ranks: int, num_bytes: int) -> bool:
    """Whether each rank sends its messages to all others one after the other, in rounds.

    In a round every rank sends to one other and receives from one other, both at the full rate of
    its link; at once, streams to several receivers get in each other's way. With two ranks there is
    only one.

    Args:
        num_ranks: ranks of the exchange.
        num_bytes: of the largest message.
    """
    return num_ranks > 2 and num_bytes >= _LEAST_ROUND


def _halving(start: int, size: int, num_segments: int) -> list[list[Transfer]]:
    """Hops inside a block of `size` ranks; member i ends with the i-th of `size` equal runs."""
    width = num_segments // size
    hops = []
    distance = size // 2
    while distance:
        hop = []
        for member in range(size):
            partner = member ^ distance
            # Runs that this member still has, and its partner keeps.
            runs = [
                run
                for run in range(size)
                if run // (2 * distance) == member // (2 * distance)
                and run & distance == partner & distance
            ]
            segments = tuple(
                segment for run in runs for segment in range(run * width, (run + 1) * width)
            )
            hop.append(Transfer(start + member, start + partner, segments))
        hops.append(hop)
        distance //= 2
    return hops


def _handing_on(
    start: int, size: int, next_start: int, next_size: int, num_segments: int
) -> list[Transfer]:
    """What a block hands to the next larger one: each member's run, cut as the others' runs are."""
    width = num_segments // next_size
    return [
        Transfer(
            start + target // (next_size // size),
            next_start + target,
            tuple(range(target * width, (target + 1) * width)),
        )
        for target in range(next_size)
    ]


def _check(num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"`num_ranks` must be at least 1. Received: num_ranks={num_ranks}")
