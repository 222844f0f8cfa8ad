# SPDX-License-Identifier: Apache-2.0
"""random-k: all who encode in a step draw the same elements, so the way back keeps the sums."""

import json

import pytest

from tests.strategies.test_hierarchical_ps import (
    _configs,
    party_environments,
    serving,
    write_configs,
)
from tests.support.ranks import ranks, run_parties
from tf_hips import config

pytestmark = pytest.mark.tf

ELEMENTS = 10_000
WAYS = (
    {},
    {"topology": "allgather"},
    {"topology": "ring"},
    {"topology": "hierarchical"},
    {"robust": "geometric_median"},
    {"comp_threshold": 5},
)


def _descended(strategy, gradient, steps):
    """A vector of zeros after each of some steps of SGD against a gradient of equal elements."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        weight = tf.Variable(tf.zeros([ELEMENTS]))
        descent = keras.optimizers.SGD(1.0)
    found = []
    for _ in range(steps):
        strategy.run(lambda: descent.apply([tf.fill([ELEMENTS], float(gradient))], [weight]))
        found.append(weight.numpy())
    return found


@ranks(2)
def test_ranks_draw_alike_on_the_way_there_and_back():
    import numpy as np

    from tf_hips.comm import primitives
    from tf_hips.strategies import CompressedRing

    for way in WAYS:
        after = _descended(CompressedRing("randomk", **way), primitives.rank() + 1, 2)
        once = np.flatnonzero(after[0])
        assert once.size == ELEMENTS // 100, way
        assert np.unique(after[0][once]).size == 1, way
        # Others in the next step.
        assert np.count_nonzero(after[1]) > 1.9 * once.size, way

    wrapped = "warmup(error_feedback(randomk(ratio=0.01)), steps=1, stages=1, start=0.04)"
    warm, later = _descended(CompressedRing(wrapped), primitives.rank() + 1, 2)
    assert np.count_nonzero(warm) == ELEMENTS // 50
    assert np.unique(warm[warm != 0]).tolist() == [-3]
    assert np.count_nonzero(later != warm) == ELEMENTS // 100


def test_groups_that_vote_draw_alike():
    """Where other codecs have the noise of a group, which differs from group to group."""
    from types import SimpleNamespace

    from tf_hips.ops import native
    from tf_hips.ops.compressor import parse
    from tf_hips.strategies.grouped import GroupedStrategy

    groups = SimpleNamespace(sampling_seed=lambda step: step)
    here = SimpleNamespace(groups=groups, config=config.Run(seed=7))
    seed_of = GroupedStrategy._codec_seed
    assert seed_of(here, parse("error_feedback(randomk)")) == native.derive_seed(7, "everyone")
    assert seed_of(here, parse("terngrad")) is groups.sampling_seed


def _train(folder):
    from tf_hips.comm import primitives
    from tf_hips.strategies import HierarchicalPS

    [run] = _configs()
    worker = 2 * int(run.uplink.site == "south") + primitives.rank()
    strategy = HierarchicalPS("randomk", local_compression="randomk", config=run)
    [after] = _descended(strategy, worker + 1, 1)
    strategy.close()
    (folder / f"{worker}.json").write_text(json.dumps(after.tolist()))


@pytest.mark.timeout(150)
def test_parties_and_their_server_draw_alike(tmp_path):
    import numpy as np

    with serving("alike") as server:
        paths = write_configs(tmp_path, "alike", server.address)
        run_parties(
            _train,
            {"folder": tmp_path},
            [2, 2],
            party_environments(paths),
        )
    rows = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(4)]
    assert all(row == rows[0] for row in rows)
    after = np.array(rows[0])
    # Workers, owners, parties and the server: the step of a round is its number.
    assert np.count_nonzero(after) == ELEMENTS // 100
    assert np.unique(after[after != 0]).size == 1
