# SPDX-License-Identifier: Apache-2.0
"""What `fit` takes keeps its meaning under a loop; one worker trains as under plain Keras."""

import math

import numpy as np
import pytest

from tests.strategies import training

pytestmark = pytest.mark.tf

ROWS, BATCH = 40, 8


def _build(optimizer="adam", **options):
    import keras

    keras.utils.set_random_seed(5)
    layers = [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(3, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.get(optimizer), "mse", metrics=["mae"], **options)
    return model


def _loop(model_of=_build, **options):
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = model_of()
    return FedAvg(model, strategy, **(options or {"local_steps": 3}))


def _subclassed():
    import keras

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="tanh")
            self.out = keras.layers.Dense(3)

        def call(self, x):
            return self.out(self.hidden(x))

    keras.utils.set_random_seed(5)
    model = Model()
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    return model


def _generator(x, y):
    while True:
        for begin in range(0, ROWS, BATCH):
            yield x[begin : begin + BATCH], y[begin : begin + BATCH]


def _dataset(x, y):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


KINDS = {
    "arrays": (_build, lambda x, y: ((x, y), {"batch_size": BATCH, "shuffle": False})),
    "dataset": (_build, lambda x, y: ((_dataset(x, y),), {})),
    "length unknown": (
        lambda: _build(steps_per_execution=2),
        lambda x, y: ((_dataset(x, y).filter(lambda *_: True),), {}),
    ),
    "generator": (_build, lambda x, y: ((_generator(x, y),), {"steps_per_epoch": 5})),
    "subclassed": (_subclassed, lambda x, y: ((_dataset(x, y),), {})),
    "eager": (lambda: _build(run_eagerly=True), lambda x, y: ((_dataset(x, y),), {})),
    "executions": (
        lambda: _build(steps_per_execution=4),
        lambda x, y: ((x, y), {"batch_size": BATCH, "shuffle": False}),
    ),
    "weights": (
        _build,
        lambda x, y: (
            (x, y),
            {"batch_size": BATCH, "shuffle": False, "sample_weight": np.linspace(0, 1, ROWS)},
        ),
    ),
}


# Executions that are cut, of data that may end in each; the others are for `make test-all`.
QUICK = ("length unknown",)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_one_worker_trains_as_under_plain_keras(kind):
    import keras

    from tf_hips.strategies import local

    class Prunes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            """Sets weights, also after the last meeting that has steps."""
            for one in self.model.weights:
                one.assign(np.where(np.abs(one.numpy()) < 0.1, 0.0, one.numpy()))

    build, data_of = KINDS[kind]
    x, y = training.data(ROWS)
    options = {"epochs": 4, "initial_epoch": 1, "verbose": 0, "validation_data": (x, y)}
    options["callbacks"] = [Prunes()]
    loop = _loop(build)
    data, more = data_of(x, y)
    found = loop.fit(*data, **more, **options)
    alone = build()
    alone.jit_compile = False  # the steps of a loop are not compiled by XLA, either
    data, more = data_of(x, y)
    with local():
        expected = alone.fit(*data, **more, **options)
    assert found.epoch == expected.epoch == [1, 2, 3]
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5, err_msg=name)
    for mine, theirs in zip(loop.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    # 15 steps are five rounds of three, wherever executions and epochs end.
    assert loop.round == 6


def test_class_weights_and_callbacks_given_by_position():
    import keras

    loop = _loop()
    x, _ = training.data(ROWS)
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    targets = np.arange(ROWS) % 2
    loop.fit(x, targets[:, None], BATCH, 2, 0, [callback, loop], class_weight={0: 1.0, 1: 2.0})
    assert seen == [0, 1]
    container = keras.callbacks.CallbackList([callback], add_history=True, model=loop.model)
    loop.fit(x, targets[:, None], BATCH, 2, 0, callbacks=container)
    assert seen == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]
)
def test_mixed_precision(policy):
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        loop = _loop(local_steps=2, server_optimizer="diloco", prox_mu=0.1)
        x, y = training.data(ROWS)
        losses = loop.fit(x, y, batch_size=BATCH, epochs=6, verbose=0).history["loss"]
    finally:
        keras.config.set_dtype_policy(before)
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]


