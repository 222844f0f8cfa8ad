# SPDX-License-Identifier: Apache-2.0
"""PowerSGD: the sum on real ranks beside NumPy's, and what cc/tf/low_rank.h promises."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support.ranks import ranks, start_alone
from tf_hips.ops.low_rank import Matrix, matrix_of, square, wire_bytes

pytestmark = pytest.mark.tf

ROOT = Path(__file__).resolve().parents[2]
# A dense kernel, a bias, one of a convolution, a scalar, nothing, one of attention, too small a
# matrix, and sides that no vector register divides.
SHAPES = [(40, 24), (24,), (3, 3, 8, 16), (), (0, 5), (32, 4, 8), (4, 5), (37, 61)]
MATRICES = [0, 2, 5, 7]


def test_which_gradients_are_matrices() -> None:
    def of(shape: tuple[int, ...], rank: int = 2, rate: float = 2.0) -> Matrix | None:
        return matrix_of(shape, rank, rate)

    assert of((40, 24)) == Matrix(40, 24, 2)
    assert of((3, 3, 8, 16)) == Matrix(72, 16, 2)
    assert of((1, 1, 30, 40)) == Matrix(30, 40, 2)
    # Heads and their size belong together.
    assert of((512, 8, 64)) == of((8, 64, 512)) == Matrix(512, 512, 2)
    for shape in ((), (7,), (0,), (0, 5), (1, 1000), (2, 2, 2, 8)):
        assert of(shape) is None, shape
    # 2 * (8 + 8) is half of 64: that does not pay; 2 * (9 + 8) of 72 does.
    assert of((8, 8)) is None
    assert of((9, 8)) == Matrix(9, 8, 2)
    assert of((8, 8), rate=1.0) == Matrix(8, 8, 2)
    assert wire_bytes((40, 24), 2, 2.0) == 4 * 2 * 64
    assert wire_bytes((24,), 2, 2.0) == 4 * 24
    assert [square(n) for n in (0, 1, 9, 10, 12)] == [(0, 0), (1, 1), (3, 3), (3, 4), (3, 4)]


def _spectral(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal columns in the order of Gram and Schmidt, in double."""
    basis, triangle = np.linalg.qr(matrix)
    return basis * np.sign(np.diag(triangle))


class _InNumPy:
    """All ranks at once, in double."""

    def __init__(self, bases, size, has_feedback):
        self.bases = {place: basis.astype(float) for place, basis in bases.items()}
        self.has_feedback = has_feedback
        self.residuals = {place: [0.0] * size for place in bases}

    def __call__(self, gradients):
        sums = [
            sum(each[place].astype(float) for each in gradients) for place in range(len(SHAPES))
        ]
        for place, basis in self.bases.items():
            one = matrix_of(SHAPES[place], 2, 2.0)
            own = [
                each[place].reshape(one.rows, one.columns) + residual
                for each, residual in zip(gradients, self.residuals[place], strict=True)
            ]
            left = _spectral(sum(matrix @ basis for matrix in own))
            right = sum(matrix.T @ left for matrix in own)
            if self.has_feedback:
                self.residuals[place] = [matrix - left @ (left.T @ matrix) for matrix in own]
            self.bases[place] = _spectral(right)
            sums[place] = (left @ right.T).reshape(-1)
        return sums


