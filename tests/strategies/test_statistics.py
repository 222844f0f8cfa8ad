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

    from tf_hips.comm.plan import Choice, Plan
    from tf_hips.strategies import HierarchicalPS

    plan = Plan(1, (Choice("gamma", 2), Choice("beta", 2)))  # which `tf-hips plan` makes
    with serving("statistics", rule=rule) as server:
        address = f"127.0.0.1:{server.port}"
        south = PlainParty(address, "statistics")
        run = config.Run(run="statistics", seed=7, uplink=config.Uplink(address, "north"))
        strategy = HierarchicalPS(config=run, plan=plan)
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


@pytest.mark.parametrize("options", [{}, {"comp_threshold": 4}, {"plan": ["fp32", None]}])
def test_statistics_are_summed_exactly_beside_gradients(monkeypatch, options):
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.plan import EXACT, Choice, Plan
    from tf_hips.strategies import in_party
    from tf_hips.strategies.gradients import Gradient

    monkeypatch.setattr(primitives, "size", lambda: 1)
    monkeypatch.setattr(primitives, "rank", lambda: 0)

    def marked(shapes, compressor, **more):
        assert len(shapes) == 2
        return lambda vectors, step: [10.0 * vector for vector in vectors]

    monkeypatch.setattr(in_party, "make_reducer", marked)
    sizes, plan = [5, 3], None
    if "plan" in options:
        choices = zip(sizes, options["plan"], strict=True)
        plan = Plan(1, tuple(Choice("", *one, "ps" if one[1] else EXACT) for one in choices))
    compression = None if plan else in_party.parse("fp32")
    told = in_party.InParty(compression, plan, None, options.get("comp_threshold", 0))
    gradients = [Gradient("", (size,), tf.float32) for size in sizes]
    gradients += [Gradient("", (size,), tf.float32, is_statistic=True) for size in (5, 3)]
    summing = told.summing(
        gradients, "test", seed=0, worker=0, make_variable=tf.Variable, complain=None
    )
    ones = [tf.ones([gradient.num_elements]) for gradient in gradients]
    found = [float(one[0]) for one in summing.reducer(ones, tf.constant(0, tf.int64))]
    assert found == [10.0, 1.0 if options else 10.0, 1.0, 1.0]


def test_what_rules_make_of_movements():
    from tf_hips.ps import rules
    from tf_hips.strategies.statistics import factor_of

    assert factor_of(rules.parse("asgd(0.5)"), 4) == 0.5
    assert factor_of(rules.parse("dc_asgd(0.25)"), 4) is None
    assert factor_of(rules.parse("momentum(0.5, 0.5, asynchronous=True)"), 2) == 0.5
    assert factor_of(rules.parse("fedbuff(k=3, learning_rate=0.5)"), 4) == 2.0
    assert factor_of(rules.parse("median >> fedbuff(k=3, learning_rate=0.5)"), 4) == 2.0
    assert factor_of(rules.parse("majority >> fedbuff(k=3)"), 4) is None
    assert factor_of(rules.parse("fedasync"), 4) == 1.0
    assert factor_of(rules.parse("adam(asynchronous=True)"), 4) is None


@pytest.mark.parametrize("rate", [0.1, 0.001])
@pytest.mark.parametrize(
    "rule",
    [
        "asgd(learning_rate={})",
        "dc_asgd(learning_rate={})",
        "dc_asgd(learning_rate={}, adaptive=True)",
        "dc_asgd(learning_rate={}, compat=True)",
        "fedbuff(k=2, learning_rate={})",
        "fedasync",
    ],
)
def test_averages_stay_between_what_they_are_of(rule, rate):
    from tf_hips.ps import rules
    from tf_hips.ps.rules import arrivals
    from tf_hips.strategies.statistics import factor_of

    rule = rules.parse(rule.format(rate))
    factor = factor_of(rule, 2)
    if factor is None:
        return  # they stay the party's own
    true, first = 100.0, 1.0
    moved, received, seen = arrivals.unmoved(rule, 1), [np.zeros(1, np.float32)] * 2, [0, 0]
    for turn in range(40):
        party = turn % 2
        here = first - received[party]
        after = 0.9 * here + 0.1 * true
        up = np.float32(factor) * (here - after).astype(np.float32)
        staleness = moved.version - seen[party]
        moved = arrivals.apply(rule, up, moved, received[party], staleness)
        received[party], seen[party] = moved.total.copy(), moved.version
        assert first <= first - moved.total[0] <= true
