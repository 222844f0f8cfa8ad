# SPDX-License-Identifier: Apache-2.0
"""Optimizers that differ between workers are refused before a step; what may differ is not."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


@ranks(2)
def test_optimizers_that_differ_are_refused_by_name():
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    own = training.shard(training.data(32), rank, 2)
    strategy = CompressedRing()
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.1, momentum=0.9 - 0.1 * rank))
        layer = keras.layers.Dense(1)
        layer.build((None, 3))
        alone = keras.optimizers.Adam(0.1, clipnorm=1.0 if rank else None)
    differs = r"`momentum` of optimizer is 0.8 on {0} 1, and 0.9 on {0} 0"
    with pytest.raises(ProtocolError, match=differs.format("worker")):
        model.fit(training.rows(own), verbose=0)
    with pytest.raises(ProtocolError, match=differs.format("rank")):
        model.train_on_batch(own[0][:8], own[1][:8])

    def step():
        gradients = [tf.ones_like(one) for one in layer.trainable_variables]
        alone.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    for run in (strategy.run, tf.function(strategy.run)):
        with pytest.raises(ProtocolError, match=r"`clipnorm` of optimizer is 1.0 on rank 1"):
            run(step)

    # A rate that is a variable is the first rank's, whatever the others were made with; and what a
    # callback decides by is of the rows of all.
    seen = []

    class Seeing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([logs["val_loss"], float(self.model.optimizer.learning_rate)])

    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.5 + rank))
    rows = own[0], own[1] if rank == 0 else own[1][::-1]
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=0.01)
    model.fit(
        *own, validation_data=rows, epochs=4, verbose=0, batch_size=8, callbacks=[plateau, Seeing()]
    )
    everyone = primitives.gather_objects(seen, "what callbacks have seen")
    assert everyone[0] == everyone[1]
    assert seen[0][1] == 0.5
    training.assert_same_on_all_ranks(model)


def test_keras_on_another_backend_is_refused(monkeypatch):
    import keras

    import tf_hips

    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(tf_hips.errors.ConfigError, match=r"KERAS_BACKEND.*Received: .*`jax`"):
        tf_hips.CompressedRing()


def test_what_may_differ_and_what_may_not():
    import keras
    import numpy as np

    from tf_hips.errors import ProtocolError
    from tf_hips.strategies.settings import check_settings, settings_of

    schedules = keras.optimizers.schedules

    class Halving(schedules.LearningRateSchedule):
        """One that cannot be saved."""

        def __call__(self, step):
            return 0.5**step

    class Silent(keras.optimizers.SGD):
        def get_config(self):
            raise KeyError("scale")

    class Odd(keras.optimizers.SGD):
        def get_config(self):
            return {**super().get_config(), "own": object(), "dtype": np.dtype("float32")}

    class Noting(keras.optimizers.SGD):
        def __init__(self, path):
            super().__init__(0.1)
            self.path = path

        def get_config(self):
            return {**super().get_config(), "path": self.path}

    def check(first, second):
        check_settings([("a", settings_of([first])), ("b", settings_of([second]))])

    adam, wrapped = keras.optimizers.Adam, keras.optimizers.LossScaleOptimizer
    decays, steps = schedules.ExponentialDecay, schedules.PiecewiseConstantDecay
    for first, second in (
        (adam(0.1, name="one"), adam(0.2, name="two")),
        (adam(0.1, beta_1=0.9), adam(0.1, beta_1=float(np.float32(0.9)))),
        (adam(0.1, weight_decay=1), adam(0.1, weight_decay=1.0)),
        (wrapped(adam(0.1)), wrapped(adam(0.2))),
        (adam(decays(0.1, 10, 0.5, name="one")), adam(decays(0.1, 10.0, np.float32(0.5)))),
        (adam(steps([3, 6], [0.1, 0.2, 0.3])), adam(steps((3, 6), (0.1, 0.2, 0.3)))),
        (adam(lambda: 0.1), adam(lambda: 0.1)),
        (adam(Halving()), adam(Halving())),
        (Silent(0.1), Silent(0.1, momentum=0.9)),
        (Odd(0.1), Odd(0.1)),
    ):
        check(first, second)
    for first, second, told in (
        (adam(0.1), keras.optimizers.SGD(0.1), "optimizer is SGD on b, and Adam on a"),
        (adam(0.1), adam(0.1, beta_1=0.8), "`beta_1` of optimizer is 0.8 on b, and 0.9 on a"),
        (adam(0.1), adam(0.1, use_ema=True), "`use_ema` of optimizer is True on b"),
        (wrapped(adam(0.1)), wrapped(adam(0.1, epsilon=1e-3)), "`epsilon` of optimizer is 0.001"),
        (
            adam(0.1),
            adam(decays(0.1, 10, 0.5)),
            "`learning_rate` of optimizer is ExponentialDecay on b, and a number on a",
        ),
        (
            adam(decays(0.1, 10, 0.5)),
            adam(decays(0.1, 11, 0.5)),
            r"`learning_rate\.decay_steps` of optimizer is 11 on b, and 10 on a",
        ),
        (
            adam(steps([3, 6], [0.1, 0.2, 0.3])),
            adam(steps([3, 7], [0.1, 0.2, 0.3])),
            r"`learning_rate\.boundaries` of optimizer is \[3, 7\] on b, and \[3, 6\] on a$",
        ),
        (
            Noting("/a"),
            Noting("/b"),
            r"`path` of optimizer is /b on b, and /a on a\. Give all workers one value; or, if "
            r"`path` decides about no step .* leave it out of `get_config` of Noting$",
        ),
    ):
        with pytest.raises(ProtocolError, match=told):
            check(first, second)


def test_what_others_say_of_their_optimizers_may_be_anything():
    from tf_hips.strategies.settings import comparable

    deep = []
    for _ in range(10**4):
        deep = [deep]
    told = {"optimizer": {}, "`a` of optimizer": deep, "`b` of optimizer 1": 1, "x of y": 2, "": 3}
    assert comparable(told) == {"`b` of optimizer 1": 1}


def test_below_a_robust_rule_who_has_another_optimizer_is_outvoted():
    from tests.strategies.test_agreeing import RULE, closing_of
    from tf_hips.errors import ProtocolError

    def begins(rule, momentum, *others):
        closing = closing_of(rule, {})
        told = closing._strategy._told
        facts = {**closing._facts, "`momentum` of optimizer": momentum, "loss": "another"}
        for place in others:
            told[place] = [[7, 0, 3], None, [], facts]
        closing.on_train_begin()
        return [(event["what"], event["sites"]) for event in closing._strategy.events]

    assert begins(RULE, 0.9, 1) == [("the optimizers of `fit`", ["b"])]
    assert begins(RULE, 0.0, 1) == []  # whose loss alone is another one
    with pytest.raises(ProtocolError, match=r"0\.0 on this worker, and 0\.9 on most parties"):
        begins(RULE, 0.9, 0, 1, 4)
    with pytest.raises(ProtocolError, match=r"0\.9 on worker 3, and 0\.0 on worker 0"):
        begins("mean", 0.9, 3)


@ranks(2)
def test_members_that_are_workers_may_have_optimizers_of_their_own():
    import keras

    import tf_hips
    from tests.strategies import training
    from tf_hips.comm import primitives

    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        momentum = 0.9 - 0.1 * primitives.rank()
        model = training.build(keras.optimizers.SGD(0.1, momentum=momentum))
    loop = tf_hips.FedAvg(model, strategy, local_steps=2)
    loop.fit(tf_hips.shard(training.data(32), 8), epochs=1, verbose=0)
    weights = [one.tolist() for one in model.get_weights()]
    everyone = primitives.gather_objects(weights, "weights")
    assert everyone[0] == everyone[1]
