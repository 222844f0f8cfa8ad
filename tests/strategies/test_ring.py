# SPDX-License-Identifier: Apache-2.0
"""`CompressedRing` under Keras, where `features` leave it out: ranks with steps of their own stay
equal, sums are neither dropped nor mixed, mistakes are errors on all ranks.
"""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


@ranks(2, deadline_s=240)
def test_two_ranks_stay_equal_in_unequal_steps(tmp_path):
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips import config, log
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing, fingerprint

    rank = primitives.rank()
    own = training.shard(training.data(160), rank, 2)
    strategy = CompressedRing(config=config.Run(log_dir=str(tmp_path)))
    assert strategy.num_replicas_in_sync == 2

    # Each rank has its own seed, and rank 1 a shorter last batch, which only it traces; two models
    # in turn, whose sums must not meet.
    keras.utils.set_random_seed(rank)
    unequal = [array[: 40 - 3 * rank] for array in own]
    with strategy.scope():
        first = training.build(keras.optimizers.AdamW(), steps_per_execution=3)
        second = training.build("adam")
    losses = []
    for _ in range(2):
        losses += training.fit(first, unequal, epochs=2)
        training.fit(second, [array[:16] for array in own])
    assert losses[-1] < losses[0]
    training.assert_same_on_all_ranks(first)
    training.assert_same_on_all_ranks(second)
    assert fingerprint(first) != fingerprint(second)

    # Eagerly, with gradients that are added up before.
    with strategy.scope():
        model = training.build(
            keras.optimizers.AdamW(gradient_accumulation_steps=2), run_eagerly=True
        )
    history = training.fit(model, unequal, epochs=2)
    assert history[-1] < history[0]
    training.assert_same_on_all_ranks(model)
    events = [event for event in log.read_events(tmp_path) if event["event"] == "fingerprint"]
    assert {event["value"] for event in events} >= {fingerprint(first), fingerprint(model)}

    # A custom loop: a model that is built in the first step.
    with strategy.scope():
        lazy = keras.Sequential([keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam()

    def step(features, targets):
        with tf.GradientTape() as tape:
            # A Python condition on a tensor: only AutoGraph makes this work in a graph.
            scale = tf.constant(1.0)
            if tf.reduce_sum(features) > -1e9:
                scale = tf.constant(0.5)
            loss = scale * tf.reduce_mean((lazy(features) - targets) ** 2) / 2
        gradients = tape.gradient(loss, lazy.trainable_variables)
        optimizer.apply_gradients(zip(gradients, lazy.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed(features, targets):
        return strategy.run(step, (features, targets))

    losses = [float(distributed(*(tf.constant(array[:8]) for array in own))) for _ in range(3)]
    assert losses[-1] < losses[0]
    lazy.optimizer = optimizer
    training.assert_same_on_all_ranks(lazy)

    # TensorFlow must neither drop a sum whose result one rank ignores, nor compute one of constants
    # once for all: then the ranks would wait for each other. Here rank 0's gradients are constants.
    with strategy.scope():
        weight = tf.Variable(tf.zeros([4]))
        descent = keras.optimizers.SGD(1.0)

    # A constant on rank 0; on rank 1 nobody can know it.
    hidden = tf.Variable(2.0)

    def constant_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight) * (1.0 if rank == 0 else hidden)
        descent.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    @tf.function
    def ignoring():
        strategy.run(constant_step)
        total = strategy.reduce("SUM", tf.constant(rank + 1.0), axis=None)
        return total if rank == 0 else tf.constant(3.0)

    for _ in range(3):
        assert float(ignoring()) == 3.0
        # What one rank makes for itself between two steps holds up nobody.
        if rank == 0:
            with strategy.scope():
                best = tf.Variable(0.0)
            assert float(best) == 0.0
    np.testing.assert_array_equal(weight.numpy(), np.full(4, -9.0))


@ranks(2)
def test_mistakes_are_errors_on_all_ranks():
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import tf_hips
    from tests.strategies import training
    from tf_hips import config
    from tf_hips.comm import primitives
    from tf_hips.errors import ConfigError, NonFiniteError, ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    own = training.shard(training.data(), rank, 2)
    with pytest.raises(ValueError, match="nonfinite='skip'"):
        CompressedRing(nonfinite="skip")
    with pytest.raises(ValueError, match="`compression` must not be mixed"):
        CompressedRing("mixed(onebit, below=10)")
    for way in ({"comp_threshold": 10}, {"topology": "ring"}):
        with pytest.raises(ValueError, match="must be left out with powersgd"):
            CompressedRing("error_feedback(powersgd)", **way)
    joined = config.Run(uplink=config.Uplink("hub:7070", "west"))
    advice = r"HierarchicalPS, or `tf-hips run --parties 1` without .*--compression.*`west`"
    with pytest.raises(ConfigError, match=advice):
        CompressedRing(config=joined)  # it would train a model for itself
    strategy = CompressedRing()

    # Rank 1 has one unit more in the first layer.
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(4 + rank, name=f"of_rank_{rank}"),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", "mse")
    with pytest.raises(
        ProtocolError,
        match=r"variable 0 is .*float32\[6, 4\] on rank 0 and .*float32\[6, 5\] on rank 1",
    ):
        training.fit(model, own)

    # Rank 1 has a layer less.
    with strategy.scope():
        layers = [keras.layers.Dense(3) for _ in range(2 - rank)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
    with pytest.raises(ProtocolError, match=r"variable 2 is .*kernel.* on rank 0 and .*iteration"):
        training.fit(model, own)

    # Rank 1 hands over gradients of equal shapes in another order, as of a set of names.
    order = [0, 2, 1] if rank else [0, 1, 2]
    for around in (tf.function, lambda step: step):
        own_loop = CompressedRing()
        with own_loop.scope():
            weights = [tf.Variable(tf.fill([4], float(k)), name=f"weight{k}") for k in range(3)]
            descent = keras.optimizers.SGD(1.0)
            descent.build(weights)

        def hand_over(order, weights=weights, descent=descent):
            descent.apply_gradients([(tf.fill([4], 1.0 + k), weights[k]) for k in order])

        with pytest.raises(
            ProtocolError,
            match=r"in one order.* number 1 of 3 is weight1 on rank 0 and weight2 on rank 1",
        ):
            around(lambda run=own_loop.run, hand_over=hand_over: run(hand_over, (order,)))()
    # Or fewer of them.
    with pytest.raises(
        ProtocolError, match=r"of float32\[4\], float32\[4\] on rank 0 and of float"
    ):
        own_loop.run(hand_over, ([0] if rank else [0, 1],))
    own_loop.run(hand_over, ([1, 2, 0],))
    assert [float(one[0]) for one in weights] == [-2.0, -3.0, -4.0]

    # Built outside of the scope: would train alone, silently.
    outside = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    for optimizer in ("sgd", "adam"):
        with strategy.scope(), pytest.raises(ValueError, match=r"built inside `strategy\.scope"):
            outside.compile(optimizer, "mse")

    # Never in the scope, or with an optimizer of another one.
    outside.compile("sgd", "mse")
    with pytest.raises(ProtocolError, match="without the strategy of this process"):
        training.fit(outside, own)
    with CompressedRing().scope():
        of_another = keras.optimizers.SGD()
    with strategy.scope():
        model = training.build(of_another)
    with pytest.raises(ValueError, match="optimizer made under CompressedRing"):
        training.fit(model, own)

    # An argument that `fit` does not have.
    with pytest.raises(TypeError, match=r"fit\(\) got an unexpected keyword argument 'verbos'"):
        model.fit(*own, verbos=0)

    # Compiled again outside of it, or not at all.
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"call `compile` inside `strategy\.scope\(\)`, each time"):
        training.fit(model, own)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    not_compiled = r"must be compiled inside `strategy\.scope\(\)`.*`compile` was not called"
    for train in (training.fit, lambda model, own: model.train_on_batch(*own)):
        with pytest.raises(ValueError, match=not_compiled):
            train(model, own)

    # Layers that get variables of their own outside of the scope, under an optimizer with slots.
    with strategy.scope():
        model = training.build()
    model.layers[0].enable_lora(2)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match=r"inside `strategy\.scope\(\)`.*lora_kernel_a"),
    ):
        model.compile("adam", "mse")
        training.fit(model, own)

    # A training step that passes by the optimizer.
    class Lonely(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, inputs):
            features, targets = inputs
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(features) - targets) ** 2)
            for variable, gradient in zip(
                self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
            ):
                variable.assign_sub(0.1 * gradient)
            return {"loss": loss}

    with strategy.scope():
        model = Lonely()
        model.compile("sgd", "mse")
    with pytest.raises(ProtocolError, match="must reduce its gradients"):
        training.fit(model, own)

    # Scales of float8 are no gradients: each worker would have its own, and other weights.
    with strategy.scope():
        model = training.build()
        model.quantize("float8")
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"float8.*overwrite_with_gradient=True"):
        training.fit(model, own)

    # A loop of one's own that forgets `strategy.run`: each worker would train alone, silently.
    with strategy.scope():
        model = training.build()
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    before = model.get_weights()
    for place in (contextlib.nullcontext(), strategy.scope()):
        with place, pytest.raises(ProtocolError, match=r"trained inside `strategy\.run"):
            model.optimizer.apply(gradients, model.trainable_variables)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    with tf_hips.local():
        model.optimizer.apply(gradients, model.trainable_variables)
    assert (model.get_weights()[0] != before[0]).all()

    with strategy.scope():
        model = training.build(jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=True"):
        training.fit(model, own)

    # Rank 1 has a batch less, or goes on for longer: said before the first step, on both.
    with strategy.scope():
        model = training.build()
    for rows, epochs, told in (
        (len(own[0]) - 8 * rank, 1, "same number of steps.*worker 0: 4 .*worker 1: 3 "),
        (len(own[0]), 1 + rank, "same epochs.*worker 0: epochs 0 to 1; worker 1: epochs 0 to 2"),
    ):
        with pytest.raises(ValueError, match=told):
            training.fit(model, [array[:rows] for array in own], epochs=epochs)
    with pytest.raises(ValueError, match="MEAN is taken must be of a floating type"):
        strategy.reduce("MEAN", tf.constant(3), axis=None)

    # "zero" drops what is not finite, "propagate" lets it through, to all ranks alike.
    spoiled = [array.copy() for array in own]
    if rank == 1:
        spoiled[1][3] = np.inf
    for mode, is_finite in (("zero", True), ("propagate", False)):
        tolerant = CompressedRing(nonfinite=mode)
        with tolerant.scope():
            model = training.build(run_eagerly=True)
        training.fit(model, spoiled)
        training.assert_same_on_all_ranks(model)
        assert np.isfinite(model.get_weights()[0]).all() == is_finite

    # "raise", last because it ends the job: rank 1 says what it has, rank 0 what became of the sum.
    with strategy.scope():
        model = training.build()
    if rank == 1:
        with pytest.raises(
            NonFiniteError, match=r"Gradient 0 \(.*kernel, shape \[6, 16\]\) and 3 more of rank 1"
        ):
            training.fit(model, spoiled)
    else:
        with pytest.raises(NonFiniteError, match="summed over all workers, on rank 0"):
            training.fit(model, spoiled)
    primitives.shutdown()


@ranks(1)
def test_one_worker_is_plain_keras_bit_for_bit():
    import contextlib

    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import NonFiniteError
    from tf_hips.strategies import CompressedRing, fingerprint

    assert primitives.size() == 1
    x, y = training.data()
    results = []
    for scope in (
        contextlib.nullcontext,
        lambda: CompressedRing().scope(),
        lambda: CompressedRing("error_feedback(onebit)").scope(),
        lambda: CompressedRing(robust="krum(f=1)").scope(),  # which needs five rows
    ):
        keras.utils.set_random_seed(5)
        with scope():
            model = training.build("adam", run_eagerly=True)
        training.fit(model, [x, y])
        results.append(fingerprint(model))
    assert len(set(results)) == 1

    y[3] = float("nan")
    with CompressedRing().scope():
        model = training.build()
    with pytest.raises(NonFiniteError, match=r"Gradient \d \(.*of rank 0 must .* in step \d$"):
        training.fit(model, [x, y])
    assert int(model.optimizer.iterations.numpy()) <= 1, "no step follows the one that fails"

    # Clipping by a norm of all gradients comes after the look at them: it would spread the NaN.
    for mode in ("raise", "zero"):
        strategy = CompressedRing(nonfinite=mode)
        with strategy.scope():
            weights = [tf.Variable([1.0]), tf.Variable([1.0])]
            optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.5)

        def step(optimizer=optimizer, weights=weights):
            optimizer.apply([tf.constant([4.0]), tf.constant([float("nan")])], weights)

        if mode == "raise":
            with pytest.raises(NonFiniteError, match=r"Gradient 1 "):
                strategy.run(step)
        else:
            strategy.run(step)
            assert [float(weight[0]) for weight in weights] == [0.5, 1.0]


@ranks(2)
def test_compressed_training_keeps_replicas_equal():
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    own = training.shard(training.data(80), rank, 2)
    ways = [
        ("error_feedback(terngrad(bitwidth=2))", {"steps_per_execution": 3}),
        ("terngrad(bitwidth=4)", {"run_eagerly": True}),
    ]
    for compression, options in ways:
        keras.utils.set_random_seed(rank)
        strategy = CompressedRing(compression)
        with strategy.scope():
            model = training.build(keras.optimizers.SGD(0.05), **options)
        # Rank 1 traces its shorter last batch alone; the residuals stay where they are.
        history = training.fit(model, [array[: 40 - 3 * rank] for array in own], epochs=3)
        assert history[-1] < 0.9 * history[0], (compression, history)
        training.assert_same_on_all_ranks(model)

    with pytest.raises(ValueError, match="did you mean 'onebit'"):
        CompressedRing("onebitt")
    assert np.isfinite(model.get_weights()[0]).all()
