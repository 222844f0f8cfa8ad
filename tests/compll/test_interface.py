# SPDX-License-Identifier: Apache-2.0
"""Parameters, widths and arguments: both back ends refuse the same, and names cannot clash."""

import re

import numpy as np
import pytest

import compll
from compll.backends import tf_op
from compll.frontend.interface import RESERVED
from tests.compll.support import compiled, encoder, spec

pytestmark = pytest.mark.heavy  # runs of g++ where the cache is empty

X = np.arange(1, 10, dtype=np.float32)


def both(text, **params):
    program = compll.compile_text(text, "foo")
    return compll.Reference(program, **params), compiled(program, **params)


def test_no_parameter_clashes_with_what_operations_have():
    """TensorFlow refuses an operation in which two arguments or attributes share a name."""
    used = re.findall(r'\.(?:Input|Output|Attr)\("(\w+):', tf_op.emit(spec("onebit")))
    assert {"gradient", "sum", "num_elements"} <= set(used)
    # The wrappers in Python have these arguments besides.
    for name in {*used, *RESERVED, "name", "ctx", "lambda", "class", "None"}:
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_text(
                f"void FooEncode(float* g, uint8* o, uint8 {name}) {{ o = concat(g); }}", "foo"
            )
        codes = {item.code for item in caught.value.diagnostics}
        assert codes == {"E603"} or codes <= {"E101", "E103"}, name


def test_parameters_with_similar_names():
    body = """
    float* y = map(gradient, [&](float g) -> float { return g * a + a_ * a__; });
    out = concat(y);"""
    codecs = both(encoder(body, ", float a, float a_, float a__"), a=2, a_=3, a__=0.5)
    for codec in codecs:
        np.testing.assert_array_equal(codec.encode(X)[16:].view(np.float32), X * 2 + 1.5)


CLIP = """
param Foo { float clip in [0, 0.1] = 0.1; }
void FooEncode(float* gradient, uint8* out, float clip) {
    float* y = map(gradient, [&](float g) -> float { return min(g, clip); });
    out = concat(clip, y);
}
void FooDecode(uint8* out, float* gradient, float clip) {
    extract(out, clip, gradient);
}"""


def test_float_parameters_are_what_float32_holds():
    rounded = float(np.float32(0.1))
    reference, codec = both(CLIP)
    assert reference.params == {"clip": rounded}
    assert f"{rounded!r}" in compll.generate(reference.program)["foo.codec.cc"]
    hashes = {reference.codec_hash, codec.codec_hash}
    for value in (0.1, rounded):
        hashes |= {given.codec_hash for given in both(CLIP, clip=value)}
    assert len(hashes) == 1
    for given in (reference, codec):
        packet = given.encode(X)
        np.testing.assert_array_equal(reference.decode(packet, X.size), np.float32(0.1))
        np.testing.assert_array_equal(codec.decode(packet, X.size), np.float32(0.1))
    for wrong in (0.1 + 1e-7, 1e300, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="`clip` must be in"):
            both(CLIP, clip=wrong)


LARGEST = CLIP.replace("0.1", "3.40282347e+38")


def test_the_largest_float_is_one_as_messages_spell_it():
    """In a literal, a range, a default and a value; what rounds to infinity is none."""
    largest = float(np.finfo(np.float32).max)
    assert largest < 3.40282347e38
    reference = compll.Reference(compll.compile_text(LARGEST, "foo"), clip=3.40282347e38)
    [param] = reference.program.params
    assert (param.high, param.default, reference.params["clip"]) == (largest,) * 3
    for number in ("3.40282347e38", "3.4028235e38", "-3.4028235677973362e38"):
        compll.compile_text(encoder(f"float a = {number}; out = concat(a);"), "foo")
    for number in ("3.4028235677973367e38", "1e999"):
        with pytest.raises(compll.CompileError, match=r"E308.*at most 3.40282347e\+38"):
            compll.compile_text(encoder(f"float a = {number}; out = concat(a);"), "foo")
        with pytest.raises(ValueError, match=r"must be in \[0, 3.40282347e\+38\]"):
            compll.Reference(reference.program, clip=float(number))


@pytest.mark.parametrize("width", [0, 17, 255])
def test_widths_are_checked_even_if_nothing_has_them(width):
    body = "uint<b> q = 3; uint<b> r; out = concat(gradient);"
    for codec in both(encoder(body, ", uint8 b"), b=width):
        with pytest.raises(ValueError, match=r"width|out of range"):
            codec.encode(X)
        with pytest.raises(ValueError, match=r"width|out of range"):
            codec.wire_bytes(9)
    for codec in both(encoder(body, ", uint8 b"), b=16):
        assert codec.encode(X).size == 16 + 4 * X.size == codec.wire_bytes(9)


BAD_CALLS = [
    lambda c: c.encode(X, step=2**32),
    lambda c: c.encode(X, step=1.5),
    lambda c: c.encode(X, seed=-1),
    lambda c: c.encode(X, seed=2**64),
    lambda c: c.encode(X, tensor_id=True),
    lambda c: c.encode(X, offset=2**63),
    lambda c: c.encode(X.astype(np.float64)),
    lambda c: c.encode(X.reshape(3, 3)),
    lambda c: c.encode([1.0]),
    lambda c: c.decode(c.encode(X).astype(np.int8), 9),
    lambda c: c.decode(c.encode(X).astype(np.float32), 9),
    lambda c: c.decode(c.encode(X).reshape(1, -1), 9),
    lambda c: c.decode(c.encode(X), -1),
    lambda c: c.decode(c.encode(X), 2**41),
    lambda c: c.decode(c.encode(X), 2**40),
    lambda c: c.wire_bytes(-1),
    lambda c: c.wire_bytes(1.5),
    lambda c: c.wire_bytes(2**41),
]


@pytest.mark.parametrize("call", BAD_CALLS)
def test_back_ends_refuse_the_same_arguments(call):
    program = spec("onebit")
    messages = []
    for codec in (compll.Reference(program), compiled(program)):
        with pytest.raises(ValueError, match="must") as caught:
            call(codec)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_wire_bytes_of_large_tensors():
    program = spec("onebit")
    for codec in (compll.Reference(program), compiled(program)):
        for n in (0, 1, 2**20, 2**20 + 1):
            parts = [16 + codec.body_bytes(size) for size in compll.packet.packet_sizes(n)]
            assert codec.wire_bytes(n) == sum(parts)
        assert codec.wire_bytes(2**40) == 2**20 * codec.wire_bytes(2**20)


def test_one_field_of_a_packet_is_the_gradient():
    with pytest.raises(compll.CompileError, match=r"error\[E505\]: `g` must be assigned once"):
        compll.compile_text(
            "void XEncode(float* g, uint8* c) { c = concat(g, g); }"
            "void XDecode(uint8* c, float* g) { extract(c, g, g); }",
            "x",
        )
