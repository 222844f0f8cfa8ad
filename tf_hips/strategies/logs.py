# SPDX-License-Identifier: Apache-2.0
"""Loss and metrics over all replicas, and averages of what layers measured (BatchNorm).

A metric's state is sums (Keras declares how each variable is aggregated), so the sum of all
replicas' states is the state of one process that saw all rows, and its result is exact, also where
replicas saw different numbers of rows. Local state is left as it is: each replica goes on with its
own.
"""

import binascii
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Sums tensors over all replicas, exactly, each as `over_parties` says. Eager.
Sum = Callable[[Sequence[tf.Tensor], Sequence[str]], list[tf.Tensor]]
# Values of all replicas, by what they are; None of those that are absent.
Gather = Callable[[Any, str], list[Any]]


def over_replicas(
    model: keras.Model,
    logs: Any,
    result: Callable[[Any], Any],
    total: Sum,
    is_first: bool,
    num_replicas: int,
) -> Any:
    """What `result` says when the model's metrics hold the state of all replicas together.

    Args:
        model: a Keras model.
        logs: what the last step of this replica returned.
        result: Keras' choice between the metrics' results and `logs`.
        total: sums tensors over all replicas.
        is_first: whether this replica is the first one of its party.
        num_replicas: how many there are.

    Returns:
        A dictionary of values, the same on all replicas. Where a model returns logs of its own from
        its step, which no metric explains: their mean over the replicas.
    """
    variables = model.metrics_variables
    shares, operations = [], []
    for variable in variables:
        share = _wide(tf.convert_to_tensor(variable.value))
        operation = "sum"
        if variable.aggregation == "mean":
            operation, share = "mean", share / tf.cast(num_replicas, share.dtype)
        elif variable.aggregation == "only_first_replica":
            operation, share = "first", share if is_first else tf.zeros_like(share)
        shares.append(share)
        operations.append(operation)
    state = [
        (variable, tf.cast(value, variable.dtype))
        for variable, value in zip(
            variables, total(shares, operations) if shares else [], strict=True
        )
    ]
    with keras.StatelessScope(state_mapping=state):
        chosen = result(logs)
    return _mean_of_logs(logs, total, num_replicas) if chosen is logs else chosen


def average_statistics(model: keras.Model, total: Sum, gather: Gather, num_replicas: int) -> int:
    """Averages the floating weights that no optimizer trains, where replicas have different ones.

    These are the moving statistics of BatchNormalization and its like. Weights that are equal on
    all replicas (frozen layers) stay as they are, bit for bit; integers and random states are never
    touched.

    Args:
        model: a built Keras model.
        total: sums tensors over all replicas.
        gather: gathers values of all replicas.
        num_replicas: how many there are.

    Returns:
        Number of variables that were averaged.
    """
    candidates = [
        weight
        for weight in model.non_trainable_weights
        if tf.as_dtype(keras.backend.standardize_dtype(weight.dtype)).is_floating
    ]
    if not candidates:
        return 0
    everyone = gather(digests(candidates), "statistics of the model's layers")
    present = [one for one in everyone if one is not None]
    # Who is absent may have others; the mean of values that are equal is that value.
    chosen = [
        weight
        for place, weight in enumerate(candidates)
        if len(present) < len(everyone) or len({one[place] for one in present}) > 1
    ]
    if chosen:
        values = [_wide(tf.convert_to_tensor(weight.value)) for weight in chosen]
        sums = total(values, ["mean"] * len(values))
        for weight, value in zip(chosen, sums, strict=True):
            weight.assign(tf.cast(value / tf.cast(num_replicas, value.dtype), weight.dtype))
    return len(chosen)


def digests(weights: Sequence[Any]) -> list[int]:
    """A number for each of `weights`, to compare replicas by."""
    return [binascii.crc32(np.ascontiguousarray(weight.numpy())) for weight in weights]


def _wide(value: tf.Tensor) -> tf.Tensor:
    # Sums of float32 counts beyond 2^24 would lose rows.
    return tf.cast(value, tf.float64) if value.dtype.is_floating else value


def _mean_of_logs(logs: Any, total: Sum, num_replicas: int) -> Any:
    if not isinstance(logs, dict):
        return logs
    values = {name: np.asarray(value) for name, value in logs.items()}
    names = sorted(
        name for name, value in values.items() if value.shape == () and value.dtype.kind in "fiu"
    )
    if not names:
        return logs
    own = tf.constant([float(values[name]) for name in names], tf.float64)
    [sums] = total([own], ["mean"])
    means = dict(zip(names, (sums / num_replicas).numpy().tolist(), strict=True))
    return {name: means.get(name, value) for name, value in logs.items()}
