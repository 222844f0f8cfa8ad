# SPDX-License-Identifier: Apache-2.0
"""Each method beside plain NumPy: the server's side bit for bit, local steps to 1e-6."""

import contextlib
import math
import types

import numpy as np
import pytest

from tests.ops.test_tried import RUNNING
from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support import hurried
from tests.support.ranks import ranks, run_parties
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf

RATE = 0.05
ROUNDS = 4
ROWS = (8, 4)  # in a batch of each member
STEPS = (2, 3)  # in a round of each member

# Name, options of FedAvg, momentum of the local optimizer.
METHODS = {
    "fedavg": ({}, 0.9),
    "fedavgm": ({"server_optimizer": "fedavgm(0.5, 0.9)"}, 0.0),
    "fedadam": ({"server_optimizer": "fedadam(0.01)"}, 0.0),
    "fedyogi": ({"server_optimizer": "fedyogi(0.01)"}, 0.0),
    "fedadagrad": ({"server_optimizer": "fedadagrad(0.01)"}, 0.0),
    "diloco": ({"server_optimizer": "diloco"}, 0.0),
    "fedprox": ({"prox_mu": 0.5, "weighting": "uniform"}, 0.0),
    "fednova": ({"normalise": True}, 0.9),
    "scaffold": ({"scaffold": True, "server_optimizer": "fedavg(0.5)"}, 0.0),
    "sampled": ({"participation": 1}, 0.0),
}


def _batches(member):
    """Batches of one member, all different."""
    generator = np.random.default_rng(member)
    count = ROUNDS * STEPS[member]
    x = generator.normal(size=(count, ROWS[member], 6)).astype(np.float32)
    y = generator.normal(size=(count, ROWS[member], 3)).astype(np.float32) + member
    return x, y


def _train(strategy, member, options, momentum, compression=None):
    """Meetings of one run: what each member had before, and had afterwards."""
    import keras

    from tf_hips.loops import FedAvg

    class Recorded(FedAvg):
        meetings: list

        def meet(self, *, ends=False):
            before = self.model.get_weights()
            super().meet(ends=ends)
            self.meetings.append((before, self.model.get_weights()))

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(RATE, momentum=momentum), "mse")
    loop = Recorded(model, strategy, local_steps=STEPS[member], **options)
    loop.meetings = []
    first = model.get_weights()
    x, y = (one.reshape(-1, one.shape[-1]) for one in _batches(member))
    loop.fit(x, y, batch_size=ROWS[member], verbose=0, shuffle=False)
    assert len(loop.meetings) == ROUNDS + 1
    return [(first, first), *loop.meetings[:ROUNDS]]


def _check(name, meetings, seed):
    """`meetings`, of each member, beside NumPy."""
    from tests.loops import oracle
    from tf_hips.loops import methods

    options, momentum = METHODS[name]
    kind = name if name in ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "diloco") else "fedavg"
    rates = {"fedavgm": 0.5, "diloco": 0.7, "fedavg": 0.5 if name == "scaffold" else 1.0}
    rule = oracle.Rule(kind, rates.get(kind, 0.01))
    f = np.float32
    velocities = [[np.zeros((6, 3), f), np.zeros(3, f)] for _ in ROWS]
    common, own = [[np.zeros((6, 3), f), np.zeros(3, f)] for _ in range(2)], None
    common = common[0]
    own = [[np.zeros((6, 3), f), np.zeros(3, f)] for _ in ROWS]
    for number in range(ROUNDS):
        start = meetings[0][number][1]
        counted = set(range(2))
        if "participation" in options:
            counted = methods.sampled(seed, number, 2, 1)
        moved, news = [], []
        for member, told in enumerate(meetings):
            for here, there in zip(told[number][1], start, strict=True):
                np.testing.assert_array_equal(here, there)  # all begin with the same
            x, y = _batches(member)
            place = slice(number * STEPS[member], (number + 1) * STEPS[member])
            shift = [c - i for c, i in zip(common, own[member], strict=True)]
            expected = oracle.local(
                start,
                list(zip(x[place], y[place], strict=True)),
                RATE,
                mu=options.get("prox_mu", 0.0),
                shift=shift,
                momentum=momentum,
                velocity=velocities[member],
            )
            before = told[number + 1][0]
            for mine, theirs in zip(before, expected, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
            moved.append([a - b for a, b in zip(start, before, strict=True)])
            factor = f(1.0 / (STEPS[member] * float(f(RATE))))
            news.append(
                [i - c + d * factor for i, c, d in zip(own[member], common, moved[-1], strict=True)]
            )
        is_uniform = "scaffold" in options or options.get("weighting") == "uniform"
        counts = [
            (1.0 if is_uniform else ROWS[member] * STEPS[member]) * (member in counted)
            for member in range(2)
        ]
        shares = [one / sum(counts) for one in counts]
        sent = moved
        if "normalise" in options:
            norms = [methods.effective_steps(steps, momentum) for steps in STEPS]
            mean = sum(share * norm for share, norm in zip(shares, norms, strict=True))
            sent = [[one * f(mean / norms[member]) for one in moved[member]] for member in range(2)]
        merged = [f(shares[0]) * a + f(shares[1]) * b for a, b in zip(*sent, strict=True)]
        steps = rule(merged)
        for before, step, after in zip(start, steps, meetings[0][number + 1][1], strict=True):
            np.testing.assert_array_equal(after, before - step)
        if "scaffold" in options:
            common = [
                c - (f(0.5) * (i0 - n0) + f(0.5) * (i1 - n1))
                for c, i0, n0, i1, n1 in zip(common, own[0], news[0], own[1], news[1], strict=True)
            ]
            own = news


# One of each part: shares, a server with slots, a proximal term, claims, controls, a draw. What the
# others' rules make of a mean is in tests/ps/test_rules.py, too.
QUICK = ["fedavg", "fedadam", "fedprox", "fednova", "scaffold", "sampled"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param(
            [name for name in METHODS if name not in QUICK], id="others", marks=pytest.mark.slow
        ),
    ],
)
@ranks(2)
def test_methods_in_one_group(names):
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    for name in names:
        options, momentum = METHODS[name]
        meetings = _train(CompressedRing(), rank, options, momentum)
        everyone = primitives.gather_objects(
            [[[one.tolist() for one in part] for part in pair] for pair in meetings]
        )
        as_arrays = [
            [tuple([np.array(one, np.float32) for one in part] for part in pair) for pair in told]
            for told in everyone
        ]
        _check(name, as_arrays, seed=0)


