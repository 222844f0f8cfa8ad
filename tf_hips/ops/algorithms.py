# SPDX-License-Identifier: Apache-2.0
"""The compressors by name: one function per algorithm, and the wrappers.

    tf_hips.error_feedback(tf_hips.onebit())

Arguments are checked here, before any process starts; the facts behind the checks are in
ops.registry.
"""

from tf_hips.ops.compressor import ERROR_FEEDBACK, Compressor
from tf_hips.ops.registry import REGISTRY, Algorithm, Parameter

__all__ = ["REGISTRY", "Algorithm", "Parameter", "error_feedback", "fp32", "onebit", "terngrad"]


def fp32() -> Compressor:
    """The identity: float32 values as they are. The slow tier's codec without compression."""
    return Compressor("fp32")


def onebit() -> Compressor:
    """1-bit SGD (Seide et al., 2014): a sign bit per element and two means per chunk.

    About 32x smaller. Biased: use it inside `error_feedback`.
    """
    return Compressor("onebit")


def terngrad(bitwidth: int = 2) -> Compressor:
    """TernGrad (Wen et al., 2017), as CompLL lists it.

    Random rounding to 2^bitwidth levels between the least and the greatest value of a chunk.

    Args:
        bitwidth: bits per element.
    """
    return Compressor("terngrad", (("bitwidth", bitwidth),))


def error_feedback(compressor: Compressor) -> Compressor:
    """Adds what the codec lost to the next gradient (Seide et al., 2014; Karimireddy et al., 2019).

    Args:
        compressor: a codec without error feedback.

    Raises:
        TypeError: `compressor` is not a Compressor.
        ValueError: it has error feedback already.
    """
    if not isinstance(compressor, Compressor):
        raise TypeError(
            f"`compressor` must be a Compressor such as onebit(). Received: {compressor!r}"
        )
    return Compressor(ERROR_FEEDBACK, inner=compressor)
