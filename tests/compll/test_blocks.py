# SPDX-License-Identifier: Apache-2.0
"""Reductions of blocks: by hand, in NumPy and in C++."""

import functools

import numpy as np
import pytest

import compll
from compll.backends import reduction
from compll.ir import nodes
from compll.ir.verify import IrError, verify
from compll.passes import optimise
from compll.passes.blocks import blocks
from compll.passes.fold import fold
from compll.passes.inline import inline
from tests.compll.support import (
    SIZES,
    assert_same_floats,
    compiled,
    encoder,
    gradients,
    in_one_library,
)

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

PREFIX = 16

CODEC = """
param Scaled {
    int block in [16, 1024] = 64;
}

void ScaledEncode(float* gradient, uint8* out, int block) {
    lambda_func size = [&](float g) -> float { return abs(g) <= 1e30 ? abs(g) : 0.0; }
    float* top = block_reduce(map(gradient, size), block, 0, max);
    float* scales = map(top, [&](float t) -> float { return t / 127; });
    lambda_func toCode = [&](int i) -> uint8 {
        float scale = scales[i / block];
        return gradient[i] / scale + random<float>(0, 1) + 127;
    }
    uint8* codes = map(range(gradient.size), toCode);
    out = concat(scales, codes);
}

void ScaledDecode(uint8* in, float* gradient, int block) {
    float* scales;
    uint8* codes;
    extract(in, scales, codes);
    lambda_func value = [&](int i) -> float { return (codes[i] - 127) * scales[i / block]; }
    gradient = map(range(gradient.size), value);
}
"""


def by_hand(x, block, start):
    """Sums of blocks, one addition after the other."""
    sums = []
    for k in range(0, x.size, block):
        part = list(x[k : k + block])
        part += [np.float32(0)] * (block - len(part))
        lanes = part[:16]
        for j in range(16, block):
            lanes[j % 16] = lanes[j % 16] + part[j]
        for step in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + step] for j in range(step)]
        sums.append(np.float32(start) + lanes[0])
    return np.array(sums, np.float32)


@pytest.mark.parametrize("block", nodes.BLOCKS)
def test_sums_follow_the_lanes(block):
    x = np.random.default_rng(block).normal(size=3 * block + 5).astype(np.float32)
    found = reduction.reduce_blocks("sum", block, np.float32(0.5), x, True)
    np.testing.assert_array_equal(found, by_hand(x, block, 0.5))


