# SPDX-License-Identifier: Apache-2.0
"""Two tiers of meetings, updates that are refused, uneven data; rules that do not wait."""

import contextlib
import json

import numpy as np
import pytest

from tests.strategies.plain_party import PlainParty
from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import run_parties
from tf_hips import config, log
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf

RULES = {"hfa": "fedavg(1.0)", "compat": None, "uneven": "mean"}


def _linear(strategy, optimizer, more=(), **options):
    import keras

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *more, keras.layers.Dense(3)])
        model.compile(keras.optimizers.get(optimizer), "mse", **options)
    return model


def _meetings(loop, *data, **options):
    """What this worker had before each meeting, and had afterwards."""
    told = [[loop.model.get_weights()] * 2]
    meet = loop.meet

    def recorded(*, ends=False):
        before = loop.model.get_weights()
        meet(ends=ends)
        told.append([before, loop.model.get_weights()])

    loop.meet = recorded
    loop.fit(*data, verbose=0, shuffle=False, **options)
    return [[[one.tolist() for one in part] for part in pair] for pair in told]


def _hfa(run, worker):

    from tests.strategies import training
    from tf_hips.loops import HFA
    from tf_hips.strategies import HierarchicalPS

    strategy = HierarchicalPS(config=run)
    model = _linear(
        strategy, {"class_name": "SGD", "config": {"learning_rate": 0.1, "momentum": 0.9}}
    )
    loop = HFA(model, strategy, local_steps=3, party_rounds=2)
    befores, next_round = [], loop.next_round

    def noted():
        befores.append(loop._before)
        next_round()

    loop.next_round = noted
    told = _meetings(loop, *training.data(12 * 8, seed=worker), batch_size=8)
    # Rows that count in the next mean over parties, with those since: of no meeting before.
    assert befores[:4] == [3 * 8, 0, 3 * 8, 0]
    assert np.isfinite(model.evaluate(*training.data(16), verbose=0))
    strategy.close()
    return told


def _compat(run, worker):

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS

    strategy = HierarchicalPS(config=run)
    model = _linear(strategy, {"class_name": "SGD", "config": {"learning_rate": 0.1}})
    loop = FedAvg(model, strategy, local_epochs=1, compat=True)
    # An epoch is one of local data: workers have different numbers of rows.
    told = _meetings(loop, *training.data((worker + 2) * 8, seed=worker), batch_size=8, epochs=2)
    strategy.close()
    return told


def _uneven(run, worker):
    """A party has less data, a NaN among them, and Adam, which would keep it."""
    import keras

    from tests.strategies import training
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    is_south = run.uplink.site == "south"
    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    model = _linear(strategy, "adam", more=[keras.layers.BatchNormalization()])
    loop = FedAvg(model, strategy, local_steps=2)
    x, y = training.data((8 if is_south else 12) * 8, seed=worker)
    if is_south:
        y[3 * 8] = np.nan  # in the second round
    told = _meetings(loop, x, y, batch_size=8)
    # 12 steps are 6 rounds, and 8 are 4; who has ended takes what comes down.
    assert loop.round == 7
    assert all(np.isfinite(one).all() for one in model.get_weights())
    assert all(np.isfinite(one.numpy()).all() for one in model.optimizer.variables)
    if is_south:
        before, after = told[2]
        assert not np.isfinite(before[0]).all()
        assert np.isfinite(after[0]).all()
        assert np.isfinite(told[3][0][0]).all()
    strategy.close()
    # Statistics of layers, too, are averaged over parties in each meeting, not at the end alone.
    return [fingerprint(model), *(after for _, after in told[1:])]


def _train(folder, worker_counts):
    from tf_hips.comm import primitives

    runs = _configs()
    child = SITES.index(runs[0].uplink.site)
    worker = sum(worker_counts[:child]) + primitives.rank()
    told = [one(run, worker) for one, run in zip((_hfa, _compat, _uneven), runs, strict=True)]
    (folder / f"{worker}.json").write_text(json.dumps(told))


def _arrays(told):
    return [[[np.array(one, np.float32) for one in part] for part in pair] for pair in told]


