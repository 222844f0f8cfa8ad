# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression in training: momentum in the codec, and its state in a checkpoint."""

import math

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

TEXT = "dgc(ratio=0.1, clip_norm=10)"


def _make(compression, momentum=0.0):
    import keras

    from tests.strategies import training
    from tf_hips.strategies import CompressedRing

    keras.utils.set_random_seed(5)
    strategy = CompressedRing(compression)
    with strategy.scope():
        return strategy, training.build(keras.optimizers.SGD(0.02, momentum=momentum))


@ranks(2)
def test_its_state_is_kept_and_read_again(tmp_path):
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()
    x, y = training.shard(training.data(64), rank, 2)

    def made(text):
        strategy, model = _make(text)
        model.run_eagerly = True
        return strategy, model

    strategy, model = made(TEXT)
    first = model.get_weights()
    for _ in range(3):
        model.train_on_batch(x, y)
    training.assert_same_on_all_ranks(model)
    kept = {variable.name: variable for variable in strategy.state.variables}
    states = [value for name, value in kept.items() if "state_" in name]
    # A velocity and a residual of each of two kernels and two biases.
    assert [[*value.shape] for value in states] == [[2, 96], [2, 16], [2, 48], [2, 3]]
    assert all(np.any(value.numpy() != 0) for value in states)
    path = training.checkpoint(strategy, model).write(f"{tmp_path}/rank-{rank}")
    model.train_on_batch(x, y)

    strategy, again = made(TEXT)
    training.checkpoint(strategy, again).read(path).expect_partial()
    again.train_on_batch(x, y)
    for mine, theirs, before in zip(again.get_weights(), model.get_weights(), first, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert np.any(mine != before)

    strategy, other = made("dgc(ratio=0.2)")
    with pytest.raises(ProtocolError, match="dgc"):
        training.checkpoint(strategy, other).read(path)


@pytest.mark.slow  # the same in graphs, and how near it comes to momentum
@ranks(2, deadline_s=240)
def test_it_trains_as_momentum_does_and_goes_on_where_it_stopped(tmp_path):
    import numpy as np

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError

    rank = primitives.rank()
    own = training.shard(training.data(320), rank, 2)

    _, model = _make(None, momentum=0.9)
    momentum = training.fit(model, own, epochs=8)
    _, model = _make(None)
    plain = training.fit(model, own, epochs=8)
    strategy, model = _make(TEXT)
    losses = training.fit(model, own, epochs=4)
    path = training.checkpoint(strategy, model).write(f"{tmp_path}/rank-{rank}")
    losses += training.fit(model, own, epochs=4)
    training.assert_same_on_all_ranks(model)
    # A tenth of the elements: nearer to momentum than to the same steps without it.
    assert losses[-1] < 0.2 * losses[0]
    assert abs(losses[-1] - momentum[-1]) < 0.5 * abs(plain[-1] - momentum[-1]), (
        *(losses, momentum, plain),
    )
    kept = {variable.name: variable.shape for variable in strategy.state.variables}
    states = [shape for name, shape in kept.items() if "state_" in name]
    # A velocity and a residual of each of two kernels and two biases.
    assert [list(shape) for shape in states] == [[2, 96], [2, 16], [2, 48], [2, 3]]

    # Another process would do the same: the state comes back before the first step.
    strategy, again = _make(TEXT)
    training.checkpoint(strategy, again).read(path).expect_partial()
    assert training.fit(again, own, epochs=4) == losses[4:]
    for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    training.assert_same_on_all_ranks(again)

    strategy, other = _make("dgc(ratio=0.2)")
    with pytest.raises(ProtocolError, match="dgc"):
        training.checkpoint(strategy, other).read(path)


def _of_the_paper(gradients, ratios, *, clip_norm, nesterov):
    """Lin et al., 2018, algorithm 1 with section 3 and appendix B, in float64, for SGD with rate 1.

    Args:
        gradients: [step][rank][variable], arrays.
        ratios: of each step, the share that is sent.
        clip_norm: of the sum; each of N ranks clips its own to clip_norm / sqrt(N).
        nesterov: whether momentum is Nesterov's.

    Returns:
        How far each variable has moved after each step.
    """
    import numpy as np

    count = len(gradients[0])
    u = [[np.zeros(g.shape) for g in mine] for mine in gradients[0]]
    v = [[np.zeros(g.shape) for g in mine] for mine in gradients[0]]
    moved = [np.zeros(g.shape) for g in gradients[0][0]]
    after = []
    for of_ranks, ratio in zip(gradients, ratios, strict=True):
        for rank, mine in enumerate(of_ranks):
            norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in mine))
            short = min(1.0, clip_norm / np.sqrt(count) / norm)
            for place, g in enumerate(mine):
                g = g * short
                u[rank][place] = 0.9 * (u[rank][place] + g if nesterov else u[rank][place]) + (
                    0.0 if nesterov else g
                )
                v[rank][place] = v[rank][place] + u[rank][place] + (g if nesterov else 0.0)
                size = np.abs(v[rank][place])
                least = np.sort(size)[-math.ceil(ratio * g.size)]
                sent = size >= least
                moved[place] = moved[place] + np.where(sent, v[rank][place], 0.0)
                u[rank][place][sent] = 0.0
                v[rank][place][sent] = 0.0
        after.append(list(moved))
    return after


