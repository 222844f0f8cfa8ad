# SPDX-License-Identifier: Apache-2.0
"""Functions of rows (compll/backends/row_code.py) make what the loops make that they stand for."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.support import (
    assert_same_floats,
    compiled,
    encoder,
    gradients,
    in_one_library,
)

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
    "thresholds": "lambda_func f = [&](float g) -> uint<6> { int code = 0; "
    + "".join(f"if (g > {k / 16 - 2}) {{ code += 1; }} " for k in range(63))
    + "return code; }\nuint<6>* few = map(gradient, f);\nout = concat(few);",
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

# What has too few elements for a word of 64 decisions is decided one by one; so is a tile's rest.
FILTER = """
    lambda_func keep = [&](int i) -> uint1 {{
        float g = gradient[i];
        return abs(g) >= 0.75 && g != 2.0 || g == -0.25;
    }}
    int* found = filter(range(gradient.size), keep{limit});
    uint32 number = found.size;
    uint16* places = map(range(gradient.size), [&](int i) -> uint16 {{
        return i < found.size ? found[i] : 7;
    }});
    float* kept = map(range(gradient.size), [&](int i) -> float {{
        return i < found.size ? gradient[found[i]] : -1.0;
    }});
    out = concat(number, places, kept);"""

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


# What a decoder reduces must see all elements, though rows of what it writes are done at once.
REDUCING_DECODER = """
void LargeEncode(float* gradient, uint8* out) {{
    uint4* codes = map(gradient, [&](float g) -> uint4 {{ return g + 8; }});
    out = concat(codes);
}}

void LargeDecode(uint8* in, float* gradient) {{
    uint4* codes;
    extract(in, codes);
    lambda_func size = [&](uint4 c) -> float {{ return {of}; }}
    float found = reduce(map(codes, size), 1, {reducer});
    gradient = map(codes, [&](uint4 c) -> float {{ return (c - 8) * found; }});
}}
"""

# Codes that rows take from memory as they are, and others; in order, and the other way round in
# groups; `bits`: of a code, constant or not.
PACKED = """
param Turn {{ int width in [1, 8] = 2; }}
void TurnEncode(float* gradient, uint8* out, int width) {{
    lambda_func toCode = [&](int i) -> {kind} {{
        float g = gradient[i ^ {mirror}];
        return (g >= 0.5) + (g <= -0.5 ? 2 : 0) + (g > 2.0) * 5;
    }}
    {kind}* codes = map(range((gradient.size + {mirror}) / {group} * {group}), toCode);
    out = concat(codes);
}}
void TurnDecode(uint8* in, float* gradient, int width) {{
    {kind}* codes;
    extract(in, codes);
    lambda_func value = [&](int i) -> float {{
        {kind} code = codes[i ^ {mirror}];
        float level = code;
        return code == 3 ? -level : level + 0.25;
    }}
    gradient = map(range(gradient.size), value);
}}
"""

# Encoders and decoders whose residual is made in the rows of the encoder: where its sum is formed
# there too, where blocks come first, and where a loop over all elements does, with scalars.
WITH_FEEDBACK = {
    "at once": """
void PairEncode(float* gradient, uint8* out) {
    uint2* codes = map(gradient, [&](float g) -> uint2 { return 1 + (g >= 0.5) - (g <= -0.5); });
    out = concat(codes);
}
void PairDecode(uint8* in, float* gradient) {
    uint2* codes;
    extract(in, codes);
    gradient = map(codes, [&](uint2 c) -> float { float level = c; return (level - 1) * 0.5; });
}""",
    "blocks": """
void PairEncode(float* gradient, uint8* out) {
    float* top = block_reduce(gradient, 32, 0.25, max);
    float* steps = map(top, [&](float t) -> float { return t / 9; });
    lambda_func code = [&](int i) -> uint<5> {
        return gradient[i] / steps[i / 32] + 9 + random<float>(0, 1);
    }
    uint<5>* codes = map(range(gradient.size), code);
    out = concat(steps, codes);
}
void PairDecode(uint8* in, float* gradient) {
    float* steps;
    uint<5>* codes;
    extract(in, steps, codes);
    lambda_func value = [&](int i) -> float {
        float level = codes[i];
        return codes[i] ? (level - 9) * steps[i / 32] : -steps[i / 32];
    }
    gradient = map(range(gradient.size), value);
}""",
    "bytes of blocks": """
