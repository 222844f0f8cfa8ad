# SPDX-License-Identifier: Apache-2.0
"""Optimizers of Keras and their options: the steps of one process on the joined batch."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close
from tests.strategies.features.models import compare, linear

_ALL = keras.optimizers
_OPTIMIZERS = {
    "sgd": lambda: _ALL.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: _ALL.Adam(0.05, amsgrad=True),
    "adamw": lambda: _ALL.AdamW(0.05, weight_decay=0.01),
    "lamb": lambda: _ALL.Lamb(0.05),
    "lion": lambda: _ALL.Lion(0.01),
    "adafactor": lambda: _ALL.Adafactor(0.1),
    "muon": lambda: _ALL.Muon(0.05),
    "schedule_free_adamw": lambda: _ALL.ScheduleFreeAdamW(0.05),
    "rmsprop": lambda: _ALL.RMSprop(0.05, momentum=0.5, centered=True),
    "adagrad": lambda: _ALL.Adagrad(0.1),
    "adadelta": lambda: _ALL.Adadelta(1.0),
    "nadam": lambda: _ALL.Nadam(0.05),
    "ftrl": lambda: _ALL.Ftrl(0.1),
    "adamax": lambda: _ALL.Adamax(0.05),
}
_OPTIONS = {
    "weight_decay": lambda: _ALL.SGD(0.1, weight_decay=0.1),
    "ema": lambda: _ALL.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "ema_at_the_end": lambda: _ALL.SGD(0.1, use_ema=True, ema_momentum=0.5),
    "schedule": lambda: _ALL.SGD(_ALL.schedules.CosineDecay(0.2, 8)),
    "loss_scale": lambda: _ALL.LossScaleOptimizer(_ALL.SGD(0.1), initial_scale=64.0),
}
_CLIPPING = {
    "clipnorm": 0.05,
    "global_clipnorm": 0.05,
    "clipvalue": 0.02,
}


def _build(make, **options):
    def build():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4, use_bias=False),
                keras.layers.Dense(3, bias_initializer="ones"),
            ]
        )
        model.compile(make(), "mse", **options)
        return model

    return build


def _descend(make, targets, share, run, convert):
    """Variables and slots after four steps towards `targets`.

    Args:
        make: makes the optimizer.
        targets: where this replica's gradients point.
        share: of these gradients in the sum.
        run: runs the step.
        convert: makes a graph of it, or leaves it.
    """
    initial = [keras.random.normal((4, 3)), keras.random.normal((3,))]
    variables = [
        keras.Variable(value, name=name)
        for value, name in zip(initial, ("kernel", "bias"), strict=True)
    ]
    optimizer = make()
    optimizer.build(variables)

    @convert
    def train():
        def step():
            gradients = [
                (variable - target) * share
                for variable, target in zip(variables, targets, strict=True)
            ]
            optimizer.apply(gradients, variables)

        run(step)

    for _ in range(4):
        train()
    slots = [np.asarray(slot) for slot in optimizer.variables]
    return [np.asarray(variable) for variable in variables], slots


# The cover has those that differ most.
@feature(each=_OPTIMIZERS, first=8)
def optimizer(job: Job, parameter):
    """Four steps towards a point that no replica knows alone."""
    make = _OPTIMIZERS[parameter]
    # Of the cover's only these are traced.
    in_graph = job.is_full or parameter in ("sgd", "adam")
    convert = tf.function if in_graph else lambda function: function
    generator = np.random.default_rng(7)
    targets = [generator.normal(5.0, 1.0, (job.size, *shape)) for shape in ((4, 3), (3,))]
    targets = [target.astype(np.float32) for target in targets]
    aim = [target.mean(0) for target in targets]
    strategy = job.strategy()

    def train():
        own = [target[job.rank] for target in targets]
        return _descend(make, own, 1 / job.size, strategy.run, convert)

    weights, slots = job.make(train, strategy)
    job.equal([value.tobytes() for value in (*weights, *slots)])
    keras.utils.set_random_seed(0)
    start = [np.asarray(keras.random.normal((4, 3))), np.asarray(keras.random.normal((3,)))]

    def distance(values):
        return sum(((value - point) ** 2).sum() for value, point in zip(values, aim, strict=True))

    assert distance(weights) < distance(start), (distance(weights), distance(start))
    if job.is_exact:

        def check(expected):
            close(weights, expected[0], rtol=1e-4, atol=1e-5)
            close(slots, expected[1], rtol=1e-4, atol=1e-5)

        job.afterwards(lambda: _descend(make, aim, 1.0, lambda step: step(), convert), check)


@feature(each=_OPTIONS, first=4)  # mixed_float16 scales its loss, too
def optimizer_option(job: Job, parameter):
    build = _build(_OPTIONS[parameter], run_eagerly=True)
    compare(job, build, linear(job, 2))


@feature(each=["graph", "eager"])
def gradient_accumulation(job: Job, parameter):
    def make():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)

    # Three steps in two epochs: one gradient is left over in the first.
    build = _build(make, run_eagerly=parameter == "eager")
    model, _ = compare(job, build, linear(job, 3))
    assert int(model.optimizer.iterations.numpy()) == 3


@feature(each=_CLIPPING, first=2)
def clipping(job: Job, parameter):
    limit = _CLIPPING[parameter]

    def make():
        return keras.optimizers.SGD(1.0, **{parameter: limit})

    build = _build(make, run_eagerly=parameter != "global_clipnorm")
    arrays = linear(job, 2)
    model, _ = compare(job, build, arrays)
    # One more step moves the weights by no more than the limit, but by that.
    before = model.get_weights()
    model.train_on_batch(*(array[:BATCH] for array in job.shard(arrays)))
    moves = [new - old for new, old in zip(model.get_weights(), before, strict=True)]
    sizes = {
        "clipnorm": max(np.linalg.norm(move) for move in moves),
        "global_clipnorm": np.linalg.norm(np.concatenate([move.ravel() for move in moves])),
        "clipvalue": max(np.abs(move).max() for move in moves),
    }
    np.testing.assert_allclose(sizes[parameter], limit, rtol=1e-3)
    job.assert_replicas(model)


@feature()
def learning_rate_is_one_number(job: Job):
    # Replicas that set another rate are made equal at the beginning only: it is a weight of the
    # optimizer's, and rank 0's holds.
    def build():
        return _build(lambda: keras.optimizers.SGD(0.1 * (1 + job.rank)), run_eagerly=True)()

    model = job.make(build)
    model.fit(training.rows(job.shard(linear(job, 1))), verbose=0)
    job.assert_replicas(model)
    close([job.equal(float(model.optimizer.learning_rate.numpy()))], [0.1])
