# SPDX-License-Identifier: Apache-2.0
"""What is left of backups where a run ends, or something stops it."""

import numpy as np
import pytest

from tests.callbacks.resumed import (
    FEW,
    STEPS,
    assert_same,
    build,
    callbacks,
    short,
    stopping_at,
    train,
    undisturbed,
)

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def uninterrupted():
    return undisturbed()


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
    train(build(), callbacks(folder)[1], epochs=1, rows=short())
    train(build(), [*callbacks(folder)[1], stopping_at(0)], rows=short())
    [action] = known.actions
    action()
    assert [*folder.iterdir()]


@pytest.mark.parametrize(
    ("batch", "name"),
    [(None, "epoch-2-step-0"), (FEW - 1, "epoch-2-step-0"), (0, "epoch-1-step-1")],
)
def test_a_run_that_is_asked_to_stop_goes_on(tmp_path, uninterrupted, batch, name):
    model, history = uninterrupted
    # No backup is due where it stops.
    _, used = callbacks(tmp_path / "backup", save_freq=5)
    train(build(), [*used, stopping_at(1, batch)], rows=short())
    assert max(path.name for path in (tmp_path / "backup").iterdir()).endswith(name)
    resumed = build()
    used = callbacks(tmp_path / "backup", save_freq=5)[1]
    resumed_history = train(resumed, used, rows=short())
    assert_same(model, history, resumed, resumed_history)
    assert not (tmp_path / "backup").exists()


def test_a_run_that_is_asked_to_stop_in_its_last_epoch_is_over_all_the_same(tmp_path):
    used = [*callbacks(tmp_path / "backup")[1], stopping_at(0)]
    train(build(), used, epochs=1, rows=short())
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
    train(model, [*used, poison, keras.callbacks.TerminateOnNaN()], rows=short())
    assert [path.name for path in tmp_path.iterdir()] == ["00000001-epoch-1-step-0"]
