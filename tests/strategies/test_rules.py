# SPDX-License-Identifier: Apache-2.0
"""Rules of a server under Keras: its optimizer in place of the workers', and parties apart."""

import contextlib
import json
import re
import types

import pytest

from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import run_parties
from tf_hips import config, log, robust
from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf

MOMENTUM = "momentum(learning_rate=0.1, momentum=0.9)"
APART = "dc_asgd(learning_rate=0.05, compensation=0.04)"


def _steps_of_the_server(run, own, whole, worker, rule):
    """As one process with that optimizer on the joined batch; all replicas equal."""
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint, local

    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS(config=run, rule=rule)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(1.0))
        wrong = training.build(keras.optimizers.SGD(0.5))
    with pytest.raises(ConfigError, match=r"take them as they are.*learning_rate=0.5"):
        training.fit(wrong, own)
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5)
    with pytest.raises(ConfigError, match=r"take them as they are.*learning_rate=0.5"):
        model.fit(training.rows(own), callbacks=[halving], verbose=0)
    if worker == 0:  # the others have the same bits
        keras.utils.set_random_seed(0)
        alone = training.build(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)
        with local():
            training.fit(alone, whole, batch=training.BATCH * 3)
        for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not strategy.state.is_complete()
    strategy.close()
    return fingerprint(model)


def _parties_apart(run, own, worker):
    """The second party is slow, has less to do, and ends long before the first."""
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.strategies import HierarchicalPS

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            threading.Event().wait(0.02)

    is_slow = run.uplink.site == "south"
    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS("error_feedback(onebit)", config=run, rule=APART)
    assert strategy.num_replicas_in_sync == primitives.size()
    assert strategy.sample_group() == (worker, 3)
    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.BatchNormalization()(
            keras.layers.Dense(16, activation="tanh")(inputs)
        )
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(1.0), "mse", metrics=["mae"])
    begun = []
    first = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs=None: begun.append(model.get_weights())
    )
    epochs = 2 if is_slow else 6
    history = model.fit(
        training.rows(own),
        epochs=epochs,
        verbose=0,
        callbacks=[Slow()] if is_slow else [first],
    ).history
    assert len(history["loss"]) == epochs
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    training.assert_same_on_all_ranks(model)  # of this party
    # What is no gradient is of this party alone, and waits for nobody.
    total = strategy.reduce("SUM", tf.constant(1.0), axis=None)
    assert float(total) == primitives.size()
    rows = strategy.gather(tf.constant([[float(primitives.rank())]]), axis=0)
    assert rows.numpy().ravel().tolist() == list(range(primitives.size()))
    assert np.isfinite(model.evaluate(training.rows(own), verbose=0)).all()
    with pytest.raises(ValueError, match="do not wait for each other"):
        __import__("tf_hips").gather(np.zeros((2, 1)), strategy=strategy)
    strategy.close()
    return len(history["loss"])


def _train(folder, worker_counts):
    from tests.strategies import training
    from tf_hips.comm import primitives

    runs = {run.run: run for run in _configs()}
    child = SITES.index(next(iter(runs.values())).uplink.site)
    worker = sum(worker_counts[:child]) + primitives.rank()
    x, y = training.data(10 * training.BATCH * sum(worker_counts))
    own = training.shard([x, y], worker, sum(worker_counts))
    results = {}
    if "summed" in runs:
        results["summed"] = _steps_of_the_server(runs["summed"], own, [x, y], worker, MOMENTUM)
    if "averaged" in runs:
        # The mean of parties of two workers and one, weighted by these.
        results["averaged"] = _steps_of_the_server(runs["averaged"], own, [x, y], worker, None)
    if "apart" in runs:
        results["apart"] = _parties_apart(runs["apart"], own, worker)
    (folder / f"{worker}.json").write_text(json.dumps(results))


def _launch(folder, rules):
    """What the workers of two parties tell of runs with these rules."""
    with contextlib.ExitStack() as stack:
        configs = []
        for run, rule in rules.items():
            server = stack.enter_context(
                serving(run, rule=rule, log_dir=str(folder / "server"), max_refused=1000)
            )
            address = f"127.0.0.1:{server.port}"
            configs.append(write_configs(folder, run, address, log_dir=str(folder / run)))
        run_parties(
            _train,
            {"folder": folder, "worker_counts": [2, 1]},
            [2, 1],
            party_environments(*configs),
            deadline_s=120,
        )
    return [json.loads(path.read_text()) for path in sorted(folder.glob("?.json"))]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_two_parties_with_a_rule_of_means(tmp_path):
    results = _launch(tmp_path, {"averaged": "fedavgm(0.1, 0.9)"})
    assert len({one["averaged"] for one in results}) == 1