@pytest.mark.parametrize("block", nodes.BLOCKS)
def test_a_codec_with_scales(block):
    program = compll.compile_text(CODEC, "scaled")
    reference, codec = (make(program, block=block) for make in (compll.Reference, compiled))
    for n in SIZES if block == 64 else (0, 1, block - 1, block, 5 * block + 7):
        for kind, x in gradients(n).items():
            if n > 2000 and kind != "broken":
                continue
            packets = reference.encode(x, seed=7, offset=n % 5)
            assert codec.encode(x, seed=7, offset=n % 5).tobytes() == packets.tobytes(), (n, kind)
            assert packets.size == PREFIX + n + 4 * -(-n // block)
            decoded = reference.decode(packets, n)
            assert_same_floats(codec.decode(packets, n), decoded)
            if kind == "plain" and n:
                tops = np.maximum.reduceat(np.abs(x), np.arange(0, n, block))
                scale = np.repeat(tops, block)[:n] / np.float32(127)
                assert (np.abs(decoded - x) <= 1.001 * scale).all()


@pytest.mark.parametrize("back_end", [compll.Reference, compiled], ids=["numpy", "cpp"])
@pytest.mark.parametrize("block", [16.0, 100, 24, 1000])
def test_blocks_that_parameters_make_are_checked(back_end, block):
    codec = back_end(compll.compile_text(CODEC, "scaled"), block=block)
    if block in nodes.BLOCKS:
        assert codec.wire_bytes(33) == PREFIX + 33 + 3 * 4
    else:
        with pytest.raises(ValueError, match=r"block must have 16, 32|out of range"):
            codec.wire_bytes(33)
        with pytest.raises(ValueError, match=r"block must have 16, 32|out of range"):
            codec.encode(np.zeros(33, np.float32))


PROGRAMS = {
    "every reducer": """
    float* p = block_reduce(gradient, 16, 1.5, prod);
    float* top = block_reduce(gradient, 32, -1, [&](float a, float b) -> float {
        return a >= b ? a : b;
    });
    float* low = block_reduce(gradient, 64, 2, min);
    int* counted = block_reduce(gradient, 128, 3, count);
    uint8* q = map(gradient, [&](float x) -> uint8 { return x * 100; });
    uint32* total = block_reduce(q, 256, 1, sum);
    uint32* product = block_reduce(q, 16, 1, prod);
    uint16* most = block_reduce(q, 16, 7, max);
    uint16* least = block_reduce(q, 16, 7, min);
    uint1* all = block_reduce(q, 512, 1, and);
    uint1* any = block_reduce(q, 1024, 0, or);
    uint16* number = counted;
    float* f = block_reduce(q, 16, 0.5, sum);
    out = concat(p, top, low, number, total, product, most, least, all, any, f);""",
    "blocks of blocks": """
    float* a = block_reduce(gradient, 16, 0, sum);
    float* b = block_reduce(map(a, [&](float x) -> float { return x * x; }), 16, 0, sum);
    float whole = reduce(b, 0, sum) + a[1] + b.size;
    lambda_func f = [&](int i) -> float {
        return gradient[i] - a[i / 16] + b[i / 256] + a[a.size - 1 - i] + whole;
    }
    float* c = map(range(gradient.size), f);
    float* d = block_reduce(c, 32, 0, max);
    lambda_func spread = [&](int i) -> float { return gradient[i] * d[i / 32] + d[i / 16]; }
    float* e = block_reduce(map(range(gradient.size), spread), 64, 0, sum);
    out = concat(whole, c, d, e, block_reduce(e, 16, 0, sum));""",
    "vectors as long as there are blocks": """
    float* low = block_reduce(gradient, 32, 1e30, min);
    float* high = block_reduce(gradient, 32, -1e30, max);
    float* step = map(range(low.size), [&](int j) -> float { return (high[j] - low[j]) / 255; });
    float* most = block_reduce(step, 64, 0, max);
    uint8* part = map(range(step.size), [&](int j) -> uint8 { return step[j] / most[j / 64] * 9; });
    float* half = map(most, [&](float m) -> float { return m / 2; });
    uint8* code = map(range(gradient.size), [&](int i) -> uint8 {
        int k = i / 32;
        float near = (gradient[i] - low[k]) / step[i / 32];
        int group = k / 64;
        near = near + half[group];
        return near + part[k] * most[k / 64] + half[i / 32 / 64] + (k % 7) - k / 64;
    });
    uint8* far = map(range(low.size * 33), [&](int i) -> uint8 {
        return part[i / 32] + step[i / 32] + half[i / 32 / 64] + most[i / 64 / 32] + half[i / 64];
    });
    out = concat(low, step, most, part, code, far);""",
    "other places": """
    float* a = block_reduce(gradient, 16, 0, max);
    lambda_func f = [&](int i) -> float {
        int k = i / 16;
        int far = (i + 1) / 16 + i / 17 + i / 32 - i / 0;
        float here = a[k] * 2;
        float u = random<float>(0, 1);
        return here + a[far] + (k % 2 ? here * u : a[k + 1]) + i / 16 + gradient[k];
    }
    float* c = map(range(gradient.size), f);
    uint4* few = map(range(gradient.size / 2 + 3), [&](int i) -> uint4 { return a[i / 16] * 9; });
    float s = reduce(map(range(gradient.size), [&](int i) -> float { return a[i / 16]; }), 0, sum);
    lambda_func own = [&](int i) -> float {
        return gradient[i] > 0 && i / 16 < (gradient.size + 15) / 16 ? a[i / 16] : 7;
    }
    float* mine = map(range(gradient.size), own);
    uint8* rest = map(range((gradient.size - 100) / 16), [&](int i) -> uint8 { return i + 1; });
    uint32 left = rest.size;
    out = concat(c, few, s, a, mine, left, rest);""",
}


@functools.cache
def small():
    """PROGRAMS, and the library of all."""
    return in_one_library({name: encoder(body) for name, body in PROGRAMS.items()}, "foo")


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_programs_agree(name):
    programs, library = small()
    program = programs[name]
    reference, codec = compll.Reference(program), compiled(program, library)
    stages = (inline(program), fold(inline(program)), blocks(fold(inline(program))))
    passes = [compll.Reference(stage) for stage in stages]
    for n in (0, 1, 15, 16, 17, 1024, 2051):
        for kind, x in gradients(n).items():
            expected = reference.encode(x, seed=5, offset=3).tobytes()[PREFIX:]
            assert codec.encode(x, seed=5, offset=3).tobytes()[PREFIX:] == expected, (n, kind)
            for changed in passes if kind in ("plain", "broken") else ():
                assert changed.encode(x, seed=5, offset=3).tobytes()[PREFIX:] == expected


def test_what_belongs_to_a_block_is_found_once_for_it():
    """Whether it is read from blocks, or made of such, or read from blocks of blocks."""
    program = compll.compile_text(encoder(PROGRAMS["vectors as long as there are blocks"]), "small")
    source = compll.generate(program)["small.codec.cc"]
    loops = [part.partition("}")[0] for part in source.split("for (int64_t j = 0;")]
    (loop,) = (part for part in loops if "near =" in part)
    assert "value_at" not in loop and " < " not in loop.partition("{")[2]
    assert loop.count("int_div") == 1  # of k / 64: the number itself, k, comes with its block
    assert "(first + k) / 64)" in source


def test_blocks_verify():
    program = compll.compile_text(CODEC, "scaled")
    assert len(program.blocks) == 1
    plan = optimise(program)
    for let in plan.program.encode.lets:
        if isinstance(let.value, nodes.BlockReduce):
            bad = nodes.BlockReduce(
                let.value.type, let.span, "max", let.value.init, let.value.init, let.value.source
            )
            wrong = nodes.Let(let.var, bad, let.span)
            break
    encode = nodes.Encode("XEncode", plan.program.encode.gradient, (wrong,), (), (), let.span)
    with pytest.raises(IrError, match="BlockReduce counts elements by float"):
        verify(nodes.Program("x", "X", (), encode, None), is_inlined=True)
