# SPDX-License-Identifier: Apache-2.0
"""A party comes back in the first `fit` of its script; in a later one it says that it cannot."""

from pathlib import Path

import pytest

from tests.support import disturbed

TRAIN = """
import os, pathlib, signal, sys
import keras, numpy as np
import tf_hips

folder = pathlib.Path(sys.argv[1])
strategy = tf_hips.HierarchicalPS()


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark = folder / "killed"
        step = int(self.model.optimizer.iterations)
        if strategy.global_rank == 1 and step == 13 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(128, 8)).astype("float32")
for name in ("first", "second"):  # of 8 steps each
    kept = tf_hips.callbacks.BackupAndRestore(folder / name, save_freq=2)
    rows = tf_hips.shard((x, x[:, :2]), 8)
    model.fit(rows, epochs=1, verbose=0, callbacks=[Trouble(), kept])
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(160)
def test_a_party_that_is_lost_in_a_second_fit_ends_the_run(tmp_path: Path) -> None:
    code, printed = disturbed.launch(tmp_path, TRAIN, options=("--max-restarts", "1"))
    assert code == 1, printed
    assert "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 1)" in printed
    reason = "Another party's backup cannot be taken up here: it is of another run or another `fit`"
    assert reason in printed
    assert "This process had come back, and fails before it has taken its place" in printed
