# SPDX-License-Identifier: Apache-2.0
"""What counts in SCAFFOLD and FedNova: steps of the optimizer, which need not be those of Keras."""

import types

import numpy as np
import pytest

from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf


def _class_of(kind):
    """A model whose gradient is 8 for rows of 8, by how often a step of Keras applies it."""
    import keras
    import tensorflow as tf

    class Once(keras.Model):
        pass

    class Twice(keras.Model):  # as SAM
        def train_step(self, data):
            super().train_step(data)
            return super().train_step(data)

    class Seldom(keras.Model):  # as one that accumulates gradients by itself
        def __init__(self, *args):
            super().__init__(*args)
            self.count = tf.Variable(0, trainable=False)

        def train_step(self, data):
            x, _ = data

            def step():
                self.optimizer.apply([tf.reshape(tf.reduce_mean(x), [1, 1])], self.weights)
                return tf.reduce_mean(x)

            self.count.assign_add(1)
            return {"loss": tf.cond(self.count % 2 == 0, step, lambda: tf.reduce_mean(x))}

    return {"twice": Twice, "seldom": Seldom}.get(kind, Once)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_before_another_compile_count(is_compiled):
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    def compile_again(epoch, logs=None):
        if epoch == 1 and is_compiled:
            with strategy.scope():
                model.compile(keras.optimizers.SGD(0.01), loss)
            model.make_train_function()

    def loss(_, out):
        return keras.ops.mean(out, axis=-1)

    strategy = CompressedRing()
    with strategy.scope():
        inputs = keras.Input((1,))
        model = keras.Model(inputs, keras.layers.Dense(1, use_bias=False)(inputs))
        model.compile(keras.optimizers.SGD(0.01), loss)
    loop = FedAvg(model, strategy, local_steps=4, scaffold=True, server_optimizer="fedavg(0.5)")
    x = np.full((2, 1), 8.0, np.float32)
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=compile_again)
    loop.fit(x, x, batch_size=1, epochs=2, verbose=0, callbacks=[watch])
    np.testing.assert_allclose(loop._controls.own[0].numpy(), 8.0, rtol=1e-5)


@pytest.mark.parametrize("method", ["scaffold", "normalise"])
@pytest.mark.parametrize(
    ("kind", "made"), [("once", 4), ("twice", 8), ("seldom", 2), ("loss scale", 1)]
)
def test_what_counts_is_steps_of_the_optimizer(kind, made, method):
    """c_i is the gradient and a_i the number of gradients, whatever a step of Keras is."""
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        inputs = keras.Input((1,))
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = _class_of(kind)(inputs, layer(inputs))
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
        optimizer.iterations.assign(7)  # of another training
        if kind == "loss scale":  # three of four steps overflow
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**127)
        model.compile(optimizer, lambda y, out: keras.ops.mean(out, axis=-1))
    # Any rule but a mean's: one worker makes of a mean what plain Keras does.
    options = {method: True, "server_optimizer": "fedavg(0.5)"}
    loop = FedAvg(model, strategy, local_steps=4, **options)
    places, told = [], []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: places.append(loop.place())
    )
    meet = loop.meet

    def recorded(*, ends=False):
        told.append(loop.words().get("effective"))
        meet(ends=ends)

    loop.meet = recorded
    x = np.full((4, 1), 8.0, np.float32)
    loop.fit(x, x, batch_size=1, verbose=0, callbacks=[watch])
    assert [one["applied"] for one in places] == [[7]] * 4  # a backup has it
    if method == "normalise":
        assert told[0] == made
    else:
        assert float(loop._controls.own[0][0, 0]) == pytest.approx(8.0, rel=1e-4)


def test_steps_before_a_local_phase():
    import keras

    from tf_hips.loops.methods import Applied

    optimizer = keras.optimizers.SGD(0.1)
    model = types.SimpleNamespace(optimizer=optimizer)
    optimizer.iterations.assign(9)
    applied = Applied(model)
    applied.begin(2)  # a phase that an older backup has begun
    assert applied.of(optimizer) == 2
    applied.go_on([4])
    applied.begin(2)
    assert applied.of(optimizer) == 5 and applied.place() == [4]
    model.optimizer = keras.optimizers.SGD(0.1)  # compiled again
    assert applied.of(model.optimizer) == 0
    optimizer.iterations.assign(3)  # restored by a script
    assert applied.of(optimizer) == 0


def test_who_has_made_no_step_does_not_count_in_the_mean_of_steps():
    from tf_hips.loops import methods

    members = [(0.25, 4.0), (0.5, 0.0), (0.25, 2.0)]
    # Movements of 4 and 2 gradients, in a mean of all three: 3 gradients of the two who moved.
    sent = [one * methods.gain(one, members) for _, one in members]
    assert sum(share * one for (share, _), one in zip(members, sent, strict=True)) == 3.0
    assert sent[0] == sent[2] and methods.gain(0.0, members) == 1.0
    assert methods.gain(2.0, [(0.5, 2.0), (0.5, 6.0)]) == 2.0
    assert methods.gain(0.0, [(1.0, 0.0)]) == 1.0


@pytest.mark.parametrize("averaging", ["normalised", "bounded"])
@pytest.mark.parametrize("bears_liars", [False, True])
def test_esync_goes_on_where_a_member_has_made_no_step(averaging, bears_liars):
    import tensorflow as tf

    from tf_hips.loops import ESync
    from tf_hips.loops.meeting import Meeting, Told

    loop = ESync.__new__(ESync)
    loop._averaging, loop._bears_liars = averaging, bears_liars
    parties = tuple(
        (Told(steps=4, samples=8, words={"effective": one, "loss": 1.0}),) for one in (4.0, 0.0)
    )
    meeting = Meeting(parties, "uniform", True)
    moved = [tf.constant([1.0])]
    [sent], [idle] = (loop.outgoing(moved, meeting, (party, 0)) for party in (0, 1))
    assert float(idle[0]) == 1.0
    assert float(sent[0]) == (1.0 if bears_liars or averaging == "bounded" else 2.0)


@pytest.mark.parametrize(
    "options",
    [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.5},
     {"use_ema": True, "ema_overwrite_frequency": 2}],
)  # fmt: skip
def test_steps_that_are_no_multiples_of_gradients_are_refused(options):
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, **options), "mse")
    told = f"{list(options)[-1]}={list(options.values())[-1]}"
    with pytest.raises(ConfigError, match=f"without clipping and .* Received: SGD, {told}"):
        FedAvg(model, strategy, local_steps=8, scaffold=True)
