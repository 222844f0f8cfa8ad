# SPDX-License-Identifier: Apache-2.0
"""`BackupAndRestore` in one process: the step, every callback's effect, crashes, other runs."""

import shutil

import numpy as np
import pytest

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(180)]

STEPS = 6  # of an epoch


class Stop(Exception):
    """Raised by a test in the middle of a run."""


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * 4, 5)).astype(np.float32)
    return x, (x[:, :1] > 0).astype(np.float32)


def build(width=8, optimizer="adam", run_eagerly=True, **options):
    # Eagerly: most tests make many models of a few steps each, and each variable takes its time.
    import keras

    keras.utils.set_random_seed(1)
    is_whole = not run_eagerly
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(center=is_whole, scale=is_whole),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, activation="sigmoid", use_bias=is_whole),
        ]
    )
    metrics = ["accuracy", keras.metrics.AUC(name="auc")] if is_whole else None
    model.compile(
        optimizer, "binary_crossentropy", metrics=metrics, run_eagerly=run_eagerly, **options
    )
    return model


def callbacks(directory=None, stop_at=None, stop_when=None, **options):
    """A rate that every epoch multiplies, twice; a stop; a backup, which is not the last."""
    import keras

    from tf_hips.callbacks import BackupAndRestore

    steps = []

    class Stopping(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            steps.append((self.epoch, batch))

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch + 1) == stop_at and stop_when is None:
                raise Stop

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            if stop_when == "epoch begins" and epoch == stop_at:
                raise Stop

    backup = [] if directory is None else [BackupAndRestore(directory, **options)]
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, min_delta=10, patience=0)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    return steps, [*backup, Stopping(), scheduler, plateau]


def train(model, used, epochs=3, **options):
    rows = options.pop("rows", None) or (dict(zip("xy", data(), strict=True)) | {"batch_size": 4})
    return model.fit(
        **rows, epochs=epochs, shuffle=False, verbose=0, callbacks=used, **options
    ).history


@pytest.fixture(scope="module")
def uninterrupted():
    """The model after three epochs without a stop, and its History."""
    model = build()
    return model, train(model, callbacks()[1])


def test_keras_callbacks_remember(tmp_path):
    import keras

    def run(directory=None, stop_at=None):
        early = keras.callbacks.EarlyStopping(
            "loss", patience=2, min_delta=10, restore_best_weights=True
        )
        model = build()
        used = callbacks(directory, stop_at, "epoch begins")[1][:-2]
        return model, early, train(model, [early, *used], epochs=9)

    model, early, history = run()
    assert early.stopped_epoch == 2 and early.best_epoch == 0
    with pytest.raises(Stop):
        run(tmp_path, stop_at=2)
    resumed, early, resumed_history = run(tmp_path)
    assert early.stopped_epoch == 2 and early.best_epoch == 0
    assert_same(model, history, resumed, resumed_history)


def everything(model):
    values = [*model.variables, *model.optimizer.variables]
    return [np.asarray(value) for value in values]


