# SPDX-License-Identifier: Apache-2.0
"""What a loop keeps from one `fit` to the next, and what has happened to the model in between."""

import functools
import json

import numpy as np
import pytest

from tests.strategies import training
from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

BATCH = 8


def _model(strategy, optimizer="sgd", more=(), compiled=(), **options):
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8, **options), *more, keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.get(optimizer), "mse", **dict(compiled))
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
    with pytest.raises(ValueError, match=r"not frozen any more. Received: `.*kernel` and 1 more"):
        loop.fit(x, y, batch_size=BATCH, verbose=0)


def test_weights_that_came_after_the_first_fit_are_refused():
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=2)
    x, y = training.data(4 * BATCH)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    with strategy.scope():
        model.layers[0].enable_lora(2)
        model.compile("sgd", "mse")
    told = r"came after the loop's first `fit`.*`enable_lora`.* Received: `.*lora.*` and 1 more"
    with pytest.raises(ValueError, match=told):
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


def _uneven():
    """A loop of two workers whose weights and data differ; and whether all have the same bits."""
    import keras

    from tf_hips.comm import primitives

    rank = primitives.rank()
    keras.utils.set_random_seed(rank)

    def is_equal(model):
        bits = b"".join(one.tobytes() for one in model.get_weights()).hex()
        return len(set(primitives.gather_objects(bits, "weights"))) == 1

    return rank, training.data(6 * BATCH, seed=rank), is_equal


@ranks(2)
def test_early_stopping_of_one_worker_is_that_of_all(tmp_path):
    import keras

    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    class Losses(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = ((1.0, 2.0, 3.0), (2.0, 1.0, 3.0))[rank][epoch]
            seen.append(self.model.get_weights()[0])

    rank, (x, y), is_equal = _uneven()
    seen = []
    strategy = CompressedRing()
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=5, server_optimizer="diloco")
    stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    loop.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Losses(), stop])
    assert is_equal(model)
    if rank == 0:
        np.testing.assert_array_equal(model.get_weights()[0], seen[0])
    np.testing.assert_array_equal(loop.reference[0].numpy(), model.get_weights()[0])

    # Worker 0 alone stops, after two epochs, in the middle of a round. Backups are everybody's.
    for save_freq in ("epoch", 3):
        stop = keras.callbacks.EarlyStopping("loss", patience=1)
        backup = BackupAndRestore(tmp_path / str(save_freq), save_freq=save_freq)
        used = [Losses(), stop, backup]
        history = loop.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=used)
        assert history.epoch == [0, 1]
        assert is_equal(model)
        assert (tmp_path / str(save_freq)).is_dir()


@ranks(2)
def test_weights_that_are_loaded_between_two_fits_are_no_movement():
    import keras

    from tf_hips.errors import ProtocolError
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    rank, (x, y), is_equal = _uneven()
    strategy = CompressedRing()
    normalization = keras.layers.Normalization()
    model = _model(strategy, more=[normalization])
    normalization.adapt(np.eye(8))
    trained = model.trainable_variables
    loop = FedAvg(model, strategy, local_steps=4, server_optimizer="diloco(0.7, 0.0)")
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    loaded = [one.numpy() + 1 for one in trained]
    for is_everywhere in (True, False):
        if is_everywhere or rank == 0:
            for one, value in zip(trained, loaded, strict=True):
                one.assign(value)
        model.optimizer.learning_rate = 0.0
        loop.fit(x, y, batch_size=BATCH, verbose=0)
        for one, expected in zip(trained, loaded, strict=True):
            np.testing.assert_array_equal(one.numpy(), expected)
        loaded = [one + 1 for one in loaded]
    model.optimizer.learning_rate = 0.1
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    assert is_equal(model)

    # What layers learn by `adapt` is no weight: it must be the same.
    normalization.adapt(np.eye(8) + 1)
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    normalization.adapt(rank + np.eye(8))
    with pytest.raises(ProtocolError, match=f"`{normalization.name}` of worker 1 has learned"):
        loop.fit(x, y, batch_size=BATCH, verbose=0)


