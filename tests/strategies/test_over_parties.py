# SPDX-License-Identifier: Apache-2.0
"""What is reduced exactly, over all workers of two parties and a real server."""

import contextlib
import json

import pytest

from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import run_parties
from tf_hips import log

pytestmark = pytest.mark.tf

WORKERS = [2, 1]
RUNS = ("sums", "half", "apart", "crossed")
SCALE = 1024.0


def _over_parties(folder):
    """The body of one launch: each part is a run of its own."""
    from tf_hips.comm import primitives

    sums, half, apart, crossed = _configs()
    worker = sum(WORKERS[: SITES.index(sums.uplink.site)]) + primitives.rank()
    results = {
        "sums": _reduce(sums, worker),
        "half": _overflow(half, worker, run_eagerly=True),
        "apart": _take_different_ways(apart),
    }
    (folder / f"{worker}.json").write_text(json.dumps(results))
    _wait_for_each_other(folder, crossed, worker)


def _in_graphs(folder):
    from tf_hips.comm import primitives

    norm, half = _configs()
    worker = sum(WORKERS[: SITES.index(half.uplink.site)]) + primitives.rank()
    results = {"norm": _normalise(norm, worker), "half": _overflow(half, worker)}
    (folder / f"{worker}.json").write_text(json.dumps(results))


def _reduce(config, worker):
    import numpy as np
    import tensorflow as tf

    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import HierarchicalPS
    from tf_hips.strategies.over_parties import ExactReduction

    strategy = HierarchicalPS("onebit", config=config)
    assert strategy.gather_objects([worker, "x"], "names") == [[one, "x"] for one in range(3)]

    def value(dtype, of, shape):
        generator = np.random.default_rng(of)
        dtype = tf.as_dtype(dtype)
        raw = generator.normal(size=shape) * 100
        if dtype.is_complex:
            raw = raw + 1j * generator.normal(size=shape)
        return raw.astype(dtype.as_numpy_dtype)

    kinds = [
        (tf.float32, (5, 3)), (tf.float64, (4,)), (tf.float16, (7,)), (tf.bfloat16, (2, 2)),
        (tf.int64, (3,)), (tf.int32, ()), (tf.int8, (2,)), (tf.uint8, (0, 3)), (tf.uint16, (2,)),
        (tf.complex64, (2,)), (tf.float32, ()),
    ]  # fmt: skip

    def expected(dtype, shape):
        # In the order of the parties, each of which is summed before; half types as float32.
        parts = [value(dtype, of, shape) for of in range(3)]
        if tf.as_dtype(dtype) in (tf.float16, tf.bfloat16):
            parts = [part.astype(np.float32) for part in parts]
        return (parts[0] + parts[1]).astype(parts[0].dtype) + parts[2]

    values = [tf.constant(value(dtype, worker, shape)) for dtype, shape in kinds]
    floats = [one for one in values if one.dtype.is_floating or one.dtype.is_complex]

    def both(sums, means):
        return (
            strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None),
            strategy.reduce(tf.distribute.ReduceOp.MEAN, means, axis=None),
        )

    ways = {"eager": both, "graph": tf.function(both, autograph=False), "fixed": None}
    constants = tf.function(lambda: both(values, floats))  # nothing here changes from call to call
    ways["fixed"] = lambda *_: constants()
    bits = []
    for way, function in ways.items():
        for _ in range(2):
            before = strategy._num_gathers
            totals, means = function(values, floats)
            if strategy.client is not None:
                assert strategy._num_gathers == before + 2, way
            for total, (dtype, shape) in zip(totals, kinds, strict=True):
                assert (total.dtype, total.shape) == (dtype, shape)
                wanted = expected(dtype, shape).astype(total.numpy().dtype)
                np.testing.assert_array_equal(total.numpy(), wanted, err_msg=way)
            for mean, one in zip(means, floats, strict=True):
                total = expected(one.dtype, one.shape)
                third = (total / np.array(3, total.dtype)).astype(mean.numpy().dtype)
                np.testing.assert_allclose(
                    mean.numpy(), third, rtol=1e-2 if third.itemsize < 4 else 1e-6
                )
            bits.append([value.numpy().tobytes().hex() for value in (*totals, *means)])
    # Means may differ in the last bit: Grappler divides by multiplying.
    assert len({json.dumps(one[: len(kinds)]) for one in bits}) == 1

    # A result that one rank alone does not use, minima, maxima, and gradients.
    @tf.function(autograph=False)
    def ignored(x):
        total = strategy.reduce(tf.distribute.ReduceOp.SUM, x, axis=None)
        return total if worker == 2 else tf.constant(0.0)

    assert [float(ignored(tf.constant(1.0 + worker))) for _ in range(3)] == 3 * [
        6.0 if worker == 2 else 0.0
    ]
    party = tf.constant([1, 5] if worker == 2 else [4, 2], tf.int64)
    [least] = strategy._over_parties([party], "least", "min")
    [most] = tf.function(lambda x: strategy._over_parties([x + 0], "most", "max"))(party)
    assert (least.numpy().tolist(), most.numpy().tolist()) == ([1, 2], [4, 5])
    assert least.dtype == tf.int64

    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            context = tf.distribute.get_replica_context()
            loss = (1.0 + worker) * context.all_reduce(tf.distribute.ReduceOp.SUM, x) ** 2
        return tape.gradient(loss, x)

    for step in (slope, tf.function(slope, autograph=False)):
        found = strategy.run(step, (tf.constant(1.0 + worker),))
        assert float(found) == sum((1.0 + of) * 2 * 6 for of in range(3))

    # What is trained by sums alone, and by no optimizer of Keras, begins equal, too.
    with strategy.scope():
        weight = tf.Variable(np.full(2, 10.0 * worker, "float32"))

    def by_hand(x):
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)
        weight.assign_sub(total)

    in_graph = tf.function(lambda x: strategy.run(by_hand, (x,)), autograph=False)
    for _ in range(2):
        in_graph(tf.fill([2], 1.0 + worker))
    np.testing.assert_array_equal(weight, [-12.0, -12.0])

    # Many values have a long name; other shapes at another party are an error of all ranks.
    ones = strategy.reduce(tf.distribute.ReduceOp.SUM, [tf.constant(1.0)] * 100, axis=None)
    assert [float(one) for one in ones] == [3.0] * 100
    odd = ExactReduction(lambda title, payload: [payload, payload[4:]], strategy.failures)
    text = r"same shapes and types\. Received: `x, sum of float32\[3\]` of 12, 8 bytes, by party"
    with pytest.raises(ProtocolError, match=text):
        odd([tf.zeros(3)], "x", "sum")
    with pytest.raises(ValueError, match="must be one of sum, min, max"):
        odd([tf.zeros(3)], "x", "prod")
    strategy.close()
    return bits


