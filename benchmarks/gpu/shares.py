# SPDX-License-Identifier: Apache-2.0
"""How near to the speed of memory the codecs are: what must be moved, over what is measured.

A call must not find in the second-level cache what the one before has left there, so calls take
turns on several sets of buffers; each row of a merge has packets of its own.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import compll
from benchmarks.gpu.binding import I32, I64, Key
from benchmarks.gpu.cpu import Cpu
from benchmarks.gpu.machine import Gpu, GpuCodec, Memory, addresses
from benchmarks.gpu.timed import KEY, NUM_MERGED, Case, Timed

SPARSE = ("topk", "graddrop", "dgc", "bisparse", "randomk")
# How often an encoder must read the gradient, where not once: a scale or a threshold of the whole
# chunk comes first.
_READS = {"terngrad": 2, "topk": 2, "dgc": 2}
# Which reads only what it sends.
_SAMPLES = ("randomk",)
# Bytes that lie between two uses of a buffer: twice the largest cache of a GPU so far.
_APART_BYTES = 1 << 28
_MOST_SETS = 8
# Floats between the gradients of two rows of a merge.
_SHIFT = 1024


@dataclass(frozen=True)
class Timing:
    """Calls that one time is made of, and times of which the median counts."""

    calls: int
    rounds: int

    def median(self, measure: Callable[[int], float]) -> float:
        """Milliseconds; `measure` is given the number of calls."""
        return statistics.median(measure(self.calls) for _ in range(self.rounds))

    def share(self, case: Case, moved: int) -> "Share":
        """Measures; `moved`: bytes that a call must move."""

        def measure(calls: int) -> float:
            case.reset()
            return case.run(calls)

        return Share(case.what, self.median(measure), moved, case.is_right())


@dataclass(frozen=True)
class Share:
    """One figure: milliseconds, the bytes that had to be moved in them, and whether what was timed
    has left what the CPU computes."""

    what: str
    time: float
    moved: int
    is_right: bool


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

    def free(self) -> None:
        """Gives memory back."""
        for memory in (*self.gradients, *self.residuals, *self.outs):
            memory.free()

    def copy_time(self, calls: int) -> float:
        """Milliseconds of a device copy of n floats."""
        return self.gpu.milliseconds(
            *("gpu_time_copy", addresses(self.outs), addresses(self.gradients)),
            *(I64(4 * self.n), I32(self.num_sets), I32(calls)),
        )

    def encode_time(self, codec: GpuCodec, calls: int) -> float:
        """Milliseconds of an encoding without a residual."""
        return codec.time_encode(self.gradients, None, calls)


def of_codec(program: compll.Program, buffers: Buffers, timing: Timing) -> Iterator[Share]:
    """The shares of one codec."""
    n, gpu, name = buffers.n, buffers.gpu, program.name
    codec = GpuCodec(gpu, program, n, sets=buffers.num_sets)
    wire, key = codec.wire_bytes, Key(**KEY, offset=0)
    rows = [Memory(gpu, wire) for _ in range(NUM_MERGED * buffers.num_sets)]
    for number, row in enumerate(rows):
        shift = _SHIFT * (number % NUM_MERGED)
        codec.encode_to(row, buffers.gradients[0].at + 4 * shift, key)
    changed = n
    if name in SPARSE:
        codec.decode(rows[:1], buffers.outs[0])
        changed = int(np.count_nonzero(buffers.outs[0].get()))
    reads = _READS.get(name, 1)
    read = 4 * changed if name in _SAMPLES else 4 * n * reads
    timed = Timed(codec, Cpu(program), buffers, rows, timing.calls)

    if codec.num_states:
        # Each is read, and written.
        yield timing.share(timed.encode_state(), read + wire + 8 * n * codec.num_states)
    else:
        yield timing.share(timed.encode(), read + wire)
        # Gradient and residual are read, the latter is written.
        yield timing.share(timed.encode_feedback(), 8 * n * reads + 4 * n + wire)
    yield timing.share(timed.decode(), wire + 4 * n)
    # What a sparse packet does not hold is left alone.
    yield timing.share(timed.decode_add(), wire + 8 * changed)
    yield timing.share(timed.merge(), NUM_MERGED * wire + 4 * n)
    codec.free()
    for row in rows:
        row.free()