OVER_PARTIES = {
    "fedadam": "fedadam(0.01)",  # the server makes the steps
    "fednova": None,  # its rule is `sum`: the parties make them
    "scaffold": "fedavg(0.5)",
    "sampled": "mean",
}


def _train_in_parties(folder):
    import json

    from tf_hips.strategies import HierarchicalPS

    for run in _configs():
        member = SITES.index(run.uplink.site)
        options, momentum = METHODS[run.run]
        strategy = HierarchicalPS(config=run)
        meetings = _train(strategy, member, options, momentum)
        strategy.close()
        told = [[[one.tolist() for one in part] for part in pair] for pair in meetings]
        (folder / f"{run.run}-{member}.json").write_text(json.dumps(told))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_methods_over_parties(tmp_path):
    import json

    with contextlib.ExitStack() as stack:
        configs = []
        for run, rule in OVER_PARTIES.items():
            server = stack.enter_context(serving(run, rule=rule))
            configs.append(write_configs(tmp_path, run, f"127.0.0.1:{server.port}"))
        run_parties(
            _train_in_parties,
            {"folder": tmp_path},
            [1, 1],
            party_environments(*configs),
            deadline_s=90,
        )
    for run in OVER_PARTIES:
        meetings = [
            [
                tuple([np.array(one, np.float32) for one in part] for part in pair)
                for pair in json.loads((tmp_path / f"{run}-{member}.json").read_text())
            ]
            for member in range(2)
        ]
        _check(run, meetings, seed=7)


def test_steps_by_what_momentum_makes_of_them():
    from tf_hips.loops import methods

    for steps, momentum in ((1, 0.9), (5, 0.9), (7, 0.5)):
        # Gradient t goes into the velocity of all later steps.
        weights = [sum(momentum**age for age in range(steps - first)) for first in range(steps)]
        assert math.isclose(methods.effective_steps(steps, momentum), sum(weights))
    shrinking = [(1 - 0.1) ** age for age in range(6)]
    assert math.isclose(methods.effective_steps(6, shrinkage=0.1), sum(shrinking))
    assert methods.effective_steps(6) == 6.0


