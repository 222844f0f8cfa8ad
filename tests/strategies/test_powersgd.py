# SPDX-License-Identifier: Apache-2.0
"""PowerSGD in training: beside exact sums, resumed, with bad gradients, and where it is refused."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

TEXT = "error_feedback(powersgd(rank=1))"


def _make(compression, optimizer="sgd", **options):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import HierarchicalPS

    keras.utils.set_random_seed(5)
    # Without a server, inside of the party.
    strategy = HierarchicalPS(local_compression=compression, **options)
    with strategy.scope():
        return strategy, training.build(keras.optimizers.get(optimizer))


@pytest.mark.slow
@ranks(2, deadline_s=240)
def test_it_trains_as_exact_sums_do_and_goes_on_where_it_stopped(tmp_path):
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()
    own = training.shard(training.data(320), rank, 2)

    _, model = _make(None)
    exact = training.fit(model, own, epochs=8)
    _, model = _make("powersgd(rank=1)")
    biased = training.fit(model, own, epochs=8)
    strategy, model = _make(TEXT)
    losses = training.fit(model, own, epochs=4)
    path = training.checkpoint(strategy, model).write(f"{tmp_path}/rank-{rank}")
    losses += training.fit(model, own, epochs=4)
    training.assert_same_on_all_ranks(model)
    # One direction of six and of three: error feedback brings the others later.
    assert abs(losses[-1] - exact[-1]) < 0.5 * abs(biased[-1] - exact[-1]), (losses, exact, biased)
    kept = {
        name: list(value.shape)
        for name, value in vars(strategy.state.gradients0).items()
        if name.startswith(("basis", "residual"))
    }
    assert kept == {
        "basis_0": [16, 1],
        "residual_0": [6, 16],
        "basis_2": [3, 1],
        "residual_2": [16, 3],
    }

    # Another process would do the same: the state comes back before the first step.
    for place in ("before", "after"):
        strategy, again = _make(TEXT)
        if place == "after":
            training.fit(again, own)
        training.checkpoint(strategy, again).read(path).expect_partial()
        continued = training.fit(again, own, epochs=4)
        assert continued == losses[4:], place
        for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    strategy, other = _make("error_feedback(powersgd(rank=2))")
    with pytest.raises(ProtocolError, match="powersgd"):
        training.checkpoint(strategy, other).read(path)


@ranks(2)
def test_gradients_that_are_not_finite():
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import NonFiniteError
    from tf_hips.strategies import HierarchicalPS

    rank = primitives.rank()
    own = training.shard(training.data(32), rank, 2)
    bad = [array.copy() for array in own]
    if rank == 1:
        bad[0][0, 0] = np.nan
    for mode in ("zero", "propagate"):
        strategy, model = _make(TEXT, nonfinite=mode)
        model.run_eagerly = mode == "propagate"
        training.fit(model, own)
        before = model.get_weights()
        training.fit(model, bad)
        training.assert_same_on_all_ranks(model)
        is_finite = all(np.isfinite(weight).all() for weight in model.get_weights())
        assert is_finite == (mode == "zero")
        # What is not finite is not kept: with the old weights it trains on.
        for variable in strategy.state.variables:
            assert not variable.dtype.is_floating or np.isfinite(variable.numpy()).all()
        model.set_weights(before)
        assert np.isfinite(training.fit(model, own)[-1])

    # All ranks raise the same, in the step of the NaN: also of a stage, and eagerly.
    told = r"^Gradient 0 \(.*kernel, shape \[6, 16\]\) of rank 1 must be finite.* in step 2$"
    for text in (TEXT, f"warmup({TEXT}, steps=1)"):
        strategy = HierarchicalPS(local_compression=text)
        for is_eager in (False, True):
            with strategy.scope():
                model = training.build()
            model.run_eagerly = is_eager
            training.fit(model, own)
            with pytest.raises(NonFiniteError, match=told):
                training.fit(model, bad)


def test_servers_have_no_part_in_it():
    from tf_hips.config import Run
    from tf_hips.errors import ConfigError, ProtocolError
    from tf_hips.ps.server.server import ServerConfig
    from tf_hips.ps.session.joining import described
    from tf_hips.ps.session.settings import terms_of
    from tf_hips.strategies import HierarchicalPS

    for arguments in (
        {"compression": TEXT},
        {"downlink": "powersgd"},
        {"config": Run(compression=TEXT)},
    ):
        with pytest.raises(ValueError, match=r"must make packets.*local_compression"):
            HierarchicalPS(**arguments)
    server = {"parties": ("north",), "insecure": True}
    for arguments in ({"compression": TEXT}, {"downlink": TEXT}):
        with pytest.raises(ConfigError, match=r"must make packets.*local_compression"):
            ServerConfig(**server, **arguments)
    terms = terms_of(ServerConfig(**server))
    with pytest.raises(ProtocolError, match=r"`compression`.*must make packets"):
        described(terms, None, "process", 1, TEXT, "same", 0)
