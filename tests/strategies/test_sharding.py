# SPDX-License-Identifier: Apache-2.0
"""`tf_hips.shard` and `tf_hips.gather` on real ranks.

Training equals one process on the joined batch, nothing is dropped in evaluation, predictions come
back in order; in a party and over parties.
"""

import pytest

from tests.strategies.test_hierarchical_ps import (
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import ranks, run_parties

pytestmark = pytest.mark.tf


@ranks(2)
def test_two_ranks_share_rows():
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips import config, data
    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing
    from tf_hips.strategies.sharding import gather, set_epoch, shard

    rank = primitives.rank()
    x, y = training.data(70)
    with pytest.raises(ValueError, match="0 strategies made"):
        shard(x, 8)
    with pytest.raises(ValueError, match="must be one of tf_hips"):
        shard(x, 8, strategy=tf.distribute.OneDeviceStrategy("/cpu:0"))

    strategy = CompressedRing(config=config.Run(seed=5))
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = training.build(keras.optimizers.SGD(0.1))
        rows = shard((x, y), 8)  # a variable of the strategy's that no model has
    keras.utils.set_random_seed(0)
    alone = training.build(keras.optimizers.SGD(0.1))

    # Three epochs, each in an order of its own, against one process on the joined batches.
    assert int(rows.cardinality()) == 4
    tf.random.set_seed(rank)
    model.fit(rows, epochs=3, verbose=0)
    training.assert_same_on_all_ranks(model)
    joined = data.shard((x, y), 16, group=0, groups=1, seed=5)
    orders = [[batch.numpy().tobytes() for batch, _ in joined] for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    data.positions_of(joined)[0].set(0)
    epochs = [list(joined) for _ in range(3)]
    ring_of_one = epochs[0] + epochs[1] + epochs[2]
    for batch in ring_of_one:
        # Its own model: this worker trains it without the others.
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((alone(batch[0]) - batch[1]) ** 2)
        gradients = tape.gradient(loss, alone.trainable_variables)
        alone.optimizer.apply_gradients(zip(gradients, alone.trainable_variables, strict=True))
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    # 17 rows: rank 0 has 9, rank 1 has 8, and none is dropped.
    few = x[:17], y[:17]
    own = shard(few, 4, shuffle=False, drop_remainder=False, strategy=strategy)
    assert [int(tf.shape(batch)[0]) for batch, _ in own] == [[4, 4, 1], [4, 4]][rank]
    result = model.evaluate(own, verbose=0)
    expected = np.mean((alone.predict(few[0], verbose=0) - few[1]) ** 2)
    np.testing.assert_allclose(result, expected, rtol=1e-4)

    own = shard(few[0], 4, shuffle=False, drop_remainder=False)
    part = model.predict(own, verbose=0)
    assert part.shape == (9 - rank, 3)
    np.testing.assert_allclose(gather(part), model.predict(few[0], verbose=0), rtol=1e-5)
    # Fewer rows than one batch, down to one for each worker.
    own = shard(few[0][:2], 4, shuffle=False, drop_remainder=False)
    assert gather(model.predict(own, verbose=0)).shape == (2, 3)

    # Any structure, any type; the bits are what they were.
    values = np.array([-0.0, np.nan, 1e-45, np.inf, 3.0], np.float32)
    whole = {
        "floats": values,
        "small": (np.arange(10, dtype=np.uint8).reshape(5, 2), values.astype(np.float16)),
        "flags": np.array([True, False, True, True, False]),
        "long": np.arange(5) * -(2**40),
    }
    back = gather(tf.nest.map_structure(lambda array: array[rank::2], whole))
    for given, got in zip(tf.nest.flatten(whole), tf.nest.flatten(back), strict=True):
        assert given.dtype == got.dtype
        assert given.tobytes() == got.tobytes()

    # Rows that are not those of a shard, told alike on all ranks.
    wrong = [
        (x[: 4 - 2 * rank], r"drops nothing.*worker 0: float32 \[4, 6\]; worker 1: .*\[2, 6\]"),
        (x[: 3 + rank], "drops nothing"),
        (x[:4] if rank else y[:4], "same shape and type on all workers"),
        (x[:4].astype(np.float64 if rank else np.float32), "same shape and type"),
        ((x[:4], x[:4]) if rank else x[:4], "same shape and type"),
        (np.float32(1), "same shape and type"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError, match=message):
            gather(value)
    with pytest.raises(ValueError, match="must have at least 2 rows, 1 for each of 2 workers"):
        shard(few[0][:1], 4, drop_remainder=False)

    # A loop that counts epochs by itself, and one that is taken up again.
    def firsts(dataset):
        return [float(batch[0, 0]) for batch in dataset]

    chained = shard(x, 8).map(lambda batch: batch * 2.0).prefetch(1)
    first, second = firsts(chained), firsts(chained)
    assert first != second
    again = shard(x, 8).map(lambda batch: batch * 2.0)
    set_epoch(again, 1)
    assert firsts(again) == second
    assert firsts(shard(x, 8, seed=6).map(lambda batch: batch * 2.0)) != first
    assert len(set(primitives.gather_objects(first[0]))) == 2
    with pytest.raises(ValueError, match="`dataset` must come from"):
        set_epoch(tf.data.Dataset.range(3), 1)

    # The same strategy made again, as in a notebook: the same workers share alike.
    again = CompressedRing(config=config.Run(seed=5))
    assert firsts(shard(x, 8).map(lambda batch: batch * 2.0)) == first
    assert gather(x[rank::2]).tobytes() == x.tobytes()
    # One with another seed: whose shares is no longer clear, unless the old one is gone.
    other = CompressedRing(config=config.Run(seed=6))
    with pytest.raises(ValueError, match="3 strategies made"):
        shard(x, 8)
    with again.scope():
        assert firsts(shard(x, 8).map(lambda batch: batch * 2.0)) == first
    other.in_a_cycle = other
    del other
    assert firsts(shard(x, 8).map(lambda batch: batch * 2.0)) == first


def _share_over_parties():
    import numpy as np
    import tensorflow as tf

    from tf_hips import data
    from tf_hips.strategies import HierarchicalPS
    from tf_hips.strategies.sharding import gather, shard

    [config] = _configs()
    strategy = HierarchicalPS(config=config)
    worker, workers = strategy.sample_group()
    assert workers == 3
    rows = np.arange(20.0, dtype=np.float32)
    batches = [batch.numpy().tolist() for batch in shard(rows, 3)]
    alone = data.shard(rows, 9, group=0, groups=1, seed=7)
    assert batches == [batch.numpy()[worker::3].tolist() for batch in alone]
    own = shard((rows, tf.constant(rows > 4)), 4, shuffle=False, drop_remainder=False)
    parts = [np.concatenate(part) for part in zip(*own.as_numpy_iterator(), strict=True)]
    assert len(parts[0]) == [7, 7, 6][worker]
    values, flags = gather(tuple(parts))
    assert values.tolist() == rows.tolist()
    assert flags.tolist() == (rows > 4).tolist()
    strange = np.array([-0.0, np.nan, 1e-45], np.float32)
    assert gather(strange[worker::3]).tobytes() == strange.tobytes()
    with pytest.raises(
        ValueError, match=r"worker 0: .*\[1\]; worker 1: .*\[2\]; worker 2: .*\[3\]"
    ):
        gather(rows[: worker + 1])
    strategy.close()


@pytest.mark.heavy
@pytest.mark.timeout(200)
def test_workers_of_two_parties_share_rows(tmp_path):
    with serving("rows") as server:
        paths = write_configs(tmp_path, "rows", f"127.0.0.1:{server.port}")
        environments = party_environments(paths)
        run_parties(_share_over_parties, {}, [2, 1], environments, deadline_s=150)
