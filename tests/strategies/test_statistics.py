# SPDX-License-Identifier: Apache-2.0
"""Statistics of layers in asynchronous runs are averages over the parties."""

import numpy as np
import pytest

from tests.strategies.plain_party import PlainParty
from tests.strategies.test_hierarchical_ps import serving
from tf_hips import config

pytestmark = pytest.mark.tf


@pytest.mark.parametrize(
    ("rule", "gain"),
    [("asgd(learning_rate=0.5)", 0.5), ("momentum(0.5, 0.8, asynchronous=True)", 0.1)],
)
def test_statistics_go_up_with_gradients(rule, gain):
    """`gain`: what of a party's movement is there after its own round."""
    import keras

    from tf_hips.strategies import HierarchicalPS

    with serving("statistics", rule=rule) as server:
        address = f"127.0.0.1:{server.port}"
        south = PlainParty(address, "statistics")
        run = config.Run(run="statistics", seed=7, uplink=config.Uplink(address, "north"))
        strategy = HierarchicalPS(config=run)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        owned = [*model.variables, *model.optimizer.variables]
        south.begin([(2,)] * 4, [one.numpy() for one in owned])
        means = []

        def look(batch, logs=None):
            means.append(model.get_weights()[2])
            if batch == 0:
                # South's moving mean has moved by 4, its variance and weights not at all.
                moved = [np.zeros(2, np.float32) for _ in range(4)]
                moved[2][:] = -4.0
                south.push(moved)

        x = np.full((16, 2), 3.0, np.float32)
        look_on = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        model.fit(x, x, batch_size=8, verbose=0, callbacks=[look_on])
        south.leave()
        strategy.close()
    own = 0.01 * 3.0  # a step of Keras' moving mean from 0
    np.testing.assert_allclose(means[0], gain * own, rtol=1e-5)
    # Then South's comes: a push of x is a step of `learning_rate` times x.
    assert (means[1] > 1.9).all()
    if "asgd" in rule:
        first = gain * own
        second = first + gain * 0.01 * (3.0 - first) + 0.5 * 4.0
        np.testing.assert_allclose(means[1], second, rtol=1e-5)


def test_what_rules_make_of_movements():
    from tf_hips.ps import rules
    from tf_hips.strategies.statistics import factor_of

    assert factor_of(rules.parse("asgd(0.5)"), 4) == 0.5
    assert factor_of(rules.parse("dc_asgd(0.25)"), 4) == 1.0
    assert factor_of(rules.parse("momentum(0.5, 0.5, asynchronous=True)"), 2) == 0.5
    assert factor_of(rules.parse("fedbuff(k=3, learning_rate=0.5)"), 4) == 2.0
    assert factor_of(rules.parse("median >> fedbuff(k=3, learning_rate=0.5)"), 4) == 2.0
    assert factor_of(rules.parse("majority >> fedbuff(k=3)"), 4) is None
    assert factor_of(rules.parse("fedasync"), 4) == 1.0
    assert factor_of(rules.parse("adam(asynchronous=True)"), 4) is None
