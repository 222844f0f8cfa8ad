# SPDX-License-Identifier: Apache-2.0
"""The encoders that a user would take instead: GRACE's, in TensorFlow ops, and the same in NumPy.

GRACE (Xu et al., ICDCS 2021) builds its compressors of TensorFlow ops and does not pack bits; these
follow its definitions. The TensorFlow ones run in a `tf.function` that has been traced and run
before, with input and result on the CPU; NumPy's write to new arrays, as its users do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

RATIO = 0.01
"""Share of the elements that the sparsifiers keep."""
CLIP = 2.5
"""TernGrad clips at so many standard deviations."""

Floats = npt.NDArray[np.float32]


def tensorflow_encoders() -> dict[str, Callable[[Any], Any]]:
    """Encoders by algorithm, as traced functions of a float32 tensor [n]."""
    import tensorflow as tf

    def onebit(tensor: Any) -> Any:
        mask = tensor < 0
        number = tf.reduce_sum(tf.cast(mask, tf.float32))
        total = tf.reduce_sum(tf.where(mask, tensor, 0.0))
        rest = tf.reduce_sum(tf.where(mask, 0.0, tensor))
        others = tf.cast(tf.size(tensor), tf.float32) - number
        return (
            tf.cast(mask, tf.uint8),
            tf.math.divide_no_nan(total, number),
            tf.math.divide_no_nan(rest, others),
        )

    def terngrad(tensor: Any) -> Any:
        mean = tf.reduce_mean(tensor)
        limit = CLIP * tf.sqrt(tf.reduce_mean(tf.square(tensor - mean)))
        clipped = tf.clip_by_value(tensor, -limit, limit)
        size = tf.abs(clipped)
        top = tf.reduce_max(size)
        chosen = tf.random.uniform(tf.shape(tensor)) < size / top
        return tf.cast(tf.where(chosen, tf.sign(clipped), 0.0), tf.int8), top

    def topk(tensor: Any) -> Any:
        k = max(1, int(tensor.shape[0] * RATIO))
        _, indices = tf.math.top_k(tf.abs(tensor), k, sorted=False)
        return indices, tf.gather(tensor, indices)

    return {
        function.__name__: tf.function(function, reduce_retracing=False)
        for function in (onebit, terngrad, topk)
    }


def numpy_encoders() -> dict[str, Callable[[Floats], Any]]:
    """Encoders by algorithm, of a float32 vector [n]."""
    generator = np.random.default_rng(0)

    def onebit(values: Floats) -> Any:
        mask = values < 0
        number = np.count_nonzero(mask)
        total = values[mask].sum()
        return (
            np.packbits(mask),
            total / max(number, 1),
            (values.sum() - total) / max(values.size - number, 1),
        )

    def terngrad(values: Floats) -> Any:
        limit = CLIP * values.std()
        clipped = np.clip(values, -limit, limit)
        size = np.abs(clipped)
        top = size.max()
        chosen = generator.random(values.size, dtype=np.float32) < size / top
        return (np.sign(clipped) * chosen).astype(np.int8), top

    def topk(values: Floats) -> Any:
        k = max(1, int(values.size * RATIO))
        indices = np.argpartition(np.abs(values), values.size - k)[-k:]
        return indices.astype(np.int32), values[indices]

    return {function.__name__: function for function in (onebit, terngrad, topk)}
