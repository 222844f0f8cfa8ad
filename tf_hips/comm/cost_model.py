# SPDX-License-Identifier: Apache-2.0
"""How long the sums of a step take under a plan: buckets, their tasks, and a simulation of both.

A bucket is a chain of tasks. Some need the cores (encode, decode, merge, copy), some the link (a
collective). All ranks do the same at the same time, so one rank stands for all of them: it has one
queue for its cores and one for its link, first come, first served. What overlaps on the same cores
slows each other down: while more is asked of them than there is, everything runs proportionally
slower. Formulae and their source: docs/plan.md.

Follows SeCoPa of HiPress (SOSP 2021), whose cost of a gradient is a straight sum over its own
tasks; here the time of the whole step counts, with overlap and contention.
"""

import dataclasses
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence

from tf_hips.comm.partition import owners
from tf_hips.comm.plan import Choice
from tf_hips.comm.profile import Codec, Profile
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import chunk_sizes

BUCKET_ELEMENTS = 1 << 24
"""The most elements of a bucket."""

_BYTES = 4  # of a float32


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What travels together.

    Attributes:
        compression: text of the compressor, or None.
        topology: one of TOPOLOGIES.
        pieces: position of a gradient and elements of it, for each piece; pieces are whole chunks.
    """

    compression: str | None
    topology: str
    pieces: tuple[tuple[int, int], ...]

    @property
    def num_elements(self) -> int:
        """Elements of all pieces."""
        return sum(size for _, size in self.pieces)


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing that a bucket waits for.

    Attributes:
        is_link: whether it needs the link, else the cores.
        seconds: that it keeps them busy, if it has the cores that it needs.
        cpu: share of this rank's cores that it needs meanwhile.
        delay: seconds before it, in which it needs neither.
    """

    is_link: bool
    seconds: float
    cpu: float = 1.0
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Backward:
    """When a backward pass makes gradients ready.

    Attributes:
        ready: seconds for each gradient, in the order of the model, if nothing else ran.
        on_cores: whether it computes on the cores that encode, too.
    """

    ready: tuple[float, ...]
    on_cores: bool = True

    @classmethod
    def even(cls, num_gradients: int, seconds: float, on_cores: bool = True) -> "Backward":
        """A backward pass that makes gradients ready one by one, the last one first, evenly."""
        return cls(
            tuple(seconds * (num_gradients - i) / num_gradients for i in range(num_gradients)),
            on_cores,
        )


def buckets_of(choices: Sequence[Choice], limit: int = BUCKET_ELEMENTS) -> list[Bucket]:
    """Joins the chunks of all gradients in buckets, from the last gradient to the first.

    Gradients of several partitions get as many buckets of their own, as far as they have chunks;
    others travel with their neighbours of the same compression and topology.

    Args:
        choices: one for each gradient, in the order of the model.
        limit: the most elements of a bucket.

    Returns:
        Buckets in the order in which their last pieces become ready.
    """
    found: list[Bucket] = []
    open_buckets: dict[tuple[str | None, str], dict[int, int]] = {}
    filled: dict[tuple[str | None, str], int] = {}

    def close(kind: tuple[str | None, str]) -> None:
        found.append(Bucket(*kind, tuple(open_buckets.pop(kind).items())))
        del filled[kind]

    for position in reversed(range(len(choices))):
        choice = choices[position]
        kind = choice.compression, choice.topology
        chunks = chunk_sizes(choice.num_elements)
        if choice.partitions > 1:
            for start, stop in owners(chunks, min(choice.partitions, len(chunks)) or 1):
                if start < stop:
                    found.append(Bucket(*kind, ((position, sum(chunks[start:stop])),)))
            continue
        for size in chunks:
            if kind in filled and filled[kind] + size > limit:
                close(kind)
            pieces = open_buckets.setdefault(kind, {})
            pieces[position] = pieces.get(position, 0) + size
            filled[kind] = filled.get(kind, 0) + size
    for kind in list(open_buckets):
        close(kind)
    return sorted(found, key=lambda bucket: -min(position for position, _ in bucket.pieces))


