# SPDX-License-Identifier: Apache-2.0
"""hadamard: what it computes, and that machine code and kernels compute the same bits."""

import numpy as np
import pytest

import compll
from compll.ir import nodes, transforms
from compll.ir.types import FLOAT, INT, Array
from compll.ir.verify import IrError, verify
from compll.passes import optimise
from compll.passes.inline import inline
from tests.compll.emulation import FINE, Emulated
from tests.compll.support import (
    assert_same_floats,
    compiled,
    encoder,
    gradients,
    residual_of,
)

# Below a block, a whole one, and last blocks that are powers of two and that are not.
SIZES = (0, 1, 2, 7, 16, 37, 100, 1023, 1024, 1040, 2600)
# Two transforms of which one reads the other; one of a vector that is shorter than the gradient,
# one of as many as a filter finds; and one in a reduction. What a block has is read beside it.
CODEC = """
param Turned {
    int block in [16, 1024] = 128;
}
void TurnedEncode(float* gradient, uint8* out, int block) {
    lambda_func sizeOf = [&](float g) -> float { return abs(g); }
    float* top = block_reduce(map(gradient, sizeOf), block, 0, max);
    float* w = hadamard(map(range(gradient.size), [&](int i) -> float {
        return gradient[i] / (top[i / block] + 1); }), block);
    float* v = hadamard(map(range(gradient.size), [&](int i) -> float {
        return w[i] * 2 + gradient[i] + random<float>(0, 1); }), 16);
    float* half = hadamard(map(range(gradient.size / 2), [&](int i) -> float {
        return gradient[2 * i]; }), 1024);
    float* found = hadamard(filter(gradient, [&](float g) -> uint1 { return g > 0; }), 32);
    float total = reduce(map(w, [&](float x) -> float { return x * x; }), 0, sum);
    float* energies = block_reduce(map(w, [&](float x) -> float { return x * x; }), block, 0, sum);
    uint8* codes = map(range(gradient.size), [&](int i) -> uint8 {
        float length = min(block, gradient.size - i / block * block);
        return 128 + 20 * w[i] * sqrt(length / energies[i / block]); });
    out = concat(total, energies, codes, v, half, found);
}
void TurnedDecode(uint8* packet, float* gradient, int block) {
    float total;
    float* energies;
    uint8* codes;
    float* v;
    float* half;
    float* found;
    extract(packet, total, energies, codes, v, half, found);
    float* back = hadamard(map(codes, [&](uint8 code) -> float { return code - 128; }), block);
    gradient = map(range(gradient.size), [&](int i) -> float {
        return back[i] * energies[i / block] + v[i]; });
}
"""


def matrix(length: int) -> np.ndarray:
    """The orthonormal Hadamard matrix of Sylvester."""
    found = np.ones((1, 1))
    while len(found) < length:
        found = np.block([[found, found], [found, -found]])
    return found / np.sqrt(length)


def whole_matrix(length: int) -> np.ndarray:
    """What a last block of any length is multiplied by: C A D B D B D A C."""
    most = 1 << (length.bit_length() - 1)
    if most == length:
        return matrix(length)
    a, b, c, half = np.eye(length), np.eye(length), np.eye(length), length // 2
    a[:most, :most] = b[length - most :, length - most :] = matrix(most)
    for j in range(half):
        k = j + length - half
        c[j, j] = c[j, k] = c[k, j] = np.sqrt(0.5)
        c[k, k] = -np.sqrt(0.5)
    d = np.diag([-1.0 if (j * j * 2654435769) >> 31 & 1 else 1.0 for j in range(length)])
    return c @ a @ d @ b @ d @ b @ d @ a @ c


