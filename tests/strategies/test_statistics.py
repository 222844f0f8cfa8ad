# SPDX-License-Identifier: Apache-2.0
"""Statistics of layers in asynchronous runs are averages over the parties."""

import types

import numpy as np
import pytest

from tests.strategies.plain_party import PlainParty
from tests.strategies.test_hierarchical_ps import serving
from tf_hips import config

pytestmark = pytest.mark.tf

_SLACK_OF_A_LATE_ONE = 0.1  # a tenth of what it had, halved; others come back from it


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


def test_a_late_party_makes_no_variance_negative():
    """It measures from what it had, which the others have left long ago."""
    import keras

    from tf_hips.strategies import HierarchicalPS

    with serving("late", rule="asgd(learning_rate=0.01)") as server:
        address = f"127.0.0.1:{server.port}"
        south = PlainParty(address, "late")
        run = config.Run(run="late", seed=7, uplink=config.Uplink(address, "north"))
        strategy = HierarchicalPS(config=run)
        with strategy.scope():
            layer = keras.layers.BatchNormalization(momentum=0.5)
            model = keras.Sequential([keras.Input((2,)), layer])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        owned = [*model.variables, *model.optimizer.variables]
        south.begin([(2,)] * 4, [one.numpy() for one in owned])
        found = []

        def look(batch, logs=None):
            found.append(layer.moving_variance.numpy())
            if batch == 38:
                # Its variance has fallen from 1 to .5: half of it is .25 for numbers above 1.
                late = [np.zeros(2, np.float32) for _ in range(4)]
                late[3][:] = 0.25 / 0.01
                south.push(late)

        x = np.tile(np.array([[0.02], [-0.02]], np.float32), (160, 2))
        look_on = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        model.fit(x, x, batch_size=8, verbose=0, shuffle=False, callbacks=[look_on])
        np.testing.assert_allclose(found[38], 0.02**2, rtol=0.05)
        # A quarter less than before, and one step of its own.
        assert (found[39] < 0.95 * found[38]).all()
        assert (found[39] > 0.75 * found[38]).all()
        assert np.isfinite(model.evaluate(x, x, verbose=0))
        south.leave()
        strategy.close()


@pytest.mark.parametrize("freezes", ["a layer", "below LoRA"])
def test_frozen_weights_are_no_statistics(freezes):
    """They stay trainable for TensorFlow, which refuses to read such ones beside gradients."""
    import keras

    from tf_hips.strategies import HierarchicalPS

    with serving("frozen", parties=("north",), rule="asgd(learning_rate=0.1)") as server:
        uplink = config.Uplink(f"127.0.0.1:{server.port}", "north")
        strategy = HierarchicalPS(config=config.Run(run="frozen", seed=7, uplink=uplink))
        with strategy.scope():
            backbone, head = keras.layers.Dense(5), keras.layers.Dense(2)
            model = keras.Sequential([keras.Input((3,)), backbone, head])
            if freezes == "a layer":
                backbone.trainable = False
            else:
                backbone.enable_lora(2)
            model.compile(keras.optimizers.SGD(1.0), "mse")
        frozen = backbone.kernel if freezes == "a layer" else backbone._kernel
        before = frozen.numpy()
        x = np.ones((8, 3), np.float32)
        model.fit(x, np.ones((8, 2), np.float32), batch_size=8, verbose=0)
        [made] = strategy._sums.values()
        trained = [tuple(one.shape) for one in model.trainable_weights]
        assert [one.shape for one in made.gradients] == trained
        np.testing.assert_array_equal(frozen.numpy(), before)
        strategy.close()


@pytest.mark.parametrize("options", [{}, {"comp_threshold": 5}, {"plan": ["fp32", None]}])
def test_statistics_are_summed_exactly_beside_gradients(monkeypatch, options):
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.plan import EXACT, Choice, Plan
    from tf_hips.ops.native import derive_seed
    from tf_hips.strategies import in_party
    from tf_hips.strategies.gradients import Gradient

    monkeypatch.setattr(primitives, "size", lambda: 1)
    monkeypatch.setattr(primitives, "rank", lambda: 0)

    def marked(shapes, compressor, **more):
        assert len(shapes) == 2
        # Draws of one worker are no other's, and what all draw alike is everyone's.
        roles = {"worker_seed": "worker/3", "owner_seed": "owner/0", "common_seed": "everyone"}
        assert {name: more[name] for name in roles} == {
            name: derive_seed(7, role) for name, role in roles.items()
        }
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
        gradients, "test", seed=7, worker=3, make_variable=tf.Variable, complain=None
    )
    ones = [tf.ones([gradient.num_elements]) for gradient in gradients]
    found = [float(one[0]) for one in summing.reducer(ones, tf.constant(0, tf.int64))]
    assert found == [10.0, 1.0 if options else 10.0, 1.0, 1.0]


def test_only_averages_go_up():
    import keras

    from tests.strategies.features.models import Counting
    from tf_hips.strategies.statistics import moving_statistics

    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), Counting(), norm])
    names = [one.name.removesuffix(":0").rpartition("/")[2] for one in moving_statistics(model)]
    assert names == ["mean", "moving_mean", "moving_variance"]


