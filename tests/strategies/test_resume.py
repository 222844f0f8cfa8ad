# SPDX-License-Identifier: Apache-2.0
"""A run with compression that is stopped and goes on in new processes is the same bit for bit:
weights, slots, residuals, noise, History; and what is refused.
"""

import contextlib
import shutil

import pytest

from tests.strategies.test_hierarchical_ps import party_environments, serving, write_configs
from tests.support.ranks import run_parties

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.ranks(2), pytest.mark.timeout(400)]

STEPS, BATCH = 6, 4
CASES = {
    # With owners, who keep residuals of the sums.
    "onebit": {
        "compression": "error_feedback(onebit)",
        "topology": "ps",
        "save_freq": 4,
        "steps_per_execution": 2,
    },
    # Stopped in step 10, inside of a stage; the stage changes in the middle of an execution.
    "warmup": {
        "compression": "warmup(dgc(ratio=0.1), steps=11, stages=2)",
        "save_freq": 2,
        "steps_per_execution": 2,
    },
    # Running means, also in the exact steps before the stage changes.
    "momentum": {
        "compression": "warmup(momentum(error_feedback(onebit)), steps=5)",
        "topology": "ps",
        "save_freq": 2,
        "steps_per_execution": 2,
    },
    # Goes on in step 8, behind the warm-up: the server of the new run counts on from there.
    "parties": {
        "compression": "warmup(error_feedback(terngrad(bitwidth=2)), steps=7)",
        "downlink": None,
        "save_freq": 2,
    },
}


class Stop(Exception):
    """Raised on all ranks in the middle of an epoch."""


def ring(case):
    import tf_hips

    case = CASES[case]
    return tf_hips.CompressedRing(case["compression"], topology=case.get("topology"))


def make(strategy, steps_per_execution=1, dropout=0.5, width=8):
    """A model that is in a graph where an execution has several steps, and else is eager."""
    import keras

    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width, activation="tanh"),
                # Its statistics differ between ranks in the middle of an epoch.
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(3),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
            run_eagerly=steps_per_execution == 1,
        )
    return model