def test_one_step_in_the_first_rounds_and_more_later():
    from tf_hips.loops import PostLocal

    assert [PostLocal(steps=8, after=3)(number) for number in range(5)] == [1, 1, 1, 8, 8]


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "nesterov": True}),
     ("RMSprop", {"momentum": 0.9, "rho": 0.0}), ("Muon", {})],
)  # fmt: skip
def test_movements_by_their_effective_steps_are_as_long(name, options):
    import keras
    import tensorflow as tf

    from tf_hips.loops import methods

    found = []
    for steps in (1, 10):
        optimizer = getattr(keras.optimizers, name)(0.01, **options)
        weights = keras.Variable(np.ones((2, 2), np.float32))
        for _ in range(steps):
            optimizer.apply([tf.eye(2)], [weights])
        model = types.SimpleNamespace(optimizer=optimizer)
        length = np.linalg.norm(np.asarray(weights) - 1.0)
        found.append(length / methods.weighed(model, steps, lambda one, steps=steps: steps))
    # Each step of Muon has the length of an orthogonal matrix, about.
    assert found[1] == pytest.approx(found[0], rel=0.4 if name == "Muon" else 1e-4)


def test_all_know_who_is_drawn():
    from tf_hips.loops import FedAvg, methods

    loop = FedAvg.__new__(FedAvg)
    loop._loan = types.SimpleNamespace(member=lambda: (0, 10))
    loop._strategy = types.SimpleNamespace(config=types.SimpleNamespace(seed=7))
    loop._bearing = None
    for participation, chosen in (
        (1.0, None),
        (10, None),
        (3, 3),
        (np.int64(3), 3),
        (np.int64(1), 1),
        (0.2, 2),
    ):
        loop._participation = participation
        wanted = None if chosen is None else methods.sampled(7, 4, 10, chosen)
        assert loop.drawn(4) == wanted


def test_who_takes_part():
    from tf_hips.loops import methods

    chosen = [methods.sampled(7, number, 10, 3) for number in range(200)]
    assert all(len(one) == 3 and one <= set(range(10)) for one in chosen)
    assert chosen == [methods.sampled(7, number, 10, 3) for number in range(200)]
    assert chosen != [methods.sampled(8, number, 10, 3) for number in range(200)]
    often = [sum(member in one for one in chosen) for member in range(10)]
    assert min(often) > 30 and max(often) < 90
    # All members compute it for themselves, whatever their version, and after a resume again.
    assert [sorted(one) for one in chosen[:3]] == [[1, 8, 9], [1, 3, 4], [4, 6, 9]]
    assert [methods.number_chosen(share, 10) for share in (0.01, 0.25, 1.0, 4, 20)] == [
        1, 3, 10, 4, 10,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"local_steps": 0}, "`local_steps` must be at least 1. Received: local_steps=0"),
        ({}, "One of `local_steps` and `local_epochs` must be given"),
        ({"local_steps": 1, "local_epochs": 1}, "One of `local_steps` and `local_epochs`"),
        ({"local_epochs": -1}, "`local_epochs` must be at least 1"),
        ({"local_steps": "8"}, "`local_steps` must be an integer. Received: local_steps='8'"),
        ({"local_steps": True}, "`local_steps` must be an integer"),
        ({"local_epochs": 1.5}, "`local_epochs` must be an integer"),
        ({"local_steps": 1, "prox_mu": -1.0}, "`prox_mu` must be from 0"),
        ({"local_steps": 1, "prox_mu": "1"}, "`prox_mu` must be a number"),
        ({"local_steps": 1, "participation": "all"}, "`participation` must be a number"),
        ({"local_steps": 1, "participation": 0.0}, "`participation` must be a share"),
        ({"local_steps": 1, "weighting": "rows"}, "`weighting` must be one of samples, uniform"),
        ({"local_steps": 1, "compat": True, "scaffold": True}, "`compat` is HiPS' own mean"),
        ({"local_steps": 1, "server_optimizer": "fedadamm"}, "did you mean fedadam"),
        ({"local_steps": 1, "server_optimizer": "fedbuff"}, "must be the rule of a server"),
        ({"local_steps": 1, "server_optimizer": "median"}, "A robust `server_optimizer` must be"),
        ({"local_steps": 1, "scaffold": True}, "SCAFFOLD divides by the learning rate"),
    ],
)
def test_options_that_are_refused(options, told):
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    with pytest.raises((ValueError, TypeError, ConfigError), match=told):
        FedAvg(model, strategy, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"local_steps": lambda number: 2, "party_rounds": 2}, "`local_steps` must be an integer"),
        ({"local_steps": None, "party_rounds": 2}, "`local_steps` must be an integer"),
        ({"local_steps": 2, "party_rounds": "2"}, "`party_rounds` must be an integer"),
        ({"local_steps": 2, "party_rounds": 0}, "`party_rounds` must be at least 1"),
    ],
)
def test_steps_of_hfa_that_are_refused(options, told):
    from tf_hips.loops import HFA

    with pytest.raises((ValueError, TypeError), match=told):
        HFA(None, None, **options)


