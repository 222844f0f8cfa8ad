# SPDX-License-Identifier: Apache-2.0
"""What `fit` makes of another party's backup, where epochs have another length there."""

import json

import numpy as np
import pytest

pytestmark = [pytest.mark.tf, pytest.mark.timeout(120)]

NAME = "00000001-epoch-2-step-2"


class Stop(Exception):
    """Raised by a test in the middle of a run."""


def stopped(folder, *, is_of_others, name=NAME):
    """Trains up to step 2 of the third epoch of 5; the backup of that is called `name` then."""
    import keras

    class Stops(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if (folder / NAME).exists():
                raise Stop

    with pytest.raises(Stop):
        train(folder, 5, Stops(), save_freq=12)
    path = folder / NAME
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "is_of_others": is_of_others}))
    path.rename(folder / name)


def train(folder, steps, *callbacks, save_freq=100):
    """Trains three epochs of so many steps, whose number Keras does not know; the History."""
    import keras
    import tensorflow as tf

    from tf_hips.callbacks import BackupAndRestore

    def batches():
        for number in range(steps):
            x = np.full((2, 1), number, np.float32)
            yield x, x

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    spec = tf.TensorSpec((2, 1), tf.float32)
    data = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    backup = BackupAndRestore(folder, save_freq=save_freq)
    return model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks, backup])


@pytest.mark.parametrize(
    ("is_of_others", "told"),
    [
        (False, "The data must be as long as when the run was stopped"),
        (True, "another party's backup.*In a new run give `steps_per_epoch` to `fit` in all"),
    ],
)
def test_data_of_unknown_length_that_end_before_say_what_to_do(tmp_path, is_of_others, told):
    stopped(tmp_path, is_of_others=is_of_others)
    with pytest.raises(ValueError, match=f"{told}.* ends at step 1 of an epoch .* at step 2"):
        train(tmp_path, 1)


def test_history_has_each_epoch_once_where_an_epoch_is_longer_here(tmp_path):
    """Two epochs were over there and one is here: the second is still to end."""
    stopped(tmp_path, is_of_others=True, name="00000001-epoch-1-step-2")
    history = train(tmp_path, 7)
    assert history.epoch == [0, 1, 2]
    assert {name: len(values) for name, values in history.history.items()} == {"loss": 3}
