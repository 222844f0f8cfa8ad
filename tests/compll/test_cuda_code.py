# SPDX-License-Identifier: Apache-2.0
"""What nvcc makes of kernels, looked at in PTX: the bits of zeros, and what lies in memory.

To nvcc `x < 0.0f ? x : 0.0f` is min.f32, to which -0 is less than 0; the language has one zero.
"""

import re
import shutil
import subprocess

import numpy as np
import pytest

import compll
from compll.backends import cuda
from compll.backends.toolchain import NVCC_FLAGS, include_folder
from compll.passes import optimise
from tests.compll.emulation import Emulated

pytestmark = pytest.mark.heavy  # a run of g++, and one of nvcc

TEXT = """
    void ZerosEncode(float* gradient, uint8* out) {
        float* a = map(gradient, [&](float x) -> float { return x < 0 ? x : 0.0; });
        float* b = map(gradient, [&](float x) -> float { return min(x, 0.0); });
        float* c = map(gradient, [&](float x) -> float { float z = -0.0; return 0 < x ? x : z; });
        float* d = map(gradient, [&](float x) -> float { return max(x, -0.0) + min(x, 3.0); });
        float* e = map(gradient, [&](float x) -> float { int n = x < 0; return n == 1 ? x : 0.0; });
        float f = reduce(map(gradient, [&](float x) -> float { return min(x, 0.0); }), -9.0, max);
        float* g = map(gradient, [&](float x) -> float { return f > -0.0 ? f : -0.0; });
        uint4* h = map(gradient, [&](float x) -> uint4 { return x + random<float>(0, 1); });
        int* places = map(range(4), [&](int i) -> int { return random<int>(0, gradient.size); });
        float* i = map(places, [&](int place) -> float { return gradient[place]; });
        out = concat(f, a, b, c, d, e, g, h, i);
    }
"""
VALUES = (0.0, -0.0, 1.0, -1.0, 5.0, np.nan, np.inf, -np.inf, 1e-42, -1e-42)


def test_emulated_kernels_choose_as_the_reference():
    program = compll.compile_text(TEXT, "zeros")
    x = np.resize(np.array(VALUES, np.float32), 1500)
    packets, _ = Emulated(program).encode(x)
    np.testing.assert_array_equal(packets, compll.Reference(program).encode(x))


def bounded_by(function: str, bits: str, text: str) -> list[str]:
    """The minima or maxima whose last operand is a constant, itself or in a register."""
    found = []
    for kernel in text.split(".entry "):
        held = re.findall(rf"mov\.f32\s+(%f\d+), 0f{bits};", kernel)
        names = "|".join([f"0f{bits}", *map(re.escape, held)])
        found += re.findall(rf"{function}\.f32.*, (?:{names});", kernel)
    return found


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here: not compiled")
def test_what_nvcc_makes_of_it(tmp_path):
    file, made = tmp_path / "zeros.cu", tmp_path / "zeros.ptx"
    file.write_text(cuda.emit(optimise(compll.compile_text(TEXT, "zeros"))), encoding="ascii")
    flags = [flag for flag in NVCC_FLAGS if "gencode" not in flag]
    command = ["nvcc", *flags, "-arch=sm_90", f"-I{include_folder()}", "-ptx"]
    subprocess.run([*command, "-o", str(made), str(file)], check=True, timeout=55)
    text = made.read_text()
    assert bounded_by("min", "40400000", text)  # of 3 it may be: no bits depend on it
    assert not bounded_by("min", "00000000", text)
    assert not bounded_by("max", "80000000", text)
    assert ".ftz" not in text
    assert "fma.rn.f32" not in text
    assert ".local." not in text  # arrays of a thread are registers
