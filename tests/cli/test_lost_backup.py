# SPDX-License-Identifier: Apache-2.0
"""A party that is killed and whose disk is lost goes on from another party's backup."""

from pathlib import Path

import pytest

from tests.support import disturbed
from tf_hips import log

TRAIN = """
strategy = tf_hips.HierarchicalPS(compression=sys.argv[3])
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and int(self.model.optimizer.iterations) == 13 and once("killed"):
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


def train(folder: Path, compression: str, *, how: str) -> tuple[set[str], str]:
    return disturbed.train(folder, TRAIN, how, compression, options=("--max-restarts", "1"))


@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_party_whose_disk_is_lost_goes_on(tmp_path: Path) -> None:
    # What an exact way up leaves behind is nothing, so nothing is lost with the disk but the
    # metrics of the epoch that was on.
    undisturbed, _ = train(tmp_path / "undisturbed", "fp32", how="undisturbed")
    ends, printed = train(tmp_path / "killed", "fp32", how="disturbed")
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
def test_a_party_with_residuals_whose_disk_is_lost_goes_on(tmp_path: Path) -> None:
    ends, _ = train(tmp_path / "killed", "error_feedback(onebit)", how="disturbed")
    assert len(ends) == 1
