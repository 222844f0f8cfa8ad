# SPDX-License-Identifier: Apache-2.0
"""Momentum at the workers in training: as Keras' own behind a mean, and below robust rules."""

import os

import numpy as np
import pytest

from tests.support import sites
from tests.support.ranks import ranks, run_parties
from tf_hips import config

pytestmark = pytest.mark.tf

TEXT = "momentum(error_feedback(onebit), beta=0.9)"


def _make(compression, rate, momentum=0.0, seed=5, is_eager=True, **options):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import CompressedRing

    keras.utils.set_random_seed(seed)
    strategy = CompressedRing(compression, **options)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(rate, momentum=momentum)
        return strategy, training.build(optimizer, run_eagerly=is_eager)


@ranks(2, deadline_s=240)
def test_behind_a_mean_it_is_momentum_and_it_goes_on_where_it_stopped(tmp_path):
    from tests.strategies import training
    from tf_hips import loops
    from tf_hips.comm import primitives
    from tf_hips.errors import ConfigError, ProtocolError

    rank = primitives.rank()
    own = training.shard(training.data(80), rank, 2)

    _, model = _make(None, 0.02, momentum=0.9)
    expected = training.fit(model, own)
    for text in ("momentum(fp32, beta=0.9)", "warmup(momentum(fp32, beta=0.9), steps=3)"):
        _, sender = _make(text, 0.2)
        np.testing.assert_allclose(training.fit(sender, own), expected, rtol=1e-4)
        for mine, theirs in zip(sender.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)

    # Another process would do the same: the state comes back before the first step.
    strategy, model = _make(TEXT, 0.05)
    training.fit(model, own)
    path = training.checkpoint(strategy, model).write(f"{tmp_path}/rank-{rank}")
    losses = training.fit(model, own)
    training.assert_same_on_all_ranks(model)
    kept = {variable.name: list(variable.shape) for variable in strategy.state.variables}
    states = [shape for name, shape in kept.items() if "state_" in name]
    # Momentum and residual of each of two kernels and two biases.
    assert states == [[2, 96], [2, 16], [2, 48], [2, 3]]
    strategy, again = _make(TEXT, 0.05)
    training.checkpoint(strategy, again).read(path).expect_partial()
    assert training.fit(again, own) == losses
    for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    strategy, other = _make("momentum(error_feedback(onebit), beta=0.5)", 0.05)
    with pytest.raises(ProtocolError, match="compression is momentum"):
        training.checkpoint(strategy, other).read(path)

    # Where sums are encoded on the way it would be applied again.
    strategy, model = _make(TEXT, 0.05, topology="ring")
    with pytest.raises(ValueError, match="must have a compressor without momentum"):
        training.fit(model, own)
    # What a loop sends are no gradients.
    strategy, model = _make(TEXT, 0.05)
    with pytest.raises(ConfigError, match="must be without momentum under a loop"):
        loops.FedAvg(model, strategy, local_steps=2)


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        (TEXT, "ps"),
        pytest.param(
            "warmup(momentum(error_feedback(onebit)), steps=5)",
            "allgather",
            marks=pytest.mark.slow,
        ),
        pytest.param("momentum(fp32)", "ps", marks=pytest.mark.slow),
    ],
)
@ranks(3, deadline_s=240)
def test_a_rule_of_ranks_looks_at_running_means(text, topology):
    """One rank sends -20 times its gradient; exact steps of a warm-up have momentum, too."""
    from tests.strategies import training
    from tf_hips import robust
    from tf_hips.comm import primitives

    rank = primitives.rank()
    x, y = training.data(480)
    own = training.shard([x, y], rank, 3)
    if rank == 1:
        own = [own[0], -20 * own[1]]
    strategy, model = _make(text, 0.2, is_eager=False, robust=robust.median(), topology=topology)
    training.fit(model, own, epochs=3)
    training.assert_same_on_all_ranks(model)
    assert np.mean((model(x).numpy() - y) ** 2) < 0.3 * np.mean(y**2)
    names = [variable.name for variable in strategy.state.variables]
    assert sum("state_" in name for name in names) == 4


def test_it_is_applied_once():
    from tf_hips.errors import ConfigError
    from tf_hips.ps.server.server import ServerConfig
    from tf_hips.ps.session.settings import terms_of
    from tf_hips.strategies import HierarchicalPS

    text = "momentum(onebit)"
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        HierarchicalPS(text, downlink=text)
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        HierarchicalPS(text, local_compression=text)
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        HierarchicalPS(text, intra="ps")
    server = {"parties": ("north",), "insecure": True, "compression": text}
    with pytest.raises(ConfigError, match="sums must be encoded without momentum"):
        ServerConfig(**server, downlink=text)
    assert terms_of(ServerConfig(**server, downlink="same")).downlink == "onebit"


def test_groups_that_change_cannot_vote_on_it():
    from tf_hips import robust
    from tf_hips.ops import parse
    from tf_hips.robust import detox

    voting = detox.Detox(3, robust.median())
    with pytest.raises(ValueError, match="must be compressed without error feedback or momentum"):
        detox.check_compressor(voting, parse("momentum(fp32)"))


SITES = ("north", "south", "east", "west")
RATE, STEPS = 0.05, 6


def _train(folder, compression):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS

    run = config.load(os.environ["TEST_CONFIG"])
    site = run.uplink.site
    keras.utils.set_random_seed(3)
    x, y = training.data(STEPS * training.BATCH)
    if site == "west":
        y = 50.0 - 10.0 * y  # its gradients are far from those of the others
    strategy = HierarchicalPS(compression, rule="krum(f=0)", config=run)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(RATE))
    training.fit(model, [x, y])
    np.savez(folder / f"{site}.npz", *model.get_weights())
    names = [variable.name for variable in strategy.state.variables]
    assert sum("uplink_state_" in name for name in names) == 4, names
    strategy.close()


def _plain(folder):
    import keras

    from tests.strategies import training

    keras.utils.set_random_seed(3)
    model = training.build(keras.optimizers.SGD(0.1 * RATE, momentum=0.9))
    training.fit(model, training.data(STEPS * training.BATCH))
    np.savez(folder / "plain.npz", *model.get_weights())


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "compression", ["momentum(fp32)", "mixed(momentum(fp32), below=90)"], ids=["alone", "mixed"]
)
def test_honest_parties_train_as_one_with_momentum(tmp_path, compression):
    """Krum takes the row of one of three that are equal; small tensors of a mixture are fp16."""
    with sites.trained(tmp_path, _train, SITES, {"compression": compression}):
        pass
    run_parties(_plain, {"folder": tmp_path}, [1], [{}], deadline_s=60)
    with np.load(tmp_path / "plain.npz") as held:
        plain = [held[name] for name in held.files]
    atol = 1e-5 if compression == "momentum(fp32)" else 2e-3
    for site in SITES:
        with np.load(tmp_path / f"{site}.npz") as held:
            for name, wanted in zip(held.files, plain, strict=True):
                np.testing.assert_allclose(held[name], wanted, rtol=1e-4, atol=atol, err_msg=site)
