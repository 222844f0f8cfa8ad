# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN on real handwritten digits: alone, or over several parties.

    python examples/digits.py                                         one worker
    tf-hips run --parties 2 --workers 2 examples/digits.py            two parties of two workers

Every worker trains on its own shard. Gradients cross the slow tier with one bit per element, and
what a bit cannot say is carried over to the next step.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits

import tf_hips

TEST_SHARE = 0.2
TEST_SEED = 2026  # the held-out images are the same in every run, whatever its seed


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Train and test set; images are float32 [n, 8, 8, 1] in [0, 1], labels int64 [n]."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    order = np.random.default_rng(TEST_SEED).permutation(len(images))
    test, train = np.split(order, [round(TEST_SHARE * len(images))])
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build() -> keras.Model:
    """A CNN of about 40,000 parameters."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(48, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(56, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    """Trains, evaluates on the held-out images, and records the fingerprint of the weights."""
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keras.utils.set_random_seed(options.seed)
    (x, y), test = load()

    strategy = tf_hips.HierarchicalPS(compression=tf_hips.error_feedback(tf_hips.onebit()))
    rank, workers = strategy.global_rank, strategy.num_replicas_in_sync
    shard = tf_hips.shard((x, y), options.batch_size, strategy=strategy)
    with strategy.scope():
        model = build()
        rate = keras.optimizers.schedules.CosineDecay(2e-3, len(shard) * options.epochs, alpha=0.02)
        model.compile(
            optimizer=keras.optimizers.Adam(rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=8,
        )

    def record(epoch: int, logs: dict[str, float]) -> None:
        strategy.write_event("epoch", epoch=epoch + 1, test_accuracy=float(logs["val_accuracy"]))

    model.fit(
        shard,
        epochs=options.epochs,
        validation_data=test,
        validation_batch_size=len(test[0]),
        verbose=2 if rank == 0 else 0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=record)],
    )
    accuracy = model.evaluate(*test, len(test[0]), verbose=0, return_dict=True)["accuracy"]
    fingerprint = tf_hips.fingerprint(model)
    strategy.write_event("result", test_accuracy=float(accuracy), fingerprint=fingerprint)
    print(f"worker {rank} of {workers}: test accuracy {accuracy:.4f}, weights {fingerprint}")


if __name__ == "__main__":
    main()