def _loop(rule, workers, level="party", robust=None, least=None, paths=None, **options):
    """As much of a FedAvg as looks at rules: of some parties below a server, or below a party's."""
    from tf_hips.loops import FedAvg
    from tf_hips.loops.bearing import bearing_of
    from tf_hips.ps import rules

    names = tuple("abcdefgh"[: len(workers)])
    above = rules.parse(rule)
    guards = [("", rule if above.is_robust else None, least), ("west", robust, None)]
    guards = tuple(one for one in guards if any(one[1:]))
    if paths is None:
        paths = names if robust is None else tuple(f"west/{name}" for name in names)
    welcome = types.SimpleNamespace(
        paths=paths,
        workers=workers,
        guards=guards,
        bears_liars=any(one for _, one, _ in guards),
    )
    loop = FedAvg.__new__(FedAvg)
    loop._participation, loop._controls, loop._normalises = 1.0, None, False
    vars(loop).update(options)
    loop._loan = types.SimpleNamespace(level=level)
    loop._strategy = types.SimpleNamespace(rule=above, has_server=True, welcome=welcome)
    loop._bearing = bearing_of(loop._strategy)
    return loop


@pytest.mark.parametrize(
    ("rule", "level", "participation", "told"),
    [
        ("median", "party", 1.0, None),
        ("median", "party", 0.5, None),
        ("krum(f=1)", "party", 1.0, None),
        ("krum(f=1)", "party", 5, None),
        ("krum(f=1)", "party", 4, "4 parties in a round at least: krum needs n >= 2 f"),
        ("trimmed_mean(f=1)", "party", 0.4, "2 parties in a round at least"),
        # Parties are drawn, however many workers they have.
        ("median(f=2)", "worker", 5, None),
        ("trimmed_mean(f=1)", "worker", 3, None),
        ("trimmed_mean(f=1)", "worker", 0.4, "2 parties in a round at least"),
        # Of all five "auto" bears two: a rule that bears none of those who are drawn is no rule.
        ("median", "party", 3, None),
        ("median", "party", 0.4, "f=auto bears 2 of 5, and none of those that have come"),
        ("krum", "party", 4, "f=auto bears 1 of 5, and none of those that have come"),
        ("median(f=0)", "party", 1, None),
        ("sketched >> krum", "party", 4, "f=auto bears 1 of 5"),
    ],
)
def test_a_robust_server_wants_enough_parties(rule, level, participation, told):
    loop = _loop(rule, [1, 4, 1, 2, 1], level, _participation=participation)
    with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        loop._check_rule(loop._strategy)


@pytest.mark.parametrize(("participation", "told"), [(5, None), (4, "and 2 parties in a round")])
def test_a_quorum_may_miss_some_of_those_who_are_drawn(participation, told):
    loop = _loop("median", [1] * 5, least=3, _participation=participation)
    with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        loop._check_rule(loop._strategy)


@pytest.mark.parametrize(
    ("rule", "robust", "participation", "told"),
    [
        # Three children of the topmost server are drawn, each with all below it.
        ("median", None, 3, None),
        ("median", None, 2, "2 parties in a round at least: .* f=auto bears 1 of 3"),
        ("mean", "median", 1, None),
    ],
)
def test_whole_children_of_the_topmost_server_are_drawn(rule, robust, participation, told):
    paths = ("west/a", "west/b", "west/c", "east/d", "east/e", "east/f", "g")
    loop = _loop(rule, [1] * 7, robust=robust, paths=paths, _participation=participation)
    with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        loop._check_rule(loop._strategy)


@pytest.mark.parametrize("rule", ["fedbuff(k=4)", "asgd(learning_rate=1.0)"])
@pytest.mark.parametrize(
    ("level", "participation", "weighting", "is_refused"),
    [
        ("party", 1.0, None, False),
        ("party", 5, None, False),
        ("worker", 9, None, False),
        ("party", 0.5, None, True),
        ("party", 1, None, True),
        ("worker", 5, None, True),
        ("party", 1.0, "uniform", True),
        ("party", 1.0, "samples", True),
    ],
)
def test_who_waits_for_nobody_is_not_drawn_or_weighed(
    rule, level, participation, weighting, is_refused
):
    from tf_hips.loops import FedAvg
    from tf_hips.ps import rules

    loop = FedAvg.__new__(FedAvg)
    loop._participation, loop._controls, loop._normalises = participation, None, False
    members = {"party": 5, "worker": 9}[level]
    loop._loan = types.SimpleNamespace(level=level, member=lambda: (0, members))
    loop._bearing = None
    strategy = types.SimpleNamespace(rule=rules.parse(rule), has_server=True)
    told = (
        "`participation` and `weighting` must be left out .* Received: participation="
        f"{participation}, weighting={weighting!r}, rule {rule.split('(')[0]}"
    )
    with pytest.raises(ConfigError, match=told) if is_refused else contextlib.nullcontext():
        loop._check_rule(strategy, weighting)