@pytest.mark.timeout(150)
def test_two_parties_with_rules(tmp_path):
    results = _launch(tmp_path, {"summed": None, "apart": APART})
    assert len({one["summed"] for one in results}) == 1
    assert [one["apart"] for one in results] == [6, 6, 2]
    events = log.read_events(tmp_path / "apart")
    rounds = {
        site: [one["round"] for one in events if one["event"] == "round" and one["site"] == site]
        for site in SITES
    }
    assert rounds["north"] == list(range(60))
    assert rounds["south"] == list(range(20))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"learning_rate": 0.5}, "learning_rate=0.5"),
        ({"learning_rate": 1.0, "momentum": 0.9}, "momentum=0.9"),
        ({"learning_rate": 1.0, "weight_decay": 0.1}, "weight_decay=0.1"),
        ({"learning_rate": 1.0, "global_clipnorm": 1.0}, "global_clipnorm=1.0"),
        ({"learning_rate": 1.0, "use_ema": True}, "use_ema=True"),
        ({"learning_rate": 1.0, "gradient_accumulation_steps": 2}, "accumulation_steps=2"),
        (None, "Received: Adam"),
    ],
)
def test_optimizers_that_would_change_a_step(options, told):
    import keras

    from tf_hips.ps import rules
    from tf_hips.strategies.rules import check_optimizer

    optimizer = keras.optimizers.Adam() if options is None else keras.optimizers.SGD(**options)
    with pytest.raises(ConfigError, match=told):
        check_optimizer(rules.parse("sgd"), optimizer)
    check_optimizer(rules.parse("mean"), optimizer)
    check_optimizer(rules.parse("asgd"), keras.optimizers.SGD(1.0))


def test_a_learning_rate_that_changes_is_refused():
    import keras

    from tf_hips.ps import rules
    from tf_hips.strategies.rules import check_optimizer

    schedule = keras.optimizers.schedules.ExponentialDecay(1.0, 10, 0.9)
    with pytest.raises(ConfigError, match="learning_rate=ExponentialDecay"):
        check_optimizer(rules.parse("adam"), keras.optimizers.SGD(schedule))


def test_a_rate_that_is_set_after_the_first_step_is_refused():
    import keras
    import numpy as np

    x, told = np.ones((8, 2), np.float32), r"take them as they are.*learning_rate=0.5"
    with apart("adam(learning_rate=0.01)") as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        rate = model.optimizer.learning_rate

        def halve(batch, logs=None):
            if batch == 1:
                rate.assign(0.5)

        model.train_on_batch(x, x[:, :1])
        rate.assign(0.5)
        with pytest.raises(ConfigError, match=told):
            model.train_on_batch(x, x[:, :1])
        rate.assign(1.0)
        before = int(model.optimizer.iterations)
        with pytest.raises(ConfigError, match=told):
            halving = keras.callbacks.LambdaCallback(on_train_batch_begin=halve)
            model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[halving])
        assert int(model.optimizer.iterations) == before + 1


def test_a_rate_that_is_set_in_an_eager_loop_is_refused():
    import keras
    import tensorflow as tf

    with apart("adam(learning_rate=0.01)") as strategy:
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0])
            optimizer = keras.optimizers.SGD(1.0)

        def step():
            optimizer.apply([tf.ones([2])], [weight])

        strategy.run(step)
        optimizer.learning_rate.assign(0.5)
        with pytest.raises(ConfigError, match=r"take them as they are.*learning_rate=0.5"):
            strategy.run(step)


@pytest.mark.parametrize("is_in_graph", [True, False])
def test_another_optimizer_of_the_same_weights_is_looked_at(is_in_graph):
    import keras
    import tensorflow as tf

    with apart("adam(learning_rate=0.01)") as strategy:
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0])
            optimizers = keras.optimizers.SGD(1.0), keras.optimizers.SGD(0.5)

        def train(optimizer):
            def run():
                strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight]))

            (tf.function(run) if is_in_graph else run)()

        train(optimizers[0])
        before = weight.numpy().tolist()
        with pytest.raises(ConfigError, match=r"take them as they are.*learning_rate=0.5"):
            train(optimizers[1])
        assert weight.numpy().tolist() == before


_UNLIKE = (
    "gradients of 1 of the 2 variables of the first step, without `w1`; give zeros",
    "2 of the 2 variables of the first step, and of `w2`",
    "in another order; keep",
)


def _lists(strategy):
    """A function that makes a step, and what it takes: the first list, and others."""
    import tensorflow as tf

    with strategy.scope():
        one, two, three, four = (tf.Variable([1.0], name=f"w{place}") for place in range(4))
        optimizer, other = _of_scope([one, two, three]), _of_scope([four])

    def train(optimizer, *variables):
        pairs = [(tf.ones([1]), variable) for variable in variables]
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    alike = [(optimizer, one), (optimizer, one, two, three), (optimizer, two, one)]
    return train, (optimizer, one, two), alike, (other, four)


