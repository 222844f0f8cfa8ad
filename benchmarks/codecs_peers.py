# SPDX-License-Identifier: Apache-2.0
"""The encoders that a user would take instead: GRACE's, in TensorFlow ops, and the same in NumPy.

GRACE (Xu et al., ICDCS 2021) builds its compressors of TensorFlow ops and does not pack bits; these
follow its definitions, but for TernGrad's, which is ours: levels between minimum and maximum, and
no clipping. The TensorFlow ones run in a `tf.function` that has been traced and run before, with
input and result on the CPU, plain and compiled by XLA; NumPy's write to new arrays, as its users
do.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import harness

RATIO = 0.01
"""Share of the elements that the sparsifiers keep."""
LEVELS = 3
"""Of TernGrad, above the lowest one, with two bits."""

# What they are called in rows.
TENSORFLOW = "TensorFlow ops"
XLA = "TensorFlow ops, XLA"
NUMPY = "NumPy, as used"
NUMPY_ALONE = "NumPy, 1 thread each"

Floats = npt.NDArray[np.float32]


def tensorflow_encoders(is_compiled: bool) -> dict[str, Callable[[Any], Any]]:
    """Encoders by algorithm, as traced functions of a float32 tensor [n]; perhaps by XLA."""
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
        low, high = tf.reduce_min(tensor), tf.reduce_max(tensor)
        level = (tensor - low) / ((high - low) / LEVELS) + tf.random.uniform(tf.shape(tensor))
        return tf.cast(tf.minimum(level, LEVELS), tf.uint8), low, high

    def topk(tensor: Any) -> Any:
        k = max(1, int(tensor.shape[0] * RATIO))
        _, indices = tf.math.top_k(tf.abs(tensor), k, sorted=False)
        return indices, tf.gather(tensor, indices)

    return {
        function.__name__: tf.function(function, jit_compile=is_compiled, reduce_retracing=False)
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
        low, high = values.min(), values.max()
        level = (values - low) / ((high - low) / LEVELS)
        level += generator.random(values.size, dtype=np.float32)
        return np.minimum(level, LEVELS).astype(np.uint8), low, high

    def topk(values: Floats) -> Any:
        k = max(1, int(values.size * RATIO))
        indices = np.argpartition(np.abs(values), values.size - k)[-k:]
        return indices.astype(np.int32), values[indices]

    return {function.__name__: function for function in (onebit, terngrad, topk)}


def compare(ours: Callable[[], Any], other: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Other over ours: both are run once before, and then by turns."""
    ours()
    other()
    ratios, found = [], []
    for _ in range(rounds):
        mine, theirs = seconds(ours), seconds(other)
        ratios.append(theirs / mine)
        found.append(mine)
    low, high = harness.interval(ratios)
    return {
        "ratio": statistics.median(ratios),
        "interval": f"{low:.2f} - {high:.2f}",
        "seconds": statistics.median(found),
    }


def compare_encoders(
    encoders: Mapping[str, Callable[[Any], Any]],
    texts: Mapping[str, str],
    gradient: Floats,
    argument: Any,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Encoders over ours, by algorithm.

    Args:
        encoders: what takes `argument`.
        texts: how to write those of ours that are wanted.
        gradient: what ours take.
        argument: the same.
        rounds: of each comparison.
    """
    from tf_hips import ops
    from tf_hips.ops import native

    key = native.Key(seed=1, step=2, tensor_id=3)
    found = {}
    for name, encoder in encoders.items():
        if name not in texts:
            continue
        codec = ops.parse(texts[name])
        room = np.empty(codec.wire_bytes(gradient.size), np.uint8)

        def ours(codec: Any = codec, room: Any = room) -> None:
            native.encode(codec, gradient, key, out=room)

        def theirs(encoder: Callable[[Any], Any] = encoder) -> None:
            encoder(argument)

        found[name] = compare(ours, theirs, rounds)
    return found


def compare_numpy(texts: Mapping[str, str], n: int, rounds: int) -> dict[str, dict[str, Any]]:
    """NumPy's encoders over ours, of n floats."""
    gradient = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    return compare_encoders(numpy_encoders(), texts, gradient, gradient, rounds)


def alone() -> None:
    """In a process that has not encoded yet: ours will have one thread."""
    os.environ["TF_HIPS_NUM_THREADS"] = "1"


def seconds(call: Callable[[], Any]) -> float:
    """What a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
