# SPDX-License-Identifier: Apache-2.0
"""Loops that g++ must make vector code of, as it says itself: else they take ten times as long."""

import platform
import re
import subprocess

import numpy as np
import pytest

import compll
from compll.backends import toolchain
from tests.compll.support import assert_same_floats, compiled

pytestmark = [
    pytest.mark.heavy,  # runs of g++
    pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for registers of x86-64"),
]

LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")
FUNCTION = """
#include "tf_hips/cc/runtime/functions.h"
void run(const float* __restrict__ in, float* __restrict__ out) {
"""
CHOICES = """
void TableEncode(float* gradient, uint8* packet) {
    uint4* codes = map(gradient, [&](float g) -> uint4 {
        float x = abs(g);
        int c = x < 1 ? 0 : x < 2 ? 1 : x <= 3 ? 2 : x < 5 ? 3 : x < 8 ? 4 : x < 13 ? 5 : 6;
        return (g < 0 ? 8 : 0) | c;
    });
    packet = concat(codes);
}
void TableDecode(uint8* packet, float* gradient) {
    uint4* codes;
    extract(packet, codes);
    gradient = map(codes, [&](uint4 code) -> float {
        int c = code & 7;
        float low = c < 2 ? (c < 1 ? 0 : 1.5) : c < 3 ? 2.5 : 4;
        float x = c == 6 ? 13 : c == 5 ? 10 : c == 4 ? 6.5 : low > 3 ? low + 1 : -1;
        return (code & 8) != 0 ? -x : x;
    });
}
"""

# Two values of one loop that have a choice in common, which the loop makes once.
COMMON = """
void CommonEncode(float* gradient, uint8* packet) {
    uint4* codes = map(gradient, [&](float g) -> uint4 { return g < 0 ? 8 : abs(g) * 2; });
    uint32 largest = reduce(map(gradient, [&](float x) -> int {
        int a = x < 1 ? 0 : x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 3 : x < 16 ? 4 : 5;
        int b = x < 0 ? 9 : x < 1 ? 0 : x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 3 : x < 16 ? 4 : 5;
        return a * 16 + b;
    }), 0, max);
    packet = concat(largest, codes);
}
void CommonDecode(uint8* packet, float* gradient) {
    uint32 largest; uint4* codes;
    extract(packet, largest, codes);
    gradient = map(codes, [&](uint4 x) -> float {
        int a = x < 1 ? 0 : x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 3 : x < 9 ? 4 : 5;
        float b = 0;
        if (x > 0) { b = x < 1 ? 0 : x < 2 ? 1 : x < 4 ? 2 : x < 8 ? 3 : x < 9 ? 4 : 5; }
        return a * b * b + a + largest;
    });
}
"""


def vectorised(source, tmp_path, level):
    """The lines of a source with loops that became vector code."""
    if b"Free Software Foundation" not in toolchain.version(toolchain.compiler()):
        pytest.skip("asks g++ what it made of loops")
    file = tmp_path / "loops.cc"
    file.write_text(source, encoding="ascii")
    command = [*toolchain.compiler(), *toolchain.FLAGS, f"-march={level}", "-fopt-info-vec"]
    # What a library has for one machine alone is made once.
    command += ["-DTF_HIPS_ONE_MACHINE", '-DTF_HIPS_CODEC_ID=""', "-DTF_HIPS_STANDALONE_CODEC"]
    command += [f"-I{toolchain.include_folder()}", "-S", "-o", "/dev/null", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    told = rf"^{re.escape(str(file))}:(\d+):\d+: optimized: loop vectorized"
    return {int(line) for line in re.findall(told, done.stderr, re.MULTILINE)}


@pytest.mark.parametrize("level", LEVELS)
def test_functions(level, tmp_path):
    calls = ["tf_hips::exp2_exact(in[j])", "tf_hips::log2_exact(in[j])"]
    calls += [f"in[j] > 0.0f ? {call} : 1.0f" for call in calls]
    loops = [f"for (int j = 0; j < 256; ++j) out[j] = {call};" for call in calls]
    source = "\n".join([FUNCTION, *loops, "}"])
    lines = [number for number, line in enumerate(source.splitlines(), 1) if line in loops]
    assert vectorised(source, tmp_path, level) == {*lines}


def test_long_choices(tmp_path):
    """What E101 says in place of a table; g++ takes up to four values by itself."""
    program = compll.compile_text(CHOICES, "table")
    source = compll.generate(program)["table.codec.cc"]
    lines = source.splitlines()
    chosen = [number for number, line in enumerate(lines) if line.count(" ? ") and "{" not in line]
    loops = [max(k for k in range(number) if "for (int64_t j" in lines[k]) for number in chosen]
    assert len({*loops}) >= 4  # of the encoder, and for each mode of the decoder
    assert {loop + 1 for loop in loops} <= vectorised(source, tmp_path, "x86-64-v3")
    check(program)


def test_choices_in_common():
    check(compll.compile_text(COMMON, "common"))


def check(program):
    x = np.linspace(-20, 20, 4001, dtype=np.float32)
    packet = compll.Reference(program).encode(x)
    assert compiled(program).encode(x).tobytes() == packet.tobytes()
    expected = compll.Reference(program).decode(packet, x.size)
    assert_same_floats(compiled(program).decode(packet, x.size), expected)