def topologies(profile: Profile) -> tuple[str, ...]:
    """Topologies of compressed sums whose costs this profile tells."""
    if profile.num_ranks == 1:
        return ()
    is_power = profile.num_ranks & (profile.num_ranks - 1) == 0
    return "ps", "ring", "allgather", "butterfly" if is_power else "blocks"


def tasks_of(bucket: Bucket, profile: Profile) -> list[Task]:
    """The chain of tasks of a bucket, in their order.

    Raises:
        ConfigError: the profile does not tell the costs of this compression or topology.
    """
    size = profile.num_ranks
    if size == 1:
        return []
    elements = bucket.num_elements
    if bucket.compression is None:
        return [
            _work(profile.copy(elements, len(bucket.pieces))),
            _send(profile, "allreduce", _BYTES * elements),
        ]
    if bucket.topology not in {*topologies(profile), "blocks"}:
        raise ConfigError(
            f"`topology` must be one of {', '.join(topologies(profile))} for {size} ranks. "
            f"Received: {bucket.topology}"
        )
    codec = profile.codec(bucket.compression)
    costs = _Costs(profile, codec, bucket)
    if bucket.topology == "allgather":
        return [
            _work(codec.encode(elements, costs.calls)),
            _send(profile, "allgather", (size - 1) * costs.packets(elements)),
            _work(codec.merge(elements, size, costs.calls)),
        ]
    if bucket.topology == "ps":
        return [
            _work(codec.encode(elements, costs.calls)),
            _send(profile, "alltoall", (size - 1) * costs.packets(costs.share)),
            _work(codec.recode(costs.share, size, costs.share_calls)),
            *costs.spread(size),
        ]
    if bucket.topology == "ring":
        hops = [costs.share] * (size - 1)
        return [*costs.hops(hops), *costs.spread(size)]
    # Halves, quarters, ...: with 2^k ranks the last hop leaves a share to each. Owners of whole
    # chunks have more than their share.
    uneven = costs.share * size / elements
    blocks = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    steps = blocks[0].bit_length() - 1
    halves = [elements / 2 ** (hop + 1) * uneven for hop in range(steps)]
    # Blocks that are smaller hand their sums on, each to the next larger one.
    more = [elements / block for block in blocks[1:]]
    return [*costs.hops([*halves, *more]), *costs.spread(blocks[0])]


def step_seconds(
    choices: Sequence[Choice],
    profile: Profile,
    backward: Backward | None = None,
    limit: int = BUCKET_ELEMENTS,
) -> float:
    """Predicts when the last sum of a step is there.

    Args:
        choices: one for each gradient, in the order of the model.
        profile: of as many ranks as there will be.
        backward: when gradients become ready; None: all at once.
        limit: the most elements of a bucket.

    Returns:
        Seconds from the beginning of the backward pass, or from when all gradients are ready.

    Raises:
        ConfigError: as for `tasks_of`.
    """
    chains = []
    for bucket in buckets_of(choices, limit):
        ready = max(backward.ready[place] for place, _ in bucket.pieces) if backward else 0.0
        chains.append((ready, tasks_of(bucket, profile)))
    total = max(backward.ready, default=0.0) if backward else 0.0
    return simulate(chains, total, backward is not None and backward.on_cores)


