# SPDX-License-Identifier: Apache-2.0
"""Numbers that loops compute in 32 bits (compll/backends/narrow.py) are those of 64 bits."""

import random

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.backends.narrow import holder
from compll.ir.ranges import Range, Ranges
from compll.packet import PREFIX
from compll.passes import optimise
from tests.compll.support import compiled, encoder

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

# Numbers at and around the ends of 32 bits, signed and not.
EDGES = [0, 1, 2, 31, 127, 255, 2**15, 2**16 - 1, 2**16, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
LEAVES = [
    "(bitcast<uint32>(g))",
    "(bitcast<uint32>(g) & 0x7FFFFFFF)",
    "(bitcast<uint32>(abs(g) + 0.5))",
    "(bitcast<uint32>(g) >> 16)",
    "(g < 0.25)",
    "few[i]",
    "many[i]",
    "width",
    "i",
    "random<int>(0, 65536)",
    "random<int>(-5, 300)",
]


def expression(rng: random.Random, depth: int) -> str:
    """A number, of numbers at the ends of 32 bits, that is most often narrow and sometimes not."""
    if depth == 0:
        edge = rng.choice(EDGES) + rng.choice((-1, 0, 1))
        return rng.choice([*LEAVES, *LEAVES, str(edge), f"(-{abs(edge)})"])
    left, right = expression(rng, depth - 1), expression(rng, rng.randrange(depth))
    match rng.randrange(8):
        case 0:
            return f"({left} << {rng.choice((0, 1, 7, 31, 33))})"
        case 1:
            return f"({left} >> {rng.choice((0, 1, 13, 31, 40))})"
        case 2:
            sign = rng.choice(("<", "<=", ">", ">=", "==", "!="))
            return f"({left} {sign} {right} ? {left} : {right})"
        case 3:
            return f"{rng.choice(('min', 'max'))}({left}, {right})"
        case 4:
            return f"(-{left})"
        case _:
            return f"({left} {rng.choice('+-*&|^')} {right})"


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 4))]
)
def test_expressions_are_the_same_in_both_back_ends(seed):
    rng = random.Random(seed)
    found = [expression(rng, 3) for _ in range(12)]
    head = "map(range(gradient.size), [&](int i) -> uint32 { float g = gradient[i]; int x = "
    maps = "\n".join(
        f"uint32* low{k} = {head}{text}; return x; }});\n"
        f"uint32* high{k} = {head}{text}; return x >> 32; }});"
        for k, text in enumerate(found)
    )
    names = ", ".join(f"low{k}, high{k}" for k in range(len(found)))
    body = (
        "uint<5>* few = map(gradient, [&](float g) -> uint<5> { return g * 9 + 13; });\n"
        "uint16* many = map(gradient, [&](float g) -> uint16 { return abs(g) * 20000; });\n"
        f"{maps}\nout = concat(few, many, {names});"
    )
    params = "param Foo { int width in [1, 12] = 7; }\n"
    program = compll.compile_text(params + encoder(body, ", int width"), "foo")
    assert "int32_t" in compll.generate(program)["foo.codec.cc"]
    codec, reference = compiled(program), compll.Reference(program)
    gradient = np.random.default_rng(seed).normal(size=700).astype(np.float32)
    gradient[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -1e-45, 2.0]
    expected = reference.encode(gradient, seed=seed, offset=3)
    np.testing.assert_array_equal(codec.encode(gradient, seed=seed, offset=3), expected)


# The bits of a float have the type uint32_t in a loop, and what is around them need not.
OF_BITS = {
    "": (
        *("~u", "-u", "u / 2", "u % 7", "~u < 0", "abs(~u)", "~u + 0", "(~u) >> 4", "~(u >> 1)"),
        *("u ? ~u : 5", "!u", "sign(u)", "sign(u >> 3) - 2", "u >> 31 ? ~u : u | 2147483648"),
        *("-(u & 2147483648)", "-(u & 2147483648) < 0", "u << 40", "u >> 40", "1 << (u & 63)"),
        *("g == g ? u : -1", "(g == g ? u : -1) < 0", "u << (u & 63)", "u >> (u & 63)"),
        *("(g > 0 ? u > 5 : u < 9) ? u : 7", "(g > 0 ? u : 9) ? u : 7"),
    ),
    "int s = (u >> 16) - 32768;": (
        *("u < s", "s < u", "u == s", "u | s", "u ^ s", "u & s", "u - s", "u / s", "u % s"),
        *("u > 2147483648 ? u : s", "u > 5 ? s : u", "min(u, s)", "max(s, u)", "u >> s"),
        *("(s > 0 ? u : s) < 0", "s / u", "s % u", "s << u", "(s < u ? s < 0 : g > 1) ? s : ~s"),
    ),
    "int s = (u >> 16) - 32768; int t = s * 65536; int v = t - s & u;": (
        *("-max(t, -2147483648)", "-max(t, -2147483648) < 0", "~v", "t < v", "t ^ v", "s ^ v"),
        *("min(v, t)", "-t", "-v", "abs(t)", "v > t ? v : t", "sign(t) * v"),
    ),
    "int n = u & 1; float z = 0.0 - n;": ("bitcast<uint32>(z)", "bitcast<uint32>(0.0 - (n + 0.0))"),
    "float z = ~u; float y = -u;": ("bitcast<uint32>(z)", "bitcast<uint32>(y)"),
    "uint32 t = u; uint8 b = ~u; uint<5> c = -u;": ("~t", "~b", "c - t", "b < -t", "-b"),
    "int r = random<int>(0, 1 << 60) >> 28; int w = r >> 1;": ("w", "r < 0", "r + 0", "r >> 3"),
    "int r = random<int>(-(1 << 47), 1 << 47) >> 18;": ("r", "r < -536870912", "max(r, 5)"),
}


