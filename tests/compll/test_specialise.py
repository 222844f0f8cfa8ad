# SPDX-License-Identifier: Apache-2.0
"""A program specialised by a width (compll/passes/specialise.py) computes what it did."""

import functools
import random

import numpy as np
import pytest

import compll
from compll import passes
from compll.backends.library import CompiledCodec
from compll.ir.printer import print_plan
from tests.compll.differential import KEY, check_cpp, check_cuda, inputs
from tests.compll.generated_programs import generate
from tests.compll.support import encoder, in_one_library, spec

# Of tests/compll/generated_programs.py, with codes whose width is the parameter.
SEEDS = (1, 11, 26)

# What an encode with feedback decodes within its loops, rows of a merge, and states.
LEVELS = """
param Levels {
    KIND bits in [1, 3] = 1;
}
void LevelsEncode(float* gradient, uint8* out, KIND bits) {
    float nowhere = 1.0 / 0;
    float first = bits == 1 ? nowhere : 0.25;
    float second = bits == 3 ? 0.5 : nowhere;
    int half = 1 << bits - 1;
    uint<bits>* codes = map(gradient, [&](float x) -> uint<bits> {
        float level = abs(x) > second ? 2.0 : abs(x) > first ? 1.0 : 0.0;
        return x < 0 ? half - 1 - level : half + level;
    });
    out = concat(codes);
}
void LevelsDecode(uint8* packet, float* gradient, KIND bits) {
    uint<bits>* codes;
    extract(packet, codes);
    float middle = (1 << bits - 1) - 0.5;
    gradient = map(range(gradient.size), [&](int i) -> float {
        float at = codes[i] - middle;
        float size = abs(at) > 2 ? 0.75 : abs(at) > 1 ? 0.375 : 0.125;
        return at < 0 ? -size : size;
    });
}
"""


def specialised(program: compll.Program) -> dict[int, compll.Program]:
    found = passes.specialise(dict(passes.stages(program))["dead"])
    return {} if found is None else found.programs


def plan_of(program: compll.Program) -> str:
    return print_plan(passes.optimise(program))


@pytest.mark.parametrize("kind", ["int", "uint8"])
def test_what_a_value_decides_is_gone(kind):
    program = compll.compile_text(LEVELS.replace("KIND", kind), "levels")
    whole, *parts = plan_of(program).split("where bits is ")
    assert [part.partition("\n")[0] for part in parts] == ["1", "2", "3"]
    # Those of sizes; the sign of a number is asked for in both functions.
    assert [part.count(" > ") for part in parts] == [0, 2, 4]
    assert [part.count(" < 0f") for part in parts] == [2, 2, 2]
    assert "bits)" in whole or "uint<bits>" in whole
    for number, part in enumerate(parts, 1):
        assert f"codes: uint{number}" in part or f"codes: uint<{number}>" in part
        assert "bits" not in part


@pytest.mark.heavy  # a run of g++ where the cache is empty
@pytest.mark.parametrize(("check", "kind"), [(check_cpp, "int"), (check_cuda, "uint8")])
def test_machine_code_of_all_values_equals_the_reference(check, kind):
    """Packets with and without feedback, what they hold, and sums of them."""
    program = compll.compile_text(LEVELS.replace("KIND", kind), "levels")
    assert "namespace of_bits_2 {" in compll.generate(program)["levels.codec.cc"]
    check(program, sizes=(0, 1, 2500), values_of=[{"bits": bits} for bits in (1, 2, 3)])


@pytest.mark.parametrize(
    ("name", "param", "values"),
    [("eden", "bits", {1, 2, 3, 4}), ("qsgd", "bits", set()), ("fp8", "format", set())],
)
def test_which_specifications_have_them(name, param, values):
    """QSGD's width has seven values; fp8's format is no width."""
    assert set(specialised(spec(name))) == values
    assert any(one.var.name == param for one in spec(name).params)


WIDE = """
param Wide { int bits in [1, 4] = 4; }
void WideEncode(float* gradient, uint8* out, int bits) {
    uint<WIDTH> one = gradient.size;
    uint<WIDTH>* codes = map(gradient, [&](float x) -> uint<WIDTH> { return x * 3; });
    out = concat(one, codes);
}
void WideDecode(uint8* packet, float* gradient, int bits) {
    uint<WIDTH> one;
    uint<WIDTH>* codes;
    extract(packet, one, codes);
    gradient = map(codes, [&](uint<WIDTH> code) -> float { return code - one; });
}
"""


BLOCKS = """
param Wide { int bits in [1, 4] = 4; }
void WideEncode(float* gradient, uint8* out, int bits) {
    float* scales = block_reduce(gradient, 8 << bits * 2, 0, max);
    uint<bits>* codes = map(range(gradient.size), [&](int i) -> uint<bits> {
        return gradient[i] / scales[i / (8 << bits * 2)];
    });
    out = concat(scales, codes);
}
void WideDecode(uint8* packet, float* gradient, int bits) {
    float* scales;
    uint<bits>* codes;
    extract(packet, scales, codes);
    gradient = map(range(gradient.size), [&](int i) -> float {
        return codes[i] * scales[i / (8 << bits * 2)];
    });
}
"""


