# SPDX-License-Identifier: Apache-2.0
"""Two models with an optimizer each, in a loop of their own: TensorFlow's DCGAN in small."""

import keras
import numpy as np
import tensorflow as tf

from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job, close

_STEPS = 2


class _Gan:
    """The networks, their optimizers, and the steps of one replica."""

    def __init__(self):
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8, use_bias=False),
                layers.BatchNormalization(synchronized=True),
                layers.LeakyReLU(),
                layers.Dense(6, activation="tanh"),
            ]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.LeakyReLU(), layers.Dense(1)]
        )
        self.of_generator, self.of_discriminator = (
            keras.optimizers.SGD(0.2, momentum=0.5) for _ in range(2)
        )
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def _mean(self, target, told):
        # By its default that is over the batches of all replicas.
        return tf.nn.compute_average_loss(self.entropy(target(told), told))

    def _losses(self, images, noise):
        made = self.generator(noise, training=True)
        true, false = (self.discriminator(one, training=True) for one in (images, made))
        judged = self._mean(tf.ones_like, true) + self._mean(tf.zeros_like, false)
        return self._mean(tf.ones_like, false), judged

    def train_step(self, images, noise):
        """Both, as in the tutorial."""
        with tf.GradientTape() as of_maker, tf.GradientTape() as of_judge:
            made, judged = self._losses(images, noise)
        makers, judges = (
            network.trainable_variables for network in (self.generator, self.discriminator)
        )
        gradients = of_maker.gradient(made, makers), of_judge.gradient(judged, judges)
        self.of_generator.apply_gradients(zip(gradients[0], makers, strict=True))
        self.of_discriminator.apply_gradients(zip(gradients[1], judges, strict=True))
        return tf.stack([made, judged])

    def judge_step(self, images, noise):
        """Trains the discriminator."""
        with tf.GradientTape() as tape:
            _, judged = self._losses(images, noise)
        judges = self.discriminator.trainable_variables
        gradients = tape.gradient(judged, judges)
        self.of_discriminator.apply_gradients(zip(gradients, judges, strict=True))
        return judged

    def make_step(self, images, noise):
        """Trains the generator."""
        with tf.GradientTape() as tape:
            made, _ = self._losses(images, noise)
        makers = self.generator.trainable_variables
        self.of_generator.apply_gradients(zip(tape.gradient(made, makers), makers, strict=True))
        return made

    def steps(self, parameter):
        """The steps that take turns."""
        if parameter.startswith("together"):
            return [self.train_step]
        return [self.judge_step, self.judge_step, self.make_step]

    def values(self):
        """Weights and slots."""
        owners = self.generator, self.discriminator, self.of_generator, self.of_discriminator
        return [np.asarray(one) for owner in owners for one in owner.variables]


# Two optimizers in an eager step: `several_optimizers_in_a_step` and, at a server, test_further.py.
@feature(each=["together", "in turns", "together eagerly", "in turns eagerly"], first=2)
def gan(job: Job, parameter: str):
    generator = np.random.default_rng(3)
    rows = [
        generator.normal(size=(_STEPS * BATCH * job.size, width)).astype(np.float32)
        for width in (6, 4)
    ]
    strategy = job.strategy()
    made = job.make(_Gan, strategy)
    own = job.shard(rows)

    def distributed(step):
        def run(*batch):
            losses = strategy.run(step, args=batch)
            return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

        return run if parameter.endswith("eagerly") else tf.function(run)

    steps = {step: distributed(step) for step in made.steps(parameter)}
    told = []
    for begin in range(0, len(own[0]), BATCH):
        for step in made.steps(parameter):
            told.append(steps[step](*(tf.constant(one[begin : begin + BATCH]) for one in own)))
    told = job.equal([one.numpy() for one in told])
    values = made.values()
    job.equal([one.tobytes() for one in values])
    assert all(np.isfinite(one).all() for one in values)

    def one_process():
        made, batch = _Gan(), BATCH * job.size
        losses = [
            step(*(tf.constant(one[begin : begin + batch]) for one in rows)).numpy()
            for begin in range(0, len(rows[0]), batch)
            for step in made.steps(parameter)
        ]
        return losses, made.values()

    def check(expected):
        close(told, expected[0])
        close(values, expected[1])

    if job.is_exact:
        job.afterwards(one_process, check)
