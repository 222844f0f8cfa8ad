# SPDX-License-Identifier: Apache-2.0
"""`strategy.gather` and `ReplicaContext.all_gather`: values of all replicas, joined along an axis.

In a party Horovod gathers, whatever the lengths. Over parties, where only sums travel, each replica
puts the bits of its value into a place of its own between zeros; the sum of integers is then all
values, exactly, and the price is that of a sum of the whole.
"""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.errors import ProtocolError

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

# What bits travel as, by the bytes of an element; 16 bytes are two, on an axis of their own.
_INTEGERS = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64, 16: tf.int64}
# What Horovod 0.28.1 cannot gather as it is.
_AS_BITS = (tf.bfloat16, tf.uint32, tf.uint64, tf.complex64, tf.complex128)


def gather(strategy: "PartyStrategy", value: Any, axis: Any) -> tf.Tensor:
    """Joins the values of all replicas along `axis`, by the number of the replica.

    Args:
        strategy: a `PartyStrategy`.
        value: numeric or bool tensor of known rank > 0; its lengths along `axis` may differ between
            replicas, except in a graph over several parties.
        axis: a number from -rank to rank - 1.

    Raises:
        ValueError: rank, axis or type is not such, or lengths differ where they must not.
        ProtocolError: the server's quorum has gone on without a party.
    """
    tensor = tf.convert_to_tensor(value)
    rank, place = tensor.shape.rank, tf.get_static_value(axis)
    if not rank or place is None or not -rank <= place < rank or tensor.dtype == tf.string:
        raise ValueError(
            "A value that is gathered must be a numeric tensor with the axis that it is gathered "
            f"along. Received: shape={tensor.shape}, dtype={tensor.dtype.name}, axis={axis}"
        )
    if strategy._is_alone():
        return tf.identity(tensor)
    order = [int(place) % rank, *(one for one in range(rank) if one != int(place) % rank)]
    rows = tf.transpose(tensor, order)
    if strategy.num_replicas_in_sync == primitives.size():
        is_foreign = rows.dtype in _AS_BITS
        joined = strategy._gather_rows(_bits(rows) if is_foreign else rows)
        joined = _of_bits(joined, rows.dtype) if is_foreign else joined
    else:
        joined = _over_parties(strategy, rows)
    back = [order.index(one) for one in range(rank)]
    return tf.transpose(joined, back)


def with_gradient(strategy: "PartyStrategy", value: Any, axis: Any) -> tf.Tensor:
    """`gather` with a gradient: this replica's rows of the sum of all replicas' gradients."""

    @tf.custom_gradient
    def joined(tensor: tf.Tensor) -> Any:
        result = gather(strategy, tensor, axis)

        def back(upstream: tf.Tensor) -> tf.Tensor:
            [total] = strategy.reduce_exactly([upstream], is_mean=False, operations="whole")
            lengths = gather(strategy, tf.shape(tensor)[axis][None], 0)
            begin = tf.reduce_sum(lengths[: strategy.replica()])
            rows = tf.range(begin, begin + tf.shape(tensor)[axis])
            return tf.gather(total, rows, axis=axis)

        return result, back

    return joined(tf.convert_to_tensor(value))


def _over_parties(strategy: "PartyStrategy", rows: tf.Tensor) -> tf.Tensor:
    number, workers = strategy.replica(), strategy.num_replicas_in_sync
    if tf.executing_eagerly():
        lengths = strategy.gather_objects(int(rows.shape[0]), "the lengths of gathered values")
        if None in lengths:
            raise ProtocolError(
                "`gather` needs the values of all parties, and the server's quorum has gone on "
                f"without {lengths.count(None)} of {workers} workers."
            )
    elif rows.shape.is_fully_defined():
        lengths = [int(rows.shape[0])] * workers
    else:
        raise ValueError(
            "A value that is gathered over parties inside a graph must be of known shape, equal on "
            f"all replicas. Received: shape={rows.shape}"
        )
    bits = _bits(rows)
    wide = tf.cast(bits, tf.int64 if bits.dtype == tf.int64 else tf.int32)
    before, after = sum(lengths[:number]), sum(lengths[number + 1 :])
    padding = [[before, after], *([0, 0] for _ in range(bits.shape.rank - 1))]
    [total] = strategy.reduce_exactly([tf.pad(wide, padding)], is_mean=False, operations="whole")
    return _of_bits(tf.cast(total, bits.dtype), rows.dtype)


def _bits(rows: tf.Tensor) -> tf.Tensor:
    kind = _INTEGERS[rows.dtype.size]
    return tf.cast(rows, kind) if rows.dtype == tf.bool else tf.bitcast(rows, kind)


def _of_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.cast(bits, tf.bool) if dtype == tf.bool else tf.bitcast(bits, dtype)
