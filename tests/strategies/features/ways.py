# SPDX-License-Identifier: Apache-2.0
"""Ways to train, evaluate and predict: methods of a model and their options."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import build_mlp, compare, descent, linear
from tf_hips.errors import ProtocolError
from tf_hips.strategies import local


@feature(each=["looped", "unrolled"])
def steps_per_execution(job: Job, parameter):
    def build():
        model = build_mlp(steps_per_execution=2)
        model.unrolled_steps_per_execution = 2 if parameter == "unrolled" else 1
        return model

    # Five steps: the last execution is shorter.
    compare(job, build, linear(job, 5), reference=lambda: build_mlp(run_eagerly=True))


@feature(elsewhere="regularizers")
def run_eagerly(job: Job):
    compare(job, lambda: build_mlp(run_eagerly=True), linear(job, 3))


@feature(each=["sample_weight", "class_weight"])
def weighted_rows(job: Job, parameter):
    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
        model.compile(
            descent(),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
            run_eagerly=True,
        )
        return model

    x, y = linear(job, 2)
    arrays = [x, y.argmax(1)]
    if parameter == "sample_weight":
        weights = np.random.default_rng(4).uniform(0.1, 2.0, len(x)).astype(np.float32)
        compare(job, build, [*arrays, weights])
    else:
        compare(job, build, arrays, class_weight={0: 0.5, 1: 2.0, 2: 1.0})


@feature()
def validation_and_initial_epoch(job: Job):
    x, y = linear(job, 2)
    # Validation rows are uneven: the result is that of all of them.
    rows = [slice(0, 11), slice(11, 16)][job.rank]
    model = job.make(lambda: build_mlp(run_eagerly=True))
    own = job.shard([x, y])
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    told = model.fit(
        *own,
        validation_data=(x[rows], y[rows]),
        validation_freq=2,
        validation_batch_size=4,
        initial_epoch=1,
        epochs=4,
        **options,
    )
    history = job.equal(told.history)
    assert told.epoch == [1, 2, 3]
    assert [len(history[name]) for name in ("loss", "val_loss", "val_mae")] == [3, 2, 2]
    expected = np.mean((model.predict(x[:16], verbose=0) - y[:16]) ** 2)
    np.testing.assert_allclose(history["val_loss"][-1], expected, rtol=1e-5)
    # The last rows of each rank are held out.
    history = job.equal(model.fit(*own, validation_split=0.5, **options).history)
    held = np.concatenate(job.gather(own[0][BATCH:])), np.concatenate(job.gather(own[1][BATCH:]))
    expected = np.mean((model.predict(held[0], verbose=0) - held[1]) ** 2)
    np.testing.assert_allclose(history["val_loss"], [expected], rtol=1e-5)
    job.assert_replicas(model)


@feature()
def evaluate_and_predict(job: Job):
    x, y = linear(job, 2)
    model = job.make(lambda: job.eagerly(build_mlp()))
    model.fit(training.rows(job.shard([x, y])), verbose=0)
    # 13 rows here and 6 there, that is four batches and two.
    rows = [slice(0, 13), slice(13, 19)][job.rank]
    result = model.evaluate(x[rows], y[rows], batch_size=4, verbose=0, return_dict=True)
    job.equal(result)
    out = model.predict(x[rows], batch_size=4, verbose=0)
    assert out.shape == (rows.stop - rows.start, 3)
    everything = np.concatenate(job.gather(out))
    assert everything.shape == (19, 3)
    expected = {
        "loss": np.mean((everything - y[:19]) ** 2),
        "mae": np.mean(np.abs(everything - y[:19])),
    }
    close(result, expected)
    listed = model.evaluate(x[rows], y[rows], batch_size=4, verbose=0)
    np.testing.assert_allclose(listed, [result["loss"], result["mae"]], rtol=1e-6)


@feature()
def evaluate_before_training(job: Job):
    """The weights of the first rank are evaluated; parties that differ hear of it."""
    x, y = linear(job, 2)
    model = job.make(lambda: build_mlp(run_eagerly=True))
    own = job.shard([x, y])
    if job.has_uplink:
        with pytest.raises(ProtocolError, match="parties must evaluate the same weights"):
            model.evaluate(*own, verbose=0)
        weights = job.gather(model.get_weights())[0]
        model.set_weights(weights)
    told = job.equal(model.evaluate(*own, verbose=0))
    out = model.predict(x, verbose=0)
    np.testing.assert_allclose(told, [np.mean((out - y) ** 2), np.mean(np.abs(out - y))], rtol=1e-5)
    # It was no beginning: weights that the first rank has now are those of all.
    if job.rank == 0:
        model.set_weights([np.ones_like(value) for value in model.get_weights()])
    model.optimizer.learning_rate = 0.0
    model.fit(training.rows(own), verbose=0)
    job.assert_replicas(model)
    np.testing.assert_array_equal(model.get_weights()[0], np.ones((6, 16)))
    # After training, too, it is one model that is evaluated.
    if job.rank == 0:
        model.set_weights([2 * value for value in model.get_weights()])
    if job.has_uplink:
        with pytest.raises(ProtocolError, match=r"same weights of .*kernel` of worker 1 is not"):
            model.evaluate(*own, verbose=0)
    else:
        job.equal(model.evaluate(*own, verbose=0))
        job.assert_replicas(model)


@feature()
def methods_on_batches(job: Job):
    x, y = linear(job, 3)
    own = job.shard([x, y])

    def train(model, rows, batch):
        told = []
        for step in range(3):
            chosen = [array[step * batch : (step + 1) * batch] for array in rows]
            model.reset_metrics()
            told.append(model.train_on_batch(*chosen, return_dict=True))
        model.reset_metrics()
        told.append(model.test_on_batch(*chosen, return_dict=True))
        return told, [np.asarray(weight) for weight in model.get_weights()]

    model = job.make(build_mlp)
    told, weights = train(model, own, BATCH)
    job.equal(told)
    job.assert_replicas(model)
    assert told[2]["loss"] < told[0]["loss"]
    model.reset_metrics()
    listed = model.test_on_batch(own[0][-BATCH:], own[1][-BATCH:])
    np.testing.assert_allclose(listed, [told[3]["loss"], told[3]["mae"]], rtol=1e-6)
    out = model.predict_on_batch(own[0][:5])
    np.testing.assert_allclose(out, model(own[0][:5]), rtol=1e-5)
    if job.is_exact:

        def check(expected):
            for mine, theirs in zip(told, expected[0], strict=True):
                close(mine, theirs)
            close(weights, expected[1])

        job.afterwards(lambda: train(build_mlp(), [x, y], BATCH * job.size), check)


class OwnStep(keras.Model):
    """A training step and logs of its own, with a metric that Keras does not know of."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.error = keras.metrics.Mean(name="error")

    def call(self, inputs):
        return self.dense(inputs)

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = keras.ops.mean((self(x, training=True) - y) ** 2, -1)
            loss = keras.ops.mean(errors)
            # What Keras does in its own step; the sum of gradients is then the mean's.
            scaled = loss / tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.error.update_state(errors)
        return {"error": self.error.result()}


