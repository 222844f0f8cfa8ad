# SPDX-License-Identifier: Apache-2.0
"""Random layers: other noise on each rank, the same when run again, equal states everywhere."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import Job
from tests.strategies.features.models import linear


def _draws(job, strategy, is_graph=True):
    """What two random layers and a loose draw make of ones, in two steps; and the states."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)]
        seeds = keras.random.SeedGenerator(3)

    def draw():
        ones = tf.ones([4, 8])
        return [
            *(layer(ones, training=True) for layer in layers),
            keras.random.normal((8,), seed=seeds),
        ]

    def step():
        return strategy.run(draw)

    step = tf.function(step) if is_graph else step
    values = [[value.numpy() for value in step()] for _ in range(2)]
    states = [one.state.numpy() for one in (*(x.seed_generator for x in layers), seeds)]
    return values, states


@feature()
def noise_differs_and_repeats(job: Job):
    values, states = _draws(job, job.strategy())
    job.equal([state.tobytes() for state in states])
    everyone = job.gather(values)
    for step in range(2):
        for here, there in zip(everyone[0][step], everyone[1][step], strict=True):
            assert not np.array_equal(here, there)
    for first, second in zip(*values, strict=True):
        assert not np.array_equal(first, second)
    again, _ = _draws(job, job.strategy())
    eagerly, _ = _draws(job, job.strategy(), is_graph=False)
    for other in (again, eagerly):
        for first, second in zip(values[0], other[0], strict=True):
            np.testing.assert_array_equal(first, second)


@feature()
def noise_of_a_group_is_shared(job: Job):
    def grouped(cls):
        class Grouped(cls):
            def sample_group(self):
                return 0, 1

        return Grouped

    values, _ = _draws(job, job.strategy(grouped), is_graph=False)
    everyone = job.gather(values)
    for step in range(2):
        for here, there in zip(everyone[0][step], everyone[1][step], strict=True):
            np.testing.assert_array_equal(here, there)


@feature(elsewhere="noise_differs_and_repeats")
def dropout_trains(job: Job):
    def build():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
        return model

    own = job.shard(linear(job, 2))
    weights = []
    for _ in range(2):
        model = job.make(build)
        history = job.equal(model.fit(training.rows(own), epochs=2, verbose=0).history)
        assert history["loss"][-1] < history["loss"][0]
        job.assert_replicas(model)
        weights.append(model.get_weights())
    # Run again with the same seeds: the same bits.
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)
