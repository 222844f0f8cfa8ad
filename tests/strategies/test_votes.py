# SPDX-License-Identifier: Apache-2.0
"""Parties that vote in groups under Keras: a liar among them changes nothing."""

import contextlib
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.strategies.test_hierarchical_ps import serving
from tests.support.ranks import run_parties
from tf_hips import config

pytestmark = pytest.mark.tf

SITES = ("a", "b", "c")


def _environments(folder, servers):
    """For each party the variable that names its configurations, one for each server."""
    environments = []
    for site in SITES:
        paths = []
        for run, server in servers.items():
            path = folder / f"{run}-{site}.yaml"
            uplink = config.Uplink(server=server.address, site=site, deadline_s=60.0)
            config.dump(config.Run(run=run, seed=7, uplink=uplink), path)
            paths.append(str(path))
        environments.append({"TEST_CONFIGS": json.dumps(paths)})
    return environments


def _reversing(summing):
    """`summing` of a liar, whose gradients go up reversed and a hundred times as long."""

    def make(tensors, label):
        made = summing(tensors, label)

        def reduce(vectors, step):
            return made.reducer([-100.0 * vector for vector in vectors], step)

        return dataclasses.replace(made, reducer=reduce)

    return make


def _train(folder, liar):
    """Trains once for each configuration; a liar sends reversed gradients."""
    import os

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tf_hips import config
    from tf_hips.comm import primitives
    from tf_hips.errors import ConfigError, PeerError
    from tf_hips.strategies import HierarchicalPS, fingerprint

    generator = np.random.default_rng(5)
    x = generator.standard_normal((96, 6)).astype(np.float32)
    y = generator.integers(0, 3, 96)
    found = []
    for path in json.loads(os.environ["TEST_CONFIGS"]):
        run = config.load(path)
        keras.utils.set_random_seed(3)
        is_drawn = "drawn" in path
        if is_drawn and primitives.size() > 1:
            # The first one to say so ends the run for the others, which may be joining.
            with pytest.raises((ConfigError, PeerError), match="can vote in groups that stay"):
                HierarchicalPS(config=run)
            continue
        strategy = HierarchicalPS("terngrad" if "coded" in path else None, config=run)
        lies = run.uplink.site == liar and "clean" not in path
        if lies:
            strategy._uplink_summing = _reversing(strategy._uplink_summing)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(16, "relu"),
                    keras.layers.Dropout(0.0 if "alone" in path else 0.3),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                steps_per_execution=2,
            )
        data = tf_hips.shard((x, y), 8)
        if is_drawn:
            with pytest.raises(ValueError, match="follows groups that change"):
                model.evaluate(data, verbose=0)
            with pytest.raises(ValueError, match="each step must be a round"), strategy.scope():
                other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
                other.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss="mse")
                other.train_on_batch(x[:8], x[:8, :3])
        history = model.fit(data, epochs=2, verbose=0)
        test = tf_hips.shard((x, y), 8, shuffle=False, drop_remainder=False)
        loss, _ = model.evaluate(test, verbose=0)
        assert np.isfinite(loss) and len(history.history["loss"]) == 2
        # Repeated, with batches that are fetched ahead, and given up in its middle.
        model.fit(data.repeat().prefetch(3), steps_per_epoch=3, epochs=2, verbose=0)
        for step, _ in enumerate(data):
            if step == 0:
                break
        seed = 0
        if strategy.groups is not None:
            assert strategy.sampling_seed().dtype == tf.int64
            seed = int(strategy.sampling_seed(0))
        found.append(
            {
                "print": fingerprint(model),
                "weights": [one.tolist() for one in model.get_weights()],
                "seed": seed,
            }
        )
        strategy.close()
    if primitives.rank() == 0:
        (Path(folder) / f"{run.uplink.site}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_three_workers_one_of_whom_sends_reversed_gradients(tmp_path):
    rules = {
        "clean-fixed": "detox(r=3, fixed=True) >> mean",
        "fixed": "detox(r=3, fixed=True) >> mean",
        "clean-drawn": "detox(r=3) >> mean",
        "drawn": "detox(r=3) >> mean",
        "clean-coded-drawn": "detox(r=3) >> mean",
        "coded-drawn": "detox(r=3, vote=exact) >> mean",
        # Groups of one: other rows for everyone in every step, of which the mean is what it was.
        "clean-alone": "mean",
        "clean-alone-drawn": "detox(r=1) >> mean",
    }
    with contextlib.ExitStack() as stack:
        servers = {
            run: stack.enter_context(serving(run, parties=SITES, rule=rule))
            for run, rule in rules.items()
        }
        arguments = {"folder": tmp_path, "liar": "c"}
        run_parties(_train, arguments, [1, 1, 1], _environments(tmp_path, servers))
        for run, server in servers.items():
            told = {one["site"]: one for one in server.snapshot()["children"]}
            assert (told["c"]["outvoted"] > 0) == ("clean" not in run)
            assert told["a"]["outvoted"] == told["b"]["outvoted"] == 0
    results = [json.loads((tmp_path / f"{site}.json").read_text()) for site in SITES]
    names = list(rules)
    for place, name in enumerate(names):
        assert len({result[place]["print"] for result in results}) == 1, name
        seeds = {result[place]["seed"] for result in results}
        assert len(seeds) == (3 if name == "clean-alone-drawn" else 1)
        if "clean" in name and name != "clean-alone-drawn":
            continue
        other = "clean-alone" if "alone" in name else f"clean-{name}"
        clean = results[0][names.index(other)]
        for mine, theirs in zip(results[0][place]["weights"], clean["weights"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_parties_of_two_workers_vote_as_units(tmp_path):
    rules = {
        "clean-fixed": "detox(r=3, fixed=True) >> mean",
        "fixed": "detox(r=3, fixed=True) >> mean",
        "drawn": "detox(r=3) >> mean",
    }
    with contextlib.ExitStack() as stack:
        servers = {
            run: stack.enter_context(serving(run, parties=SITES, rule=rule))
            for run, rule in rules.items()
        }
        arguments = {"folder": tmp_path, "liar": "b"}
        run_parties(_train, arguments, [2, 2, 2], _environments(tmp_path, servers))
        told = {one["site"]: one["outvoted"] for one in servers["fixed"].snapshot()["children"]}
        assert told["b"] > 0
        assert told["a"] == told["c"] == 0
    results = [json.loads((tmp_path / f"{site}.json").read_text()) for site in SITES]
    assert len({one["print"] for result in results for one in result}) == 1