@ranks(2)
def test_each_step_is_that_of_the_paper():
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    sizes, steps = (200, 30), 8
    gradients = [
        [
            [np.random.default_rng((s, r, n)).standard_normal(n).astype(np.float32) for n in sizes]
            for r in range(2)
        ]
        for s in range(steps)
    ]
    # Of two stages on the way from 1 down to a tenth: its third root, and that squared.
    warm = [0.1 ** (1 / 3)] * 2 + [0.1 ** (2 / 3)] * 2 + [0.1] * 4
    for text, ratios, clip_norm, nesterov in (
        ("dgc(ratio=0.1)", [0.1] * steps, math.inf, False),
        ("dgc(ratio=0.1, nesterov=1)", [0.1] * steps, math.inf, True),
        ("dgc(ratio=0.1, clip_norm=5)", [0.1] * steps, 5.0, False),
        ("warmup(dgc(ratio=0.1), steps=4, stages=2)", warm, math.inf, False),
    ):
        strategy = CompressedRing(text)
        with strategy.scope():
            weights = [tf.Variable(tf.zeros([n])) for n in sizes]
            optimizer = keras.optimizers.SGD(1.0)
        wanted = _of_the_paper(gradients, ratios, clip_norm=clip_norm, nesterov=nesterov)
        for of_ranks, moved in zip(gradients, wanted, strict=True):
            mine = [tf.constant(g) for g in of_ranks[primitives.rank()]]
            strategy.run(optimizer.apply, (mine, weights))
            for weight, far in zip(weights, moved, strict=True):
                np.testing.assert_allclose(-weight.numpy(), far, rtol=0, atol=1e-5, err_msg=text)
        strategy.close()


@ranks(2)
def test_what_is_not_finite_is_named_before_it_is_clipped():
    import keras
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import NonFiniteError
    from tf_hips.strategies import CompressedRing

    strategy = CompressedRing(TEXT)
    with strategy.scope():
        weights = [tf.Variable(tf.ones([8])) for _ in range(3)]
        optimizer = keras.optimizers.SGD(1.0)
    spoilt = float("nan") if primitives.rank() == 1 else 1.0

    def step():
        optimizer.apply([tf.ones([8]), tf.fill([8], spoilt), tf.ones([8])], weights)

    with pytest.raises(NonFiniteError, match=r"Gradient 1 \(.*of rank 1"):
        strategy.run(step)


def test_momentum_is_applied_once():
    from tf_hips.errors import ConfigError
    from tf_hips.ps.server.server import ServerConfig
    from tf_hips.ps.session.settings import terms_of
    from tf_hips.strategies import HierarchicalPS

    with pytest.raises(ValueError, match="must wrap a codec without state"):
        HierarchicalPS("error_feedback(dgc)")
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        HierarchicalPS("dgc", downlink="dgc")
    with pytest.raises(ValueError, match="sums must be encoded without momentum"):
        HierarchicalPS("dgc", local_compression="dgc")
    server = {"parties": ("north",), "insecure": True, "compression": "dgc(0.1)"}
    with pytest.raises(ConfigError, match="sums must be encoded without momentum"):
        ServerConfig(**server, downlink="dgc")
    terms = terms_of(ServerConfig(**server, downlink="same"))
    assert terms.downlink == "error_feedback(topk(ratio=0.4))"
