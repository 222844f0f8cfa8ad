# SPDX-License-Identifier: Apache-2.0
"""A party that is killed and whose disk is lost goes on from another party's backup."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips import log

TRAIN = """
import hashlib, os, pathlib, shutil, signal, sys
import keras, numpy as np
import tf_hips

folder, compression = pathlib.Path(sys.argv[1]), sys.argv[2]
strategy = tf_hips.HierarchicalPS(compression=compression)
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        mark = folder / "killed"
        if rank == 1 and int(self.model.optimizer.iterations) == 13 and not mark.exists():
            mark.touch()
            shutil.rmtree(folder / "backup" / "party1")
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(rank)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
history = model.fit(
    tf_hips.shard((x, x[:, :2]), 8),
    epochs=2,
    verbose=0,
    callbacks=[Trouble(), tf_hips.callbacks.BackupAndRestore(folder / "backup", save_freq=5)],
)
variables = [*model.get_weights(), *(one.numpy() for one in model.optimizer.variables)]
weights = b"".join(np.ascontiguousarray(one).tobytes() for one in variables)
print("END", hashlib.sha256(weights).hexdigest(), history.history["loss"][1], flush=True)
"""


def train(folder: Path, compression: str, *, is_killed: bool) -> tuple[set[str], str]:
    """What the workers say at the end, and all that was printed."""
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    if not is_killed:
        (folder / "killed").touch()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tf_hips.cli", "run", "--parties", "2", "--workers", "1"),
            *("--max-restarts", "1", "--log-dir", str(folder / "logs")),
            *(str(folder / "train.py"), str(folder), compression),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1"},
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    ends = re.findall(r"^\[party\d/worker0\] END (.*)$", printed, re.MULTILINE)
    assert len(ends) == 2, printed
    return set(ends), printed


@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_party_whose_disk_is_lost_goes_on(tmp_path: Path) -> None:
    # What an exact way up leaves behind is nothing, so nothing is lost with the disk but the
    # metrics of the epoch that was on.
    undisturbed, _ = train(tmp_path / "undisturbed", "fp32", is_killed=False)
    ends, printed = train(tmp_path / "killed", "fp32", is_killed=True)
    assert ends == undisturbed
    assert len(ends) == 1
    assert "No backup here leads into the run that goes on. Another party's is fetched" in printed
    events = log.read_events(tmp_path / "killed" / "logs")
    [fetched] = [one for one in events if one["event"] == "fetched_backup"]
    assert fetched["site"] == "party1"
    [came_back] = [one for one in events if one["event"] == "came_back"]
    assert came_back["round"] == 10


@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_residuals_of_others_are_not_taken(tmp_path: Path) -> None:
    ends, _ = train(tmp_path / "killed", "error_feedback(onebit)", is_killed=True)
    assert len(ends) == 1
