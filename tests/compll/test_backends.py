# SPDX-License-Identifier: Apache-2.0
"""The interpreter against published vectors and plain sums; compiled codecs against it."""

import functools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll import passes
from compll.backends import bits, philox, reduction
from compll.backends.cache import build
from compll.backends.reference import Interpreter, Key
from compll.ir import nodes, semantics
from compll.passes import optimise
from compll.passes.fold import fold
from compll.passes.inline import inline
from tests.compll.support import (
    SIZES,
    assert_same_floats,
    compiled,
    encoder,
    gradients,
    in_one_library,
    spec,
)

pytestmark = pytest.mark.heavy  # some twenty runs of g++ where the cache is empty

PREFIX = 16

# Known answers of Random123 for philox4x32-10: counter, key, output.
PHILOX = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_known_answers(counter, key, expected):
    words = tuple(np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox.philox4x32(words, key)) == expected


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_compiled_philox_known_answers(counter, key, expected):
    """The noise of eight elements is one block, and the counter is made as the language says."""
    text = encoder(
        "    lambda_func f = [&](float x) -> uint16 { return random<int>(0, 65536); }\n"
        "    uint16* noise = map(gradient, f);\n"
        "    out = concat(noise);"
    )
    program = compll.compile_text(text, "noise")
    where = {
        "seed": key[0] | key[1] << 32,
        "step": counter[2],
        "tensor_id": counter[3],
        "offset": (counter[0] | counter[1] << 32) * 8 & 0xFFFFFFFFFFFFFFFF,
    }
    body = compiled(program).encode_body(np.zeros(8, np.float32), **where)
    if counter[1] < 1 << 29:
        # An element's number has 64 bits, so its block's has 61.
        assert struct.unpack("<4I", body.tobytes()) == expected
        assert (
            compll.Reference(program).encode(np.zeros(8, np.float32), **where)[PREFIX:].tobytes()
            == body.tobytes()
        )
    else:
        assert struct.unpack("<4I", body.tobytes()) != expected


@settings(max_examples=100)
@given(st.integers(1, 16), st.integers(0, 70), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse(width, count, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << width, count)
    data = bits.pack(codes, width)
    assert len(data) == bits.packed_bytes(count, width)
    np.testing.assert_array_equal(bits.unpack(data, count, width), codes)
    stream = sum(int(code) << (k * width) for k, code in enumerate(codes))
    assert int.from_bytes(data, "little") == stream


@pytest.mark.parametrize("count", [1, 15, 1024, 1025, 5 * 1024 + 3, 7 * 1024])
def test_sum_follows_the_tree(count):
    x = np.random.default_rng(count).normal(size=count).astype(np.float32)

    def block(values):
        padded = [np.float32(v) for v in values] + [np.float32(0)] * (1024 - len(values))
        lanes = padded[:16]
        for k in range(16, 1024):
            lanes[k % 16] = lanes[k % 16] + padded[k]
        for step in (8, 4, 2, 1):
            lanes = [lanes[k] + lanes[k + step] for k in range(step)]
        return lanes[0]

    level = [block(x[k : k + 1024]) for k in range(0, count, 1024)]
    while len(level) > 1:
        pairs = [level[k] + level[k + 1] for k in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) - len(level) % 2 :]
    expected = np.float32(0.5) + level[0]
    assert reduction.reduce_float("sum", np.float32(0.5), x) == expected


CODECS = [
    *(("terngrad", {"bitwidth": width}) for width in (1, 2, 3, 4, 8)),
    ("onebit", {}),
    ("fp32", {}),
]


@pytest.mark.parametrize(("name", "params"), CODECS, ids=str)
def test_compiled_codec_equals_the_definition(name, params):
    program = spec(name)
    reference, codec = compll.Reference(program, **params), compiled(program, **params)
    where = {"seed": 0x0123456789ABCDEF, "step": 3, "tensor_id": 4}
    for n in SIZES:
        for kind, x in gradients(n).items():
            if n > 2000 and kind != "broken":
                continue
            expected = reference.encode(x, offset=n % 5, **where)
            packets = codec.encode(x, offset=n % 5, **where)
            assert packets.tobytes() == expected.tobytes(), (n, kind)
            assert packets.size == reference.wire_bytes(n) == codec.wire_bytes(n)
            decoded = reference.decode(packets, n)
            assert_same_floats(codec.decode(packets, n), decoded)


def has_wide_vectors():
    flags = Path("/proc/cpuinfo")
    wanted = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    return flags.is_file() and wanted <= set(flags.read_text(encoding="utf-8").split())


