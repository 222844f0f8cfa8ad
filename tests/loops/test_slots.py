# SPDX-License-Identifier: Apache-2.0
"""Slots that begin anew: of every kind of optimizer, and of all that a model has."""

import types

import numpy as np
import pytest

from tests.support.ranks import ranks
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf


def _model(optimizer):
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def _train(model, epochs=1):
    """The losses of as many steps, at whose end the weights are those that `fit` would leave."""
    x = np.random.default_rng(0).random((16, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    losses = []
    for _ in range(epochs):
        model.reset_metrics()
        losses.append(float(model.train_on_batch(x, y)))
    model.optimizer.finalize_variable_values(model.trainable_weights)
    return losses


def _values(optimizer):
    return [np.asarray(one) for one in optimizer.variables]


def _multi(first, rest):
    import keras

    by_path = keras.optimizers.OptimizerMap(rest, {".*first/.*": first})
    return keras.optimizers.MultiOptimizer(by_path)


def _optimizer(kind):
    import keras

    optimizers = keras.optimizers
    return {
        "adam": lambda: optimizers.Adam(0.01),
        "muon": lambda: optimizers.Muon(0.01, exclude_layers=["first"]),
        "ftrl": lambda: optimizers.Ftrl(0.01),  # begins with 0.1
        "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Lamb(0.01)),
        "multi": lambda: _multi(optimizers.Adam(0.01), optimizers.SGD(0.01, momentum=0.9)),
    }[kind]()


@pytest.mark.parametrize("kind", ["adam", "muon", "ftrl", "scaled", "multi"])
def test_slots_begin_anew(kind):
    from tf_hips.callbacks.optimizers import counter, parts_of
    from tf_hips.loops.slots import FirstSlots

    model = _model(_optimizer(kind))
    slots = FirstSlots(model)
    slots.restore()  # nothing is there yet
    model.optimizer.build(model.trainable_variables)
    before = [_values(one) for one in parts_of(model)]
    for number in range(2):  # the second time from what the first one has kept
        _train(model)
        for one in parts_of(model):
            one.learning_rate = 0.003
        slots.restore()
        for one, first in zip(parts_of(model), before, strict=True):
            now = _values(one)
            assert float(now.pop(1)) == pytest.approx(0.003)
            for value, wanted in zip(now, [first[0], *first[2:]], strict=True):
                np.testing.assert_array_equal(value, wanted)
        # No step is lost for who counts them, nor in a backup.
        slots.go_on(slots.place())
        for one in (model.optimizer, *parts_of(model)):
            assert int(counter(one).numpy()) + slots.forgotten(one) == number + 1


def test_a_slot_that_begins_as_the_weight_gets_the_weight():
    import keras

    from tf_hips.loops.slots import FirstSlots

    def free():
        return keras.optimizers.ScheduleFreeAdamW(0.05)

    def averaging():
        return keras.optimizers.Adam(0.05, use_ema=True)

    for make in (free, lambda: _multi(free(), averaging())):
        model = _model(make())
        slots = FirstSlots(model)
        for _ in range(2):
            _train(model, epochs=2)
            slots.restore()
            anew = _model(make())
            anew.set_weights(model.get_weights())
            assert _train(model, epochs=2) == _train(anew, epochs=2)


def _unsaved(kind):
    """An optimizer whose schedule, rate or class has no `get_config` that Keras could use."""
    import keras
    import tensorflow as tf

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.01 * tf.math.rsqrt(tf.cast(step + 1, tf.float32))

    class Longer(keras.optimizers.SGD):
        def __init__(self, rate, factor):
            super().__init__(rate * factor, momentum=0.9, use_ema=True)

    class Other(keras.optimizers.SGD):
        def __init__(self, learning_rate=0.1, momentum=0.0):
            super().__init__(learning_rate, momentum=momentum)

        def get_config(self):
            return {}

    return {
        "schedule": lambda: keras.optimizers.Ftrl(Schedule()),
        "function": lambda: keras.optimizers.Ftrl(lambda: 0.01),
        "constructor": lambda: Longer(0.1, 0.1),
        "other slots": lambda: Other(0.01, 0.9),
    }[kind]()


@pytest.mark.parametrize("kind", ["schedule", "function"])
def test_rates_that_keras_cannot_save_make_no_difference(kind):
    from tf_hips.loops import voted
    from tf_hips.loops.slots import FirstSlots, twin_of

    optimizer = _unsaved(kind)
    model, rate = _model(optimizer), optimizer._learning_rate
    slots = FirstSlots(model, resets=True)
    slots.count()
    optimizer.build(model.trainable_variables)
    before = _values(optimizer)  # Ftrl begins with 0.1
    _train(model)
    slots.restore()
    for value, wanted in zip(_values(optimizer)[1:], before[1:], strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert int(optimizer.iterations) == (1 if kind == "schedule" else 0)
    assert optimizer._learning_rate is twin_of(optimizer)._learning_rate is rate
    with pytest.raises(ConfigError, match=r"keep nothing.*which keeps .*accumulator"):
        voted.check_optimizer(_drawn(), model, resets=False)


@pytest.mark.parametrize("kind", ["constructor", "other slots"])
def test_slots_of_optimizers_that_keras_cannot_make_again_begin_as_zeros(kind, caplog):
    from tf_hips.loops import voted
    from tf_hips.loops.slots import FirstSlots

    optimizer = _unsaved(kind)
    model = _model(optimizer)
    _train(model)
    slots = FirstSlots(model)
    slots.count()
    slots.restore()
    count, rate, *rest = _values(optimizer)
    assert int(count) == 0 and float(rate) == pytest.approx(0.01)
    averages = model.get_weights() if optimizer.use_ema else []
    zeros = [np.zeros_like(one) for one in model.get_weights()]
    for value, wanted in zip(rest, averages + zeros, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert "begin as zeros. An optimizer must be one that Keras can make again" in caplog.text
    if kind == "constructor":
        for refused in (
            FirstSlots(model, resets=True).count,
            lambda: voted.check_optimizer(_drawn(), model, resets=False),
        ):
            with pytest.raises(ConfigError, match=r"override get_config.*Received: Longer, TypeE"):
                refused()


def _drawn():
    """As much of a strategy as tells that groups of voters change from round to round."""
    return types.SimpleNamespace(seats=object())


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_updates_of_accumulated_gradients_are_whole_though_slots_begin_anew(is_scheduled):
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.loops.slots import FirstSlots
    from tf_hips.strategies import CompressedRing

    rate = keras.optimizers.schedules.PiecewiseConstantDecay([99], [0.1, 0.1])
    strategy = CompressedRing()
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = keras.optimizers.SGD(
            rate if is_scheduled else 0.1, gradient_accumulation_steps=3
        )
        model.compile(optimizer, lambda y, out: -keras.ops.mean(out, axis=-1))
    loop = FedAvg(model, strategy, local_steps=4, reset_optimizer=True)
    x = np.ones((8, 1), np.float32)
    loop.fit(x, x, batch_size=1, verbose=0)
    # The gradient is always -1: two updates of 3 steps each.
    assert float(layer.kernel[0, 0]) == pytest.approx(0.2)
    [accumulated] = optimizer._accumulated_gradients
    assert float(accumulated[0, 0]) == (-2.0 if is_scheduled else 0.0)
    FirstSlots(model).restore(is_refused=True)  # it may hold NaN
    assert float(accumulated[0, 0]) == 0.0


def test_all_scheduled_optimizers_count_their_slots_and_a_backup_has_it():
    import keras
    import tensorflow as tf

    from tf_hips.callbacks.optimizers import parts_of
    from tf_hips.loops.slots import FirstSlots
    from tf_hips.strategies import hooks

    def make(saved=None):
        schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
        rest = keras.optimizers.SGD(0.01, momentum=0.9)
        model = _model(_multi(keras.optimizers.Adam(schedule), rest))
        model.optimizer.build(model.trainable_variables)
        model.another = keras.optimizers.Nadam(schedule)
        model.another.build(model.trainable_variables)
        kept = {}

        def make_variable(value, name):
            kept[name] = tf.Variable(value if saved is None else tf.constant(saved[name], tf.int64))
            return kept[name]

        slots = FirstSlots(model)
        slots.make(make_variable)
        slots.count()
        return model, slots, kept

    model, slots, kept = make()
    for count, one in enumerate(parts_of(model), 3):
        one._iterations.assign(count)
    slots.restore()
    saved = {name: int(one) for name, one in kept.items()}
    assert saved == {"slots_begun": 3, "slots_begun_1": 0, "slots_begun_2": 5}
    assert [int(one._iterations) for one in parts_of(model)] == [3, 0, 5]
    again, _, _ = make(saved)
    adam, _, nadam = parts_of(again)
    assert [int(hooks.begun(one)) for one in (adam, nadam)] == [3, 5]


def test_what_steps_of_several_optimizers_weigh():
    import keras

    from tf_hips.loops import FedAvg, methods
    from tf_hips.strategies import CompressedRing

    fast = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    slow = keras.optimizers.SGD(0.5)
    model = _model(_multi(fast, slow))
    _train(model, epochs=4)
    slowly = methods.effective_steps(6, shrinkage=0.1)
    expected = (20 * methods.effective_steps(3, 0.9) + 5 * slowly) / 25
    assert methods.weighed(model, 6, lambda one: 6, 0.2) == pytest.approx(expected)
    # One that was compiled and has no part in the steps does not count.
    model.compile("rmsprop", "mse")
    model.fast, model.slow = fast, slow
    assert methods.weighed(model, 6, lambda one: 6, 0.2) == pytest.approx(expected)

    strategy = CompressedRing()
    with strategy.scope():
        model = _model(_multi(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01)))
    options = {"normalise": True, "prox_mu": 0.1, "reset_optimizer": True}
    loop = FedAvg(model, strategy, local_steps=2, **options)
    x = np.random.default_rng(0).random((32, 4)).astype(np.float32)
    history = loop.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()


@ranks(2)
def test_a_step_with_two_optimizers_gets_over_a_loss_that_is_no_number():
    import keras
    import tensorflow as tf

    from tests.callbacks.test_several_optimizers import pair, rows
    from tf_hips.comm import primitives
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    strategy = CompressedRing()
    with strategy.scope():
        model = pair()
    loop = FedAvg(model, strategy, local_steps=4)

    class Spoils(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if rank == 1 and self.epoch == 1 and batch == 2:
                weight = model.judge.trainable_variables[0]
                weight.assign(tf.fill(weight.shape, np.nan))

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    x, y = rows(rank, 2)
    loop.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=[Spoils()])
    [maker, _], [judge, _] = model.pairs["maker"], model.pairs["judge"]
    for optimizer in (maker, judge):
        assert all(np.isfinite(value).all() for value in _values(optimizer))
        # Of the one that was spoilt they have begun anew, and the other's went on.
        assert int(optimizer.iterations) == (4 if rank == 1 else 12)
