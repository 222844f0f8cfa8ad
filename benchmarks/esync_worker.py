# SPDX-License-Identifier: Apache-2.0
"""One party of `benchmarks.esync`: trains on its half of the digits for some seconds.

    python -m benchmarks.esync_worker FOLDER METHOD LEVEL SECONDS STATE_SERVER SPLIT

writes FOLDER/<party>.json: its waiting, its steps, and when its model had which accuracy.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tf_hips
from tf_hips import config

BATCH = 32
TESTED = 360
# Meetings before the measured ones: graphs are traced, times are learnt.
UNCOUNTED = 3


def data(split: str, party: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A party's half, and what all are tested with."""
    digits = load_digits()
    x, y = (digits.data / 16.0).astype(np.float32), digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    own_x, own_y = x[TESTED:], y[TESTED:]
    chosen = own_y % 2 == party if split == "class" else np.arange(len(own_x)) % 2 == party
    return own_x[chosen], own_y[chosen], x[:TESTED], y[:TESTED]


def looped(method: str, level: str, model: Any, strategy: Any, state_server: str) -> Any:
    """The loop of a method."""
    if method == "sync":
        return tf_hips.FedAvg(model, strategy, local_steps=1, weighting="uniform")
    if method == "fixed":
        return tf_hips.FedAvg(model, strategy, local_steps=20, weighting="uniform")
    if method == "compat":
        return tf_hips.ESync(model, strategy, rule="compat", state_server=state_server)
    slowest = max(1, 20 // int(level))
    pace = f"slowest_steps={slowest},most_slowest_steps={slowest}"
    return tf_hips.ESync(model, strategy, pace=pace)


class Ends(keras.callbacks.Callback):
    """Stops after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.began: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began = now
        if now - self.began > self._seconds:
            self.model.stop_training = True


def main() -> None:
    folder, method, level, seconds, state_server, split = sys.argv[1:]
    party = int(config.load(os.environ[config.CONFIG_VARIABLE]).uplink.site.removeprefix("party"))
    x, y, test_x, test_y = data(split, party)
    keras.utils.set_random_seed(party)
    strategy = tf_hips.HierarchicalPS()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(512, activation="relu"),
                keras.layers.Dense(512, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    loop = looped(method, level, model, strategy, state_server)
    rows: list[dict[str, float]] = []
    kept: list[tuple[float, list[np.ndarray]]] = []
    gather, plan = strategy._gather_objects, loop.plan

    def gathered(value: Any, label: str) -> Any:
        began = time.monotonic()
        found = gather(value, label)
        if label == "a meeting of a loop":
            now = time.monotonic()
            rows.append({"at": now, "waited_s": now - began, "steps": loop.steps})
        return found

    def planned(number: int) -> Any:
        if number and (not kept or time.monotonic() - kept[-1][0] > 0.1):
            kept.append((time.monotonic(), model.get_weights()))
        return plan(number)

    strategy._gather_objects, loop.plan = gathered, planned
    ends = Ends(float(seconds))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=party).repeat()
    dataset = dataset.batch(BATCH).with_options(_serial())
    loop.fit(dataset, steps_per_epoch=10**6, epochs=1, verbose=0, callbacks=[ends])
    strategy._gather_objects = gather
    accuracies = []
    for at, weights in kept:
        a, b, c, d, e, f = weights
        hidden = np.maximum(np.maximum(test_x @ a + b, 0) @ c + d, 0)
        right = float(np.mean(np.argmax(hidden @ e + f, 1) == test_y))
        accuracies.append((at - (ends.began or 0.0), right))
    measured = rows[UNCOUNTED:-1]
    lasted = measured[-1]["at"] - rows[UNCOUNTED - 1]["at"] if measured else float("nan")
    told = {
        "waited_s": sum(one["waited_s"] for one in measured),
        "seconds": lasted,
        "meetings": len(measured),
        "steps": sum(one["steps"] for one in measured),
        "accuracies": accuracies,
    }
    Path(folder, f"{party}.json").write_text(json.dumps(told), encoding="utf-8")
    strategy.close()


def _serial() -> tf.data.Options:
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return options


if __name__ == "__main__":
    main()