def _check_hfa(workers):
    """GeoMX' HFA: means in the party; every second time over parties, from the milestone."""
    f = np.float32
    milestone = workers[0][0][1]
    for number in range(4):
        news = []
        for party in (workers[:2], workers[2:]):
            start = party[0][number][1]
            shares = [f(1 / len(party))] * len(party)
            moved = [
                [a - b for a, b in zip(start, told[number + 1][0], strict=True)] for told in party
            ]
            mean = [
                sum((share * one for share, one in zip(shares, each, strict=True)), f(0))
                for each in zip(*moved, strict=True)
            ]
            news.append([a - b for a, b in zip(start, mean, strict=True)])
        if number % 2:
            moved = [[a - b for a, b in zip(milestone, new, strict=True)] for new in news]
            mean = [f(0.5) * (a + b) for a, b in zip(*moved, strict=True)]
            milestone = [a - b for a, b in zip(milestone, mean, strict=True)]
            news = [milestone, milestone]
        for worker, told in enumerate(workers):
            for mine, expected in zip(told[number + 1][1], news[worker // 2], strict=True):
                np.testing.assert_array_equal(mine, expected)


def _check_compat(workers):
    """w <- w + sum of (w_i - w) / N over all workers, whatever party or rows they have."""
    for number in range(2):
        start = workers[0][number][1]
        expected = [
            one + sum(told[number + 1][0][place] - one for told in workers) / len(workers)
            for place, one in enumerate(start)
        ]
        for told in workers:
            for mine, theirs in zip(told[number + 1][1], expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.timeout(120)
def test_tiers(tmp_path):
    with contextlib.ExitStack() as stack:
        configs = []
        for run, rule in RULES.items():
            server = stack.enter_context(serving(run, rule=rule))
            configs.append(
                write_configs(
                    tmp_path, run, f"127.0.0.1:{server.port}", log_dir=str(tmp_path / run)
                )
            )
        run_parties(
            _train,
            {"folder": tmp_path, "worker_counts": [2, 1]},
            [2, 1],
            party_environments(*configs),
            deadline_s=90,
        )
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    _check_hfa([_arrays(one[0]) for one in told])
    _check_compat([_arrays(one[1]) for one in told])
    assert all(one[2] == told[0][2] for one in told)
    refused = [
        one for one in log.read_events(tmp_path / "uneven") if one["event"] == "update_refused"
    ]
    assert {(one["number"], one["who"]) for one in refused} == {(1, "party `south`")}
    assert {one["site"] for one in refused} == set(SITES)


@pytest.mark.parametrize(
    ("rule", "factor"), [("fedbuff(k=2, learning_rate=0.5)", 0.5), ("asgd(learning_rate=0.5)", 0.5)]
)
def test_statistics_where_nobody_waits(rule, factor):
    """They are averaged by the server's rule, which is told nothing about them."""
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS

    with serving("apart", rule=rule) as server:
        address = f"127.0.0.1:{server.port}"
        south = PlainParty(address, "apart")
        run = config.Run(run="apart", seed=7, uplink=config.Uplink(address, "north"))
        strategy = HierarchicalPS(config=run)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        loop = FedAvg(model, strategy, local_steps=3)
        owned = [*model.variables, *model.optimizer.variables]
        south.begin([(2,)] * 4, [one.numpy() for one in owned])
        told = []
        meet = loop.meet

        def recorded(*, ends=False):
            if not told:
                # South's moving mean has moved by 4, its variance and weights not at all.
                moved = [np.zeros(2, np.float32) for _ in range(4)]
                rate = 0.5 * (2 if "asgd" in rule else 1)
                moved[2][:] = -4.0 / rate
                south.push(moved)
            before = model.get_weights()
            meet(ends=ends)
            told.append((before, model.get_weights()))

        loop.meet = recorded
        x = np.random.default_rng(0).normal(2.0, 1.0, (24, 2)).astype(np.float32)
        loop.fit(x, x, batch_size=8, verbose=0, shuffle=False)
        south.leave()
        strategy.close()
    before, after = told[0]
    assert len(told) == 2  # three steps, and an end without any
    # The mean of the own movement and South's; the other statistics lose half of the own.
    np.testing.assert_allclose(after[2], 0.5 * (before[2] + 4.0), rtol=1e-6)
    # Of a variance a half by its logarithm, nearly: so near to 1 it is nearly the same.
    np.testing.assert_allclose(after[3], 1.0 + factor * (before[3] - 1.0), rtol=1e-4)


def test_hfa_needs_a_server():
    from tf_hips.loops import HFA, FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    loop = FedAvg(_linear(strategy, "sgd"), strategy, local_steps=2)
    assert repr(loop).startswith("<FedAvg: weighting=samples, party rounds=1, server_optimizer=")
    assert "reset_optimizer=False, local_steps=2, local_epochs=None" in repr(loop)
    with pytest.raises(ConfigError, match="HFA is for parties with a server"):
        HFA(_linear(strategy, "sgd"), strategy, local_steps=2, party_rounds=2)


def test_a_loop_has_its_model_and_its_strategy():
    from tests.strategies import training
    from tf_hips.errors import ProtocolError
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    model = _linear(strategy, "sgd")
    x, y = training.data(16)
    loop = FedAvg(model, strategy, local_steps=1)
    with pytest.raises(ProtocolError, match="trained by it: call the loop's `fit`"):
        model.fit(x, y, verbose=0)
    with pytest.raises(ProtocolError, match="A strategy serves one loop"):
        FedAvg(model, strategy, local_steps=1)
    with pytest.raises(ValueError, match="A worker must have samples"):
        loop.fit(x[:0], y[:0], verbose=0)
    other = CompressedRing()
    trained = _linear(other, "sgd")
    trained.fit(x, y, verbose=0)
    with pytest.raises(ProtocolError, match="before the first step of its model"):
        FedAvg(trained, other, local_steps=1)
    with pytest.raises(ValueError, match="must be built inside"):
        FedAvg(model, other, local_steps=1)
    with pytest.raises(TypeError, match="`strategy` must be one of tf_hips"):
        FedAvg(model, object(), local_steps=1)
