# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` over three parties of which one is late: nothing in a script knows of a quorum."""

import json
import os

import pytest

from tests.support.ranks import run_parties
from tf_hips import config, log

pytestmark = pytest.mark.tf

SITES = ("north", "south", "east")
EPOCHS = 2
STEPS = 4


def _train(folder):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(SITES.index(site))
    x, y = training.data(STEPS * training.BATCH * 3)
    own = training.shard([x, y], SITES.index(site), 3)

    class Meeting(keras.callbacks.Callback):
        """East stands still until the others have made an epoch."""

        def on_train_batch_begin(self, batch, logs=None):
            if site == "east" and batch == 1 and not done:
                done.append(1)
                for other in SITES[:2]:
                    with (folder / f"{other}.fifo").open() as heard:  # waits for its other end
                        assert heard.read() == "on"

        def on_epoch_end(self, epoch, logs=None):
            histories.append(logs)
            if site != "east" and epoch == 0:
                with (folder / f"{site}.fifo").open("w") as other:
                    other.write("on")

    done, histories = [], []
    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    model.fit(
        *own,
        batch_size=training.BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Meeting()],
    )
    assert all(np.isfinite(value).all() for value in model.get_weights())
    told = [fingerprint(model), histories]
    (folder / f"{site}.json").write_text(json.dumps(told))
    strategy.close()


@pytest.mark.timeout(150)
def test_a_late_party_ends_with_the_weights_and_the_metrics_of_the_others(tmp_path):
    from tf_hips.ps.server import Server, ServerConfig

    for site in SITES[:2]:
        os.mkfifo(tmp_path / f"{site}.fifo")
    server = Server(
        ServerConfig(
            parties=SITES,
            run="late",
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
    closed = [event for event in events if event["event"] == "closed"]
    assert len(closed) == EPOCHS * STEPS
    assert [event["absent"] for event in closed[1:STEPS]] == [["east"]] * (STEPS - 1)
    absent = [event["absent"] for event in events if event["event"] == "gather_closed"]
    assert ["east"] in absent
