# SPDX-License-Identifier: Apache-2.0
"""Fields with more elements than the gradient has, as those of transforms of whole groups."""

import functools
import re

import pytest

import compll
from compll.ir import nodes
from compll.ir.sizes import blocks_in, is_as_long
from compll.ir.types import INT
from compll.ir.walk import walk
from compll.source import Span
from tests.compll.differential import check_cpp
from tests.compll.support import encoder, in_one_library

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


LAST = ("low[i] ? -size : size", "low[i] ? -0.5 : 0.5", "turned[i ^ 3]")


@functools.cache
def programs():
    """LONGER with each of LAST, and the library of all."""
    return in_one_library({last: LONGER.replace("LAST", last) for last in LAST}, "longer")


@pytest.mark.parametrize("last", LAST)
def test_their_codes_are_unpacked_tile_by_tile(last):
    found, library = programs()
    program = found[last]
    source = compll.generate(program)[f"{program.name}.codec.cc"]
    decode = source.partition("void decode_fields(")[2].partition("void encode_fields(")[0]
    assert not re.search(r"\b(code_at|float_at)\(", decode)
    check_cpp(program, values_of=({},), library=library)


def test_a_length_that_may_wrap_is_not_taken_for_a_longer_one():
    """Of 2 elements and a multiple of 2^63 - 1 it is 0."""
    span = Span(0, 0)
    size = nodes.Ref(INT, span, nodes.Var("size", INT, span))
    for number, is_longer in ((16, True), ((1 << 63) - 1, False)):
        whole = nodes.Const(INT, span, number)
        length = nodes.Binary(INT, span, "*", blocks_in(size, whole), whole)
        assert is_as_long(length, size) == is_longer


def test_only_what_is_seen_to_be_as_long_is_taken_for_it():
    """Else codes would be read behind the end of their field."""
    span = Span(0, 0)
    size = nodes.Ref(INT, span, nodes.Var("size", INT, span))
    five, eight, sixteen = (nodes.Const(INT, span, number) for number in (5, 8, 16))
    down = nodes.Binary(INT, span, "/", size, sixteen)
    half = nodes.Binary(INT, span, "*", blocks_in(size, sixteen), eight)
    for is_longer, *lengths in (
        (True, size, nodes.Math(INT, span, "max", (five, size))),
        (False, five, down, half, nodes.Binary(INT, span, "*", down, sixteen)),
        (False, nodes.Math(INT, span, "max", (five, down))),
        (False, nodes.Math(INT, span, "min", (size, five))),
    ):
        assert all(is_as_long(length, size) == is_longer for length in lengths)


@pytest.mark.parametrize(
    ("length", "is_held"),
    [
        *((text, True) for text in ("-7", "n", "max(n, -5)", "min(n, size)", "min(size, n)")),
        *((text, False) for text in ("size", "7", "max(n, 0)", "max(0, n)", "min(size, 9)")),
    ],
)
def test_lengths_that_may_be_negative_are_held_to_0(length, is_held):
    """Of others it would be an operation more in every call."""
    body = f"""int size = gradient.size; int n = size - 100;
    uint8* v = map(range({length}), [&](int i) -> uint8 {{ return i + 1; }});
    uint32 count = v.size;
    out = concat(count, v);"""
    program = compll.compile_text(encoder(body), "foo")
    found = [one.function for one in walk(program.encode.sizes[1]) if isinstance(one, nodes.Math)]
    assert found.count("max") == length.count("max") + is_held
