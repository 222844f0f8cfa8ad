# SPDX-License-Identifier: Apache-2.0
"""Defaults and ranges that no width and no block can have; what can work is let be."""

import pytest

import compll

TEXT = """
param A {{ int k {k}; int m = 3; }}

void AEncode(float* gradient, uint8* out, int k, int m) {{
    out = concat({field});
}}
"""
WIDTH = "map(gradient, [&](float x) -> uint<{}> {{ return x; }})"
BLOCK = "block_reduce(gradient, {}, 0, sum)"


def compiled(k, field, of):
    return compll.compile_text(TEXT.format(k=k, field=field.format(of)), "a")


@pytest.mark.parametrize(
    ("k", "field", "of"),
    [
        ("in [0, 16]", WIDTH, "k"),
        ("in [1, 64] = 16", WIDTH, "k"),
        ("in [17, 20]", WIDTH, "k - 16"),
        ("in [17, 20] = 19", WIDTH, "k / m"),
        ("", WIDTH, "k + m"),  # without a default a call says what it is
        ("in [1, 16]", BLOCK, "k"),
        ("in [1, 8] = 5", BLOCK, "1 << k"),
        ("in [100, 200] = 128", BLOCK, "(k > 100 ? k : 1)"),
    ],
)
def test_what_can_work_is_accepted(k, field, of):
    assert compiled(k, field, of).encode is not None


@pytest.mark.parametrize(
    ("k", "field", "of", "message"),
    [
        ("in [17, 20]", WIDTH, "k", "no number in [17, 20] is from 1 to 16"),
        ("= 20", WIDTH, "k - m", "must be from 1 to 16. Received: 17, by default"),
        ("in [129, 255]", BLOCK, "k", "no number in [129, 255] is a power of two from 16 to 1024"),
        ("= 16", BLOCK, "k * m", "must be a power of two from 16 to 1024. Received: 48"),
    ],
)
def test_what_no_call_can_have_is_refused(k, field, of, message):
    with pytest.raises(compll.CompileError) as caught:
        compiled(k, field, of)
    [found] = caught.value.diagnostics
    assert found.code == "E602" and message in found.message
    assert str(caught.value).splitlines()[3].startswith("2 | param A")
