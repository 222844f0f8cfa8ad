# SPDX-License-Identifier: Apache-2.0
"""Custom loops: `strategy.run`, `reduce`, `gather`, and what a replica knows of itself."""

import re
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import descent, linear


def _build():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.optimizer = descent()
    return model


def _step(model, num_replicas):
    def step(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features, training=True) - targets) ** 2)
            scaled = loss / num_replicas
        gradients = tape.gradient(scaled, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


@feature(each=["graph", "eager"])
def custom_loop(job: Job, parameter):
    convert = tf.function if parameter == "graph" else lambda function: function
    x, y = linear(job)
    strategy = job.strategy()
    model = job.make(_build, strategy)
    step = _step(model, job.size)

    @convert
    def train(features, targets):
        own = strategy.run(step, (features, targets))
        return own, strategy.reduce("MEAN", own, axis=None)

    rows = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(tuple(job.shard([x, y]))).batch(BATCH)
    )
    told = []
    for batch in rows:
        own, mean = train(*batch)
        np.testing.assert_allclose(np.mean(job.gather(float(own))), float(mean), rtol=1e-6)
        told.append(float(mean))
    job.equal(told)
    assert told[-1] < told[0]
    job.assert_replicas(model)

    def one_process():
        model = _build()
        step = _step(model, 1)
        batch = BATCH * job.size
        losses = [
            float(step(*(tf.constant(array[begin : begin + batch]) for array in (x, y))))
            for begin in range(0, len(x), batch)
        ]
        return losses, model.get_weights()

    if job.is_exact:
        trained = model.get_weights()

        def check(expected):
            close([told], [expected[0]])
            close(trained, expected[1])

        job.afterwards(one_process, check)


def _clipping_step(model):
    """The step of docs/migration.md that changes gradients between tape and optimizer."""
    text = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
    [code] = [one for one in re.findall(r"```python\n(.*?)```", text, re.S) if "clip_by" in one]
    names = {
        "tf": tf,
        "model": model,
        "optimizer": model.optimizer,
        "loss_of": lambda y, p: tf.reduce_mean((p - y) ** 2),
    }
    exec(code, names)
    return names["step"]


@feature()
def gradients_clipped_by_hand(job: Job):
    x, y = linear(job)
    strategy = job.strategy()
    model = job.make(_build, strategy)
    step = _clipping_step(model)
    own = job.shard([x, y])
    for begin in range(0, len(own[0]), BATCH):
        strategy.run(step, tuple(tf.constant(one[begin : begin + BATCH]) for one in own))
    job.assert_replicas(model)

    def one_process():
        model = _build()
        step, batch = _clipping_step(model), BATCH * job.size
        for begin in range(0, len(x), batch):
            step(*(tf.constant(one[begin : begin + batch]) for one in (x, y)))
        return model.get_weights()

    if job.is_exact:
        trained = model.get_weights()
        job.afterwards(one_process, lambda expected: close(trained, expected))


@feature(each=["graph", "eager"])
def reduce_and_gather(job: Job, parameter):
    convert = tf.function if parameter == "graph" else lambda function: function
    strategy = job.strategy()

    @convert
    def numbers():
        def each():
            context = tf.distribute.get_replica_context()
            identity = tf.cast(context.replica_id_in_sync_group, tf.float32)
            rows = tf.fill([2, 3], identity)
            return (
                identity,
                rows,
                context.all_reduce("SUM", rows),
                context.all_gather(rows, axis=0),
                context.num_replicas_in_sync,
            )

        identity, rows, total, everyone, size = strategy.run(each)
        return (
            identity,
            total,
            everyone,
            size,
            strategy.reduce("SUM", identity + 1.0, axis=None),
            strategy.reduce("MEAN", rows, axis=0),
            strategy.reduce("SUM", {"count": tf.constant(2)}, axis=None),
            strategy.gather(rows, axis=0),
        )

    for _ in range(2):
        identity, total, everyone, size, one, mean, counts, gathered = numbers()
        ranks = np.arange(job.size, dtype=np.float32)
        assert int(identity) == job.rank
        assert int(size) == job.size
        np.testing.assert_array_equal(total, np.full((2, 3), ranks.sum()))
        expected = np.repeat(ranks, 2)[:, None] * np.ones((1, 3))
        np.testing.assert_array_equal(everyone, expected)
        np.testing.assert_array_equal(gathered, expected)
        assert float(one) == (ranks + 1).sum()
        np.testing.assert_allclose(mean, np.full(3, ranks.mean()))
        assert int(counts["count"]) == 2 * job.size
    if parameter == "eager":
        # Rows may differ in number: rank r has r + 1 of them.
        gathered = strategy.gather(tf.fill([job.rank + 1], job.rank), axis=0)
        expected = [rank for rank in range(job.size) for _ in range(rank + 1)]
        np.testing.assert_array_equal(gathered, expected)
    [local] = strategy.experimental_local_results(tf.constant(job.rank))
    assert int(local) == job.rank


@feature()
def gradients_flow_through_all_reduce(job: Job):
    strategy = job.strategy()

    @tf.function
    def gradient(value):
        def each(value):
            with tf.GradientTape() as tape:
                tape.watch(value)
                context = tf.distribute.get_replica_context()
                total = context.all_reduce("SUM", value)
                loss = (job.rank + 1.0) * tf.reduce_sum(total**2)
            return tape.gradient(loss, value)

        return strategy.run(each, (value,))

    own = gradient(tf.constant([1.0 + job.rank, 2.0]))
    # The sum is (3, 4); each rank's loss depends on it with its own factor.
    np.testing.assert_allclose(own, [3 * 2 * 3.0, 3 * 2 * 4.0], rtol=1e-6)
