# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore` in one process: the step, and every callback's effect, bit for bit."""

import numpy as np
import pytest

from tests.callbacks.resumed import (
    FEW,
    STEPS,
    Stop,
    assert_same,
    build,
    callbacks,
    data,
    short,
    train,
    undisturbed,
)

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(180)]


def test_keras_callbacks_remember(tmp_path):
    import keras

    def run(directory=None, stop_at=None):
        early = keras.callbacks.EarlyStopping(
            "loss", patience=2, min_delta=10, restore_best_weights=True
        )
        model = build()
        used = callbacks(directory, stop_at, "epoch begins")[1][:-2]
        return model, early, train(model, [early, *used], epochs=9, rows=short())

    model, early, history = run()
    assert early.stopped_epoch == 2 and early.best_epoch == 0
    with pytest.raises(Stop):
        run(tmp_path, stop_at=2)
    resumed, early, resumed_history = run(tmp_path)
    assert early.stopped_epoch == 2 and early.best_epoch == 0
    assert_same(model, history, resumed, resumed_history)


@pytest.mark.parametrize("steps_per_execution", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_stopped_run_goes_on_at_the_step_bit_for_bit(tmp_path, steps_per_execution, caplog):
    options = {"steps_per_execution": steps_per_execution, "run_eagerly": False}
    model = build(**options)
    all_steps, used = callbacks()
    history = train(model, used)
    assert len(history["loss"]) == 3 and len(set(history["learning_rate"])) == 3

    # Stopped in the middle of an epoch, two steps after a backup.
    directory = tmp_path / "backup"
    stopped = build(**options)
    done, used = callbacks(directory, stop_at=(1, 4), save_freq=2)
    with pytest.raises(Stop):
        train(stopped, used)
    assert done == [one for one in all_steps if one < (1, 4)]
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["00000003-epoch-1-step-0", "00000004-epoch-1-step-2"]

    resumed = build(**options)
    resumed.set_weights([weight * 0 for weight in resumed.get_weights()])
    done, used = callbacks(directory, save_freq=2)
    resumed_history = train(resumed, used)
    assert_same(model, history, resumed, resumed_history)
    # Callbacks see the steps that are left, with their numbers; arrays in order need no warning.
    assert done == [one for one in all_steps if one >= (1, 2)]
    assert not [one for one in caplog.records if "read and dropped" in one.message]
    # The end deletes the backups, and the next `fit` begins at its beginning.
    assert not directory.exists()
    assert len(train(resumed, [], epochs=1)["loss"]) == 1


def test_states_of_recurrent_layers_go_on(tmp_path):
    import keras

    def run(directory=None, stop_at=None, stateful=True):
        keras.utils.set_random_seed(1)
        # Its own states, and those of the two layers that it has inside.
        recurrent = keras.layers.Bidirectional(keras.layers.GRU(2, stateful=stateful))
        rows = [keras.Input(batch_shape=(4, 5)), keras.layers.Reshape((1, 5))]
        model = keras.Sequential([*rows, recurrent, keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        _, [*backup, stopping, _, _] = callbacks(directory, stop_at, save_freq=1)
        history = train(model, [*backup, stopping], epochs=1)
        return model, history, [np.asarray(one) for one in recurrent.states]

    model, history, states = run()
    with pytest.raises(Stop):
        run(tmp_path, stop_at=(0, 4))
    with pytest.raises(ValueError, match=r"is missing, and state float32\[4, 2\] when"):
        run(tmp_path, stateful=False)
    resumed, resumed_history, resumed_states = run(tmp_path)
    assert_same(model, history, resumed, resumed_history)
    for one, two in zip(states, resumed_states, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_run_stopped_between_epochs_goes_on_with_the_next(tmp_path):
    model, history = undisturbed()
    stopped = build()
    _, used = callbacks(tmp_path, stop_at=2, stop_when="epoch begins")
    with pytest.raises(Stop):
        train(stopped, used, rows=short())
    resumed = build()
    done, used = callbacks(tmp_path, delete_checkpoint=False, keep=1)
    resumed_history = train(resumed, used, rows=short())
    assert_same(model, history, resumed, resumed_history)
    assert done == [(2, step) for step in range(FEW)]
    # What it went on from stays while it may be needed, and one more.
    assert len(list(tmp_path.iterdir())) == 2
    # A run that is over has nothing left to do, and a longer one goes on.
    done, used = callbacks(tmp_path, delete_checkpoint=False)
    again = build()
    assert train(again, used, rows=short()) == resumed_history
    assert done == []
    assert_same(resumed, None, again, None)
    done, used = callbacks(tmp_path)
    assert len(train(build(), used, epochs=4, rows=short())["loss"]) == 4
    assert done == [(3, step) for step in range(FEW)]


def test_averages_are_exchanged_as_they_were_between_two_epochs(tmp_path):
    import keras

    def run(directory=None, stop_at=None):
        model = build(optimizer=keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9))
        used = callbacks(directory, stop_at, "epoch begins")[1]
        used.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        return model, train(model, used, rows=short())

    model, history = run()
    with pytest.raises(Stop):
        run(tmp_path, stop_at=2)
    assert_same(model, history, *run(tmp_path))


def test_saving_every_few_batches_goes_on_counting(tmp_path):
    import keras

    saved = []

    class Saving(keras.callbacks.ModelCheckpoint):
        def _save_model(self, epoch, batch, logs):
            saved.append((epoch, batch))

    def run(directory=None, stop_at=None):
        saved.clear()
        used = callbacks(directory, stop_at, save_freq=1)[1]
        saving = Saving(str(tmp_path / "{epoch}.keras"), save_freq=4)
        train(build(optimizer="sgd"), [saving, *used], epochs=2)
        return list(saved)

    whole = run()
    with pytest.raises(Stop):
        run(tmp_path / "backup", stop_at=(1, 3))
    begun = list(saved)
    assert begun + run(tmp_path / "backup") == whole


def test_random_operations_without_a_seed_go_on(tmp_path):
    import keras

    class Noise(keras.layers.Layer):
        def call(self, inputs):
            return inputs + keras.random.normal((1,))

    def make():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((5,)), Noise(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    model = make()
    history = train(model, [], epochs=1)
    _, used = callbacks(tmp_path, stop_at=(0, 3), save_freq=3)
    stopped = make()
    with pytest.raises(Stop):
        # The backup comes last by itself, so this stop comes before it: stop one step later.
        used[1].on_train_batch_end = lambda batch, logs=None: _stop_if(batch == 3)
        train(stopped, used[:2], epochs=1)
    resumed = make()
    assert train(resumed, callbacks(tmp_path)[1][:1], epochs=1) == history
    assert_same(model, None, resumed, None)


def _stop_if(condition):
    if condition:
        raise Stop


def test_other_data_is_read_up_to_the_step_and_said_so(tmp_path, caplog):
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(data()).batch(4)
    model = build()
    history = train(model, [], epochs=2)
    for endless in (False, True):
        directory = tmp_path / str(endless)
        # Of unknown length, or repeated for ever.
        some = rows.repeat() if endless else rows.filter(lambda x, y: True)
        options = {"rows": {"x": some}} | ({"steps_per_epoch": STEPS} if endless else {})
        _, used = callbacks(directory, stop_at=(0, 5), save_freq=2)
        with pytest.raises(Stop):
            train(build(), used[:2], epochs=2, **options)
        caplog.clear()
        resumed = build()
        assert train(resumed, callbacks(directory)[1][:1], epochs=2, **options) == history
        assert_same(model, None, resumed, None)
        assert [one for one in caplog.records if "read and dropped" in one.message]

    # Data that is shorter now.
    _, used = callbacks(tmp_path / "short", stop_at=(0, 5), save_freq=4)
    some = rows.filter(lambda x, y: True)
    with pytest.raises(Stop):
        train(build(), used[:2], rows={"x": some})
    with pytest.raises(ValueError, match="ends at step 3 of an epoch that goes on at step 4"):
        train(build(), callbacks(tmp_path / "short")[1][:1], rows={"x": some.take(3)})


def test_a_directory_may_be_called_as_patterns_are(tmp_path):
    """TensorFlow takes what it reads for one, where brackets and backslashes mean something."""
    import tensorflow as tf

    from tf_hips.callbacks import snapshot

    path = tmp_path / "lr=[0.1] *" / "a\\b?" / "shared"
    path.parent.mkdir(parents=True)
    variable = tf.Variable([1.0, 2.0])
    entries = [snapshot.Entry("weight", variable)]
    snapshot.write(path, entries)
    variable.assign([0.0, 0.0])
    snapshot.read(path, entries)
    assert variable.numpy().tolist() == [1.0, 2.0]
    snapshot.check_whole(path)
    assert snapshot.as_read(path) == snapshot.as_read(path)  # one folder is opened once
    assert snapshot.as_read(tmp_path) == str(tmp_path)
