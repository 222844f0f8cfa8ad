# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` over three parties of which one is late: nothing in a script knows of a quorum."""

import json
import os

import pytest

from tests.support.lateness import LATE, SITES, go_on, run_with_one_late, stand_still
from tf_hips import config

pytestmark = pytest.mark.tf

EPOCHS = 2
STEPS = 4


def _one_model():
    import keras

    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], run_eagerly=True)
    return model


def _pair():
    """A GAN in small: its first list of gradients goes in rounds, the second one is gathered."""
    import keras

    from tests.strategies.features.ours import Pair

    model = Pair()
    model.compile(*(keras.optimizers.Adam(0.05) for _ in range(2)))
    model.run_eagerly = True
    return model


def _train(folder):
    _fit(folder, _one_model)


def _train_pair(folder):
    _fit(folder, _pair)


def _fit(folder, make):
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(SITES.index(site))
    x, y = training.data(STEPS * training.BATCH * 3)
    own = training.shard([x, y], SITES.index(site), 3)

    class Meeting(keras.callbacks.Callback):
        """East stands still until the others have made an epoch."""

        def on_train_batch_begin(self, batch, logs=None):
            if site == LATE and batch == 1 and not done:
                done.append(1)
                stand_still(folder)

        def on_epoch_end(self, epoch, logs=None):
            histories.append(logs)
            if site == SITES[1]:  # as a machine does that rounds unlike: all take the first one's
                for weight in self.model.trainable_weights:
                    value = tf.convert_to_tensor(weight)
                    weight.assign(tf.math.nextafter(value, tf.fill(value.shape, 9.0)))
            if site != LATE and epoch == 0:
                go_on(folder, site)

    done, histories = [], []
    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    with strategy.scope():
        model = make()
    model.fit(training.rows(own), epochs=EPOCHS, verbose=0, callbacks=[Meeting()])
    assert all(np.isfinite(value).all() for value in model.get_weights())
    told = [fingerprint(model), histories]
    (folder / f"{site}.json").write_text(json.dumps(told))
    strategy.close()


@pytest.mark.timeout(150)
def test_a_late_party_ends_with_the_weights_and_the_metrics_of_the_others(tmp_path):
    events = run_with_one_late(tmp_path, _train)
    closed = [event for event in events if event["event"] == "closed"]
    assert len(closed) == EPOCHS * STEPS
    assert [event["absent"] for event in closed[1:STEPS]] == [[LATE]] * (STEPS - 1)
    absent = [event["absent"] for event in events if event["event"] == "gather_closed"]
    assert [LATE] in absent


@pytest.mark.heavy
@pytest.mark.timeout(150)
def test_a_late_party_of_a_gan_ends_with_the_weights_of_the_others(tmp_path):
    events = run_with_one_late(tmp_path, _train_pair)
    closed = [event for event in events if event["event"] == "closed"]
    assert len(closed) == 2 * EPOCHS * STEPS
    assert [LATE] in [event["absent"] for event in closed]
    missed = [event["absent"] == [LATE] for event in events if event["event"] == "gather_closed"]
    assert sum(missed) >= 2 * (STEPS - 1)  # two steps of the second list in a batch
