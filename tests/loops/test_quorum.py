# SPDX-License-Identifier: Apache-2.0
"""Three parties of a loop of which one is late: meetings go on without it, weights end equal."""

import json
import os

import pytest

from tests.support.lateness import LATE, SITES, go_on, run_with_one_late, stand_still
from tf_hips import config

pytestmark = pytest.mark.tf

STEPS = 8


def _train(folder):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(SITES.index(site))
    x, y = training.data(STEPS * training.BATCH, seed=SITES.index(site))

    class Standing(keras.callbacks.Callback):
        """East stands still in its second round until the others have made their third."""

        def on_train_batch_end(self, batch, logs=None):
            if site == LATE and batch == 2:
                stand_still(folder)
            elif site != LATE and batch == 5:
                go_on(folder, site)

    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    with strategy.scope():
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    loop = FedAvg(model, strategy, local_steps=2)
    loop.fit(x, y, batch_size=training.BATCH, shuffle=False, verbose=0, callbacks=[Standing()])
    assert all(np.isfinite(value).all() for value in model.get_weights())
    (folder / f"{site}.json").write_text(json.dumps(fingerprint(model)))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_late_party_ends_with_the_weights_of_the_others(tmp_path):
    events = run_with_one_late(tmp_path, _train, rule="mean")
    absent = [event["absent"] for event in events if event["event"] == "gather_closed"]
    assert [LATE] in absent