def test_a_statistic_that_nobody_moves_keeps_its_bits():
    import tensorflow as tf

    from tf_hips.strategies.statistics import moved_by

    values = np.geomspace(1e-12, 1e6, 200, dtype=np.float32)
    for name in ("moving_mean", "moving_variance"):
        statistic = tf.Variable(values, name=f"norm/{name}")
        kept = moved_by(statistic, tf.constant(values), tf.zeros_like(values)).numpy()
        np.testing.assert_array_equal(kept, values)


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


def check_averages(rule, codec="fp32", *, are_sent, name="moving_mean", alone=0):
    """Two parties take turns, and what they move stays between the first and the true values.

    Where they are not sent they stay the party's own.

    Args:
        rule: of the server.
        codec: of both ways.
        are_sent: whether the statistics go up.
        name: of the statistic.
        alone: turns of the first party before the second one has its first.
    """
    import tensorflow as tf

    from tf_hips.ops import compressor, native
    from tf_hips.ps import rules
    from tf_hips.ps.rules import arrivals
    from tf_hips.strategies.statistics import moved_by, movement

    rule = rules.parse(rule)
    factor = factor_in(rule, codec)
    assert (factor is not None) == are_sent
    if not are_sent:
        return
    up = compressor.parse(codec)
    down = up.for_sums
    true, first = np.geomspace(1e-3, 1e3, 32, dtype=np.float32), np.ones(32, np.float32)
    moved, seen = arrivals.unmoved(rule, 32), [0, 0]
    received = [np.zeros(32, np.float32) for _ in range(2)]
    kept = [_nothing_kept(up) for _ in range(2)]
    statistic = tf.Variable(first, trainable=False, name=f"layer/{name}")
    values = [tf.constant(first), tf.constant(first)]
    for turn in range(100 + alone):
        party = 0 if turn < alone else turn % 2
        after = 0.9 * values[party] + 0.1 * true
        sent = np.float32(factor) * movement(statistic, values[party], after).numpy()
        packet = native.encode(up, sent, native.Key(1, turn, party), kept=kept[party])
        came = native.decode(up, packet, 32)
        staleness = moved.version - seen[party]
        moved = arrivals.apply(rule, came, moved, received[party], staleness)
        owed = moved.total - received[party]
        answer = native.encode(down, owed, native.Key(1, turn, 2), kept=_nothing_kept(down))
        step = native.decode(down, answer, 32)
        received[party] = received[party] + step
        seen[party] = moved.version
        values[party] = moved_by(statistic, values[party], tf.constant(step))
        now = values[party].numpy()
        slack = _SLACK_OF_A_LATE_ONE if alone else 0.01
        assert (now >= np.minimum(first, true) * (1.0 - slack)).all()
        assert (now <= np.maximum(first, true) * (1.0 + slack)).all()


def factor_in(rule, up, down=None, above=None):
    """`factor_for` in a run of two parties with these codecs."""
    from tf_hips.ops.compressor import parse
    from tf_hips.strategies.statistics import factor_for

    codecs = {"compression": parse(up), "downlink": parse(up).for_sums}
    if down is not None:
        codecs["downlink"] = parse(down)
    return factor_for(
        types.SimpleNamespace(
            rule=rule,
            welcome=types.SimpleNamespace(parties=("north", "south")),
            above=above and parse(above),
            _codecs=lambda: codecs,
        )
    )


def _nothing_kept(codec):
    return np.zeros(codec.state_shape((32,)), np.float32) if codec.has_state else None


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
@pytest.mark.parametrize("name", ["moving_mean", "moving_variance"])
def test_averages_stay_between_what_they_are_of(rule, rate, name):
    check_averages(rule.format(rate), are_sent=not rule.startswith("dc_asgd"), name=name)


@pytest.mark.parametrize(
    "rule", ["asgd(learning_rate=0.01)", "fedbuff(k=1, learning_rate=0.01)", "fedasync"]
)
def test_variances_of_parties_of_different_speed(rule):
    check_averages(rule, are_sent=True, name="moving_variance", alone=150)


@pytest.mark.parametrize("rule", ["asgd(learning_rate=0.01)", "fedasync"])
@pytest.mark.parametrize("wrapper", ["{}", "error_feedback({})"])
def test_averages_through_codecs(rule, wrapper):
    from tf_hips.ops.registry import REGISTRY

    for name, algorithm in REGISTRY.items():
        if wrapper == "{}" or not algorithm.state_names:
            are_sent = wrapper == "{}" and name in ("fp32", "bf16", "natural")
            check_averages(rule, wrapper.format(name), are_sent=are_sent)


def test_codecs_that_carry_statistics():
    from tf_hips.ps import rules

    rule = rules.parse("asgd(0.5)")
    for codec in ("fp32", "bf16", "natural", "warmup(bf16, steps=10)"):
        assert factor_in(rule, codec, above=codec) == 1.0
    for codec in (
        "fp16",
        "onebit",
        "mixed(fp32, below=100)",
        "budget(wan_mbps=10, max_sync_s=1)",
        "momentum(fp32)",
        "error_feedback(topk)",
    ):
        assert factor_in(rule, codec) is None
        assert factor_in(rule, "fp32", above=codec) is None
    assert factor_in(rule, "fp32", down="error_feedback(hips2bit)") is None
    assert factor_in(rules.parse("sgd(0.5)"), "fp32") is None  # there they wait
