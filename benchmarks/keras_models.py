# SPDX-License-Identifier: Apache-2.0
"""The models of `make bench-keras`, their data, and the training loops that are the baselines.

Every variant of a model begins with the same weights, sees the same batches in the same order, and
has the same optimizer, so after the same number of steps the weights must be the same: the driver
checks it.
"""

from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

SEED = 7
LEARNING_RATE = 1e-3
NUM_CLASSES = 10
NUM_BATCHES = 16  # of different data; they repeat

Ended = Callable[[], bool]  # to be called at the end of each step; whether it was the last
FOR_EVER = 10**9  # steps


class Ends(keras.callbacks.Callback):
    """Says when each step of a `fit` has ended."""

    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self._ended = ended

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.model.stop_training = self._ended()


def mlp() -> keras.Model:
    """Hardly any work: its step is what Keras, TensorFlow and a strategy cost by themselves."""
    return keras.Sequential(
        [
            keras.Input([32]),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(NUM_CLASSES),
        ]
    )


def cnn() -> keras.Model:
    """A convolutional network for 32x32 pictures, as small projects train them."""
    layers: list[keras.layers.Layer] = [keras.Input([32, 32, 3])]
    for filters in (32, 64):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers.append(keras.layers.MaxPooling2D())
    layers += [
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(NUM_CLASSES),
    ]
    return keras.Sequential(layers)


def transformer() -> keras.Model:
    """A transformer block over 64 positions of 128 features: many tensors, no convolution."""
    inputs = keras.Input([64, 128])
    normed = keras.layers.LayerNormalization()(inputs)
    attended = keras.layers.MultiHeadAttention(4, 32)(normed, normed)
    hidden = keras.layers.Add()([inputs, attended])
    normed = keras.layers.LayerNormalization()(hidden)
    wide = keras.layers.Dense(512, activation="gelu")(normed)
    hidden = keras.layers.Add()([hidden, keras.layers.Dense(128)(wide)])
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(pooled))


BUILDERS: dict[str, Callable[[], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
}
BATCH = {"mlp": 32, "cnn": 16, "transformer": 16}


def make(name: str) -> keras.Model:
    """Model `name`, compiled, with weights that depend on its name alone."""
    keras.utils.set_random_seed(SEED)
    model = BUILDERS[name]()
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def data(name: str, model: keras.Model, rank: int) -> tf.data.Dataset:
    """Batches for ever; each rank has its own."""
    batch = BATCH[name]
    random = np.random.default_rng([SEED, rank])
    shape = (NUM_BATCHES * batch, *model.input_shape[1:])
    x = random.standard_normal(shape, dtype=np.float32)
    y = random.integers(NUM_CLASSES, size=len(x))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache().repeat().prefetch(2)


class Fit:
    """Steps of `fit`, under the strategy that the model was built with."""

    def __init__(
        self,
        model: keras.Model,
        dataset: tf.data.Dataset,
        callbacks: Sequence[keras.callbacks.Callback] = (),
    ) -> None:
        self.model, self._dataset, self._callbacks = model, dataset, callbacks

    def __call__(self, ended: Ended) -> None:
        callbacks = [*self._callbacks, Ends(ended)]
        self.model.fit(self._dataset, steps_per_epoch=FOR_EVER, verbose=0, callbacks=callbacks)


class Loop:
    """The loop that a user of Horovod writes: a tape, a reduction and an optimizer in one function.

    Like `fit` it takes its batches inside the `tf.function` and keeps the mean of the loss.
    """

    def __init__(self, model: keras.Model, dataset: tf.data.Dataset, reduction: str) -> None:
        """Prepares a loop.

        Args:
            model: a compiled model that belongs to no strategy.
            dataset: endless batches.
            reduction: "grouped" sums all gradients in one `hvd.grouped_allreduce`, "tape" each as
                it comes, as `hvd.DistributedGradientTape` does.
        """
        import horovod.tensorflow as hvd

        self.model, self._dataset = model, dataset
        self._mean = keras.metrics.Mean()
        model.optimizer.build(model.trainable_variables)
        hvd.broadcast_variables([weight.value for weight in model.weights], root_rank=0)
        loss_of, optimizer, mean = model.loss, model.optimizer, self._mean
        variables = [variable.value for variable in model.trainable_variables]

        @tf.function
        def step(batches: Iterator) -> tf.Tensor:
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            if reduction == "tape":
                gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            else:
                gradients = tape.gradient(loss, variables)
                gradients = hvd.grouped_allreduce(gradients, op=hvd.Average)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            mean.update_state(loss)
            return mean.result()

        self._step = step

    def __call__(self, ended: Ended) -> None:
        self._mean.reset_state()
        batches = iter(self._dataset)
        is_last = False
        while not is_last:
            self._step(batches)
            is_last = ended()
