# SPDX-License-Identifier: Apache-2.0
"""The passes of robust aggregation on a GPU: are they right, how near to the speed of memory?"""

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu import robust_reference as reference
from benchmarks.gpu.binding import CUDA_FAILED, I32, I64, VOID
from benchmarks.gpu.machine import Floats, Gpu, GpuError, Memory
from benchmarks.gpu.robust_reference import CHUNK, MAJORITY, MEDIAN, NEAREST, TRIMMED, Doubles
from benchmarks.gpu.shares import Buffers, Share, Timing

NAME = "robust"
"""What a codec's name is of a codec."""

# Rows and their lengths: networks of a number of rows and of a larger one, sums with rests, one
# tile of pairs and several, more rows than registers hold, more than one chunk.
SHAPES = (
    *((n, 1) for n in (1, 4, 11)),
    *((n, 2049) for n in (1, 2, 3, 8, 9, 16, 17, 22, 33, 64, 65, 100)),
    *((n, 70_001) for n in (5, 15)),
    (3, CHUNK + 1027),
)
# What is timed: a name, rows, and a rule and what it drops, or nothing for sums.
RULES = (
    ("median", 8, MEDIAN, 0),
    ("median", 16, MEDIAN, 0),
    ("trimmed mean", 16, TRIMMED, 5),
    ("meamed", 16, NEAREST, 5),
    ("majority", 16, MAJORITY, 0),
    ("median", 45, MEDIAN, 0),
    ("trimmed mean", 64, TRIMMED, 21),
    ("median", 100, MEDIAN, 0),
)
APART = (8, 11, 16, 45)
MIXES = ((16, 1), (16, 16))


def has(gpu: Gpu) -> bool:
    """Whether the passes are in the library."""
    return hasattr(gpu.library, "tf_hips_cuda_robust_mix")