@feature()
def custom_train_step(job: Job):
    def build():
        model = OwnStep()
        model.compile(descent())
        return job.eagerly(model)

    x, y = linear(job, 3)
    model = job.make(build)
    options = {"epochs": 2, "verbose": 0}
    told = model.fit(training.rows(job.shard([x, y])), **options).history
    job.equal(told)
    job.assert_replicas(model)
    assert told["error"][-1] < told["error"][0]
    if job.is_exact:

        def one_process():
            model = build()
            return model.fit(training.rows([x, y], BATCH * job.size), **options).history

        job.afterwards(one_process, lambda expected: close(told, expected))


@feature()
def logs_without_metrics_are_averaged(job: Job):
    """A number that is no metric's result is averaged, one that is stays exact over all rows."""

    class Bare(keras.Model):
        def train_step(self, data):
            super().train_step(data)
            own = tf.constant(float(job.rank))
            return {"rank": own, "inside": {"deep": own + 1.0}, "three": tf.constant(3.0)}

        def test_step(self, data):
            return {**super().test_step(data), "three": tf.constant(3.0)}

    inputs = keras.Input((6,))

    def build():
        model = Bare(inputs, keras.layers.Dense(3)(inputs))
        metrics = ["mae", keras.metrics.R2Score()]
        model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
        return model

    model = job.make(build)
    rows = linear(job, 1)
    told = model.fit(training.rows(job.shard(rows)), verbose=0).history
    assert job.equal(told) == {"rank": [0.5], "deep": [1.5], "three": [3.0]}
    job.equal(model.get_weights())
    own = [array[:BATCH] if job.rank == 0 else array[BATCH : BATCH + 3] for array in rows]
    told = job.equal(model.evaluate(*own, batch_size=4, verbose=0, return_dict=True))
    with local():
        joined = [array[: BATCH + 3] for array in rows]
        close(told, model.evaluate(*joined, verbose=0, return_dict=True))
