# SPDX-License-Identifier: Apache-2.0
"""Functions of rows (compll/backends/row_code.py) make what the loops make that they stand for."""

import numpy as np
import pytest

import compll
from tests.compll.support import compiled, encoder, gradients

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

# Lengths with and without whole steps of 256 and rows of 16, and blocks that end within them.
LENGTHS = (0, 1, 16, 64, 255, 256, 1024, 1040, 2051)

PROGRAMS = {
    "comparisons and selections": """
    lambda_func f = [&](int i) -> uint<5> {
        float g = gradient[i];
        float a = g > -1.5 && g <= 2.0 || g == 3.0 ? -g / 3 : max(g, 0.25);
        float b = g >= 0.5 ? a : min(abs(a), g != g ? 7.0 : 9.5);
        return (g < 1.0 ? a - b : b * 2 + a) * 4 + random<float>(0, 1) + gradient.size;
    }
    uint<5>* few = map(range(gradient.size), f);
    out = concat(few);""",
    "numbers of comparisons": """
    lambda_func f = [&](float g) -> uint<3> {
        return 5 - (g >= 0.5) + (g < 2.0 && g == g) - (1 - (g <= -0.25 || g != g));
    }
    uint<3>* few = map(gradient, f);
    out = concat(few);""",
    "blocks": """
    lambda_func half = [&](float g) -> float { return g * 0.5; }
    float* sums = block_reduce(map(gradient, half), 64, 1, sum);
    float* scaled = map(sums, [&](float s) -> float { return s / 3; });
    lambda_func f = [&](int i) -> uint8 { return gradient[i] * scaled[i / 64] + sums[i / 64]; }
    uint8* codes = map(range(gradient.size), f);
    out = concat(sums, codes);""",
    "long blocks": """
    float* least = block_reduce(gradient, 512, 2, min);
    lambda_func square = [&](float g) -> float { return g * g; }
    float* most = block_reduce(map(gradient, square), 512, 1, prod);
    lambda_func f = [&](int i) -> uint<3> { return gradient[i] - least[i / 512] + most[i / 512]; }
    uint<3>* codes = map(range(gradient.size), f);
    out = concat(least, most, codes);""",
}

REDUCTIONS = """
    lambda_func small = [&](float g) -> uint1 { return abs(g) <= 0.5 || g == 2.0; }
    lambda_func part = [&](float g) -> float { return g < 0.25 ? g * 0.5 : -g; }
    uint1* flags = map(gradient, small);
    float total = reduce(map(gradient, part), 3, sum);
    float most = reduce(gradient, -1, max);
    float least = reduce(map(gradient, part), 1, min);
    lambda_func near = [&](float g) -> float { return g < 0 ? 1.0009765625 : 0.9990234375; }
    float product = reduce(map(gradient, near), 1, prod);
    int number = reduce(flags, 5, sum);
    uint32 found = number;
    out = concat(total, most, least, product, found, flags);"""

DECODER = """
void CutEncode(float* gradient, uint8* out) {
    float* top = block_reduce(gradient, 32, 0, max);
    uint<3>* codes = map(gradient, [&](float g) -> uint<3> { return g + 3; });
    out = concat(top, codes);
}

void CutDecode(uint8* in, float* gradient) {
    float* top;
    uint<3>* codes;
    extract(in, top, codes);
    lambda_func value = [&](int i) -> float {
        float level = codes[i];
        return codes[i] ? (level - 3) * top[i / 32] : -top[i / 32];
    }
    gradient = map(range(gradient.size), value);
}
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_codes_agree(name):
    program = compll.compile_text(encoder(PROGRAMS[name]), "small")
    assert "rows_of_encode0(" in compll.generate(program)["small.codec.cc"]
    reference, codec = compll.Reference(program), compiled(program)
    for n in LENGTHS:
        for kind, x in gradients(n).items():
            expected = reference.encode(x, seed=5, offset=3).tobytes()
            assert codec.encode(x, seed=5, offset=3).tobytes() == expected, (n, kind)


def test_reductions_agree():
    program = compll.compile_text(encoder(REDUCTIONS), "reductions")
    assert compll.generate(program)["reductions.codec.cc"].count("_tree.taken(count);") == 4
    reference, codec = compll.Reference(program), compiled(program)
    for n in LENGTHS:
        for kind, x in gradients(n).items():
            expected = reference.encode(x).tobytes()
            assert codec.encode(x).tobytes() == expected, (n, kind)


def test_values_agree_in_every_mode():
    program = compll.compile_text(DECODER, "cut")
    assert "rows_of_decode0(" in compll.generate(program)["cut.codec.cc"]
    reference, codec = compll.Reference(program), compiled(program)
    for n in LENGTHS:
        for kind, x in gradients(n).items():
            packet = reference.encode(x)
            expected = reference.decode(packet, n)
            found = codec.decode(packet, n)
            assert np.array_equal(found, expected, equal_nan=True), (n, kind)
