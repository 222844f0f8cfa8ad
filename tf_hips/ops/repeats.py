# SPDX-License-Identifier: Apache-2.0
"""How many times over a codec with state sends what it is given, seen by trying.

A codec that keeps what it has not sent yet sends a gradient once, if late. One that keeps a
momentum sends it 1 / (1 - momentum) times, which is right for gradients, and wrong for what is to
arrive as it is. A specification that a user loads cannot say which of the two its states are, so it
is tried once: one gradient, and zeros after it.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

from tf_hips.ops import native

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

ELEMENTS = 1000
ZEROS = 64


@functools.cache
def times_sent(codec: "Compressor") -> float:
    """What is decoded of one gradient and of the zeros after it, as a multiple of that gradient.

    Takes a few milliseconds, once for each codec.

    Args:
        codec: one with state.

    Returns:
        1 for what sends all of it once. Less if some has not been sent yet, and also of a momentum
        that is; NaN for a codec that decodes what is not finite.

    Raises:
        PacketError: its Decode refuses what its Encode has made.
    """
    gradient = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32)
    state = np.zeros(codec.state_shape([ELEMENTS]), np.float32)
    sent = np.zeros(ELEMENTS)
    for step in range(1 + ZEROS):
        given = np.zeros_like(gradient) if step else gradient
        key = native.Key(seed=1, step=step, tensor_id=0)
        packet = native.encode(codec, given, key, state)
        with np.errstate(over="ignore", invalid="ignore"):
            sent += native.decode(codec, packet, ELEMENTS)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(sent @ gradient / (gradient @ gradient))