@pytest.mark.slow  # tests/ops/test_machines.py compares the libraries that are shipped
@pytest.mark.skipif(not has_wide_vectors(), reason="no AVX-512: the wide clone cannot run here")
def test_clones_for_wider_vectors_give_the_same_bytes():
    program = spec("terngrad")
    plain = compiled(program)
    source = compll.generate(program)["terngrad.codec.cc"]
    wide = type(plain)(program, build(source, "terngrad"))
    for n in SIZES:
        x = gradients(n)["plain"]
        assert wide.encode(x, seed=9).tobytes() == plain.encode(x, seed=9).tobytes()


def test_back_ends_agree_on_several_chunks_and_across_the_carry():
    """Element 8 * 2^32 is where the low word of the counter wraps, here inside the first chunk."""
    program = spec("terngrad")
    x = gradients(2**20 + 5)["plain"]
    where = {"seed": 2**64 - 1, "step": 2**32 - 1, "tensor_id": 2**32 - 1, "offset": 2**35 - 1003}
    reference, codec = compll.Reference(program), compiled(program)
    packets = reference.encode(x, **where)
    assert codec.encode(x, **where).tobytes() == packets.tobytes()
    assert_same_floats(codec.decode(packets, x.size), reference.decode(packets, x.size))
    # Both words of the counter count: elements 2^35 apart share the low one.
    far, near = (reference.encode(x[:64], seed=1, offset=offset) for offset in (2**35, 0))
    assert far.tobytes() != near.tobytes()


# Specifications that reach what the product's own do not.
PROGRAMS = {
    "every operator": """
    lambda_func f = [&](int i) -> uint16 {
        int a = (i * 7 - 3) % 5;
        int b = i / (i - 3);
        int c = (a << 2) ^ (b & 6) | ~i;
        int least = 1 << 63;
        c = c + (least / (i - 3) >> 60) + least % (i - 3);
        if (i == 5) { return 9; }
        if (i > 8 && !(i % 2) || i == 2) { a = -a; } else { b = b >> 1; }
        return abs(a) + max(b, 3) - min(c, 7) + (a > b ? 1 : 2) + a / 0 + a % 0;
    }
    uint16* v = map(range(gradient.size), f);
    out = concat(v);""",
    "every function": """
    lambda_func f = [&](float x) -> float {
        float y = round(x * 3.5) + floor(x) - ceil(x / 3) + sqrt(abs(x)) + round(floor(x * 4) / 2);
        return max(y, min(x, 0.25)) * 1e-3;
    }
    float* v = map(gradient, f);
    float* w = map(v, f);
    out = concat(w, v);""",
    "widths": """
    uint<11>* a = map(gradient, [&](float x) -> uint<11> { return x * 1000; });
    uint<5>* b = map(gradient, [&](float x) -> int { return x * 10; });
    uint32* c = map(gradient, [&](float x) -> uint32 {
        return x > 0 && x < 0.5 ? 4294967296.0 : x * 1e9;
    });
    uint4* d = map(range(gradient.size / 3 + 1), [&](int i) -> int { return i; });
    uint1* e = map(a, [&](uint<11> q) -> uint1 { return q % 2; });
    uint32 n = gradient.size;
    uint<3> s = n;
    out = concat(s, a, b, n, c, d, e);""",
    "reductions": """
    float p = reduce(gradient, 1.5, prod);
    int k = reduce(gradient, 0, count);
    uint8* q = map(gradient, [&](float x) -> uint8 { return x * 100; });
    uint32 total = reduce(q, k, sum);
    uint8 top = reduce(q, 0, max);
    uint8 low = reduce(q, 1000, [&](int a, int b) -> int { return a <= b ? a : b; });
    uint1 all = reduce(q, 1, [&](int a, int b) -> int { return a && b; });
    uint1 any = reduce(q, 0, or);
    float mean = gradient.size > 0 ? reduce(gradient, 0, sum) / gradient.size : 0.0;
    lambda_func square = [&](float x) -> float { return (x - mean) * (x - mean); }
    float spread = reduce(map(gradient, square), 0, sum);
    out = concat(p, total, top, low, all, any, mean, spread, q);""",
    "noise": """
    lambda_func f = [&](int i) -> float {
        int far = i * 3 - 5;
        return gradient[far] + gradient[i] * random<float>(-1, 1) + random<int>(-100, 100);
    }
    float* v = map(range(gradient.size), f);
    lambda_func back = [&](int i) -> float { return v[gradient.size - i] + v[i]; }
    float* w = map(range(gradient.size), back);
    lambda_func code = [&](int i) -> uint2 { return random<int>(0, 4) + far(i); }
    uint2* c = map(range(gradient.size), code);
    out = concat(v, w, c);""",
    "names": """
    float int64_t_ = 1; float kTile = 2; float Sum = 3; float a__b = 4; float auto_ = 5;
    float in = 6;
    float count = 7; float noise = 8; float NULL = 9; float tile1 = 10;
    lambda_func j = [&](float base) -> float { return base + kTile + Sum + a__b + in + count; }
    float* values = map(gradient, j);
    float body = reduce(values, noise, sum) + NULL + tile1 + auto_ + int64_t_;
    out = concat(body, values);""",
}
PROGRAMS["noise"] = (
    "    lambda_func far = [&](int j) -> int { return j * 7 + random<int>(0, 3); }"
    + PROGRAMS["noise"]
)
# `auto` and `in` are words of C++ or of `param` blocks, and names like any other here.


