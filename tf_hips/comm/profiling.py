# SPDX-License-Identifier: Apache-2.0
"""Measures a profile: codecs on these cores, collectives on this link, all ranks together.

Every rank makes the same calls in the same order, whatever its clock says: where time decides how
far to go on, rank 0 decides and tells the others. The slowest rank counts. All ranks of a machine
encode at the same time, as they will in training, so what they cost each other is in the figures.

Each figure is a median, and each cost a line through figures of several sizes, fitted to relative
errors with slopes and fixed parts that are not negative.
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
from tf_hips.comm.links import KINDS, LEAST_REPEATS, MOST_REPEATS, Links, timed, traced
from tf_hips.comm.profile import Codec, Cost, MergeCost, Point, Profile, fit
from tf_hips.errors import print_in_one_line
from tf_hips.ops import graph
from tf_hips.ops.compressor import CHUNK, Compressor, check_makes_packets, parse
from tf_hips.ops.flow import opaque

DEFAULT_BUDGET_S = 8.0

# Calls of codecs in one step of a graph, and elements of each: what a call costs, one chunk, and
# several at once.
_CALLS = ((8, 1 << 10), (1, CHUNK), (3, CHUNK))
# The same and packets, for merging.
_MERGES = ((8, 1 << 10, 2), (2, CHUNK, 2), (2, CHUNK, 4))
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
    links = Links(budget_seconds * (1 - _CODECS_SHARE) / len(KINDS), per_host / cores)
    costs = {kind: links.measure(kind) for kind in KINDS}
    return Profile(
        primitives.size(),
        per_host,
        cores,
        **costs,
        add=add,
        copy=copy,
        codecs=codecs,
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

    def series(self, calls: Sequence[_Call]) -> list[Point]:
        """Measures calls.

        Args:
            calls: of each the factors of its cost (calls, elements, ...), and what to call.

        Returns:
            The same with the seconds of the slowest rank's median.
        """
        number = next(self._counts)
        primitives.barrier("a profile of codecs")
        first = []
        for _, call in calls:
            call()  # opens libraries and fills pools of memory
            first.append(timed(call))
        # Rank 0 says how often: all ranks then load their machine for equally long.
        total = max(sum(first), 1e-9)
        repeats = int(min(max(self._share_s / total, LEAST_REPEATS), MOST_REPEATS))
        repeats = primitives.broadcast_object(repeats, what=f"repetitions of series {number}")
        medians = [statistics.median(timed(call) for _ in range(repeats)) for _, call in calls]
        everyone = primitives.gather_objects(medians, f"seconds of series {number}")
        slowest = [max(of) for of in zip(*everyone, strict=True)]
        return [(unit, found) for (unit, _), found in zip(calls, slowest, strict=True)]


def _codec(text: str, compressor: Compressor, clock: _Clock) -> Codec:
    sums = compressor.for_sums
    decode = _line(clock.series(_decodings(compressor)))
    return Codec(
        text,
        _packet(compressor),
        _packet(sums),
        encode=_line(clock.series(_encodings(compressor))),
        decode=decode,
        decode_sum=decode if sums == compressor else _line(clock.series(_decodings(sums))),
        merge=MergeCost(*fit(clock.series(_mergings(compressor, recodes=False)))),
        recode=MergeCost(*fit(clock.series(_mergings(compressor, recodes=True)))),
    )


_KEY = {"seed": 1, "step": 1, "tensor_id": 0}


def _vector(n: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=n), tf.float32)


def _packet_of(compressor: Compressor, n: int) -> tf.Tensor:
    kept = tf.zeros(compressor.state_shape([n])) if compressor.has_state else None
    return graph.encode(compressor, _vector(n), **_KEY, kept=kept)[0]


def _repeated(
    count: int, call: Callable[[tf.Tensor, int], Any], given: tf.Tensor
) -> Callable[[], Any]:
    """One step of a graph that makes `count` calls, as side by side as they are in training."""

    @tf.function(autograph=False)
    def step(value: tf.Tensor) -> list[Any]:
        # Each has an input of its own, else they would be computed once.
        return [call(one, place) for place, one in enumerate(opaque([value] * count))]

    return traced(step, given)


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
            _packet_of(compressor, n),
        )

    return [([count, count * n], decoding(count, n)) for count, n in _CALLS]


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

    return _line(clock.series([([count, count * n], adding(count, n)) for count, n in _CALLS]))


def _copy(clock: _Clock) -> Cost:
    """Joining vectors for one collective, and cutting its result."""

    def copying(count: int, n: int) -> Callable[[], Any]:
        @tf.function(autograph=False)
        def step(value: tf.Tensor) -> list[tf.Tensor]:
            [joined] = opaque([tf.concat(opaque([value] * count), 0)])
            return opaque(tf.split(joined, count))

        return traced(step, _vector(n))

    calls = [(count, n) for count, n in _CALLS if count > 1]
    return _line(clock.series([([count, count * n], copying(count, n)) for count, n in calls]))


def _line(points: Sequence[Point]) -> Cost:
    return Cost(*fit(points))


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
