# SPDX-License-Identifier: Apache-2.0
"""The engine under real ranks and a real server: equal weights after each meeting."""

import json

import pytest

from tests.strategies.test_hierarchical_ps import (
    SITES,
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import ranks, run_parties

pytestmark = pytest.mark.tf


def _model(strategy, **options):
    import keras

    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="tanh")(inputs))
        model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


def _train_in_parties(folder, worker_counts):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS, fingerprint

    [run] = _configs()
    child = SITES.index(run.uplink.site)
    worker = sum(worker_counts[:child]) + primitives.rank()
    x, y = training.data(12 * training.BATCH * sum(worker_counts))
    own = training.shard([x, y], worker, sum(worker_counts))
    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS("error_feedback(onebit)", config=run)
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=5)
    history = loop.fit(*own, batch_size=training.BATCH, epochs=2, verbose=0, shuffle=False)
    assert len(history.history["loss"]) == 2
    assert loop.round == 5  # of five steps, the last of four
    assert np.isfinite(model.evaluate(*own, verbose=0))
    training.assert_same_on_all_ranks(model)
    (folder / f"{worker}.json").write_text(json.dumps(fingerprint(model)))
    strategy.close()


@pytest.mark.slow  # tests/loops/test_tiers.py has these parties, with data that are uneven
@pytest.mark.timeout(150)
def test_two_parties_meet(tmp_path):
    with serving("meeting", rule="fedavg(1.0)") as server:
        run_parties(
            _train_in_parties,
            {"folder": tmp_path, "worker_counts": [2, 1]},
            [2, 1],
            party_environments(write_configs(tmp_path, "meeting", f"127.0.0.1:{server.port}")),
            deadline_s=120,
        )
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    assert len(results) == 3
    assert len(set(results)) == 1


@ranks(2)
def test_one_group_without_a_server():
    import keras

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    class Looks(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.equal = []

        def on_train_batch_end(self, batch, logs=None):
            weights = b"".join(one.tobytes() for one in self.model.get_weights()).hex()
            self.equal.append((batch, len(set(primitives.gather_objects(weights))) == 1))
            # A checkpoint that is written here may be read when `fit` is over.
            assert strategy.num_replicas_in_sync == 1
            assert strategy.state.facts()["number of workers"] == 2

    rank = primitives.rank()
    keras.utils.set_random_seed(rank)
    strategy = CompressedRing("error_feedback(int8)")
    model = _model(strategy, steps_per_execution=3)
    loop = FedAvg(model, strategy, local_steps=4)
    x, y = training.data(80, seed=rank)
    looks = Looks()
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[looks, loop])
    # Executions of 3 steps are cut where a phase of 4 ends; an epoch has 10 steps.
    first = [(2, False), (3, True), (5, False), (7, True), (8, False), (9, False)]
    second = [(1, True), (2, False), (5, True), (8, False), (9, True)]
    assert looks.equal == first + second
    assert loop.round == 6  # of four steps, and a meeting without any at the end
    assert strategy.state.facts()["number of workers"] == 2


@ranks(2)
def test_a_warm_up_is_for_all_workers():
    import keras

    from tests.strategies import training
    from tf_hips.callbacks import LearningRateWarmup
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import CompressedRing

    rates = []
    strategy = CompressedRing()
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=2)
    look = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    x, y = training.data(4 * 8)
    loop.fit(
        x,
        y,
        batch_size=8,
        verbose=0,
        callbacks=[LearningRateWarmup(0.4, 4, steps_per_epoch=1), look],
    )
    assert rates == pytest.approx([0.25, 0.3, 0.35, 0.4])


def _spoil_a_statistic(folder):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.loops import FedAvg
    from tf_hips.strategies import HierarchicalPS

    class Spoils(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4 and primitives.rank() == 1:
                statistics = self.model.layers[2].moving_mean
                statistics.assign(np.full(statistics.shape, np.nan))

    [run] = _configs()
    keras.utils.set_random_seed(5)
    strategy = HierarchicalPS(config=run)
    model = _model(strategy)
    loop = FedAvg(model, strategy, local_steps=4)
    x, y = training.data(10 * 8, seed=primitives.rank())
    loop.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[Spoils()])
    slots = [one.numpy().tolist() for one in model.optimizer.variables]
    everyone = primitives.gather_objects(slots, "slots")
    assert all(one == slots for one in everyone)
    assert all(np.isfinite(one).all() for one in model.get_weights())
    strategy.close()


@pytest.mark.timeout(150)
def test_slots_of_a_party_begin_anew_together(tmp_path):
    with serving("spoilt", parties=SITES[:1], rule="fedavg(1.0)") as server:
        configs = write_configs(tmp_path, "spoilt", f"127.0.0.1:{server.port}")[:1]
        run_parties(
            _spoil_a_statistic,
            {"folder": tmp_path},
            [2],
            party_environments(configs),
            deadline_s=120,
        )