@functools.cache
def small():
    """PROGRAMS, and the library of all."""
    return in_one_library({name: encoder(body) for name, body in PROGRAMS.items()}, "foo")


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_programs_agree(name):
    programs, library = small()
    program = programs[name]
    reference, codec = compll.Reference(program), compiled(program, library)
    for n in (0, 1, 9, 1024, 2051):
        for kind, x in gradients(n).items():
            expected = reference.encode(x, seed=5, offset=3)
            assert codec.encode(x, seed=5, offset=3).tobytes() == expected.tobytes(), (n, kind)


@pytest.mark.parametrize("name", [*PROGRAMS, "terngrad", "onebit"])
def test_passes_keep_the_meaning(name):
    if name in PROGRAMS:
        program = compll.compile_text(encoder(PROGRAMS[name]), "small")
    else:
        program = spec(name)
    reference = compll.Reference(program)
    for change in (inline, lambda p: fold(inline(p))):
        changed = compll.Reference(change(program))
        for n in (0, 1, 9, 1030):
            x = gradients(n)["broken"]
            key = Key(1, 2, 3, 4)
            body = reference.encode_body(x, key)
            assert changed.encode_body(x, key) == body
            if program.decode is not None:
                assert_same_floats(changed.decode_body(body, n), reference.decode_body(body, n))


def test_reads_of_the_gradient():
    """TernGrad's min and max share one read; onebit needs one read in all."""
    sweeps = {}
    for name in ("terngrad", "onebit"):
        steps = optimise(spec(name)).encode
        sweeps[name] = [step for step in steps if isinstance(step, nodes.Sweep)]
    assert [(len(s.reduces), len(s.writes)) for s in sweeps["terngrad"]] == [(2, 0), (0, 1)]
    assert [(len(s.reduces), len(s.writes)) for s in sweeps["onebit"]] == [(3, 1)]


def test_conversions():
    table = [
        (-1.5, 0),
        (0.99, 0),
        (3.7, 3),
        (255.5, 255),
        (1e30, 255),
        (float("nan"), 0),
        (float("inf"), 255),
        (float("-inf"), 0),
    ]
    program = compll.compile_text(
        encoder(
            "    uint8* v = map(gradient, [&](float x) -> uint8 { return x; });\n"
            "    out = concat(v);"
        ),
        "c",
    )
    x = np.array([value for value, _ in table], np.float32)
    for codec in (compll.Reference(program), compiled(program)):
        assert codec.encode(x)[PREFIX:].tolist() == [code for _, code in table]


def test_integer_operators_are_total():
    low = np.int64(-(2**63))
    with semantics.quiet():
        kind = nodes.Const(compll.ir.types.INT, None, 0).type
        assert semantics.binary("/", low, np.int64(-1), kind) == low
        assert semantics.binary("%", low, np.int64(-1), kind) == 0
        assert semantics.binary("/", np.int64(-7), np.int64(2), kind) == -3
        assert semantics.binary("%", np.int64(-7), np.int64(2), kind) == -1
        assert semantics.binary("/", np.int64(7), np.int64(0), kind) == 0
        assert semantics.binary("<<", np.int64(1), np.int64(65), kind) == 2
    assert Interpreter({}, Key(0, 0, 0, 0)).width(compll.ir.types.UInt(3)) == 3


class TestTernGrad:
    def test_error_is_below_one_gap(self):
        for width in (1, 2, 4, 8):
            codec = compll.Reference(spec("terngrad"), bitwidth=width)
            x = gradients(5000)["plain"]
            gap = (x.max() - x.min()) / (2**width - 1)
            error = np.abs(codec.decode(codec.encode(x, seed=3), x.size) - x)
            assert error.max() <= gap * (1 + 1e-5)

    def test_is_unbiased(self):
        codec = compll.Reference(spec("terngrad"), bitwidth=2)
        x = gradients(500)["plain"]
        rounds = 500
        total = np.zeros(x.size)
        for step in range(rounds):
            total += codec.decode(codec.encode(x, step=step), x.size)
        gap = (x.max() - x.min()) / 3
        # The standard deviation of one rounding is at most gap / 2; five of those of the mean.
        assert np.abs(total / rounds - x).max() < 5 * gap / 2 / np.sqrt(rounds)

    def test_constant_gradient_comes_back(self):
        codec = compll.Reference(spec("terngrad"))
        x = np.full(1000, np.float32(-0.7))
        np.testing.assert_array_equal(codec.decode(codec.encode(x), 1000), x)

    def test_layout(self):
        codec = compll.Reference(spec("terngrad"), bitwidth=2)
        x = np.array([0, 3, 3, 0, 3, 0], np.float32)
        body = codec.encode(x)[PREFIX:].tobytes()
        assert body == struct.pack("<BBff", 2, 6 % 4, 0.0, 3.0) + bytes([0b00111100, 0b0011])


