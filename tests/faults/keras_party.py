# SPDX-License-Identifier: Apache-2.0
"""What a worker of `keras_runs` trains: a small model on data that are functions of the seed.

    python keras_party.py OUT SEED STEPS BACKUP '[[rank, step], ...]'

A worker kills itself with SIGKILL after a step that the list has for its rank, once.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tf_hips

BATCH, FEATURES, CLASSES = 8, 20, 5
SAVE_FREQ = 5


class Kills(keras.callbacks.Callback):
    """The end of this process, after a step."""

    def __init__(self, folder: Path, rank: int, kills: list[list[int]]) -> None:
        super().__init__()
        self._folder, self._rank = folder, rank
        self._steps = {step for one, step in kills if one == rank}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations)
        mark = self._folder / f"killed-{self._rank}-{step}"
        if step in self._steps and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    out, seed, steps, backup = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
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
                keras.layers.Dropout(0.2),
                keras.layers.Dense(CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rank = int(os.environ["HOROVOD_RANK"])
    kills = Kills(out.parent, rank, json.loads(sys.argv[5]))
    kept = tf_hips.callbacks.BackupAndRestore(backup, save_freq=SAVE_FREQ)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[kills, kept])
    out.with_suffix(f".{rank}").write_text(tf_hips.fingerprint(model), encoding="ascii")


if __name__ == "__main__":
    main()
