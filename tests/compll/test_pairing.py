# SPDX-License-Identifier: Apache-2.0
"""A parameter that Decode extracts: Encode must put its value there, in whatever words."""

import numpy as np
import pytest

import compll
from compll.backends.reference import Reference

TEXT = """
param A {{ uint8 bits in [1, 8] = 4; float clip = 2; }}

void AEncode(float* gradient, uint8* out, uint8 bits, float clip) {{
    lambda_func same = [&](int x) -> uint4 {{ int y = x; return y; }}
    {before}
    out = concat({bits}, {clip}, gradient);
}}

void ADecode(uint8* packet, float* gradient, uint8 bits, float clip) {{
    extract(packet, bits, clip, gradient);
}}
"""


def text(before="", bits="bits", clip="clip"):
    return TEXT.format(before=before, bits=bits, clip=clip)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"before": "uint8 b = bits; int c = b; uint8 d = c;", "bits": "d"},
        {"before": "float f = bits; uint4 low = f; uint8 d = low;", "bits": "d"},
        {"before": "uint8 d = same(same(bits));", "bits": "d"},
        {"before": "float c = clip;", "clip": "c"},
    ],
    ids=["itself", "variables", "conversions", "lambdas", "float"],
)
def test_a_parameter_may_go_through_what_keeps_its_value(given):
    codec = Reference(compll.compile_text(text(**given), "a"), bits=8, clip=0.1)
    x = np.float32([1, -2])
    assert np.array_equal(codec.decode(codec.encode(x), 2), x)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"before": "uint8 d = bits + 1;", "bits": "d"}, "d"),
        ({"before": "uint<3> low = bits; uint8 d = low;", "bits": "d"}, "d"),
        ({"before": "int whole = clip; float c = whole;", "clip": "c"}, "c"),
        ({"clip": "clip * 2"}, "clip * 2"),
        ({"before": "uint8 d = gradient.size;", "bits": "d"}, "d"),
    ],
    ids=["sum", "narrow", "rounded", "product", "size"],
)
def test_anything_else_is_refused(given, shown):
    with pytest.raises(compll.CompileError, match="does not concatenate the parameter") as caught:
        compll.compile_text(text(**given), "a")
    [found] = caught.value.diagnostics
    assert found.code == "E506" and f"`{shown}` stands there, on line 7" in found.notes[0]


@pytest.mark.parametrize("most", [2**24, 2**24 + 1])
def test_a_float_keeps_integers_up_to_2_to_the_24(most):
    given = text("float f = bits; uint32 d = f;", "d").replace("uint8 bits", "uint32 bits")
    given = given.replace("[1, 8]", f"[0, {most}]")
    if most == 2**24:
        assert compll.compile_text(given, "a").decode.fields[0].equals is not None
        return
    with pytest.raises(compll.CompileError, match="does not concatenate the parameter"):
        compll.compile_text(given, "a")


def test_a_decode_alone_is_not_compared():
    decode = text()[text().index("void ADecode") :]
    assert compll.compile_text(decode, "a").decode.fields[0].equals is not None