def fit(model, case, folder=None, stop_at=None, **options):
    """Two epochs of this rank's rows; returns History and the steps that were made."""
    import keras

    from tests.strategies import training
    from tf_hips.callbacks import BackupAndRestore, LearningRateWarmup
    from tf_hips.data import shard

    steps = []

    class Stopping(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if (self.epoch, batch) == stop_at:
                raise Stop
            steps.append([self.epoch, batch])

    rank, size = model.distribute_strategy.global_rank, 2
    rows = training.data(STEPS * BATCH * size)
    if case == "onebit":
        # Shuffled, and still the same after a restart.
        rows = {"x": shard(rows, BATCH, group=rank, groups=size, seed=3)}
    else:
        x, y = training.shard(rows, rank, size, BATCH)
        rows = {"x": training.rows([x, y], BATCH)}
    backup = []
    if folder is not None:
        backup = [BackupAndRestore(folder / case, CASES[case]["save_freq"], **options)]
    used = [*backup, LearningRateWarmup(warmup_epochs=1), Stopping()]
    history = model.fit(**rows, epochs=2, shuffle=False, verbose=0, callbacks=used)
    return history.history, steps


def bits(strategy, model):
    """Everything that must be equal, as text; differs per rank."""
    import numpy as np

    values = [*model.variables, *model.optimizer.variables, *strategy.state.variables]
    return [np.asarray(value).tobytes().hex() for value in values]


def _stop(folder, case):
    """Trains to the end, and until it is stopped."""
    import gc
    import json

    from tf_hips.comm import primitives

    rank = primitives.rank()
    together = CASES[case]["steps_per_execution"]
    strategy = ring(case)
    model = make(strategy, together)
    history, _ = fit(model, case)
    expected = {"history": history, "bits": bits(strategy, model)}
    (folder / f"{case}-{rank}.json").write_text(json.dumps(expected))
    # The residuals go with the model.
    names = {name for name in vars(strategy.state.gradients0) if not name.startswith("_")}
    kept = "residual" if case == "onebit" else "state"
    assert names >= {"step", f"{kept}_0", f"{kept}_5"}
    has_owners = CASES[case].get("topology") == "ps"
    assert any(name.startswith("owner_residual") for name in names) == has_owners
    del model
    gc.collect()
    assert not strategy.state.variables, strategy.state.variables
    assert not [name for name in vars(strategy.state) if name.startswith("gradients")]

    strategy = ring(case)
    model = make(strategy, together)
    with pytest.raises(Stop):
        fit(model, case, folder, stop_at=(1, 4))
    # What differs per rank: residuals; statistics, in the middle of an epoch.
    everyone = primitives.gather_objects(bits(strategy, model))
    assert everyone[0] != everyone[1]


def _resume(folder, case):
    """Goes on as it did, in another process."""
    import json

    from tf_hips.comm import primitives

    strategy = ring(case)
    model = make(strategy, CASES[case]["steps_per_execution"])
    history, steps = fit(model, case, folder)
    expected = json.loads((folder / f"{case}-{primitives.rank()}.json").read_text())
    assert steps[0] == ([1, 2] if case == "onebit" else [1, 4])
    assert history == expected["history"]
    assert bits(strategy, model) == expected["bits"]
    assert not (folder / case).exists()


def _go_on(folder):
    """What is refused, and then not."""

    from tf_hips.callbacks import folder as backups_folder
    from tf_hips.comm import primitives
    from tf_hips.errors import ConfigError, PeerError

    rank = primitives.rank()
    names = {path.name for path in (folder / "onebit").iterdir()}
    assert names == {"00000001-epoch-0-step-4", "00000002-epoch-1-step-2"}
    assert not (folder / "onebit" / "00000002-epoch-1-step-2" / "rank-2.json").exists()

    # A directory of each rank's own is told before anything is trained.
    backups_folder._PATIENCE_S = 0.1
    model = make(ring("onebit"))
    with pytest.raises((FileNotFoundError, PeerError), match="on a file system that all ranks"):
        fit(model, "onebit", folder / f"of-{rank}")
    assert not model.optimizer.iterations.numpy()
    own = folder / f"of-{rank}" / "onebit"  # the other rank may not be done with its own yet
    assert not [*own.glob(".*"), *own.glob("*")]

    # Another run is refused on all ranks, and nothing is lost by trying.
    model = make(ring("warmup"))
    with pytest.raises(ValueError, match=r"compression is .*warmup.* and was .*onebit"):
        fit(model, "onebit", folder)
    model = make(ring("onebit"), width=9)
    with pytest.raises(ValueError, match=r"variable 0 is weight float32\[6, 9\], and .*\[6, 8\]"):
        fit(model, "onebit", folder)
    # One rank that cannot read tells the others.
    model = make(ring("onebit"))
    meta = folder / "onebit" / "00000002-epoch-1-step-2" / f"rank-{rank}.index"
    if rank == 1:
        meta.rename(meta.with_suffix(".away"))
    with pytest.raises(
        (ConfigError, PeerError), match=r"rank-1.index, damaged \(it is not there"
    ) as caught:
        fit(model, "onebit", folder)
    assert rank == 1 or "Rank 1 failed" in str(caught.value)
    if rank == 1:
        meta.with_suffix(".away").rename(meta)
    # Nor is a mixture taken up, of which each file is whole: here rank 1's of the backup before.
    newest = meta.parent
    if rank == 1:
        kept = {path: path.read_bytes() for path in newest.glob("rank-1.*")}
        for path in (folder / "onebit" / "00000001-epoch-0-step-4").glob("rank-1.*"):
            shutil.copy(path, newest)
    model = make(ring("onebit"))
    with pytest.raises((ConfigError, PeerError), match=r"rank-1.json, damaged \(it is not of this"):
        fit(model, "onebit", folder)
    if rank == 1:
        for path, content in kept.items():
            path.write_bytes(content)

    _resume(folder, "onebit")


def _write_a_checkpoint(folder):
    """With tf.train.Checkpoint, between two calls of `fit`."""
    import json

    import tensorflow as tf

    from tf_hips.comm import primitives

    rank = primitives.rank()
    strategy = ring("onebit")
    model = make(strategy, dropout=0.0)
    fit(model, "warmup")
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=model.optimizer, strategy=strategy.state
    )
    checkpoint.write(str(folder / f"checkpoint-{rank}"))
    fit(model, "warmup")
    (folder / f"checkpoint-{rank}.json").write_text(json.dumps(bits(strategy, model)))


def _read_a_checkpoint(folder):
    import json

    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()
    # Restored before the first step, and into what is there already.
    strategy = ring("onebit")
    model = make(strategy, dropout=0.0)
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=model.optimizer, strategy=strategy.state
    )
    expected = json.loads((folder / f"checkpoint-{rank}.json").read_text())
    for _ in range(2):
        status = checkpoint.read(str(folder / f"checkpoint-{rank}"))
        fit(model, "warmup")
        status.assert_consumed()
        assert bits(strategy, model) == expected
    with pytest.raises(ProtocolError, match=r"rank is \d and was \d when the state was saved"):
        checkpoint.read(str(folder / f"checkpoint-{1 - rank}"))


