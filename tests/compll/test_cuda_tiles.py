# SPDX-License-Identifier: Apache-2.0
"""The eight elements of a thread: read in padded loops, summed with a residual, and left alone."""

import re

import numpy as np
import pytest

import compll
from compll.backends import cuda, cuda_alone
from compll.passes import optimise
from tests.compll.emulation import ADD, RESIDUAL, SET, Emulated, build
from tests.compll.support import assert_same_floats, gradients, residual_of, spec

pytestmark = pytest.mark.heavy  # a run of g++ a specification

PADDED = """
    void AaEncode(float* gradient, uint8* p) {
        uint8* c = map(range((gradient.size + 7) / 8 * 8), [&](int i) -> uint8 {
            return gradient[i] * 16 + EXTRA + 100; });
        p = concat(c);
    }
    void AaDecode(uint8* p, float* gradient) {
        uint8* c;
        extract(p, c);
        gradient = map(range(gradient.size), [&](int i) -> float { return c[i ^ 1]; });
    }
"""
SORTED = """
    void AaEncode(float* gradient, uint8* p) {
        float* s = sort(map(range(gradient.size), [&](int i) -> float {
            return gradient[i] + gradient[(i * 7) % gradient.size]; }), less);
        float half = s[gradient.size / 2];
        int* kept = filter(range(gradient.size), [&](int i) -> uint1 {
            return gradient[i] > half; }, gradient.size / 2);
        uint32 count = kept.size;
        p = concat(count, map(kept, [&](int i) -> uint32 { return i; }),
                   map(kept, [&](int i) -> float { return gradient[i]; }));
    }
    void AaDecode(uint8* p, float* gradient) {
        uint32 count;
        uint32* k;
        float* v;
        extract(p, count, k, v);
        gradient = scatter(gradient.size, k, v, count);
    }
"""
# A block's float that two vectors need, beside noise, and its own division.
BLOCKS = """
    void AaEncode(float* gradient, uint8* p) {
        float* top = block_reduce(map(gradient, [&](float g) -> float {
            return abs(g) <= 1e30 ? abs(g) : 0; }), 64, 0, max);
        lambda_func scale = [&](int i) -> float { return top[i / 64] > 0 ? 100 / top[i / 64] : 1; }
        uint8* c = map(range(gradient.size), [&](int i) -> uint8 {
            float s = scale(i); return gradient[i] * s + 128 + random<float>(0, 1); });
        uint<3>* d = map(range(gradient.size), [&](int i) -> uint<3> {
            float s = scale(i); return gradient[i ^ 1] * s * 3 + top[i / 64]; });
        p = concat(c, d, top);
    }
    void AaDecode(uint8* p, float* gradient) {
        uint8* c;
        uint<3>* d;
        float* t;
        extract(p, c, d, t);
        gradient = map(range(gradient.size), [&](int i) -> float {
            return c[i] * t[i / 64] + d[i ^ 1]; });
    }
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(PADDED.replace("EXTRA", "gradient[i ^ 1]"), id="padded"),
        pytest.param(PADDED.replace("EXTRA", "0"), id="padded, in order"),
        pytest.param(SORTED, id="sorted"),
        pytest.param(BLOCKS, id="blocks"),
    ],
)
def test_a_sum_is_formed_before_it_is_read(text):
    program = compll.compile_text(text, "aa")
    kernels, reference = Emulated(program), compll.Reference(program)
    for n in (1, 33, 2500):
        for x in gradients(n).values():
            expected = reference.encode(x, seed=5)
            packets, _ = kernels.encode(x, seed=5)
            np.testing.assert_array_equal(packets, expected)
            residual = (x[::-1] * np.float32(0.5)).copy()
            with np.errstate(all="ignore"):
                total = x + residual
            packets, left = kernels.encode(x, residual, is_apart=True, seed=5)
            np.testing.assert_array_equal(packets, reference.encode(total, seed=5))
            assert_same_floats(left, residual_of(reference, total, packets))


@pytest.mark.parametrize("name", ("int8", "onebit"))
def test_a_foreign_packet_leaves_what_is_there(name):
    """In each way of decoding, and with a kernel of its own that checks."""
    kernels, reference = Emulated(spec(name)), compll.Reference(spec(name))
    for n in (1000, 20_000):
        bad = reference.encode(gradients(n)["plain"], seed=1)
        bad[8] ^= 1
        before = np.arange(n, dtype=np.float32)
        for may_be_alone in (True, False):
            kernels.alone(may_be=may_be_alone)
            for mode in (SET, ADD, RESIDUAL):
                values, report = kernels.decode([bad], n, before, mode)
                assert report & 255 == 20
                np.testing.assert_array_equal(values, before)
    kernels.alone(may_be=True)


def many(count: int) -> compll.Program:
    """Blocks, and so many vectors of floats that need them."""
    made = "\n".join(
        f"float* c{k} = map(range(gradient.size), "
        f"[&](int i) -> float {{ return gradient[i] / top[i / 64] + {k}; }});"
        for k in range(count)
    )
    names = [f"c{k}" for k in range(count)]
    text = f"""
        void AaEncode(float* gradient, uint8* p) {{
            float* top = block_reduce(gradient, 64, 0, sum);
            {made}
            p = concat({", ".join(names)});
        }}
        void AaDecode(uint8* p, float* gradient) {{
            {" ".join(f"float* {name};" for name in names)}
            extract(p, {", ".join(names)});
            gradient = map(range(gradient.size), [&](int i) -> float {{
                return {" + ".join(f"{name}[i]" for name in names)}; }});
        }}
    """
    return compll.compile_text(text, "many")


def test_what_shared_memory_cannot_hold_is_refused():
    [refusal] = cuda.refusals(optimise(many(8)))
    assert refusal.message.endswith("must have at most 7 reductions and vectors. Received: 8")
    plan = optimise(many(7))
    assert not cuda.refusals(plan)
    source = cuda.emit(plan)
    kernel = source[source.index(" encode_blocks1(") : source.index(" encode_blocks1_grid(")]
    assert cuda_alone.shared_bytes(kernel) <= 48 * 1024


def noisy(count: int):
    noise = " + ".join(["random<float>(0, 1)"] * count)
    return compll.compile_text(
        f"""
        void AaEncode(float* gradient, uint8* p) {{
            p = concat(map(gradient, [&](float g) -> float {{ return g + {noise}; }}));
        }}
        void AaDecode(uint8* p, float* gradient) {{
            float* v;
            extract(p, v);
            gradient = map(v, [&](float x) -> float {{ return x; }});
        }}
        """,
        "noisy",
    )


def test_keys_that_no_kernel_can_be_given_are_refused():
    [refusal] = cuda.refusals(optimise(noisy(33)))
    assert refusal.message.endswith("at most 32 calls of random in a function. Received: 33")
    plan = optimise(noisy(32))
    assert not cuda.refusals(plan)
    assert "PhiloxKeys philox[32];" in cuda.emit(plan)


def test_a_vector_may_have_the_name_of_a_member():
    text = re.sub(r"\bv\b", "philox", SORTED.replace("count", "is_just_checked"))
    program = compll.compile_text(text, "aa")
    x = gradients(33)["plain"]
    packets, _ = Emulated(program).encode(x)
    np.testing.assert_array_equal(packets, compll.Reference(program).encode(x))


DIVIDE = """
param Divide {
    int by in [-2000000, 2000000] = 3;
}
void DivideEncode(float* g, uint8* out, int by) {
    out = concat(map(range(g.size), [&](int i) -> uint16 {
        return (i * 1000000007 * by - i * 123457 + i % 5) / by; }));
}
"""


def test_a_loop_divides_by_what_is_the_same_for_all():
    """With a multiplication where it can: the quotient is that of the language."""
    program = compll.compile_text(DIVIDE, "divide")
    assert "const Divisor " in cuda.emit(optimise(program))
    library, x = build(program), np.zeros(2100, np.float32)
    for by in (-2_000_000, -3, -1, 0, 1, 2, 3, 1023, 65_537, 1_999_999):
        packets, _ = Emulated(program, library, by=by).encode(x)
        np.testing.assert_array_equal(packets, compll.Reference(program, by=by).encode(x))