def test_a_list_of_variables_that_changes_is_named():
    with apart("adam(learning_rate=0.01)") as strategy:
        train, first, alike, apart_from_it = _lists(strategy)
        train(*first)
        for given, told in zip(alike, _UNLIKE, strict=True):
            with pytest.raises(ValueError, match=f"rule is adam.*{told}"):
                train(*given)
        with pytest.raises(ValueError, match="gradients of other variables; start another run"):
            train(*apart_from_it)
        train(*first)


def test_a_list_of_variables_that_changes_is_gathered_where_rules_only_add_up(caplog):
    caplog.set_level("INFO", logger="absl")  # others may have made it quiet
    with apart("sum") as strategy:
        train, first, alike, apart_from_it = _lists(strategy)
        train(*first)
        for given, told in zip(alike, _UNLIKE, strict=True):
            caplog.clear()
            train(*given)
            [record] = [one for one in caplog.records if told in one.getMessage()]
            assert record.levelname == "WARNING"
        caplog.clear()
        train(*apart_from_it)
        train(*first)
        [record] = [one for one in caplog.records if "packets of all parties" in one.getMessage()]
        assert (record.levelname, "`w3`" in record.getMessage()) == ("INFO", True)
        assert [float(one[0]) for one in (*first[1:], *apart_from_it[1:])] == [-4.0, -3.0, 0.0]


def test_a_list_behind_one_whose_model_is_gone(caplog):
    import gc

    import tensorflow as tf

    def train(strategy, name):
        with strategy.scope():
            variables = [tf.Variable([1.0], name=f"{name}{place}") for place in range(2)]
            optimizer = _of_scope(variables)
        pairs = [(tf.ones([1]), variable) for variable in variables]
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    def train_two(strategy):
        train(strategy, "old")
        gc.collect()
        train(strategy, "new")

    caplog.set_level("INFO", logger="absl")  # others may have made it quiet
    told = r"`new0` and 1 more.*the model of the first step \(`old0` and 1 more\) is gone"
    refused = pytest.raises(ValueError, match=rf"rule is adam.*gradients of {told}; start another")
    with apart("adam(learning_rate=0.01)") as strategy, refused:
        train_two(strategy)
    with apart("sum") as strategy:
        train_two(strategy)
    [message] = [one.getMessage() for one in caplog.records if "is gone" in one.getMessage()]
    assert re.search(told, message)
    assert "packets of all parties" in message


def _of_scope(variables):
    import keras

    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    return optimizer


def _bound():
    """An optimizer that trains something with a constraint."""
    import keras

    optimizer = keras.optimizers.SGD(1.0)
    weights = [keras.Variable([1.0, 2.0], name="free"), keras.Variable([1.0], name="bound")]
    weights[1].constraint = keras.constraints.NonNeg()
    optimizer.build(weights)
    return optimizer


def test_constraints_are_refused_where_parties_do_not_wait():
    from tf_hips.ps import rules
    from tf_hips.strategies.rules import check_optimizer

    for rule in ("asgd", "dc_asgd", "fedbuff", "momentum(asynchronous=True)"):
        with pytest.raises(ConfigError, match=r"Take a synchronous rule.*`bound` with NonNeg$"):
            check_optimizer(rules.parse(rule), _bound())
    for rule in ("sum", "momentum", "fedavg"):  # all project alike
        check_optimizer(rules.parse(rule), _bound())


def test_a_constraint_is_found_before_the_first_step():
    import keras
    import numpy as np

    with apart() as strategy:
        with strategy.scope():
            layer = keras.layers.Dense(1, kernel_constraint="max_norm", name="projected")
            model = keras.Sequential([keras.Input((2,)), layer])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        before = model.get_weights()
        x = np.ones((4, 2), np.float32)
        with pytest.raises(ConfigError, match="projected/kernel` with MaxNorm"):
            model.fit(x, x[:, :1], batch_size=4, verbose=0)
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_weights_that_no_step_has_made_are_found(tmp_path):
    import keras
    import numpy as np

    from tf_hips.callbacks import BackupAndRestore
    from tf_hips.errors import ProtocolError

    x, told = np.ones((4, 2), np.float32), r"`.*/bias`, set since the last epoch ended"
    with apart() as strategy:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1.0), "mse")

        def fit(**options):
            model.fit(x, x[:, :1], batch_size=4, verbose=0, **options)

        def spoil(epoch=None, logs=None):
            model.layers[0].bias.assign_add([1.0])

        backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
        fit(callbacks=[backup])
        made = model.get_weights()
        spoil()
        with pytest.raises(ProtocolError, match=told):
            fit()
        model.set_weights(made)
        fit()
        model.train_on_batch(x, x[:, :1])
        with pytest.raises(ProtocolError, match=told):
            fit(epochs=2, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=spoil)])
        model.train_on_batch(x, x[:, :1])
        fit(epochs=1)
        # What the backup brings is older than what the last epoch has left.
        fit(epochs=2, callbacks=[backup])
        assert model.history.epoch == [0, 1]


