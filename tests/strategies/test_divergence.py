# SPDX-License-Identifier: Apache-2.0
"""What one rank does alone is noticed, undone, or does no harm."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

_REFUSED = "Weights must exist, and be equal on all workers, before gradients.*Received: "


@ranks(2)
def test_what_one_rank_does_alone():
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing, local, shard

    class Never(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            pytest.fail("it has begun")

    rank = primitives.rank()
    own = training.shard(training.data(32), rank, 2)
    strategy = CompressedRing()
    strategy = CompressedRing()  # as a notebook does when a cell is run again
    assert len(list(shard(own, 8))) == 1
    with strategy.scope():
        model = training.build(keras.optimizers.Adam(0.01), run_eagerly=True)
    with pytest.raises(ValueError, match=r"`predict` must have all rows, in order.*is shuffled"):
        model.predict(shard(own[0], 8), verbose=0)
    with pytest.raises(ValueError, match=r"`evaluate` must have all rows.*leaves out rows"):
        model.evaluate(shard([array[:15] for array in own], 4), verbose=0)
    with pytest.raises(ValueError, match=r"`evaluate` must have all rows.*leaves out rows"):
        # Not after an epoch, which may take hours.
        model.fit(
            *own, validation_data=shard([array[:15] for array in own], 4), callbacks=[Never()]
        )
    training.fit(model, own)

    # Weights that rank 0 has loaded between two fits are everybody's, as with Horovod's broadcast.
    if rank == 0:
        model.set_weights([np.full_like(weight, 0.5) for weight in model.get_weights()])
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    assert abs(model.get_weights()[0].mean() - 0.5) < 0.1

    # A learning rate that one rank alone changes would let the replicas drift apart.
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
    with pytest.raises(ProtocolError, match=r"epoch 1 `.*rate` of worker 1 .* by 0.5 of its norm"):
        model.fit(training.rows(own), verbose=0, callbacks=[scheduler] if rank == 0 else [])
    training.fit(model, own)  # begins with rank 0's again
    training.assert_same_on_all_ranks(model)

    # An error that a callback of one rank catches is that rank's business; results keep the order
    # that Keras gives them.
    class Careless(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with local(), pytest.raises(tf.errors.InvalidArgumentError):  # the steps are eager
                self.model.evaluate(own[0], own[1][:, :2], verbose=0)

    model.fit(training.rows(own), verbose=0, callbacks=[Careless()] if rank == 0 else [])
    names = list(model.train_on_batch(own[0][:8], own[1][:8], return_dict=True))
    with local():
        assert names == list(model.test_on_batch(own[0][:8], own[1][:8], return_dict=True))

    # Eager loops: a second model, and many optimizers whose ids Python uses again.
    features, targets = (tf.constant(array[:8]) for array in own)
    for _ in range(2):
        keras.utils.set_random_seed(rank)
        with strategy.scope():
            other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])

        def step(other, optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((other(features) - targets) ** 2) / 2
            gradients = tape.gradient(loss, other.trainable_variables)
            optimizer.apply_gradients(zip(gradients, other.trainable_variables, strict=True))
            return float(loss)

        before = None
        for number in range(5):
            with strategy.scope():
                optimizer = keras.optimizers.SGD(0.1 * number)
            strategy.run(step, (other, optimizer))
            if rank == 1:
                before = [optimizer] if number % 2 else []  # ids are used again on one rank only
        assert before is None or len(before) < 2
        alone = [weight.numpy() for weight in other.weights]
        everyone = primitives.gather_objects([weight.tobytes().hex() for weight in alone])
        assert everyone[0] == everyone[1]

    # A lazy model whose weights appear in the eager step itself, different on the ranks.
    keras.utils.set_random_seed(rank)
    with strategy.scope():
        lazy, optimizer = keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD(0.1)
    with pytest.raises(ProtocolError, match=_REFUSED):
        strategy.run(step, (lazy, optimizer))


@ranks(2)
def test_what_rank_0_loads_between_two_fits():
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing, local

    rank = primitives.rank()
    own = training.shard(training.data(32), rank, 2)
    strategy = CompressedRing()

    def compile_anew():
        with strategy.scope():
            model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, trainable=False),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(3),
            ]
        )
    frozen, normal, head = model.layers
    compile_anew()
    training.fit(model, own)

    # A frozen backbone: a mean of the two would be nobody's.
    if rank == 0:
        frozen.set_weights([np.full((6, 4), 10.0), np.zeros(4)])
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    assert (frozen.kernel.numpy() == 10.0).all()

    # All of a model, which is then compiled again: its slots are new, its weights are not.
    if rank == 0:
        model.set_weights([np.full_like(weight, 0.5) for weight in model.get_weights()])
    compile_anew()
    model.optimizer.learning_rate = 0.0
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    for weight in (frozen.kernel, head.kernel, normal.gamma):
        assert (weight.numpy() == 0.5).all()

    # An evaluation is that of one model, also after training.
    if rank == 0:
        model.set_weights([np.full_like(weight, 0.25) for weight in model.get_weights()])
    told = model.evaluate(training.rows(own), verbose=0)
    training.assert_same_on_all_ranks(model)
    assert (normal.moving_mean.numpy() == 0.25).all()
    everyone = [
        np.concatenate(one)
        for one in zip(*primitives.gather_objects([array.tolist() for array in own]), strict=True)
    ]
    expected = np.mean((model.predict(everyone[0], verbose=0) - everyone[1]) ** 2)
    np.testing.assert_allclose(told, expected, rtol=1e-5)

    # Batches by hand move statistics on each worker by its own rows: they are averaged, not loaded.
    for _ in range(2):
        model.train_on_batch(own[0] + rank, own[1])
    means = primitives.gather_objects(normal.moving_mean.numpy().tolist())
    assert means[0] != means[1]
    with local():
        model.evaluate(training.rows(own), verbose=0)
    assert normal.moving_mean.numpy().tolist() == means[rank]
    model.evaluate(training.rows(own), verbose=0)
    training.assert_same_on_all_ranks(model)
    np.testing.assert_allclose(normal.moving_mean.numpy(), np.mean(means, 0), rtol=1e-6)
    assert not (normal.moving_mean.numpy() == 0.25).any()


@ranks(2)
def test_gradients_of_weights_that_were_others_are_refused_by_both():
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        of_first, of_late, of_third, of_fourth = (keras.optimizers.SGD(0.5) for _ in range(4))

    def make(name):
        return tf.Variable([1.0 + rank, 2.0], name=name)

    def gradient(weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2) / 4  # the mean of both ranks'
        return tape.gradient(loss, weight)

    def refused(match, action):
        with pytest.raises(ProtocolError, match=match):
            action()

    # A weight that is made in an eager step, in which another one is reduced first.
    with strategy.scope():
        first = make("first")
    late = []

    def step():
        if not late:
            late.append(make("late"))
        gradients = gradient(first), gradient(late[0])
        of_first.apply(gradients[:1], [first])
        of_late.apply(gradients[1:], late)

    refused(f"{_REFUSED}gradients of late", lambda: strategy.run(step))
    strategy.run(step)
    np.testing.assert_array_equal(first, [0.25, 0.5])  # it was reduced both times
    np.testing.assert_array_equal(late[0], [0.5, 1.0])

    # Gradients that another function has computed.
    with strategy.scope():
        third = make("third")
    compute = tf.function(lambda: strategy.run(gradient, (third,)))

    @tf.function
    def apply(value):
        strategy.run(lambda: of_third.apply([value], [third]))

    computed = compute()
    refused(f"{_REFUSED}gradients of third", lambda: apply(computed))
    strategy.run(lambda: None)  # as the message says
    apply(compute())
    np.testing.assert_array_equal(third, [0.5, 1.0])

    # Weights that rank 0 loads behind a step of another kind.
    with strategy.scope():
        fourth = make("fourth")
    strategy.run(lambda: fourth + 1.0)
    if rank == 0:
        fourth.assign([7.0, 7.0])

    @tf.function
    def train():
        strategy.run(lambda: of_fourth.apply([gradient(fourth)], [fourth]))

    refused("must be equal when they are trained.*fourth.*ranks 0 and 1", train)
    fourth.assign([7.0, 7.0])
    train()
    np.testing.assert_array_equal(fourth, [3.5, 3.5])

    # Updates without an optimizer, and what ranks meet for is known already.
    for name in ("fifth", "sixth"):
        with strategy.scope():
            weight = make(name)

        def move(weight):
            total = tf.distribute.get_replica_context().all_reduce("SUM", weight + 0.0)
            weight.assign_sub(total / 2.0)

        tf.function(lambda: strategy.run(move, (weight,)))()  # noqa: B023 - at once
        np.testing.assert_array_equal(weight, [0.0, 0.0])


@ranks(2)
def test_what_one_rank_alone_looks_at_is_left_to_it():
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tf_hips.comm import primitives

    rank = primitives.rank()
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        seen, teacher = (tf.Variable([1.0 + rank, 2.0], name=name) for name in ("seen", "teacher"))

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(2)

            def call(self, x):
                return self.dense(x) + tf.stop_gradient(made["teacher"])

            def train_step(self, data):
                if rank == 0:
                    tf.debugging.assert_all_finite(made["seen"], "looked at")
                return super().train_step(data)

        # Attributes of a model are its own, and all ranks have them.
        made = {"seen": seen, "teacher": teacher}
        model = Model()
        model.compile("sgd", "mse")
    for rows in (8, 6):  # another trace of the same model
        model.fit(np.ones((rows, 3), "float32"), np.ones((rows, 2), "float32"), verbose=0)
    np.testing.assert_array_equal(teacher, [1.0, 2.0])
    np.testing.assert_array_equal(seen, [1.0 + rank, 2.0])
    everyone = primitives.gather_objects([float(tf.norm(one)) for one in model.weights], "norms")
    assert everyone[0] == everyone[1]
