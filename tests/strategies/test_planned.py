# SPDX-License-Identifier: Apache-2.0
"""Strategies obey plans, topologies and thresholds, and refuse what does not fit."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

ONEBIT = "error_feedback(onebit)"
# Of `training.build`: two kernels and two biases.
SIZES = [96, 16, 48, 3]


def _plan(ways):
    from tf_hips.comm.plan import Choice, Plan

    return Plan(2, tuple(Choice("", size, *way) for size, way in zip(SIZES, ways, strict=True)))


@ranks(2)
def test_plans_that_differ_in_partitions_alone():
    import keras
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.plan import Choice, Plan
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    size, partitions = 3 * 2**20, 1 + primitives.rank()
    for way in ((None, "allreduce"), ("onebit", "ps")):
        strategy = CompressedRing(plan=Plan(2, (Choice("weight", size, *way, partitions),)))
        with strategy.scope():
            weight = tf.Variable(tf.zeros([size]))
            descent = keras.optimizers.SGD(1.0)

        def step(weight=weight, descent=descent):
            descent.apply([tf.ones([size])], [weight])

        complaint = "partitions of gradient 0 is 1 on rank 0 and 2 on rank 1"
        with pytest.raises(ProtocolError, match=complaint):
            strategy.run(tf.function(step))


@ranks(2)
def test_a_measured_plan_is_kept_with_the_state(tmp_path):
    import json

    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing, in_party

    rank, exact = primitives.rank(), (None, "allreduce")
    plans = {
        "first": _plan([(ONEBIT, "ps"), exact, (ONEBIT, "allgather"), exact]),
        "later": _plan([(ONEBIT, "ps", 2), exact, exact, exact]),
    }
    measured = []
    in_party.auto_plan = lambda gradients: measured.append(1) or plans[link]
    own = training.shard(training.data(32), rank, 2)

    def made():
        strategy = CompressedRing(plan="auto")
        with strategy.scope():
            return strategy, training.build()

    def told(state):
        return [text for text in json.loads(state.plans.serialize()).values()]

    # Saved as `tf.train.Checkpoint` does, and of one model as backups are.
    link = "first"
    strategy, model = made()
    training.fit(model, own)
    saved = told(strategy.state)
    assert len(saved) == 1
    assert told(strategy.state.of_model(model)) == saved
    whole = tf.train.Checkpoint(state=strategy.state).write(str(tmp_path / f"whole-{rank}"))
    one = tf.train.Checkpoint(state=strategy.state.of_model(model)).write(
        str(tmp_path / f"one-{rank}")
    )
    tf.train.Checkpoint(state=strategy.state).read(whole)  # where it is true already

    # The link has changed since: the plan has not.
    link = "later"
    for path, state_of in (
        (whole, lambda strategy, model: strategy.state),
        (one, lambda strategy, model: strategy.state.of_model(model)),
    ):
        measured.clear()
        strategy, model = made()
        tf.train.Checkpoint(state=state_of(strategy, model)).read(path)
        assert told(state_of(strategy, model)) == saved  # saved again before the first step
        training.fit(model, own)
        assert not measured
        assert told(strategy.state) == saved
        names = {name for _, names in strategy._turns._labels for name in names.split()}
        assert "hips.gradients0.group_1.allgather.bucket_0.gathered" in names

    # Restored on one rank alone, or when there is another plan: said on all of them.
    strategy, model = made()
    if rank == 0:
        tf.train.Checkpoint(state=strategy.state).read(whole)
    with pytest.raises(ProtocolError, match="the plan of the saved state is"):
        training.fit(model, own)
    strategy, model = made()
    training.fit(model, own)
    assert measured
    with pytest.raises(ProtocolError, match="restored before the first step"):
        tf.train.Checkpoint(state=strategy.state).read(whole)


@pytest.mark.slow
@ranks(2, deadline_s=240)
def test_two_ranks_obey(tmp_path):
    import functools
    import os

    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips import HierarchicalPS
    from tf_hips.comm import auto, primitives
    from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError
    from tf_hips.strategies import CompressedRing, in_party

    rank = primitives.rank()
    own = training.shard(training.data(320), rank, 2)

    def train(strategy, epochs=3):
        keras.utils.set_random_seed(rank)
        with strategy.scope():
            model = training.build("adam")
        history = training.fit(model, own, epochs=epochs)
        names = {name for _, names in strategy._turns._labels for name in names.split()}
        return model, history, names

    exact = (None, "allreduce")
    mixed = _plan([("error_feedback(terngrad)", "ps"), (*exact, 2), (ONEBIT, "allgather"), exact])
    path = tmp_path / f"plan-{rank}.yaml"
    mixed.write(path)
    ways = [
        (
            CompressedRing(ONEBIT, topology="butterfly", comp_threshold=48),
            {"butterfly.bucket_0.hop_0", "butterfly.bucket_0.merged", "exact.sum.0"},
        ),
        (
            HierarchicalPS(local_compression=ONEBIT, topology="allgather"),
            {"allgather.bucket_0.gathered"},
        ),
        (
            CompressedRing(plan=path),
            {
                "group_0.ps.bucket_0.packets",
                "group_0.ps.bucket_0.merged",
                "group_1.allgather.bucket_0.gathered",
                "exact.sum.0",
                "exact.tensor_1.part_0",
                "exact.tensor_1.part_1",
            },
        ),
    ]
    facts = []
    for strategy, expected in ways:
        model, history, names = train(strategy)
        assert history[-1] < 0.9 * history[0], history
        training.assert_same_on_all_ranks(model)
        sums = {name.removeprefix("hips.gradients0.") for name in names if ".gradients0." in name}
        assert sums == expected
        facts.append(strategy.state.facts())
    assert [one.get("topology") for one in facts] == ["butterfly", "allgather", None]
    assert [one.get("comp_threshold") for one in facts] == [48, 0, None]
    assert len(facts[2]["the plan"]) == 16

    # A plan that compresses nothing is no compression.
    weights = [
        train(strategy, epochs=1)[0].get_weights()
        for strategy in (CompressedRing(plan=_plan([exact] * 4)), CompressedRing())
    ]
    for planned, plain in zip(*weights, strict=True):
        np.testing.assert_array_equal(planned, plain)

    # Measured before the first step, and kept for the next run: the same plan, the same weights.
    os.environ["TF_HIPS_CACHE"] = str(tmp_path)
    in_party.auto_plan = functools.partial(in_party.auto_plan, budget_seconds=0.5)
    auto._TRUSTED = 1e9  # whether a link has changed is no question of a machine full of tests
    measured = [train(CompressedRing(plan="auto"), epochs=1) for _ in range(2)]
    for first, again in zip(*(model.get_weights() for model, _, _ in measured), strict=True):
        np.testing.assert_array_equal(first, again)
    training.assert_same_on_all_ranks(measured[0][0])
    kept = sorted(tmp_path.rglob("profiles/*.yaml"))
    assert len(kept) == 1, kept
    assert CompressedRing(plan="auto").state.facts()["the plan"] == "auto"

    # What does not fit is refused: by itself, ...
    for arguments, complaint in (
        ({"compression": ONEBIT, "plan": mixed}, "without `compression`"),
        ({"plan": mixed, "comp_threshold": 5}, "without `compression`"),
        ({"compression": ONEBIT, "topology": "star"}, "one of ps, ring, butterfly"),
        ({"topology": "ps"}, "must come with `compression`"),
        ({"compression": ONEBIT, "comp_threshold": -1}, "at least 0"),
    ):
        with pytest.raises(ValueError, match=complaint):
            CompressedRing(**arguments)
    with pytest.raises(TypeError, match="number of elements"):
        CompressedRing(ONEBIT, comp_threshold="all")
    with pytest.raises(TypeError, match=r"must be a plan, the file of one, or \"auto\"\. .*plan=4"):
        CompressedRing(plan=4)
    with pytest.raises(ConfigError, match="cannot be read"):
        CompressedRing(plan=tmp_path / "nothing.yaml")
    # ... beside the model, ...
    other = _plan([exact] * 4)
    other = type(other)(2, (*other.choices[:2], *other.choices[3:]))
    with pytest.raises(ConfigError, match=r"gradient 2 .*48 elements.*plan.* 3$"):
        train(CompressedRing(plan=other))
    with pytest.raises(ConfigError, match=r"ranks of this job, 2\. Received: a plan for 3"):
        train(CompressedRing(plan=type(other)(3, mixed.choices)))
    # ... and beside the other ranks.
    with pytest.raises(ProtocolError, match="topology is ps on rank 0 and allgather on rank 1"):
        train(CompressedRing(ONEBIT, topology=("ps", "allgather")[rank]))
    with pytest.raises(ProtocolError, match="`nonfinite` is raise on rank 0 and zero on rank 1"):
        train(CompressedRing(ONEBIT, nonfinite=("raise", "zero")[rank]))
    with pytest.raises(ProtocolError, match=r"the plan is .* on rank 0 and .* on rank 1"):
        train(CompressedRing(plan=(mixed, _plan([exact] * 4))[rank]))

    # A rank's gradient that is not finite is the same error on all ranks, in the same step.
    own[1][40 if rank else 0, 0] = np.nan if rank else 0.0
    with pytest.raises(NonFiniteError, match=r"Gradient 0 .* of rank 1 must be .* in step 5$"):
        train(CompressedRing(ONEBIT))
    # What a strategy makes while a step is traced does not end the trace: it happens once.
    traces = []

    def loss(truth, predicted):
        traces.append(1)
        return keras.losses.mean_squared_error(truth, predicted)

    with CompressedRing(ONEBIT).scope():
        model = training.build()
        model.compile("adam", loss)
    own[1][40 if rank else 0, 0] = 0.0
    training.fit(model, own, epochs=2)
    assert len(traces) == 2  # when Keras looks at shapes, and in the step
    own[1][40 if rank else 0, 0] = np.nan if rank else 0.0

    # Also beside other groups and exact sums; who catches it may go on.
    ways = [("terngrad", "ps", 1), exact, (ONEBIT, "ring", 1), exact]
    with CompressedRing(plan=_plan(ways)).scope():
        model = training.build()
    for _ in range(3):
        with pytest.raises(NonFiniteError, match=r"Gradient 0 .* of rank 1 must be "):
            training.fit(model, own)
    own[1][40 if rank else 0, 0] = 0.0
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    primitives.shutdown()
