# SPDX-License-Identifier: Apache-2.0
"""The passes over memory: beside float64, and equal bits for any threads, registers and shards."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.robust import oracle
from tf_hips.ops import native_robust, native_updates
from tf_hips.ops.compressor import CHUNK
from tf_hips.ops.native_robust import CoordinateRule

pytestmark = pytest.mark.heavy  # every kernel at every size

Floats = npt.NDArray[np.float32]
ROOT = Path(__file__).resolve().parents[2]
# In registers of every width, beyond them; blocks of 512 and tasks of 2^15 with rests.
COUNTS = (1, 2, 3, 4, 5, 8, 9, 10, 15, 16, 17, 23, 32, 33, 45, 64, 100)
LENGTHS = (1, 511, 512, 2049)


def rows_of(n: int, d: int, seed: int = 0) -> Floats:
    generator = np.random.default_rng((n, d, seed))
    rows = generator.standard_normal((n, d)).astype(np.float32)
    rows[:, ::7] = np.round(rows[:, ::7])  # ties, and zeros of both signs
    rows[:: max(n // 3, 1), 3::11] *= np.float32(1e6)
    return rows


@pytest.mark.parametrize("n", COUNTS)
def test_coordinate_rules_are_what_sorting_gives(n: int) -> None:
    for d in LENGTHS:
        rows = rows_of(n, d)
        exact = rows.astype(np.float64)
        drop = (n - 1) // 2
        found, squares = native_robust.coordinate(rows, CoordinateRule.MEDIAN)
        if n % 2:
            np.testing.assert_array_equal(found, np.median(rows, axis=0))
        bound = 1e-7 * np.abs(np.sort(exact, axis=0)[(n - 1) // 2 : n // 2 + 1]).max(axis=0)
        assert np.all(np.abs(found - np.median(exact, axis=0)) <= bound)
        for trimmed in {0, drop // 2, drop}:
            found, _ = native_robust.coordinate(rows, CoordinateRule.TRIMMED, trimmed)
            wanted = oracle.trimmed_mean(exact, trimmed)
            scale = np.abs(np.sort(exact, axis=0)[trimmed : n - trimmed]).max(axis=0)
            assert np.all(np.abs(found - wanted) <= 1e-6 * scale)
        for left_out in {0, n // 4, drop, n - 1}:
            found, _ = native_robust.coordinate(rows, CoordinateRule.NEAREST, left_out)
            kept = _nearest_in_float32(rows, n - left_out)
            assert np.all(np.abs(found - kept.mean(axis=0)) <= 2e-6 * np.abs(kept).max(axis=0))
        found, _ = native_robust.coordinate(rows, CoordinateRule.MAJORITY)
        np.testing.assert_array_equal(found, np.sign(np.sign(rows).sum(axis=0)))
        np.testing.assert_allclose(squares.sum(axis=0), (exact**2).sum(axis=1), rtol=1e-5)


def _nearest_in_float32(rows: Floats, keep: int) -> npt.NDArray[np.float64]:
    """What the kernel keeps: differences from the median are rounded, of ties the lesser stays."""
    ordered = np.sort(rows, axis=0)
    n = len(rows)
    middle = ordered[n // 2]
    median = middle if n % 2 else (ordered[n // 2 - 1] + middle) * np.float32(0.5)
    low = np.zeros(rows.shape[1], int)
    for _ in range(n - keep):
        is_left = median - np.take_along_axis(ordered, low[None], 0)[0] > (
            np.take_along_axis(ordered, low[None] + keep, 0)[0] - median
        )
        low += is_left & (low < n - keep)
    window = low[None] + np.arange(keep)[:, None]
    return np.take_along_axis(ordered.astype(np.float64), window, 0)


@pytest.mark.parametrize("n", COUNTS)
def test_distances_and_sums_are_those_of_float64(n: int) -> None:
    for d in LENGTHS:
        rows = np.random.default_rng((n, d)).standard_normal((n, d)).astype(np.float32)
        exact = rows.astype(np.float64)
        squares, pairs = native_robust.distances(rows)
        wanted = oracle.distances(exact)[np.triu_indices(n, 1)]
        np.testing.assert_allclose(pairs.sum(axis=0), wanted, rtol=1e-5)
        np.testing.assert_allclose(squares.sum(axis=0), (exact**2).sum(axis=1), rtol=1e-5)
        for m in (1, 4, 5):
            weights = np.random.default_rng(m).standard_normal((m, n)).astype(np.float32)
            found = native_robust.mix(rows, weights)
            bound = 1e-6 * (np.abs(weights) @ np.abs(rows)) * max(n, 8) / 8
            assert np.all(np.abs(found - weights.astype(np.float64) @ exact) <= bound)


def test_distances_of_rows_that_are_near_each_other_keep_their_digits() -> None:
    generator = np.random.default_rng(3)
    weights = generator.standard_normal(200_000).astype(np.float32)
    for ratio in (1e-3, 1e-4, 1e-5):
        rows = weights + (ratio * generator.standard_normal((8, weights.size))).astype(np.float32)
        _, pairs = native_robust.distances(rows)
        wanted = oracle.distances(rows.astype(np.float64))[np.triu_indices(8, 1)]
        np.testing.assert_allclose(pairs.sum(axis=0), wanted, rtol=2e-6)


def test_one_far_row_takes_no_digits_from_the_others() -> None:
    generator = np.random.default_rng(4)
    rows = generator.standard_normal((6, 5000)).astype(np.float32)
    rows[0] *= np.float32(1e9)  # the row that a matrix would be centred on
    _, pairs = native_robust.distances(rows)
    wanted = oracle.distances(rows.astype(np.float64))[np.triu_indices(6, 1)]
    np.testing.assert_allclose(pairs.sum(axis=0), wanted, rtol=2e-6)


def test_mixing_and_sorting_in_one_pass_is_both_one_after_the_other() -> None:
    rows = rows_of(15, 3001)
    weights = np.random.default_rng(1).random((7, 15)).astype(np.float32)
    fused, _ = native_robust.coordinate(rows, CoordinateRule.TRIMMED, 2, weights)
    apart, _ = native_robust.coordinate(native_robust.mix(rows, weights), CoordinateRule.TRIMMED, 2)
    assert fused.tobytes() == apart.tobytes()


def test_order_of_rows_does_not_matter_to_coordinates() -> None:
    rows = rows_of(21, 1500)
    rows[3, :40], rows[4, :40] = 0.0, -0.0
    order = np.random.default_rng(0).permutation(21)
    for rule, drop in zip(CoordinateRule, (0, 5, 6, 0), strict=True):
        first, _ = native_robust.coordinate(rows, rule, drop)
        second, _ = native_robust.coordinate(rows[order], rule, drop)
        assert first.tobytes() == second.tobytes()


def test_shards_together_have_what_one_server_has() -> None:
    d = CHUNK + 70_001
    rows = np.random.default_rng(2).standard_normal((5, d)).astype(np.float32)
    squares, pairs = native_robust.distances(rows)
    front, back = rows[:, :CHUNK].copy(), rows[:, CHUNK:].copy()
    parts = [native_robust.distances(part) for part in (front, back)]
    assert np.concatenate([part[0] for part in parts]).tobytes() == squares.tobytes()
    assert np.concatenate([part[1] for part in parts]).tobytes() == pairs.tobytes()
    whole, _ = native_robust.coordinate(rows, CoordinateRule.TRIMMED, 1)
    cut = [native_robust.coordinate(part, CoordinateRule.TRIMMED, 1)[0] for part in (front, back)]
    assert np.concatenate(cut).tobytes() == whole.tobytes()


@pytest.mark.parametrize("skew", (0, 5))
def test_long_results_go_past_the_caches_and_nowhere_else(skew: int) -> None:
    d = (1 << 21) + 700
    rows = rows_of(3, 70_001)
    rows = np.ascontiguousarray(np.tile(rows, -(-d // rows.shape[1]))[:, :d])
    whole = np.full(d + 32, 7.0, np.float32)
    out = whole[skew : skew + d]
    for rule, drop in zip(CoordinateRule, (0, 1, 1, 0), strict=True):
        found, squares = native_robust.coordinate(rows, rule, drop, out=out)
        parts = [
            native_robust.coordinate(np.ascontiguousarray(part), rule, drop)
            for part in np.split(rows, range(CHUNK, d, CHUNK), axis=1)
        ]
        assert found.tobytes() == b"".join(part[0].tobytes() for part in parts)
        assert squares.tobytes() == b"".join(part[1].tobytes() for part in parts)
        assert np.all(whole[:skew] == 7) and np.all(whole[skew + d :] == 7)


def every_result() -> str:
    """A digest of what all passes give."""
    found = hashlib.sha256()
    for n, d in ((5, 100_003), (15, 40_000), (16, 700), (40, 3000), (71, 600)):
        rows = rows_of(n, d)
        weights = np.random.default_rng(n).random((6, n)).astype(np.float32)
        for rule, drop in zip(CoordinateRule, (0, (n - 1) // 3, n // 3, 0), strict=True):
            for array in native_robust.coordinate(rows, rule, drop):
                found.update(array.tobytes())
        found.update(
            native_robust.coordinate(rows, CoordinateRule.NEAREST, 2, weights)[0].tobytes()
        )
        found.update(native_robust.mix(rows, weights).tobytes())
        for array in native_robust.distances(rows):
            found.update(array.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(
    "environment",
    [
        {"TF_HIPS_NUM_THREADS": "1"},
        {"TF_HIPS_NUM_THREADS": "5"},
        {"TF_HIPS_CPU": "avx2", "TF_HIPS_PREFETCH": "l1"},
        {"TF_HIPS_CPU": "base", "TF_HIPS_PREFETCH": "l2"},
    ],
    ids=lambda given: "-".join(given.values()),
)
def test_bits_do_not_depend_on_threads_or_registers(environment: dict[str, str]) -> None:
    program = "from tests.robust import test_kernels as t; print(t.every_result())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout.strip() == every_result(), done.stderr


def test_what_makes_no_sense_is_refused() -> None:
    rows = rows_of(4, 10)
    for rule, drop in ((CoordinateRule.TRIMMED, 2), (CoordinateRule.NEAREST, 4)):
        with pytest.raises(ValueError, match=f"n=4, drop={drop}"):
            native_robust.coordinate(rows, rule, drop)
    # Twice that is more than the library's integer holds, and more than all of them.
    for drop in (-1, 1 << 30, 1 << 32):
        with pytest.raises(ValueError, match=f"drop={drop}"):
            native_robust.coordinate(rows, CoordinateRule.TRIMMED, drop)
    room, squares = np.empty(10, np.float32), np.zeros((1, 4))
    pointers, n, d = native_robust._pointers(rows)
    status = native_robust._functions()["coordinate"](
        pointers, n, d, None, 0, CoordinateRule.TRIMMED, 1 << 30,
        room.ctypes.data, squares.ctypes.data,
    )  # fmt: skip
    assert status != 0
    with pytest.raises(ValueError, match="must have 10 elements"):
        native_robust.distances([rows[0], rows[1][:9]])
    with pytest.raises(TypeError, match="float64"):
        native_robust.distances([rows[0], rows[1].astype(np.float64)])
    with pytest.raises(TypeError, match="contiguous"):
        native_robust.distances([rows[0][::2]])
    with pytest.raises(ValueError, match="1 to 1024 rows"):
        native_robust.distances([])
    with pytest.raises(ValueError, match=r"shape \[m, 4\]"):
        native_robust.mix(rows, np.ones((2, 3), np.float32))


def test_no_elements_are_no_trouble() -> None:
    rows = np.zeros((3, 0), np.float32)
    assert native_robust.coordinate(rows, CoordinateRule.MEDIAN)[0].shape == (0,)
    assert native_robust.distances(rows)[1].shape == (0, 3)
    assert native_robust.mix(rows, np.ones((2, 3), np.float32)).shape == (2, 0)


def test_what_may_not_be_written_is_not_written() -> None:
    rows = [np.ones(5, np.float32), np.zeros(5, np.float32)]
    room = np.frombuffer(bytes(20), np.float32)
    for call in (
        lambda: native_robust.coordinate(rows, CoordinateRule.MEDIAN, out=room),
        lambda: native_robust.mix(rows, np.ones((1, 2), np.float32), out=room),
        lambda: native_updates.add_scaled(rows[0], rows[1], 1.0, out=room),
    ):
        with pytest.raises(ValueError, match="writable"):
            call()
    sums = np.zeros((2, 4))
    sums.flags.writeable = False
    half = np.zeros(1, np.uint64), np.zeros(3, np.int64), sums
    with pytest.raises(ValueError, match="read-only"):
        native_robust.add_sketches(rows, [half])
    assert not room.any() and not sums.any()
