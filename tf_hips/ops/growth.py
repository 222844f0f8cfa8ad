# SPDX-License-Identifier: Apache-2.0
"""Whether error feedback around a codec diverges, seen by trying.

Of the algorithms of REGISTRY it is known from which value of a parameter on they lose more than
they are given. A specification that a user loads cannot say such a thing of itself, so its codec is
tried once, on noise. The rule knows no false alarm: a codec is refused if after STEPS steps the
residual is larger than all gradients together, which is worse than to send nothing at all, and
still grows. The residual of what loses less than it is given cannot become that large, however late
it sends. One that diverges more slowly than a sum of gradients grows is not found: over that many
steps it looks like a sparse codec that converges late.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

from tf_hips.errors import PacketError
from tf_hips.ops import native

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

ELEMENTS = 1000
STEPS = 64


@functools.cache
def diverges(codec: "Compressor") -> bool:
    """Whether residuals of error feedback around `codec` are seen to grow without bound.

    Takes a few milliseconds, once for each codec.

    Raises:
        ValueError: its Decode refuses what its Encode has made.
    """
    noise = np.random.default_rng(0)
    residual = np.zeros(ELEMENTS, np.float32)
    norms, given = [], 0.0
    for step in range(STEPS):
        gradient = noise.standard_normal(ELEMENTS, np.float32)
        given += float(np.linalg.norm(gradient))
        total = gradient + residual
        key = native.Key(seed=1, step=step, tensor_id=0)
        packet = native.encode(codec, total, key)
        with np.errstate(over="ignore", invalid="ignore"):
            residual = total - _decoded(codec, packet)
        norms.append(float(np.linalg.norm(residual.astype(np.float64))))
        if not np.isfinite(norms[-1]):
            return True
    return norms[-1] > given and norms[-1] > norms[STEPS // 2]


def _decoded(codec: "Compressor", packet: native.Bytes) -> native.Floats:
    try:
        return native.decode(codec, packet, ELEMENTS)
    except PacketError as error:
        raise ValueError(
            "`error_feedback` must wrap a codec whose Decode takes what its Encode makes. "
            f"Received: {codec.text}, which refuses a packet of its own ({error})"
        ) from error
