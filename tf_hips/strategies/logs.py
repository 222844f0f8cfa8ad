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

# Sums tensors over all replicas, exactly. Eager.
Sum = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]
# Values of all replicas, by what they are.
Gather = Callable[[Any, str], list[Any]]


def over_replicas(
    model: keras.Model,
    logs: Any,
    result: Callable[[Any], Any],
    total: Sum,
    rank: int,
    num_replicas: int,
) -> Any:
    """What `result` says when the model's metrics hold the state of all replicas together.

    Args:
        model: a Keras model.
        logs: what the last step of this replica returned.
        result: Keras' choice between the metrics' results and `logs`.
        total: sums tensors over all replicas.
        rank: number of this replica among all.
        num_replicas: how many there are.

    Returns:
        A dictionary of values, the same on all replicas. Where a model returns logs of its own from
        its step, which no metric explains: their mean over the replicas.
    """
    variables = model.metrics_variables
    shares = []
    for variable in variables:
        share = _wide(tf.convert_to_tensor(variable.value))
        if variable.aggregation == "mean":
            share = share / tf.cast(num_replicas, share.dtype)
        elif variable.aggregation == "only_first_replica" and rank:
            share = tf.zeros_like(share)
        shares.append(share)
    state = [
        (variable, tf.cast(value, variable.dtype))
        for variable, value in zip(variables, total(shares) if shares else [], strict=True)
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
    chosen = [
        weight
        for place, weight in enumerate(candidates)
        if len({one[place] for one in everyone}) > 1
    ]
    if chosen:
        sums = total([_wide(tf.convert_to_tensor(weight.value)) for weight in chosen])
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
    [sums] = total([tf.constant([float(values[name]) for name in names], tf.float64)])
    means = dict(zip(names, (sums / num_replicas).numpy().tolist(), strict=True))
    return {name: means.get(name, value) for name, value in logs.items()}
