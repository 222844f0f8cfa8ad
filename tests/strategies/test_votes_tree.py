# SPDX-License-Identifier: Apache-2.0
"""Workers of a party that vote in its server, and loops whose members vote, under Keras."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.strategies.test_hierarchical_ps import serving
from tests.strategies.test_votes import _reversing
from tests.support.ranks import run_parties
from tf_hips import config

pytestmark = pytest.mark.tf

WORKERS = tuple(f"w{number}" for number in range(6))
LEAVES = (*WORKERS, "alone")  # the last one is a party of the topmost server
LIAR = "w4"
DRAWN = "detox(r=3) >> mean"
RUNS = ("clean-steps", "steps", "clean-loop", "loop", "clean-reset", "reset", "fixed", "refused")


def _check_refusals(model, strategy):
    import tf_hips
    from tf_hips.errors import ConfigError

    for make, message in (
        (lambda: tf_hips.ESync(model, strategy), "FedAvg with fixed local steps"),
        (lambda: tf_hips.FedAvg(model, strategy, local_epochs=1), "same number of local steps"),
        (
            lambda: tf_hips.FedAvg(model, strategy, local_steps=lambda number: 1 + number),
            "same number of local steps",
        ),
        (
            lambda: tf_hips.FedAvg(model, strategy, local_steps=2, participation=0.5),
            "all members of a group must take part",
        ),
        (
            lambda: tf_hips.FedAvg(model, strategy, local_steps=2, scaffold=True),
            "SCAFFOLD's control variates",
        ),
        (
            lambda: tf_hips.FedAvg(model, strategy, local_steps=2, normalise=True),
            "nobody votes on",
        ),
        (
            lambda: tf_hips.FedAvg(model, strategy, local_steps=2, compat=True),
            "each worker trains on its own",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def _train(folder):
    """Trains once for each configuration; a liar sends reversed updates."""
    import os

    import keras
    import numpy as np

    import tf_hips
    from tf_hips import config
    from tf_hips.errors import ConfigError
    from tf_hips.strategies import HierarchicalPS, fingerprint

    generator = np.random.default_rng(5)
    x = generator.standard_normal((150, 6)).astype(np.float32)
    y = generator.integers(0, 3, 150)
    found = {}
    for path in json.loads(os.environ["TEST_CONFIGS"]):
        run = config.load(path)
        name, site = run.run, run.uplink.site
        keras.utils.set_random_seed(3)
        strategy = HierarchicalPS(config=run)
        if site == LIAR and "clean" not in name:
            strategy._uplink_summing = _reversing(strategy._uplink_summing)
        votes = site in WORKERS
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, "relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dropout(0.2),
                    keras.layers.Dense(3),
                ]
            )
            momentum = 0.9 if name in ("clean-reset", "reset", "fixed") else 0.0
            model.compile(
                keras.optimizers.SGD(0.05, momentum=momentum),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                steps_per_execution=2,
            )
        data = tf_hips.shard((x, y), 5)
        # Groups of the tree: two in the party, and one of the worker that is alone.
        assert int(data.cardinality()) == 150 // (3 * 5)
        if "refused" in name:
            if votes:
                _check_refusals(model, strategy)
                with strategy.scope():
                    other = keras.models.clone_model(model)
                    other.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
                with pytest.raises(ConfigError, match="keep nothing from round to round"):
                    tf_hips.FedAvg(other, strategy, local_steps=2)
            strategy.close()
            continue
        trained = model
        if "steps" not in name:
            resets = "reset" in name
            trained = tf_hips.FedAvg(model, strategy, local_steps=4, reset_optimizer=resets)
        trained.fit(data, epochs=2, verbose=0)  # epochs of 10 steps: rounds lie across their ends
        test = tf_hips.shard((x, y), 5, shuffle=False, drop_remainder=False)
        assert sum(len(rows) for rows, _ in test) == len(range(strategy.global_rank, 150, 7))
        loss = model.evaluate(test, verbose=0)
        assert np.isfinite(loss)
        trained.fit(data.repeat().prefetch(3), steps_per_epoch=3, epochs=1, verbose=0)
        found[name] = {
            "print": fingerprint(model),
            "trained": [one.numpy().tolist() for one in model.trainable_variables],
        }
        strategy.close()
    (Path(folder) / f"{site}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_six_workers_one_of_whom_lies_vote_at_their_party_s_server(tmp_path):
    with contextlib.ExitStack() as stack:
        paths = {site: [] for site in LEAVES}
        servers = {}
        for run in RUNS:
            top = stack.enter_context(serving(run, parties=("west", "alone"), rule="mean"))
            above = config.Uplink(top.address, "west", deadline_s=60.0)
            rule = "detox(r=3, fixed=True) >> mean" if run == "fixed" else DRAWN
            servers[run] = stack.enter_context(
                serving(run, parties=WORKERS, uplink=above, rule=rule)
            )
            for site in LEAVES:
                server, role = (servers[run], "server") if site in WORKERS else (top, None)
                uplink = config.Uplink(server.address, site, None, 60.0, role or "global-server")
                path = tmp_path / f"{run}-{site}.yaml"
                intra = "ps" if site in WORKERS else None
                config.dump(config.Run(run=run, seed=7, uplink=uplink, intra=intra), path)
                paths[site].append(str(path))
        environments = [{"TEST_CONFIGS": json.dumps(paths[site])} for site in LEAVES]
        run_parties(_train, {"folder": tmp_path}, [1] * 7, environments, deadline_s=360.0)
        for run in RUNS[:-1]:
            told = {one["site"]: one["outvoted"] for one in servers[run].snapshot()["children"]}
            liars = {LIAR} if "clean" not in run else set()
            assert {site for site, count in told.items() if count} == liars, run
    results = [json.loads((tmp_path / f"{site}.json").read_text()) for site in LEAVES]
    for run in RUNS[:-1]:
        assert len({result[run]["print"] for result in results}) == 1, run
    for run in ("steps", "loop", "reset"):
        # Statistics of layers are of all workers, wherever these have sat; what is trained is not.
        mine, clean = results[0][run]["trained"], results[0][f"clean-{run}"]["trained"]
        for one, other in zip(mine, clean, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
