# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped in the middle of a round and go on, bit for bit."""

import contextlib
import functools
import json

import pytest

from tests.strategies.test_hierarchical_ps import (
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import ranks, run_parties

pytestmark = pytest.mark.tf

STOP_AT = 7  # steps of the second epoch, in the middle of a round


class _StopError(Exception):
    pass


def _run(
    strategy, worker, folder, *, is_stopped, options, stop_at, save_freq, execution=1, then=None
):
    """One `fit`; the weights and slots at its end, or None where it is stopped."""
    import keras

    from tests.strategies import training
    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.loops import FedAvg

    class Stops(keras.callbacks.Callback):
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if is_stopped and self.epoch == 1 and batch >= stop_at:
                raise _StopError

    keras.utils.set_random_seed(worker)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=execution)
    loop = FedAvg(model, strategy, **options)
    x, y = training.data(10 * 8, seed=worker)
    backup = BackupAndRestore(folder, save_freq=save_freq)
    history = None
    try:
        history = loop.fit(
            x, y, batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[backup, Stops()]
        )
    except _StopError:
        assert is_stopped
    assert (history is None) == is_stopped
    if is_stopped:
        return None
    ended = [one.tobytes().hex() for one in training.values(model)], history.history["loss"]
    if then is not None:
        then(loop, x, y)
    return ended


def _stop_one_early(loop, x, y, *, worker, folder):
    """Both keep a backup where only one has made its last epoch, or could not go on together."""
    import keras

    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.callbacks.folder import BackupFolder

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = worker == 1

    rows = 80 if worker else 16  # two short epochs, or a long one
    used = [BackupAndRestore(folder), Stops()]
    loop.fit(x[:rows], y[:rows], batch_size=8, epochs=2, verbose=0, callbacks=used)
    assert BackupFolder(folder / ("north", "south")[worker]).backups()


@pytest.mark.slow
@ranks(2)
def test_a_round_goes_on_where_it_was_stopped(tmp_path):
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    options = {
        "local_steps": 4,
        "server_optimizer": "fedadam(0.01)",
        "prox_mu": 0.1,
        "participation": 1.0,
    }

    def run(folder, *, is_stopped, **more):
        return _run(
            CompressedRing("error_feedback(onebit)"),
            rank,
            tmp_path / folder,
            is_stopped=is_stopped,
            options=options | more,
            stop_at=STOP_AT,
            save_freq=3,
            execution=3,
        )

    undisturbed = run("undisturbed", is_stopped=False)
    assert run("stopped", is_stopped=True) is None
    with pytest.raises(ProtocolError, match=r"`local_steps` is 5 and was 4"):
        run("stopped", is_stopped=False, local_steps=5)
    assert run("stopped", is_stopped=False) == undisturbed


def _train_in_parties(folder):
    import os

    from tf_hips.strategies import HierarchicalPS

    results = []
    is_south = False
    for run in _configs():
        is_south = run.uplink.site == "south"
        early = functools.partial(_stop_one_early, worker=int(is_south), folder=folder / "early")
        strategy = HierarchicalPS("error_feedback(onebit)", downlink=None, config=run)
        results.append(
            _run(
                strategy,
                int(is_south),
                folder / ("undisturbed" if run.run == "undisturbed" else "backup"),
                is_stopped=run.run == "stopped",
                options={"local_steps": 4, "server_optimizer": "diloco", "normalise": True},
                # The newest backups are of steps 16 and 18, which are of one round.
                stop_at=STOP_AT + is_south,
                save_freq=3 if is_south else 2,
                then=early if run.run == "undisturbed" else None,
            )
        )
        strategy.close()  # no reason: the other party has some steps to make
    undisturbed, stopped, resumed = results
    assert stopped is None
    assert resumed == undisturbed
    (folder / f"{os.getpid()}.json").write_text(json.dumps(resumed[0]))


@pytest.mark.timeout(120)
def test_parties_go_on_in_a_round(tmp_path):
    with contextlib.ExitStack() as stack:
        configs = []
        for run in ("undisturbed", "stopped", "resumed"):
            server = stack.enter_context(serving(run, rule="mean"))
            configs.append(write_configs(tmp_path, run, f"127.0.0.1:{server.port}"))
        run_parties(
            _train_in_parties,
            {"folder": tmp_path},
            [1, 1],
            party_environments(*configs),
            deadline_s=90,
        )
    assert len(list(tmp_path.glob("*.json"))) == 2