def _compare_with_numpy():
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.low_rank import LowRankSum
    from tf_hips.comm.reducers import make_reducer
    from tf_hips.ops.compressor import parse

    rank, size = primitives.rank(), primitives.size()

    def gradients(of, step):
        generator = np.random.default_rng([of, step])
        return [generator.normal(size=shape).astype(np.float32).reshape(-1) for shape in SHAPES]

    def make_variable(value, name):
        return tf.Variable(value, trainable=False, name=name)

    for text in ("error_feedback(powersgd(rank=2))", "powersgd(rank=2)"):
        total = make_reducer(
            SHAPES,
            parse(text),
            label=text.partition("(")[0],
            worker_seed=rank,
            owner_seed=rank,
            common_seed=2**63 + 5,
            make_variable=make_variable,
        )
        assert isinstance(total, LowRankSum)
        assert list(total.matrices) == list(total.bases) == MATRICES
        expected = _InNumPy(
            {place: basis.numpy() for place, basis in total.bases.items()},
            size,
            text.startswith("error"),
        )
        run = tf.function(total, autograph=False)
        given = [0.0] * len(SHAPES)
        received = [0.0] * len(SHAPES)
        for step in range(4):
            # Eagerly in the first step, then in a graph: one state.
            inputs = [tf.constant(value) for value in gradients(rank, step)]
            results = (total if step == 0 else run)(inputs, tf.constant(step, tf.int64))
            bits = [result.numpy().tobytes().hex() for result in results]
            bits += [basis.numpy().tobytes().hex() for basis in total.bases.values()]
            assert all(one == bits for one in primitives.gather_objects(bits)), step
            everyone = [gradients(of, step) for of in range(size)]
            for place, (result, value) in enumerate(zip(results, expected(everyone), strict=True)):
                np.testing.assert_allclose(result, value, atol=2e-4, err_msg=f"{text} {place}")
                given[place] += sum(values[place].astype(float) for values in everyone)
                received[place] += result.numpy().astype(float)
        if total.residuals:
            for place, residual in total.residuals.items():
                own = expected.residuals[place][rank]
                np.testing.assert_allclose(residual.numpy(), own, atol=2e-4)
                # Nothing is lost: what was given was received, or waits on some rank.
                waiting = sum(
                    np.array(one) for one in primitives.gather_objects(residual.numpy().tolist())
                )
                np.testing.assert_allclose(
                    received[place] + waiting.reshape(-1), given[place], atol=1e-4
                )
            assert list(total.residuals) == MATRICES
        else:
            assert not text.startswith("error")

    # Exact sums at first, by the number of the step; residuals begin behind them.
    staged = make_reducer(
        SHAPES,
        parse("warmup(error_feedback(powersgd(rank=2)), steps=2)"),
        label="staged",
        worker_seed=rank,
        owner_seed=rank,
        common_seed=7,
        make_variable=make_variable,
    )
    for run in (tf.function(staged, autograph=False), staged):
        for step in range(3):
            results = run(
                [tf.constant(value) for value in gradients(rank, step)], tf.constant(step, tf.int64)
            )
            everyone = [gradients(of, step) for of in range(size)]
            for place, result in enumerate(results):
                exact = sum(values[place] for values in everyone)
                is_exact = np.allclose(result, exact, atol=1e-4)
                assert is_exact == (step < 2 or place not in MATRICES), (step, place)

    # Matrices of no higher rank arrive whole; what was degenerate, or not finite, has gone by then.
    shapes = [(40, 24), (70, 90)]
    whole = LowRankSum(
        shapes,
        parse("error_feedback(powersgd(rank=3))"),
        label="whole",
        seed=1,
        make_variable=make_variable,
    )
    run = tf.function(whole, autograph=False)
    zeros = [tf.zeros([rows * columns]) for rows, columns in shapes]
    bad = [tf.tensor_scatter_nd_update(zero, [[3], [30]], [np.nan, np.inf]) for zero in zeros]
    for step, inputs in enumerate([zeros, zeros, bad, zeros]):
        results = run(inputs, tf.constant(step, tf.int64))
        for result in results:
            # What is not finite is seen on all ranks, but not kept.
            assert np.isfinite(result.numpy()).all() == (inputs is not bad)
            assert inputs is bad or not result.numpy().any()
        for kept in (*whole.bases.values(), *whole.residuals.values()):
            assert np.isfinite(kept.numpy()).all()
    generator = np.random.default_rng(
        9
    )  # the same columns on all ranks, so that the sum has rank 3
    columns = [generator.normal(size=(rows, 3)) for rows, _ in shapes]
    for step in range(4, 6):
        own = np.random.default_rng([rank, step])
        values = [
            (left @ own.normal(size=(3, right))).astype(np.float32).reshape(-1)
            for left, (_, right) in zip(columns, shapes, strict=True)
        ]
        results = run([tf.constant(value) for value in values], tf.constant(step, tf.int64))
        for place, result in enumerate(results):
            exact = sum(
                np.array(one[place])
                for one in primitives.gather_objects([value.tolist() for value in values])
            )
            np.testing.assert_allclose(result, exact, atol=1e-4 * np.abs(exact).max())


@ranks(3)
def test_three_ranks_equal_numpy():
    _compare_with_numpy()


def _orthonormal(matrix, step=0, seed=1):
    import tensorflow as tf

    from tf_hips.ops import library

    return (
        library.ops(tf)
        .tf_hips_orthonormal(matrix=matrix.astype(np.float32), step=step, seed=seed, tensor_id=3)
        .numpy()
    )


def _gram(basis):
    wide = basis.astype(float)
    return wide.T @ wide