def simulate(
    chains: Sequence[tuple[float, Sequence[Task]]], backward_s: float = 0.0, on_cores: bool = False
) -> float:
    """Runs chains of tasks on the cores and the link of one rank.

    Args:
        chains: when each may begin, in seconds of the backward pass, and its tasks.
        backward_s: seconds of the backward pass, if nothing else ran.
        on_cores: whether the backward pass takes the cores, too.

    Returns:
        Seconds until everything is done, the backward pass included.
    """
    order = sorted(range(len(chains)), key=lambda chain: chains[chain][0])
    arrivals = deque(order)
    rest = [deque(tasks) for _, tasks in chains]
    queues: tuple[deque[tuple[int, Task]], deque[tuple[int, Task]]] = deque(), deque()
    left = [0.0, 0.0]  # seconds of what runs on the cores and on the link
    waiting: list[tuple[float, int]] = []  # until when a chain's delay lasts
    now = done = 0.0  # the clock, and what of the backward pass is done

    def follow(chain: int) -> None:
        if rest[chain]:
            heapq.heappush(waiting, (now + rest[chain][0].delay, chain))

    while True:
        while arrivals and chains[arrivals[0]][0] <= done + _EPSILON:
            follow(arrivals.popleft())
        while waiting and waiting[0][0] <= now + _EPSILON:
            _, chain = heapq.heappop(waiting)
            task = rest[chain].popleft()
            queue = queues[task.is_link]
            if not queue:
                left[task.is_link] = task.seconds
            queue.append((chain, task))
        running = [place for place in (0, 1) if queues[place]]
        is_backward = done < backward_s - _EPSILON
        if not running and not waiting and not is_backward:
            return now
        asked = sum(queues[place][0][1].cpu for place in running)
        asked += 1.0 if is_backward and on_cores else 0.0
        rate = 1.0 / max(1.0, asked)
        rates = {place: rate if queues[place][0][1].cpu else 1.0 for place in running}
        backward_rate = rate if on_cores else 1.0
        spans = [left[place] / rates[place] for place in running]
        if waiting:
            spans.append(waiting[0][0] - now)
        if is_backward:
            until = chains[arrivals[0]][0] if arrivals else backward_s
            spans.append((until - done) / backward_rate)
        span = max(0.0, min(spans))
        now += span
        if is_backward:
            done += span * backward_rate
        for place in running:
            left[place] -= span * rates[place]
            if left[place] <= _EPSILON:
                chain, _ = queues[place].popleft()
                if queues[place]:
                    left[place] = queues[place][0][1].seconds
                follow(chain)


_EPSILON = 1e-12  # seconds


class _Costs:
    """What the tasks of one compressed bucket have in common."""

    def __init__(self, profile: Profile, codec: Codec, bucket: Bucket) -> None:
        self._profile = profile
        self._codec = codec
        self._elements = bucket.num_elements
        chunks = [size for _, piece in bucket.pieces for size in chunk_sizes(piece)]
        self._per_chunk = len(chunks) / self._elements
        # Owners hold whole chunks: the one with the most is waited for.
        ends = [0, *itertools.accumulate(chunks)]
        cuts = owners(chunks, profile.num_ranks)
        self.share = max(ends[stop] - ends[start] for start, stop in cuts)
        self.calls = len(bucket.pieces)
        self.share_calls = max(1, math.ceil(self.calls * self.share / self._elements))

    def packets(self, elements: float) -> float:
        """Bytes of the packets of gradients; as many chunks as in the bucket on average."""
        return self._codec.packet(elements, elements * self._per_chunk)

    def hops(self, sizes: Sequence[float]) -> list[Task]:
        """Encodes and sends, decodes and adds what came, so many elements each time."""
        tasks = []
        for elements in sizes:
            calls = max(1, math.ceil(self.calls * elements / self._elements))
            received = self._codec.decode(elements, calls) + self._profile.add(elements, calls)
            tasks += [
                _work(self._codec.encode(elements, calls)),
                _send(self._profile, "alltoall", self.packets(elements)),
                _work(received),
            ]
        return [*tasks, _work(self._codec.encode(self.share, self.share_calls))]

    def spread(self, holders: int) -> list[Task]:
        """Brings the packets of all sums to all ranks, who decode them."""
        size = self._profile.num_ranks
        share = self._codec.sum_packet(self.share, self.share * self._per_chunk)
        whole = self._codec.sum_packet(self._elements, self._elements * self._per_chunk)
        # Who holds no sum receives all of them.
        received = (size - 1) * share if holders == size else whole
        return [
            _send(self._profile, "allgather", received),
            _work(self._codec.decode_sum(self._elements, self.calls)),
        ]


def _work(seconds: float) -> Task:
    return Task(False, seconds)


def _send(profile: Profile, kind: str, num_bytes: float) -> Task:
    cost = getattr(profile, kind)
    return Task(True, cost(num_bytes), cost.cpu, cost.delay)