def test_rounds_of_epochs_end_before_validation():
    import keras

    loop = _loop(local_epochs=2, server_optimizer="fedavg(0.5)")
    rounds = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rounds.append(loop.round)
    )
    x, y = training.data(ROWS)
    loop.fit(x, y, batch_size=BATCH, epochs=5, verbose=0, callbacks=[watch])
    assert rounds == [0, 1, 1, 2, 2]
    assert loop.round == 3  # the fifth epoch alone


def test_post_local_steps():
    from tf_hips.loops import PostLocal

    loop = _loop(local_steps=PostLocal(steps=4, after=3))
    steps = []
    meet = loop.meet

    def recorded(*, ends=False):
        steps.append(loop.steps)
        meet(ends=ends)

    loop.meet = recorded
    x, y = training.data(ROWS)
    loop.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    assert steps == [1, 1, 1, 4, 4, 4, 0]  # and a meeting without any
    with pytest.raises(ValueError, match="must be at least 1"):
        PostLocal(steps=0, after=1)


def test_slots_begin_anew_in_each_round_if_wished(tmp_path):
    import keras

    from tf_hips.callbacks import StepCheckpoint
    from tf_hips.callbacks.checkpoint_folder import CheckpointFolder

    def build():
        return _build({"class_name": "Adam", "config": {"learning_rate": 0.02}})

    loop = _loop(build, local_steps=2, reset_optimizer=True)
    seen = []

    def look(batch, logs=None):
        slots = loop.model.optimizer.variables
        seen.append((int(slots[0].numpy()), any(one.numpy().any() for one in slots[2:])))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    x, y = training.data(ROWS)
    checkpoint = StepCheckpoint(tmp_path, every=3)
    loop.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[watch, checkpoint])
    assert seen == [(1, True), (0, False), (1, True), (0, False), (1, True)]
    # Steps of the run, whatever the optimizer has forgotten.
    assert CheckpointFolder(tmp_path).steps() == [3, 5]
    assert float(loop.model.optimizer.learning_rate) == pytest.approx(0.02)


