# SPDX-License-Identifier: Apache-2.0
"""ESync below Krum: five parties, one of which multiplies its movements with -100."""

import json
import os

import pytest

from tests.support import sites
from tf_hips import config

pytestmark = pytest.mark.tf

SITES = ("a", "b", "c", "d", "e")
RULE = "krum(f=1) >> fedavg(1.0)"
ROWS, BATCH, ROUNDS = 512, 8, 6


def _train(folder):
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_hips import simulate_liars
    from tf_hips.loops import ESync
    from tf_hips.robust import Adversary, attacks
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    number = SITES.index(run.uplink.site)
    generator = np.random.default_rng(number)
    x = generator.standard_normal((ROWS, 6)).astype(np.float32)
    y = x @ np.random.default_rng(99).standard_normal((6, 2)).astype(np.float32)
    keras.utils.set_random_seed(3)
    strategy = HierarchicalPS(rule=RULE, config=run)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    lone = simulate_liars(strategy, Adversary(attacks.reversed_gradient(100.0), 1, seed=run.seed))
    loop = ESync(model, strategy, pace="slowest_steps=4,most_slowest_steps=4,link_share=1")
    first = float(((model(x).numpy() - y) ** 2).mean())

    class Stop(keras.callbacks.Callback):
        """After some rounds; whose data ended would be no row, and Krum wants five."""

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = loop.round >= ROUNDS

    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)
    loop.fit(data, steps_per_epoch=100_000, epochs=1, verbose=0, callbacks=[Stop()])
    told = {
        "lies": lone.may_lie,
        "rounds": loop.round,
        "fingerprint": fingerprint(model),
        "first": first,
        "last": float(((model(x).numpy() - y) ** 2).mean()),
    }
    (folder / f"{number}.json").write_text(json.dumps(told))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_krum_leaves_a_liar_out_of_rounds_of_unequal_steps(tmp_path):
    with sites.trained(tmp_path, _train, SITES, deadline_s=200):
        pass
    told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(len(SITES))]
    assert sum(one["lies"] for one in told) == 1
    assert len({one["fingerprint"] for one in told}) == 1
    assert all(one["rounds"] >= ROUNDS for one in told)
    # One movement of the liar would throw the model a hundred times as far the other way.
    assert all(one["last"] < 0.1 * one["first"] for one in told), told
