# SPDX-License-Identifier: Apache-2.0
"""Whether error feedback around a codec diverges, seen by trying.

Of the algorithms of REGISTRY it is known from which value of a parameter on they lose more than
they are given. A specification that a user loads cannot say such a thing of itself, so its codec is
tried once, on noise, for tensors of two sizes: a few elements over many steps, and a whole chunk
over few. What a codec loses that has one norm for all elements grows with their number, so one that
keeps up with a small tensor may diverge in a large one.

A codec is refused if at the end the residual is larger than all gradients together, which is worse
than to send nothing at all, and has grown by more than their sum since half of the steps. The
residual of what loses less than it is given cannot become that large, however late it sends; that
of a fixed grain that is far larger than the noise can, and then grows no more. One that diverges
more slowly than a sum of gradients grows is not found: over that many steps it looks like a sparse
codec that converges late.
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
CHUNK_STEPS = 16
# After so many steps of a chunk, which take long, a residual smaller than all gradients is believed
# to stay so: where the size is what makes it grow, it is larger from the first step on.
_FIRST_STEPS = 4
# Each gradient is the one before, moved by that many elements: new noise would take longer to make
# than many a codec takes.
_SHIFT = 997


@functools.cache
def diverges_at(codec: "Compressor") -> int | None:
    """How many elements a tensor has whose residuals error feedback is seen to let grow for ever.

    Takes about as long as four encodings and decodings of a chunk, once for each codec.

    Returns:
        The smaller size of the two where they do; None: they do at neither.

    Raises:
        ValueError: its Decode refuses what its Encode has made.
    """
    from tf_hips.ops.compressor import CHUNK

    if _diverges(codec, ELEMENTS, STEPS, STEPS):
        return ELEMENTS
    return CHUNK if _diverges(codec, CHUNK, CHUNK_STEPS, _FIRST_STEPS) else None


def _diverges(codec: "Compressor", elements: int, steps: int, first_steps: int) -> bool:
    """The same for one size; ends after `first_steps` or more if the residual is small then."""
    generator = np.random.default_rng(0)
    noise = generator.standard_normal(elements + steps * _SHIFT, np.float32)
    residual = np.zeros(elements, np.float32)
    norms, given = [], [0.0]  # `given[n]`: of n gradients together
    for step in range(steps):
        gradient = noise[step * _SHIFT :][:elements]
        given.append(given[-1] + float(np.linalg.norm(gradient)))
        total = gradient + residual
        key = native.Key(seed=1, step=step, tensor_id=0)
        packet = native.encode(codec, total, key)
        with np.errstate(over="ignore", invalid="ignore"):
            residual = total - _decoded(codec, packet, elements)
        norms.append(float(np.linalg.norm(residual.astype(np.float64))))
        if not np.isfinite(norms[-1]):
            return True
        if len(norms) >= first_steps and norms[-1] <= given[-1]:
            return False
    half = steps // 2
    return norms[-1] * given[half + 1] > norms[half] * given[-1]


def _decoded(codec: "Compressor", packet: native.Bytes, elements: int) -> native.Floats:
    try:
        return native.decode(codec, packet, elements)
    except PacketError as error:
        raise ValueError(
            "`error_feedback` must wrap a codec whose Decode takes what its Encode makes. "
            f"Received: {codec.text}, which refuses a packet of its own ({error})"
        ) from error