class Rows:
    """n rows of d floats in device memory, and what the passes write."""

    def __init__(self, gpu: Gpu, floats: Memory, n: int, d: int, skew: int = 0) -> None:
        """`floats` holds them, `skew` floats behind its begin, and is the caller's."""
        self.gpu, self.n, self.d = gpu, n, d
        self.chunks = -(-d // CHUNK)
        self.at = _pointers(floats, n, d, skew)
        self.kept: list[Memory] = []
        self.scratch = self._memory(self._scratch_bytes(), np.uint8)
        self.sums = self._memory(self.chunks * n, np.float64)
        self.pairs = self._memory(self.chunks * n * (n - 1) // 2, np.float64)

    def _memory(self, count: int, kind: type) -> Memory:
        self.kept.append(Memory(self.gpu, count, kind))
        return self.kept[-1]

    def _scratch_bytes(self) -> int:
        name = "tf_hips_cuda_robust_scratch_bytes"
        found = int(self.gpu.call(name, I32(self.n), I64(self.d), result=ctypes.c_int64))
        if found < 0:
            raise GpuError(f"{name} must return bytes. Received: status {-found}")
        return found

    def free(self) -> None:
        """Gives memory back, but for that of the rows."""
        for memory in self.kept:
            memory.free()

    def coordinate_arguments(
        self, rule: int, drop: int, out: Memory, squares: bool, weights: Memory | None = None
    ) -> list[Any]:
        """Those of tf_hips_cuda_robust_coordinate, but for the stream."""
        m = 0 if weights is None else weights.count // self.n
        return [
            *(self.at, I32(self.n), I64(self.d), VOID(None if weights is None else weights.at)),
            *(I32(m), I32(rule), I32(drop), VOID(out.at), VOID(self.sums.at if squares else None)),
            *self._room(),
        ]

    def apart_arguments(self, pairs: bool) -> list[Any]:
        """Those of tf_hips_cuda_robust_distances."""
        where = VOID(self.pairs.at if pairs else None)
        return [self.at, I32(self.n), I64(self.d), VOID(self.sums.at), where, *self._room()]

    def mix_arguments(self, weights: Memory, out: Memory) -> list[Any]:
        """Those of tf_hips_cuda_robust_mix; `out` has m rows."""
        m = weights.count // self.n
        to = _pointers(out, m, self.d, 0)
        return [self.at, I32(self.n), I64(self.d), VOID(weights.at), I32(m), to, *self._room()]

    def _room(self) -> list[Any]:
        return [VOID(self.scratch.at), I64(self.scratch.bytes)]

    def run(self, name: str, arguments: list[Any]) -> None:
        """Calls a pass on the stream that has no number."""
        status = self.gpu.call(f"tf_hips_cuda_robust_{name}", *arguments, VOID(None))
        if status != 0:
            error = self.gpu.error_text() if status == CUDA_FAILED else f"status {status}"
            raise GpuError(f"{name} must return 0. Received: {error}")

    def time(self, name: str, arguments: list[Any], calls: int) -> float:
        """Milliseconds of a pass."""
        function = ctypes.cast(getattr(self.gpu.library, f"tf_hips_cuda_robust_{name}"), VOID)
        return self.gpu.milliseconds(f"gpu_time_{name}", function, *arguments, I32(calls))


def _pointers(memory: Memory, n: int, d: int, skew: int) -> Any:
    """Addresses of n rows of d floats, behind one another."""
    return (VOID * n)(*(memory.at + 4 * (skew + i * d) for i in range(n)))


def rows_of(n: int, d: int) -> Floats:
    """Rows with ties, zeros of both signs, denormals, and some that are far away."""
    rows = np.random.default_rng((n, d)).standard_normal((n, d), dtype=np.float32)
    rows[:, ::7] = np.round(rows[:, ::7])
    rows[:: max(n // 3, 1), 3::11] *= np.float32(1e6)
    rows[:, 5::13] *= np.float32(1e-40)
    return rows


def check(gpu: Gpu) -> list[str]:
    """What differs from the reference, in words; nothing when all is equal."""
    wrong = []
    for n, d in SHAPES:
        values = rows_of(n, d)
        for skew in (0, 1) if d < CHUNK else (0,):
            memory = Memory(gpu, n * d + skew, np.float32)
            memory.put(np.concatenate([np.zeros(skew, np.float32), values.ravel()]))
            rows = Rows(gpu, memory, n, d, skew)
            wrong += [f"n={n} d={d} skew={skew}: {what}" for what in _check_rows(rows, values)]
            rows.free()
            memory.free()
    return wrong


def _check_rows(rows: Rows, values: Floats) -> Iterator[str]:
    n, d = values.shape
    squares = reference.squares(values)
    out = Memory(rows.gpu, d, np.float32)
    for rule, drop in ((MEDIAN, 0), (TRIMMED, (n - 1) // 3), (NEAREST, n // 3), (MAJORITY, 0)):
        rows.sums.put(np.full(rows.sums.count, 7.0))
        rows.run("coordinate", rows.coordinate_arguments(rule, drop, out, squares=True))
        if not _same(out, reference.coordinate(values, rule, drop)):
            yield f"coordinate, rule {rule}"
        if not _same(rows.sums, squares):
            yield f"squares of rule {rule}"
    for with_pairs in (False, True):
        rows.sums.put(np.full(rows.sums.count, 7.0))
        rows.run("distances", rows.apart_arguments(with_pairs))
        if not _same(rows.sums, squares):
            yield "squares of distances"
    if not _same(rows.pairs, reference.distances(values)):
        yield "distances"
    for m in {1, min(n, 9), n + 1} if d < CHUNK else {2}:
        given = np.random.default_rng(m).standard_normal((m, n), dtype=np.float32)
        weights = Memory(rows.gpu, m * n, np.float32).put(given)
        mixed = Memory(rows.gpu, m * d, np.float32)
        wanted = reference.mix(values, given)
        rows.run("mix", rows.mix_arguments(weights, mixed))
        if not _same(mixed, wanted):
            yield f"mix to {m}"
        drop = (m - 1) // 3
        rows.run("coordinate", rows.coordinate_arguments(TRIMMED, drop, out, True, weights))
        if not _same(out, reference.coordinate(wanted, TRIMMED, drop)):
            yield f"coordinate of {m} sums"
        if not _same(rows.sums, squares):
            yield f"squares beside {m} sums"
        weights.free()
        mixed.free()
    out.free()


def _same(found: Memory, expected: Floats | Doubles) -> bool:
    return found.get().tobytes() == expected.tobytes()


def shares(gpu: Gpu, n_floats: int, timing: Timing, buffers: Buffers) -> Iterator[Share]:
    """What is timed on rows of `n_floats` floats in all, beside a copy of `buffers`.

    What must be moved: each row once, and what is written.
    """
    floats = Memory(gpu, n_floats, np.float32)
    some = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32)
    floats.put(np.resize(some, n_floats))

    def timed(what: str, rows: Rows, name: str, arguments: list[Any], moved: int) -> Share:
        rounds = timing.turns(buffers.copy_time, lambda calls: rows.time(name, arguments, calls))
        return Share(what, rounds, moved, 8 * buffers.n)

    for n in sorted({n for _, n, _, _ in RULES} | set(APART) | {n for n, _ in MIXES}):
        d = n_floats // n // 1024 * 1024
        rows = Rows(gpu, floats, n, d)
        out = Memory(gpu, d, np.float32)
        for name, _, rule, drop in (one for one in RULES if one[1] == n):
            for squares in (False, True):
                arguments = rows.coordinate_arguments(rule, drop, out, squares)
                label = f"{name} of {n}" + (", squares" if squares else "")
                yield timed(label, rows, "coordinate", arguments, 4 * (n + 1) * d)
        if n in APART:
            arguments = rows.apart_arguments(pairs=True)
            yield timed(f"distances of {n}", rows, "distances", arguments, 4 * n * d)
        for m in (m for count, m in MIXES if count == n):
            weights = Memory(gpu, m * n, np.float32).put(np.full(m * n, 1 / n, np.float32))
            mixed = Memory(gpu, m * d, np.float32)
            arguments = rows.mix_arguments(weights, mixed)
            yield timed(f"{m} sums of {n}", rows, "mix", arguments, 4 * (n + m) * d)
            if m > 1:
                arguments = rows.coordinate_arguments(MEDIAN, 0, out, False, weights)
                label = f"median of {m} sums of {n}"
                yield timed(label, rows, "coordinate", arguments, 4 * (n + 1) * d)
            weights.free()
            mixed.free()
        out.free()
        rows.free()
    floats.free()
