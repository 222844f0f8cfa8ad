# SPDX-License-Identifier: Apache-2.0
"""Measures a profile: codecs on these cores, collectives on this link, all ranks together.

Every rank makes the same calls in the same order, whatever its clock says: where time decides how
far to go on, rank 0 decides and tells the others. The slowest rank counts. All ranks of a machine
encode at the same time, as they will in training, so what they cost each other is in the figures.

Each figure of a codec is a mean without the longest, and each cost a line through figures of
several sizes, fitted to relative errors with slopes and fixed parts that are not negative.
"""

import argparse
import datetime
import itertools
import os
import platform
import socket
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_hips
from tf_hips.comm import primitives
from tf_hips.comm.links import (
    BETWEEN,
    INSIDE,
    KINDS,
    LEAST_REPEATS,
    MOST_REPEATS,
    Links,
    has_tiers,
    slices,
    timed,
    traced,
)
from tf_hips.comm.profile import Codec, Cost, MergeCost, Profile, Tiers, fit
from tf_hips.errors import print_in_one_line
from tf_hips.ops import graph
from tf_hips.ops.compressor import CHUNK, Compressor, check_makes_packets, parse
from tf_hips.ops.flow import opaque

DEFAULT_BUDGET_S = 8.0

# Calls of codecs in one step of a graph, and elements of each: what a call costs, and so many at
# once that memory is what they wait for, as with a model's gradients.
_CALLS = ((16, 1 << 10), (24, CHUNK))
# Gradients are decoded whole.
_DECODED = ((16, 1 << 10), (1, 24 * CHUNK))
# The same and packets, for merging.
_MERGES = ((16, 1 << 10, 2), (4, CHUNK, 2), (4, CHUNK, 4))
# What only moves memory takes as long for fewer.
_COPIES = ((16, 1 << 10), (8, CHUNK))
_CODECS_SHARE = 0.4  # of the budget

_Call = tuple[list[float], Callable[[], Any]]


def measure(
    candidates: Sequence[str], budget_seconds: float = DEFAULT_BUDGET_S, note: str = ""
) -> Profile:
    """Measures what these ranks and their link cost. Eager; called by all ranks alike.

    Args:
        candidates: texts of the compressors to measure.
        budget_seconds: about how long it may take. It bounds repetitions and sizes; the smallest
            sizes are measured whatever it says.
        note: for people, what was measured.

    Returns:
        The same profile on all ranks.

    Raises:
        ValueError: a candidate is no compressor, or makes no packets.
        ProtocolError: ranks measure different things.
    """
    if not 0 < budget_seconds < float("inf"):
        raise ValueError(
            f"`budget_seconds` must be a number > 0. Received: budget_seconds={budget_seconds}"
        )
    compressors = [check_makes_packets(parse(text).at(2**31), "compression") for text in candidates]
    texts = [parse(text).text for text in candidates]
    hosts = primitives.gather_objects([socket.gethostname(), _cores(), texts], "hosts of a profile")
    for rank, (_, _, theirs) in enumerate(hosts):
        if theirs != texts:
            raise ValueError(
                f"all ranks must measure the same compressors. Received: {texts} on rank "
                f"{primitives.rank()} and {theirs} on rank {rank}"
            )
    names = [name for name, _, _ in hosts]
    per_host = max(names.count(name) for name in names)
    cores = min(number for _, number, _ in hosts)
    clock = _Clock(budget_seconds * _CODECS_SHARE / max(1, 4 * len(compressors) + 2))
    codecs = tuple(
        _codec(text, compressor, clock) for text, compressor in zip(texts, compressors, strict=True)
    )
    add, copy = _add(clock), _copy(clock)
    nodes = primitives.nodes()
    kinds = (*KINDS, INSIDE, BETWEEN) if has_tiers(nodes) else KINDS
    links = Links(budget_seconds * (1 - _CODECS_SHARE) / len(kinds), per_host / cores)
    costs = {kind: links.measure(kind) for kind in kinds}
    tiers = None
    if has_tiers(nodes):
        most = max(len(node) for node in nodes)
        tiers = Tiers(len(nodes), most, slices(nodes), costs.pop(INSIDE), costs.pop(BETWEEN))
    return Profile(
        primitives.size(),
        per_host,
        cores,
        **costs,
        add=add,
        copy=copy,
        codecs=codecs,
        tiers=tiers,
        facts=primitives.broadcast_object(
            {
                "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "hosts": ", ".join(sorted(set(names))),
                "versions": versions(),
                **({"note": note} if note else {}),
            },
            what="facts of a profile",
        ),
    )