# Texts, and the values of their parameter that there are programs of.
POSSIBLE = (
    (WIDE.replace("WIDTH", "bits - 3"), {4}),
    (WIDE.replace("WIDTH", "bits * 4 + 1"), {1, 2, 3}),
    (WIDE.replace("WIDTH", "bits + 1").replace("[1, 4]", "[0, 3]"), {0, 1, 2, 3}),
    (WIDE.replace("WIDTH", "bits + 2").replace("[1, 4]", "[-1, 2]"), set()),
    (WIDE.replace("WIDTH", "4 * (5 - bits)"), {1, 2, 3, 4}),
    (BLOCKS, {1, 2, 3}),
)


@functools.cache
def possible():
    """Programs of POSSIBLE by their place there, and the library of all."""
    texts = {
        place: text.replace("= 4;", f"= {max(values, default=1)};")
        for place, (text, values) in enumerate(POSSIBLE)
    }
    return in_one_library(texts, "wide")


@pytest.mark.heavy
@pytest.mark.parametrize("place", range(len(POSSIBLE)))
def test_values_of_which_comes_what_is_impossible_have_none(place):
    """Calls with these are refused, and a program of no bits would be none."""
    (programs, library), (_, values) = possible(), POSSIBLE[place]
    program = programs[place]
    assert set(specialised(program)) == values
    [param] = program.params
    for bits in range(int(param.low), int(param.high) + 1):
        if bits in values or not values:
            check_cpp(program, sizes=(1, 1300), values_of=[{"bits": bits}], library=library)
            continue
        with pytest.raises(ValueError, match=r"must be from 1 to 16|block"):
            CompiledCodec(program, library, bits=bits).encode(np.ones(3, np.float32))


def test_ranges_leave_what_nan_and_infinities_meet():
    """Comparisons with the least and the largest number there are, of numbers that may be any."""
    program = compll.compile_text(
        encoder(
            "    float top = bits == 1 ? 1.0 / 0 : 0.5;\n"
            "    float low = bits == 1 ? -1.0 / 0 : 0.5;\n"
            "    uint<bits>* a = map(gradient, [&](float x) -> uint<bits> { return x > top; });\n"
            "    uint<bits>* b = map(gradient, [&](float x) -> uint<bits> { return x <= top; });\n"
            "    uint<bits>* c = map(gradient, [&](float x) -> uint<bits> { return x >= low; });\n"
            "    uint<bits>* d = map(gradient, [&](float x) -> uint<bits> { return x < low; });\n"
            "    out = concat(a, b, c, d);",
            ", int bits",
        ).replace("void", "param Foo { int bits in [1, 2] = 1; }\nvoid", 1),
        "foo",
    )
    x = np.array([np.nan, np.inf, -np.inf, 0.5, -1, 1], np.float32)
    one = specialised(program)[1]
    body = compll.Reference(one, bits=1).encode(x)[16:]
    bits = np.unpackbits(body.reshape(4, 1), axis=1, bitorder="little")[:, :6].tolist()
    assert bits == [[0] * 6, [0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0] * 6]
    # Two of the four are decided: no number is above the largest, and none below the least.
    assert plan_of(program).split("where bits is ")[1].count("inff") == 2


def test_values_that_callers_would_have_to_know_of_have_no_code_of_their_own():
    """Ranges of one bit's codes could be decoded alone; of two bits all are summed before."""
    text = """
    param Summed { int bits in [1, 2] = 1; }
    void SummedEncode(float* gradient, uint8* out, int bits) {
        uint<bits>* codes = map(gradient, [&](float x) -> uint<bits> { return x > 0; });
        out = concat(codes);
    }
    void SummedDecode(uint8* packet, float* gradient, int bits) {
        uint<bits>* codes;
        extract(packet, codes);
        int all = reduce(codes, 0, sum);
        gradient = map(codes, [&](uint<bits> code) -> float {
            return code - (bits == 1 ? 0 : all);
        });
    }
    """
    program = compll.compile_text(text, "summed")
    assert set(specialised(program)) == {1, 2}
    assert "of_bits_1" not in compll.generate(program)["summed.codec.cc"]


@pytest.mark.parametrize("seed", SEEDS)
def test_made_programs_compute_the_same(seed):
    text = generate(random.Random(seed)).text
    text = text.replace("uint8 width in [1, 16] = 5", "uint8 width in [3, 6] = 5")
    program = compll.compile_text(text, "made")
    programs = specialised(program)
    assert set(programs) == {3, 4, 5, 6}
    for width, one in programs.items():
        whole, known = (compll.Reference(each, width=width) for each in (program, one))
        for x in inputs(41).values():
            rows = [np.full((len(whole.state_names), x.size), 0.5, np.float32) for _ in range(2)]
            given = [None if not row.size else row for row in rows]
            packets = [
                codec.encode(x, state=state, **KEY)[16:].tobytes()
                for codec, state in zip((whole, known), given, strict=True)
            ]
            assert packets[0] == packets[1]
            assert rows[0].tobytes() == rows[1].tobytes()
            np.testing.assert_array_equal(
                *(codec.decode_body(packets[0], x.size) for codec in (whole, known))
            )
