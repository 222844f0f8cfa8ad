# SPDX-License-Identifier: Apache-2.0
"""How near to the speed of memory the codecs are: what must be moved, over what is measured.

What must be moved is what any GPU has to read and write, each vector once, whatever our kernels do:

    encode      the gradient; twice where a scale of the whole chunk comes before the first code
                (_READS), as a chunk does not stay in the registers; and the packet. A sample tells
                a threshold near enough to read once
    feedback    the residual with each reading of the gradient, and once more to be written
    state       each vector read, and written
    decode      the packet, and the output
    add         the same, and the output read
    scattered   where only some elements of a vector are touched (what a sparse packet is added to,
                what randomk draws): memory moves whole sectors of 32 bytes, so 32 bytes for each
                sector that holds one of them, read, and where it is changed written, too

So it is less than what the kernels move where these form a sum first and use it later; docs/gpu.md
has the share that they can then reach.

A call must not find in the second-level cache what the one before has left there, so calls take
turns on several sets of buffers; each row of a merge has packets of its own.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import compll
from benchmarks.gpu.binding import I32, I64, Key
from benchmarks.gpu.cpu import Cpu
from benchmarks.gpu.machine import Floats, Gpu, GpuCodec, Memory, addresses
from benchmarks.gpu.timed import KEY, NUM_MERGED, Case, Timed

SPARSE = ("topk", "graddrop", "dgc", "bisparse", "randomk")
# How often an encoder must read the gradient, where not once: a scale of the whole chunk comes
# first.
_READS = {"terngrad": 2}
# Which reads only what it sends.
_SAMPLES = ("randomk",)
# What memory moves at least.
SECTOR_BYTES = 32
# Bytes that lie between two uses of a buffer: twice the largest cache of a GPU so far.
_APART_BYTES = 1 << 28
_MOST_SETS = 8
# Of what touches few elements; more would have no turn in a round of as many calls.
_MOST_SETS_OF_FEW = 20
# Floats between the gradients of two rows of a merge.
_SHIFT = 1024


@dataclass(frozen=True)
class Timing:
    """Calls that one time is made of, and rounds of which the median counts."""

    gpu: Gpu
    calls: int
    rounds: int

    def turns(self, *measures: Callable[[int], float]) -> list[tuple[float, ...]]:
        """What each of them has found, by rounds: they take turns, so that a GPU whose clock
        changes, or that others use, changes all. They are given the number of calls."""
        return [tuple(self._time(one) for one in measures) for _ in range(self.rounds)]

    def _time(self, measure: Callable[[int], float]) -> float:
        while True:
            time = measure(self.calls)
            if not self.gpu.was_late():
                return time


@dataclass(frozen=True)
class Share:
    """One figure.

    Attributes:
        what: the operation.
        rounds: milliseconds of a device copy, and of the operation beside it.
        moved: bytes that a call must move.
        copied: bytes that a copy moves.
        is_right: whether what was timed has left what the CPU computes.
    """

    what: str
    rounds: list[tuple[float, ...]]
    moved: int
    copied: int
    is_right: bool = True

    @property
    def time(self) -> float:
        """Milliseconds, the median."""
        return statistics.median(ours for _, ours in self.rounds)

    @property
    def shares(self) -> list[float]:
        """Of the speed of the copy, by rounds."""
        return [self.moved / ours * copy / self.copied for copy, ours in self.rounds]


class Buffers:
    """Sets of vectors of n floats; no codec has them."""

    def __init__(self, gpu: Gpu, n: int) -> None:
        """`n`: floats of a tensor."""
        self.gpu, self.n = gpu, n
        self.num_sets = 1 + min(_MOST_SETS - 1, -(-_APART_BYTES // (4 * n)))
        x = np.random.default_rng(0).standard_normal(n + _SHIFT * NUM_MERGED, dtype=np.float32)
        self.x = x[:n]
        self.gradients = [Memory(gpu, x.size, np.float32).put(x) for _ in range(self.num_sets)]
        self.residuals = [Memory(gpu, n, np.float32) for _ in range(self.num_sets)]
        self.outs = [Memory(gpu, n, np.float32).put(x[:n]) for _ in range(self.num_sets)]

    def sets_apart(self, touched: int) -> int:
        """Sets that calls need which touch so few bytes; there are as many from then on."""
        sets = max(self.num_sets, 1 + -(-_APART_BYTES // max(touched, 1)))
        sets = min(sets, _MOST_SETS_OF_FEW)
        while len(self.gradients) < sets:
            self.gradients.append(Memory(self.gpu, self.x.size, np.float32).put(self.x))
            self.outs.append(Memory(self.gpu, self.n, np.float32))
        return sets

    def free(self) -> None:
        """Gives memory back."""
        for memory in (*self.gradients, *self.residuals, *self.outs):
            memory.free()

    def copy_time(self, calls: int) -> float:
        """Milliseconds of a device copy of n floats."""
        return self.gpu.milliseconds(
            *(
                "gpu_time_copy",
                *map(addresses, (self.outs[: self.num_sets], self.gradients[: self.num_sets])),
            ),
            *(I64(4 * self.n), I32(self.num_sets), I32(calls)),
        )

    def encode_time(self, codec: GpuCodec, calls: int) -> float:
        """Milliseconds of an encoding without a residual."""
        return codec.time_encode(self.gradients[: self.num_sets], None, calls)


@dataclass(frozen=True)
class Shape:
    """What the bytes depend on, besides the codec.

    Attributes:
        n: elements of the tensor.
        wire: bytes of its packets.
        states: vectors that the codec keeps.
        sectors: in which the decoded vector is not zero.
    """

    n: int
    wire: int
    states: int
    sectors: int


def sectors(values: Floats) -> int:
    """Sectors of a vector, which begins where one does, that hold something else than zero."""
    each = SECTOR_BYTES // values.itemsize
    padded = np.zeros(-(-values.size // each) * each, values.dtype)
    padded[: values.size] = values
    return int(np.count_nonzero(padded.reshape(-1, each).any(axis=1)))


def bounds(name: str, shape: Shape) -> dict[str, int]:
    """Bytes that must be moved, by what is done."""
    n, wire, touched = shape.n, shape.wire, SECTOR_BYTES * shape.sectors
    reads = _READS.get(name, 1)
    read = touched if name in _SAMPLES else 4 * n * reads
    found = {"encode": read + wire + 8 * n * shape.states}
    if not shape.states:
        # Of all elements there is a residual, so all are read.
        found["encode, feedback"] = 8 * n * reads + 4 * n + wire
    found["decode"] = wire + 4 * n
    found["decode, add"] = wire + 2 * (touched if name in SPARSE else 4 * n)
    found[f"merge of {NUM_MERGED}"] = NUM_MERGED * wire + 4 * n
    return found


def _fresh(case: Case, calls: int) -> float:
    case.reset()
    return case.run(calls)


def of_codec(program: compll.Program, buffers: Buffers, timing: Timing) -> Iterator[Share]:
    """The shares of one codec."""
    n, gpu, name = buffers.n, buffers.gpu, program.name
    codec = GpuCodec(gpu, program, n, sets=buffers.num_sets)
    wire, key = codec.wire_bytes, Key(**KEY, offset=0)
    rows = [Memory(gpu, wire) for _ in range(NUM_MERGED * buffers.num_sets)]
    for number, row in enumerate(rows):
        shift = _SHIFT * (number % NUM_MERGED)
        codec.encode_to(row, buffers.gradients[0].at + 4 * shift, key)
    codec.decode(rows[:1], buffers.outs[0])
    shape = Shape(n, wire, codec.num_states, sectors(buffers.outs[0].get()))
    moved = bounds(name, shape)
    timed = Timed(codec, Cpu(program), buffers, rows, timing.calls)
    # A few sectors of every set would all stay in the cache.
    if name in _SAMPLES:
        codec.grow(buffers.sets_apart(moved["encode"]))
    adds = buffers.sets_apart(moved["decode, add"]) if name in SPARSE else buffers.num_sets
    first = (
        [timed.encode_state()] if codec.num_states else [timed.encode(), timed.encode_feedback()]
    )
    for case in (*first, timed.decode(), timed.decode_add(adds), timed.merge()):
        # The copy comes first: it writes to what is looked at behind the last round.
        rounds = timing.turns(buffers.copy_time, functools.partial(_fresh, case))
        yield Share(case.what, rounds, moved[case.what], 8 * n, case.is_right())
    codec.free()
    for row in rows:
        row.free()
