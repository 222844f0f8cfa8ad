# SPDX-License-Identifier: Apache-2.0
"""What a script does within a `fit` of a loop, by callbacks and by training steps of its own."""

import pytest

from tests.strategies import training

pytestmark = pytest.mark.tf

BATCH = 8


def _compiled(optimizer="sgd", **options):
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model.compile(keras.optimizers.get(optimizer), "mse", **options)
    return model


def _loop(model_of=_compiled, **options):
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = model_of()
    return FedAvg(model, strategy, **{"local_steps": 2, **options})


@pytest.mark.parametrize(("is_compiled", "steps_per_execution"), [(False, 1), (True, 3)])
def test_a_loop_goes_on_meeting_when_a_callback_makes_the_train_function(
    is_compiled, steps_per_execution
):
    import keras

    def freeze(epoch, logs=None):
        if epoch != 1:
            return
        model.layers[0].trainable = False
        kernels.append(model.layers[0].get_weights()[0])
        if is_compiled:
            with model.distribute_strategy.scope():
                model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
        model.make_train_function(force=not is_compiled)

    kernels = []
    loop = _loop(lambda: _compiled(steps_per_execution=steps_per_execution))
    model = loop.model
    x, y = training.data(6 * BATCH)
    options = {"batch_size": BATCH, "epochs": 4, "verbose": 0}
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=freeze)
    loop.fit(x, y, **options, callbacks=[watch])
    assert loop.round == 13  # of two steps, and that of the end
    assert (model.layers[0].get_weights()[0] == kernels[0]).all()
    # Afterwards the model has its own ones.
    assert "make_train_function" not in vars(model)
    assert model.train_function != loop._executions._run
