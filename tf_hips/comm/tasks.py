# SPDX-License-Identifier: Apache-2.0
"""Buckets of gradients, as the runtime makes them, and the tasks that each one is.

A bucket is a chain of tasks. Some need the cores (encode, decode, merge, copy), some the link (a
collective). All ranks do the same at the same time, so the one that has most stands for all.
Formulae and their source: docs/plan.md.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from tf_hips.comm import schedules
from tf_hips.comm.overlap import Task
from tf_hips.comm.partition import (
    BUCKET_ELEMENTS,
    NOTE_BYTES,
    buckets,
    piece_buckets,
    pieces,
    spread,
)
from tf_hips.comm.plan import ALLGATHER, HIERARCHICAL, HIERARCHICAL_FP16, PS
from tf_hips.comm.profile import Codec, Collective, Profile, Tiers
from tf_hips.comm.schedules import BLOCKS, BUTTERFLY, HOPS, RING, Transfer
from tf_hips.errors import ConfigError
from tf_hips.ops.compressor import CHUNK

INSIDE_BYTES = {HIERARCHICAL: 4, HIERARCHICAL_FP16: 2}
"""Of an element, inside of a host."""

_BYTES = 4  # of a float32


@dataclasses.dataclass(frozen=True)
class Load:
    """What a call works on: elements, in so many pieces."""

    elements: int = 0
    pieces: int = 0

    @classmethod
    def total(cls, loads: Sequence["Load"]) -> "Load":
        """All of `loads` together."""
        if len(loads) == 1:
            return loads[0]
        return cls(sum(one.elements for one in loads), sum(one.pieces for one in loads))

    @staticmethod
    def most(loads: Iterable["Load"]) -> "Load":
        """The one with most elements; of those the one with most pieces."""
        return max(loads, key=lambda one: (one.elements, one.pieces))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What travels together.

    Attributes:
        compression: text of the compressor, or None.
        topology: one of TOPOLOGIES.
        first: position of the gradient in it that comes first in the model; it is ready last.
        segments: what is in each part that a rank sums; one part, where nobody owns anything.
    """

    compression: str | None
    topology: str
    first: int
    segments: tuple[Load, ...]

    @property
    def load(self) -> Load:
        """All segments together."""
        return Load.total(self.segments)


def topologies(profile: Profile) -> tuple[str, ...]:
    """Topologies of compressed sums whose costs a profile tells."""
    num_ranks = profile.num_ranks
    if num_ranks == 1:
        return ()
    is_power = num_ranks & (num_ranks - 1) == 0
    tiers = tuple(INSIDE_BYTES) if profile.tiers else ()
    return PS, RING, ALLGATHER, BUTTERFLY if is_power else BLOCKS, *tiers


def buckets_of(
    compression: str | None,
    topology: str,
    sizes: Sequence[int],
    partitions: dict[int, int],
    profile: Profile,
) -> list[Bucket]:
    """The buckets of one group, as the runtime makes them, in the order in which they travel.

    Args:
        compression: of the group.
        topology: of the group.
        sizes: elements of each gradient of the model; 0 for those of other groups.
        partitions: positions of gradients that travel in so many buckets of their own.
        profile: of the job's ranks.

    Raises:
        ConfigError: there is no such topology, it does not take so many ranks, or the profile does
            not tell its costs.
    """
    if compression is None:
        return _exact_buckets(topology, sizes, partitions)
    if topology not in {*topologies(profile), BLOCKS}:
        raise ConfigError(
            f"`topology` must be one of {', '.join(topologies(profile))} for "
            f"{profile.num_ranks} ranks. Received: {topology}"
            + (
                ", and a profile of hosts with one rank, or of one host"
                if topology in INSIDE_BYTES
                else ""
            )
        )
    everything = pieces(sizes, CHUNK)
    count = profile.num_ranks
    if topology in HOPS:
        count = len(HOPS[topology](count).owners)
    elif topology in INSIDE_BYTES and profile.tiers:
        count = profile.tiers.hosts * profile.tiers.slices
    weights = [piece.num_elements for piece in everything]
    segments = spread(weights, count)
    found = []
    for places in piece_buckets(everything, BUCKET_ELEMENTS, partitions, segments):
        elements, numbers = [0] * count, [0] * count
        for place in places:
            elements[segments[place]] += weights[place]
            numbers[segments[place]] += 1
        first = everything[places[-1]].tensor  # the last tensor travels first
        loads = tuple(map(Load, elements, numbers))
        found.append(Bucket(compression, topology, first, loads))
    return found


