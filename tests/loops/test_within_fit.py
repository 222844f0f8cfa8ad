# SPDX-License-Identifier: Apache-2.0
"""What a script does within a `fit` of a loop, by callbacks and by training steps of its own."""

import functools

import pytest

from tests.strategies import training

pytestmark = pytest.mark.tf

BATCH = 8


def _compiled(optimizer="sgd", **options):
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile(keras.optimizers.get(optimizer), "mse", **options)
    return model


def _loop(model_of=_compiled, **options):
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = model_of()
    return FedAvg(model, strategy, **{"local_steps": 2, **options})


@pytest.mark.parametrize(("is_compiled", "steps_per_execution"), [(False, 1), (True, 3)])
def test_a_loop_goes_on_meeting_when_a_callback_makes_the_train_function(
    is_compiled, steps_per_execution
):
    import keras

    def freeze(epoch, logs=None):
        if epoch != 1:
            return
        model.layers[0].trainable = False
        kernels.append(model.layers[0].get_weights()[0])
        if is_compiled:
            with model.distribute_strategy.scope():
                model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        model.make_train_function(force=not is_compiled)

    kernels = []
    loop = _loop(lambda: _compiled(steps_per_execution=steps_per_execution))
    model = loop.model
    x, y = training.data(6 * BATCH)
    options = {"batch_size": BATCH, "epochs": 4, "verbose": 0}
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=freeze)
    loop.fit(x, y, **options, callbacks=[watch])
    assert loop.round == 13  # of two steps, and that of the end
    assert (model.layers[0].get_weights()[0] == kernels[0]).all()
    # Afterwards the model has its own ones.
    assert "make_train_function" not in vars(model)
    assert model.train_function != loop._executions._run


def _averaging(**options):
    import keras

    return _compiled(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), **options)


def test_means_of_use_ema_that_a_callback_looks_at_end_nothing():
    import keras

    class Looks(keras.callbacks.Callback):
        def _look(self, *_):
            kept = self.model.get_weights()
            # What it runs need not be a function with a name, and is no step.
            assert self.model.distribute_strategy.run(functools.partial(len, kept)) == len(kept)
            self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
            means.append(self.model.get_weights())
            self.model.set_weights(kept)

        on_epoch_begin = on_epoch_end = on_train_end = _look

    x, y = training.data(5 * BATCH)
    found = []
    for looks in (False, True):
        keras.utils.set_random_seed(5)
        means = []
        loop = _loop(_averaging)
        ended = []
        end = loop.end_average

        def recorded(end=end, ended=ended, means=means):
            ended.append(len(means))
            end()

        loop.end_average = recorded
        options = {"batch_size": BATCH, "epochs": 4, "shuffle": False, "verbose": 0}
        history = loop.fit(x, y, **options, callbacks=[Looks()] if looks else [])
        assert history.epoch == [0, 1, 2, 3]
        assert ended == [len(means) - 1 if looks else 0]  # by Keras, and for that one alone
        found.append((loop.round, [one.tolist() for one in loop.model.get_weights()]))
    assert found[0] == found[1]


def test_what_a_callback_behind_decides_counts_for_the_end():
    """As BackupAndRestore, which moves behind all others, and stops all where one wants to."""
    import keras

    from tf_hips.callbacks import resuming

    class Stops(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            resuming.put_last(self)

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    class Resumes(Stops):
        def on_train_begin(self, logs=None):
            self.model._initial_epoch = 3

    x, y = training.data(5 * BATCH)
    for callback, epochs in ((Stops(), [0, 1]), (Resumes(), [])):
        loop = _loop(_averaging)
        rounds = []
        loop.end_average = lambda rounds=rounds, loop=loop: rounds.append(loop.round)
        history = loop.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[callback])
        assert (history.epoch, len(rounds)) == (epochs, 1)


def test_training_ends_where_keras_caps_the_epochs():
    import keras

    loop = _loop(_averaging)
    rounds = []
    loop.end_average = lambda: rounds.append(loop.round)
    x, y = training.data(5 * BATCH)
    keras.config.set_max_epochs(1)
    try:
        loop.fit(x, y, batch_size=BATCH, epochs=4, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
    assert rounds == [3]  # after the meeting of the end


def _tempered(make):
    """A model that also trains what `make` makes, by an optimizer of its own."""
    import keras
    import tensorflow as tf

    class Tempered(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(3)
            self.temperature = make()

        def compile(self, optimizer, of_temperature):
            super().compile(optimizer)
            self.of_temperature = of_temperature

        def build(self, shape):
            self.out.build(shape)
            self.built = True

        def call(self, x):
            return self.out(x) * self.temperature

        def train_step(self, data):
            x, y = data
            layers = self.out.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            of_layers, own = tape.gradient(loss, (layers, self.temperature))
            self.optimizer.apply_gradients(zip(of_layers, layers, strict=True))
            self.of_temperature.apply_gradients([(own, self.temperature)])
            return {"loss": loss}

    model = Tempered()
    model.build((None, 6))
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    return model


def _tensorflows():
    import tensorflow as tf

    return tf.Variable(1.0, name="temperature")


def _keras():
    import keras

    return keras.Variable(1.0, name="temperature")


@pytest.mark.parametrize("prox_mu", [0.0, 0.1])
def test_what_a_step_trains_and_the_loop_does_not_exchange_is_refused(prox_mu):
    x, y = training.data(4 * BATCH)
    loop = _loop(lambda: _tempered(_tensorflows), prox_mu=prox_mu)
    told = r"a `tf.Variable` is not\. Received: a gradient of `temperature`, float32\[\]"
    for _ in range(2):  # it stays so
        with pytest.raises(ValueError, match=told):
            loop.fit(x, y, batch_size=BATCH, verbose=0)
    loop = _loop(lambda: _tempered(_keras), prox_mu=prox_mu)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    assert len(loop.trained) == 3
    assert float(loop.model.temperature.numpy()) != 1.0


def test_a_layer_that_a_callback_unfreezes_is_refused_where_gradients_are_corrected():
    import keras

    def unfreeze(epoch, logs=None):
        if epoch == 1:
            loop.model.layers[0].trainable = True
            with loop.model.distribute_strategy.scope():
                loop.model.compile("sgd", "mse")
            loop.model.make_train_function()

    def build():
        model = _compiled()
        model.layers[0].trainable = False
        return model

    loop = _loop(build, prox_mu=0.1)
    x, y = training.data(4 * BATCH)
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=unfreeze)
    with pytest.raises(ValueError, match=r"first trains.* Received: a gradient of `.*kernel`"):
        loop.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[watch])
