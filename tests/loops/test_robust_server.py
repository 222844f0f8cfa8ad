# SPDX-License-Identifier: Apache-2.0
"""Three parties of a loop below a robust rule: who has NaN or was not drawn is no row of zeros."""

import json
import os

import pytest

from tests.support import sites
from tf_hips import config, log
from tf_hips.ps.rules.robust import OWN_REFUSAL

pytestmark = pytest.mark.tf

SITES = ("north", "south", "east")
STEPS = 8
RULES = {1.0: "geometric_median(f=1) >> fedavg(1.0)", 2: "geometric_median(f=0) >> fedavg(1.0)"}


def _train(folder, participation):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(SITES.index(site))
    x, y = training.data(STEPS * training.BATCH, seed=SITES.index(site))
    moved = []

    class Spoils(keras.callbacks.Callback):
        """East's weights are no numbers at the end of its second round."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch % 2 == 0:
                moved.append(self.model.trainable_variables[0].numpy())

        def on_train_batch_end(self, batch, logs=None):
            if participation == 1.0 and site == "east" and batch == 2:
                one = self.model.trainable_variables[0]
                one.assign(np.full(one.shape, np.nan, np.float32))

    strategy = HierarchicalPS("error_feedback(onebit)", rule=RULES[participation], config=run)
    with strategy.scope():
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    loop = FedAvg(model, strategy, local_steps=2, participation=participation)
    loop.fit(x, y, batch_size=training.BATCH, shuffle=False, verbose=0, callbacks=[Spoils()])
    assert all(np.isfinite(value).all() for value in model.get_weights())
    assert len({one.tobytes() for one in moved}) == len(moved)  # every round has moved it
    (folder / f"{site}.json").write_text(json.dumps(fingerprint(model)))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("participation", [1.0, 2])
def test_parties_without_an_update_are_no_rows(tmp_path, participation):
    settings = {"participation": participation}
    with sites.trained(tmp_path, _train, SITES, settings) as server:
        children = server.snapshot()["children"]
    north, south, east = (json.loads((tmp_path / f"{site}.json").read_text()) for site in SITES)
    assert north == south == east
    refused = [one for one in log.read_events(tmp_path / "log") if one["event"] == "row_refused"]
    is_spoilt = participation == 1.0
    assert [(one["child_site"], one["reason"]) for one in refused] == [
        ("east", OWN_REFUSAL)
    ] * is_spoilt
    assert [one["refused_rows"] for one in children] == [0, 0, int(is_spoilt)]


def _train_unevenly(folder, rule):
    import keras

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(SITES.index(site))
    rounds = {"north": 2, "south": 2, "east": 4}[site]
    x, y = training.data(2 * rounds * training.BATCH, seed=SITES.index(site))
    strategy = HierarchicalPS("error_feedback(onebit)", rule=rule, config=run)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.05))
    loop = FedAvg(model, strategy, local_steps=2)
    for _ in range(2):
        loop.fit(x, y, batch_size=training.BATCH, shuffle=False, verbose=0)
    (folder / f"{site}.json").write_text(json.dumps([fingerprint(model), loop.round]))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("rule", ["median", "median(f=1)"])
def test_training_ends_for_all_when_the_rule_would_bear_nobody(tmp_path, rule):
    """East has data for two rounds more, in which its row would be the result, or an error."""
    with sites.trained(tmp_path, _train_unevenly, SITES, {"rule": f"{rule} >> fedavg(1.0)"}):
        pass
    told = [json.loads((tmp_path / f"{site}.json").read_text()) for site in SITES]
    assert told[0] == told[1] == told[2]
    # Two rounds, and a third meeting in which all hear that two have ended: in each of both `fit`s.
    assert told[0][1] == 6
