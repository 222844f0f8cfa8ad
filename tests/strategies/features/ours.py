# SPDX-License-Identifier: Apache-2.0
"""What tf_hips adds to Keras: shards, warm-up, resuming at the step; and what it refuses."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import build_mlp, compare, linear
from tf_hips import FedAvg, callbacks, gather, shard
from tf_hips.errors import ProtocolError, TfHipsError


def _build(make=lambda: keras.optimizers.SGD(0.1)):
    return build_mlp(make(), run_eagerly=True)


@feature(elsewhere="test_sharding.py")
def shard_trains_as_one_process(job: Job):
    arrays = linear(job, 3)

    def feed(strategy, own):
        return {"x": shard(arrays, BATCH, shuffle=False, strategy=strategy)}

    compare(job, _build, arrays, feed=feed)


@feature(elsewhere="test_sharding.py")
def shard_and_gather_drop_nothing(job: Job):
    x, y = linear(job, 2)
    rows = 2 * BATCH * job.size - 5
    x, y = x[:rows], y[:rows]
    strategy = job.strategy()
    model = job.make(_build, strategy)
    model.fit(*job.shard([x[:16], y[:16]]), batch_size=BATCH, verbose=0)
    options = {"shuffle": False, "drop_remainder": False, "strategy": strategy}
    told = model.evaluate(shard((x, y), BATCH, **options), verbose=0, return_dict=True)
    assert len(shard((x, y), BATCH, strategy=strategy, shuffle=False)) == 1  # of full batches
    out = gather(model.predict(shard(x, BATCH, **options), verbose=0), strategy=strategy)
    np.testing.assert_allclose(out, model(x), rtol=1e-5, atol=1e-6)
    close(job.equal(told), {"loss": np.mean((out - y) ** 2), "mae": np.mean(np.abs(out - y))})


@feature()
def learning_rate_warmup(job: Job):
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    model = job.make(_build)
    warmup = callbacks.LearningRateWarmup(warmup_epochs=1)
    model.fit(
        training.rows(job.shard(linear(job, 4))),
        epochs=2,
        callbacks=[warmup, Rates()],
        verbose=0,
    )
    # From a rate for one worker, to that for two.
    ramp = [0.05 * (1 + step / 4) for step in (1, 2, 3, 4)]
    close([job.equal(rates)], [[*ramp, *4 * [0.1]]])
    job.assert_replicas(model)


class Stop(Exception):
    """Ends a training in the middle of an epoch."""


@feature(elsewhere="test_resume.py")
def resume_at_the_step(job: Job):
    """Stopped in the middle of the second epoch, taken up at its third step."""
    rows = job.shard(linear(job, 4))
    steps = []

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if model.stops and steps == [0, 1, 2, 3, 0, 1, 2]:
                raise Stop
            steps.append(batch)

    def fit(stops):
        model.stops = stops
        steps.clear()
        backup = callbacks.BackupAndRestore(job.folder / "backup", save_freq=3)
        return model.fit(
            *rows,
            batch_size=BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[backup, Steps()],
        ).history

    def build():
        return _build(lambda: keras.optimizers.Adam(0.05))

    model = job.make(build)
    expected, weights = fit(stops=False), training.values(model)
    model = job.make(build)
    with pytest.raises(Stop):
        fit(stops=True)
    model = job.make(build)
    history = fit(stops=False)
    assert job.equal(steps) == [2, 3]
    job.assert_replicas(model)
    job.equal(history)
    if job.is_exact or not job.has_uplink:
        # A server's residuals are not in the backup: resuming a compressed uplink is not exact.
        assert history == expected
        for mine, theirs in zip(training.values(model), weights, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@feature()
def sparse_gradients(job: Job):
    """A table so large that its gradient's rows travel, where nothing is compressed."""

    def build():
        model = keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                keras.layers.Embedding(3000, 8),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        # Where they travel dense, only SGD and Lion see what one process sees.
        travels = job.is_exact and not job.has_uplink
        optimizer = keras.optimizers.Adam(0.02) if travels else keras.optimizers.SGD(0.3)
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    generator = np.random.default_rng(6)
    x = generator.integers(0, 3000, (2 * BATCH * job.size, 3)).astype(np.int32)
    x[:, 0] = 7  # a row that all ranks have
    compare(job, build, [x, x[:, 1:2] / np.float32(3000.0)], rtol=1e-4, atol=1e-5)


@feature()
def fine_tuning(job: Job):
    """Compiled again with a layer frozen: another list of gradients."""
    strategy = job.strategy()
    model = job.make(_build, strategy)
    rows = job.shard(linear(job, 2))
    model.fit(training.rows(rows), verbose=0)
    frozen = [value.tobytes() for value in model.layers[0].get_weights()]
    with strategy.scope():
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
    model.fit(training.rows(rows), verbose=0)
    job.assert_replicas(model)
    assert [value.tobytes() for value in model.layers[0].get_weights()] == frozen


