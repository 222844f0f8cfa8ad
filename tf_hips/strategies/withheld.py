# SPDX-License-Identifier: Apache-2.0
"""A party whose gradient is not finite has no row in a round of a robust rule.

It says so with its packets, which are those of zeros and which nobody looks at; the round goes on
without it, it counts among the f, and it takes the step that comes down as all others do.

    worker       looks at its own gradient, where a codec of the party would hide what is in it
    rank 0       looks at the party's sum, before it is encoded for the server; and at its packets,
                 where its codec makes infinities of what is large

Invariant: what the encoder keeps stays as it was in a round without a row.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.comm import primitives
from tf_hips.comm.staged import Reducer
from tf_hips.ops import native
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.flow import first_nonfinite
from tf_hips.strategies.gradients import Gradient, Summing

_LARGEST = np.finfo(np.float32).max
NONE = -1  # the position of a gradient that is not finite, where all are


def shown(summing: Summing, label: str) -> Reducer:
    """The reducer of a party, whose sums are not finite where a gradient of a worker is not.

    An exact sum is so by itself. A codec hides it, so its worker gives zeros in place of all its
    gradients, and the sum of the one that is not finite becomes NaN.

    Args:
        summing: how the party sums.
        label: part of the collectives' names.
    """
    if not summing.only_float32:
        return summing.reducer

    def reduce(vectors: Sequence[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        own = tf.cast(first_nonfinite(vectors), tf.int32)
        [spoilt] = tf.unstack(
            primitives.allreduce(tf.reshape(own, [1]), f"{label}.first_nonfinite", "min")
        )
        given = unless(own < len(vectors), vectors, lambda: zeros_of(vectors))
        sums = summing.reducer(given, step)

        def marked() -> list[tf.Tensor]:
            return [
                tf.where(tf.equal(spoilt, place), tf.constant(float("nan"), one.dtype), one)
                for place, one in enumerate(sums)
            ]

        return unless(spoilt < len(vectors), sums, marked)

    return reduce


def find(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Position of the first of `vectors` that is not finite, a scalar tf.int64; else `NONE`."""
    first = first_nonfinite(vectors)
    return tf.where(tf.equal(first, len(vectors)), tf.constant(NONE, tf.int64), first)


def may_overflow(codec: Compressor) -> bool:
    """Whether packets of finite values may decode to what is not finite, as those of float16."""
    codec = codec.for_sums if codec.has_momentum else codec  # of momentum the first step is short
    size = 64
    values = np.zeros(size, np.float32)
    values[:2] = _LARGEST, -_LARGEST
    kept = np.zeros(codec.state_shape([size]), np.float32) if codec.has_state else None
    packet = native.encode(codec, values, native.Key(0, 0, 0), kept=kept)
    return not np.isfinite(native.decode(codec, packet, size)).all()


def unless(
    is_other: tf.Tensor, values: Sequence[tf.Tensor], others: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """`values`, without a copy; what `others` makes like them where `is_other`."""
    if not values:
        return []
    return list(tf.cond(is_other, others, lambda: [tf.identity(one) for one in values]))


def zeros_of(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Zeros like `vectors`."""
    return [tf.zeros_like(one) for one in vectors]


class Withheld:
    """Tells of the rounds in which one party has no row; called on rank 0."""

    def __init__(
        self, gradients: Sequence[Gradient], site: str, write_event: Callable[..., None]
    ) -> None:
        """There was none.

        Args:
            gradients: what is summed.
            site: name of the party.
            write_event: writes an event of this process.
        """
        self._names = [gradient.name for gradient in gradients]
        self._site = site
        self._write_event = write_event
        self._last: int | None = None

    def __call__(self, number: int, position: int) -> None:
        """Tells of round `number`: the gradient at `position` is not finite."""
        reason = f"NaN, infinity or overflow in gradient {position} ({self._names[position]})"
        who = f"party `{self._site}`"
        self._write_event("update_refused", number=number, who=who, reason=reason)
        # One line for a row of them.
        (log.debug if self._last == number - 1 else log.warning)(
            "Round %d goes on without the update of %s: %s. It takes the step of the others.",
            number, who, reason,
        )  # fmt: skip
        self._last = number
