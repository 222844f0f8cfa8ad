# SPDX-License-Identifier: Apache-2.0
"""Keras' `fit` over four parties by Krum: three are equal and train as one, one lies."""

import os

import numpy as np
import pytest

from tests.support import sites
from tests.support.ranks import run_parties
from tf_hips import config

pytestmark = pytest.mark.tf

SITES = ("north", "south", "east", "west")
RATE = 0.05
STEPS = 6
RULES = {"krum(f=0)": RATE, "multi_krum(f=0, m=2) >> sgd(0.05)": 1.0}


def _train(folder, rule, rate):
    import keras

    from tests.strategies import training
    from tf_hips import robust
    from tf_hips.strategies import HierarchicalPS

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    chosen = robust.krum(f=0) if rule == "krum(f=0)" else rule
    keras.utils.set_random_seed(3)
    x, y = training.data(STEPS * training.BATCH)
    if site == "west":
        y = 50.0 - 10.0 * y  # its gradients are far from those of the others
    strategy = HierarchicalPS("fp32", rule=chosen, config=run)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(rate))
    training.fit(model, [x, y])
    np.savez(folder / f"{site}.npz", *model.get_weights())
    strategy.close()


def _plain(folder):
    import keras

    from tests.strategies import training

    keras.utils.set_random_seed(3)
    model = training.build(keras.optimizers.SGD(RATE))
    training.fit(model, training.data(STEPS * training.BATCH))
    np.savez(folder / "plain.npz", *model.get_weights())


def _weights(path):
    with np.load(path) as held:
        return [held[name] for name in held.files]


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("rule", "rate"), RULES.items())
def test_a_party_that_lies_has_no_part_in_training(tmp_path, rule, rate):
    settings = {"rule": rule, "rate": rate}
    with sites.trained(tmp_path, _train, SITES, settings) as server:
        told = server.snapshot()
    assert told["rule"].startswith(rule.partition(" ")[0].rstrip(")"))
    run_parties(_plain, {"folder": tmp_path}, [1], [{}], deadline_s=60)
    plain = _weights(tmp_path / "plain.npz")
    for site in SITES:
        for one, wanted in zip(_weights(tmp_path / f"{site}.npz"), plain, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5, err_msg=site)


def _train_two_epochs(folder):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(3)
    strategy = HierarchicalPS("fp32", rule="median(f=1)", config=run)
    if site == "north":  # the first party; it tells other digests, and trains as all others
        honest = strategy.gather_objects

        def gather(value, label):
            if label == "whether to stop after an epoch":
                value = [value[0], [one + 1 for one in value[1]]]
            return honest(value, label)

        strategy.gather_objects = gather
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(RATE))
    losses = training.fit(model, training.data(2 * training.BATCH), epochs=2)
    np.savez(folder / f"{site}.npz", *model.get_weights(), np.asarray(losses))
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_party_that_tells_other_digests_does_not_end_the_run(tmp_path):
    options = {"rule": "median(f=1)", "quorum": 3, "round_deadline": 60.0, "late": "drop"}
    with sites.trained(tmp_path, _train_two_epochs, SITES, **options) as server:
        assert server.snapshot()["rule"] == "median(f=1)"
    first = _weights(tmp_path / "north.npz")
    for site in SITES[1:]:
        for one, wanted in zip(_weights(tmp_path / f"{site}.npz"), first, strict=True):
            np.testing.assert_array_equal(one, wanted, err_msg=site)


def _train_measuring(folder):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(3)
    x, y = training.data(4 * training.BATCH, seed=SITES.index(site))
    if site == "east":
        x[training.BATCH + 1, 2] = np.nan  # of one row, in the second step
    strategy = HierarchicalPS("fp32", rule="median(f=1)", config=run)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    training.fit(model, [x, y], epochs=2)
    np.savez(folder / f"{site}.npz", *model.get_weights())
    strategy.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_nan_in_the_data_of_one_party_is_in_nobodys_statistics(tmp_path):
    with sites.trained(tmp_path, _train_measuring, SITES[:3]) as server:
        children = {one["site"]: one["refused_rows"] for one in server.snapshot()["children"]}
    assert children == {"north": 0, "south": 0, "east": 2}
    weights = [_weights(tmp_path / f"{site}.npz") for site in SITES[:3]]
    for one in zip(*weights, strict=True):
        assert np.isfinite(one[0]).all()
        assert len({value.tobytes() for value in one}) == 1
