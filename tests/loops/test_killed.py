# SPDX-License-Identifier: Apache-2.0
"""A party that is killed in a local phase, and a server: the weights of an undisturbed run."""

from pathlib import Path

import pytest

from tests.support import disturbed
from tf_hips import log

TRAIN = """
strategy = tf_hips.HierarchicalPS(compression="error_feedback(onebit)")
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if rank == 1 and step == 18 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 27 and once("server"):
            kill_server()


keras.utils.set_random_seed(rank)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
loop = tf_hips.FedAvg(model, strategy, local_steps=6, server_optimizer="fedadam(0.01)")
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
@pytest.mark.timeout(330)
def test_a_party_comes_back_into_its_round(tmp_path: Path) -> None:
    undisturbed, _ = disturbed.train(tmp_path / "undisturbed", TRAIN, "undisturbed")
    options = ("--max-restarts", "2")
    ends, printed = disturbed.train(tmp_path / "disturbed", TRAIN, "disturbed", options=options)
    assert ends == undisturbed
    assert len(ends) == 1
    for text in (
        "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)",
        "server failed (killed by SIGKILL); server starts again (1 of 2)",
        "Site party1 has come back as another process",
    ):
        assert text in printed
    events = log.read_events(tmp_path / "disturbed" / "logs")
    # Step 16 was backed up last: two rounds of six steps, and four of the third.
    came_back = {one["site"]: one["round"] for one in events if one["event"] == "came_back"}
    assert came_back == {"party1": 2}
