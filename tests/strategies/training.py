# SPDX-License-Identifier: Apache-2.0
"""Small models and data for tests of strategies; imported inside the ranks only."""

import keras
import numpy as np
import tensorflow as tf

from tf_hips.comm import primitives
from tf_hips.strategies import fingerprint

BATCH = 8


def data(num_rows=64, seed=0):
    """Rows of a linear problem with noise: float32 [n, 6] and [n, 3]."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_rows, 6)).astype(np.float32)
    y = x @ generator.normal(size=(6, 3)).astype(np.float32) + 0.1
    return x, y.astype(np.float32)


def shard(arrays, rank, size, batch=BATCH):
    """Rows of `rank`, such that its k-th batch and the other ranks' make up the k-th joined
    batch.
    """
    groups = [array.reshape(-1, size, batch, *array.shape[1:]) for array in arrays]
    return [group[:, rank].reshape(-1, *group.shape[3:]) for group in groups]


def rows(arrays, batch=BATCH):
    """A dataset of the batches of `arrays`, in order, with the shapes that Keras gives to those of
    arrays.

    Of arrays it makes three functions first, which costs as much as the steps of a small model.
    """
    count = len(tf.nest.flatten(arrays)[0])
    dataset = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return dataset.batch(batch, drop_remainder=count % batch == 0)


def build(optimizer="sgd", **options):
    """A compiled two-layer model; its initial weights come from Keras' global seed."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(optimizer, "mse", **options)
    return model


def fit(model, arrays, epochs=1, batch=BATCH):
    """Trains in order, so that runs can be compared."""
    return model.fit(rows(arrays, batch), epochs=epochs, verbose=0).history["loss"]


def values(model):
    """All weights and optimizer variables; gradients that are still being accumulated are each
    rank's own.
    """
    slots = [slot.numpy() for slot in model.optimizer.variables if "accumulator" not in slot.name]
    return [np.asarray(value) for value in [*model.get_weights(), *slots]]


def assert_same_on_all_ranks(model):
    """Weights and slots are equal bit for bit on all ranks."""
    bits = [value.tobytes().hex() for value in values(model)]
    everyone = primitives.gather_objects([fingerprint(model), bits])
    assert all(one == everyone[0] for one in everyone), [one[0] for one in everyone]


def checkpoint(strategy, model):
    """All that a rank needs to go on: model, optimizer, and what the strategy keeps."""
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer, strategy=strategy.state)
