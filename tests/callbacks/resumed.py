# SPDX-License-Identifier: Apache-2.0
"""Runs of a small model that are stopped and taken up again, for tests of backups."""

import numpy as np

STEPS = 6  # of an epoch
FEW = 2  # of a short one: a step that is made eagerly takes 0.05 s


class Stop(Exception):
    """Raised by a test in the middle of a run."""


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * 4, 5)).astype(np.float32)
    return x, (x[:, :1] > 0).astype(np.float32)


def short():
    """Rows for tests to which it does not matter how many steps an epoch has."""
    x, y = data()
    return {"x": x, "y": y, "batch_size": len(x) // FEW}


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


def undisturbed():
    """The model after three short epochs without a stop, and its History."""
    model = build()
    return model, train(model, callbacks()[1], rows=short())


def everything(model):
    values = [*model.variables, *model.optimizer.variables]
    return [np.asarray(value) for value in values]


def assert_same(model, history, other, other_history):
    for one, two in zip(everything(model), everything(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert history == other_history


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
