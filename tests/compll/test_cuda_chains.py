# SPDX-License-Identifier: Apache-2.0
"""Steps of a tile that share a kernel of CUDA: which they are, and that they make the same bits."""

import re

import numpy as np
import pytest

import compll
from compll.backends import cuda, cuda_alone
from compll.ir.nodes import BLOCKS
from compll.packet import CHUNK
from compll.passes import optimise
from tests.compll.emulation import ADD, FINE, RESIDUAL, Emulated, build
from tests.compll.support import assert_same_floats, gradients, residual_of, spec

# Two transforms, the second of which reads eight neighbours of the first and what blocks have of
# both sizes; noise of an element, of a chunk and of a header; codes whose width is a parameter;
# an element per block in another width than a float. The decode has two transforms, too.
CHAIN = """
param Chained {
    int bits in [2, 5] = 3;
    int block in [16, 1024] = 64;
}
void ChainedEncode(float* gradient, uint8* out, int bits, int block) {
    uint16* salt = map(range(1), [&](int i) -> uint16 { return random<int>(0, 999); });
    uint16 first = salt[0];
    float most = 1 << bits - 1;
    float* sums = block_reduce(gradient, block, 1, sum);
    lambda_func inverse = [&](float s) -> float { return s > 1 ? 1 / s : 1.0; }
    float* inverses = map(sums, inverse);
    float* w = hadamard(map(range(gradient.size), [&](int i) -> float {
        return gradient[i ^ 3] * inverses[i / block] + first; }), block);
    float* lows = block_reduce(map(range(gradient.size), [&](int i) -> float {
        return w[i] * sums[i / block]; }), 32, 0, min);
    float* v = hadamard(map(range(gradient.size), [&](int i) -> float {
        return w[i ^ 5] + lows[i / 32] + i / block + random<float>(0, 1); }), 16);
    uint8* tops = map(range(lows.size), [&](int k) -> uint8 { return 100 + lows[k]; });
    uint<bits>* codes = map(range(gradient.size), [&](int i) -> uint<bits> {
        return most + v[i] * inverses[i / block] * (lows[i / 32] > 0 ? 2.0 : 0.5); });
    out = concat(first, tops, codes, sums);
}
void ChainedDecode(uint8* packet, float* gradient, int bits, int block) {
    uint16 first;
    uint8* tops;
    uint<bits>* codes;
    float* sums;
    extract(packet, first, tops, codes, sums);
    float middle = (1 << bits - 1) - 0.5;
    float* v = hadamard(map(codes, [&](uint<bits> code) -> float { return code - middle; }), 16);
    float* w = hadamard(map(range(gradient.size), [&](int i) -> float {
        return v[i ^ 5] * tops[i / 32] + codes[i]; }), block);
    gradient = map(range(gradient.size), [&](int i) -> float {
        return w[i] * sums[i / block] - first; });
}
"""


def kernels_in(source: str) -> list[str]:
    """Names of the functions of blocks of threads, in order."""
    return re.findall(r"TF_HIPS_BLOCK (\w+)\(", source)


def check(kernels: Emulated, reference: compll.Reference, n: int, skew: int = 0) -> None:
    """Packets, sums of rows and residuals of a codec, of all kinds of vectors."""
    others = [reference.encode(x, seed=3) for x in list(gradients(n).values())[:2]]
    for number, x in enumerate(gradients(n).values()):
        kernels.order(backwards=number % 2 == 1)
        expected = reference.encode(x, seed=5)
        packets, _ = kernels.encode(x, skew=skew, seed=5)
        np.testing.assert_array_equal(packets, expected)
        values, report = kernels.decode([packets], n)
        assert report == FINE
        assert_same_floats(values, reference.decode(expected, n))
        residual = (x[::-1] * np.float32(0.5)).copy()
        with np.errstate(all="ignore"):
            total = x + residual
            summed = x + reference.decode(expected, n)
            for other in others:
                summed = summed + reference.decode(other, n)
        values, report = kernels.decode([expected, *others], n, x, ADD)
        assert report == FINE
        assert_same_floats(values, summed)
        packets, left = kernels.encode(x, residual, skew=skew, is_apart=True, seed=5)
        np.testing.assert_array_equal(packets, reference.encode(total, seed=5))
        rest = residual_of(reference, total, packets)
        assert_same_floats(left, rest)
        values, _ = kernels.decode([packets], n, total, RESIDUAL)
        assert_same_floats(values, rest)


@pytest.mark.heavy
@pytest.mark.parametrize("bits", (1, 2, 3, 4))
def test_eden_of_each_width(bits):
    library = build(spec("eden"))
    for block in BLOCKS[bits - 1 :: 4]:  # each once
        params = {"bits": bits, "block": block}
        kernels = Emulated(spec("eden"), library, **params)
        reference = compll.Reference(spec("eden"), **params)
        for alone, n in ((True, 0), (True, 1040), (False, 37), (False, 2600)):
            kernels.alone(may_be=alone)
            check(kernels, reference, n, skew=bits)
    kernels.alone(may_be=True)


