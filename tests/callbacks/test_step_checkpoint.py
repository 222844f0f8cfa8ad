# SPDX-License-Identifier: Apache-2.0
"""`StepCheckpoint`: whole or not there, in a folder of its own, and never the end of a run."""

import errno
import resource
import types
from pathlib import Path

import numpy as np
import pytest

from tf_hips.callbacks.checkpoint_folder import WEIGHTS, CheckpointFolder, DamagedError
from tf_hips.callbacks.folder import BackupFolder
from tf_hips.errors import ConfigError


def write_text(path):
    path.write_bytes(b"weights")


def test_a_checkpoint_that_is_not_what_was_written_is_damaged(tmp_path):
    folder = CheckpointFolder(tmp_path / "new")
    assert folder.steps() == []
    folder.begin(0)
    for step in (10, 9, 100):
        folder.write(step, 1, {"network": "lenet"}, write_text)
    assert folder.steps() == [9, 10, 100]
    assert folder.read(10).facts == {"network": "lenet"}
    assert folder.read(10).weights.read_bytes() == b"weights"
    (folder.place(10) / WEIGHTS).write_bytes(b"weight")
    (folder.place(9) / "checkpoint.json").write_text("{")
    for step in (9, 10):
        with pytest.raises(DamagedError):
            folder.read(step)
    folder.place(100).rename(folder.place(101))
    with pytest.raises(DamagedError):
        folder.read(101)
    with pytest.raises(FileNotFoundError):
        folder.read(11)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.begin(0)

    def fail(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.write(5, 0, {}, fail)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "training_ended.json").mkdir()  # it cannot be written
    with pytest.raises(OSError, match=r"training_ended\.json"):
        folder.end(5, None)
    (tmp_path / "training_ended.json").rmdir()
    assert list(tmp_path.iterdir()) == []
    folder.write(5, 0, {}, write_text)
    folder.write(5, 1, {}, write_text)
    assert folder.read(5).epoch == 1


