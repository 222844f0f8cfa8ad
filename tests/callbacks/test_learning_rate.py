# SPDX-License-Identifier: Apache-2.0
"""Learning-rate callbacks, value by value, in one process."""

import numpy as np
import pytest

pytestmark = pytest.mark.tf


def fit(callbacks, *, rate=0.8, epochs=4, initial_epoch=0, **options):
    """The rate of every execution of a `fit` with 5 steps per epoch, and its logs."""
    import keras

    seen = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

        def on_train_batch_begin(self, batch, logs=None):
            before.append(float(self.model.optimizer.learning_rate))

    class Still(keras.Sequential):
        """Its steps change nothing: only rates are looked at."""

        def train_step(self, data):
            return {"loss": 0.0}

    before = []
    model = Still([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse", run_eagerly=True, **options)
    rows = np.ones([10, 2], np.float32), np.ones([10, 1], np.float32)
    history = model.fit(
        *rows,
        batch_size=2,
        epochs=epochs,
        initial_epoch=initial_epoch,
        verbose=0,
        callbacks=[*callbacks, Spy()],
    )
    return before, seen, history.history


def test_warmup_is_linear_per_step_and_ends_exactly(capsys):
    from tf_hips.callbacks import LearningRateWarmup

    # As Horovod's examples write it.
    warmup = LearningRateWarmup(warmup_epochs=2, scale=4, momentum_correction=False, verbose=1)
    used, after, history = fit([warmup])
    told = "Epoch 2: the warm-up of the learning rate to 0.8 is over."
    assert capsys.readouterr().out.split("\n") == ["", told, ""]
    expected = [0.8 / 4 * (1 + 3 * (step + 1) / 10) for step in range(10)] + [0.8] * 10
    np.testing.assert_allclose(used, expected, rtol=1e-6)
    assert used[9] == used[10] == after[9] == np.float32(0.8)
    np.testing.assert_allclose(history["learning_rate"], [0.5, 0.8, 0.8, 0.8], rtol=1e-6)
    assert warmup.rate(0) == pytest.approx(0.2 * 1.3) and warmup.rate(10**6) == np.float32(0.8)

    # A number of steps that ends within an epoch, and the rate given.
    used, _, _ = fit([LearningRateWarmup(0.4, warmup_steps=7, scale=8)], epochs=2)
    expected = [0.05 * (1 + 7 * (step + 1) / 7) for step in range(7)] + [0.4] * 3
    np.testing.assert_allclose(used, expected, rtol=1e-6)

    # One worker: nothing to warm up.
    assert set(fit([LearningRateWarmup()])[0]) == {float(np.float32(0.8))}


def test_a_warmup_is_as_long_as_is_said_to_the_nearest_step():
    from tf_hips.callbacks import LearningRateWarmup

    # Epochs of 5 steps; without a word it is Horovod's five epochs.
    for options, length in (
        ({}, 25),
        ({"warmup_epochs": 1.5}, 8),
        ({"warmup_epochs": 0.01}, 1),
        ({"warmup_steps": 7}, 7),
        ({"steps_per_epoch": 4}, 20),
    ):
        warmup = LearningRateWarmup(0.8, scale=4, **options)
        warmup.set_params({"steps": 5})
        assert warmup.rate(length - 1) == 0.8
        if length > 1:
            assert warmup.rate(length - 2) == pytest.approx(0.2 * (1 + 3 * (length - 1) / length))


def test_warmup_in_executions_of_several_steps_and_in_the_middle():
    from tf_hips.callbacks import LearningRateWarmup

    options = {"warmup_steps": 7, "scale": 2}
    used, after, _ = fit([LearningRateWarmup(**options)], epochs=2, steps_per_execution=2)
    begins = [0, 2, 4, 5, 7, 9]  # executions of 2, 2 and 1 steps in each epoch
    expected = [0.4 * (1 + (step + 1) / 7) if step < 7 else 0.8 for step in begins]
    np.testing.assert_allclose(used, expected, rtol=1e-6)
    # At the end of the execution that ends the warm-up, not only at the next beginning.
    np.testing.assert_allclose(after[3], 0.8, rtol=1e-6)

    # Begun later, it is where it would have been; begun after its end it does nothing.
    used, _, _ = fit([LearningRateWarmup(**options)], initial_epoch=1, epochs=2)
    expected = [0.4 * (1 + (step + 1) / 7) if step < 7 else 0.8 for step in range(5, 10)]
    np.testing.assert_allclose(used, expected, rtol=1e-6)
    used, _, _ = fit([LearningRateWarmup(0.3, **options)], initial_epoch=2)
    assert set(used) == {float(np.float32(0.8))}


def test_after_the_warmup_the_rate_is_others_business():
    import keras

    from tf_hips.callbacks import LearningRateWarmup

    later = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 if epoch == 3 else rate)
    used, _, _ = fit([LearningRateWarmup(warmup_epochs=2, scale=4), later])
    assert used[14] == np.float32(0.8) and used[15:] == [np.float32(0.1)] * 5


def test_multipliers_follow_horovod():
    from tf_hips.callbacks import LearningRateMultiplier

    # A number is a base of powers, in its epochs only.
    used, _, history = fit([LearningRateMultiplier(0.5, 0.1, start_epoch=1, end_epoch=3)])
    np.testing.assert_allclose(used, [0.8] * 5 + [0.5] * 5 + [0.05] * 10, rtol=1e-6)
    np.testing.assert_allclose(history["learning_rate"], [0.8, 0.5, 0.05, 0.05], rtol=1e-6)
    used, _, _ = fit([LearningRateMultiplier(0.5, lambda epoch: 1 / (1 + epoch))])
    np.testing.assert_allclose(used, np.repeat([0.5, 0.25, 0.5 / 3, 0.125], 5), rtol=1e-6)
    # Without stairs it gets fractions of epochs.
    used, _, _ = fit(
        [LearningRateMultiplier(0.5, lambda epoch: 1 + epoch, end_epoch=2, staircase=False)]
    )
    expected = [0.5 * (1 + step / 5) for step in range(10)]
    np.testing.assert_allclose(used, expected + [expected[-1]] * 10, rtol=1e-6)


def test_loss_scaling_keeps_its_rate_inside():
    import keras

    from tf_hips.callbacks import LearningRateWarmup

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.8)), "mse")
    warmup = LearningRateWarmup(warmup_steps=4, scale=2)
    model.fit(np.ones([6, 2]), np.ones([6, 1]), batch_size=2, verbose=0, callbacks=[warmup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.4 * (1 + 3 / 4))


def test_one_rate_of_the_optimizer_that_was_compiled(caplog):
    import keras

    from tf_hips.callbacks import LearningRateWarmup

    def train(optimizer, **attributes):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
        for name, value in attributes.items():
            setattr(model, name, value)
        warmup = LearningRateWarmup(warmup_steps=4, scale=2)
        model.fit(np.ones([6, 2]), np.ones([6, 1]), batch_size=2, verbose=0, callbacks=[warmup])

    parts = keras.optimizers.OptimizerMap(keras.optimizers.Adam())
    with pytest.raises(ValueError, match=r"must have one learning rate.*MultiOptimizer\(Adam\)"):
        train(keras.optimizers.MultiOptimizer(parts))
    inner = keras.optimizers.Adam()
    train(keras.optimizers.LossScaleOptimizer(inner), mine=inner)
    assert "and not of others" not in caplog.text
    train("sgd", judge=keras.optimizers.Adam(name="of_judge"))
    assert "sets the learning rate of the optimizer that `" in caplog.text
    assert "and not of others that the model has: of_judge." in caplog.text


def test_errors_say_what_is_wrong():
    import keras
    import tensorflow as tf

    from tf_hips.callbacks import LearningRateMultiplier, LearningRateWarmup

    class Unsaved(keras.optimizers.schedules.LearningRateSchedule):
        """Without a `get_config`."""

        def __call__(self, step):
            return 0.1

    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    with pytest.raises(TypeError, match="positional"):
        LearningRateMultiplier(0.1, 0.5, 3)
    for callback in (LearningRateWarmup(), LearningRateMultiplier(0.1, 0.5)):
        with pytest.raises(ValueError, match=r"must be a float .* schedule .*ExponentialDecay"):
            fit([callback], rate=decay)
        with pytest.raises(ValueError, match=r"must be a float .* learning_rate=Unsaved"):
            fit([callback], rate=Unsaved())
    for wrong in (
        {"initial_lr": 0.0},
        {"warmup_epochs": 0},
        {"warmup_steps": -1},
        {"warmup_epochs": 1, "warmup_steps": 1},
        {"scale": 0.5},
        {"steps_per_epoch": 0},
        {"momentum_correction": True},
    ):
        with pytest.raises(ValueError, match="must be"):
            LearningRateWarmup(**wrong)
    with pytest.raises(ValueError, match=r"`momentum_correction` must be False, or left out"):
        LearningRateMultiplier(0.1, 0.5, momentum_correction=True)
    with pytest.raises(ValueError, match="`end_epoch` must be at least"):
        LearningRateMultiplier(0.1, 0.5, start_epoch=3, end_epoch=2)

    # A generator does not say how long it is.
    def generator():
        for _ in range(3):
            yield np.ones([2, 2]), np.ones([2, 1])

    data = tf.data.Dataset.from_generator(
        generator,
        output_signature=(tf.TensorSpec([2, 2]), tf.TensorSpec([2, 1])),
    )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="`steps_per_epoch` must be given"):
        model.fit(data, verbose=0, callbacks=[LearningRateWarmup()])
    warmup = LearningRateWarmup(0.4, warmup_epochs=1, scale=2, steps_per_epoch=3)
    model.fit(data, verbose=0, callbacks=[warmup])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.4)


def test_every_fit_warms_up_to_the_rate_it_finds():
    import keras

    from tf_hips.callbacks import LearningRateWarmup

    warmup = LearningRateWarmup(warmup_steps=4, scale=2)
    for rate in (0.8, 0.2):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        warmup.set_model(model)
        assert warmup.rate(9) == np.float32(rate)
    # Broken off in the middle, it goes on to the rate that it had found.
    warmup.on_epoch_begin(0)
    warmup.set_params({"steps": 9})
    warmup.on_train_batch_begin(0)
    assert float(model.optimizer.learning_rate) < 0.2
    warmup.set_model(model)
    assert warmup.rate(9) == np.float32(0.2)