@pytest.mark.heavy
def test_a_chunk_and_a_bit_of_eden():
    params, n = {"bits": 2, "block": 128}, CHUNK + 1027
    kernels, x = Emulated(spec("eden"), **params), gradients(n)["broken"]
    reference = compll.Reference(spec("eden"), **params)
    packets, left = kernels.encode(x, x[::-1].copy(), seed=5)
    with np.errstate(all="ignore"):
        total = x + x[::-1]
    np.testing.assert_array_equal(packets, reference.encode(total, seed=5))
    assert_same_floats(left, residual_of(reference, total, packets))


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("", "", id="all of it"),
        # Of what other threads have, and of another tile: kernels of their own.
        pytest.param("w[i ^ 5] + lows", "w[i + 9] + lows", id="far"),
        pytest.param("gradient[i ^ 3]", "gradient[i + 1024]", id="gradient"),
        pytest.param("return v[i ^ 5] * tops", "return v[(i + 7) % 99] * tops", id="decode"),
        # Of the number of a block, which is what is counted there.
        pytest.param("100 + lows[k]", "k / 16 + 1000 / (k / 16) + 9 / k + lows[k]", id="number"),
        # What is made is needed again, and for the header.
        pytest.param("concat(first,", "concat(sums[2], first,", id="header"),
        pytest.param("concat(first,", "concat(reduce(w, 0, sum), first,", id="later"),
    ],
)
def test_a_chain_makes_the_bits_of_the_reference(old, new):
    text = CHAIN
    if old:
        # Kernels of two widths, not four.
        text = text.replace(old, new).replace("bits in [2, 5]", "bits in [3, 4]")
    if "concat(" in old:
        text = text.replace("uint16 first;\n", "float more;\n    uint16 first;\n")
        text = text.replace("extract(packet, first", "extract(packet, more, first")
    program = compll.compile_text(text, "chained")
    library = build(program)
    choices = ({"bits": 3, "block": 64}, {"bits": 4 if old else 5, "block": 1024})
    ways = ((True, 1040), (False, 2600))
    for number, params in enumerate(choices):
        kernels = Emulated(program, library, **params)
        reference = compll.Reference(program, **params)
        for alone, n in ways if not old else ways[1 - number : 2 - number]:
            kernels.alone(may_be=alone)
            check(kernels, reference, n)
    kernels.alone(may_be=True)
    names = kernels_in(cuda.emit(optimise(program)))
    if not old:
        assert names[:2] == ["decode_tile_of_rows", "decode_rows1"]
        assert names[2:4] == ["encode_chunk1", "encode_tile2"]


def test_tables_are_as_long_as_their_own_codes_are_wide():
    """And not as those whose width kernels are compiled for."""
    text = CHAIN.replace("bits in [2, 5] = 3", "bits in [1, 4] = 1")
    for new, bits in (("map(flags, [&](uint1 code)", "1"), ("map(wide, [&](uint<3> code)", "3")):
        flags = "map(range(gradient.size), [&](int i) -> KIND { return w[i] > 0; })"
        more = f"uint1* flags = {flags.replace('KIND', 'uint1')}; "
        more += f"uint<3>* wide = {flags.replace('KIND', 'uint<3>')};"
        changed = text.replace("map(codes, [&](uint<bits> code)", new)
        changed = changed.replace("out = concat(first,", f"{more} out = concat(flags, wide, first,")
        changed = changed.replace("uint16 first;\n", "uint1* flags; uint<3>* wide; uint16 first;\n")
        changed = changed.replace("extract(packet, first", "extract(packet, flags, wide, first")
        source = cuda.emit(optimise(compll.compile_text(changed, "chained")))
        assert f"table_of<{bits}>(" in source
        assert "table_of<kWidth>(" not in source
    source = cuda.emit(optimise(compll.compile_text(text, "chained")))
    assert "table_of<kWidth>(" in source


def test_all_of_eden_is_in_two_kernels():
    """Of a call on many elements: the salt and the header, and everything else."""
    source = cuda.emit(optimise(spec("eden")))
    assert [name for name in kernels_in(source) if name != "check_packets"] == [
        "decode_tile_of_rows",
        "decode_rows1",
        "encode_chunk1",
        "encode_tile2",
    ]
    # Nothing of a gradient's length, or of its blocks', is in memory between them.
    assert "_room" not in source
    assert "decode_tile_of_rows<true, kWidth>(call.rest, spot, own_sums, own_tile);" in source
    kernel = source[source.index(" encode_tile2(") : source.index(" encode_tile2_grid(")]
    assert cuda_alone.shared_bytes(kernel) <= 48 * 1024
    # What codes stand for is computed once a warp, and signs and scales once an element.
    assert source.count("table_of<kWidth>") == 1
    assert source.count("1.0f / size") == source.count("std::sqrt(") == 1


@pytest.mark.heavy
def test_what_parameters_alone_make_beside_blocks():
    """Floats of a block that are made of none of its elements."""
    text = """
        param Aa { float scale in [1, 9] = 3; }
        void AaEncode(float* gradient, uint8* p, float scale) {
            float* top = block_reduce(gradient, 64, 1, max);
            float* all = map(range(gradient.size), [&](int i) -> float {
                float part = 1 / (scale + 1); return part * part; });
            p = concat(top, all);
        }
        void AaDecode(uint8* p, float* gradient, float scale) {
            float* top;
            float* all;
            extract(p, top, all);
            gradient = map(range(gradient.size), [&](int i) -> float {
                return top[i / 64] * all[i]; });
        }
    """
    program = compll.compile_text(text, "aa")
    kernels, reference = Emulated(program), compll.Reference(program)
    assert "encode_blocks1" in kernels_in(cuda.emit(optimise(program)))
    check(kernels, reference, 1040)