def test_what_a_stopped_run_left_is_swept_and_later_steps_are_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.begin(0)
    folder.write(5, 0, {}, write_text)
    (tmp_path / ".writing-model_step_6").mkdir()
    for name in ("ended", "probe"):  # files: the disk was full, or it was killed
        (tmp_path / f".writing-{name}").touch()
    (tmp_path / ".training_ended.json.4711").touch()  # the number of a process
    folder.begin(5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model_step_5"]
    (tmp_path / ".writing-model_step_6").mkdir()
    folder.end(5, None)
    assert folder.ended() == {"last_step": 5, "reason": None, "run": None}
    for run in (None, "mine"):
        with pytest.raises(ConfigError, match=r"without those of another.* with step 5"):
            CheckpointFolder(tmp_path).begin(0, run)
    folder.begin(5)
    assert folder.ended() is None
    assert [entry.name for entry in tmp_path.iterdir()] == ["model_step_5"]
    folder.begin(3)  # goes on from a backup before its last checkpoint
    folder.write(6, 0, {"run": "mine"}, write_text)
    folder.begin(0, "mine")  # killed before its first backup
    assert folder.steps() == [5, 6]


def test_an_end_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.begin(0)

    def fail(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(Path, "replace", fail)
        folder.end(5, None)
    assert list(tmp_path.iterdir()) == []
    folder.begin(0)


def test_a_run_keeps_the_name_with_which_it_began(tmp_path):
    backups, checkpoints = BackupFolder(tmp_path / "backup"), CheckpointFolder(tmp_path / "models")
    lenet, alexnet = {"network": "lenet"}, {"network": "alexnet"}
    assert backups.began("first", lenet) == backups.began("second", lenet) == "first"
    checkpoints.begin(0, "first")
    checkpoints.write(5, 0, {"run": "first", "began": "first"}, write_text)
    checkpoints.begin(0, backups.began("second", lenet))
    checkpoints.write(6, 0, {"run": "second", "began": "first"}, write_text)
    assert checkpoints.runs() == {"first", "second"}
    checkpoints.begin(0, backups.began("third", lenet))
    with pytest.raises(ConfigError, match="without those of another"):
        checkpoints.begin(0, backups.began("fourth", alexnet))
    checkpoints.begin(0, backups.began("after a mistake", lenet))
    backups.clear()
    assert not backups.path.exists()
    assert backups.began("fifth", alexnet) == "fifth"


def test_a_place_that_cannot_be_written_is_said_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "models").begin(0)


@pytest.mark.parametrize(
    ("every", "keep"), [(0, None), (True, None), (2.5, None), (5, 0), (5, 2.0)]
)
@pytest.mark.tf
def test_arguments_are_checked(every, keep):
    from tf_hips.callbacks import StepCheckpoint

    with pytest.raises(ValueError, match="must be"):
        StepCheckpoint("models", every, keep=keep)


def fit(directory, *, steps=12, epochs=2, **options):
    import keras

    from tf_hips.callbacks import StepCheckpoint

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    seen = {}

    class See(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen[int(model.optimizer.iterations)] = [one.copy() for one in model.get_weights()]

    x = np.random.default_rng(0).normal(size=(steps * 2, 3)).astype(np.float32)
    callback = StepCheckpoint(directory, **options)
    model.fit(x, x[:, :1], 2, epochs=epochs, verbose=0, callbacks=[See(), callback], shuffle=False)
    return model, seen


@pytest.mark.tf
def test_weights_are_those_of_the_step(tmp_path):
    model, seen = fit(tmp_path, every=7, facts={"network": "mine"})
    folder = CheckpointFolder(tmp_path)
    assert folder.steps() == [7, 14, 21, 24]
    assert folder.ended() == {"last_step": 24, "reason": None, "run": None}
    for step in folder.steps():
        checkpoint = folder.read(step)
        assert (checkpoint.step, checkpoint.facts) == (step, {"network": "mine"})
        model.load_weights(checkpoint.weights)
        for mine, other in zip(model.get_weights(), seen[step], strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.tf
@pytest.mark.parametrize("end", ["known", "unknown", "stopped"])
def test_the_last_weights_are_those_that_training_ends_with(tmp_path, end):
    """Of `use_ema` they are means; a loop meets once more."""
    import keras

    from tf_hips.callbacks import StepCheckpoint

    def stop(batch, logs=None):
        model.stop_training = end == "stopped" and batch == 3

    def rows():
        yield from zip(x.reshape(-1, 2, 3), x[:, :1].reshape(-1, 2, 1), strict=True)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse", run_eagerly=True)
    size = (12 if end == "stopped" else 8, 3)
    x = np.random.default_rng(0).normal(size=size).astype(np.float32)
    used = [
        keras.callbacks.LambdaCallback(on_train_batch_end=stop),
        StepCheckpoint(tmp_path, every=2),
    ]
    given = (rows(),) if end == "unknown" else (x, x[:, :1], 2)
    model.fit(*given, verbose=0, callbacks=used)
    ended = model.get_weights()
    folder = CheckpointFolder(tmp_path)
    assert folder.steps() == [2, 4]
    model.load_weights(folder.read(4).weights)
    for found, wanted in zip(model.get_weights(), ended, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.tf
def test_epochs_are_counted_as_in_logs(tmp_path):
    """From 1: the last checkpoint of an epoch has the number of the event that ends it."""
    fit(tmp_path, steps=2, epochs=2, every=1)
    folder = CheckpointFolder(tmp_path)
    assert {step: folder.read(step).epoch for step in folder.steps()} == {1: 1, 2: 1, 3: 2, 4: 2}


@pytest.mark.tf
def test_steps_of_optimizers_that_a_model_holds_count(tmp_path):
    from tests.callbacks.test_several_optimizers import pair, rows
    from tf_hips.callbacks import StepCheckpoint

    pair(run_eagerly=True).fit(
        *rows(), batch_size=8, epochs=2, verbose=0, callbacks=[StepCheckpoint(tmp_path, every=3)]
    )
    assert CheckpointFolder(tmp_path).steps() == [3, 6, 8]


@pytest.mark.tf
def test_a_fit_that_does_not_begin_leaves_no_note(tmp_path):
    from tf_hips.callbacks import StepCheckpoint

    StepCheckpoint(tmp_path, 5).end("the data are not there")
    assert CheckpointFolder(tmp_path).ended() is None


@pytest.mark.tf
def test_the_note_of_a_script_has_the_run_of_its_strategy(tmp_path):
    from tf_hips.callbacks import StepCheckpoint

    used = StepCheckpoint(tmp_path, 5)
    used._writes = True
    used._peers = types.SimpleNamespace(
        strategy=types.SimpleNamespace(config=types.SimpleNamespace(run="run-1"))
    )
    used.end()
    assert CheckpointFolder(tmp_path).ended("another") is None
    assert CheckpointFolder(tmp_path).ended("run-1") is not None


@pytest.mark.tf
def test_only_the_last_ones_stay(tmp_path):
    fit(tmp_path, every=5, keep=2)
    assert CheckpointFolder(tmp_path).steps() == [20, 24]


@pytest.mark.tf
def test_a_full_disk_ends_no_training(tmp_path, monkeypatch, caplog):
    import keras

    calls = []
    save = keras.Model.save_weights

    def fail_once(self, path, *arguments, **options):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, path, *arguments, **options)

    monkeypatch.setattr(keras.Model, "save_weights", fail_once)
    model, _ = fit(tmp_path, every=8)
    assert int(model.optimizer.iterations) == 24
    assert CheckpointFolder(tmp_path).steps() == [16, 24]
    assert "step 8 cannot be written" in caplog.text


@pytest.mark.tf
def test_weights_that_do_not_fit_on_a_disk_are_an_error_of_the_disk(tmp_path):
    """HDF5 ends the process by a segmentation fault, or with a RuntimeError."""
    import keras

    from tf_hips.callbacks import weights_file

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            weights_file.write(model, tmp_path / WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    weights_file.write(model, tmp_path / WEIGHTS)
    model.load_weights(tmp_path / WEIGHTS)


@pytest.mark.tf
def test_a_folder_of_another_run_is_refused(tmp_path):
    fit(tmp_path, every=8)
    with pytest.raises(ConfigError, match="with step 24"):
        fit(tmp_path, every=8)


def test_a_checkpoint_that_cannot_be_deleted_is_told_once(tmp_path, monkeypatch, caplog):
    from tf_hips.callbacks import checkpoint_folder

    folder = checkpoint_folder.CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.place(step).mkdir()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_folder.shutil, "rmtree", refuse)
        folder.prune(1)
    [told] = [one.getMessage() for one in caplog.records]
    gone = tmp_path / ".writing-deleted_1"
    assert (
        f"of step 1, or what is left of it, cannot be deleted (Permission denied: {gone})" in told
    )
    assert folder.steps() == [3]
    folder.begin(3)
    assert sorted(tmp_path.iterdir()) == [folder.place(3)]
