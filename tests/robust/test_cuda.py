# SPDX-License-Identifier: Apache-2.0
"""The passes on a GPU, as far as that can be shown without one: nvcc takes them, and the source,
run on this CPU thread by thread (tests/compll/emulation), gives the bits of the library for CPUs.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from compll.backends.toolchain import NVCC_FLAGS
from tests.compll.emulation import Guarded
from tests.robust.emulated import ROOT, build
from tests.robust.test_kernels import rows_of
from tf_hips.ops import native_robust
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.native_robust import CoordinateRule

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
BAD_ROWS, OUT_OF_MEMORY = 2, 25


@functools.cache
def library(*, is_full: bool = False) -> ctypes.CDLL:
    """The emulated passes."""
    found = ctypes.CDLL(str(build(is_full=is_full)))
    found.tf_hips_cuda_robust_scratch_bytes.restype = ctypes.c_int64
    return found


class Passes:
    """The passes on rows of this process, `skew` bytes off alignment."""

    def __init__(self, rows: Floats, skew: int = 0, *, is_full: bool = False) -> None:
        self.n, self.d = rows.shape
        self.chunks = -(-self.d // CHUNK)
        self.skew, self.library = skew, library(is_full=is_full)
        self.rows = [Guarded(self.d, np.float32, skew) for _ in rows]
        for to, row in zip(self.rows, rows, strict=True):
            to.inside[:] = row
        n, d = ctypes.c_int32(self.n), ctypes.c_int64(self.d)
        self.start = (_pointers(self.rows), n, d)
        self.scratch_bytes = self.library.tf_hips_cuda_robust_scratch_bytes(n, d)

    def _call(self, name: str, *arguments: object) -> None:
        scratch = Guarded(self.scratch_bytes, np.uint8)
        room = (ctypes.c_void_p(scratch.inside.ctypes.data), ctypes.c_int64(self.scratch_bytes))
        function = self.library[f"tf_hips_cuda_robust_{name}"]
        assert function(*self.start, *arguments, *room, None) == 0
        scratch.check()

    def coordinate(
        self,
        rule: CoordinateRule,
        drop: int,
        weights: Floats | None = None,
        *,
        squares: bool = True,
    ) -> tuple[Floats, Doubles]:
        """As native_robust.coordinate; without `squares`, these are garbage."""
        out = Guarded(self.d, np.float32, self.skew)
        sums = Guarded(self.chunks * self.n, np.float64)
        self._call(
            "coordinate",
            *(None, 0) if weights is None else (_at(weights), len(weights)),
            *(int(rule), drop, _at(out.inside), _at(sums.inside) if squares else None),
        )
        out.check()
        sums.check()
        return out.inside.copy(), sums.inside.reshape(self.chunks, self.n).copy()

    def distances(self, *, with_pairs: bool = True) -> tuple[Doubles, Doubles]:
        """As native_robust.distances."""
        count = self.n * (self.n - 1) // 2 if with_pairs else 0
        sums, pairs = (Guarded(self.chunks * k, np.float64) for k in (self.n, count))
        self._call("distances", _at(sums.inside), _at(pairs.inside) if with_pairs else None)
        sums.check()
        pairs.check()
        return (
            sums.inside.reshape(self.chunks, self.n).copy(),
            pairs.inside.reshape(self.chunks, count).copy(),
        )

    def mix(self, weights: Floats) -> Floats:
        """As native_robust.mix."""
        out = [Guarded(self.d, np.float32, self.skew) for _ in weights]
        self._call("mix", _at(weights), len(weights), _pointers(out))
        for row in out:
            row.check()
        return np.stack([row.inside for row in out])


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _pointers(vectors: list[Guarded]) -> ctypes.Array:
    return (ctypes.c_void_p * len(vectors))(*(one.inside.ctypes.data for one in vectors))


def check(n: int, d: int, skew: int = 0, *, is_full: bool = False) -> None:
    """Every pass gives the bits of the library for CPUs."""
    rows = rows_of(n, d)
    passes = Passes(rows, skew, is_full=is_full)
    for rule, drop in zip(CoordinateRule, (0, (n - 1) // 3, n // 3, 0), strict=True):
        wanted, squares = native_robust.coordinate(rows, rule, drop)
        found, found_squares = passes.coordinate(rule, drop)
        assert found.tobytes() == wanted.tobytes(), (n, d, rule)
        assert found_squares.tobytes() == squares.tobytes(), (n, d, rule)
        found, _ = passes.coordinate(rule, drop, squares=False)
        assert found.tobytes() == wanted.tobytes(), (n, d, rule)
    for with_pairs in (True, False):
        for found, wanted in zip(
            passes.distances(with_pairs=with_pairs),
            native_robust.distances(rows, with_pairs),
            strict=True,
        ):
            assert found.tobytes() == wanted.tobytes(), (n, d, with_pairs)
    for m in {1, n // 2 + 1, min(n + 1, 1024)}:
        weights = np.random.default_rng(m).standard_normal((m, n)).astype(np.float32)
        assert passes.mix(weights).tobytes() == native_robust.mix(rows, weights).tobytes(), (n, m)
        rule, drop = (CoordinateRule.NEAREST, m // 3) if m % 2 else (CoordinateRule.MEDIAN, 0)
        for found, wanted in zip(
            passes.coordinate(rule, drop, weights),
            native_robust.coordinate(rows, rule, drop, weights),
            strict=True,
        ):
            assert found.tobytes() == wanted.tobytes(), (n, d, m)


@pytest.mark.parametrize("n", (1, 2, 5, 8, 9, 15, 16, 22, 70, 130))
def test_the_bits_are_those_of_the_cpu(n: int) -> None:
    # In which order threads run must not matter; nor where rows begin.
    for d, skew, is_backwards in ((1, 0, False), (513, 4, True), (2050 if n < 64 else 40, 0, True)):
        library().emulation_order(int(is_backwards))
        check(n, d, skew)
    library().emulation_order(0)


def test_tasks_and_chunks_are_added_up_in_order() -> None:
    check(5, 70_001)
    rows = rows_of(2, CHUNK + 40_000)
    passes = Passes(rows)
    for found, wanted in zip(passes.distances(), native_robust.distances(rows), strict=True):
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_network_and_the_most_rows() -> None:
    for n in (*range(1, 67), 100, 129, 300, 1024):
        check(n, 530 if n <= 64 else 90, is_full=True)


def test_rows_that_are_not_finite_are_seen() -> None:
    rows = rows_of(6, 3000)
    rows[1, 7], rows[4, 2999] = np.nan, -np.inf
    for _, squares in (
        Passes(rows).coordinate(CoordinateRule.MEDIAN, 0),
        Passes(rows).coordinate(CoordinateRule.MEDIAN, 0, np.ones((2, 6), np.float32)),
    ):
        np.testing.assert_array_equal(np.isfinite(squares[0]), [1, 0, 1, 1, 0, 1])
    squares, pairs = Passes(rows).distances()
    np.testing.assert_array_equal(np.isfinite(squares[0]), [1, 0, 1, 1, 0, 1])
    of_pair = dict(zip(zip(*np.triu_indices(6, 1), strict=True), pairs[0], strict=True))
    assert not any(np.isfinite(apart) for pair, apart in of_pair.items() if {1, 4} & set(pair))
    assert all(np.isfinite(apart) for pair, apart in of_pair.items() if not {1, 4} & set(pair))


def test_what_makes_no_sense_is_refused_and_nothing_is_written() -> None:
    passes = Passes(rows_of(4, 10))
    out = Guarded(10, np.float32)
    room = np.zeros(passes.scratch_bytes, np.uint8)
    functions = passes.library

    def coordinate(
        *rule: int, n: int = 4, d: int = 10, at: object = passes.start[0], bytes_: int = room.size
    ) -> int:
        begin = (at, ctypes.c_int32(n), ctypes.c_int64(d), None, 0, *rule, _at(out.inside), None)
        status: int = functions.tf_hips_cuda_robust_coordinate(
            *begin, _at(room), ctypes.c_int64(bytes_), None
        )
        return status

    median, trimmed, nearest, majority = (int(rule) for rule in CoordinateRule)
    before = out.inside.tobytes()
    for rule in ((median, 1), (trimmed, 2), (trimmed, -1), (nearest, 4), (majority, 1), (4, 0)):
        assert coordinate(*rule) == BAD_ROWS, rule
    for n, d in ((0, 10), (1025, 10), (4, -1)):
        assert coordinate(median, 0, n=n, d=d) == BAD_ROWS
        size = functions.tf_hips_cuda_robust_scratch_bytes
        assert size(ctypes.c_int32(n), ctypes.c_int64(d)) == -BAD_ROWS
    assert coordinate(median, 0, at=(ctypes.c_void_p * 4)()) == BAD_ROWS
    assert coordinate(median, 0, bytes_=room.size - 1) == OUT_OF_MEMORY
    scratch = (_at(room), ctypes.c_int64(room.size), None)
    assert functions.tf_hips_cuda_robust_distances(*passes.start, None, None, *scratch) == BAD_ROWS
    for weights, m in ((None, 1), (_at(out.inside), 0), (_at(out.inside), 1025)):
        to = _pointers([out])
        found = functions.tf_hips_cuda_robust_mix(*passes.start, weights, m, to, *scratch)
        assert found == BAD_ROWS
    assert out.inside.tobytes() == before
    assert coordinate(median, 0, d=0) == 0
    assert out.inside.tobytes() == before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here: not compiled")
def test_nvcc_compiles(tmp_path: Path) -> None:
    """To machine code of one GPU, with no array of a thread in memory."""
    flags = [flag for flag in NVCC_FLAGS if "gencode" not in flag]
    command = ["nvcc", *flags, "-arch=sm_90", "-Werror=all-warnings", f"-I{ROOT}"]
    command += ["--resource-usage", "-c", "-o", str(tmp_path / "robust.o")]
    done = subprocess.run(
        [*command, str(ROOT / "tf_hips/cc/cuda/robust.cu")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    frames = [int(size) for size in re.findall(r"(\d+) bytes stack frame", done.stderr)]
    assert len(frames) > 70
    # A register or two that a loop does not change may go there.
    assert max(frames) <= 16
