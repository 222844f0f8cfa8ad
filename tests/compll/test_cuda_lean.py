# SPDX-License-Identifier: Apache-2.0
"""What kernels do with fewer instructions where a specification allows it: the same bits."""

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.passes import optimise
from tests.compll.emulation import Emulated, build
from tests.compll.support import assert_same_floats, encoder, gradients, residual_of

pytestmark = pytest.mark.heavy  # a run of g++ a specification

SIZES = """
param Sizes { int block in [16, 1024] = 64; }
void SizesEncode(float* gradient, uint8* out, int block) {
    float* all = block_reduce(map(gradient, [&](float g) -> float {
        return abs(g) <= 3.4028234e38 ? abs(g) : 0.0; }), block, 0, max);
    float* few = block_reduce(map(range(gradient.size), [&](int i) -> float {
        float g = gradient[i] * 3;
        return abs(g) <= 1e30 ? min(abs(g), 5.0) : 0.0; }), block, 0.25, max);
    float most = reduce(few, -1, max);
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        float size = all[i / block];
        float inverse = size < 1e-30 ? 0.0 : 1 / size;
        int bits = bitcast<uint32>(abs(min(abs(gradient[i]), 3e38) * inverse + 2));
        return bits >> 16;
    });
    float* doubled = map(all, [&](float size) -> float { return size * 2; });
    out = concat(most, all, few, codes, doubled);
}
"""
# Two sums that share a warp and one that has its own; counts, and integers that are no counts.
REDUCTIONS = encoder("""
    float s = reduce(gradient, 0.5, sum);
    float t = reduce(map(gradient, [&](float g) -> float { return g * g; }), 0, sum);
    float u = reduce(map(gradient, [&](float g) -> float { return g < 1 ? g : 1.0; }), -2, sum);
    float most = reduce(gradient, -1, max);
    float least = reduce(gradient, 1, min);
    int n = reduce(map(gradient, [&](float g) -> uint16 { return abs(g) * 60000; }), 7, sum);
    int k = reduce(map(gradient, [&](float g) -> int { return g * 1e12; }), 3, sum);
    float mean = k > 0 ? t / n : s / 3;
    uint32 low = n;
    uint32 other = k;
    out = concat(s, t, u, most, least, mean, low, other);
""")
EXTREMES = (
    encoder("""
    float most = reduce(gradient, -9, max);
    float least = reduce(map(gradient, [&](float g) -> float { return g * 2; }), 9, min);
    uint<3>* codes = map(gradient, [&](float g) -> uint<3> { return g + 2; });
    out = concat(most, least, codes);
""")
    + """
void FooDecode(uint8* in, float* gradient) {
    float most;
    float least;
    uint<3>* codes;
    extract(in, most, least, codes);
    gradient = map(codes, [&](uint<3> code) -> float { return code - most; });
}
"""
)
WHOLE = """
param Whole {
    int few in [1, 8] = 3;
    int many in [1, 12] = 9;
}
void WholeEncode(float* gradient, uint8* out, int few, int many) {
    uint<few>* low = map(gradient, [&](float x) -> uint<few> {
        return min(max(x * 5, 0), (1 << few) - 1) + random<float>(0, 1); });
    uint<many>* high = map(gradient, [&](float x) -> uint<many> {
        return max(min(x * 900, (1 << many) - 1), 0.5); });
    uint8* bytes = map(gradient, [&](float x) -> uint8 { return random<float>(0, 1) * 255; });
    uint32* words = map(gradient, [&](float x) -> uint32 { return random<float>(0, 1) * 255; });
    out = concat(low, high, bytes, words);
}
"""


def compare(kernels: Emulated, reference: compll.Reference, x: np.ndarray, **key: int) -> None:
    """Packets are those of the reference, also where they are not aligned and threads run back."""
    expected = reference.encode(x, seed=3, **key)
    for skew in (0, 5):
        kernels.order(backwards=skew == 5)
        packets, _ = kernels.encode(x, skew=skew, seed=3, **key)
        np.testing.assert_array_equal(packets, expected)


@pytest.mark.parametrize("block", (16, 128, 256, 1024))
def test_the_largest_sizes_of_blocks(block):
    program = compll.compile_text(SIZES, "sizes")
    assert "largest_near(" in cuda.emit(optimise(program))
    kernels, reference = Emulated(program, block=block), compll.Reference(program, block=block)
    for n in (1, 1025, 5001):
        for x in gradients(n).values():
            compare(kernels, reference, x)


def test_reductions_of_every_kind_end_together():
    program = compll.compile_text(REDUCTIONS, "foo")
    source = cuda.emit(optimise(program))
    finish = source[source.index(" encode_finish2(") : source.index(" encode_finish2_grid(")]
    assert finish.count("TF_HIPS_PHASE") == 2
    kernels, reference = Emulated(program), compll.Reference(program)
    for n in (0, 1, 1024, 1030, 9 * 1024 + 1, 300_007):
        for name, x in gradients(n).items():
            if n < 9000 or name in ("plain", "broken"):
                compare(kernels, reference, x)


def test_extremes_are_those_of_their_order():
    """Where zeros of both signs or NaN may tell, they are looked for once more."""
    program = compll.compile_text(EXTREMES, "foo")
    assert "note_extreme<Min>(" in cuda.emit(optimise(program))
    kernels, reference = Emulated(program), compll.Reference(program)
    rng = np.random.default_rng(1)
    for n in (0, 1, 1030, 5001):
        mixed = {
            str(values): rng.choice(np.array(values, np.float32), n)
            for values in ((0.0, -0.0), (-1, -0.0, 0.0), (2, 0.0, -0.0), (-3, -2), (1, np.nan))
        }
        for x in (gradients(n) | mixed).values():
            compare(kernels, reference, x)
            residual = (x[::-1] * np.float32(0.5)).copy()
            with np.errstate(all="ignore"):
                total = x + residual
            packets, left = kernels.encode(x, residual, seed=3)
            np.testing.assert_array_equal(packets, reference.encode(total, seed=3))
            assert_same_floats(left, residual_of(reference, total, packets))


def test_codes_of_floats_that_need_no_bounds():
    program = compll.compile_text(WHOLE, "whole")
    source = cuda.emit(optimise(program))
    for held in ("uint8_t", "uint16_t"):
        assert f"WholeCode<{held}>" in source
    library = build(program)
    for many in range(1, 13):
        params = {"few": (2 * many + 1) // 3, "many": many}
        kernels = Emulated(program, library, **params)
        reference = compll.Reference(program, **params)
        for offset in (0, many):
            compare(kernels, reference, gradients(3001)["broken"], offset=offset)


def test_numbers_of_blocks_divide():
    body = """uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        return 1000 / (i / 16) + abs(gradient[i]); });
    out = concat(codes);"""
    program = compll.compile_text(encoder(body), "foo")
    compare(Emulated(program), compll.Reference(program), gradients(1041)["plain"])
