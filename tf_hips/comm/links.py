# SPDX-License-Identifier: Apache-2.0
"""Measures collectives: latency, what each keeps the link busy, seconds per byte, share of cores.

Every rank makes the same collectives whatever its clock says: rank 0 decides how far to go on.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.comm.profile import Collective

KINDS = ("allreduce", "alltoall", "allgather", "broadcast")
INSIDE, BETWEEN = "inside", "between"
"""Kinds of alltoall: see `profile.Tiers`."""
_ALLTOALLS = ("alltoall", INSIDE, BETWEEN)
LEAST_REPEATS, MOST_REPEATS = 2, 9

# Bytes of collectives; a slow link stops where the next size would take too long.
_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LEAST_SIZES = 3  # that are measured whatever the clock says
# How many times as long as the smallest one the largest has to take: latencies vary, and what they
# vary by must be little beside what the bytes take.
_TELLING = 8.0
_LONG = 0.1  # a call that takes this share of the time for its kind needs none before it
_AT_ONCE = 8  # small collectives that are begun together


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def traced(function: Any, *given: tf.Tensor) -> Callable[[], Any]:
    """A call of a function that has been traced for just these arguments."""
    concrete = function.get_concrete_function(*given)

    def call(keeps: Any = function) -> Any:
        # The trace alone does not keep the variables that it refers to.
        del keeps
        return concrete(*given)

    return call


def seconds_of_allreduce(num_bytes: int) -> float:
    """How long an exact sum takes now: the median of a few, of the slowest rank. Eager."""
    run = _call("allreduce", num_bytes, 1)
    run()
    found = statistics.median(timed(run) for _ in range(LEAST_REPEATS + 1))
    return float(max(primitives.gather_objects(found, "seconds of an allreduce")))


class Links:
    """Measures collectives; on one rank, which has none, they cost nothing."""

    def __init__(self, share_s: float, cpu_scale: float) -> None:
        """Spends about `share_s` seconds on each kind.

        Args:
            share_s: seconds.
            cpu_scale: share of a rank's cores that one busy core of it is.
        """
        self._share_s = share_s
        self._cpu_scale = cpu_scale

    def measure(self, kind: str) -> Collective:
        """The costs of one kind."""
        size = primitives.size()
        if size == 1:
            return Collective()
        begin = time.perf_counter()
        alone = self._seconds(kind, _BYTES[0], MOST_REPEATS)[0]
        together = self._together(kind)
        # What one more costs where others run; the rest of a lonely one is waiting.
        occupied = min(alone, max(0.0, (together - alone) / (_AT_ONCE - 1)))
        cpu, largest = 0.0, _BYTES[0]
        last = alone
        for place, num_bytes in enumerate(_BYTES[1:], 1):
            left = self._share_s - (time.perf_counter() - begin)
            growth = num_bytes / _BYTES[place - 1]
            expected = alone + max(last - alone, 0.0) * growth
            # Two or more that count, and one to warm up, but where the link is what takes long.
            # Rank 0's clock decides.
            warms = int(expected < _LONG * self._share_s)
            repeats = int(min(left / 2 / expected - warms, MOST_REPEATS))
            if repeats < LEAST_REPEATS:
                # A size that takes hardly longer than the smallest one tells nothing of the link.
                is_bearable = expected * (warms + LEAST_REPEATS) < 2 * self._share_s
                is_needed = place < _LEAST_SIZES or (last < _TELLING * alone and is_bearable)
                repeats = LEAST_REPEATS if is_needed else 0
            repeats, warms = primitives.broadcast_object([repeats, warms], what=f"sizes of {kind}")
            if repeats == 0:
                break
            last, cpu = self._seconds(kind, num_bytes, repeats, warms)
            largest = num_bytes
        # The smallest one tells what a call costs and the largest the link's speed. Those between
        # tell too much of it: a link that was idle takes its first bytes at once.
        least, most = (_moved(kind, one, size) for one in (_BYTES[0], largest))
        per_byte = max(0.0, last - alone) / (most - least)
        delay = max(0.0, alone - occupied)
        fixed = max(0.0, alone - delay - least * per_byte)
        return Collective(delay, fixed, per_byte, min(1.0, cpu))

    def _seconds(
        self, kind: str, num_bytes: int, repeats: int, warms: int = 1
    ) -> tuple[float, float]:
        """Seconds of one call, back to back, of the slowest rank; share of the cores in it."""
        run = _call(kind, num_bytes, 1)
        for _ in range(warms):
            run()
        processor, begin = time.process_time(), time.perf_counter()
        times = [timed(run) for _ in range(repeats)]
        busy = (time.process_time() - processor) / max(time.perf_counter() - begin, 1e-9)
        everyone = primitives.gather_objects(
            [statistics.median(times), busy], f"seconds of {kind} with {num_bytes} bytes"
        )
        seconds, shares = zip(*everyone, strict=True)
        return max(seconds), max(shares) * self._cpu_scale

    def _together(self, kind: str) -> float:
        run = _call(kind, _BYTES[0], _AT_ONCE)
        run()
        found = statistics.median(timed(run) for _ in range(MOST_REPEATS))
        return float(max(primitives.gather_objects(found, f"seconds of several {kind}")))


def slices(nodes: Sequence[Sequence[int]]) -> int:
    """Into how many slices gradients are spread: ranks of the node that has least."""
    return min(len(node) for node in nodes)


def has_tiers(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether there are links of two kinds to measure."""
    return len(nodes) > 1 and slices(nodes) > 1


def _target(kind: str) -> int | None:
    """To whom this rank sends in an alltoall; None: to nobody."""
    rank, nodes = primitives.rank(), primitives.nodes()
    if kind == "alltoall":
        return (rank + 1) % primitives.size()
    [(number, node)] = ((number, node) for number, node in enumerate(nodes) if rank in node)
    place = node.index(rank)
    if kind == INSIDE:
        return node[(place + 1) % len(node)]
    return nodes[(number + 1) % len(nodes)][place] if place < slices(nodes) else None


def _moved(kind: str, num_bytes: int, size: int) -> float:
    """What `Collective.per_byte` counts, of a tensor of so many bytes on each rank."""
    return float(num_bytes * (size - 1) if kind == "allgather" else num_bytes)


@functools.cache
def _built(kind: str, count: int) -> Any:
    """Traced once: runs `count` collectives of a tensor of any size.

    Takes the tensor, and the rows of it that each rank gets where that has to be said.
    """

    @tf.function(autograph=False)
    def run(given: tf.Tensor, splits: tf.Tensor) -> list[tf.Tensor]:
        names = [f"profile.{kind}.{count}.{index}" for index in range(count)]
        if kind in _ALLTOALLS:
            return [primitives.alltoall(given, splits, name) for name in names]
        return [getattr(primitives, kind)(given, name) for name in names]

    dtype = tf.float32 if kind == "allreduce" else tf.uint8
    return run.get_concrete_function(tf.TensorSpec([None], dtype), tf.TensorSpec([None], tf.int32))


def _call(kind: str, num_bytes: int, count: int) -> Callable[[], Any]:
    """Runs `count` collectives of `num_bytes` bytes each; an alltoall sends them to one rank."""
    splits: list[int] = []
    if kind == "allreduce":
        given = tf.zeros([num_bytes // 4])
    else:
        if kind in _ALLTOALLS:
            target = _target(kind)
            splits = [num_bytes if rank == target else 0 for rank in range(primitives.size())]
            num_bytes = sum(splits)
        given = tf.zeros([num_bytes], tf.uint8)
    return functools.partial(_built(kind, count), given, tf.constant(splits, tf.int32))