def _one_process(folder):
    from tests.strategies import training
    from tf_hips import CompressedRing
    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.config import Run
    from tf_hips.data import shard

    # The residuals of two ranks cannot go on in one.
    with pytest.raises(ValueError, match="number of ranks is 1 and was 2"):
        fit(make(ring("onebit")), "onebit", folder / "of two")
    with pytest.raises(ValueError, match="compression is None and was error_feedback"):
        fit(make(CompressedRing()), "onebit", folder / "of two")

    # The second `fit` of the same data is broken off, and goes on in the same order.
    def second_fit(model, rows, stop_at=None):
        import keras

        class Stopping(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == stop_at:
                    raise Stop

        backup = BackupAndRestore(folder / "second")
        model.fit(rows, epochs=2, verbose=0, callbacks=[backup, Stopping()])

    def first_fit(seed):
        strategy = CompressedRing(config=Run(seed=seed))
        model = make(strategy)
        rows = shard(training.data(12), BATCH, group=0, groups=1, seed=3)
        model.fit(rows, epochs=1, verbose=0)
        return strategy, model, rows

    strategy, model, rows = first_fit(1)
    second_fit(model, rows)
    expected = bits(strategy, model)
    strategy, model, rows = first_fit(1)
    with pytest.raises(Stop):
        second_fit(model, rows, stop_at=1)
    with pytest.raises(ValueError, match="seed is 2 and was 1"):
        second_fit(*first_fit(2)[1:])
    second_fit(model, rows)
    assert bits(strategy, model) == expected


def _parties(folder):
    import shutil

    from tests.strategies.test_hierarchical_ps import SITES, _configs
    from tf_hips import HierarchicalPS

    whole, stopped, resumed = _configs()

    # Parties share a directory.
    place = folder / "parties" / whole.uplink.site
    way = {key: CASES["parties"][key] for key in ("compression", "downlink")}
    strategy = HierarchicalPS(**way, config=whole)
    model = make(strategy)
    expected = fit(model, "parties")[0], bits(strategy, model)
    strategy.close()

    strategy = HierarchicalPS(**way, config=stopped)
    model = make(strategy)
    with pytest.raises(Stop):
        fit(model, "parties", folder, stop_at=(1, 4))
    strategy.close("stopped by the test")
    if whole.uplink.site == SITES[0]:  # as if this party had been stopped a moment earlier
        shutil.rmtree(place / "00000005-epoch-1-step-4")

    # A new run of a new server; nothing is kept there, as the way down is exact.
    strategy = HierarchicalPS(**way, config=resumed)
    model = make(strategy)
    history, steps = fit(model, "parties", folder)
    assert steps[0] == [1, 2]
    assert (history, bits(strategy, model)) == expected
    assert place.exists()  # for a process that is killed behind `fit`
    strategy.close()
    assert not place.exists()


def test_a_stopped_run_goes_on_in_new_processes(tmp_path):
    run_parties(_stop, {"folder": tmp_path, "case": "onebit"}, [2], deadline_s=140)
    shutil.copytree(tmp_path / "onebit", tmp_path / "of two" / "onebit")
    run_parties(_go_on, {"folder": tmp_path}, [2], deadline_s=140)
    run_parties(_one_process, {"folder": tmp_path}, [1], deadline_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["warmup", "momentum"])
def test_more_stopped_runs_go_on_in_new_processes(tmp_path, case):
    for body in (_stop, _resume):
        run_parties(body, {"folder": tmp_path, "case": case}, [2], deadline_s=140)


@pytest.mark.slow
def test_a_checkpoint_is_read_in_new_processes(tmp_path):
    """In the same processes: test_momentum.py."""
    for body in (_write_a_checkpoint, _read_a_checkpoint):
        run_parties(body, {"folder": tmp_path}, [2], deadline_s=140)


@pytest.mark.slow
def test_a_stopped_run_of_parties_goes_on_in_new_processes(tmp_path):
    """At the global server; that workers go on as they did is what the test above shows."""
    with contextlib.ExitStack() as stack:
        runs = []
        for run in ("whole", "stopped", "resumed"):
            server = stack.enter_context(serving(run))
            runs.append(write_configs(tmp_path, run, f"127.0.0.1:{server.port}"))
        environments = party_environments(*runs)
        run_parties(_parties, {"folder": tmp_path}, [1, 1], environments, deadline_s=100)
