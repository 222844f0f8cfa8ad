# SPDX-License-Identifier: Apache-2.0
"""What CUDA's kernels keep of a vector: ties of top_k, and sorts of which one element is read."""

import itertools

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.packet import CHUNK, PREFIX
from compll.passes import optimise
from tests.compll.emulation import RESIDUAL, Emulated, build
from tests.compll.support import gradients, spec

CONTRADICTS = 3
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
                for number, x in enumerate(gradients(n).values()):
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
