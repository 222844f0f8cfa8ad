# SPDX-License-Identifier: Apache-2.0
"""Models with several optimizers: all are seen, saved, restored, and compared."""

import numpy as np
import pytest

from tests.support.ranks import ranks

pytestmark = [pytest.mark.tf, pytest.mark.timeout(180)]

STEPS = 4  # of an epoch


def pair(**options):
    """A GAN in small: two networks, each with an Adam of its own; the compiled one never steps."""
    import keras
    import tensorflow as tf

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.maker = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            self.judge = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])

        def compile(self, first, second, **options):
            super().compile(**options)
            self.pairs = {"maker": (first, self.maker), "judge": [second, self.judge]}

        def call(self, x):
            return self.judge(self.maker(x))

        def train_step(self, data):
            x, y = data
            count = tf.distribute.get_strategy().num_replicas_in_sync
            for optimizer, network in reversed(self.pairs.values()):
                with tf.GradientTape() as tape:
                    wanted = self.judge(y) if network is self.judge else 1.0
                    loss = tf.reduce_mean((wanted - self(x)) ** 2) / count
                weights = network.trainable_variables
                optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    keras.utils.set_random_seed(3)
    model = Pair()
    model.build((None, 4))
    adam = keras.optimizers.Adam
    model.compile(adam(0.01, name="of_maker"), adam(0.02, name="of_judge"), **options)
    return model


def parted(**options):
    """Two optimizers in a `MultiOptimizer`, of which one accumulates over the ends of epochs."""
    import keras

    optimizers = keras.optimizers
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(1, name="second")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    accumulating = optimizers.Adam(0.01, gradient_accumulation_steps=3)
    by_path = optimizers.OptimizerMap(
        optimizers.SGD(0.1, momentum=0.9), {".*first/.*": accumulating}
    )
    model.compile(optimizers.MultiOptimizer(by_path), "mse", metrics=["mae"], **options)
    return model


def chosen(**options):
    """The same, where a function chooses: the parts are known when the optimizer is built."""
    import keras

    model = parted(**options)
    adam, sgd = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)
    multi = keras.optimizers.MultiOptimizer(lambda one: adam if "first" in one.path else sgd)
    model.compile(multi, "mse", **options)
    return model


MODELS = {"pair": pair, "parted": parted, "chosen": chosen}


def everything(model):
    from tf_hips.callbacks.optimizers import optimizers_of

    slots = [slot for one in optimizers_of(model) for slot in one.variables]
    return [np.asarray(one).tobytes().hex() for one in [*model.variables, *slots]]


def rows(rank=0, size=1):
    x = np.random.default_rng(0).random((STEPS * 8, 5)).astype(np.float32)[rank::size]
    return x[:, :4], x[:, 4:]


def train(model, folder=None, stop_at=None, rank=0, size=1):
    """Two epochs, or until a step of the first one."""
    import keras

    from tf_hips.callbacks import BackupAndRestore

    class Preempted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch + 1) == stop_at:
                self.model.stop_training = True

    backup = [] if folder is None else [BackupAndRestore(folder)]
    x, y = rows(rank, size)
    batch = 8 // size
    used = [*backup, Preempted()]
    fit = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=used)
    return fit.history


def test_all_optimizers_of_a_model_in_an_order_that_its_code_decides():
    import keras

    from tf_hips.callbacks.optimizers import name, optimizers_of, parts_of

    model = pair()
    found = [one.name for one in optimizers_of(model)]
    assert found[1:] == ["of_judge", "of_maker"] and found[0].startswith("rm_sprop")
    more = keras.optimizers.SGD(name="more")
    model.a = model.b = more  # behind `pairs` in time, before it by name
    model.itself = [more, {}]
    assert [one.name for one in optimizers_of(model)][1:] == ["more", "of_judge", "of_maker"]
    assert optimizers_of(model) == parts_of(model)

    model = parted()
    assert [type(one).__name__ for one in parts_of(model)] == ["Adam", "SGD"]
    assert name(model.optimizer) == "MultiOptimizer(Adam, SGD)"
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion())
    model.compile(scaled)
    assert parts_of(model) == [scaled.inner_optimizer] and name(scaled) == "Lion"
    assert optimizers_of(keras.Sequential()) == parts_of(keras.Sequential()) == []


