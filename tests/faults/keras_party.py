# SPDX-License-Identifier: Apache-2.0
"""What a worker of `keras_runs` trains: a small model on data that are functions of the seed."""

import sys
from pathlib import Path

import keras
import numpy as np

import tf_hips

BATCH, FEATURES, CLASSES = 8, 20, 5


def main() -> None:
    out, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    keras.utils.set_random_seed(seed)
    strategy = tf_hips.HierarchicalPS(compression="error_feedback(onebit)")
    draw = np.random.default_rng((seed, strategy.global_rank))
    x = draw.standard_normal((steps * BATCH, FEATURES)).astype(np.float32)
    y = draw.integers(0, CLASSES, steps * BATCH)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    out.write_text(tf_hips.fingerprint(model), encoding="ascii")


if __name__ == "__main__":
    main()
