# SPDX-License-Identifier: Apache-2.0
"""Backups that are of another run, half written, or damaged."""

import shutil

import numpy as np
import pytest

from tests.callbacks.resumed import (
    FEW,
    Stop,
    assert_same,
    build,
    callbacks,
    data,
    everything,
    short,
    stopping_at,
    train,
    undisturbed,
)

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(180)]


def test_a_fit_does_not_take_up_the_backup_of_a_later_one(tmp_path, monkeypatch, caplog):
    import collections

    from tf_hips.callbacks import folder

    train(build(), callbacks(tmp_path)[1], epochs=1, rows=short())
    assert not tmp_path.exists()
    with pytest.raises(Stop):
        train(build(), callbacks(tmp_path, stop_at=2, stop_when="epoch begins")[1], rows=short())
    # Another process, which begins with its first `fit`.
    monkeypatch.setattr(folder, "_over", collections.Counter())
    told = "this is `fit` number 1 that uses it, and was number 2"
    with pytest.raises(ValueError, match=f"{told}, which had made 2 epochs"):
        train(build(), callbacks(tmp_path)[1], epochs=1, rows=short())
    # It may be the same one, in a script that leaves out what was done.
    done, used = callbacks(tmp_path)
    train(build(), used, rows=short())
    assert done == [(2, step) for step in range(FEW)]
    assert told in caplog.text


def test_other_frozen_layers_are_noticed(tmp_path):
    with pytest.raises(Stop):
        train(build(), callbacks(tmp_path, stop_at=1, stop_when="epoch begins")[1], rows=short())
    model = build()
    model.layers[0].trainable = False
    model.compile("adam", "binary_crossentropy", run_eagerly=True)
    with pytest.raises(ValueError, match="other layers are frozen than were when it began"):
        train(model, callbacks(tmp_path)[1], rows=short())
    assert not model.optimizer.built


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

    wrong_ones = {"save_freq": (0, "step", True), "keep": (0, 1.5, True)}
    for wrong in ({name: one} for name, values in wrong_ones.items() for one in values):
        with pytest.raises(ValueError, match="must be"):
            callbacks(tmp_path, **wrong)
    with pytest.raises(ValueError, match="`directory` must not be empty"):
        callbacks("")


def test_a_directory_that_cannot_be_is_told_before_the_first_epoch(tmp_path):
    (tmp_path / "file").write_text("")
    steps, used = callbacks(tmp_path / "file" / "backup")
    with pytest.raises(NotADirectoryError):
        train(build(), used)
    assert not steps


def test_a_damaged_backup_is_named_and_the_one_before_goes_on(tmp_path):
    from tf_hips.errors import ConfigError

    _, used = callbacks(tmp_path, stop_at=2, stop_when="epoch begins")
    with pytest.raises(Stop):
        train(build(), used, rows=short())
    newest = max(tmp_path.iterdir())
    [damaged] = newest.glob("shared.data*")
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    with pytest.raises(ConfigError, match=f"must be whole; .*{newest.name}, damaged"):
        train(build(), callbacks(tmp_path)[1], rows=short())
    damaged.write_bytes(whole)
    for name, text in (("meta.json", ""), ("rank-0.json", "[]"), ("rank-0.json", "\0" * 9)):
        file = newest / name
        right = file.read_bytes()
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"must be whole; .*{newest.name}/{name}, damaged"):
            train(build(), callbacks(tmp_path)[1], rows=short())
        file.write_bytes(right)
    shutil.rmtree(newest)
    model, history = undisturbed()
    resumed = build()
    assert_same(model, history, resumed, train(resumed, callbacks(tmp_path)[1], rows=short()))


@pytest.fixture(scope="module")
def of_two_runs(tmp_path_factory):
    """A folder with backups of one name, of two runs with different rates."""
    folder = tmp_path_factory.mktemp("runs")
    for rate in (0.1, 0.2):
        model = build()
        _, used = callbacks(folder / str(rate), stop_at=1, stop_when="epoch begins")
        model.optimizer.learning_rate = rate
        with pytest.raises(Stop):
            train(model, used, rows=short())
    return folder


@pytest.mark.parametrize(
    ("copied", "told"),
    [("meta.json", "rank-0.json"), ("rank-0.json", "rank-0.json"), ("shared.*", "shared.index")],
)
def test_parts_of_another_runs_backup_are_refused(tmp_path, of_two_runs, copied, told):
    """Each file is whole, and both backups have one name."""
    from tf_hips.errors import ConfigError

    shutil.copytree(of_two_runs, tmp_path, dirs_exist_ok=True)
    first, second = sorted(tmp_path.glob("*/*"))
    assert first.name == second.name
    for path in first.glob(copied):
        shutil.copy(path, second)
    text = rf"{second}/{told}, damaged \(it is not of this backup\)"
    with pytest.raises(ConfigError, match=text):
        train(build(), callbacks(second.parent)[1], rows=short())


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