@pytest.mark.parametrize(
    ("rule", "robust", "is_refused"),
    [("fedavg(1.0)", None, False), ("mean", None, False), ("median >> fedavg(1.0)", None, True),
     ("mean", "krum(f=1)", True)],
)  # fmt: skip
def test_claims_that_scale_all_rows_are_refused_below_robust_rules(rule, robust, is_refused):
    loop = _loop(rule, [1] * 5, robust=robust, _normalises=True)
    told = pytest.raises(ConfigError, match=r"FedNova's factors .* Received: normalise=True")
    with told if is_refused else contextlib.nullcontext():
        loop._check_rule(loop._strategy)


def test_control_variates_are_refused_with_a_robust_rule():
    loop = _loop("krum(f=0)", [1, 1, 1], _controls=object())
    with pytest.raises(ConfigError, match="With SCAFFOLD the rule of the server must be"):
        loop._check_rule(loop._strategy)


@pytest.mark.parametrize(
    ("compression", "is_refused"),
    [("dgc(0.05)", True), ("warmup(dgc, steps=10)", True), ("dgc(0.05, momentum=0)", False)],
)
def test_the_momentum_of_a_codec_is_refused(compression, is_refused):
    """Of each movement dgc sends 1 / (1 - momentum) times as much."""
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing(compression)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    told = r"must be without momentum under a loop.*`dgc\(momentum=0\)`.*compression=.*dgc"
    refused = pytest.raises(ConfigError, match=told) if is_refused else contextlib.nullcontext()
    with refused:
        FedAvg(model, strategy, local_steps=2)


@pytest.mark.parametrize("decay", [0.9, 0.3])
def test_the_momentum_of_a_codec_of_ones_own_is_refused(decay, tmp_path, monkeypatch):
    """Its parameter has another name, so it is tried; a little more than once is let through."""
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    hurried.cache_of_its_own(tmp_path, monkeypatch)
    (tmp_path / "running.pse").write_text(RUNNING)
    strategy = CompressedRing(f"{tmp_path}/running.pse(decay={decay})")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    told = r"must be without momentum under a loop.*sends a movement 9\.9[0-9] times over.*running"
    refused = pytest.raises(ConfigError, match=told) if decay == 0.9 else contextlib.nullcontext()
    with refused:
        FedAvg(model, strategy, local_steps=2)


def test_accumulated_gradients_change_weights_more_rarely():
    import keras

    from tf_hips.loops import FedAvg, methods
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4)
        model.compile(optimizer, "mse")
    loop = FedAvg(model, strategy, local_steps=8, normalise=True)
    optimizer._iterations.assign(8)
    assert loop.words() == {"effective": methods.effective_steps(2, 0.9)}
    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), "mse")
    with pytest.raises(ConfigError, match="without gradient_accumulation_steps"):
        FedAvg(model, strategy, local_steps=8, scaffold=True)


def test_control_variates_are_gradients_though_the_rate_changes_within_a_round():
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((1,)), layer])
        model.compile(keras.optimizers.SGD(0.0), lambda y, out: keras.ops.mean(out, axis=-1))
    # Any rule but a mean's: one worker makes of a mean what plain Keras does.
    options = {"scaffold": True, "server_optimizer": "fedavg(0.5)"}
    loop = FedAvg(model, strategy, local_steps=lambda number: 3 if number else 1, **options)
    rates, places = [0.1, 0.1, 0.001, 0.001], []  # after each step; the first round has a rate of 0

    def change(batch, logs=None):
        model.optimizer.learning_rate = rates[batch]
        places.append(loop.place())

    changes = keras.callbacks.LambdaCallback(on_train_batch_end=change)
    x = np.ones((16, 1), np.float32)
    loop.fit(x, x, batch_size=4, verbose=0, callbacks=[changes])
    assert loop.round == 3 and float(loop._controls.own[0][0, 0]) == pytest.approx(1.0, abs=1e-4)
    steps, total = places[2]["rates"]  # a backup has it
    assert steps == 2 and total == pytest.approx(0.2)
    loop.go_on(places[2])
    assert loop._controls.rates == (steps, total)


def test_control_variates_of_several_optimizers_are_refused():
    import keras

    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.another = keras.optimizers.Adam(0.001)
    with pytest.raises(ConfigError, match=r"its only optimizer, .* Received: SGD, Adam"):
        FedAvg(model, strategy, local_steps=8, scaffold=True)