def _normalise(config, worker):
    """Ten steps of SGD with synchronised batch normalisation equal one process."""
    import keras
    import numpy as np

    import tf_hips
    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    x, y = training.data(10 * 8 * 3)
    own = training.shard([x, y], worker, 3)

    def build(**options):
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"], **options)
        return model

    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS(config=config)
    with strategy.scope():
        model = build()
    history = model.fit(training.rows(own), verbose=0).history
    training.assert_same_on_all_ranks(model)
    keras.utils.set_random_seed(0)
    with tf_hips.local():
        alone = build(run_eagerly=True)
        reference = alone.fit(x, y, batch_size=24, shuffle=False, verbose=0).history
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    for name, values in reference.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    strategy.close()
    return fingerprint(model)


def _overflow(config, worker, **options):
    """Mixed precision; in steps 1 and 2 one worker overflows alone, another one each time."""
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    x, y = training.data(5 * 8)
    for step, unlucky in ((1, 1), (2, 2)):
        if worker == unlucky:
            y[step * 8 : (step + 1) * 8] = 1e6
    keras.utils.set_random_seed(worker)
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    strategy = HierarchicalPS("error_feedback(onebit)", config=config)
    scales, prints = [], []

    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            scales.append(float(self.model.optimizer.dynamic_scale))
            prints.append(fingerprint(self.model))

    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05), initial_scale=SCALE
        )
        model = training.build(optimizer, **options)
    keras.mixed_precision.set_dtype_policy("float32")
    model.fit(training.rows([x, y]), verbose=0, callbacks=[Record()])
    assert scales == [SCALE, SCALE / 2, SCALE / 4, SCALE / 4, SCALE / 4]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints[2:])) == 3
    assert int(model.optimizer.inner_optimizer.iterations) == 3
    assert all(np.isfinite(value).all() for value in training.values(model))
    training.assert_same_on_all_ranks(model)
    strategy.close()
    return [scales, prints]