@feature(
    each=("error_feedback(onebit)", "error_feedback(terngrad(bitwidth=2))"),
)
def warmup_of_compression(job: Job, parameter: str):
    """Exact steps, then a codec, from the middle of an execution of two steps on."""
    rows = job.shard(linear(job, 6))
    # A party alone is compressed inside only.
    is_inside = job.configuration.strategy == "HierarchicalPS" and not job.has_uplink

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=2)
        return model

    def train(compression):
        way = {"local_compression" if is_inside else "compression": compression}
        model = job.make(build, job.strategy(**way))
        weights = []

        def fit(first, last):
            losses = training.fit(model, [array[first * BATCH : last * BATCH] for array in rows])
            job.assert_replicas(model)
            weights.append([value.tobytes() for value in model.get_weights()])
            return losses

        losses = [*fit(0, 3), *fit(3, 6)]
        assert losses[-1] < losses[0]
        return weights

    exact = train(None)
    warm = train(f"warmup({parameter}, steps=4)")
    assert warm[0] == exact[0]
    assert warm[1] != exact[1]


@feature()
def layers_that_adapt(job: Job):
    """What a layer learns by `adapt` is no weight: to its own rows on each rank is an error."""
    rows = linear(job, 2)
    own = job.shard(rows)
    words = [["a", "a", "b", "c"], ["c", "b", "b", "a"]][job.rank]

    def normalizing(seen):
        layer = keras.layers.Normalization()
        layer.adapt(seen)
        model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        return job.eagerly(model)

    def looking_up():
        lookup = keras.layers.StringLookup()
        lookup.adapt(words)
        inputs = keras.Input((1,), dtype="string")
        outputs = keras.layers.Dense(3)(keras.layers.Embedding(5, 2)(lookup(inputs)))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return job.eagerly(model)

    for method in ("evaluate", "fit"):
        model = job.make(lambda: normalizing(own[0]))  # with a server an error ends its run
        with pytest.raises(ProtocolError, match=r"`adapt` .*`normal\w+` of worker 1 has learned"):
            getattr(model, method)(training.rows(own), verbose=0)

    model = job.make(looking_up)
    # Over parties the second one finds it, and the first one hears of it.
    with pytest.raises(TfHipsError, match=r"`adapt` .*`string_lookup\w*` of (rank|party) 1 has"):
        model.train_on_batch(tf.constant([["a"], ["b"]]), np.zeros((2, 1, 3), np.float32))

    model = job.make(lambda: normalizing(rows[0]))
    model.fit(training.rows(own), verbose=0)
    job.assert_replicas(model)
    job.equal(model.predict(rows[0][:3], verbose=0).tobytes())


class Pair(keras.Model):
    """Two networks that play against each other, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = (
            keras.Sequential([keras.Input((width,)), keras.layers.Dense(out, activation="tanh")])
            for width, out in ((6, 3), (3, 1))
        )

    def compile(self, maker, critic):
        super().compile()
        self.optimizers = [(maker, self.maker), (critic, self.critic)]

    def call(self, inputs):
        return self.critic(self.maker(inputs))

    def train_step(self, data):
        x, y = data
        shares = tf.distribute.get_strategy().num_replicas_in_sync
        losses = []
        for optimizer, network in self.optimizers[::-1] * 2:
            with tf.GradientTape() as tape:
                told = tf.reduce_mean(self.critic(self.maker(x)))
                loss = told - tf.reduce_mean(self.critic(y)) if network is self.critic else -told
                share = loss / shares
            weights = network.trainable_variables
            optimizer.apply(tape.gradient(share, weights), weights)
            losses.append(loss)
        return {"critic": losses[-2], "maker": losses[-1]}


@feature()
def several_optimizers_in_a_step(job: Job):
    def build(optimizers=None):
        model = Pair()
        model.compile(*(optimizers or [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]))
        return job.eagerly(model)

    rows = linear(job, 2)
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    outside = [keras.optimizers.Adam() for _ in range(2)]
    model = job.make(lambda: build(outside))
    with pytest.raises(ValueError, match=r"inside the scope of the strategy.*`adam"):
        model.fit(*job.shard(rows), batch_size=BATCH, **options)

    def one_process():
        model = build()
        data = training.rows(rows, BATCH * job.size)
        return model.fit(data, **options).history, model.get_weights()

    def check(expected, told, weights):
        close(told, expected[0])
        close(weights, expected[1])

    for is_loop in [False, True][: 1 + job.has_uplink]:
        strategy = job.strategy()
        model = job.make(build, strategy)
        own = job.shard(rows)
        if is_loop:
            loop = FedAvg(model, strategy, local_steps=2)
            told = loop.fit(*own, batch_size=BATCH, **options).history
        else:
            told = model.fit(training.rows(own), **options).history
        job.equal([weight.tobytes() for weight in model.get_weights()])
        if job.is_exact and not is_loop:
            optimizers = [optimizer for optimizer, _ in model.optimizers]
            slots = [slot.numpy() for optimizer in optimizers for slot in optimizer.variables]
            job.equal([slot.tobytes() for slot in slots])
            check = functools.partial(check, told=told, weights=model.get_weights())
            job.afterwards(one_process, check)
