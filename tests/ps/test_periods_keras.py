# SPDX-License-Identifier: Apache-2.0
"""Keras below the server of a party that has an asynchronous rule of its own (`--period`)."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ps.trees import Node, serving_tree
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.ps.rounds.periods import PeriodicStore

PERIOD = 4
STEPS = {"a": 24, "b": 12}  # neither waits for the other
WEST = Node("west", ("a", "b"), sends="error_feedback(onebit)", up="fp32")

TRAIN = """
import pathlib, sys
import keras, numpy as np
import tf_hips

out, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
strategy = tf_hips.HierarchicalPS("error_feedback(onebit)", downlink="fp32")
assert strategy.num_replicas_in_sync == 1
keras.utils.set_random_seed(steps)  # the first leaf's weights are common
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
begun = {}


class Begins(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        begun.setdefault("loss", logs["loss"])


x = np.random.default_rng(1).normal(size=(8 * steps, 6)).astype("float32")
y = x @ np.random.default_rng(2).normal(size=(6, 3)).astype("float32")
model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[Begins()])
last = model.evaluate(x, y, verbose=0)
np.savez(out, *model.get_weights(), loss=[begun["loss"], last])
"""


@pytest.mark.tf
@pytest.mark.slow
@pytest.mark.timeout(150)
def test_leaves_train_without_each_other(certificates: Certificates, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    below = {"rule": "asgd(learning_rate=0.02)", "period": PERIOD}
    environment = {
        **os.environ,
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    with serving_tree(
        certificates, Node("", (WEST,)), rule="fedavg", below=below, join_timeout_s=90.0
    ) as servers:
        leaves = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tf_hips.cli", "party", "--insecure"),
                    *("--server", servers["west"].address, "--server-role", "server"),
                    *("--site", site, str(script), str(tmp_path / f"{site}.npz"), str(steps)),
                ],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for site, steps in STEPS.items()
        ]
        try:
            printed = [leaf.communicate(timeout=120)[0] for leaf in leaves]
        finally:
            for leaf in leaves:
                leaf.kill()
        assert [leaf.returncode for leaf in leaves] == [0, 0], printed
        west = servers["west"]._session
        with west.changed:
            store = west.store
            assert isinstance(store, PeriodicStore)
            eventually(lambda: store.num_waiting == 0, 20.0, changed=west.changed)
        # Updates of both count towards a period; each is a round of the server above.
        assert store.next_up == sum(STEPS.values()) // PERIOD
        found = [np.load(tmp_path / f"{site}.npz") for site in STEPS]
        for child, one in enumerate(found):
            begun, last = one["loss"]
            assert last < 0.9 * begun
            assert store.of(child).round == list(STEPS.values())[child] - 1
        # Each leaf has the common first weights less what the server knows that it has received.
        for tensor in range(4):
            first = [
                one[f"arr_{tensor}"].reshape(-1) + store.of(child).received[tensor]
                for child, one in enumerate(found)
            ]
            np.testing.assert_allclose(*first, atol=1e-5)
