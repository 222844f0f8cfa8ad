# SPDX-License-Identifier: Apache-2.0
"""What is known of floats before they are computed: all of them are in their range, and codes are
held to the largest one unless none is above it."""

import numpy as np
import pytest

import compll
from compll.ir import nodes
from compll.ir.float_ranges import FloatRange, float_range, never_above_top
from compll.ir.ranges import Ranges
from compll.packet import PREFIX
from compll.passes.fold import fold
from compll.passes.inline import inline
from tests.compll.support import encoder

ALL = (-np.inf, np.inf)
UNIT = 1 - 2.0**-16  # the largest noise
# g is any float, c 0 to 255, u noise from 0 to 1, y noise from -2 to -1, w is u but for what is
# small; k parameters from 1 to 4.
LETS = """float g = gradient[i]; float c = few[i]; float u = random<float>(0, 1); float y = u - 2;
          float w = u < 0.25 ? 0.0 : u; int far = few[i] - 16777217;
          float a = abs(g); """
NUMBERS = {
    "g": (*ALL, True),
    "2.5": (2.5, 2.5, False),
    "-u": (-UNIT, 0, False),
    "1 - c": (-254, 1, False),
    "c - u": (-UNIT, 255, False),
    "u * y": (-2 * UNIT, 0, False),
    "y * y": ((UNIT - 2) ** 2, 4, False),
    "u * 3 + k": (1, 3 * UNIT + 4, False),
    "far": (-(2.0**24), -(2.0**24) + 254, False),  # the least one, -2^24 - 1, is no float
    "c * 1e38 * 0.5": (0, np.inf, False),
    "c * 1e38 - c * 1e38": (*ALL, True),  # infinity less infinity
    "c * 1e38 * c": (*ALL, True),  # infinity times 0
    "c * 1e38 + g": (*ALL, True),
    "c * 1e38 - c": (-255, np.inf, False),
    "1 / y": (-np.inf, np.inf, True),  # not done: numbers below 0
    "1 / (u + 1)": (1 / (UNIT + 1), 1, False),
    "c / (u + 1)": (0, 255, False),
    "g / (u + 1)": (*ALL, True),
    "1 / u": (*ALL, True),
    "abs(g)": (0, np.inf, True),
    "abs(y)": (2 - UNIT, 2, False),
    "a <= 3.4028234e38 ? a : 0.0": (0, np.finfo(np.float32).max, False),
    "a > 3.4028234e38 ? 1.0 : a": (0, np.finfo(np.float32).max, True),
    "abs(u - 0.75)": (0, 0.75, False),
    "g < 2 ? 3.0 : g": (2, np.inf, True),
    "g >= 2 ? g : 1.0": (1, np.inf, False),
    "g > 2 ? 2.0 : g": (-np.inf, 2, True),
    "g <= 2 ? g : 0.0": (-np.inf, 2, False),
    "u > 0 ? 1 / u : 0": (0, np.inf, False),
    "w > 0 ? 1 / w : 0": (0, 4, False),
    "y > 0 ? 1 / y : 0": (-np.inf, np.inf, True),  # none is: nothing is made of that
    "k == 1 ? u : c + 1": (0, 256, False),
    "c + g": (*ALL, True),
    "g == g ? g : 0": (*ALL, False),
    "u == u ? u : 0": (0, UNIT, False),
    "y == y ? y : 0": (-2, 0, False),
    # The second operand is what NaN gives.
    "min(g, 4)": (-np.inf, 4, False),
    "min(4, g)": (-np.inf, 4, True),
    "max(g, -1)": (-1, np.inf, False),
    "max(g * g, c)": (0, np.inf, False),
    "min(max(g, 3), 5)": (3, 5, False),
    "max(min(g, 7), 9)": (9, 9, False),
    "max(min(9, g), 7)": (7, 9, False),
    "max(c, min(4, g)) + 1": (1, 256, True),
    "min(max(c, min(4, g)), 300)": (0, 300, False),  # c and less, but for NaN
}
CODES = {
    ("uint8", "c + u"): True,  # up to 255.99998
    ("uint8", "c + 1"): False,
    ("uint8", "g"): False,
    ("uint<k>", "u * 1.9"): True,
    ("uint<k>", "u + 1.5"): False,  # of one bit
    ("uint<k>", "min(g, (1 << k) - 1)"): True,
    ("uint<k>", "min(g, 1 << k)"): False,
}


def written(kind: str, text: str) -> tuple[compll.Program, nodes.Elementwise, Ranges]:
    """A program that computes this, the loop that does, and what is known of its numbers."""
    body = f"""uint8* few = map(gradient, [&](float g) -> uint8 {{ return g * 9 + 100; }});
    {kind}* v = map(range(gradient.size), [&](int i) -> {kind} {{ {LETS} return {text}; }});
    out = concat(few, v);"""
    params = "param Foo { int k in [1, 4] = 2; }\n"
    program = compll.compile_text(params + encoder(body, ", int k"), "foo")
    folded = fold(inline(program)).encode
    part = folded.values[-1]
    part = {let.var: let.value for let in folded.lets}.get(getattr(part, "var", None), part)
    ranges = Ranges(program.params)
    for let in part.lets:
        ranges.learn(let)
    return program, part, ranges


@pytest.mark.parametrize("text", NUMBERS)
def test_floats_are_in_their_range(text):
    program, part, ranges = written("float", text)
    low, high, has_nan = NUMBERS[text]
    found = float_range(part, part.value, ranges)
    assert found == FloatRange(*(float(np.float32(end)) for end in (low, high)), has_nan)
    x = np.random.default_rng(1).normal(scale=9, size=1200).astype(np.float32)
    x[:8] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, 0, -0.0]
    for k in (1, 4):
        body = compll.Reference(program, k=k).encode(x, seed=3)[PREFIX.size :]
        values = body[x.size :].view(np.float32)
        is_number = values == values
        assert has_nan or is_number.all()
        assert (values[is_number] >= low).all() and (values[is_number] <= high).all()


@pytest.mark.parametrize(("kind", "text"), CODES)
def test_codes_are_held_unless_none_is_above_the_largest(kind, text):
    _, part, ranges = written(kind, text)
    assert never_above_top(part, part.value, ranges) == CODES[kind, text]
