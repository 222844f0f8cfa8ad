# SPDX-License-Identifier: Apache-2.0
"""Values of all replicas: `strategy.gather`, `all_gather` and its gradient, replica ids."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


@ranks(2)
def test_values_of_all_replicas_are_joined():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    strategy = CompressedRing()

    def local_rows():
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == 2
        # Rank 1 has a row more.
        return tf.fill([1 + rank, 2], tf.cast(context.replica_id_in_sync_group, tf.float32))

    def step():
        context = tf.distribute.get_replica_context()
        return context.all_gather({"rows": local_rows(), "flags": tf.constant([rank == 1])}, axis=0)

    for run in (step, tf.function(step)):
        for _ in range(3):
            joined = strategy.run(run)
            np.testing.assert_array_equal(joined["rows"], [[0, 0], [1, 1], [1, 1]])
            np.testing.assert_array_equal(joined["flags"], [False, True])

    across = strategy.gather(tf.constant([[rank, 5]], tf.int64), axis=1)
    np.testing.assert_array_equal(across, [[0, 5, 1, 5]])
    # Horovod gathers none of these as they are; predictions under `mixed_bfloat16` are the first.
    for dtype in (tf.bfloat16, tf.uint32, tf.uint64, tf.complex64, tf.complex128):
        joined = strategy.gather(tf.cast([[rank, 1, 2]], dtype), axis=1)
        assert joined.dtype == dtype
        np.testing.assert_array_equal(tf.cast(joined, tf.float32), [[0, 1, 2, 1, 1, 2]])
    for bad in (tf.constant(3.0), tf.constant(["text"])):
        with pytest.raises(ValueError, match="must be a numeric tensor with the axis"):
            strategy.gather(bad, axis=0)

    # The gradient: each replica multiplies what it gathers by its own number plus one.
    @tf.function
    def gradient():
        value = tf.fill([1 + rank, 2], 3.0)
        with tf.GradientTape() as tape:
            tape.watch(value)
            joined = tf.distribute.get_replica_context().all_gather(value, axis=0)
            loss = tf.reduce_sum(joined * tf.constant([[1.0], [10.0], [100.0]])) * (rank + 1.0)
        return tape.gradient(loss, value)

    mine = strategy.run(gradient)
    expected = [[3, 3]] if rank == 0 else [[30, 30], [300, 300]]
    np.testing.assert_array_equal(mine, expected)

    # Sums of values whose shape only the running graph knows, beside one whose shape is known.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def sums(values):
        return strategy.reduce("SUM", [values, tf.constant(rank + 1.0)], axis=None)

    unknown, known = sums(tf.constant([1.0, 2.0 * rank]))
    np.testing.assert_array_equal(unknown, [2, 2])
    assert float(known) == 3.0
    # A mean of halves whose sum no half can hold.
    mean = strategy.reduce("MEAN", tf.constant([40000.0 + 64 * rank], tf.float16), axis=None)
    assert mean.dtype == tf.float16
    np.testing.assert_array_equal(mean, [40032.0])

    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: (context.replica_id_in_sync_group, context.num_replicas_in_sync)
    )
    assert numbers == (rank, 2)

    # Each worker gets its own part of the input.
    def rows_of(context):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, 2)
        numbers = tf.data.Dataset.range(6)
        return numbers.shard(context.num_input_pipelines, context.input_pipeline_id).batch(3)

    [batch] = list(strategy.distribute_datasets_from_function(rows_of))
    np.testing.assert_array_equal(batch, [rank, 2 + rank, 4 + rank])