class TestOnebit:
    def test_values_are_the_means_of_both_signs(self):
        codec = compll.Reference(spec("onebit"))
        x = np.array([1, -2, 3, -4, 0], np.float32)
        packet = codec.encode(x)
        assert packet[PREFIX:].tobytes() == struct.pack("<ff", -3.0, np.float32(4) / 3) + bytes(
            [0b01010]
        )
        four_thirds = np.float32(4) / np.float32(3)
        assert codec.decode(packet, 5).tolist() == [four_thirds, -3, four_thirds, -3, four_thirds]

    def test_one_sign_only(self):
        codec = compll.Reference(spec("onebit"))
        for sign in (1, -1):
            x = sign * np.ones(10, np.float32)
            np.testing.assert_array_equal(codec.decode(codec.encode(x), 10), x)


@pytest.mark.parametrize("backend", ["numpy", "cpp"])
def test_bad_packets_are_refused(backend):
    program = spec("terngrad")
    make = compll.Reference if backend == "numpy" else compiled
    codec = make(program, bitwidth=2)
    packet = codec.encode(gradients(100)["plain"])
    with pytest.raises(compll.PacketError, match="51 bytes"):
        codec.decode(packet[:-1], 100)
    with pytest.raises(compll.PacketError, match="51 bytes"):
        codec.decode(np.append(packet, np.uint8(0)), 100)
    with pytest.raises(compll.PacketError, match="must hold 99 elements"):
        codec.decode(packet, 99)
    with pytest.raises(compll.PacketError, match="another codec"):
        make(program, bitwidth=4).decode(packet, 100)
    with pytest.raises(compll.PacketError, match="begin with b'HIPS'"):
        codec.decode(packet[::-1].copy(), 100)
    lying = packet.copy()
    lying[PREFIX] = 3
    with pytest.raises(compll.PacketError, match=r"parameters|bitwidth = 2"):
        codec.decode(lying, 100)


def test_compiled_decode_adds():
    codec = compiled(spec("terngrad"))
    x = gradients(2000)["plain"]
    body = codec.encode_body(x)
    once, twice = np.empty(2000, np.float32), np.empty(2000, np.float32)
    codec.decode_body(body, once)
    codec.decode_body(body, twice)
    codec.decode_body(body, twice, add=True)
    np.testing.assert_array_equal(twice, once + once)


def test_widths_are_checked_where_no_range_says_so():
    program = compll.compile_text(
        encoder(
            "    uint<b>* v = map(gradient, [&](float x) -> uint<b> { return x; });\n"
            "    out = concat(v);",
            ", uint8 b",
        ),
        "w",
    )
    x = np.ones(10, np.float32)
    assert compll.Reference(program, b=16).encode(x).size == compiled(program, b=16).encode(x).size
    for codec in (compll.Reference(program, b=17), compiled(program, b=17)):
        with pytest.raises(ValueError, match=r"must be from 1 to 16|out of range"):
            codec.encode(x)


def test_a_lambda_converts_what_it_is_given():
    """`map` of floats with a lambda of an int: found by test_fuzz.py."""
    text = encoder(
        "    float* ends = map(gradient, [&](int x) -> float { return x > 0 ? 1 / x : 0.5; });\n"
        "    uint2* low = map(map(gradient, [&](uint2 x) -> int { return x; }),"
        " [&](uint2 x) -> uint2 { return x; });\n    out = concat(ends, low);"
    )
    program = compll.compile_text(text, "foo")
    x = np.array([0.5, 1.5, 2.5, -1.5, 7.5], np.float32)
    body = compll.Reference(program).encode(x)[16:]
    np.testing.assert_array_equal(body[:20].view(np.float32), [0.5, 1.0, 0.0, 0.5, 0.0])
    assert body[20:].tolist() == [0b00_10_01_00, 0b11]
    inlined = dict(passes.stages(program))["dead"]
    assert compll.Reference(inlined).encode(x)[16:].tobytes() == body.tobytes()
    assert compiled(program).encode(x)[16:].tobytes() == body.tobytes()
