# SPDX-License-Identifier: Apache-2.0
"""Sums begin during the backward pass: a pass that waits for the first of them ends."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

DEADLINE_S = 30.0


@pytest.mark.parametrize(
    "ways",
    [
        ["exact", "ps", "ring", "party"],
        pytest.param(["allgather", "hierarchical"], marks=pytest.mark.slow),
    ],
    ids="+".join,
)
@ranks(2, deadline_s=180)
def test_what_is_ready_travels_while_the_rest_is_computed(ways):
    import threading

    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips import CompressedRing, HierarchicalPS
    from tf_hips.comm import allreduce, compressed, primitives

    # Buckets of one gradient each: those of the last layer are the first to travel.
    compressed.BUCKET_ELEMENTS = 1
    allreduce.BUCKET_BYTES = 1
    arrived = threading.Event()
    waited = []

    def saw(value):
        arrived.set()
        return value

    def wait(gradient):
        waited.append(arrived.wait(DEADLINE_S))
        return gradient

    # Not in order with anything else, as operations with side effects would be.
    def beside(function, value):
        result = tf.numpy_function(function, [value], value.dtype, stateful=False)
        result.set_shape(value.shape)
        return result

    first = {
        "exact": ".sum.0",
        "ps": "ps.bucket_0.merged",
        "allgather": "allgather.bucket_0.gathered",
        "ring": "ring.bucket_0.merged",
        "hierarchical": "hierarchical.bucket_0.everyone",
        "party": "ps.bucket_0.merged",
    }
    watched = ""
    collective = primitives._collective

    def watching(kind, run, tensor, name):
        result = collective(kind, run, tensor, name)
        is_first = name.startswith("gradients") and name.endswith(watched)
        return beside(saw, result) if is_first and not tf.executing_eagerly() else result

    primitives._collective = watching

    class Waits(keras.layers.Layer):
        """The identity, whose gradient waits until a sum has arrived."""

        def call(self, inputs):
            @tf.custom_gradient
            def same(value):
                return tf.identity(value), lambda gradient: beside(wait, gradient)

            return same(inputs)

    own = training.shard(training.data(32), primitives.rank(), 2)
    onebit = "error_feedback(onebit)"
    for way in ways:
        if way == "exact":
            strategy = CompressedRing()
        elif way == "party":
            strategy = HierarchicalPS(local_compression=onebit, topology="ps")
        else:
            strategy = CompressedRing(onebit, topology=way)
        watched = first[way]
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(4), Waits(), keras.layers.Dense(3)]
            )
            model.compile("sgd", "mse")
        arrived.clear()
        waited.clear()
        model.train_on_batch(*(array[:8] for array in own))
        assert waited == [True], way
        training.assert_same_on_all_ranks(model)
