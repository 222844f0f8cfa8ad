# SPDX-License-Identifier: Apache-2.0
"""The CUDA passes of robust aggregation as a library for this CPU, with what a benchmark needs."""

import functools
from pathlib import Path

from tests.compll.emulation import FLAGS, make

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("tf_hips/cc/cuda/robust.cu", "tf_hips/cc/cuda/library.cu", "benchmarks/gpu/device.cu")
# Of the networks for registers, a few: all of them take twice as long to compile.
_SIZES = "#define TF_HIPS_ROBUST_SIZES 1, 2, 3, 6, 15, 24\n"


@functools.cache
def build(*, is_full: bool = False) -> Path:
    """Path of the library, from the cache. `is_full`: with every network."""
    source = "" if is_full else _SIZES
    source += "".join(f'#include "{name}"\n' for name in _SOURCES)
    # Not in a hurry: networks run for longer than they take to compile.
    return make([*FLAGS, "-O1"], source, "robust", *(ROOT / name for name in _SOURCES))
