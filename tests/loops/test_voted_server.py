# SPDX-License-Identifier: Apache-2.0
"""Three parties of a loop that vote: one that lies, or has NaN, changes nothing."""

import json
import os

import pytest

from tests.support import sites
from tf_hips import config

pytestmark = pytest.mark.tf

SITES = ("north", "south", "east")
RULES = {
    "FedAvg": "detox(r=3) >> mean >> fedavg(0.5)",
    "HFA": "detox(r=3, fixed=True) >> mean",
}


def _train(folder, what, kind):
    import keras
    import numpy as np

    import tf_hips
    from tests.strategies.test_votes import _reversing
    from tf_hips.loops import HFA, FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    is_bad = site == "east"
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(5)
    x = generator.standard_normal((48, 6)).astype(np.float32)
    y = generator.standard_normal((48, 3)).astype(np.float32)

    class Spoils(keras.callbacks.Callback):
        """Weights are no numbers at the end of the second round of each epoch."""

        def on_train_batch_end(self, batch, logs=None):
            if is_bad and what == "nan" and batch == 4:
                one = self.model.trainable_variables[0]
                one.assign(np.full(one.shape, np.nan, np.float32))

    # Where groups stay, members may have a history: the same in each of a group.
    codec = "terngrad" if kind == "FedAvg" else "error_feedback(onebit)"
    strategy = HierarchicalPS(codec, rule=RULES[kind], config=run)
    if is_bad and what == "lies":
        strategy._uplink_summing = _reversing(strategy._uplink_summing)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.2)]
        )
        model.add(keras.layers.Dense(3))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    if kind == "FedAvg":
        loop = FedAvg(model, strategy, local_steps=3, reset_optimizer=True)
    else:
        loop = HFA(model, strategy, local_steps=3, party_rounds=2)
    loop.fit(tf_hips.shard((x, y), 4), epochs=2, verbose=0, callbacks=[Spoils()])
    told = {"print": fingerprint(model), "weights": [one.tolist() for one in model.get_weights()]}
    (folder / f"{site}.json").write_text(json.dumps(told))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", RULES)
def test_movements_are_voted_on(tmp_path, kind):
    found = {}
    rounds = 8 if kind == "FedAvg" else 4  # of 24 local steps
    for what in ("clean", "lies", "nan"):
        folder = tmp_path / what
        folder.mkdir()
        settings = {"what": what, "kind": kind}
        with sites.trained(folder, _train, SITES, settings, rule=RULES[kind]) as server:
            counts = {one["site"]: one["outvoted"] for one in server.snapshot()["children"]}
            refused = [one["refused_rows"] for one in server.snapshot()["children"]]
        told = [json.loads((folder / f"{site}.json").read_text()) for site in SITES]
        assert told[0]["print"] == told[1]["print"] == told[2]["print"]
        found[what] = told[0]["weights"]
        # Who refuses its own update says something else than others. Slots and residuals, where
        # they are kept, are others than theirs from then on.
        wanted = {"clean": 0, "lies": rounds, "nan": 2 if kind == "FedAvg" else rounds}[what]
        assert counts == {"north": 0, "south": 0, "east": wanted}
        assert refused == [0, 0, 0]
    assert found["clean"] == found["lies"] == found["nan"]
