# SPDX-License-Identifier: Apache-2.0
"""Functions and bits of scalars: their values, and the same bytes in C++."""

import numpy as np
import pytest

import compll
from compll.ir import functions, semantics
from tests.compll.support import compiled, encoder, gradients

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

PREFIX = 16
EDGES = np.array(
    [
        *(0, -0.0, 1, -1, 0.5, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 1.1754942e-38),
        *(1.1754944e-38, 3.4028235e38, -3.4028235e38, 127.99999, 128, -126, -149, -149.5, -150),
        *(-151, 1e9, -1e9, 0.70710677, 0.7071068, 1.4142135, 1.4142137, 0.99999994, 1.0000001),
    ],
    np.float32,
)


def numbers():
    """Floats of all sizes, of all bits, and the edges."""
    rng = np.random.default_rng(3)
    spread = 2.0 ** rng.uniform(-149, 128, 20_000) * rng.choice([-1, 1], 20_000)
    words = rng.integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    small = rng.uniform(-152, 130, 20_000)
    return np.concatenate([EDGES, spread.astype(np.float32), words, small.astype(np.float32)])


def values_of(body, x, **where):
    """The floats that an Encode makes of x, the same in NumPy and in C++."""
    program = compll.compile_text(encoder(body), "small")
    expected = compll.Reference(program).encode(x, **where)
    assert compiled(program).encode(x, **where).tobytes() == expected.tobytes()
    return expected[PREFIX:].view(np.float32)


@pytest.mark.parametrize("name", ["exp2", "log2", "sign"])
def test_functions_are_the_same_everywhere(name):
    x = numbers()
    found = values_of(
        f"float* v = map(gradient, [&](float x) -> float {{ return {name}(x); }});\n"
        "out = concat(v);",
        x,
    )
    with semantics.quiet():
        expected = getattr(functions, name)(x)
    np.testing.assert_array_equal(found, expected)


def test_exp2():
    x = numbers()
    with semantics.quiet():
        found, exact = functions.exp2(x), np.exp2(x.astype(np.float64))
        rounded = exact.astype(np.float32)
        whole = x == np.trunc(x)
    np.testing.assert_array_equal(found[whole], rounded[whole])
    assert np.isnan(found[np.isnan(x)]).all()
    inside = np.isfinite(rounded) & (rounded > 0)
    error = np.abs(found[inside] - exact[inside]) / np.spacing(rounded[inside])
    assert error.max() < 2
    np.testing.assert_array_equal(np.isinf(found), np.isinf(rounded))


def test_log2():
    x = numbers()
    with semantics.quiet():
        found, exact = functions.log2(x), np.log2(x.astype(np.float64))
    assert np.isnan(found[(x < 0) | np.isnan(x)]).all()
    assert (found[x == 0] == -np.inf).all()
    powers = (2.0 ** np.arange(-149, 128)).astype(np.float32)
    with semantics.quiet():
        logarithms = functions.log2(powers)
    np.testing.assert_array_equal(logarithms, np.arange(-149, 128, dtype=np.float32))
    inside = np.isfinite(x) & (x > 0) & (x != 1)
    ulp = np.spacing(np.abs(exact[inside]).astype(np.float32))
    assert (np.abs(found[inside] - exact[inside]) / ulp).max() < 4


def test_bits_of_floats():
    x = numbers()
    program = compll.compile_text(
        encoder(
            "uint32* v = map(gradient, [&](float x) -> uint32 { return bitcast<uint32>(x); });\n"
            "float* w = map(v, [&](uint32 b) -> float {\n"
            "    int other = b;\n"
            "    other |= -1 << 32;\n"
            "    return bitcast<float>(other);\n"
            "});\n"
            "uint1* minus = map(v, [&](uint32 b) -> uint1 { return b >> 31; });\n"
            "out = concat(v, w, minus);"
        ),
        "small",
    )
    packet = compll.Reference(program).encode(x)
    assert compiled(program).encode(x).tobytes() == packet.tobytes()
    words = packet[PREFIX : PREFIX + 4 * x.size].view(np.uint32)
    expected = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    np.testing.assert_array_equal(words, expected)
    back = packet[PREFIX + 4 * x.size : PREFIX + 8 * x.size].view(np.uint32)
    np.testing.assert_array_equal(back, expected)


