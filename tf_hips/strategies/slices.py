# SPDX-License-Identifier: Apache-2.0
"""What Keras' optimizers make of sparse gradients (`tf.IndexedSlices`), where it matters to a sum.

The gradient of an embedding is a row for each lookup, and Keras 3 hands all of them to the
optimizer: rows of equal index are not added up first. SGD and Lion do not mind. All others square
(or clip, or normalise) each row by itself, so to them rows [a, b] of one index are not a row
[a + b]. N workers have the numbers of one process only if such an optimizer gets the rows of all
workers one by one.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_hips.comm.sparse import deduplicated

_ADDITIVE = (keras.optimizers.SGD, keras.optimizers.Lion)
# Operations that read a variable whole or in part.
_READS = ("ReadVariableOp", "ResourceGather")
# Operations behind which another dimension may be that of the batch.
_MOVE_DIMENSIONS = ("ConjugateTranspose", "ExpandDims", "Reshape", "Squeeze", "Transpose")


def is_additive(optimizer: Any) -> bool:
    """Whether `optimizer` treats rows of equal index as their sum.

    True for SGD and Lion without clipping; False for what is not known.
    """
    if optimizer is None:  # a sum that no optimizer gets
        return False
    clips = (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    return type(optimizer) in _ADDITIVE and not any(clips)


def orderly(optimizer: Any, value: Any) -> Any:
    """What `optimizer` adds to a variable, such that the result is the same on all workers.

    TensorFlow adds rows of equal index from several threads, in the order that chance makes. So
    they are added up first, where the sum of the workers has not done it (see `sparse_sum`).
    """
    if not isinstance(value, tf.IndexedSlices) or is_additive(optimizer):
        return value
    return deduplicated(value)


def depends_on_data(indices: tf.Tensor) -> bool:
    """Whether the indices of a lookup can differ between the examples of a batch.

    Positions, as `arange(length)`, do not: the batch has been summed over in the rows of their
    gradient, and one process on the joined batch has one row for each, as one worker has.

    Read from the graph. What is not understood depends on data; so does everything where there is
    no graph, in eager steps.
    """
    if not hasattr(indices, "graph"):
        return True
    waiting, seen = [indices], set()
    while waiting:
        tensor = waiting.pop()
        if tensor.op in seen:
            continue
        seen.add(tensor.op)
        sources = _sources(tensor)
        if sources is None:
            return True
        waiting.extend(sources)
    return False


def _sources(tensor: tf.Tensor) -> list[tf.Tensor] | None:
    """The tensors of a graph that `tensor` is computed from; None for data, and what may be."""
    operation = tensor.op
    kind, inputs = operation.type, list(operation.inputs)
    if kind == "Const":
        return []
    if kind == "Placeholder":
        return _captured(tensor)
    if kind == "StridedSlice" and inputs[0].op.type == "Shape":
        return None if _may_be_batch(inputs[0].op.inputs[0], tf.get_static_value(inputs[1])) else []
    if kind in _READS:
        return inputs[1:]
    if not inputs or "Random" in kind or operation.op_def.is_stateful:
        return None
    # Also of `Shape` and `Size`: those of data tell the size of a batch, and those of positions,
    # whose number a gradient asks for where the graph does not tell it, are of positions.
    return inputs


def _may_be_batch(tensor: tf.Tensor, begin: Any) -> bool:
    """Whether dimension `begin` of `tensor` may be that of the batch, the first one."""
    if begin is None or begin.size != 1 or tensor.op.type in _MOVE_DIMENSIONS:
        return True
    place = int(begin[0])
    if place < 0:
        rank = tensor.shape.rank
        return rank is None or place + rank == 0
    return place == 0


def _captured(given: tf.Tensor) -> list[tf.Tensor] | None:
    """What a function captured from outside; None for an argument of the function."""
    for outer, inner in getattr(given.graph, "captures", ()):
        if inner is given:
            return [outer] if hasattr(outer, "graph") else []
    return None
