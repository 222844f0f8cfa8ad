# SPDX-License-Identifier: Apache-2.0
"""One worker is plain Keras, bit for bit: weights, slots, random states, History."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import training
from tests.strategies.features import feature
from tests.strategies.features.job import BATCH, Job
from tests.strategies.features.models import build_cnn, build_mlp, images, linear, tokens
from tf_hips.strategies import CompressedRing, HierarchicalPS


def _dropout():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    return model


def _embedding():
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            keras.layers.Embedding(20, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(global_clipnorm=0.1), "mse")
    return model


def _half():
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    return build_mlp(keras.optimizers.SGD(0.01))


def _accumulating():
    return build_mlp(
        keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2, use_ema=True, clipnorm=0.1),
        steps_per_execution=2,
    )


_WAYS = {
    "dropout": (_dropout, linear, CompressedRing),
    "batch_normalization": (build_cnn, images, HierarchicalPS),
    "embedding_and_clipping": (_embedding, tokens, CompressedRing),
    "mixed_float16": (_half, linear, HierarchicalPS),
    "accumulation_and_ema": (_accumulating, linear, CompressedRing),
}
# Of the cover's; accumulation in graphs is `gradient_accumulation`.
_EAGERLY = ("dropout", "embedding_and_clipping", "mixed_float16", "accumulation_and_ema")
# Arrays, which Keras shuffles and splits; the others have datasets.
_OF_ARRAYS = ("dropout",)


@feature(alone=True, each=_WAYS)
def one_worker_is_plain_keras(job: Job, parameter):
    build, data, _ = _WAYS[parameter]
    rows = data(job, 4)
    if parameter in _OF_ARRAYS:
        fed = {"x": rows[0], "y": rows[1], "batch_size": BATCH, "validation_split": 0.25}
    else:
        shares = slice(3 * BATCH), slice(3 * BATCH, None)
        data, held = (training.rows([array[share] for array in rows]) for share in shares)
        fed = {"x": data, "validation_data": held}
    results = []
    strategy = _WAYS[parameter][2]("error_feedback(onebit)")
    for scope in (contextlib.nullcontext, strategy.scope):
        keras.utils.set_random_seed(5)
        with scope():
            model = build()
        if parameter in _EAGERLY:
            job.eagerly(model)
        history = model.fit(epochs=2, verbose=0, **fed).history
        states = [np.asarray(variable).tobytes() for variable in model.non_trainable_variables]
        slots = [np.asarray(variable).tobytes() for variable in model.optimizer.variables]
        results.append([[value.tobytes() for value in model.get_weights()], slots, states])
        results[-1].append(history)
    assert results[0] == results[1], (results[0][3], results[1][3])


@feature(alone=True)
def one_worker_in_a_custom_loop(job: Job):
    x, y = training.data(16)
    results = []
    for strategy in (tf.distribute.get_strategy(), HierarchicalPS("onebit")):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            optimizer = keras.optimizers.Adam()

        def step(model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        total = [float(strategy.reduce("SUM", strategy.run(step), axis=None)) for _ in range(3)]
        results.append([total, [value.tobytes() for value in model.get_weights()]])
    assert results[0] == results[1]