def versions() -> str:
    """What a profile depends on beside machines and link."""
    return f"tf_hips {tf_hips.__version__}, TensorFlow {tf.__version__}, {platform.machine()}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


class _Clock:
    """Times calls on all ranks at once, as often as a share of the budget allows."""

    def __init__(self, share_s: float) -> None:
        """Spends about `share_s` seconds on each series of calls."""
        self._share_s = share_s
        self._counts = itertools.count()
        self._nothing = _repeated(1, _same, tf.zeros([1]))

    def costs(self, calls: Sequence[_Call]) -> list[float]:
        """Measures calls, on all ranks at once.

        Args:
            calls: of each the factors of its cost (calls, elements, ...), and what to call.

        Returns:
            Seconds of each factor, for the slowest rank.
        """
        # What a step costs that does nothing is no part of a call's cost.
        calls = [([0.0] * len(calls[0][0]), self._nothing), *calls]
        number = next(self._counts)
        primitives.barrier("a profile of codecs")
        seconds = []
        for _, call in calls:
            call()  # opens libraries and fills pools of memory
            seconds.append([_together(call)])
        # Rank 0 says how often: all ranks then load their machine for equally long.
        total = max(sum(first for [first] in seconds), 1e-9)
        repeats = int(min(max(self._share_s / total, LEAST_REPEATS), MOST_REPEATS))
        repeats = primitives.broadcast_object(repeats, what=f"repetitions of series {number}")
        for own, (_, call) in zip(seconds, calls, strict=True):
            own += [_together(call) for _ in range(1, repeats)]
        means = [_mean(own) for own in seconds]
        everyone = primitives.gather_objects(means, f"seconds of series {number}")
        slowest = [max(of) for of in zip(*everyone, strict=True)]
        slowest[0] = min(slowest)  # whatever disturbed it, nothing takes no longer than something
        points = [([1.0, *unit], found) for (unit, _), found in zip(calls, slowest, strict=True)]
        return fit(points)[1:]


def _together(call: Callable[[], Any]) -> float:
    """Seconds of one call that all ranks begin together, as they do in training.

    Else a rank that is ahead leaves the others cores that they will not have.
    """
    primitives.barrier("a call of a profile")
    return timed(call)


def _mean(seconds: Sequence[float]) -> float:
    """Of all but the longest: ranks take turns on cores that they share, which no median tells."""
    return statistics.mean(sorted(seconds)[:-1])


def _codec(text: str, compressor: Compressor, clock: _Clock) -> Codec:
    sums = compressor.for_sums
    decode = Cost(*clock.costs(_decodings(compressor)))
    return Codec(
        text,
        _packet(compressor),
        _packet(sums),
        encode=Cost(*clock.costs(_encodings(compressor))),
        decode=decode,
        decode_sum=decode if sums == compressor else Cost(*clock.costs(_decodings(sums))),
        merge=MergeCost(*clock.costs(_mergings(compressor, recodes=False))),
        recode=MergeCost(*clock.costs(_mergings(compressor, recodes=True))),
    )


_KEY = {"seed": 1, "step": 1, "tensor_id": 0}


def _vector(n: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).standard_normal(n, np.float32))


def _packet_of(compressor: Compressor, n: int) -> tf.Tensor:
    kept = tf.zeros(compressor.state_shape([n])) if compressor.has_state else None
    return graph.encode(compressor, _vector(n), **_KEY, kept=kept)[0]


def _same(value: tf.Tensor, place: int) -> tf.Tensor:
    del place
    return value


