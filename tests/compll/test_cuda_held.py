# SPDX-License-Identifier: Apache-2.0
"""Encoders of CUDA whose blocks of threads keep their tiles until the chunk is reduced."""

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.packet import CHUNK
from compll.passes import optimise
from tests.compll.emulation import Emulated
from tests.compll.support import assert_same_floats, gradients, residual_of, spec

pytestmark = pytest.mark.heavy  # a run of g++ a specification

# Extremes, whose sweep may load its tile again, a sum and a count; codes of two widths and noise.
RANGES = """
    void AaEncode(float* gradient, uint8* p) {
        float top = reduce(gradient, -9, max);
        float low = reduce(gradient, 9, min);
        float total = reduce(map(gradient, [&](float g) -> float { return abs(g); }), 0, sum);
        int count = reduce(map(gradient, [&](float g) -> uint1 { return g > 0; }), 0, sum);
        uint32 positive = count;
        uint8* c = map(range(gradient.size), [&](int i) -> uint8 {
            return gradient[i ^ 1] * 30 + 128 + random<float>(0, 1); });
        uint<3>* d = map(gradient, [&](float g) -> uint<3> { return g + 4; });
        p = concat(top, c, low, d, total, positive);
    }
    void AaDecode(uint8* p, float* gradient) {
        float top;
        uint8* c;
        float low;
        uint<3>* d;
        float total;
        uint32 positive;
        extract(p, top, c, low, d, total, positive);
        gradient = map(range(gradient.size), [&](int i) -> float {
            return (c[i ^ 1] - 128) / 30 + d[i] * (top - low) + total * positive; });
    }
"""
# None keeps its tiles: what is left needs all elements, another's element is read, or a second
# sweep needs what the first has found.
WHOLE = """
    void AaEncode(float* gradient, uint8* p) {
        float top = reduce(gradient, -1, max);
        p = concat(top, map(gradient, [&](float g) -> float { return g; }));
    }
    void AaDecode(uint8* p, float* gradient) {
        float top;
        float* v;
        extract(p, top, v);
        float all = reduce(v, 0, sum);
        gradient = map(v, [&](float x) -> float { return x * top + all; });
    }
"""
ONE = RANGES.replace("uint32 positive = count;", "uint32 positive = count + gradient[0] * 0;")
AGAIN = RANGES.replace("return g + 4;", "return g + top;")
CASES = {"onebit": spec("onebit"), "ranges": compll.compile_text(RANGES, "aa")}


def check(kernels: Emulated, program: compll.Program, x: np.ndarray, residual: np.ndarray) -> None:
    """With the residual, in place and apart."""
    reference = compll.Reference(program)
    with np.errstate(all="ignore"):
        total = x + residual
    expected = reference.encode(total, seed=5)
    for is_apart in (True, False):
        packets, left = kernels.encode(x, residual, is_apart=is_apart, seed=5)
        np.testing.assert_array_equal(packets, expected)
        assert_same_floats(left, residual_of(reference, total, packets))


@pytest.mark.parametrize("name", CASES)
def test_packets_and_residuals_are_the_same(name):
    """However many blocks run at once, and where vectors are aligned to 4 bytes alone."""
    program = CASES[name]
    kernels = Emulated(program)
    kernels.alone(may_be=False)
    for blocks, n in ((4, 0), (0, 2500), (1, 1027), (2, 2048), (2, 2500), (3, 8001), (8, 8000)):
        kernels.hold(blocks=blocks)
        for number, x in enumerate(gradients(n + 1).values()):
            kernels.order(backwards=number % 2 == 1)
            residual = np.random.default_rng(n).normal(size=n).astype(np.float32)
            check(kernels, program, x[number % 3 % 2 :][:n], residual)
    kernels.hold(blocks=4)
    kernels.alone(may_be=True)
    kernels.order(backwards=False)


@pytest.mark.parametrize(
    ("blocks", "chunks", "is_held"),
    [
        (1026, 1, True),  # of one tile each
        (300, 1, True),  # of four, as there are no more blocks
        (256, 1, False),  # of which one would be for a second round
        (255, 2, False),  # no room for a chunk
        pytest.param(257, 2, True, marks=pytest.mark.slow),  # two rounds, nearly
    ],
)
def test_more_chunks_than_one(blocks, chunks, is_held):
    program = CASES["onebit"]
    kernels = Emulated(program)
    kernels.order(backwards=blocks % 2 == 0)
    kernels.hold(blocks=blocks)
    x = gradients(chunks * CHUNK + 1027)["broken"]
    before = kernels.launches()
    check(kernels, program, x, x[::-1] * np.float32(0.5))
    assert kernels.launches() - before == (2 if is_held else 8)
    kernels.hold(blocks=4)
    kernels.order(backwards=False)


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_does_it(name):
    """Of calls with a residual, and of more than one tile."""
    kernels = Emulated(CASES[name])
    kernels.alone(may_be=False)
    x = gradients(3000)["plain"]
    for n, blocks, number in ((3000, 4, 1), (3000, 0, 4), (1000, 4, 4)):
        kernels.hold(blocks=blocks)
        before = kernels.launches()
        kernels.encode(x[:n], x[:n])
        assert kernels.launches() - before == number
        kernels.encode(x[:n])
        assert kernels.launches() - before == number + 2
    kernels.hold(blocks=4)
    kernels.alone(may_be=True)


def test_those_that_need_more_than_their_own_tile_do_not():
    for text in (WHOLE, ONE, AGAIN):
        assert "hold_encode" not in cuda.emit(optimise(compll.compile_text(text, "aa")))
    for name in ("terngrad", "natural", "qsgd", "eden", "topk", "dgc"):
        assert "hold_encode" not in cuda.emit(optimise(spec(name)))
