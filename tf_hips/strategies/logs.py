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
        its step: of numbers that are no metric's result their mean over the replicas, also of those
        in dictionaries inside; what is no number is this replica's.
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
        of_all = model.get_metrics_result() if chosen is logs else {}
    if chosen is not logs or not isinstance(logs, dict):
        return chosen
    own = model.get_metrics_result()
    explained = [_is_result(logs.get(name), own.get(name)) for name in sorted(of_all)]
    means, counts = _means(logs, explained, total, num_replicas)
    for name, count in zip(sorted(of_all), counts, strict=True):
        if count == num_replicas:
            means[name] = of_all[name]
    return means


def average_statistics(
    model: keras.Model,
    total: Sum,
    gather: Gather,
    is_first: bool,
    num_replicas: int,
    *,
    only_finite: bool = False,
) -> int:
    """Averages the floating weights that no optimizer trains, where replicas have different ones.

    These are the moving statistics of BatchNormalization and its like. Weights that are equal on
    all replicas (frozen layers) stay as they are, bit for bit; integers and random states are never
    touched. Of those that say `only_first_replica` all take the first one's.

    One batch with a NaN leaves NaN in moving statistics for ever. Where updates that are not finite
    are refused one by one, so are these: an element's mean is that of the others.

    Args:
        model: a built Keras model.
        total: sums tensors over all replicas.
        gather: gathers values of all replicas.
        is_first: whether this replica is the first one of its party.
        num_replicas: how many there are.
        only_finite: whether an element that is not finite on a replica counts only on the others;
            the same on all replicas.

    Returns:
        Number of variables that were averaged.
    """
    candidates = averaged(model)
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
        values, operations = [], []
        for weight in chosen:
            value, operation = _wide(tf.convert_to_tensor(weight.value)), "mean"
            if weight.aggregation == "only_first_replica":
                value, operation = value if is_first else tf.zeros_like(value), "first"
            values.append(value)
            operations.append(operation)
        if only_finite:
            sums = _sums_of_finite(total, values, operations, num_replicas)
        else:
            sums = total(values, operations)
        for weight, value, operation in zip(chosen, sums, operations, strict=True):
            count = num_replicas if operation == "mean" else 1
            weight.assign(tf.cast(value / tf.cast(count, value.dtype), weight.dtype))
    return len(chosen)


def _sums_of_finite(
    total: Sum, values: Sequence[tf.Tensor], operations: Sequence[str], num_replicas: int
) -> list[tf.Tensor]:
    """As `total`, but that an element that is not finite on a replica is what it is on the others.

    One that is finite on none stays what it is (the least value that a layer has seen may be -inf
    on all). What a liar says of what is finite is summed like the rest, so all have the same.
    """
    means = [place for place, operation in enumerate(operations) if operation == "mean"]
    known, counting, others = list(values), [], []
    for place in means:
        value = values[place]
        is_finite, nothing = tf.math.is_finite(value), tf.zeros_like(value)
        known[place] = tf.where(is_finite, value, nothing)
        counting.append(tf.cast(is_finite, value.dtype))
        others.append(tf.where(is_finite, nothing, value))
    more = ["mean"] * (2 * len(means))
    summed = total([*known, *counting, *others], [*operations, *more])
    sums, told = list(summed[: len(values)]), summed[len(values) :]
    for place, count, other in zip(means, told[: len(means)], told[len(means) :], strict=True):
        # The factor is 1, and the sum what it was, where all are finite.
        mean = sums[place] * (tf.cast(num_replicas, count.dtype) / count)
        nan = tf.constant(float("nan"), other.dtype)
        alone = tf.where(tf.math.is_finite(other), nan, other)
        sums[place] = tf.where(count > 0, mean, alone)
    return sums


def averaged(model: keras.Model) -> list[Any]:
    """The weights that `average_statistics` looks at, in its order.

    Not those whose values are shares of a sum: no average is one.
    """
    return [
        weight
        for weight in model.non_trainable_weights
        if weight.aggregation != "sum"
        and tf.as_dtype(keras.backend.standardize_dtype(weight.dtype)).is_floating
    ]


def digests(weights: Sequence[Any]) -> list[int]:
    """A number for each of `weights`, to compare replicas by."""
    return [binascii.crc32(np.ascontiguousarray(weight.numpy())) for weight in weights]


def _wide(value: tf.Tensor) -> tf.Tensor:
    # Sums of float32 counts beyond 2^24 would lose rows.
    return tf.cast(value, tf.float64) if value.dtype.is_floating else value


def _is_result(value: Any, result: Any) -> bool:
    """Whether a step's log is what a metric of this replica says."""
    if value is None or isinstance(value, dict) or isinstance(result, dict):
        return False
    value, result = np.asarray(value), np.asarray(result)
    is_numeric = value.dtype.kind in "fiu" and value.shape == result.shape
    return is_numeric and np.allclose(value, result, rtol=1e-5, equal_nan=True)


def _means(
    logs: dict[str, Any], flags: Sequence[bool], total: Sum, num_replicas: int
) -> tuple[dict[str, Any], list[int]]:
    """`logs` with means of its numbers over the replicas; on how many replicas each flag is set."""
    values = {path: np.asarray(value) for path, value in _leaves(logs)}
    paths = [
        path for path, value in values.items() if value.shape == () and value.dtype.kind in "fiu"
    ]
    told = [*(float(values[path]) for path in paths), *map(float, flags)]
    if not told:
        return dict(logs), []
    [sums] = total([tf.constant(told, tf.float64)], ["mean"])
    means = (sums / num_replicas).numpy().tolist()
    counts = [round(mean * num_replicas) for mean in means[len(paths) :]]
    return _filled(logs, dict(zip(paths, means, strict=False))), counts


def _leaves(logs: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """What is in `logs` and in the dictionaries inside, in an order that names decide."""
    found = []
    for name in sorted(logs):
        inside = (*path, name)
        value = logs[name]
        found += _leaves(value, inside) if isinstance(value, dict) else [(inside, value)]
    return found


def _filled(
    logs: dict[str, Any], means: dict[tuple[str, ...], float], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        name: _filled(value, means, (*path, name))
        if isinstance(value, dict)
        else means.get((*path, name), value)
        for name, value in logs.items()
    }
