# SPDX-License-Identifier: Apache-2.0
"""A party that is killed behind a `fit` that was stopped: it comes back there, without a step."""

import re
from pathlib import Path

import pytest

from tests.support import disturbed

TRAIN = """
strategy = tf_hips.HierarchicalPS("error_feedback(int8)")
rank = strategy.global_rank
loops = sys.argv[3] == "loop"


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not loops and self.model.optimizer.iterations == 13:
            self.model.stop_training = True  # in the middle of an epoch, on all

    def on_epoch_end(self, epoch, logs=None):
        if loops and rank == 0 and epoch == 1:
            self.model.stop_training = True  # the other one hears of it in its next epoch


keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
x = np.random.default_rng(rank).normal(size=(64, 8)).astype("float32")
backup = tf_hips.callbacks.BackupAndRestore(folder / "backup", save_freq=3)
fit = tf_hips.FedAvg(model, strategy, local_steps=5).fit if loops else model.fit
history = fit(
    x, x[:, :2], batch_size=8, shuffle=False, epochs=4, verbose=0, callbacks=[Stops(), backup],
    validation_data=(x[:8], x[:8, :2]),
).history
if rank == 1 and once("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
losses = history["loss"]
print("STEPS", int(model.optimizer.iterations), len(losses), losses[-1], flush=True)
print("END", tf_hips.fingerprint(model), model.evaluate(x, x[:, :2], verbose=0), flush=True)
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize(("how", "steps"), [("loop", ("16", "20")), ("plain", ("13", "13"))])
def test_a_party_comes_back_behind_a_fit_that_was_stopped(
    tmp_path: Path, how: str, steps: tuple[str, str]
) -> None:
    undisturbed, calm = disturbed.train(tmp_path / "undisturbed", TRAIN, "undisturbed", how)
    options = ("--max-restarts", "2")
    ends, printed = disturbed.train(tmp_path / "killed", TRAIN, "disturbed", how, options=options)
    assert ends == undisturbed
    assert len(ends) == 1
    assert "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)" in printed
    # Steps, and epochs with their losses.
    told = [
        sorted(re.findall(r"^\[party.* STEPS .*$", text, re.MULTILINE)) for text in (calm, printed)
    ]
    assert told[0] == told[1]
    assert [one.split()[2] for one in told[0]] == [*steps]
