# SPDX-License-Identifier: Apache-2.0
"""Each kernel of codecs on 16 Mi floats once or twice, for a profiler.

python3 -m benchmarks.gpu --arch sm_90 --codecs tbq        # builds the library
ncu --csv --page raw --section InstructionStats ... python3 -m benchmarks.gpu.once tbq qsgd
"""

import sys

import numpy as np

import compll
from benchmarks.gpu.binding import ADD, FINE, Key
from benchmarks.gpu.machine import ROOT, Gpu, GpuCodec, GpuError, Memory

SIZE = 1 << 24
KEY = Key(1, 2, 3, 0)


def once(gpu: Gpu, name: str) -> None:
    """Encodes, with error feedback too, and decodes, to zeros and to a sum."""
    x = np.random.default_rng(0).standard_normal(SIZE, dtype=np.float32)
    gradient, residual, out = (Memory(gpu, SIZE, np.float32).put(x) for _ in range(3))
    codec = GpuCodec(gpu, compll.compile_spec(ROOT / f"tf_hips/ops/specs/{name}.pse"), SIZE)
    if not codec.num_states:
        codec.encode_to(codec.packets, gradient.at, KEY, residual)
    codec.encode_to(codec.packets, gradient.at, KEY)
    if (
        codec.decode([codec.packets], out) != FINE
        or codec.decode([codec.packets], out, ADD) != FINE
    ):
        raise GpuError(f"packets of {name} must be in order")
    codec.free()
    for memory in (gradient, residual, out):
        memory.free()


if __name__ == "__main__":
    GPU = Gpu()
    for NAME in sys.argv[1:]:
        once(GPU, NAME)
