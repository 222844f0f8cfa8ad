# SPDX-License-Identifier: Apache-2.0
"""What rows have one operation for (compll/backends/row_forms.py) gives what loops give, and
nothing else is taken for it."""

import functools

import numpy as np
import pytest

import compll
from tests.compll.support import compiled, encoder, gradients, in_one_library

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

LENGTHS = (0, 1, 16, 255, 256, 1024, 1040, 2051)
PARAMS = "param Foo { int bits in [2, 8] = 3; int size in [0, 9] = 4; }\n"

QUANTISER = """
    int s = (1 << bits - 1) - 1;
    lambda_func sizeOf = [&](float g) -> float {{ return {size}; }}
    float* top = block_reduce(map(gradient, sizeOf), 64, {init}, max);
    lambda_func code = [&](int i) -> {kind} {{
        float level = gradient[i] * 3 / top[i / 64];
        float number = {number};
        return {value};
    }}
    {kind}* codes = map(range(gradient.size), code);
    out = concat(top, codes);"""

SIZE = "abs(g) <= 3.4028234e38 ? min(abs(g), 3.402823e38) : 0.0"
CLAMPED = "min(max(number, -s), s) + s + random<float>(0, 1)"
PLAIN = {
    "size": SIZE,
    "init": 0,
    "kind": "uint<bits>",
    "number": "level == level ? level : 0.0",
    "value": CLAMPED,
}

# What is written in another way, and what then is not in the rows: sizes of what is finite, the two
# bounds as one, and codes that are not held to the largest one.
QUANTISERS = {
    "all": ({}, ""),
    "no cap": ({"size": "abs(g) <= 3.4028234e38 ? abs(g) : 0.0"}, ""),
    "initial value below 0": ({"init": -3}, ""),
    "initial value above all": ({"init": 1e9}, ""),
    "cap below most": ({"size": SIZE.replace("3.402823e38", "0.5")}, ""),
    "cap of minus 0": ({"size": SIZE.replace("3.402823e38", "-0.0")}, "finite"),
    "negative cap": ({"size": SIZE.replace("3.402823e38", "-0.5")}, "finite"),
    "another limit": ({"size": SIZE.replace("3.4028234e38", "1e38")}, "finite"),
    "size of another": ({"size": SIZE.replace("min(abs(g)", "min(abs(g * 2)")}, "finite"),
    "not 0 else": ({"size": SIZE.replace(": 0.0", ": 1.0")}, "finite"),
    "minus 0 else": ({"size": SIZE.replace(": 0.0", ": -0.0")}, "finite"),
    "constant bounds": ({"value": "min(max(number, -1.5), 1.5) + 1.5", "kind": "uint2"}, ""),
    "narrow for them": ({"value": "min(max(number, -1.5), 1.5) + 2.5", "kind": "uint2"}, "below"),
    "bounds of two sizes": ({"value": "min(max(number, -2.0), 1.0) + 2"}, "clamped"),
    "a bound that may be 0": ({"value": "min(max(number, -size), size)"}, "clamped below"),
    "the other way round": ({"value": "max(min(number, s), -s) + s"}, "clamped"),
    "bounds of what may be NaN": ({"number": "level"}, "clamped"),
    "no bounds": ({"value": "number + random<float>(0, 1)"}, "clamped below"),
    "up to the largest code": ({"value": f"{CLAMPED} + 1"}, ""),
    "more than there are codes": ({"value": f"{CLAMPED} + 1.0001"}, "below"),
    "far below 0": ({"value": f"{CLAMPED} - 4e9"}, ""),
    "products": ({"value": f"({CLAMPED}) * 0.5"}, ""),
    "products of what is not known": ({"value": f"({CLAMPED}) * number"}, "below"),
    "quotients": ({"value": f"({CLAMPED}) / 2"}, ""),
    "quotients of what may be 0": ({"value": f"({CLAMPED}) / (number - 1)"}, "below"),
}


@functools.cache
def quantisers():
    """Programs of QUANTISERS, and the library of all."""
    bodies = {
        name: QUANTISER.format(**{**PLAIN, **changes}) for name, (changes, _) in QUANTISERS.items()
    }
    texts = {name: PARAMS + encoder(body, ", int bits, int size") for name, body in bodies.items()}
    return in_one_library(texts, "foo")


@pytest.mark.parametrize("name", QUANTISERS)
def test_codes_agree(name):
    programs, library = quantisers()
    program, (_, lacks) = programs[name], QUANTISERS[name]
    source = compll.generate(program)[f"{program.name}.codec.cc"]
    assert "rows_of_encode1(" in source
    found = {
        "finite": "row_finite(" in source,
        "clamped": "row_clamped(" in source,
        "below": "const Row top" not in source,
    }
    assert [what for what, is_there in found.items() if not is_there] == lacks.split()
    for bits, size, lengths in ((2, 0, (1, 1040)), (3, 4, LENGTHS), (8, 9, (255, 1040))):
        reference = compll.Reference(program, bits=bits, size=size)
        codec = compiled(program, library, bits=bits, size=size)
        for n in lengths:
            for kind, x in gradients(n).items():
                expected = reference.encode(x, seed=5, offset=3).tobytes()
                assert codec.encode(x, seed=5, offset=3).tobytes() == expected, (bits, n, kind)