def _take_different_ways(config):
    """Parties that do different things: an error on every rank, which can go on."""
    from tests.strategies import training
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import HierarchicalPS

    strategy = HierarchicalPS(config=config)
    rows = 24 if config.uplink.site == "north" else 16
    with strategy.scope():
        model = training.build(run_eagerly=True)
    with pytest.raises(ValueError, match="All workers must take the same number of steps") as said:
        training.fit(model, training.data(rows))
    assert "worker 0: 3 steps" in str(said.value)
    assert "worker 2: 2 steps" in str(said.value)
    with pytest.raises(ProtocolError, match="must take the same steps") as caught:
        strategy.gather_objects(0, f"something of {config.uplink.site}")
    assert "site `south` waits in exact value 1 (`something of south`)" in str(caught.value)
    strategy.close()
    return "ended"


def _wait_for_each_other(folder, config, worker):
    """In a graph: north steps once more while south wants to know something else."""
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import HierarchicalPS

    strategy = HierarchicalPS(config=config)

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(
            lambda: tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)
        )

    assert float(step(tf.constant(1.0))) == 3.0
    with pytest.raises(ProtocolError) as caught:
        if config.uplink.site == "north":
            strategy.run(step, (tf.constant(1.0),))
        else:
            strategy.gather_objects(0, "the end")
    (folder / f"crossed-{worker}").write_text(f"{type(caught.value).__name__}: {caught.value}")
    strategy.close()
    assert primitives.gather_objects(1) == [1] * primitives.size()


def _launch(body, folder, runs):
    """All workers write the same results."""
    with contextlib.ExitStack() as stack:
        configs = []
        for run in runs:
            server = stack.enter_context(serving(run, log_dir=str(folder / f"server-{run}")))
            address = f"127.0.0.1:{server.port}"
            configs.append(write_configs(folder, run, address, log_dir=str(folder / f"log-{run}")))
        run_parties(body, {"folder": folder}, WORKERS, party_environments(*configs), deadline_s=280)
    results = [json.loads((folder / f"{worker}.json").read_text()) for worker in range(3)]
    assert results[0] == results[1] == results[2]

    # Rounds that no worker takes are taken by none: the server's count has no gap.
    events = log.read_events(folder / "server-half")
    for site in SITES:
        mine = [event for event in events if event.get("child_site") == site]
        rounds = [event["round"] for event in mine if event["event"] == "round"]
        assert rounds == [0, 1, 2]
        numbers = [event["number"] for event in mine if event["event"] == "gather"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 5


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_normalisation_and_overflows_in_graphs_are_those_of_all_workers(tmp_path):
    """Features show either on two workers."""
    _launch(_in_graphs, tmp_path, ("norm", "half"))


@pytest.mark.timeout(310)
def test_exact_values_are_those_of_all_workers_of_all_parties(tmp_path):
    _launch(_over_parties, tmp_path, RUNS)

    # That `fit` failed, and was caught, was told to the server.
    events = log.read_events(tmp_path / "server-apart")
    failed = [event for event in events if event["event"] == "failed"]
    assert {event["child_site"] for event in failed} == set(SITES)
    assert all(event["text"].startswith("ValueError: All workers") for event in failed)

    said = [(tmp_path / f"crossed-{worker}").read_text() for worker in range(3)]
    for text in said:
        assert text.startswith("ProtocolError: ")
        assert "site `south` waits in exact value 1 (`the end`)" in text
        assert "site `north` waits in exact value 1 (`exact, sum of float32[1]`)" in text
    # The other rank of the party waited for rank 0, in a graph; both went on together.
    assert said[1].startswith("ProtocolError: Rank 0 of this party failed. ")