@pytest.mark.parametrize("name", ["Adam", "Nadam", pytest.param("Adamax", marks=pytest.mark.slow)])
def test_slots_that_begin_anew_count_anew_and_a_schedule_goes_on(name):
    """Each round is that of a new optimizer at the rates of the steps that it is in."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies import local

    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)

    def build():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(getattr(keras.optimizers, name)(rate), "mse")
        return model

    loop = _loop(build, local_steps=2, reset_optimizer=True)
    x, y = training.data(6 * BATCH)
    y = y.astype(np.float32)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    loop.fit(x, y, **options)
    loop.fit(x, y, **options)  # of a round that has ended: the same as in one
    assert int(loop.model.optimizer.iterations) == 12
    with local():
        with tf.distribute.get_strategy().scope():
            alone = build()
        for round_ in range(6):
            optimizer = getattr(keras.optimizers, name)(0.1)
            optimizer.build(alone.trainable_variables)
            for step in range(2):
                at = (2 * round_ + step) % 6 * BATCH
                with tf.GradientTape() as tape:
                    rows = alone(x[at : at + BATCH], training=True)
                    loss = tf.reduce_mean(tf.square(y[at : at + BATCH] - rows))
                gradients = tape.gradient(loss, alone.trainable_variables)
                optimizer.learning_rate = float(rate(2 * round_ + step))
                optimizer.apply(gradients, alone.trainable_variables)
    for found, wanted in zip(loop.model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_when_slots_began_is_kept_for_who_goes_on():
    """In another process by a backup, in this one by the optimizer; a new optimizer begins anew."""
    import keras
    import tensorflow as tf

    from tf_hips.loops.slots import FirstSlots
    from tf_hips.strategies import hooks

    def model_of(rate):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(rate), "mse")
        return model

    def slots_of(model, before=0):
        slots = FirstSlots(model)
        kept = tf.Variable(before, dtype=tf.int64)
        slots.make(lambda value, name: kept)
        slots.count()
        return slots, kept

    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model = model_of(rate)
    slots, kept = slots_of(model, before=5)
    assert int(hooks.begun(model.optimizer)) == 5
    model.optimizer.iterations.assign(9)
    slots.restore()
    assert int(kept) == int(hooks.begun(model.optimizer)) == 9
    assert int(model.optimizer.iterations) == 9
    _, other = slots_of(model)  # of another loop
    assert int(other) == 9
    model.compile(keras.optimizers.Adam(rate), "mse")
    slots.count()
    assert int(kept) == int(hooks.begun(model.optimizer)) == 0


def test_a_stop_ends_with_a_meeting():
    import keras

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    loop = _loop(local_steps=4, server_optimizer="fedavg(0.5)")
    first = loop.model.get_weights()[0]
    x, y = training.data(ROWS)
    history = loop.fit(x, y, batch_size=BATCH, epochs=9, verbose=0, callbacks=[Stops()])
    assert history.epoch == [0]
    assert loop.round == 2  # four steps, and the fifth
    np.testing.assert_array_equal(loop.reference[0].numpy(), loop.model.get_weights()[0])
    assert not np.array_equal(first, loop.model.get_weights()[0])
    # The next `fit` goes on.
    assert loop.fit(x, y, batch_size=BATCH, verbose=0).epoch == [0]


def test_a_fit_without_an_epoch_does_nothing():
    loop = _loop()
    first = loop.model.get_weights()
    x, y = training.data(ROWS)
    for options in ({"epochs": 0}, {"epochs": 3, "initial_epoch": 3}):
        assert loop.fit(x, y, verbose=0, **options).epoch == []
    for one, other in zip(loop.model.get_weights(), first, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("kind", "is_scheduled"), [("FedAvg", False), ("FedAvg", True), ("StreamingDiLoCo", False)]
)
def test_a_loss_that_is_no_number_costs_a_round(kind, is_scheduled, caplog):
    import keras

    from tf_hips import loops
    from tf_hips.strategies import CompressedRing

    class Unsaved(keras.optimizers.schedules.LearningRateSchedule):
        """Without a `get_config`, as that of TensorFlow's tutorial on transformers."""

        def __call__(self, step):
            return 0.001

    strategy = CompressedRing()
    with strategy.scope():
        model = _build(keras.optimizers.Adam(Unsaved()) if is_scheduled else "adam")
    options = {"fragments": 2} if kind == "StreamingDiLoCo" else {}
    loop = getattr(loops, kind)(model, strategy, local_steps=2, **options)
    finite = []

    def look(batch, logs=None):
        finite.append(all(np.isfinite(one).all() for one in model.get_weights()))

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=look)
    x, y = training.data(ROWS)
    y[2 * BATCH] = np.nan  # in the third of five steps
    loop.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[watch])
    if kind == "FedAvg":
        assert finite == [True, True, False, True, True]
        assert "Round 1 goes on without the update of this party" in caplog.text
    assert finite[-1]
    assert all(np.isfinite(one.numpy()).all() for one in model.optimizer.variables)


def test_what_was_infinite_from_the_first_may_stay_so(caplog):
    import keras

    class Least(keras.layers.Layer):
        def build(self, shape):
            infinite = keras.initializers.Constant(np.inf)
            self.least = self.add_weight(shape=(), initializer=infinite, trainable=False)

        def call(self, x):
            return x

    def build():
        model = keras.Sequential([keras.Input((6,)), Least(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    loop = _loop(build)
    first = loop.model.layers[1].get_weights()[0]
    x, y = training.data(ROWS)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    assert not np.array_equal(first, loop.model.layers[1].get_weights()[0])
    assert "goes on without the update" not in caplog.text
