# SPDX-License-Identifier: Apache-2.0
"""`HierarchicalPS`: parties of real Horovod ranks around a real server on loopback."""

import contextlib
import json

import pytest

from tests.support.ranks import ranks, run_parties
from tf_hips import config, log

pytestmark = pytest.mark.tf

SITES = ("north", "south")


@contextlib.contextmanager
def serving(run, parties=SITES, **settings):
    """A plain server on a free port of loopback."""
    from tf_hips.ps.server.server import Server, ServerConfig

    server = Server(
        ServerConfig(
            parties=parties,
            run=run,
            insecure=True,
            round_timeout_s=60.0,
            join_timeout_s=60.0,
            **settings,
        )
    )
    server.start()
    try:
        yield server
    finally:
        server.stop(0.0)


def write_configs(folder, run, address, deadline_s=60.0, log_dir=None):
    """One configuration file per party; returns their paths."""
    paths = []
    for site in SITES:
        path = folder / f"{run}-{site}.yaml"
        uplink = config.Uplink(server=address, site=site, deadline_s=deadline_s)
        config.dump(config.Run(run=run, seed=7, uplink=uplink, log_dir=log_dir), path)
        paths.append(path)
    return paths


def party_environments(*configs_of_runs):
    """For each party the variable that names its configurations, one per run."""
    return [
        {"TEST_CONFIGS": json.dumps([str(path) for path in paths])}
        for paths in zip(*configs_of_runs, strict=True)
    ]


def _configs():
    import os

    return [config.load(path) for path in json.loads(os.environ["TEST_CONFIGS"])]


ONEBIT = {"compression": "error_feedback(onebit)"}
NOISY = {
    "compression": "mixed(terngrad, below=20)",
    "downlink": "mixed(error_feedback(int8), below=20)",
    "local_compression": "error_feedback(onebit)",
}
# Momentum in the codec; the server answers with exact top-k.
SPARSE = {
    "compression": "dgc(ratio=0.1, clip_norm=5)",
    "local_compression": "error_feedback(powersgd(rank=1))",
}