@pytest.mark.timeout(180)  # one large compilation
def test_what_is_around_numbers_of_32_bits_has_64():
    maps, names = [], []
    for lets, texts in OF_BITS.items():
        for text in texts:
            name = f"x{len(maps)}"
            maps.append(
                f"int* {name} = map(range(gradient.size), [&](int i) -> int {{ float g = "
                f"gradient[i]; int u = bitcast<uint32>(g); {lets} return {text}; }});\n"
                f"uint32* low_{name} = {name};\n"
                f"uint32* high_{name} = map({name}, [&](int x) -> uint32 {{ return x >> 32; }});"
            )
            names += [f"low_{name}", f"high_{name}"]
    body = "\n".join(maps) + f"\nout = concat({', '.join(names)});"
    program = compll.compile_text(encoder(body), "foo")
    codec, reference = compiled(program), compll.Reference(program)
    rng = np.random.default_rng(5)
    gradient = rng.integers(0, 1 << 32, 61, dtype=np.uint32).view(np.float32)
    gradient[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -1e-45, 2.0]
    expected = reference.encode(gradient, seed=4)[PREFIX.size :].reshape(len(names), -1)
    found = codec.encode(gradient, seed=4)[PREFIX.size :].reshape(len(names), -1)
    texts = [text for texts in OF_BITS.values() for text in texts]
    wrong = np.flatnonzero((expected != found).any(axis=1))
    assert not {texts[row // 2] for row in wrong}


def test_a_type_holds_all_or_none():
    assert holder(Range(-1, 5), Range(0, 2**31 - 1)) == "int32_t"
    assert holder(Range(0, 2**31)) == "uint32_t"
    assert holder(Range(-1, 0), Range(0, 2**31)) is None
    assert holder(Range(0, 2**32)) is None
    assert holder(Range(0, 1), None) is None


def test_what_64_bits_do_not_hold_has_no_range():
    program = compll.compile_text(
        encoder(
            "uint32* low = map(gradient, [&](float g) -> uint32 {\n"
            "    int x = bitcast<uint32>(g); return x * x * x; });\nout = concat(low);"
        ),
        "foo",
    )
    assert "int_mul(" in compll.generate(program)["foo.codec.cc"]


def test_ends_of_both_types_are_numbers_of_them():
    body = """
    uint8* few = map(gradient, [&](float g) -> uint8 { return g * 9 + 13; });
    uint32* clamped = map(few, [&](uint8 c) -> uint32 {
        int q = max(c - 128, -2147483648);
        return q;
    });
    uint32* drawn = map(gradient, [&](float g) -> uint32 {
        int r = random<int>(3000000000, 3000000100);
        float x = r;
        return x / 1000 + g * 0;
    });
    out = concat(few, clamped, drawn);"""
    program = compll.compile_text(encoder(body), "foo")
    codec, reference = compiled(program), compll.Reference(program)
    gradient = np.random.default_rng(1).normal(size=100).astype(np.float32)
    expected = reference.encode(gradient, seed=2, offset=3)
    np.testing.assert_array_equal(codec.encode(gradient, seed=2, offset=3), expected)


def test_a_width_that_a_conversion_wraps_has_room():
    params = "param Foo { int k in [-300, 4] = 2; }\n"
    body = """
    uint8 w = k;
    uint<w>* codes = map(gradient, [&](float g) -> uint<w> { return g * 900 + 1000; });
    out = concat(w, codes);"""
    program = compll.compile_text(params + encoder(body, ", int k"), "foo")
    gradient = np.random.default_rng(1).normal(size=300).astype(np.float32)
    for k in (-244, 4):  # 12 as a uint8, and itself
        codec, reference = compiled(program, k=k), compll.Reference(program, k=k)
        expected = reference.encode(gradient, seed=2, offset=3)
        np.testing.assert_array_equal(codec.encode(gradient, seed=2, offset=3), expected)


def test_a_mask_leaves_32_bits_of_hashes():
    """Their sums and products wrap in 32 bits as the low half of 64 does."""
    text = """
    int key = seed * 77 + step;
    out = concat(map(range(gradient.size), [&](int i) -> uint32 {
        int h = (i * 2654435769 + key) & 0xFFFFFFFF;
        h = ((h ^ (h >> 16)) * 2246822507 - (i << 7)) & 4294967295;
        int low = 1023 & (h * h * h + gradient.size / (i - 3) + (i << 40));
        return h + low; }));"""
    program = compll.compile_text(encoder(text), "hashed")
    source = compll.generate(program)["hashed.codec.cc"]
    hashes = [line for line in source.splitlines() if "* 2" in line]
    assert hashes
    assert not [line for line in hashes if "int_mul" in line]
    x = np.zeros(3000, np.float32)
    expected = compll.Reference(program).encode(x, seed=2**63 + 9, step=5)
    assert compiled(program).encode(x, seed=2**63 + 9, step=5).tobytes() == expected.tobytes()


def test_choices_in_conditions_of_choices_are_printed_once(monkeypatch):
    """Printed at each level to find out that they have 64 bits, 14 took minutes."""
    value = "(code >> 40)"
    for _ in range(30):
        value = f"({value} > 0 ? code >> 40 : 1)"
    text = f"uint16 code = g; return {value};"
    body = f"out = concat(map(gradient, [&](float g) -> uint8 {{ {text} }}));"
    program = compll.compile_text(encoder(body), "nested")
    looked_at = []
    find = Ranges.__call__

    def counted(ranges, expr):
        looked_at.append(expr)
        assert len(looked_at) < 20_000
        return find(ranges, expr)

    monkeypatch.setattr(Ranges, "__call__", counted)
    compll.generate(program)
    cuda.emit(optimise(program))
    assert looked_at
