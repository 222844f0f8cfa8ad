# SPDX-License-Identifier: Apache-2.0
"""Streaming DiLoCo beside plain NumPy, with and without a server, stopped and resumed."""

import contextlib

import numpy as np
import pytest

from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import ranks, run_parties
from tf_hips import log
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf

RATE, FRAGMENTS, INTERVAL, BATCH = 0.05, 2, 3, 4
NUM_STEPS = 14  # the last turn is cut short, with a fragment under way
WHOLE = 12  # steps of whole turns: the last fragment has landed when training ends


def _data(member):
    generator = np.random.default_rng(member)
    x = generator.normal(size=(NUM_STEPS, BATCH, 6)).astype(np.float32)
    y = generator.normal(size=(NUM_STEPS, BATCH, 3)).astype(np.float32) + member
    return x, y


def _expected(first, overlap, mixing, num_steps):
    """Flat weights of both members after each step, and after the end."""
    from tests.loops import oracle

    f = np.float32
    size = -(-21 // FRAGMENTS)

    def flat(weights):
        return np.concatenate([one.reshape(-1) for one in weights] + [np.zeros(1, f)])

    def shaped(vector):
        return [vector[:18].reshape(6, 3), vector[18:21]]

    weights = [flat(first), flat(first)]
    before = flat(first)
    momentum = np.zeros_like(before)
    told, turn, steps, flying = [], 0, 0, None

    def launch(number):
        span = slice(number * size, (number + 1) * size)
        return span, f(0.5) * (before - weights[0])[span] + f(0.5) * (before - weights[1])[span]

    def land(flying, mixing, is_moved=True):
        span, g = flying
        if is_moved:
            momentum[span] = f(0.9) * momentum[span] + g
            g = f(0.7) * (g + f(0.9) * momentum[span])
        before[span] -= g
        for one in weights:
            one[span] = f(1 - mixing) * before[span] + f(mixing) * one[span]

    data = [_data(member) for member in range(2)]
    for step in range(num_steps):
        for member, (x, y) in enumerate(data):
            after = oracle.local(shaped(weights[member]), [(x[step], y[step])], RATE)
            weights[member][:21] = flat(after)[:21]
        steps += 1
        if flying is not None and steps >= overlap:
            land(flying, mixing)
            flying = None
        if steps == INTERVAL:
            flying = launch(turn % FRAGMENTS)
            turn, steps = turn + 1, 0
            if not overlap:
                land(flying, mixing)
                flying = None
        told.append([one[:21].copy() for one in weights])
    if flying is not None:
        land(flying, mixing)
    while turn % FRAGMENTS:
        land(launch(turn % FRAGMENTS), mixing)
        turn += 1
    for number in range(FRAGMENTS):  # the last one has had its turn when no steps follow
        land(launch(number), 0.0, is_moved=number < FRAGMENTS - 1 or steps > 0)
    return told, before[:21]


class _StopError(Exception):
    pass


def _train(strategy, member, overlap, *, folder=None, stop_at=None, num_steps=NUM_STEPS):
    """Flat weights after each step, and after the end."""
    import keras

    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.loops import StreamingDiLoCo

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(RATE), "mse")
    first = model.get_weights()
    loop = StreamingDiLoCo(
        model,
        strategy,
        local_steps=FRAGMENTS * INTERVAL,
        fragments=FRAGMENTS,
        overlap=overlap,
    )
    told = []

    def flat():
        return np.concatenate([one.reshape(-1) for one in model.get_weights()])

    def look(batch, logs=None):
        told.append(flat())
        if batch + 1 == stop_at:
            raise _StopError

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=look)]
    if folder is not None:
        callbacks.append(BackupAndRestore(folder, save_freq=2))
    x, y = (one[:num_steps].reshape(-1, one.shape[-1]) for one in _data(member))
    options = {"batch_size": BATCH, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    if stop_at is not None:
        with pytest.raises(_StopError):
            loop.fit(x, y, **options)
    else:
        loop.fit(x, y, **options)
    return first, told, flat()


def _compare(member, overlap, found, num_steps=NUM_STEPS):
    first, told, last = found
    expected, end = _expected(first, overlap, 0.5 if overlap else 0.0, num_steps)
    for mine, theirs in zip(told, expected, strict=True):
        np.testing.assert_allclose(mine, theirs[member], rtol=0, atol=2e-6)
    np.testing.assert_allclose(last, end, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(2, NUM_STEPS), (0, WHOLE)], id="quick"),
        # The end of a cut turn, as with an overlap; the landings, as of whole turns.
        pytest.param([(0, NUM_STEPS)], id="cut at once", marks=pytest.mark.slow),
    ],
)
@ranks(2)
def test_fragments_in_one_group(cases):
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    for overlap, num_steps in cases:
        found = _train(CompressedRing(), rank, overlap, num_steps=num_steps)
        _compare(rank, overlap, found, num_steps)
        assert len(set(primitives.gather_objects(found[2].tobytes().hex()))) == 1
    _look_at_who_counts(CompressedRing(), rank)
    _look_at_what_is_dropped(CompressedRing("error_feedback(onebit)"), rank)


