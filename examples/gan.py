# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's DCGAN tutorial on small digits: two networks, two optimizers, a loop of one's own.

    python examples/gan.py
    tf-hips run --parties 1 --workers 2 examples/gan.py
    tf-hips run --parties 2 --workers 1 examples/gan.py

These are one worker, one party without a server, and two parties with one.

What it takes beside the tutorial are the strategy, `strategy.run`, and a loss over the batches of
all replicas, as with every strategy of `tf.distribute`. At the end it says how far the mean of what
is generated is from the mean of real digits, in grey levels from 0 to 1; untrained it is about 0.3.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from digits import load

import tf_hips

NOISE = 32


def build_generator() -> keras.Model:
    """Makes images of noise."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(4 * 4 * 32, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((4, 4, 32)),
            layers.Conv2DTranspose(16, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


def build_discriminator() -> keras.Model:
    """Tells real images from made ones."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3),
            layers.Conv2D(32, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def main() -> None:
    """Trains, and says how far it has come."""
    parser = argparse.ArgumentParser(description="A GAN on small digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
    options = parser.parse_args()

    strategy = tf_hips.HierarchicalPS()
    keras.utils.set_random_seed(strategy.config.seed)
    with strategy.scope():
        generator, discriminator = build_generator(), build_discriminator()
        generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def loss_of(labels: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
        return tf.nn.compute_average_loss(cross_entropy(labels, output))

    # Each worker has noise of its own, as it has images of its own.
    noise_of = tf.random.Generator.from_seed(strategy.global_rank)

    def train_step(images: tf.Tensor) -> tf.Tensor:
        noise = noise_of.normal([options.batch_size, NOISE])
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            generated = generator(noise, training=True)
            real_output = discriminator(images, training=True)
            fake_output = discriminator(generated, training=True)
            gen_loss = loss_of(tf.ones_like(fake_output), fake_output)
            disc_loss = loss_of(tf.ones_like(real_output), real_output) + loss_of(
                tf.zeros_like(fake_output), fake_output
            )
        gen_variables = generator.trainable_variables
        disc_variables = discriminator.trainable_variables
        gen_gradients = gen_tape.gradient(gen_loss, gen_variables)
        disc_gradients = disc_tape.gradient(disc_loss, disc_variables)
        generator_optimizer.apply_gradients(zip(gen_gradients, gen_variables, strict=True))
        discriminator_optimizer.apply_gradients(zip(disc_gradients, disc_variables, strict=True))
        return tf.stack([gen_loss, disc_loss])

    @tf.function
    def distributed_train_step(images: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(train_step, args=(images,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    (images, _), (unseen, _) = load()
    dataset = tf_hips.shard((images,), options.batch_size, strategy=strategy)
    for epoch in range(options.epochs):
        for (batch,) in dataset:
            losses = distributed_train_step(batch)
        if strategy.global_rank == 0:
            gen_loss, disc_loss = losses.numpy()
            print(f"epoch {epoch + 1}: generator {gen_loss:.3f}, discriminator {disc_loss:.3f}")

    made = generator(tf.random.stateless_normal([512, NOISE], [1, 2]), training=True).numpy()
    distance = np.abs(made.mean(0) - unseen.mean(0)).mean()
    print(f"worker {strategy.global_rank}: distance of means {distance:.4f}")
    strategy.close()


if __name__ == "__main__":
    main()
