# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run --max-restarts`: workers that are killed or fail, and a server that is killed; the
run ends by itself, with the weights of a run that nobody disturbed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.training import Setting, undisturbed
from tests.support import disturbed
from tf_hips import log

TRAIN = """
strategy = tf_hips.HierarchicalPS(compression="error_feedback(onebit)")
rank = strategy.global_rank


class Trouble(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if rank == 1 and step == 12 and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and step == 20 and once("failed"):
            raise RuntimeError("this worker gives up")
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
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
history = model.fit(
    tf_hips.shard((x, x[:, :2]), 8),
    epochs=2,
    verbose=0,
    callbacks=[Trouble(), tf_hips.callbacks.BackupAndRestore(folder / "backup", save_freq=5)],
)
weights = b"".join(np.ascontiguousarray(one).tobytes() for one in model.get_weights())
print("END", hashlib.sha256(weights).hexdigest(), history.history["loss"], flush=True)
"""


# One party, whose worker is killed in its `fit`, and again when all steps are made and the script
# goes on; small and eager.
KILLED = (
    TRAIN.replace("rank == 1 and step == 12", "step == 12")
    .replace("rank == 0 and step == 20", "False")
    .replace("rank == 0 and step == 27", "False")
    .replace('metrics=["mae"])', "run_eagerly=True)")
    .replace("size=(256, 8)", "size=(64, 8)")
    .replace(
        "weights = b",
        """if once("killed behind"):
    os.kill(os.getpid(), signal.SIGKILL)
strategy.gather_objects(rank, "what follows `fit`")
weights = b""",
    )
)

FEEDBACK = "error_feedback(onebit)"
# Without TensorFlow: the training of tests/faults, with a backup every 5 rounds.
PLAIN = f"""
from tests.faults.training import Setting, Trainer
from tf_hips import config
from tf_hips.ps.client.client import Client

run = config.current()
client = Client(run.uplink, run.run, 1)
welcome = client.join({FEEDBACK!r}, {FEEDBACK!r}, run.seed)
setting = Setting(
    "run", {FEEDBACK!r}, {FEEDBACK!r}, sites=("party0", "party1"), rounds=16, seed=run.seed
)
trainer, rank, number = Trainer(setting, welcome.child), welcome.child, 0
backup = folder / f"{{rank}}.npz"
if welcome.is_back and backup.exists():
    number = trainer.load(backup)
    client.agree_model(setting.shapes, number)
    print("goes on at", number, flush=True)
else:
    client.agree_model(setting.shapes, welcome.round)
    trainer.weights = client.first_sync(trainer.weights)
while number < setting.rounds:
    trainer.apply(client.exchange(number, trainer.packets(number)))
    number += 1
    if rank == 1 and number == 7 and once("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and number == 12 and once("failed"):
        raise RuntimeError("this worker gives up")
    if rank == 0 and number == 14 and once("server"):
        kill_server()
    if number % 5 == 0:
        trainer.save(backup, number)
        client.backed_up(number, 0)
client.leave()
print("END", trainer.digest(), run.seed, flush=True)
"""


def train(folder: Path, how: str, parties: int, *options: str) -> tuple[set[str], str]:
    return disturbed.train(folder, TRAIN, how, parties=parties, options=options)


KILL_FIRST_SERVER = """
import os, pathlib, signal, sys
mark = pathlib.Path(__file__).with_name("killed")
if "server" in sys.orig_argv and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.heavy
def test_a_server_that_is_killed_before_it_listens_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(KILL_FIRST_SERVER)  # Python imports it at its start
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    done = subprocess.run(
        [sys.executable, "-m", "tf_hips.cli", "run", "--max-restarts", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert "server failed (killed by SIGKILL); server starts again (1 of 1)" in done.stderr
    assert done.returncode == 3, done.stderr
    assert "/worker" in done.stderr.splitlines()[-1]
    assert "failed first (exit code 3)" in done.stderr.splitlines()[-1]


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_workers_and_the_server_are_started_again(tmp_path: Path) -> None:
    options = ("--max-restarts", "2", "--seed", "7")
    ends, printed = disturbed.train(tmp_path, PLAIN, "disturbed", options=options, imports="")
    sites = ("party0", "party1")
    assert ends == {f"{undisturbed(Setting('run', FEEDBACK, FEEDBACK, sites, rounds=16))} 7"}
    for text in (
        "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)",
        "party0/worker0 failed (exit code 1); party0 starts again (1 of 2)",
        "server failed (killed by SIGKILL); server starts again (1 of 2)",
        "Site party0 has come back as another process",
        "Site party1 has come back as another process",
        "[party0/worker0] goes on at 10",
        "[party1/worker0] goes on at 5",
    ):
        assert text in printed
    events = log.read_events(tmp_path / "logs")
    assert sum(one["event"] == "restored" for one in events) == 1


@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_a_keras_worker_comes_back_from_its_backup_and_to_the_end_of_its_fit(
    tmp_path: Path,
) -> None:
    options = ("--max-restarts", "2")
    ends, printed = disturbed.train(tmp_path, KILLED, "disturbed", parties=1, options=options)
    assert len(ends) == 1
    assert printed.count("Site party0 has come back as another process") == 2
    events = log.read_events(tmp_path / "logs")
    back = [one for one in events if one["event"] == "came_back"]
    # Behind its `fit` at 15 of 16, so it makes the last one again.
    assert [(one["site"], one["round"]) for one in back] == [("party0", 10), ("party0", 15)]
    rounds = [one["round"] for one in events if (one["event"], one["role"]) == ("round", "worker")]
    assert sorted({*rounds}) == [*range(16)]
    assert not (tmp_path / "backup").exists()


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_whatever_is_killed_the_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed", "undisturbed", 2)
    ends, printed = train(tmp_path / "disturbed", "disturbed", 2, "--max-restarts", "2")
    assert ends == undisturbed
    assert len(ends) == 1
    for text in (
        "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)",
        "party0/worker0 failed (exit code 1); party0 starts again (1 of 2)",
        "server failed (killed by SIGKILL); server starts again (1 of 2)",
        "Site party1 has come back as another process",
    ):
        assert text in printed
    events = log.read_events(tmp_path / "disturbed" / "logs")
    came_back = {one["site"]: one["round"] for one in events if one["event"] == "came_back"}
    assert came_back == {"party0": 15, "party1": 10}
    assert sum(one["event"] == "restored" for one in events) == 1
