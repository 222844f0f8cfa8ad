# SPDX-License-Identifier: Apache-2.0
"""Keras' callbacks on many ranks with one shared directory: one writes, all decide alike."""

import contextlib
import csv
import io
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.callbacks import orbax_checkpoint as orbax_checkpoint_of_keras

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import build_mlp, linear
from tf_hips.comm import primitives

_CALLBACKS = keras.callbacks


def _build(make=lambda: keras.optimizers.SGD(0.1)):
    return lambda: build_mlp(make(), run_eagerly=True)


def _fit(model, rows, callbacks, epochs=3, **options):
    if "validation_data" in options:
        options["validation_data"] = training.rows(options["validation_data"])
    return model.fit(
        training.rows(rows), epochs=epochs, callbacks=callbacks, **{"verbose": 0, **options}
    )


def _weights(model):
    return [value.tobytes() for value in model.get_weights()]


class Turning(_CALLBACKS.LearningRateScheduler):
    """Descends for two epochs, and climbs after that."""

    def __init__(self):
        super().__init__(lambda epoch, rate: 0.05 if epoch < 2 else -0.05)


class Seen(_CALLBACKS.Callback):
    """Weights at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(_weights(self.model))


@feature()
def model_checkpoint(job: Job):
    rows = job.shard(linear(job, 2))
    model = job.make(_build())
    seen = Seen()
    each, best, steps = (job.folder / name for name in ("each", "best", "steps"))
    callbacks = [
        Turning(),
        seen,
        _CALLBACKS.ModelCheckpoint(each / "{epoch}-{loss:.3f}.keras"),
        _CALLBACKS.ModelCheckpoint(
            best / "best.weights.h5",
            monitor="val_loss",
            save_best_only=True,
            save_weights_only=True,
        ),
        _CALLBACKS.ModelCheckpoint(
            steps / "{epoch}.{batch}.weights.h5", save_freq=3, save_weights_only=True
        ),
        # Two ranks that make one folder at once do not both succeed: one of them makes folders.
        _CALLBACKS.ModelCheckpoint(
            job.folder / f"of-rank-{job.rank}" / "{epoch}.weights.h5",
            save_weights_only=True,
            verbose=1,
        ),
    ]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        history = job.equal(_fit(model, rows, callbacks, validation_data=rows).history)
    # Who has written a file says so.
    assert said.getvalue().count("finished saving") == (0 if primitives.rank() else 3)
    assert callbacks[-1].verbose == 1
    assert callbacks[-1].filepath == str(job.folder / f"of-rank-{job.rank}" / "{epoch}.weights.h5")
    job.equal(float(callbacks[3].best))
    job.gather(None)
    names = [f"{epoch + 1}-{loss:.3f}.keras" for epoch, loss in enumerate(history["loss"])]
    own = [one.name for one in job.folder.glob("of-rank-*")]
    assert own == [f"of-rank-{job.rank - primitives.rank()}"]
    assert sorted(one.name for one in each.iterdir()) == names
    assert sorted(one.name for one in steps.iterdir()) == ["2.1.weights.h5", "3.2.weights.h5"]
    assert [one.name for one in best.iterdir()] == ["best.weights.h5"]
    lowest = int(np.argmin(history["val_loss"]))
    assert lowest < 2
    loaded = keras.models.load_model(each / names[-1])
    assert _weights(loaded) == seen.weights[-1]
    loaded.load_weights(best / "best.weights.h5")
    assert _weights(loaded) == seen.weights[lowest]


class _Orbax:
    """As much of Orbax, which is no part of Keras, as Keras asks for; writes a step once only."""

    def __init__(self, folder=None):
        self.folder = folder

    def __getattr__(self, name):
        return self  # modules, policies

    def __call__(self, *args, directory=None, **options):
        return self if directory is None else _Orbax(directory)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def save_checkpointables(self, step, payload):
        assert "pytree" in payload
        self.folder.mkdir(exist_ok=True)
        (self.folder / str(step)).mkdir()


@feature()
def orbax_checkpoint(job: Job):
    rows = job.shard(linear(job, 2))
    model = job.make(_build())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_checkpoint_of_keras, "ocp", _Orbax())
        each, best = (
            _CALLBACKS.OrbaxCheckpoint(
                job.folder / name,
                "val_loss",
                save_best_only=name == "best",
                save_on_background=False,
            )
            for name in ("each", "best")
        )
        history = job.equal(
            _fit(model, rows, [Turning(), each, best], validation_data=rows).history
        )
    job.equal(float(best.best))
    job.gather(None)
    falls = np.flatnonzero(np.minimum.accumulate(history["val_loss"]) == history["val_loss"])
    assert sorted(one.name for one in (job.folder / "each").iterdir()) == ["0", "1", "2"]
    assert sorted(one.name for one in (job.folder / "best").iterdir()) == [str(n) for n in falls]
    job.assert_replicas(model)


@feature()
def keras_backup_and_restore(job: Job):
    rows = job.shard(linear(job, 1))
    build = _build(lambda: keras.optimizers.Adam(0.01))

    def callback():
        return _CALLBACKS.BackupAndRestore(job.folder / "backup", delete_checkpoint=False)

    model = job.make(build)
    _fit(model, rows, [callback()], epochs=2)
    job.gather(None)
    resumed = job.make(build)
    told = _fit(resumed, rows, [callback()], epochs=4)
    assert told.epoch == [2, 3]
    job.equal(told.history)
    job.assert_replicas(resumed)
    if job.is_exact:
        _fit(model, rows, [], epochs=4, initial_epoch=2)
        assert _weights(model) == _weights(resumed)


@feature()
def early_stopping_restores_the_best_weights(job: Job):
    rows = job.shard(linear(job, 2))
    model = job.make(_build())
    seen = Seen()
    stopping = _CALLBACKS.EarlyStopping(
        monitor="val_loss", patience=1, restore_best_weights=True, start_from_epoch=0
    )
    told = _fit(model, rows, [Turning(), seen, stopping], epochs=9, validation_data=rows)
    history = job.equal(told.history)
    best = int(np.argmin(history["val_loss"]))
    job.equal([stopping.stopped_epoch, stopping.best_epoch, best])
    assert len(history["loss"]) == best + 2
    assert _weights(model) == seen.weights[best]
    job.assert_replicas(model)


@feature()
def one_rank_that_stops_stops_all(job: Job):
    class OfRank1(_CALLBACKS.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if job.rank == 1 and epoch == 1:
                self.model.stop_training = True

    model = job.make(_build())
    told = _fit(model, job.shard(linear(job, 1)), [OfRank1()], epochs=5)
    assert job.equal(told.epoch) == [0, 1]
    job.assert_replicas(model)


@feature()
def reduce_lr_on_plateau(job: Job):
    # The rows of one rank get better while the other's do not: all decide by the joined loss.
    x, y = job.shard(linear(job, 1))
    model = job.make(_build(lambda: keras.optimizers.SGD(0.01)))
    callback = _CALLBACKS.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=9)
    validation = (x, y * (1 + 50 * job.rank))
    history = _fit(model, (x, y), [callback], validation_data=validation).history
    job.equal(history)
    close([history["learning_rate"]], [[0.01, 0.01, 0.005]])
    close([job.equal(float(model.optimizer.learning_rate.numpy()))], [0.0025])


@feature()
def learning_rate_scheduler(job: Job):
    model = job.make(_build())
    callback = _CALLBACKS.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    history = job.equal(_fit(model, job.shard(linear(job, 1)), [callback]).history)
    close([history["learning_rate"]], [[0.05, 0.025, 0.0125]])
    job.assert_replicas(model)


@feature()
def csv_logger(job: Job):
    model = job.make(_build())
    callback = _CALLBACKS.CSVLogger(job.folder / "log.csv")
    history = _fit(model, job.shard(linear(job, 1)), [callback]).history
    job.gather(None)
    with (job.folder / "log.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["epoch"] for line in lines] == ["0", "1", "2"]
    close([[float(line["loss"]) for line in lines]], [history["loss"]])


def _need_tensorboard():
    """TensorBoard is no part of TensorFlow; where it is missing, what Keras takes of it is made."""
    try:
        import tensorboard  # noqa: F401
    except ImportError:

        def scalar(name, data, step=None, description=None):
            return tf.summary.write(name, tf.cast(data, tf.float32), step=step)

        summary = types.ModuleType("tensorboard.summary")
        summary.v2 = types.ModuleType("tensorboard.summary.v2")
        summary.v2.scalar = scalar
        sys.modules["tensorboard"] = types.ModuleType("tensorboard")
        sys.modules["tensorboard.summary"] = summary
        sys.modules["tensorboard.summary.v2"] = summary.v2


@feature(elsewhere="csv_logger")
def tensorboard(job: Job):
    _need_tensorboard()
    rows = job.shard(linear(job, 1))
    model = job.make(_build())
    callback = _CALLBACKS.TensorBoard(job.folder, write_graph=False)
    history = _fit(model, rows, [callback], validation_data=rows).history
    job.gather(None)
    for part, name, values in (
        ("train", "epoch_loss", history["loss"]),
        ("validation", "epoch_loss", history["val_loss"]),
    ):
        [path] = (job.folder / part).glob("events*")
        told = [
            float(tf.make_ndarray(value.tensor))
            for event in tf.compat.v1.train.summary_iterator(str(path))
            for value in event.summary.value
            if value.tag == name
        ]
        close([told], [values])


@feature()
def lambda_and_own_callbacks(job: Job):
    """Every rank's own callbacks are called, with the logs of all at an epoch's end."""
    calls = types.SimpleNamespace(begun=0, steps=0, epochs=[])

    def on_epoch_end(epoch, logs):
        calls.epochs.append((epoch, dict(logs)))

    class Own(_CALLBACKS.Callback):
        def on_train_batch_end(self, batch, logs=None):
            calls.steps += 1

        def on_train_begin(self, logs=None):
            calls.begun += 1

    model = job.make(_build())
    callbacks = [_CALLBACKS.LambdaCallback(on_epoch_end=on_epoch_end), Own()]
    history = _fit(model, job.shard(linear(job, 2)), callbacks).history
    assert (calls.begun, calls.steps, len(calls.epochs)) == (1, 6, 3)
    job.equal(calls.epochs)
    assert [logs["loss"] for _, logs in calls.epochs] == history["loss"]


@feature()
def swap_ema_weights(job: Job):
    rows = job.shard(linear(job, 2))

    def optimizer():
        return keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)

    model = job.make(_build(optimizer))
    callback = _CALLBACKS.SwapEMAWeights(swap_on_epoch=True)
    history = job.equal(_fit(model, rows, [callback], epochs=2, validation_data=rows).history)
    assert np.isfinite(history["val_loss"]).all()
    job.assert_replicas(model)


@feature(elsewhere="terminate_on_nan_and_more")
def terminate_on_nan(job: Job):
    """A loss of one rank that is no number ends the training of all, or raises by default."""
    x, y = job.shard(linear(job, 3))
    spoiled = y.copy()
    if job.rank == 1:
        spoiled[BATCH] = np.nan  # in the second of three steps
    strategy = job.strategy(nonfinite="zero")
    model = job.make(_build(), strategy)
    told = _fit(model, (x, spoiled), [_CALLBACKS.TerminateOnNaN()])
    assert job.equal(told.epoch) == [0]
    job.assert_replicas(model)


@feature()
def terminate_on_nan_and_more(job: Job):
    """A class derived from TerminateOnNaN does what else it does on all ranks."""
    heard: list[str] = []

    class Told(_CALLBACKS.TerminateOnNaN):
        def on_epoch_begin(self, epoch, logs=None):
            heard.append(f"begin {epoch} of {self.params['epochs']}")

        def on_nan(self):
            """A method of its own, which is no hook."""

        def on_epoch_end(self, epoch, logs=None):
            heard.append(f"end {epoch}")

    x, y = job.shard(linear(job, 3))
    spoiled = y.copy()
    if job.rank == 1:
        spoiled[BATCH] = np.nan
    model = job.make(_build(), job.strategy(nonfinite="zero"))
    told = _fit(model, (x, spoiled), [Told()])
    assert job.equal(told.epoch) == [0]
    assert heard[0].startswith("begin 0 of ")
    assert heard[1:] == ["end 0"]


@feature()
def callback_list(job: Job):
    """A CallbackList of the user's own stays as it is, and may be used again."""
    model = job.make(_build())
    x, y = job.shard(linear(job, 1))
    path = job.folder / "log.csv"
    callbacks = _CALLBACKS.CallbackList(
        [_CALLBACKS.CSVLogger(path, append=True)], add_history=True, model=model, epochs=1, steps=1
    )
    for rounds in (1, 2):
        model.fit(x, y, batch_size=BATCH, callbacks=callbacks, verbose=0)
        job.gather(None)
        assert len(path.read_text().splitlines()) == rounds + 1
        assert len(callbacks.callbacks) == 2
        job.gather(None)
    job.equal(model.history.history)
    job.assert_replicas(model)