BETWEEN, INSIDE = (0, STEPS), (0, 2)
# `parted` accumulates over the end of an epoch; the others stop in one, which says more.
QUICK = {("pair", INSIDE), ("parted", BETWEEN), ("chosen", INSIDE)}


@pytest.mark.parametrize(
    ("kind", "stop_at"),
    [
        pytest.param(
            kind, at, marks=[] if (kind, at) in QUICK else pytest.mark.slow, id=f"{kind}-{told}"
        )
        for kind in MODELS
        for at, told in ((BETWEEN, "between epochs"), (INSIDE, "in an epoch"))
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, kind, stop_at):
    def build():
        # `chosen` goes the way of `parted`, which is trained as a graph, once it is built.
        return MODELS[kind](jit_compile=False, run_eagerly=kind == "chosen")

    model = build()
    history = train(model)
    train(build(), tmp_path, stop_at)
    resumed = build()
    resumed.set_weights([weight * 0 for weight in resumed.get_weights()])
    assert train(resumed, tmp_path) == history
    assert everything(resumed) == everything(model)


def test_what_cannot_go_on_is_refused(tmp_path):
    import keras
    import tensorflow as tf

    train(parted(run_eagerly=True), tmp_path, (0, 2))
    model = parted()
    parts = keras.optimizers.OptimizerMap(keras.optimizers.Lion())
    model.compile(keras.optimizers.MultiOptimizer(parts), "mse", run_eagerly=True)
    told = r"optimizer is MultiOptimizer\(Lion\) and was MultiOptimizer\(Adam, SGD\)"
    with pytest.raises(ValueError, match=told):
        train(model, tmp_path)

    # What the compiled one trains, and no backup has.
    model = parted(run_eagerly=True)
    model.compile(keras.optimizers.SGD(name="of_all"), "mse", run_eagerly=True)
    model.optimizer.apply([tf.ones(2)], [tf.Variable([1.0, 2.0], name="temperature")])
    from tf_hips.callbacks import snapshot

    with pytest.raises(ValueError, match=r"must be a weight of it.*temperature"):
        snapshot.trained_by_each(model)


def test_what_is_no_weight_is_left_out_and_said_so(tmp_path, caplog):
    import keras
    import tensorflow as tf

    def make():
        model = pair(run_eagerly=True)
        model.extra = keras.optimizers.Adam(name="of_extra")
        return model

    model = make()
    model.extra.apply([tf.ones(2)], [tf.Variable([1.0, 2.0], name="temperature")])
    train(model, tmp_path, (0, 2))
    assert caplog.text.count("of_extra trains temperature") == 1
    resumed = make()
    history = train(resumed, tmp_path)
    assert history == train(make())
    assert int(resumed.extra.iterations) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["parted", pytest.param("pair", marks=pytest.mark.slow)])
@ranks(2)
def test_replicas_have_all_optimizers(tmp_path, kind):
    import keras

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    strategy = CompressedRing()

    def make(kind):
        with strategy.scope():
            return MODELS[kind]()

    model = make(kind)
    history = train(model, rank=rank, size=2)
    train(make(kind), tmp_path, (0, 2), rank=rank, size=2)
    resumed = make(kind)
    assert train(resumed, tmp_path, rank=rank, size=2) == history
    assert everything(resumed) == everything(model)

    # A learning rate that one rank alone changes is noticed, whichever optimizer has it.
    model = make("pair")

    class Slower(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.pairs["maker"][0].learning_rate = 0.001

    with pytest.raises(ProtocolError, match=r"`of_maker/learning_rate` of worker 1 is not"):
        x, y = rows(rank, 2)
        model.fit(x, y, verbose=0, callbacks=[Slower()] if rank == 0 else [])