def _repeated(
    count: int, call: Callable[[tf.Tensor, int], Any], given: tf.Tensor
) -> Callable[[], Any]:
    """One step of a graph that makes `count` calls, as side by side as they are in training."""

    @tf.function(autograph=False)
    def step(values: tf.Tensor) -> list[Any]:
        # Of its own memory each: the same values again would come from a cache.
        return [call(one, place) for place, one in enumerate(opaque(tf.unstack(values)))]

    return traced(step, tf.stack([given] * count))


def _encodings(compressor: Compressor) -> list[_Call]:
    def encoding(count: int, n: int) -> Callable[[], Any]:
        states: list[tf.Variable] = []
        if compressor.has_state:
            shape = compressor.state_shape([n])
            states = [tf.Variable(tf.zeros(shape), trainable=False) for _ in range(count)]

        def encode(vector: tf.Tensor, place: int) -> tf.Tensor:
            kept = states[place].read_value() if states else None
            packet, new_kept = graph.encode(compressor, vector, **_KEY, kept=kept)
            if states:
                states[place].assign(new_kept, read_value=False)
            return packet

        return _repeated(count, encode, _vector(n))

    return [([count, count * n], encoding(count, n)) for count, n in _CALLS]


def _decodings(compressor: Compressor) -> list[_Call]:
    def decoding(count: int, n: int) -> Callable[[], Any]:
        return _repeated(
            count,
            lambda packet, place: graph.decode(compressor, packet, n),
            tf.concat([_packet_of(compressor, min(n, CHUNK))] * max(1, n // CHUNK), 0),
        )

    return [([count, count * n], decoding(count, n)) for count, n in _DECODED]


def _mergings(compressor: Compressor, recodes: bool) -> list[_Call]:
    sums = compressor.for_sums

    def merging(count: int, n: int, packets: int) -> Callable[[], Any]:
        kept = tf.zeros(sums.state_shape([n])) if recodes and sums.has_state else None

        def merge(rows: tf.Tensor, place: int) -> tf.Tensor:
            if not recodes:
                return graph.merge(compressor, rows, n)
            key = {**_KEY, "tensor_id": place}
            return graph.recode_sum(compressor, rows, n, kept, **key)[0]

        return _repeated(count, merge, tf.stack([_packet_of(compressor, n)] * packets))

    return [
        ([count, count * n, count * n * packets], merging(count, n, packets))
        for count, n, packets in _MERGES
    ]


def _packet(compressor: Compressor) -> Cost:
    """Bytes of packets: they are not measured but known."""
    half, whole = (compressor.chunk_packet_bytes(n) for n in (CHUNK // 2, CHUNK))
    each = (whole - half) / (CHUNK - CHUNK // 2)
    return Cost(max(0.0, whole - each * CHUNK), each)


def _add(clock: _Clock) -> Cost:
    def adding(count: int, n: int) -> Callable[[], Any]:
        return _repeated(count, lambda one, place: one + float(place), _vector(n))

    return Cost(*clock.costs([([count, count * n], adding(count, n)) for count, n in _COPIES]))


def _copy(clock: _Clock) -> Cost:
    """Joining vectors for one collective, and cutting its result."""

    def copying(count: int, n: int) -> Callable[[], Any]:
        @tf.function(autograph=False)
        def step(values: tf.Tensor) -> list[tf.Tensor]:
            [joined] = opaque([tf.concat(opaque(tf.unstack(values)), 0)])
            return opaque(tf.split(joined, count))

        return traced(step, tf.stack([_vector(n)] * count))

    return Cost(*clock.costs([([count, count * n], copying(count, n)) for count, n in _COPIES]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures as one rank of a job, and writes the profile on rank 0; see `tf-hips profile`."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("--output", required=True)
    parser.add_argument("--seconds", type=float, default=DEFAULT_BUDGET_S)
    parser.add_argument("--compression", action="append", default=[])
    options = parser.parse_args(arguments)
    primitives.init()
    profile = measure(options.compression, options.seconds)
    if primitives.rank() == 0:
        profile.write(options.output)
    primitives.barrier("the end of a profile")
    return 0


if __name__ == "__main__":
    print_in_one_line()
    sys.exit(main())