def _exact_buckets(topology: str, sizes: Sequence[int], partitions: dict[int, int]) -> list[Bucket]:
    # No more parts than elements, as `planned` makes them.
    parts = {place: min(count, max(1, sizes[place])) for place, count in partitions.items()}
    found = [
        Bucket(None, topology, place, (Load(sizes[place] // count, 1),))
        for place, count in parts.items()
        for _ in range(count)
        if sizes[place]
    ]
    whole = [
        place for place in reversed(range(len(sizes))) if place not in partitions and sizes[place]
    ]
    for group in buckets(
        [sizes[place] * _BYTES for place in whole], [""] * len(whole), BUCKET_ELEMENTS * _BYTES
    ):
        members = [whole[place] for place in group]
        load = Load(sum(sizes[place] for place in members), len(members))
        found.append(Bucket(None, topology, min(members), (load,)))
    return sorted(found, key=lambda bucket: -bucket.first)


def tasks_of(bucket: Bucket, profile: Profile) -> list[Task]:
    """The tasks of a bucket until all ranks have the packets, or the exact values, of its sum.

    Raises:
        ConfigError: the profile lacks the costs of its compression.
    """
    size, load = profile.num_ranks, bucket.load
    if size == 1:
        return []
    if bucket.compression is None:
        copies = [_work(profile.copy(load.elements, load.pieces))] if load.pieces > 1 else []
        return [*copies, _send(profile, "allreduce", _BYTES * load.elements)]
    codec = profile.codec(bucket.compression)
    encode = _work(codec.encode(load.elements, load.pieces))
    if bucket.topology == ALLGATHER:
        sent = codec.packet(load.elements, load.pieces)
        return [encode, _send(profile, "allgather", (size - 1) * sent)]
    # The owner with most is waited for.
    most = Load.most(bucket.segments)
    if bucket.topology == PS:
        sent = codec.packet(most.elements, most.pieces)
        gathered = codec.sum_packet(most.elements, most.pieces)
        return [
            encode,
            _to_owners(profile, sent),
            _work(codec.recode(most.elements, size, most.pieces)),
            _send(profile, "allgather", (size - 1) * gathered),
        ]
    if profile.tiers and bucket.topology in INSIDE_BYTES:
        return _hierarchical(bucket, codec, profile, profile.tiers)
    gathered = codec.packet(most.elements, most.pieces)
    return [
        *_hops(bucket, codec, profile),
        _work(codec.encode(most.elements, most.pieces)),
        _send(profile, "allgather", (size - 1) * gathered),
    ]


def _hops(bucket: Bucket, codec: Codec, profile: Profile) -> list[Task]:
    """Hop by hop: who has most encodes and sends; decodes and adds what came."""
    tasks = []
    for hop in HOPS[bucket.topology](profile.num_ranks).hops:
        messages = [Load.total([bucket.segments[place] for place in one.segments]) for one in hop]
        out: dict[int, list[Load]] = {}
        for one, load in zip(hop, messages, strict=True):
            out.setdefault(one.source, []).append(load)
        # Nobody gets more than one message in a hop, and so more than is sent.
        sent, came = Load.most(map(Load.total, out.values())), Load.most(messages)
        tasks += [
            _work(codec.encode(sent.elements, sent.pieces)),
            _task(_links_of(hop, profile), codec.packet(sent.elements, sent.pieces)),
            _work(
                codec.decode(came.elements, came.pieces) + profile.add(came.elements, came.pieces)
            ),
        ]
    return tasks


def _links_of(hop: Sequence[Transfer], profile: Profile) -> Collective:
    """What a hop costs: it may stay inside of hosts, or several ranks of a host may leave it."""
    tiers = profile.tiers
    if tiers is None:
        return profile.alltoall
    leaving = collections.Counter(
        one.source // tiers.per_host
        for one in hop
        if one.source // tiers.per_host != one.target // tiers.per_host
    )
    if not leaving:
        return tiers.inside
    return tiers.between if max(leaving.values()) > 1 else profile.alltoall


def _hierarchical(bucket: Bucket, codec: Codec, profile: Profile, tiers: Tiers) -> list[Task]:
    """Exact sums inside of hosts; between them packets, to an owner and back."""
    whole, others = bucket.load, tiers.per_host - 1
    most = Load.most(bucket.segments)
    slices = (
        Load.total(bucket.segments[number * tiers.hosts : (number + 1) * tiers.hosts])
        for number in range(tiers.slices)
    )
    widest = Load.most(slices)
    each = INSIDE_BYTES[bucket.topology]
    join = profile.copy(whole.elements, whole.pieces)
    add = profile.add(others * widest.elements, others)
    if each < _BYTES:  # to the smaller type, and back
        join += profile.copy(whole.elements)
        add += profile.copy((others + 1) * widest.elements)
    packets = codec.packet(most.elements, most.pieces)
    merged = codec.sum_packet(most.elements, most.pieces)
    everyone = codec.sum_packet(widest.elements, widest.pieces)
    return [
        _work(join),
        _task(tiers.inside, others * each * widest.elements),
        _work(add + codec.encode(widest.elements, widest.pieces)),
        _exchange(tiers.between, tiers.hosts, packets),
        _work(codec.recode(most.elements, tiers.hosts, most.pieces)),
        _exchange(tiers.between, tiers.hosts, merged),
        _task(tiers.inside, others * everyone),
        _send(profile, "allgather", (profile.num_ranks - 1) * NOTE_BYTES),
    ]


def decoding_of(
    compression: str | None, topology: str, load: Load, profile: Profile
) -> tuple[Task, ...]:
    """What a group decodes when all its packets are there; `load` counts gradients."""
    if compression is None or profile.num_ranks == 1:
        return ()
    codec = profile.codec(compression)
    if topology == ALLGATHER:
        return (_work(codec.merge(load.elements, profile.num_ranks, load.pieces)),)
    cost = codec.decode_sum if topology in {PS, *INSIDE_BYTES} else codec.decode
    return (_work(cost(load.elements, load.pieces)),)


def _work(seconds: float) -> Task:
    return Task(False, seconds)


def _exchange(cost: Collective, num_ranks: int, num_bytes: float) -> Task:
    """A message of so many bytes from each of so many ranks to each other one."""
    others = num_ranks - 1
    if not schedules.has_rounds(num_ranks, round(num_bytes)):
        return _task(cost, others * num_bytes)
    return Task(True, others * cost(num_bytes), cost.cpu, cost.delay)


def _to_owners(profile: Profile, num_bytes: float) -> Task:
    """A message of so many bytes from each rank to each other one, be it of its host or not."""
    size, tiers = profile.num_ranks, profile.tiers
    if tiers is None or not schedules.has_rounds(size, round(num_bytes)):
        return _exchange(profile.alltoall, size, num_bytes)
    near, cost = tiers.per_host - 1, tiers.between
    seconds = near * tiers.inside(num_bytes) + (size - 1 - near) * cost(num_bytes)
    return Task(True, seconds, cost.cpu, cost.delay)


def _send(profile: Profile, kind: str, num_bytes: float) -> Task:
    return _task(getattr(profile, kind), num_bytes)


def _task(cost: Collective, num_bytes: float) -> Task:
    return Task(True, cost(num_bytes), cost.cpu, cost.delay)
