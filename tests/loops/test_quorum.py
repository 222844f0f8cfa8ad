# SPDX-License-Identifier: Apache-2.0
"""Three parties of a loop of which one is late: meetings go on without it, weights end equal."""

import json
import os

import pytest

from tests.support.ranks import run_parties
from tf_hips import config, log

pytestmark = pytest.mark.tf

SITES = ("north", "south", "east")
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
            if site == "east" and batch == 2:
                for other in SITES[:2]:
                    with (folder / f"{other}.fifo").open() as heard:  # waits for its other end
                        assert heard.read() == "on"
            elif site != "east" and batch == 5:
                with (folder / f"{site}.fifo").open("w") as other:
                    other.write("on")

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
    from tf_hips.ps.server import Server, ServerConfig

    for site in SITES[:2]:
        os.mkfifo(tmp_path / f"{site}.fifo")
    server = Server(
        ServerConfig(
            parties=SITES,
            run="late",
            rule="mean",
            insecure=True,
            quorum=2,
            round_deadline=0.2,
            log_dir=str(tmp_path / "log"),
        )
    )
    server.start()
    try:
        environments = []
        for site in SITES:
            path = tmp_path / f"{site}.yaml"
            uplink = config.Uplink(server=server.address, site=site, deadline_s=60.0)
            config.dump(config.Run(run="late", seed=7, uplink=uplink), path)
            environments.append({"TEST_CONFIG": str(path)})
        run_parties(_train, {"folder": tmp_path}, [1, 1, 1], environments, deadline_s=120)
    finally:
        server.stop(0.0)
    north, south, east = (json.loads((tmp_path / f"{site}.json").read_text()) for site in SITES)
    assert north == south == east
    events = list(log.read_events(tmp_path / "log"))
    absent = [event["absent"] for event in events if event["event"] == "gather_closed"]
    assert ["east"] in absent