def _look_at_what_is_dropped(strategy, member):
    """Gradients of the first fragment alone: what its encoding drops does not move the second."""
    import keras
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.loops import StreamingDiLoCo

    with strategy.scope():
        layer = keras.layers.Dense(6, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        rates = np.array([1, 2, 6, 0, 0, 0], np.float32)
        model.compile(
            keras.optimizers.SGD(1.0), lambda y, out: -keras.ops.sum(out * rates, axis=-1)
        )
    options = {"fragments": FRAGMENTS, "server_optimizer": "fedavg"}
    loop = StreamingDiLoCo(model, strategy, local_steps=2, **options)
    x = np.full((6, 1), 1.0 + member, np.float32)
    loop.fit(x, x, batch_size=1, verbose=0, shuffle=False)
    moved = model.get_weights()[0][0]
    np.testing.assert_array_equal(moved[3:], 0.0)
    # The mean of 6 and of 12 steps, but for what has not been sent yet.
    kept = [
        tf.reshape(variable, [-1])[:3]
        for variable in strategy.state.variables
        if "residual_0" in variable.name
    ]
    left = primitives.allreduce(tf.add_n(kept), "left").numpy()
    np.testing.assert_allclose(moved[:3] - left, 9.0 * rates[:3], rtol=1e-5)
    # No two sums of a turn are numbered alike: they would draw the same noise.
    assert len({int(one.step.numpy()) for one in loop._in_party}) == FRAGMENTS


def _look_at_who_counts(strategy, member):
    """A constant gradient: who has no data left does not slow the others down."""
    import keras

    from tf_hips.loops import StreamingDiLoCo

    with strategy.scope():
        layer = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.1), lambda y, out: -keras.ops.mean(out, axis=-1))
    options = {"fragments": FRAGMENTS, "server_optimizer": "fedavg"}
    loop = StreamingDiLoCo(model, strategy, local_steps=4, **options)
    x = np.ones((16 if member else 4, 1), np.float32)
    loop.fit(x, x, batch_size=1, verbose=0, shuffle=False)
    # In the first fragment's second turn one has made two steps, the other four; then it is alone.
    np.testing.assert_allclose(model.get_weights()[0], [[15 * 0.05, 16 * 0.05]], rtol=1e-5)
    # And a `fit` without an epoch moves nothing.
    before = model.get_weights()[0]
    loop.fit(x, x, batch_size=1, verbose=0, epochs=0)
    np.testing.assert_array_equal(model.get_weights()[0], before)


