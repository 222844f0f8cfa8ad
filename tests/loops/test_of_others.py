# SPDX-License-Identifier: Apache-2.0
"""A party that takes another's backup in the middle of a round sends what it has moved itself."""

import numpy as np
import pytest

pytestmark = pytest.mark.tf

LOCAL_STEPS = 4
DONE = 3  # of these by the other party, when its backup was made


def _loop(seed, *callbacks):
    """A loop that has not begun, its model, and what trains it."""
    import keras

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = training.build(keras.optimizers.SGD(0.05))
    # Not the mean of one, which is taken as it is.
    loop = FedAvg(model, strategy, local_steps=LOCAL_STEPS, server_optimizer="diloco(0.5)")
    told = []
    outgoing = loop.outgoing

    def recorded(moved, meeting, place):
        told.append((moved, [one.numpy() for one in loop.trained], meeting.parties[0][0]))
        return outgoing(moved, meeting, place)

    loop.outgoing = recorded
    data = training.data(64, seed=seed)

    def fit():
        loop.fit(*data, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))

    return strategy, model, fit, told


@pytest.mark.parametrize("is_of_others", [False, True])
def test_the_first_update_after_another_ones_backup(tmp_path, is_of_others):
    import keras
    import tensorflow as tf

    class Backs(keras.callbacks.Callback):
        weights = None

        def on_train_batch_begin(self, batch, logs=None):
            if batch == DONE:
                state = strategy.state.of_model(model)
                tf.train.Checkpoint(state=state).write(str(tmp_path / "state"))
                self.weights = model.get_weights()

    backs = Backs()
    strategy, model, fit, _ = _loop(1, backs)
    first = model.get_weights()
    fit()

    strategy, model, fit, told = _loop(2)
    model.set_weights(backs.weights)
    if is_of_others:
        strategy.state.take_from_others()
    tf.train.Checkpoint(state=strategy.state.of_model(model)).read(str(tmp_path / "state"))
    fit()

    moved, weights, own = told[0]
    begin = backs.weights if is_of_others else first
    for one, before, after in zip(moved, begin, weights, strict=True):
        np.testing.assert_allclose(one, before - after, atol=1e-6)
    assert np.abs(moved[0]).max() > 1e-4
    steps = LOCAL_STEPS - DONE
    if not is_of_others:
        steps = LOCAL_STEPS
    assert (own.steps, own.samples) == (steps, 8 * steps)
    # The meeting ends it: what is sent later is counted from there, as ever.
    assert told[1][2].steps == LOCAL_STEPS
    moved, weights, _ = told[1]
    assert all(np.isfinite(one).all() for one in moved)