NARROWED = """
param Foo { int p in [5, 7] = 5; }
void FooEncode(float* gradient, uint8* out, int p) {
    uint2 w = p;
    lambda_func code = [&](int i) -> uint<w> {
        float level = gradient[i];
        float number = level == level ? level : 0.0;
        return min(max(number, -3.0), 3.0) + 3.5;
    }
    uint<w>* codes = map(range(gradient.size), code);
    out = concat(codes);
}
"""


def test_a_width_that_is_a_part_of_a_parameter_is_not_the_parameter():
    program = compll.compile_text(NARROWED, "foo")
    for p in (5, 6, 7):
        reference, codec = compll.Reference(program, p=p), compiled(program, p=p)
        for kind, x in gradients(1040).items():
            assert codec.encode(x).tobytes() == reference.encode(x).tobytes(), (p, kind)


@pytest.mark.parametrize(("step", "count"), [("{x} * {x}", 25), ("{x} + 1.0", 400)])
def test_long_chains_are_looked_at_once(step, count):
    lets = [f"float x{k + 1} = {step.format(x=f'x{k}')};" for k in range(count)]
    body = f"float x0 = g;\n{' '.join(lets)}\nreturn x{count};"
    code = f"map(gradient, [&](float g) -> uint2 {{ {body} }})"
    program = compll.compile_text(encoder(f"uint2* codes = {code};\nout = concat(codes);"), "foo")
    assert "const Row top" in compll.generate(program)["foo.codec.cc"]


# Zeros of both signs are equal, and what is computed with them is not.
SIGNED = """
    lambda_func first = [&](float g) -> uint8 { return bitcast<uint32>(g > 0 ? 0.0 : -0.0) >> 31; }
    lambda_func second = [&](float g) -> uint8 { return bitcast<uint32>(max(g, 0.0)) >> 31; }
    lambda_func third = [&](float g) -> uint8 { return bitcast<uint32>(max(g, -0.0)) >> 31; }
    lambda_func sizeOf = [&](float g) -> float {
        return abs(min(g / 0.0, 5.0)) <= 3.4028234e38 ? abs(min(g / -0.0, 5.0)) : 0.0;
    }
    float* top = block_reduce(map(gradient, sizeOf), 64, 0, max);
    uint8* a = map(gradient, first);
    uint8* b = map(gradient, second);
    uint8* c = map(gradient, third);
    out = concat(top, a, b, c);"""


def test_zeros_of_both_signs_are_two_constants():
    program = compll.compile_text(encoder(SIGNED), "foo")
    assert "row_finite(" not in compll.generate(program)["foo.codec.cc"]
    reference, codec = compll.Reference(program), compiled(program)
    for n in LENGTHS:
        for kind, x in gradients(n).items():
            packet = reference.encode(x)
            assert codec.encode(x).tobytes() == packet.tobytes(), (n, kind)
            if kind == "plain":
                signs = packet[packet.size - 3 * n :][:n]
                assert signs.tolist() == [int(g <= 0) for g in x]


def test_codes_of_9_to_15_bits_agree():
    """Of odd widths every second group of four begins in the middle of a byte."""
    widths = (9, 11, 12, 13, 15)
    maps = "".join(
        f"uint<{bits}>* c{bits} = map(gradient, [&](float x) -> uint<{bits}> "
        f"{{ return abs(x) * {1 << bits} / 4; }});"
        for bits in widths
    )
    names = ", ".join(f"c{bits}" for bits in widths)
    declared = "".join(f"uint<{bits}>* c{bits};" for bits in widths)
    total = " + ".join(f"c{bits}[i]" for bits in widths)
    program = compll.compile_text(
        f"void WideEncode(float* gradient, uint8* out) {{ {maps} out = concat({names}); }}\n"
        f"void WideDecode(uint8* packet, float* gradient) {{ {declared} extract(packet, {names});"
        f"gradient = map(range(gradient.size), [&](int i) -> float {{ return {total}; }}); }}",
        "wide",
    )
    reference, codec = compll.Reference(program), compiled(program)
    x = np.random.default_rng(1).normal(size=1500).astype(np.float32)
    packet = reference.encode(x)
    assert codec.encode(x).tobytes() == packet.tobytes()
    np.testing.assert_array_equal(codec.decode(packet, x.size), reference.decode(packet, x.size))
