# SPDX-License-Identifier: Apache-2.0
"""Rank 0's values on all ranks: whole, of any type, and never all of them at a time."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


@ranks(2)
def test_values_travel_without_a_copy_of_all_of_them():
    import tracemalloc

    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies.replicas import synchronise

    primitives.init()
    mib = 2**20
    generator = np.random.default_rng(primitives.rank())
    kinds = [
        *[(tf.float32, (3, mib // 4))] * 16,  # ends of messages lie within variables
        *((tf.bfloat16, (5, 3)), (tf.int64, ()), (tf.bool, (7,)), (tf.float64, (0, 2))),
    ]
    values = [
        tf.cast(tf.constant(generator.integers(0, 100, shape, np.int32)), dtype)
        for dtype, shape in kinds
    ]
    variables = [tf.Variable(value) for value in values]
    own = [variable.numpy() for variable in variables]
    left = {1, len(kinds) - 2}
    synchronise(variables[-4:], left=range(4))  # what a first call imports is not what it holds
    tracemalloc.start()
    total = synchronise(variables, left=left)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 48 * mib + 2 * 15 + 8 + 7
    # A message, what it is made of, and variables that TensorFlow has not yet let go.
    assert peak < 44 * mib, f"{peak / mib:.0f} MiB"
    first = np.random.default_rng(0)
    for place, ((dtype, shape), variable) in enumerate(zip(kinds, variables, strict=True)):
        drawn = first.integers(0, 100, shape, np.int32)
        expected = own[place] if place in left else tf.cast(drawn, dtype).numpy()
        np.testing.assert_array_equal(variable.numpy(), expected)


@ranks(2)
def test_what_rank_0_has_from_elsewhere_is_everybodys():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies.replicas import synchronise

    primitives.init()
    variables = [tf.Variable(tf.fill([3], primitives.rank() + 1.0)), tf.Variable([7.0])]
    asked = []

    def first_sync(values):
        asked.append([value.tolist() for value in values])
        # One value for all elements, as of what was sent short.
        return [np.broadcast_to(np.float32(5), (3,)), np.array([8], np.float32)]

    assert synchronise(variables, first_sync, left={1}) == 16
    assert asked == ([[[1.0] * 3, [7.0]]] if primitives.rank() == 0 else [])
    assert [variable.numpy().tolist() for variable in variables] == [[5.0] * 3, [7.0]]


@ranks(2)
def test_variables_that_a_rank_has_made_in_another_order_are_known_by_their_names():
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    for around in (tf.function, lambda step: step):
        strategy = CompressedRing()
        with strategy.scope():
            order = ["a", "b", "frozen"][:: -1 if rank else 1]
            made = {
                name: tf.Variable(tf.fill([3], 1.0 + rank + "a b frozen".index(name)), name=name)
                for name in order
            }
            descent = keras.optimizers.SGD(0.25)

        def step(made=made, descent=descent):
            trained = [made["a"], made["b"]]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(made["a"] * made["b"] * made["frozen"])
            descent.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))

        around(lambda run=strategy.run, step=step: run(step))()
        # They begin as rank 0 has made them: 1, 3 and 5; gradients of both ranks are added up.
        for name, value in (("a", 1 - 0.25 * 30), ("b", 3 - 0.25 * 10), ("frozen", 5)):
            np.testing.assert_array_equal(made[name].numpy(), np.full(3, value))


@ranks(2)
def test_what_the_step_of_a_model_reads_is_known_by_name_too():
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) * made["a"] * made["b"] - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    rank = primitives.rank()
    with CompressedRing().scope():
        made = {
            name: tf.Variable(tf.fill([3], 1.0 + 10 * rank + "ab".index(name)), name=name)
            for name in "ab"[:: -1 if rank else 1]
        }
        model = Scaled()
        model.compile("sgd")
    model.fit(np.ones((8, 2)), np.ones((8, 3)), verbose=0)
    assert {name: one.numpy().tolist() for name, one in made.items()} == {
        "a": [1.0] * 3,
        "b": [2.0] * 3,
    }


@ranks(2)
def test_names_that_are_at_odds_with_the_order_by_numbers_of_layers_alone_are_refused():
    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        # As from a set: the order of making differs, that of building does not.
        left_first = primitives.rank() == 0
        one, other = (keras.layers.Dense(3, use_bias=False, trainable=False) for _ in range(2))
        left, right = (one, other) if left_first else (other, one)
        for layer in (left, right):
            layer.build((None, 3))
    told = r"number 0 of 2 is dense/kernel on rank 0 and dense_1/kernel on rank 1.*of their own"
    with pytest.raises(ProtocolError, match=told):
        strategy.run(lambda: tf.reduce_sum(left(tf.ones([1, 3])) * right(tf.ones([1, 3]))))

    # What a graph trains has the order of its gradients.
    def move():
        kernels = [one.kernel, other.kernel]
        before = [tf.identity(kernel) for kernel in kernels]
        descent.apply([tf.fill((3, 3), 1.0 + k) for k in range(2)], kernels)
        return [was - kernel for was, kernel in zip(before, kernels, strict=True)]

    lazily = CompressedRing()
    with lazily.scope():
        one, other = (keras.layers.Dense(3, use_bias=False) for _ in range(2))
        for layer in (one, other) if left_first else (other, one):
            layer.build((None, 3))
        descent = keras.optimizers.SGD(1.0)
    for place, by in enumerate(tf.function(lambda: lazily.run(move))()):
        np.testing.assert_allclose(by, np.full((3, 3), 2.0 * (1 + place)), rtol=1e-5)

    # A model has an order of its own, and that counts.
    inputs = keras.Input((3,))
    with strategy.scope():
        for place, layer in enumerate((left, right)):
            layer.kernel.assign(tf.fill([3, 3], place + 10.0 * primitives.rank()))
        outputs = keras.layers.Dense(2)(left(inputs) + right(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    assert [float(layer.kernel[0, 0]) for layer in (left, right)] == [0.0, 1.0]