def assert_same(model, history, other, other_history):
    for one, two in zip(everything(model), everything(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert history == other_history


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
        history = train(model, [*backup, stopping], epochs=2)
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


def test_a_run_stopped_between_epochs_goes_on_with_the_next(tmp_path, uninterrupted):
    model, history = uninterrupted
    stopped = build()
    _, used = callbacks(tmp_path, stop_at=2, stop_when="epoch begins")
    with pytest.raises(Stop):
        train(stopped, used)
    resumed = build()
    done, used = callbacks(tmp_path, delete_checkpoint=False, keep=1)
    resumed_history = train(resumed, used)
    assert_same(model, history, resumed, resumed_history)
    assert done == [(2, step) for step in range(STEPS)]
    # What it went on from stays while it may be needed, and one more.
    assert len(list(tmp_path.iterdir())) == 2
    # A run that is over has nothing left to do, and a longer one goes on.
    done, used = callbacks(tmp_path, delete_checkpoint=False)
    again = build()
    assert train(again, used) == resumed_history
    assert done == []
    assert_same(resumed, None, again, None)
    done, used = callbacks(tmp_path)
    assert len(train(build(), used, epochs=4)["loss"]) == 4
    assert done == [(3, step) for step in range(STEPS)]


def test_a_fit_does_not_take_up_the_backup_of_a_later_one(tmp_path, monkeypatch, caplog):
    import collections

    from tf_hips.callbacks import folder

    train(build(), callbacks(tmp_path)[1], epochs=1)
    assert not tmp_path.exists()
    with pytest.raises(Stop):
        train(build(), callbacks(tmp_path, stop_at=2, stop_when="epoch begins")[1])
    # Another process, which begins with its first `fit`.
    monkeypatch.setattr(folder, "_over", collections.Counter())
    told = "this is `fit` number 1 that uses it, and was number 2"
    with pytest.raises(ValueError, match=f"{told}, which had made 2 epochs"):
        train(build(), callbacks(tmp_path)[1], epochs=1)
    # It may be the same one, in a script that leaves out what was done.
    done, used = callbacks(tmp_path)
    train(build(), used)
    assert done == [(2, step) for step in range(STEPS)]
    assert told in caplog.text


def test_behind_a_server_the_backups_stay_until_the_run_is_left(tmp_path, monkeypatch):
    from tf_hips.callbacks.peers import Peers

    class Backups:
        """Those of a strategy whose server waits for parties that are killed."""

        def __init__(self):
            self.actions = []

        def place(self):
            return None

        def is_lacking(self):
            return False

        def offer(self, newest):
            self.newest = newest

        def when_left(self, action):
            self.actions.append(action)

    known, folder = Backups(), tmp_path / "backup"
    monkeypatch.setattr(Peers, "backups", known)
    train(build(), callbacks(folder, save_freq=4)[1], epochs=1)
    # All steps were made, and who is killed now finds its way to their end; others, too.
    assert known.newest() == folder / "00000001-epoch-0-step-4"
    # Another run of this process begins at its beginning.
    done, used = callbacks(folder, save_freq=4)
    train(build(), used, epochs=1)
    assert len(done) == STEPS
    assert [one.name for one in folder.iterdir()] == ["00000001-epoch-0-step-4"]
    for action in known.actions:
        action()
    assert not folder.exists()
    # What was stopped before its end stays in any case, also behind a `fit` that was not.
    known.actions.clear()
    train(build(), callbacks(folder)[1], epochs=1)
    train(build(), [*callbacks(folder)[1], stopping_at(0)])
    [action] = known.actions
    action()
    assert [*folder.iterdir()]


def test_other_frozen_layers_are_noticed(tmp_path):
    with pytest.raises(Stop):
        train(build(), callbacks(tmp_path, stop_at=1, stop_when="epoch begins")[1])
    model = build()
    model.layers[0].trainable = False
    model.compile("adam", "binary_crossentropy", run_eagerly=True)
    with pytest.raises(ValueError, match="other layers are frozen than were when it began"):
        train(model, callbacks(tmp_path)[1])
    assert not model.optimizer.built


def test_averages_are_exchanged_as_they_were_between_two_epochs(tmp_path):
    import keras

    def run(directory=None, stop_at=None):
        model = build(optimizer=keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9))
        used = callbacks(directory, stop_at, "epoch begins")[1]
        used.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
        return model, train(model, used)

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
        train(build(optimizer="sgd"), [Saving(str(tmp_path / "{epoch}.keras"), save_freq=4), *used])
        return list(saved)

    whole = run()
    with pytest.raises(Stop):
        run(tmp_path / "backup", stop_at=(1, 3))
    begun = list(saved)
    assert begun + run(tmp_path / "backup") == whole


@pytest.mark.slow
def test_a_crash_at_any_moment_of_a_backup_leaves_the_one_before(tmp_path, monkeypatch):
    import os
    from pathlib import Path

    from tf_hips.callbacks import snapshot
    from tf_hips.callbacks.folder import BackupFolder

    places = [
        (BackupFolder, "start"),
        (snapshot, "write"),
        (BackupFolder, "finish"),
        (Path, "write_text"),
        (Path, "rename"),
        (os, "fsync"),
        (BackupFolder, "prune"),
        (shutil, "rmtree"),
    ]
    expected = build(optimizer="sgd")
    history = train(expected, [], epochs=1)
    for number, (owner, name) in enumerate(places):
        directory = tmp_path / str(number)
        model = build(optimizer="sgd")
        _, used = callbacks(directory, save_freq=1)
        backup = used[0]
        real = getattr(owner, name)

        def crash(*args, real=real, directory=directory, **kwargs):
            if len(list(directory.glob("0*"))) >= 2:
                raise Stop
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, crash)
            with pytest.raises(Stop):
                train(model, [backup], epochs=1)
        whole = sorted(path.name for path in directory.glob("0*"))
        assert "00000002-epoch-0-step-2" in whole, (name, whole)
        resumed = build(optimizer="sgd")
        _, used = callbacks(directory, save_freq=3, delete_checkpoint=False)
        assert train(resumed, [used[0]], epochs=1) == history, name
        assert_same(expected, None, resumed, None)
        # What the crash left behind is gone.
        assert not list(directory.glob(".*")), name


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
    history = train(model, [], epochs=2)
    _, used = callbacks(tmp_path, stop_at=(0, 3), save_freq=3)
    stopped = make()
    with pytest.raises(Stop):
        # The backup comes last by itself, so this stop comes before it: stop one step later.
        used[1].on_train_batch_end = lambda batch, logs=None: _stop_if(batch == 3)
        train(stopped, used[:2], epochs=2)
    resumed = make()
    assert train(resumed, callbacks(tmp_path)[1][:1], epochs=2) == history
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


