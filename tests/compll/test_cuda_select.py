# SPDX-License-Identifier: Apache-2.0
"""What CUDA's kernels keep of a vector: ties of top_k, and sorts of which one element is read."""

import itertools

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.packet import CHUNK, PREFIX
from compll.passes import optimise
from tests.compll.emulation import ADD, FINE, RESIDUAL, Emulated, build
from tests.compll.support import gradients, spec

CONTRADICTS, BAD_HASH = 3, 20
pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

PICKED = """
param Picked {
    int place in [-5, 100000] = 0;
}
void PickedEncode(float* gradient, uint8* out, int place) {
    float* up = sort(gradient, less);
    float* down = sort(map(gradient, [&](float g) -> float { return g * 2; }), greater);
    int last = down.size - 1;
    float most = up[last - place];
    out = concat(up[place], down[last], map(gradient, [&](float g) -> float { return g + most; }));
}
"""


def emitted(program: compll.Program) -> str:
    return cuda.emit(optimise(program))


def test_one_element_of_a_sorted_vector_is_found_without_sorting():
    program = compll.compile_text(PICKED, "picked")
    # Of `up` two places are read, of `down` one.
    assert emitted(program).count(" sort_keys<") == 1
    assert emitted(program).count(" pick_sorted(") == 1
    one = compll.compile_text(PICKED.replace("last - place", "place"), "picked")
    assert " sort_keys<" not in emitted(one)
    for source in (one, program):
        library = build(source)
        for place in (-5, 0, 3, 1024, 2999, 100_000):
            kernels = Emulated(source, library, place=place)
            reference = compll.Reference(source, place=place)
            for n in (0, 1, 1500, 20_000):
                for number, (kind, x) in enumerate(gradients(n).items()):
                    if n > 2000 and kind not in ("broken", "constant"):
                        continue
                    kernels.order(backwards=number % 2 == 1)
                    packets, _ = kernels.encode(x)
                    np.testing.assert_array_equal(packets, reference.encode(x))


@pytest.mark.parametrize("name", ("bisparse", "graddrop"))
def test_a_threshold_from_a_sample_takes_no_sort(name):
    """One block of threads a chunk would sort it, while the others of a GPU wait."""
    assert " sort_keys<" not in emitted(spec(name))


