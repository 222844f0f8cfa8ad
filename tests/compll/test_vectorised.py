# SPDX-License-Identifier: Apache-2.0
"""Loops that g++ must make vector code of, as it says itself: else they take ten times as long."""

import platform
import re
import subprocess

import pytest

from compll.backends import toolchain

pytestmark = [
    pytest.mark.heavy,  # runs of g++
    pytest.mark.skipif(platform.machine() != "x86_64", reason="asks for registers of x86-64"),
]

LEVELS = ("x86-64", "x86-64-v3", "x86-64-v4")
FUNCTION = """
#include "tf_hips/cc/runtime/functions.h"
void run(const float* __restrict__ in, float* __restrict__ out) {
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
