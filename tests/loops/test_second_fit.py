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


def test_layers_that_are_not_frozen_any_more_are_refused():
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _model(strategy, trainable=False)
    loop = FedAvg(model, strategy, local_steps=2)
    x, y = training.data(4 * BATCH)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    model.layers[0].trainable = True
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="not frozen any more. Received: `.*kernel` and 1 more"):
        loop.fit(x, y, batch_size=BATCH, verbose=0)


def test_another_optimizer_has_first_slots_of_its_own():
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=2, reset_optimizer=True)
    x, y = training.data(4 * BATCH)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.1), "mse")
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    assert not any(one.numpy().any() for one in model.optimizer.variables[2:])


def test_batches_by_hand_are_refused():
    from tf_hips.errors import ProtocolError
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=2)
    x, y = training.data(2 * BATCH)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="the loop's `fit`"):
            model.train_on_batch(x, y)
        loop.fit(x, y, batch_size=BATCH, verbose=0)
