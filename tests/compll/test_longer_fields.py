# SPDX-License-Identifier: Apache-2.0
"""Fields with more elements than the gradient has, as those of transforms of whole groups."""

import re

import pytest

import compll
from compll.ir import nodes
from compll.ir.sizes import blocks_in, is_as_long
from compll.ir.types import INT
from compll.source import Span
from tests.compll.differential import check_cpp

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

LONGER = """
void LongerEncode(float* gradient, uint8* out) {
    int whole = (gradient.size + 15) / 16 * 16;
    uint1* low = map(range(whole), [&](int i) -> uint1 { return gradient[i] < 0; });
    uint4* few = map(range(whole), [&](int i) -> uint4 { return abs(gradient[i]) * 4; });
    uint16* many = map(range((gradient.size + 2) / 3 * 3), [&](int i) -> uint16 { return i; });
    float* all = map(range(whole), [&](int i) -> float { return gradient[i]; });
    uint2* turned = map(range((gradient.size + 1) / 2 * 2), [&](int i) -> uint2 { return i; });
    out = concat(low, few, many, all, turned);
}
void LongerDecode(uint8* packet, float* gradient) {
    uint1* low; uint4* few; uint16* many; float* all; uint2* turned;
    extract(packet, low, few, many, all, turned);
    gradient = map(range(gradient.size), [&](int i) -> float {
        float size = few[i] + many[i] * 0.5 + all[i];
        return LAST;
    });
}
"""


@pytest.mark.parametrize("last", ["low[i] ? -size : size", "low[i] ? -0.5 : 0.5", "turned[i ^ 3]"])
def test_their_codes_are_unpacked_tile_by_tile(last):
    program = compll.compile_text(LONGER.replace("LAST", last), "longer")
    source = compll.generate(program)["longer.codec.cc"]
    decode = source.partition("void decode_fields(")[2].partition("void encode_fields(")[0]
    assert not re.search(r"\b(code_at|float_at)\(", decode)
    check_cpp(program, values_of=({},))


def test_a_length_that_may_wrap_is_not_taken_for_a_longer_one():
    """Of 2 elements and a multiple of 2^63 - 1 it is 0."""
    span = Span(0, 0)
    size = nodes.Ref(INT, span, nodes.Var("size", INT, span))
    for number, is_longer in ((16, True), ((1 << 63) - 1, False)):
        whole = nodes.Const(INT, span, number)
        length = nodes.Binary(INT, span, "*", blocks_in(size, whole), whole)
        assert is_as_long(length, size) == is_longer