@pytest.mark.parametrize("block", nodes.BLOCKS)
def test_blocks_are_multiplied_by_the_matrix(block):
    for n in SIZES:
        x = gradients(n)["plain"]
        expected = x.astype(np.float64)
        ends = [(k, k + block) for k in range(0, n // block * block, block)]
        for begin, end in ends:
            expected[begin:end] = matrix(block) @ expected[begin:end]
        if n % block:
            last = expected[n // block * block :]
            last[:] = whole_matrix(last.size) @ last
        found = transforms.hadamard(x, block)
        np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
        np.testing.assert_allclose(transforms.hadamard(found, block), x, rtol=0, atol=4e-6)
        np.testing.assert_allclose(np.linalg.norm(found), np.linalg.norm(x), rtol=1e-5)


def test_a_last_block_is_mixed_as_a_whole():
    """Its own inverse, and what comes of one element alone, any of them, is spread over all."""
    for length in (3, 5, 10, 12, 37, 71, 100, 513, 768, 1023):
        found = whole_matrix(length)
        np.testing.assert_allclose(found @ found, np.eye(length), atol=1e-12)
        # What one bit of each loses: 0 if all are as large, length - 1 if one has everything.
        lost = length / np.abs(found).sum(0) ** 2 - 1
        assert lost.max() < (1.6 if length <= 64 else 1.02), length
    assert [transforms.scale(1 << k) for k in range(5)] == [
        np.float32(2 ** (-k / 2)) for k in range(5)
    ]


def test_steps_are_rounded_in_their_order():
    """((a + b) + (c + d)) / 2: no other order gives these bits, and no fused multiply-add."""
    x = np.array([1, 2.0**-24, 2.0**-24, 2.0**-24], np.float32)
    assert transforms.hadamard(x, 16).tolist() == [
        np.float32(1 + 2.0**-23) / 2,
        np.float32(1 - 2.0**-24) / 2,
        np.float32(1) / 2 - np.float32(2.0**-24),
        np.float32(1 - 2.0**-24) / 2,
    ]


def test_what_is_not_finite_follows_ieee():
    x = np.zeros(48, np.float32)
    x[3], x[16 + 2], x[32] = np.nan, np.inf, 3e38
    with np.errstate(all="ignore"):
        found = transforms.hadamard(x, 16)
        twice = transforms.hadamard(np.full(16, np.float32(3e38)), 16)
    assert np.isnan(found[:16]).all()
    assert np.isinf(found[16:32]).all()
    np.testing.assert_array_equal(found[32:], np.float32(3e38) / 4)
    # Sums come before the factor, so they may overflow where the result would not.
    assert np.isinf(twice[0])


def test_it_is_stored_once():
    """One transform for all that read it, and what it is made of is computed in its loop."""
    program = compll.compile_text(CODEC, "turned")
    plan = optimise(program)
    stores = [step for step in plan.encode if isinstance(step, nodes.Store)]
    assert sum(isinstance(step.value, nodes.Hadamard) for step in stores) == 4
    assert all(isinstance(step.value.source, nodes.Elementwise) for step in stores)
    source = compll.generate(program)["turned.codec.cc"]
    encode = source[source.index("encode_tiles(") : source.index("encode_fields(")]
    assert encode.count("hadamard_tile(") == 4
    # No pointer is formed outside of a tile.
    assert "- base;" not in source
    assert '#include "tf_hips/cc/runtime/hadamard.h"' in source


def test_a_wrong_one_is_no_program():
    program = inline(compll.compile_text(encoder("out = concat(hadamard(gradient, 16));"), "foo"))
    [let] = [one for one in program.encode.lets if isinstance(one.value, nodes.Hadamard)]
    for kind, block, message in (
        (Array(INT), let.value.block, "a Hadamard of"),
        (Array(FLOAT), nodes.Const(FLOAT, let.span, 16.0), "Hadamard counts elements by float"),
    ):
        bad = nodes.Hadamard(kind, let.span, block, let.value.source)
        wrong = nodes.Let(nodes.Var("w", kind, let.span), bad, let.span)
        encode = nodes.Encode("XEncode", program.encode.gradient, (wrong,), (), (), let.span)
        with pytest.raises(IrError, match=message):
            verify(nodes.Program("x", "X", (), encode, None), is_inlined=True)


@pytest.mark.heavy
def test_machine_code_equals_the_reference():
    program = compll.compile_text(CODEC, "turned")
    for block in (16, 128, 1024):
        reference, codec = compll.Reference(program, block=block), compiled(program, block=block)
        for n in SIZES:
            for kind, x in gradients(n).items():
                if n > 3000 and kind != "plain":
                    continue
                expected = reference.encode(x, seed=5)
                assert codec.encode(x, seed=5).tobytes() == expected.tobytes(), (block, n, kind)
                assert_same_floats(codec.decode(expected, n), reference.decode(expected, n))


@pytest.mark.heavy
def test_kernels_equal_the_reference():
    program = compll.compile_text(CODEC, "turned")
    kernels, reference = Emulated(program), compll.Reference(program)
    for alone in (True, False):
        kernels.alone(may_be=alone)
        for n in (0, 7, 1023, 2600):
            for number, x in enumerate(gradients(n).values()):
                kernels.order(backwards=number % 2 == 1)
                expected = reference.encode(x, seed=5)
                np.testing.assert_array_equal(kernels.encode(x, seed=5)[0], expected)
                values, report = kernels.decode([expected], n)
                assert report == FINE
                assert_same_floats(values, reference.decode(expected, n))
    x, residual = gradients(1500)["plain"], gradients(1500)["constant"]
    packets, left = kernels.encode(x, residual, seed=5)
    np.testing.assert_array_equal(packets, reference.encode(x + residual, seed=5))
    assert_same_floats(left, residual_of(reference, x + residual, packets))