def test_a_top_k_of_mostly_zeros():
    """Fewer elements than are wanted are not 0, so that 0 is the wanted key, and nothing is left
    behind: all of a chunk's tiles have a part in what is written.
    """
    program = spec("topk")
    kernels, reference = Emulated(program), compll.Reference(program)
    rng, n = np.random.default_rng(5), 100_003
    few = np.zeros(n, np.float32)
    few[rng.choice(n, n // 300, replace=False)] = rng.normal(size=n // 300)
    for backwards in (False, True):
        kernels.order(backwards=backwards)
        for x in (few, few * 0, np.where(few == 0, np.float32(-3), few)):
            packets, _ = kernels.encode(x)
            np.testing.assert_array_equal(packets, reference.encode(x))


def test_memory_of_top_k():
    """Keys, what tiles have left of them and where, and where what chunks have left was: 16 bytes
    an element.
    """
    kernels = Emulated(spec("topk"))
    assert kernels.codec.scratch_bytes(kernels.values, 4 * CHUNK) < 4 * CHUNK * 16.5


def test_places_that_do_not_ascend_are_reported():
    """Wherever in a tile, and from one tile to the next; nothing is written then."""
    program, n = spec("topk"), 300_000
    kernels, reference = Emulated(program), compll.Reference(program)
    good = reference.encode(np.random.default_rng(6).normal(size=n).astype(np.float32))
    low, high = PREFIX.size, PREFIX.size + 2 * 3000
    for place in (1, 7, 8, 1023, 1024, 1025, 2048, 2999):
        bad = good.copy()
        bad[low + 2 * place : low + 2 * place + 2] = bad[low + 2 * place - 2 : low + 2 * place]
        before = bad[high + (place - 1) // 2] >> 4 * ((place - 1) % 2) & 15
        bad[high + place // 2] &= 0xF0 >> 4 * (place % 2)
        bad[high + place // 2] |= before << 4 * (place % 2)
        with pytest.raises(compll.PacketError):
            reference.decode(bad, n)
        values, report = kernels.decode([bad], n, mode=RESIDUAL)
        assert report == CONTRADICTS
        assert (values == 7).all()
    far = good.copy()
    far[high + 1499] |= 0xF0  # behind the end
    _, report = kernels.decode([far], n)
    assert report == CONTRADICTS


def sample_places(n: int, samples: int = 2048) -> np.ndarray:
    """Those of sample_place (top_k.cuh)."""
    number = np.arange(samples, dtype=np.uint64)
    low, step = np.uint64(0xFFFFFFFF), np.uint64(n // samples)
    hashed = ((number + np.uint64(1)) * np.uint64(2654435769)) & low
    hashed = ((hashed ^ hashed >> np.uint64(15)) * np.uint64(2246822519)) & low
    return (number * step + (hashed * step >> np.uint64(32))).astype(np.int64)


@pytest.mark.parametrize("name", ("topk", "dgc"))
def test_a_sample_that_misleads(name):
    """All that it holds is large, and nothing else: fewer keys are left than are wanted."""
    program, n = spec(name), 300_007
    kernels, reference = Emulated(program), compll.Reference(program)
    rng = np.random.default_rng(8)
    x = rng.normal(size=n).astype(np.float32)
    x[sample_places(n)] *= 1000
    assert np.count_nonzero(np.abs(x) > 50) < n // 100
    if program.state_names:
        state = np.zeros((2, n), np.float32)
        packets, _ = kernels.encode(x, state=state)
        np.testing.assert_array_equal(packets, reference.encode(x, state=state))
        return
    for backwards, is_apart in itertools.product((False, True), repeat=2):
        kernels.order(backwards=backwards)
        packets, _ = kernels.encode(x)
        np.testing.assert_array_equal(packets, reference.encode(x))
        residual = rng.normal(size=n).astype(np.float32)
        residual[sample_places(n)] = 0
        packets, left = kernels.encode(x, residual, is_apart=is_apart)
        v = x + residual
        np.testing.assert_array_equal(packets, reference.encode(v))
        np.testing.assert_array_equal(left, v - reference.decode(packets, n))
    kernels.order(backwards=False)


def outliers(n: int) -> list[np.ndarray]:
    """Vectors of which a sample tells little: not how large the largest are, nor how many."""
    rng = np.random.default_rng(10)
    spread = np.exp2(rng.uniform(-120, 120, n)).astype(np.float32)
    # Larger than all of the sample, and more than are wanted.
    hidden = np.ones(n, np.float32)
    others = np.setdiff1d(np.arange(n), sample_places(n))
    hidden[rng.choice(others, n // 50, replace=False)] = rng.uniform(1e3, 1e30, n // 50)
    few = rng.normal(size=n).astype(np.float32)
    few[rng.choice(others, 7, replace=False)] = np.inf
    # Of few values each there is often.
    often = rng.integers(0, 40, n).astype(np.float32)
    broken = np.where(rng.random(n) < 0.995, np.float32("nan"), few).astype(np.float32)
    return [spread, hidden, few, often, broken]


@pytest.mark.parametrize("name", ("topk", "graddrop"))
@pytest.mark.parametrize("n", (3001, 70_003))
def test_keys_that_a_sample_does_not_foresee(name, n):
    """All of few tiles are left; of more a sample tells which, and how fine the first count is."""
    program = spec(name)
    kernels, reference = Emulated(program), compll.Reference(program)
    kernels.alone(may_be=False)
    for number, x in enumerate(outliers(n)):
        kernels.order(backwards=number % 2 == 1)
        packets, _ = kernels.encode(x, seed=number)
        np.testing.assert_array_equal(packets, reference.encode(x, seed=number))
    kernels.order(backwards=False)
    kernels.alone(may_be=True)


@pytest.mark.parametrize("name", ("topk", "graddrop", "randomk"))
def test_a_gradient_is_written_in_one_pass(name):
    """Tiles without a value, with one, and full of them; none at all; and the end of a chunk."""
    program = spec(name)
    rng = np.random.default_rng(11)
    n = 20_011
    x = np.zeros(n, np.float32)
    x[5000:6100] = rng.normal(size=1100)
    x[[0, 1023, 1024, n - 1]] = 9
    before = rng.normal(size=n).astype(np.float32)
    for ratio in (0.001, 0.01, 1.0):
        kernels = Emulated(program, ratio=ratio)
        reference = compll.Reference(program, ratio=ratio)
        kernels.alone(may_be=False)
        for gradient in (x, x * 0, np.full(n, np.float32("nan"))):
            packets = reference.encode(gradient)
            expected = reference.decode(packets, n)
            for backwards in (False, True):
                kernels.order(backwards=backwards)
                values, report = kernels.decode([packets], n)
                assert report == FINE
                np.testing.assert_array_equal(values, expected)
                values, report = kernels.decode([packets] * 2, n, before, ADD)
                assert report == FINE
                np.testing.assert_array_equal(values, before + expected + expected)
        kernels.order(backwards=False)
        kernels.alone(may_be=True)


def test_a_sum_that_is_refused():
    """Places that do not ascend are told wherever they are; where a prefix is wrong, or a packet
    that is not its own is, nothing is written.
    """
    program, n = spec("graddrop"), 50_000
    kernels, reference = Emulated(program, ratio=0.1), compll.Reference(program, ratio=0.1)
    good = reference.encode(np.random.default_rng(12).normal(size=n).astype(np.float32))
    count = int(good[PREFIX.size : PREFIX.size + 4].view(np.uint32)[0])
    assert count > 1100
    before = np.arange(n, dtype=np.float32)
    kernels.alone(may_be=False)
    for at, value in ((8, good[8] ^ 1), (PREFIX.size + 3, 255)):
        bad = good.copy()
        bad[at] = value
        values, report = kernels.decode([bad], n, before, ADD)
        assert report & 255 == (BAD_HASH if at == 8 else CONTRADICTS)
        np.testing.assert_array_equal(values, before)
    low = PREFIX.size + 4
    for place in (1, 8, 1023, 1024, count - 1):
        bad = good.copy()
        bad[low + 2 * place : low + 2 * place + 2] = bad[low + 2 * place - 2 : low + 2 * place]
        _, report = kernels.decode([good, bad], n, before, ADD)
        assert report == 1 << 40 | CONTRADICTS
    kernels.alone(may_be=True)


@pytest.mark.parametrize("name", ("topk", "graddrop", "bisparse", "randomk"))
def test_feedback_of_what_is_not_finite(name):
    """What is left is finite, whether the kernel that forms the sum has told of some or of none."""
    program, n = spec(name), 20_011
    kernels, reference = Emulated(program), compll.Reference(program)
    rng = np.random.default_rng(9)
    most = np.float32(3.4e38)
    residual = rng.normal(size=n).astype(np.float32)
    for value in (1, np.inf, -np.inf, np.nan, most):
        x = rng.normal(size=n).astype(np.float32)
        x[[0, 7777, n - 1]] = value
        residual[7777] = most if value == most else 1
        for is_apart in (False, True):
            packets, left = kernels.encode(x, residual, is_apart=is_apart)
            with np.errstate(all="ignore"):
                v = x + residual
                rest = v - reference.decode(packets, n)
            np.testing.assert_array_equal(packets, reference.encode(v))
            np.testing.assert_array_equal(left, np.where(np.isfinite(rest), rest, 0))