@contextlib.contextmanager
def apart(rule="asgd(learning_rate=0.1)"):
    """The strategy of the only party of a run, which would wait for no other."""
    from tf_hips.strategies import HierarchicalPS

    with serving("apart", parties=("north",), rule=rule) as server:
        uplink = config.Uplink(f"127.0.0.1:{server.port}", "north")
        strategy = HierarchicalPS(config=config.Run(run="apart", seed=7, uplink=uplink))
        try:
            yield strategy
        finally:
            strategy.close("the test is over")


def test_a_threshold_of_gradients_is_none_of_steps():
    """The script need not know the rule; weights move with the first step."""
    import keras
    import numpy as np

    from tf_hips.strategies import HierarchicalPS

    with serving("threshold", parties=("north",), rule="asgd(0.001)") as server:
        run = config.Run(
            run="threshold", seed=7, uplink=config.Uplink(f"127.0.0.1:{server.port}", "north")
        )
        strategy = HierarchicalPS("error_feedback(hips2bit(0.01))", config=run)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1.0), "mse")
        before = model.get_weights()
        x = np.ones((4, 2), np.float32)
        model.fit(x, 10.0 + x[:, :1], batch_size=4, verbose=0)
        for one, other in zip(before, model.get_weights(), strict=True):
            assert (one != other).all()
        strategy.close()


def test_which_rule_a_run_has():
    from tf_hips.strategies.rules import chosen_rule

    run = types.SimpleNamespace(rule=None, uplink=None)
    assert chosen_rule(None, run) is None
    assert chosen_rule("mean", run).name == "mean"
    for rule in ("adam", "median", robust.trimmed_mean(f=1)):
        with pytest.raises(ConfigError, match="without an uplink"):
            chosen_rule(rule, run)
    uplink = config.Uplink("127.0.0.1:1", "a")
    told = config.Run(uplink=uplink, rule="adam")
    assert chosen_rule(None, told) == chosen_rule("adam(learning_rate=0.001)", told)
    with pytest.raises(ConfigError, match="must be the same in the script"):
        chosen_rule("sgd", told)
    same = config.Run(uplink=uplink, rule="trimmed_mean(1)")
    assert chosen_rule(robust.trimmed_mean(f=1), same).is_robust
    with pytest.raises(ConfigError, match="`rule` of the run's configuration: a rule must be"):
        chosen_rule(None, config.Run(uplink=uplink, rule="adma"))


def test_rules_of_both_levels():
    from tf_hips.ps.rules import parse
    from tf_hips.strategies.rules import check_local, chosen_local, rule_of_both

    sketched = robust.sketched(robust.krum(f=1), k=64)
    assert rule_of_both(None, sketched) is sketched
    assert rule_of_both("mean", None) == "mean"
    with pytest.raises(ValueError, match=r"give one of them\. Received: robust_global=median"):
        rule_of_both("mean", robust.median())
    with pytest.raises(ValueError, match="`robust_global` must be a robust rule"):
        rule_of_both(None, "momentum(0.1)")

    run = config.Run(uplink=config.Uplink("127.0.0.1:1", "a"))
    assert chosen_local(None, run, has_servers=False) is None
    wanted = chosen_local(robust.krum(f=1), run, has_servers=True)
    assert wanted == parse("krum(1)")
    with pytest.raises(ValueError, match=r"CompressedRing\(robust=...\)"):
        chosen_local("median", run, has_servers=False)
    for text in ("mean", "krum(f=1) >> fedavg", sketched):
        with pytest.raises(ValueError, match="must be a robust rule alone"):
            chosen_local(text, run, has_servers=True)
    with pytest.raises(ConfigError, match="without an uplink"):
        chosen_local("median", config.Run(), has_servers=True)

    def told(text):
        return types.SimpleNamespace(robust=text)

    check_local(None, told(None), "s:1")
    check_local(wanted, told("krum(f=1)"), "s:1")
    for text in ("krum(f=2)", None):
        with pytest.raises(ConfigError, match="`robust_local` must be what server s:1 was started"):
            check_local(wanted, told(text), "s:1")
