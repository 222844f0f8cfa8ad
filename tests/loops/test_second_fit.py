# SPDX-License-Identifier: Apache-2.0
"""What a loop keeps from one `fit` to the next, and what has happened to the model in between."""

import numpy as np
import pytest

from tests.strategies import training

pytestmark = pytest.mark.tf

BATCH = 8


def _model(strategy, optimizer="sgd", more=(), **options):
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, **options), *more, keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.get(optimizer), "mse")
    return model


def test_a_break_between_two_fits_is_no_transfer_of_esync():
    import keras

    from tf_hips.loops import ESync
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _model(strategy)
    loop = ESync(model, strategy)
    now = [0.0]
    loop._watch._clock = loop._paced._clock = lambda: now[0]
    loop._watch.begin()
    steps = []
    hear = loop.hear

    def recorded(meeting):
        steps.append(loop.steps)
        hear(meeting)

    def step(batch, logs=None):
        now[0] += 0.01

    loop.hear = recorded
    clock = keras.callbacks.LambdaCallback(on_train_batch_begin=step)
    x, y = training.data(30 * BATCH)
    for _ in range(2):
        loop.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[clock])
        now[0] += 1000.0
    # Rounds of one worker that has nothing to wait for are of one step.
    assert max(steps) == 2, steps
