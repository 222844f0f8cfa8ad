# SPDX-License-Identifier: Apache-2.0
"""A party that votes on local steps is killed in a round, and its server: the same weights."""

from pathlib import Path

import pytest

from tests.support import disturbed
from tf_hips import log

TRAIN = """
strategy = tf_hips.HierarchicalPS(compression="terngrad")
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        step = self.params["steps"] * self.epoch + batch
        if rank == 1 and step == 17 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 27 and once("server"):
            kill_server()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch


keras.utils.set_random_seed(rank)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
loop = tf_hips.FedAvg(model, strategy, local_steps=6, reset_optimizer=True)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
loop.fit(
    tf_hips.shard((x, x[:, :2]), 8),
    epochs=2,
    verbose=0,
    callbacks=[Trouble(), tf_hips.callbacks.BackupAndRestore(folder / "backup", save_freq=4)],
)
print("END", tf_hips.fingerprint(model), flush=True)
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_party_comes_back_into_its_group(tmp_path: Path) -> None:
    """Two groups of two, other ones in each round: weights depend on what groups compute alone."""
    told = {"parties": 4, "options": ("--rule", "detox(r=2) >> mean >> fedadam(0.01)")}
    undisturbed, _ = disturbed.train(tmp_path / "undisturbed", TRAIN, "undisturbed", **told)
    told["options"] += ("--max-restarts", "2")
    ends, printed = disturbed.train(tmp_path / "disturbed", TRAIN, "disturbed", **told)
    assert ends == undisturbed
    assert len(ends) == 1
    for text in ("party1 starts again (1 of 2)", "server starts again (1 of 2)"):
        assert text in printed
    events = log.read_events(tmp_path / "disturbed" / "logs")
    # Step 16 was backed up last: two rounds of six steps, and four of the third.
    came_back = {one["site"]: one["round"] for one in events if one["event"] == "came_back"}
    assert came_back == {"party1": 2}
    assert not [one for one in events if one["event"] in ("outvoted", "dropped")]
