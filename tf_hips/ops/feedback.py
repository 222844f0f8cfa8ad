# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what it may stand around. Nothing here computes."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from tf_hips.ops import growth, jit
from tf_hips.ops.mixing import MIXED
from tf_hips.ops.smoothing import MOMENTUM
from tf_hips.ops.stages import WARMUP

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

ERROR_FEEDBACK = "error_feedback"


def check(inner: "Compressor | None", params: Collection[tuple[str, int | float]]) -> None:
    """Raises ValueError where error feedback cannot stand around `inner`, or takes no `params`."""
    if inner is not None and inner.name == MOMENTUM:
        raise ValueError(
            "`error_feedback` must stand inside of `momentum`: write "
            f"momentum(error_feedback({inner.codec.text}), ...). Received: {inner.text}"
        )
    if inner is not None and inner.has_state and not inner.has_residual:
        raise ValueError(
            "`error_feedback` must wrap a codec without state: one with state keeps what "
            f"it does not send itself, so write {inner.text}. Received: inner={inner.text}"
        )
    if inner is not None and inner.name in (WARMUP, MIXED):
        raise ValueError(
            f"`error_feedback` must stand inside of `{inner.name}`: write "
            f"{inner.name}(error_feedback({inner.codec.text}), ...). Received: {inner.text}"
        )
    if inner is None or inner.has_residual or params:
        raise ValueError(
            "`error_feedback` must wrap one codec without error feedback. "
            f"Received: inner={inner and inner.text}, params={params}"
        )
    algorithm = jit.algorithm(inner.name)
    size = growth.diverges_at(inner) if algorithm.is_loaded else None
    if size is not None:
        raise ValueError(
            "`error_feedback` must wrap a codec that loses less than it is given; around this one, "
            f"in a tensor of {size} elements, residuals grow without bound. Received: {inner.text}"
        )
    for name, least in algorithm.feedback_minimum:
        if dict(inner.params)[name] < least:
            raise ValueError(
                f"`{name}` must be at least {least} under error feedback, else residuals "
                f"grow without bound. Received: {inner.text}"
            )
