# SPDX-License-Identifier: Apache-2.0
"""Kinds of models: the same numbers as one process on the joined batch."""

import keras
import numpy as np

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close

STEPS = 5


def compare(
    job: Job,
    build,
    arrays,
    *,
    epochs=2,
    batch=BATCH,
    rtol=1e-5,
    atol=1e-6,
    feed=None,
    reference=None,
    **options,
):
    """Trains under the strategy and in one process; returns the model and its History.

    Args:
        job: the job.
        build: makes a compiled model.
        arrays: what `fit` takes, of all ranks: each an array or a dictionary of arrays.
        epochs: of `fit`.
        batch: rows of a batch of one rank.
        rtol: how near numbers must be.
        atol: the same, for those near zero.
        feed: makes the arguments that give `fit` its data, of the strategy and this rank's arrays;
            a dataset of batches when None.
        reference: makes the model of the one process; `build` when None.
        options: further arguments of `fit`.
    """
    options = {"epochs": epochs, "verbose": 0, **options}

    def one_process():
        model = job.eagerly((reference or build)())
        history = model.fit(training.rows(arrays, batch * job.size), **options).history
        return history, [np.asarray(weight) for weight in model.get_weights()]

    strategy = job.strategy()
    model = job.make(build, strategy)
    own = keras.tree.map_structure(lambda array: job.shard([array], batch)[0], list(arrays))
    data = {"x": training.rows(own, batch)} if feed is None else feed(strategy, own)
    history = job.equal(model.fit(**data, **options).history)
    job.assert_replicas(model)
    if job.is_exact:
        weights = [np.asarray(weight) for weight in model.get_weights()]

        def check(expected):
            close(history, expected[0], rtol, atol)
            close(weights, expected[1], rtol, atol)

        job.afterwards(one_process, check)
    else:
        assert history["loss"][-1] < history["loss"][0], history
    return model, history


def fed_arrays(strategy, own):
    """Arguments of `fit` for arrays, in order."""
    return {"x": own[0], "y": own[1], "batch_size": BATCH, "shuffle": False}


def build_mlp(optimizer=None, metrics=("mae",), **options):
    """A small dense model."""
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    )
    model.compile(optimizer or descent(), "mse", metrics=list(metrics), **options)
    return model


def linear(job: Job, steps: int = STEPS):
    """Rows of a linear problem for `steps` steps of all ranks."""
    return training.data(steps * BATCH * job.size)


def descent(rate=0.1):
    return keras.optimizers.SGD(rate, momentum=0.9)


@feature()
def mlp(job: Job):
    compare(job, build_mlp, linear(job), feed=fed_arrays)


def images(job: Job, steps: int = STEPS):
    generator = np.random.default_rng(1)
    x = generator.normal(2.0, 3.0, (steps * BATCH * job.size, 5, 5, 1)).astype(np.float32)
    return x, x[:, :2, 2, 0]


