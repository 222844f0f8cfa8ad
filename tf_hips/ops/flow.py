# SPDX-License-Identifier: Apache-2.0
"""Values that no optimiser looks through, work that goes last, and one look at many gradients.

To TensorFlow an operation of Horovod is a pure function. It drops one whose result this rank does
not use, and computes one of constants when it optimises a graph, once for all steps; the other
ranks would wait for ever. `opaque` values come from an operation with a side effect, and so do
their consumers' inputs: nothing is folded through it, and nothing that leads to it is dropped.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_hips.ops import library

Tensor: TypeAlias = Any
"""A tf.Tensor; TensorFlow ships no types that mypy can check."""

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


def opaque(values: Sequence[Tensor]) -> list[Tensor]:
    """The same `values`, of any shapes and types, from one operation that has to be run.

    Costs nothing and copies nothing. Its gradient is its argument. Eagerly, where nothing is
    optimised, it does nothing.
    """
    if not values or tf.executing_eagerly():
        return list(values)
    return _in_no_order(list(library.ops(tf).tf_hips_opaque(values=list(values))))


def yielded(value: Tensor) -> Tensor:
    """The same `value`, where what it makes ready runs after what is ready already.

    TensorFlow's threads run what became ready last: a long series of operations, each of which
    makes the next one ready, keeps waiting whatever else came to be ready meanwhile. Eagerly, where
    nothing waits, it does nothing. Costs a change of threads.
    """
    if tf.executing_eagerly():
        return value
    [same] = _in_no_order([library.ops(tf).tf_hips_yield(value=value)])
    return same


def all_finite(values: Sequence[Tensor]) -> Tensor:
    """Whether no element of `values` is NaN or infinite; a scalar tf.bool.

    Args:
        values: tensors of any shapes, each float16, bfloat16, float32 or float64.

    Raises:
        TypeError: one is of another type.
    """
    return first_nonfinite(values) == len(values)


def first_nonfinite(values: Sequence[Tensor]) -> Tensor:
    """Position of the first of `values` with an element that is NaN or infinite.

    Args:
        values: tensors of any shapes, each float16, bfloat16, float32 or float64.

    Returns:
        A scalar tf.int64; the number of `values` where all are finite.

    Raises:
        TypeError: one is of another type.
    """
    for value in values:
        _check_float(value, "values")
    if not values:
        return tf.constant(0, tf.int64)
    if on_gpu():
        # Ours would have to fetch them all; TensorFlow's look where they lie.
        bad = [tf.reduce_any(~tf.math.is_finite(value)) for value in values]
        return tf.argmax(tf.cast(tf.stack([*bad, tf.constant(True)]), tf.uint8))
    return library.ops(tf).tf_hips_first_non_finite(values=list(values))


def finite(value: Tensor, number: Tensor, complaint: str) -> Tensor:
    """The same `value`, as soon as it is known that no element of it is NaN or infinite.

    Args:
        value: a tensor of any shape; float16, bfloat16, float32 or float64.
        number: a scalar tf.int64 for the message.
        complaint: the message begins so, `number` follows.

    Raises:
        TypeError: `value` is of another type.
        tf.errors.InvalidArgumentError: an element is NaN or infinite; raised when it is computed.
    """
    _check_float(value, "value")
    return library.ops(tf).tf_hips_finite(value=value, number=number, complaint=complaint)


def on_gpu() -> bool:
    """Whether tensors may lie on a GPU, where `all_finite` is cheap and `finite` is not."""
    return bool(tf.config.list_logical_devices("GPU"))


def _in_no_order(outputs: list[Tensor]) -> list[Tensor]:
    """The outputs of an operation that tf.function must run, but need not run in program order.

    Of operations with side effects it lets each wait for the one before: no collective could begin
    before all that were built earlier have ended.
    """
    graph = outputs[0].graph
    manager = getattr(graph, "experimental_acd_manager", None)  # None outside of tf.function
    if manager is not None:
        manager.run_independently(outputs[0].op)
    return outputs


def _check_float(value: Tensor, name: str) -> None:
    if value.dtype not in _FLOATS:
        known = ", ".join(dtype.name for dtype in _FLOATS)
        raise TypeError(f"`{name}` must be of {known}. Received: dtype={value.dtype.name}")


def _gradient_of_opaque(operation: tf.Operation, *gradients: Tensor) -> list[Tensor]:
    del operation
    return list(gradients)


tf.RegisterGradient("TfHipsOpaque")(_gradient_of_opaque)