# Beyond 4096 rows sums have several blocks.
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (5, 5), (61, 4), (4096, 3), (10_001, 6)])
def test_bases_are_orthonormal(rows: int, rank: int) -> None:
    matrix = np.random.default_rng(rows).normal(size=(rows, rank))
    basis = _orthonormal(matrix)
    np.testing.assert_allclose(_gram(basis), np.eye(rank), atol=1e-6)
    np.testing.assert_allclose(basis, _spectral(matrix.astype(np.float32)), atol=1e-6)
    # Columns that are nearly the same, as after many steps with one strong direction.
    close = matrix[:, :1] + 1e-4 * matrix
    np.testing.assert_allclose(_gram(_orthonormal(close)), np.eye(rank), atol=1e-6)


@pytest.mark.parametrize("rows", [4, 61, 5000])
def test_degenerate_columns_give_way_to_noise(rows: int) -> None:
    matrix = np.random.default_rng(rows).normal(size=(rows, 4))
    spoilt = {
        "nothing": np.zeros((rows, 4)),
        "zero": matrix * [1, 0, 1, 0],
        "equal": matrix[:, [0, 0, 2, 0]],
        "tiny": matrix * [1, 1e-9, 1, 1e-9],
        "nan": np.where(np.arange(4) % 2, np.nan, matrix),
        "infinite": np.where(np.arange(4) % 2, np.inf, matrix),
        "denormal": matrix * [1e-42, 0, 1e-42, 0],
        "huge": matrix * [1e37, 0, 1e37, 0],
    }
    for name, value in spoilt.items():
        basis = _orthonormal(value)
        np.testing.assert_allclose(_gram(basis), np.eye(4), atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(basis, _orthonormal(value), err_msg=name)
        if name == "denormal":
            continue
        # What is not degenerate stays.
        share = abs(basis[:, 0] @ matrix[:, 0]) / np.linalg.norm(matrix[:, 0])
        assert (share > 0.999999) == (name != "nothing"), name
    nothing = spoilt["nothing"]
    others = [_orthonormal(nothing, step=1), _orthonormal(nothing, seed=2)]
    assert all(abs(other - _orthonormal(nothing)).max() > 0.01 for other in others)
    # There are no more directions than rows.
    wide = _orthonormal(np.ones((2, 5)))
    np.testing.assert_allclose(_gram(wide), np.diag([1.0, 1, 0, 0, 0]), atol=1e-6)
    assert _orthonormal(np.zeros((0, 3))).shape == (0, 3)


def test_products_and_rests() -> None:
    import tensorflow as tf

    from tf_hips.ops import library

    ops = library.ops(tf)
    generator = np.random.default_rng(0)
    for rows, columns, rank in [(1, 1, 1), (300, 517, 3), (0, 4, 2), (5, 40, 0), (3, 70_000, 6)]:
        left = generator.normal(size=(rows, rank)).astype(np.float32)
        right = generator.normal(size=(columns, rank)).astype(np.float32)
        matrix = generator.normal(size=(rows, columns)).astype(np.float32)
        # In the order of the definition, each sum rounded to float32.
        product = np.zeros((rows, columns), np.float32)
        for k in range(rank):
            product += left[:, k : k + 1] * right[:, k]
        np.testing.assert_array_equal(ops.tf_hips_low_rank_product(left=left, right=right), product)
        np.testing.assert_array_equal(
            ops.tf_hips_low_rank_rest(matrix=matrix, left=left, right=right), matrix - product
        )
        wide = matrix.astype(float)
        found = ops.tf_hips_low_rank_left(matrix=matrix, right=right)
        np.testing.assert_allclose(found, wide @ right, atol=1e-5 * (columns + 10))
        found = ops.tf_hips_low_rank_right(matrix=matrix, left=left)
        np.testing.assert_allclose(found, wide.T @ left, atol=1e-5 * (rows + 10))
        if matrix.size > 40:
            matrix[0, [0, 20, -1]] = np.nan, np.inf, -np.inf
            rest = ops.tf_hips_low_rank_rest(matrix=matrix, left=left, right=right).numpy()
            np.testing.assert_array_equal(rest[0, [0, 20, -1]], [0, 0, 0])
            assert np.count_nonzero(rest) > 0.98 * rest.size
    with pytest.raises(tf.errors.InvalidArgumentError, match="equally many columns"):
        ops.tf_hips_low_rank_product(left=np.zeros((2, 3), "f"), right=np.zeros((2, 4), "f"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="shape of the product"):
        ops.tf_hips_low_rank_rest(
            matrix=np.zeros((2, 3), "f"), left=np.zeros((2, 1), "f"), right=np.zeros((2, 1), "f")
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="two dimensions"):
        ops.tf_hips_orthonormal(matrix=np.zeros(3, "f"), step=0, seed=1, tensor_id=0)


_PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <vector>

#include "tf_hips/cc/tf/low_rank.h"

// Tasks in the order that the argument says, as if by many threads.
int main(int argc, char**) {
  const tf_hips::ParallelFor parallel = [&](int64_t n, const std::function<void(int64_t)>& task) {
    for (int64_t i = 0; i < n; ++i) task(argc > 1 ? n - 1 - i : i);
  };
  const int64_t rows = 9001, columns = 83, rank = 5;
  std::vector<float> matrix(rows * columns), left(rows * rank), right(columns * rank);
  uint32_t state = 1;
  for (auto* values : {&matrix, &left, &right}) {
    for (float& value : *values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(static_cast<int32_t>(state)) * (state % 7 == 0 ? 1e-42f : 1e-9f);
    }
  }
  for (int64_t i = 0; i < rows; ++i) left[i * rank + 2] = left[i * rank];
  TfHipsKey key = {};
  key.seed = 77;
  std::vector<float> basis(left.size()), product(matrix.size()), rest(matrix.size());
  tf_hips::Orthonormalize(left.data(), rows, rank, key, parallel, basis.data());
  const tf_hips::LowRank factors = {basis.data(), right.data(), rows, columns, rank};
  tf_hips::LowRankProduct(factors, parallel, product.data());
  tf_hips::LowRankRest(factors, matrix.data(), parallel, rest.data());
  for (auto* values : {&matrix, &left, &right, &basis, &product, &rest}) {
    std::fwrite(values->data(), 4, values->size(), stdout);
  }
}
"""


@pytest.mark.timeout(240)
def test_all_processors_and_threads_make_the_same_bits(tmp_path: Path) -> None:
    import tensorflow as tf

    from tf_hips.ops import library

    source = tmp_path / "program.cc"
    source.write_text(_PROGRAM, encoding="utf-8")
    program = tmp_path / "program"
    # What an old processor has, in other loops.
    flags = ["-std=c++17", "-ffp-contract=off", "-O1", "-DTF_HIPS_NO_CLONES", "-I", str(ROOT)]
    sources = [str(source), str(ROOT / "tf_hips/cc/tf/low_rank.cc")]
    subprocess.run(["g++", *flags, *sources, "-o", str(program)], check=True, timeout=60)
    made = {
        subprocess.run([str(program), *order], check=True, capture_output=True, timeout=60).stdout
        for order in ([], ["backwards"])
    }
    assert len(made) == 1
    values = np.frombuffer(made.pop(), np.float32)
    shapes = [(9001, 83), (9001, 5), (83, 5), (9001, 5), (9001, 83), (9001, 83)]
    cuts = np.cumsum([rows * columns for rows, columns in shapes])
    assert len(values) == cuts[-1]
    assert np.isfinite(values).all()
    matrix, left, right, *expected = (
        part.reshape(shape) for part, shape in zip(np.split(values, cuts[:-1]), shapes, strict=True)
    )
    # What the library has for this processor, by TensorFlow's threads.
    ops = library.ops(tf)
    basis = ops.tf_hips_orthonormal(matrix=left, step=0, seed=77, tensor_id=0)
    found = [
        basis,
        ops.tf_hips_low_rank_product(left=basis, right=right),
        ops.tf_hips_low_rank_rest(matrix=matrix, left=basis, right=right),
    ]
    for one, bits in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.numpy().view(np.uint32), bits.view(np.uint32))


def _without_memory() -> None:
    import resource

    import tensorflow as tf

    from tf_hips.ops import library

    ops = library.ops(tf)
    step = tf.constant(0, tf.int64)
    matrix = tf.ones([1 << 23, 8])  # 256 MiB, as what comes out; 512 MiB between them
    ops.tf_hips_orthonormal(matrix[:4096], step, seed=1, tensor_id=0)  # threads are there
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (400 << 20), -1))
    with pytest.raises(
        tf.errors.ResourceExhaustedError, match="there is no memory to factorise a gradient"
    ):
        ops.tf_hips_orthonormal(matrix, step, seed=1, tensor_id=0)


@pytest.mark.heavy
def test_no_memory_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    start_alone(_without_memory, tmp_path, 100)