def test_compound_assignments():
    x = gradients(100)["plain"]
    found = values_of(
        """
    float total = 1;
    total += 2; total *= 3; total -= 1; total /= 4;
    int n = 0x1F;
    n <<= 3; n >>= 1; n |= 0x100; n &= 0xFFE; n ^= 1; n %= 300; n /= 2;
    float m = n;
    lambda_func f = [&](float x) -> float {
        float y = x;
        if (y > 0) { y *= total; } else y -= 0.5;
        y /= 2;
        return y;
    }
    float* v = map(gradient, f);
    out = concat(total, m, v);""",
        x,
    )
    n = ((((0x1F << 3) >> 1 | 0x100) & 0xFFE) ^ 1) % 300 // 2
    assert found[:2].tolist() == [2.0, n]
    np.testing.assert_array_equal(found[2:], np.where(x > 0, x * 2, x - np.float32(0.5)) / 2)


def test_seed_and_step():
    body = """
    int high = seed >> 32;
    uint32 top = high;
    uint32 low = seed;
    uint32 now = step;
    uint1* odd = map(gradient, [&](float x) -> uint1 { return (step + (x > 0)) % 2; });
    out = concat(top, low, now, odd);"""
    program = compll.compile_text(encoder(body), "small")
    x = gradients(9)["plain"]
    for seed, step in ((0xFEDCBA9876543210, 2**32 - 1), (5, 6)):
        packet = compll.Reference(program).encode(x, seed=seed, step=step)
        assert compiled(program).encode(x, seed=seed, step=step).tobytes() == packet.tobytes()
        words = packet[PREFIX : PREFIX + 12].view(np.uint32).tolist()
        assert words == [seed >> 32, seed & 0xFFFFFFFF, step]
        bits = np.unpackbits(packet[PREFIX + 12 :], bitorder="little")[:9]
        np.testing.assert_array_equal(bits, (step + (x > 0)) % 2)


def test_a_variable_may_be_called_step():
    values = values_of("float step = 0.25; out = concat(step);", np.zeros(1, np.float32))
    assert values.tolist() == [0.25]


@pytest.mark.parametrize("kind", ["broken", "denormal", "huge", "all nan"])
def test_folding_keeps_bits(kind):
    values_of(
        """
    float infinity = bitcast<float>(0x7F800000);
    float nothing = bitcast<float>(0x7FFFFFFF);
    float two = exp2(1) + log2(8) * sign(-0.5) + 0 * sign(3);
    uint32 one = bitcast<uint32>(1.0);
    lambda_func f = [&](float x) -> float { return min(x, infinity) + two + one; }
    float* v = map(gradient, f);
    uint8* up = map(gradient, [&](float x) -> uint8 { return ceil(x); });
    uint8* near = map(gradient, [&](float x) -> uint8 { return round(x); });
    out = concat(infinity, nothing, two, v, up, near);""",
        gradients(52)[kind],
    )


def test_a_parameter_has_one_zero():
    # Its sign would be in packets, and equal compressors would make different ones.
    program = compll.compile_text(
        "param Foo { float k in [-0.0, 1] = -0.0; }\n"
        "void FooEncode(float* g, uint8* o, float k) {\n"
        "    o = concat(map(g, [&](float x) -> float { return x * 0 + 1 / k; }));\n}\n"
        "void FooDecode(uint8* o, float* g, float k) { extract(o, g); }\n",
        "foo",
    )
    x = np.ones(5, np.float32)
    for given in ({}, {"k": -0.0}, {"k": 0.0}):
        reference, machine = compll.Reference(program, **given), compiled(program, **given)
        packet = reference.encode(x)
        assert packet.tobytes() == machine.encode(x).tobytes()
        np.testing.assert_array_equal(reference.decode(packet, 5), np.full(5, np.inf))
