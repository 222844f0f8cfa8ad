# SPDX-License-Identifier: Apache-2.0
"""Speed of the codecs on this CPU, beside the speed of its memory in the same run.

For each codec and size: encode, encode with error feedback, decode, and a merge of four packets,
through the native library (what a server calls), in GB/s of float32 gradient. The bound is
`numpy.copyto` of the same array: a codec that reads a gradient once and writes few bytes can be
faster than it, one that makes two passes cannot be much faster.
"""

import functools
import sys
from collections.abc import Callable

import numpy as np

from benchmarks import harness
from tf_hips import ops
from tf_hips.ops import native

SIZES = (2**12, 2**16, 2**20, 2**24)
CODECS = ("fp32", "onebit", "terngrad(bitwidth=2)", "terngrad(bitwidth=4)")
NUM_MERGED = 4


def main() -> int:
    """Measures every codec at every size and stores the table."""
    rows = []
    for size in SIZES:
        gradient = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        target = np.empty_like(gradient)
        copy = _gbps(size, functools.partial(np.copyto, target, gradient))
        for text in CODECS:
            rows.append(
                {"codec": text, "elements": size, "copy": copy, **_row(text, gradient, target)}
            )
    harness.write(
        "kernels",
        rows,
        command="make bench",
        note="GB/s of float32 gradient, median of 9 runs; `copy` is numpy.copyto in the same run.",
    )
    return 0


def _row(text: str, gradient: np.ndarray, target: np.ndarray) -> dict[str, float]:
    size = gradient.size
    plain, feedback = ops.parse(text), ops.parse(f"error_feedback({text})")
    key = native.Key(seed=1, step=0, tensor_id=0)
    residual = np.zeros_like(gradient)
    packet = native.encode(plain, gradient, key)
    packets = [packet] * NUM_MERGED
    return {
        "encode": _gbps(size, lambda: native.encode(plain, gradient, key)),
        "encode with feedback": _gbps(
            size, lambda: native.encode(feedback, gradient, key, residual)
        ),
        "decode": _gbps(size, lambda: native.decode(plain, packet, size, out=target)),
        f"merge of {NUM_MERGED}": _gbps(
            size, lambda: native.merge(plain, packets, size, out=target)
        ),
        "ratio": round(4 * size / packet.nbytes, 1),
    }


def _gbps(size: int, call: Callable[[], object]) -> float:
    _, median, _ = harness.timed(call)
    return round(4 * size / median / 1e9, 2)


if __name__ == "__main__":
    sys.exit(main())
