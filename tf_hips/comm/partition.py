# SPDX-License-Identifier: Apache-2.0
"""Who owns which chunk, and which gradients travel together: arithmetic, the same on every rank.

Chunks are what is encoded, owned and kept: who owns one depends on the model and the number of
ranks, not on what it travels with, so residuals fit whatever the buckets are. Buckets join
neighbours, because a collective costs about a millisecond whatever it carries, and are several,
because one is encoded while another travels.

Invariant: all of it is a function of sizes and of the plan. Two ranks that agree about these agree
    about every collective.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

# Large enough that a collective's fixed cost vanishes beside the encoding, small enough that a
# large model has several.
BUCKET_ELEMENTS = 1 << 24
"""The most elements of a bucket; the first ones of packets have less (see `piece_buckets`), and an
exact sum's gradients are never cut."""

NOTE_BYTES = 8
"""Of what each rank says about what is not finite, beside its packets of a bucket."""

_RAMP = 2  # buckets before those of full size, each half as large as the next one
_SLACK = 1 / 3  # of a bucket's size, by which it may be larger or smaller


@dataclasses.dataclass(frozen=True)
class Piece:
    """A chunk of one tensor.

    Attributes:
        tensor: position of the tensor in its list.
        index: of the chunk in its tensor.
        offset: index in the tensor of the chunk's first element.
        num_elements: of the chunk.
        is_whole: whether it is all of its tensor.
    """

    tensor: int
    index: int
    offset: int
    num_elements: int
    is_whole: bool

    @property
    def name(self) -> str:
        """What its residual is known by: `3`, or `3_0` for the first chunk of several."""
        return f"{self.tensor}" if self.is_whole else f"{self.tensor}_{self.index}"


def pieces(sizes: Sequence[int], chunk: int) -> list[Piece]:
    """Cuts tensors into chunks, in the order in which they travel: the last tensor first.

    The backward pass ends with the gradients of the first layers.

    Args:
        sizes: elements of each tensor; empty ones have no chunks.
        chunk: elements of a chunk.
    """
    return [
        piece
        for tensor in range(len(sizes) - 1, -1, -1)
        if sizes[tensor]
        for piece in _pieces_of(tensor, sizes[tensor], chunk)
    ]


@functools.lru_cache(maxsize=1 << 14)  # a planner cuts the same tensors thousands of times
def _pieces_of(tensor: int, size: int, chunk: int) -> tuple[Piece, ...]:
    return tuple(
        Piece(tensor, offset // chunk, offset, min(chunk, size - offset), size <= chunk)
        for offset in range(0, size, chunk)
    )


def spread(weights: Sequence[int], num_segments: int) -> list[int]:
    """Gives each piece to the segment that has least so far; a tie to the first.

    So each run of pieces is spread nearly evenly, whatever the buckets are: the segments of a run
    differ by two of the heaviest pieces at most.

    Args:
        weights: of each piece (elements), in the order in which they travel.
        num_segments: at least 1.

    Returns:
        The segment of each piece.

    Raises:
        ValueError: `num_segments` is below 1 or a weight is negative.
    """
    if num_segments < 1:
        raise ValueError(f"`num_segments` must be at least 1. Received: {num_segments}")
    if min(weights, default=0) < 0:
        raise ValueError(f"`weights` must not be negative. Received: weights={weights}")
    loads = [(0, segment) for segment in range(num_segments)]
    found = []
    for weight in weights:
        load, segment = loads[0]
        found.append(segment)
        heapq.heapreplace(loads, (load + weight, segment))
    return found


def piece_buckets(
    pieces: Sequence[Piece],
    limit: int,
    partitions: Mapping[int, int],
    segments: Sequence[int] = (),
) -> list[list[int]]:
    """Groups pieces, in their order, into what travels together.

    A bucket travels as long as the largest share that a segment has of it. So it ends, within a
    third of its size, where shares are most nearly equal.

    Args:
        pieces: in the order in which they travel.
        limit: elements of a bucket, more or less; a larger tensor fills several. The first bucket
            has a quarter of it and the second a half, so that something travels soon.
        partitions: positions of tensors that travel in so many buckets of their own (at most one
            per chunk) instead.
        segments: the segment of each piece; none: there is only one.

    Returns:
        Positions in `pieces` of each bucket; together they cover all in order.

    Raises:
        ValueError: the limit or a number of partitions is not positive.
    """
    if limit < 1:
        raise ValueError(f"`limit` must be positive. Received: limit={limit}")
    groups: list[list[int]] = []
    of_segment = list(segments) or [0] * len(pieces)
    num_segments = 1 + max(of_segment, default=0)
    alone = [one.tensor if one.tensor in partitions else None for one in pieces]
    in_runs = itertools.groupby(range(len(pieces)), key=alone.__getitem__)
    for tensor, run in in_runs:
        places = list(run)
        if tensor is None:
            begin = 0
            while begin < len(places):
                full = max(1, limit >> max(0, _RAMP - len(groups)))
                loads = ((pieces[at].num_elements, of_segment[at]) for at in places[begin:])
                end = begin + _even_end(loads, num_segments, full)
                groups.append(places[begin:end])
                begin = end
            continue
        count = partitions[tensor]
        if count < 1:
            raise ValueError(f"`partitions` must be positive. Received: {partitions}")
        count = min(count, len(places))
        cuts = [len(places) * cut // count for cut in range(count + 1)]
        groups += [places[begin:end] for begin, end in itertools.pairwise(cuts)]
    return groups


def _even_end(loads: Iterable[tuple[int, int]], num_segments: int, full: int) -> int:
    """How many of these pieces, at least one, are a bucket.

    Args:
        loads: elements and segment of each piece.
        num_segments: how many segments there are.
        full: elements that a bucket should have.
    """
    least, most = full * (1 - _SLACK), full * (1 + _SLACK)
    shares, filled, count = [0] * num_segments, 0, 0
    ends = []
    for elements, segment in loads:
        if count and filled + elements > most:
            break
        shares[segment] += elements
        filled, count = filled + elements, count + 1
        if filled >= least:
            waits = max(shares) * num_segments - filled
            ends.append((waits, abs(filled - full), count))
    return min(ends)[2] if ends else count


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