def test_a_backup_of_another_run_is_refused_by_name(tmp_path):
    def stop(directory, **options):
        _, used = callbacks(directory, stop_at=(0, 5), save_freq=3)
        with pytest.raises(Stop):
            train(build(**options), used[:2])

    stop(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def refuse(message, *, rows=None, **options):
        model = build(**options)
        values = everything(model)
        with pytest.raises(ValueError, match=message):
            train(model, callbacks(tmp_path)[1][:1], rows=rows)
        for one, two in zip(values, everything(model), strict=False):
            np.testing.assert_array_equal(one, two)

    refuse(r"variable 0 is weight float32\[5, 9\], and weight float32\[5, 8\] when", width=9)
    refuse("optimizer is SGD and was Adam", optimizer="sgd")
    refuse("`steps_per_execution` is 2 and does not divide the step 3", steps_per_execution=2)
    x, y = data()
    refuse("an epoch has 3 steps and had 6", rows={"x": x, "y": y, "batch_size": 8})
    assert sorted(path.name for path in tmp_path.iterdir()) == before

    for wrong in ({"save_freq": 0}, {"save_freq": "step"}, {"save_freq": True}, {"keep": 0}):
        with pytest.raises(ValueError, match="must be"):
            callbacks(tmp_path, **wrong)
    with pytest.raises(ValueError, match="`directory` must not be empty"):
        callbacks("")


def stopping_at(epoch, batch=None):
    """Sets `stop_training`, as what sees that its machine is to go."""
    import keras

    class Preempted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, number, logs=None):
            if (self.epoch, number) == (epoch, batch):
                self.model.stop_training = True

        def on_epoch_end(self, number, logs=None):
            if batch is None and number == epoch:
                self.model.stop_training = True

    return Preempted()


@pytest.mark.parametrize(
    ("batch", "name"), [(None, "epoch-2-step-0"), (5, "epoch-2-step-0"), (2, "epoch-1-step-3")]
)
def test_a_run_that_is_asked_to_stop_goes_on(tmp_path, uninterrupted, batch, name):
    model, history = uninterrupted
    # No backup is due where it stops.
    _, used = callbacks(tmp_path / "backup", save_freq=5)
    train(build(), [*used, stopping_at(1, batch)])
    assert max(path.name for path in (tmp_path / "backup").iterdir()).endswith(name)
    resumed = build()
    resumed_history = train(resumed, callbacks(tmp_path / "backup", save_freq=5)[1])
    assert_same(model, history, resumed, resumed_history)
    assert not (tmp_path / "backup").exists()


def test_a_run_that_is_asked_to_stop_in_its_last_epoch_is_over_all_the_same(tmp_path):
    train(build(), [*callbacks(tmp_path / "backup")[1], stopping_at(0)], epochs=1)
    assert not (tmp_path / "backup").exists()