def _train_in_parties(folder):
    from tf_hips.strategies import HierarchicalPS

    runs = _configs()
    member = SITES.index(runs[0].uplink.site)
    exact = HierarchicalPS(config=runs[0])
    found = _train(exact, member, 2)
    exact.close()
    _compare(member, 2, found)
    ends = []
    for run in runs[1:]:
        strategy = HierarchicalPS("error_feedback(onebit)", downlink=None, config=run)
        is_stopped = run.run == "stopped"
        folder_of = None if run.run == "undisturbed" else folder / "backup"
        # Stopped after 10 steps, one of them since a launch: the backup has a fragment under way.
        found = _train(strategy, member, 2, folder=folder_of, stop_at=11 if is_stopped else None)
        strategy.close(reason="stopped" if is_stopped else None)
        ends.append(found)
    (_, undisturbed, last), _, (_, resumed, other) = ends
    np.testing.assert_array_equal(other, last)
    assert len(resumed) == 4
    for mine, theirs in zip(resumed, undisturbed[10:], strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_fragments_over_parties(tmp_path):
    with contextlib.ExitStack() as stack:
        configs = []
        rules = {"exact": None, "undisturbed": "mean", "stopped": "mean", "resumed": "mean"}
        for run, rule in rules.items():
            server = stack.enter_context(serving(run, rule=rule))
            configs.append(write_configs(tmp_path, run, f"127.0.0.1:{server.port}"))
        run_parties(
            _train_in_parties,
            {"folder": tmp_path},
            [1, 1],
            party_environments(*configs),
            deadline_s=90,
        )


WHO_COUNTS = {"counts_in_mean": "mean", "counts_in_sum": None}
SPOILT = (2, 5)  # steps of one party whose loss is NaN: before the second turn and the third


def _train_spoilt(folder):
    """Saves flat weights: twice the first ones, then those before and after each meeting."""
    import keras

    from tf_hips.loops import StreamingDiLoCo
    from tf_hips.strategies import HierarchicalPS

    for run in _configs():
        member = SITES.index(run.uplink.site)
        keras.utils.set_random_seed(3)
        strategy = HierarchicalPS(config=run, downlink=None)
        if run.run in WHO_COUNTS:
            _look_at_who_counts(strategy, member)
            strategy.close()
            continue
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(RATE, momentum=0.9), "mse")
        loop = StreamingDiLoCo(
            model, strategy, local_steps=4, fragments=FRAGMENTS, server_optimizer="fedavg(1.0)"
        )

        def flat(model=model):
            return np.concatenate([one.reshape(-1) for one in model.get_weights()])

        told, meet = [[flat(), flat()]], loop.meet

        def recorded(*, ends=False, told=told, meet=meet, flat=flat):
            before = flat()
            meet(ends=ends)
            told.append([before, flat()])

        loop.meet = recorded
        x, y = _data(member)
        if member:
            y[list(SPOILT), 0] = np.nan
        x, y = (one[:8].reshape(-1, one.shape[-1]) for one in (x, y))
        loop.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False)
        assert all(np.isfinite(one.numpy()).all() for one in model.optimizer.variables)
        strategy.close()
        np.save(folder / f"{run.run}-{member}.npy", told)
        events = [one for one in log.read_events(run.log_dir) if one["site"] == run.uplink.site]
        rounds = [one["seconds"] for one in events if one["event"] == "round"]
        assert len(rounds) == 6 and min(rounds) > 0
        assert strategy.seconds_in_rounds == pytest.approx(sum(rounds))


@pytest.mark.timeout(120)
def test_a_fragment_that_is_no_number_is_refused_and_named(tmp_path):
    rules = {"averaged": "mean", "added": None}
    with contextlib.ExitStack() as stack:
        configs = []
        for run, rule in {**rules, **WHO_COUNTS}.items():
            server = stack.enter_context(serving(run, rule=rule))
            address, logs = f"127.0.0.1:{server.port}", str(tmp_path / run)
            configs.append(write_configs(tmp_path, run, address, log_dir=logs))
        environments = party_environments(*configs)
        run_parties(_train_spoilt, {"folder": tmp_path}, [1, 1], environments, deadline_s=90)
    second = slice(11, 21)  # the fragment of the second turn
    for run in rules:
        told = [np.load(tmp_path / f"{run}-{member}.npy") for member in range(2)]
        assert np.isfinite(told[0]).all() and np.isfinite(told[1][:, 1]).all()
        assert np.isnan(told[1][2:4, 0]).any(axis=1).all()
        # A mean leaves the spoilt one out; a sum has added its zeros to the other's share.
        before, own = told[0][0][0][second], told[0][2][0][second]
        expected = own if run == "averaged" else 0.5 * (before + own)
        for one in told:
            np.testing.assert_allclose(one[2][1][second], expected, rtol=0, atol=1e-6)
        refused = sorted(
            (one["number"], one["site"], one["who"])
            for one in log.read_events(tmp_path / run)
            if one["event"] == "update_refused"
        )
        # Before the third turn all meet, and all hear of it.
        who = f"party `{SITES[1]}`"
        heard = [(2, site, who) for site in sorted(SITES)]
        assert refused == [(1, SITES[1], who), *heard]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"local_steps": 4.0, "fragments": 2}, "`local_steps` must be an integer"),
        ({"local_steps": 4, "fragments": 0}, "`fragments` must be at least 1"),
        ({"local_steps": 4, "fragments": 2, "overlap": -1}, "`overlap` must be at least 0"),
        ({"local_steps": 4, "fragments": 2, "mixing": "0"}, "`mixing` must be a number"),
        ({"local_steps": 5, "fragments": 2}, "must be a multiple of `fragments`"),
        ({"local_steps": 4, "fragments": 2, "overlap": 2}, "less than `local_steps / fragments`"),
        ({"local_steps": 4, "fragments": 2, "mixing": 1.0}, "`mixing` must be from 0"),
        (
            {"local_steps": 4, "fragments": 2, "server_optimizer": "adam"},
            "a rule that counts steps",
        ),
    ],
)
def test_fragments_that_are_refused(options, told):
    import keras

    from tf_hips.loops import StreamingDiLoCo
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    with pytest.raises((ValueError, TypeError, ConfigError), match=told):
        StreamingDiLoCo(model, strategy, **options)