def build_cnn(**options):
    model = keras.Sequential(
        [
            keras.Input((5, 5, 1)),
            keras.layers.Conv2D(3, 3),
            keras.layers.BatchNormalization(momentum=0.8, **options),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@feature()
def cnn_with_synchronized_batch_normalization(job: Job):
    model, _ = compare(job, lambda: build_cnn(synchronized=True), images(job))
    # The statistics are those of all rows at any time, before they are averaged too.
    job.equal([value.tobytes() for value in model.get_weights()])


@feature()
def batch_normalization_statistics_are_averaged(job: Job):
    model = job.make(lambda: job.eagerly(build_cnn()))
    x, y = job.shard(images(job, 2))
    own = []

    class Before(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            own.append(model.layers[1].moving_mean.numpy())

    model.fit(training.rows([x, y]), verbose=0, callbacks=[Before()])
    everyone = job.gather(own[-1])
    assert not np.array_equal(everyone[0], everyone[1])
    np.testing.assert_allclose(model.layers[1].moving_mean.numpy(), np.mean(everyone, 0), rtol=1e-6)
    job.assert_replicas(model)
    result = job.equal(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    assert np.isfinite(result)


class Counting(keras.layers.Layer):
    """Adds up its input in weights that say how those of the replicas are joined."""

    def build(self, shape):
        self.sums = [
            self.add_weight(
                shape=(), initializer="zeros", trainable=False, aggregation=one, name=one
            )
            for one in ("sum", "mean", "only_first_replica")
        ]

    def call(self, x):
        for one in self.sums:
            one.assign_add(keras.ops.sum(x))
        return x


@feature()
def aggregation_of_weights(job: Job):
    def build():
        model = keras.Sequential([keras.Input((6,)), Counting(), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
        return job.eagerly(model)

    model = job.make(build)
    layer, own = model.layers[0], []

    class Before(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            own.append([float(one) for one in layer.sums])

    arrays = job.shard(training.data(2 * BATCH * job.size))
    model.fit(training.rows(arrays), verbose=0, callbacks=[Before()])
    share, *_ = own[-1]
    everyone = job.gather(share)
    assert share and len(set(everyone)) == job.size
    found = [float(one) for one in layer.sums]
    np.testing.assert_allclose(found, [share, np.mean(everyone), everyone[0]], rtol=1e-5)


def tokens(job: Job, steps: int = STEPS):
    generator = np.random.default_rng(2)
    x = generator.integers(1, 20, (steps * BATCH * job.size, 6))
    x[:, 4:] = 0  # padding, the same on every rank
    return x.astype(np.int32), (x[:, 0] > 9).astype(np.float32)


@feature()
def embedding(job: Job):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(20, 4, embeddings_initializer="glorot_normal"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        model.compile(descent(0.5), "binary_crossentropy", metrics=["accuracy"])
        return job.eagerly(model)

    compare(job, build, tokens(job, 3))


@feature(elsewhere="embedding")
def transformer_block(job: Job):
    def build():
        inputs = keras.Input((6,), dtype="int32")
        words = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
        attended = keras.layers.MultiHeadAttention(2, 2)(words, words)
        x = keras.layers.LayerNormalization()(keras.layers.add([words, attended]))
        x = keras.layers.add([x, keras.layers.Dense(4)(keras.layers.Dense(8, "gelu")(x))])
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
        model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
        model.compile(descent(), "binary_crossentropy")
        return job.eagerly(model)

    compare(job, build, tokens(job, 2))


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Makes its weights when it is called first, and adds a loss."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.out = keras.layers.Dense(3)

    def call(self, inputs, training=False):
        hidden = self.hidden(inputs)
        if training:
            self.add_loss(0.01 * keras.ops.mean(hidden**2))
        return self.out(hidden) * self.scale


@feature()
def subclassed_model(job: Job):
    def build():
        model = Subclassed()
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        return model

    compare(job, build, linear(job, 2))


@feature()
def many_inputs_and_outputs(job: Job):
    def build():
        left, right = keras.Input((6,), name="left"), keras.Input((3,), name="right")
        joined = keras.layers.Dense(8, "relu")(keras.layers.Concatenate()([left, right]))
        model = keras.Model(
            {"left": left, "right": right},
            {
                "value": keras.layers.Dense(3, name="value")(joined),
                "sign": keras.layers.Dense(1, "sigmoid", name="sign")(joined),
            },
        )
        model.compile(
            descent(0.05),
            loss={"value": "mse", "sign": "binary_crossentropy"},
            loss_weights={"value": 0.3, "sign": 2.0},
            metrics={"sign": ["accuracy"], "value": ["mae"]},
        )
        return job.eagerly(model)

    x, y = linear(job, 2)
    compare(job, build, [{"left": x, "right": x[:, :3]}, {"value": y, "sign": y[:, :1] > 0}])


@feature(elsewhere="mlp")
def recurrent_layers(job: Job):
    def build():
        model = keras.Sequential(
            [
                keras.Input((4, 3)),
                keras.layers.GRU(4),
                keras.layers.Dense(1),
            ]
        )
        model.compile(descent(), "mse")
        return job.eagerly(model)

    x = np.random.default_rng(3).normal(size=(2 * BATCH * job.size, 4, 3))
    compare(job, build, [x.astype(np.float32), x[:, 0, :1].astype(np.float32)])


@feature()
def regularizers(job: Job):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "tanh", kernel_regularizer="l2", activity_regularizer="l1"),
                keras.layers.Dense(3, kernel_constraint="max_norm"),
            ]
        )
        model.compile(descent(0.05), "mse", run_eagerly=True)
        return model

    compare(job, build, linear(job, 2))


def _mean_error(expected, told):
    return keras.ops.mean((expected - told) ** 2)


class OfLosses(keras.losses.Loss):
    """A loss made of others: one of Keras' and a number."""

    def call(self, expected, told):
        return keras.losses.MeanAbsoluteError()(expected, told) + _mean_error(expected, told)


@feature(elsewhere="test_losses.py")
def losses_of_one_number(job: Job):
    def build():
        inputs = keras.Input((6,))
        heads = {name: keras.layers.Dense(3, "sigmoid", name=name) for name in ("a", "b", "c")}
        model = keras.Model(inputs, {name: head(inputs) for name, head in heads.items()})
        chosen = {"a": keras.losses.Dice(), "b": _mean_error, "c": OfLosses()}
        model.compile(descent(0.05), chosen, loss_weights={"a": 0.5, "b": 1.0, "c": 2.0})
        return job.eagerly(model)

    # All ranks have the same rows: the Dice of joined rows is not the mean of each rank's.
    steps = [
        array.reshape(-1, 1, BATCH, array.shape[-1]).repeat(job.size, axis=1)
        for array in training.data(2 * BATCH)
    ]
    x, y = (array.reshape(-1, array.shape[-1]) for array in steps)
    y = (y > 0).astype(np.float32)
    compare(job, build, [x, {"a": y, "b": y, "c": y}])


@feature()
def distillation(job: Job):
    """A student's loss is a function, as it is named; that of the logits is an object."""

    def build():
        teacher, student = (
            keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(n, "tanh"), keras.layers.Dense(3)]
            )
            for n in (8, 4)
        )
        soft = keras.distillation.LogitsDistillation(loss=keras.losses.KLDivergence())
        model = keras.distillation.Distiller(teacher, student, soft)
        model.compile(descent(0.02), loss="mse")
        return job.eagerly(model)

    compare(job, build, linear(job, 2))


@feature()
def frozen_layers_keep_their_bits(job: Job):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(3),
            ]
        )
        model.layers[0].trainable = model.layers[1].trainable = False
        model.compile("adam", "mse", run_eagerly=True)
        return model

    model = job.make(build)
    model.layers[1].moving_mean.assign(np.full(8, 1 / 3))
    x, y = job.shard(linear(job, 2))
    before = []

    class First(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            before.append([value.tobytes() for value in model.get_weights()[:6]])

    model.fit(training.rows([x, y]), epochs=2, verbose=0, callbacks=[First()])
    after = [value.tobytes() for value in model.get_weights()[:6]]
    assert job.equal(after) == before[0]
    job.assert_replicas(model)
