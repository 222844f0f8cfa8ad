# SPDX-License-Identifier: Apache-2.0
"""A party that is killed in a local phase of ESync comes back into it, and all go on."""

import re
from pathlib import Path

import pytest

from tests.support import disturbed
from tf_hips import log

TRAIN = """
import os, pathlib, signal, sys
import keras, numpy as np
import tf_hips

folder = pathlib.Path(sys.argv[1])
strategy = tf_hips.HierarchicalPS("error_feedback(int8)")
rank = strategy.global_rank
batches = (12, 150)[rank]


class Trouble(keras.callbacks.Callback):
    has_begun = False

    def on_train_batch_begin(self, batch, logs=None):
        if not self.has_begun:
            self.has_begun = True
            print("BEGAN", loop.round, loop.steps, flush=True)

    def on_train_batch_end(self, batch, logs=None):
        killed = folder / "killed"
        if rank == 1 and loop.round >= 3 and loop.steps >= 5 and not killed.exists():
            killed.write_text(f"{loop.round} {loop.steps}")
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(rank)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
loop = tf_hips.ESync(model, strategy)
x = np.random.default_rng(rank).normal(size=(8 * batches, 8)).astype("float32")
backup = tf_hips.callbacks.BackupAndRestore(folder / f"backup-{rank}", save_freq=1)
loop.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0, callbacks=[Trouble(), backup])
print("END", int(model.optimizer.iterations), tf_hips.fingerprint(model), flush=True)
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_killed_party_goes_on_in_its_local_phase(tmp_path: Path) -> None:
    options = (
        *("--rule", "fedavg(1.0)", "--max-restarts", "2", "--log-dir", str(tmp_path / "logs")),
        *("--slowdown", "worker=0:300ms", "--slowdown", "worker=1:15ms"),
    )
    code, printed = disturbed.launch(tmp_path, TRAIN, options=options, timeout_s=300)
    assert code == 0, printed
    assert "party1/worker0 failed (killed by SIGKILL); party1 starts again (1 of 2)" in printed
    ends = dict(re.findall(r"^\[party(\d)/worker0\] END (.*)$", printed, re.MULTILINE))
    steps = {party: int(end.split()[0]) for party, end in ends.items()}
    # Every batch once: steps before the backup are not made again, none is left out.
    assert steps == {"0": 24, "1": 300}, printed
    assert len({end.split(maxsplit=1)[1] for end in ends.values()}) == 1, printed
    at_round, at_step = map(int, (tmp_path / "killed").read_text().split())
    began = re.findall(r"^\[party1/worker0\] BEGAN (\d+) (\d+)$", printed, re.MULTILINE)
    assert [(int(number), int(step)) for number, step in began] == [
        (0, 0),
        (at_round, at_step - 1),  # the backup of the step before
    ]
    events = [one for one in log.read_events(tmp_path / "logs") if one["event"] == "esync"]
    numbers = {site: [one["number"] for one in events if one["site"] == site]
               for site in ("party0", "party1")}  # fmt: skip
    assert numbers["party0"] == numbers["party1"] == list(range(len(numbers["party0"])))
    assert len(numbers["party0"]) > at_round + 3
    # Slow and quick are told apart again after it.
    later = {(one["site"], one["number"]): one for one in events if one["number"] > at_round + 1}
    both = [number for number in numbers["party0"] if later.get(("party0", number), {}).get("steps")
            and later.get(("party1", number), {}).get("steps")]  # fmt: skip
    assert both, printed
    slow, quick = (sum(later[site, number]["steps"] for number in both)
                   for site in ("party0", "party1"))  # fmt: skip
    assert quick > 3 * slow
