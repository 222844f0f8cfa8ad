# SPDX-License-Identifier: Apache-2.0
"""A Keras job over a real sshd: two parties of two workers, started by `tf-hips up`."""

import re

import pytest
import yaml

from tests.cluster.sshd import Site
from tests.support.eventually import eventually

pytestmark = [pytest.mark.tf, pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import zlib
import keras
import numpy as np
import tf_hips

strategy = tf_hips.HierarchicalPS(compression=tf_hips.error_feedback(tf_hips.onebit()))
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
generator = np.random.default_rng(0)
x, y = generator.random((64, 8), np.float32), generator.integers(0, 4, 64)
model.fit(tf_hips.shard((x, y), batch_size=4), epochs=2, verbose=0)
print("weights", *(zlib.crc32(one.tobytes()) for one in model.get_weights()), flush=True)
"""


def test_keras_trains_on_two_sites(site: Site) -> None:
    told = yaml.safe_load(site.file.read_text())
    for party in told["parties"]:
        party["hosts"] = dict.fromkeys(party["hosts"], 2)
    site.change(parties=told["parties"], party={"log_dir": "logs"})
    (site.folder / "job" / "train.py").write_text(TRAIN)
    assert site.run("sync").returncode == 0
    done = site.run("up")
    assert done.returncode == 0, done.stdout
    logs = [site.home(f"party-{name}") / "log" for name in ("west", "east")]

    def weights() -> list[str]:
        text = "".join(log.read_text(encoding="utf-8") for log in logs)
        assert "failed first" not in text, text
        return re.findall(r"\] (weights .*)", text)

    eventually(lambda: len(weights()) == 4, 150)
    assert len(set(weights())) == 1
    for name in ("west", "east"):
        assert list((site.home(f"party-{name}") / "logs").glob("*.jsonl"))
    eventually(lambda: set(site.states("down").values()) == {"not running"})