def test_what_stops_with_a_loss_that_is_no_number_is_not_saved(tmp_path):
    import keras

    _, used = callbacks(tmp_path)
    poison = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: (
            epoch and model.set_weights([weight * np.nan for weight in model.get_weights()])
        )
    )
    model = build()
    train(model, [*used, poison, keras.callbacks.TerminateOnNaN()])
    assert [path.name for path in tmp_path.iterdir()] == ["00000001-epoch-1-step-0"]


def test_a_directory_that_cannot_be_is_told_before_the_first_epoch(tmp_path):
    (tmp_path / "file").write_text("")
    steps, used = callbacks(tmp_path / "file" / "backup")
    with pytest.raises(NotADirectoryError):
        train(build(), used)
    assert not steps


def test_a_damaged_backup_is_named_and_the_one_before_goes_on(tmp_path, uninterrupted):
    from tf_hips.errors import ConfigError

    _, used = callbacks(tmp_path, stop_at=2, stop_when="epoch begins")
    with pytest.raises(Stop):
        train(build(), used)
    newest = max(tmp_path.iterdir())
    [damaged] = newest.glob("shared.data*")
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    with pytest.raises(ConfigError, match=f"must be whole; .*{newest.name}, damaged"):
        train(build(), callbacks(tmp_path)[1])
    damaged.write_bytes(whole)
    for name, text in (("meta.json", ""), ("rank-0.json", "[]"), ("rank-0.json", "\0" * 9)):
        file = newest / name
        right = file.read_bytes()
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"must be whole; .*{newest.name}/{name}, damaged"):
            train(build(), callbacks(tmp_path)[1])
        file.write_bytes(right)
    shutil.rmtree(newest)
    model, history = uninterrupted
    resumed = build()
    assert_same(model, history, resumed, train(resumed, callbacks(tmp_path)[1]))


@pytest.mark.parametrize(
    ("copied", "told"),
    [("meta.json", "rank-0.json"), ("rank-0.json", "rank-0.json"), ("shared.*", "shared.index")],
)
def test_parts_of_another_runs_backup_are_refused(tmp_path, copied, told):
    """Each file is whole, and both backups have one name."""
    from tf_hips.errors import ConfigError

    found = []
    for rate in (0.1, 0.2):
        folder = tmp_path / str(rate)
        model, (_, used) = build(), callbacks(folder, stop_at=(1, 4), save_freq=8)
        model.optimizer.learning_rate = rate
        with pytest.raises(Stop):
            train(model, used)
        found += folder.iterdir()
    first, second = found
    assert first.name == second.name
    for path in first.glob(copied):
        shutil.copy(path, second)
    text = rf"{second}/{told}, damaged \(it is not of this backup\)"
    with pytest.raises(ConfigError, match=text):
        train(build(), callbacks(second.parent)[1])


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def test_whatever_is_damaged_and_however_the_backup_is_named(tmp_path):
    import keras

    import tf_hips
    from tf_hips.errors import ConfigError

    def make():
        strategy = tf_hips.CompressedRing(compression="error_feedback(onebit)")
        with strategy.scope():
            return build(optimizer="sgd")

    def run(model, *more):
        early = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
        backup = tf_hips.callbacks.BackupAndRestore(tmp_path, save_freq=4, keep=1)
        rows = {"x": tf_hips.shard(data(), 4)}
        train(model, [early, backup, *more], epochs=2, rows=rows)

    run(make(), stopping_at(1, 3))
    model = make()  # what is refused leaves it as it was
    [backup] = tmp_path.iterdir()
    files = sorted(backup.iterdir())
    assert {one.name.partition(".")[0] for one in files} == {
        "best-weights-0", "meta", "rank-0", "shared"
    }  # fmt: skip
    for file in files:
        whole = file.read_bytes()
        # A byte of a text may be any other, and one of an index may be no part of it.
        ways = [whole[: len(whole) // 2]] + [flipped(whole)] * (".data" in file.name)
        for content in ways:
            file.write_bytes(content)
            with pytest.raises(ConfigError, match=f"must be whole; .*{backup.name}.*, damaged"):
                run(model)
        file.write_bytes(whole)
    run(model)
    assert not tmp_path.exists()