# Whether the last meeting is that of the end, or one with steps of its own before it.
@pytest.mark.parametrize("local_steps", [pytest.param(3, marks=pytest.mark.slow), 4])
@ranks(2)
def test_the_mean_of_use_ema_is_that_of_all(local_steps):
    import keras

    from tf_hips.comm import primitives
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    _, (x, y), is_equal = _uneven()
    strategy = CompressedRing()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    model = _model(strategy, optimizer)
    loop = FedAvg(model, strategy, local_steps=local_steps, server_optimizer="diloco")
    loop.fit(x, y, batch_size=BATCH, verbose=0)
    mean = optimizer._model_variables_moving_average[0].numpy()
    means = primitives.gather_objects(mean.tolist(), "means")
    assert means[0] != means[1]
    np.testing.assert_allclose(model.get_weights()[0], np.mean(means, 0), rtol=1e-6)
    assert is_equal(model)
    np.testing.assert_array_equal(loop.reference[0].numpy(), model.get_weights()[0])


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_one_worker_with_use_ema_ends_as_under_plain_keras(is_spoilt):
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing, local

    def build(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
            optimizer = keras.optimizers.SGD(rate, use_ema=True, ema_momentum=0.9)
        # The steps of a loop are not compiled by XLA, either.
        return _model(strategy, optimizer, compiled={"jit_compile": False})

    import tensorflow as tf

    strategy = CompressedRing()
    model, alone = build(strategy), build(tf.distribute.get_strategy())
    loop = FedAvg(model, strategy, local_steps=2)
    x, y = training.data(4 * BATCH)
    if is_spoilt:
        y[-1] = np.nan  # in the last step of the last round
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    loop.fit(x, y, **options)
    with local():
        alone.fit(x[: 2 * BATCH] if is_spoilt else x, y[: 2 * BATCH] if is_spoilt else y, **options)
    found, expected = model.get_weights()[0], alone.get_weights()[0]
    if is_spoilt:  # the mean begins anew, with the weights of the last good meeting
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected, atol=0.2)
        assert np.abs(found).max() > 0.1
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["FedAvg", "StreamingDiLoCo"])
def test_a_run_that_was_stopped_in_its_last_meeting_goes_on(kind, tmp_path):
    import keras

    from tf_hips import loops
    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.strategies import CompressedRing

    x, y = training.data(5 * BATCH)
    ended = []
    for seed in (1, 2):
        keras.utils.set_random_seed(seed)
        strategy = CompressedRing()
        model = _model(strategy)
        options = {} if kind == "FedAvg" else {"fragments": 2, "overlap": 1}
        loop = getattr(loops, kind)(
            model, strategy, local_steps=4, server_optimizer="diloco", **options
        )
        # It stays, as that of a run that is killed before its end.
        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        loop.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[backup])
        ended.append(model.get_weights())
        if kind == "StreamingDiLoCo":  # all fragments have had their turn
            assert loop.round % loop._fragments == 0
    for one, other in zip(*ended, strict=True):
        np.testing.assert_array_equal(one, other)


_HALVES = {"local_steps": 4, "fragments": 2}


@pytest.mark.parametrize(
    ("kind", "options", "others", "told"),
    [
        ("FedAvg", {"local_steps": 2}, {"server_optimizer": "fedavgm"}, "is fedavgm.*was fedavg"),
        ("FedAvg", {"local_steps": 2}, {"reset_optimizer": True}, "is True and was False"),
        ("StreamingDiLoCo", _HALVES, {"server_optimizer": "fedavgm"}, "is fedavgm.*was diloco"),
        ("ESync", {}, {"pace": "first_steps=3"}, "`pace` is .*first_steps=3.* and was .*"),
    ],
)
def test_a_backup_is_of_a_loop_with_the_same_settings(kind, options, others, told):
    from tf_hips import loops
    from tf_hips.errors import ProtocolError
    from tf_hips.loops.position import Position
    from tf_hips.strategies import CompressedRing

    def position(**more):
        strategy = CompressedRing()
        return Position(getattr(loops, kind)(_model(strategy), strategy, **options, **more))

    saved, other = position().serialize(), position(**others)
    with pytest.raises(ProtocolError, match=told):
        other.deserialize(saved)
    older = json.loads(saved)  # had none of these facts
    for name in ("`server_optimizer`", "`reset_optimizer`", "`pace`"):
        older["facts"].pop(name, None)
    other.deserialize(json.dumps(older))


def test_a_backup_fits_the_same_function_of_the_round_in_another_process():
    """There it is at another address. Numbers may be NumPy's."""
    from tf_hips.loops import FedAvg
    from tf_hips.loops.position import Position
    from tf_hips.strategies import CompressedRing

    def position():
        def steps(each, round_number):
            return each * (round_number + 1)

        strategy = CompressedRing()
        chosen = {"local_steps": functools.partial(steps, 2), "participation": np.int64(1)}
        return Position(FedAvg(_model(strategy), strategy, **chosen))

    positions = [position(), position()]  # both are there: at two addresses
    positions[1].deserialize(positions[0].serialize())