def _train_over_parties(folder, worker_counts):
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import HierarchicalPS, fingerprint, local

    exact, compressed, shared, lazy = _configs()
    child = SITES.index(exact.uplink.site)
    num_workers = sum(worker_counts)
    worker = sum(worker_counts[:child]) + primitives.rank()
    x, y = training.data(3 * 8 * num_workers)
    own = training.shard([x, y], worker, num_workers)

    # Three steps of SGD, nothing compressed, equal one process on the joined batch.
    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS(config=exact)
    assert strategy.num_replicas_in_sync == num_workers
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.1, momentum=0.9))
    training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    keras.utils.set_random_seed(0)
    alone = training.build(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)
    if worker == 0:  # the others have the same bits
        with local():
            training.fit(alone, [x, y], batch=8 * num_workers)
        for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    results = [fingerprint(model)]
    # Another model begins with the first worker's weights, too, and is summed by gathers.
    keras.utils.set_random_seed(worker)
    with strategy.scope():
        second = training.build(keras.optimizers.SGD(0.1, momentum=0.9), run_eagerly=True)
    training.fit(second, own)
    training.assert_same_on_all_ranks(second)
    results.append(fingerprint(second))
    if worker == 0:
        for mine, theirs in zip(second.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    # Whoever has left the run trains a model of their own as without a strategy.
    with pytest.raises(ProtocolError, match="without the strategy of this process"):
        training.fit(alone, own)
    strategy.close()
    strategy.close()
    training.fit(alone, own)

    results += [_train_compressed(run, ONEBIT, own, worker) for run in (compressed, shared)]
    results.append(_train_a_lazy_model(lazy, own, worker))
    (folder / f"{worker}.json").write_text(json.dumps(results))


def _train_compressed(run, way, own, worker):
    """Eagerly: how it is in graphs is shown by `features`."""
    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS(**way, config=run)
    with strategy.scope():
        model = training.build("adam", run_eagerly=True)
    history = training.fit(model, own, epochs=2)
    assert history[-1] < history[0]
    training.assert_same_on_all_ranks(model)
    assert np.isfinite(model.evaluate(training.rows(own), verbose=0))
    strategy.close()
    return fingerprint(model)


def _train_both_ways(folder, way):
    """Compressed up, down, and inside of a party."""
    from tests.strategies import training
    from tf_hips.comm import primitives

    [run] = _configs()
    worker = 2 * SITES.index(run.uplink.site) + primitives.rank()
    own = training.shard(training.data(10 * 8 * 3), worker, 3)
    (folder / f"{worker}.json").write_text(json.dumps(_train_compressed(run, way, own, worker)))


@pytest.mark.slow
@pytest.mark.timeout(230)
@pytest.mark.parametrize("way", [NOISY, SPARSE], ids=["noisy", "sparse"])
def test_two_parties_train_with_codecs_everywhere(tmp_path, way):
    with serving("both") as server:
        configs = write_configs(tmp_path, "both", server.address)
        run_parties(
            _train_both_ways,
            {"folder": tmp_path, "way": way},
            [2, 1],
            party_environments(configs),
            deadline_s=200,
        )
    results = [path.read_text() for path in tmp_path.glob("?.json")]
    assert len(results) == 3 and len(set(results)) == 1


def _train_a_lazy_model(run, own, worker):
    """A custom loop: the weights appear in the first step, other ones on each worker."""
    import keras
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS, fingerprint

    with pytest.raises(ValueError, match="nonfinite='propagate'"):
        HierarchicalPS(nonfinite="propagate", config=run)
    keras.utils.set_random_seed(worker)
    strategy = HierarchicalPS(config=run)

    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        optimizer = keras.optimizers.Adam(0.05)

    def step(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(features) - targets) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed(features, targets):
        return strategy.run(step, (features, targets))

    batch = [tf.constant(array[: training.BATCH]) for array in own]
    losses = [float(distributed(*batch)) for _ in range(5)]
    assert losses[-1] < losses[0]

    # What comes after the parties were made equal is made equal when it is trained.
    with strategy.scope():
        late = training.build(run_eagerly=True)
    training.fit(late, own)
    training.assert_same_on_all_ranks(late)
    strategy.close()
    return fingerprint(model) + fingerprint(late)


@pytest.mark.timeout(230)
@pytest.mark.parametrize("worker_counts", [[2, 1]])
def test_two_parties_train_as_one(tmp_path, worker_counts):
    with contextlib.ExitStack() as stack:
        configs = []
        for run in ("exact", "compressed", "shared", "lazy"):
            count = 3 if run == "shared" else 1
            servers = [
                stack.enter_context(
                    serving(run, log_dir=str(tmp_path / "server"), shard=(index, count))
                )
                for index in range(count)
            ]
            address = ",".join(server.address for server in servers)
            log_dir = str(tmp_path / run)
            configs.append(write_configs(tmp_path, run, address, log_dir=log_dir))
        run_parties(
            _train_over_parties,
            {"folder": tmp_path, "worker_counts": worker_counts},
            worker_counts,
            party_environments(*configs),
            deadline_s=200,
        )
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    assert len(results) == sum(worker_counts)
    assert all(result == results[0] for result in results)
    assert results[0][2] == results[0][3], "three servers give the weights that one gives"

    events = log.read_events(tmp_path / "compressed")
    for site in SITES:
        mine = [event for event in events if event["site"] == site and event["rank"] == 0]
        rounds = [event for event in mine if event["event"] == "round"]
        assert [event["round"] for event in rounds] == list(range(6))
        # Weights, two numbers, and one for each slot that no step has touched.
        [begun] = [event for event in mine if event["event"] == "first_sync"]
        assert 652 < begun["bytes"] <= 652 + 16 + 8 * 4
        assert all(event["sent"] > 0 and event["received"] > 0 for event in rounds)
        [left] = [event for event in mine if event["event"] == "left"]
        assert left["reason"] is None
        assert left["sent"] >= sum(event["sent"] for event in rounds)
    prints = [event["value"] for event in events if event["event"] == "fingerprint"]
    assert set(prints) == {results[0][2]}
    others = [event for event in events if event["rank"] > 0]
    assert {event["event"] for event in others} == {"fingerprint"}


def _disagree(folder):
    import keras

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import PeerError, ProtocolError
    from tf_hips.strategies import HierarchicalPS

    shapes, vanished = _configs()
    x, y = training.data(16)
    south = shapes.uplink.site == "south"

    # The parties' models differ; all ranks of the later one hear where, the others that it is over.
    strategy = HierarchicalPS(config=shapes)
    with strategy.scope():
        units = 5 if south else 4
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(3)]
        )
        model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises((ProtocolError, PeerError)) as caught:
        training.fit(model, [x, y])
    (folder / f"shapes-{shapes.uplink.site}-{primitives.rank()}").write_text(str(caught.value))
    strategy.close(str(caught.value))

    # The server goes away in the middle of a run: rank 0 says so, and as what it is.
    strategy = HierarchicalPS("onebit", config=vanished)

    class Vanish(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1 and south and primitives.rank() == 0:
                (folder / "stop").touch()

    with strategy.scope():
        model = training.build()
    with pytest.raises(PeerError) as caught:
        model.fit(x, y, batch_size=1, epochs=100_000, callbacks=[Vanish()], verbose=0)
    (folder / f"vanished-{vanished.uplink.site}-{primitives.rank()}").write_text(str(caught.value))
    primitives.shutdown()


@pytest.mark.timeout(180)
def test_a_party_that_disagrees_and_a_server_that_vanishes(tmp_path):
    import threading

    with serving("shapes") as first, serving("vanished") as second:
        ended = threading.Event()

        def stop_on_request():
            while not ended.wait(0.05):
                if (tmp_path / "stop").exists():
                    # With no time at all its parties may not hear why, and look for it for long.
                    second.stop(1.0)
                    return

        watcher = threading.Thread(target=stop_on_request)
        watcher.start()
        try:
            run_parties(
                _disagree,
                {"folder": tmp_path},
                [2, 1],
                party_environments(
                    write_configs(tmp_path, "shapes", f"127.0.0.1:{first.port}"),
                    write_configs(tmp_path, "vanished", f"127.0.0.1:{second.port}", 20.0),
                ),
                deadline_s=150,
            )
        finally:
            ended.set()
            watcher.join()
    said = {path.name: path.read_text() for path in tmp_path.glob("*-*-?")}
    assert len(said) == 6
    assert any("[6, 4]" in text and "[6, 5]" in text for text in said.values()), said
    assert said["shapes-north-1"].startswith("Rank 0 of this party failed.")
    assert said["vanished-north-1"] == f"Rank 0 of this party failed. {said['vanished-north-0']}"
    assert f"127.0.0.1:{second.port}" in said["vanished-north-0"]


@ranks(2)
def test_a_worker_at_a_server_is_a_process_of_its_own():
    from tf_hips.strategies import HierarchicalPS

    with pytest.raises(ValueError, match=r"each worker is a process of its own .* Received: 2 of"):
        HierarchicalPS(intra="ps")


@ranks(1)
def test_without_an_uplink_it_is_one_party():
    import keras

    import tf_hips
    from tests.strategies import training
    from tf_hips.errors import ConfigError, PeerError, ProtocolError
    from tf_hips.strategies import CompressedRing, HierarchicalPS, fingerprint

    x, y = training.data()
    keras.utils.set_random_seed(1)
    plain = training.build("adam", run_eagerly=True)
    training.fit(plain, [x, y])
    keras.utils.set_random_seed(1)
    strategy = HierarchicalPS("error_feedback(onebit)")
    with strategy.scope():
        model = training.build("adam", run_eagerly=True)
    training.fit(model, [x, y])
    assert fingerprint(model) == fingerprint(plain)

    # What a script may ask of either, so that it changes its strategy by one line.
    for other in (HierarchicalPS("onebit", nonfinite="zero"), CompressedRing("onebit")):
        assert repr(other).startswith(f"<{type(other).__name__}: compression=onebit, ")
        assert f"nonfinite={other._nonfinite}>" in repr(other)
        assert other.seconds_in_rounds == 0.0
        with pytest.raises(ProtocolError, match=r"parties that vote.*Received: <.*=onebit"):
            other.sampling_seed()
        other.close()
        other.close("enough")
        for kind in (HierarchicalPS, CompressedRing):
            with pytest.raises(TypeError, match="positional"):
                kind("onebit", "zero")

    for name in ("compression", "downlink", "local_compression"):
        with pytest.raises(TypeError, match=f"`{name}` must be a compressor .* parentheses"):
            HierarchicalPS(**{name: tf_hips.onebit})
    for name in ("rule", "robust_global"):
        with pytest.raises(TypeError, match=f"`{name}` must be a rule .* parentheses"):
            HierarchicalPS(**{name: tf_hips.robust.krum})
    with pytest.raises(TypeError, match=r"`robust` must be a rule .* parentheses"):
        CompressedRing(robust=tf_hips.robust.krum)

    with pytest.raises(ValueError, match="intra='mpi'"):
        HierarchicalPS(intra="mpi")
    with pytest.raises(ConfigError, match="'horovod' in the script, 'ps' in the configuration"):
        HierarchicalPS(intra="horovod", config=config.Run(intra="ps"))
    with pytest.raises(
        ConfigError, match=r"`intra` must be one of horovod, ps\. Received: intra='x'"
    ):
        config.Run(intra="x")
    for option in ({"plan": "auto"}, {"topology": "ring"}, {"comp_threshold": 5}):
        with pytest.raises(ValueError, match=f"are about sums by Horovod, .*{next(iter(option))}="):
            HierarchicalPS(intra="ps", local_compression="onebit", **option)
    with pytest.raises(ValueError, match="onebit"):
        HierarchicalPS(compression="onebitt")
    # The configuration names the compression of a script that names none.
    for cls in (HierarchicalPS, CompressedRing):
        run = config.Run(compression="error_feedback(onebit)")
        assert cls(config=run)._codecs().get("compression", strategy._up) == strategy._up
        with pytest.raises(ConfigError, match=r"Received: int8\(block=128\) in the script, error"):
            cls("int8", config=run)
    assert HierarchicalPS(config=run)._up == strategy._up
    nobody = config.Run(uplink=config.Uplink(server="127.0.0.1:1", site="x", deadline_s=0.5))
    with pytest.raises(PeerError, match=r"127\.0\.0\.1:1"):
        HierarchicalPS(config=nobody)