void PairEncode(float* gradient, uint8* out) {
    float* top = block_reduce(map(gradient, [&](float g) -> float { return abs(g); }), 16, 0, max);
    lambda_func code = [&](int i) -> uint8 { return gradient[i] / top[i / 16] * 100 + 128.5; }
    uint8* codes = map(range(gradient.size), code);
    out = concat(top, codes);
}
void PairDecode(uint8* in, float* gradient) {
    float* top;
    uint8* codes;
    extract(in, top, codes);
    lambda_func value = [&](int i) -> float {
        float level = codes[i];
        return (level - 128) * top[i / 16];
    }
    gradient = map(range(gradient.size), value);
}""",
    "scalars": """
param Pair { int bits in [1, 7] = 3; }
void PairEncode(float* gradient, uint8* out, int bits) {
    float most = reduce(gradient, -1, max);
    float least = reduce(gradient, 1, min);
    float gap = (most - least) / ((1 << bits) - 1);
    lambda_func code = [&](float g) -> uint<bits> { return (g - least) / gap + 0.5; }
    uint<bits>* codes = map(gradient, code);
    out = concat(least, gap, codes);
}
void PairDecode(uint8* in, float* gradient, int bits) {
    float least;
    float gap;
    uint<bits>* codes;
    extract(in, least, gap, codes);
    float half = gap / 2;
    lambda_func value = [&](uint<bits> c) -> float { float level = c; return level * half * 2; }
    gradient = map(codes, [&](uint<bits> c) -> float { return value(c) + least; });
}""",
}


@functools.cache
def with_feedback():
    """WITH_FEEDBACK, and the library of all."""
    return in_one_library(WITH_FEEDBACK, "pair")


@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_what_is_left_agrees(name):
    programs, library = with_feedback()
    program = programs[name]
    source = compll.generate(program)[f"{program.name}.codec.cc"]
    assert "row_left(sum, x)" in source
    assert "row_at(p1 + at) + row_at(p2 + at)" in source  # a sum is formed in rows
    reference, codec = compll.Reference(program), compiled(program, library)
    key = {"seed": 5, "offset": 3}
    for n in LENGTHS:
        residual = np.random.default_rng(n + 1).normal(size=n).astype(np.float32)
        for kind, x in gradients(n).items():
            with np.errstate(all="ignore"):
                total = x + residual
                packets = reference.encode(total, **key)
                missed = total - reference.decode(packets, n)
            expected = np.where(np.isfinite(missed), missed, np.float32(0))
            apart, in_place = np.empty_like(x), residual.copy()
            for old, new in ((residual, apart), (in_place, in_place)):
                body = codec.encode_feedback_body(x, old, new, **key)
                assert body.tobytes() == packets.tobytes()[16:], (n, kind)
                assert_same_floats(new, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_codes_agree(name):
    program = compll.compile_text(encoder(PROGRAMS[name]), "small")
    source = compll.generate(program)["small.codec.cc"]
    assert "rows_of_encode0(" in source
    # Not what a number stands for at each place that names it: a chain of them would double it.
    assert len(source) < 200_000
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


@pytest.mark.parametrize("limit", ["", ", 900"])
def test_what_a_filter_keeps_agrees(limit):
    program = compll.compile_text(encoder(FILTER.format(limit=limit)), "few")
    assert "keep_bits(" in compll.generate(program)["few.codec.cc"]
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


REDUCERS = ("sum", "max", "min", "prod", "count")


@functools.cache
def reducing():
    """Programs of REDUCING_DECODER, and the library of all."""
    near = "c < 8 ? 1.0009765625 : 0.9990234375"
    texts = {
        reducer: REDUCING_DECODER.format(
            of=near if reducer == "prod" else "abs(c - 8.0)", reducer=reducer
        )
        for reducer in REDUCERS
    }
    return in_one_library(texts, "large")


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_decoder_that_reduces_sees_all_elements(reducer):
    programs, library = reducing()
    program = programs[reducer]
    reference, codec = compll.Reference(program), compiled(program, library)
    for n in LENGTHS:
        packet = reference.encode(gradients(n)["plain"])
        assert_decodes(codec, packet, reference.decode(packet, n))


BOTH_WAYS = """
void BothEncode(float* gradient, uint8* out) {
    uint4* codes = map(gradient, [&](float g) -> uint4 { return g + 8; });
    out = concat(codes);
}
void BothDecode(uint8* in, float* gradient) {
    uint4* codes;
    extract(in, codes);
    lambda_func value = [&](int i) -> float {
        float here = codes[i];
        float there = codes[i ^ 3];
        float far = codes[i ^ 7];
        return here * 0.5 - there + far * 3;
    }
    gradient = map(range(gradient.size), value);
}
"""


def test_codes_in_order_and_the_other_way_round_agree():
    program = compll.compile_text(BOTH_WAYS, "both")
    source = compll.generate(program)["both.codec.cc"]
    assert "row_mirrored<3>(" in source
    assert "row_mirrored<7>(" in source
    reference, codec = compll.Reference(program), compiled(program)
    for n in LENGTHS:
        packet = reference.encode(gradients(n)["plain"])
        expected = reference.decode(packet, n)
        assert_decodes(codec, packet, expected)
        if n:
            found = np.empty(n, np.float32)
            codec.merge_bodies([packet[16:]] * 5, found)
            # Halves of small numbers: their sums are exact.
            assert_same_floats(found, expected * 5)


# Of blocks there are fewer than the gradient has: beyond them is 0, not what lies in memory there.
FEW_BLOCKS = """
param Few { int count in [-3, 4000] = 9; }
void FewEncode(float* gradient, uint8* out, int count) {
    lambda_func five = [&](int i) -> float { return 5; }
    float* top = block_reduce(map(range(count), five), 32, 0, max);
    out = concat(top);
}
void FewDecode(uint8* in, float* gradient, int count) {
    float* top;
    extract(in, top);
    gradient = map(range(gradient.size), [&](int i) -> float { return top[i / 32] * 2; });
}
"""


@pytest.mark.parametrize("count", [-3, 9, 500, 4000])
def test_a_field_may_have_fewer_blocks_than_the_gradient(count):
    program = compll.compile_text(FEW_BLOCKS, "few")
    reference = compll.Reference(program, count=count)
    codec = compiled(program, count=count)
    for n in LENGTHS[1:]:
        packet = reference.encode(gradients(n)["plain"])
        # Behind the body lie floats that nobody may read.
        memory = np.full(packet.size + 4096, 0x42, np.uint8)
        memory[: packet.size] = packet
        body, expected = memory[16 : packet.size], reference.decode(packet, n)
        found = np.empty(n, np.float32)
        codec.decode_body(body, found)
        assert_same_floats(found, expected)
        codec.merge_bodies([body] * 5, found)
        assert_same_floats(found, expected * 5)


MIRRORS = (0, 1, 3, 7)
KINDS = ("uint1", "uint2", "uint<3>", "uint4", "uint8", "uint<width>")
# Half of the pairs: every kind with two mirrors, every mirror with three kinds.
PAIRS = [
    (kind, mirror)
    for (i, kind), (j, mirror) in itertools.product(enumerate(KINDS), enumerate(MIRRORS))
    if (i + j) % 2 == 0
]
OTHERS = sorted({*itertools.product(KINDS, MIRRORS)} - {*PAIRS})


@functools.cache
def packed(*, is_quick):
    """Programs of PACKED by kind and mirror, of PAIRS or OTHERS, and the library of all."""
    texts = {}
    for kind, mirror in PAIRS if is_quick else OTHERS:
        text = PACKED.format(kind=kind, mirror=mirror, group=mirror + 1)
        # In order.
        text = text.replace("i ^ 0", "i").replace("(gradient.size + 0) / 1 * 1", "gradient.size")
        texts[kind, mirror] = text
    return in_one_library(texts, "turn")


@pytest.mark.parametrize(
    ("kind", "mirror"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)],
)
def test_groups_the_other_way_round_agree(kind, mirror):
    programs, library = packed(is_quick=(kind, mirror) in PAIRS)
    program = programs[kind, mirror]
    source = compll.generate(program)[f"{program.name}.codec.cc"]
    assert (f"mirror_tile<{mirror}>(" in source) == (mirror != 0)
    assert (f", {mirror}>(p_values" in source) == (kind not in ("uint<3>", "uint8"))
    for width in (1, 2, 4, 5, 8) if kind == "uint<width>" else (2,):
        reference = compll.Reference(program, width=width)
        codec = compiled(program, library, width=width)
        for n in LENGTHS:
            x = gradients(n)["broken"]
            packet = reference.encode(x)
            assert codec.encode(x).tobytes() == packet.tobytes(), (width, n)
            expected = reference.decode(packet, n)
            assert_decodes(codec, packet, expected)
            if n:
                found, total = np.empty(n, np.float32), expected.copy()
                for _ in range(8):
                    total += expected
                codec.merge_bodies([packet[16:]] * 9, found)
                assert_same_floats(found, total)


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["avx2", "base"])
def test_machines_of_narrower_vectors_agree(machine):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, __file__, str(Path(__file__).with_name("test_row_forms.py"))],
        env={**os.environ, "TF_HIPS_CPU": machine},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]


def assert_decodes(codec, packet, expected):
    """To new memory, and added, in lines of memory and beside them."""
    n = expected.size
    assert_same_floats(codec.decode(packet, n), expected)
    if n == 0:
        return
    body = packet[16:]
    for past in (0, 3):
        room = np.linspace(-1, 1, n + past, dtype=np.float32)
        total = room.copy()
        total[past:] += expected
        codec.decode_body(body, room[past:], add=True)
        assert_same_floats(room, total)
