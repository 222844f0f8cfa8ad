# SPDX-License-Identifier: Apache-2.0
"""What a strategy takes of another party's state, and what it leaves: no server, no step."""

import types

import numpy as np
import pytest

pytestmark = pytest.mark.tf

OWN = (
    "residual_0",
    "residual_1_2",  # of a chunk
    "state_1",
    "owner_residual_0",
    "uplink_residual_0",
    "uplink_state_1",
)
COMMON = ("step", "basis_0")


class _Strategy:
    """As much of a strategy as its state asks for."""

    num_replicas_in_sync = 2
    loan = None

    def __init__(self, codec="error_feedback(onebit)", above=None, rank=0):
        from tf_hips.ops.compressor import parse

        self.config = types.SimpleNamespace(seed=7)
        self.global_rank = rank
        self.above = None if above is None else parse(above)
        self._codec = parse(codec)

    def _codecs(self):
        return {"compression": self._codec}

    def _way_facts(self):
        return {}

    def _counts_steps(self):
        return True


def _state():
    """A state and its part of one model; and what makes the model's list of gradients."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies.state import StrategyState

    strategy = _Strategy()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    state = StrategyState(strategy)
    state.strategy_of_the_test = strategy  # states keep none alive

    def make(value):
        with state.new_list([one.value for one in model.trainable_variables]) as made:
            for name in (*OWN, *COMMON):
                state.keep(name, tf.Variable(tf.fill([2, 3], value), name=name))
        return made

    return state, state.of_model(model), make


@pytest.mark.parametrize("is_of_others", [False, True])
def test_residuals_of_others_are_not_taken(tmp_path, is_of_others):
    import tensorflow as tf

    _, giver, make = _state()
    make(5.0)
    tf.train.Checkpoint(state=giver).write(str(tmp_path / "state"))

    state, taker, make = _state()
    assert not state.is_of_others
    if is_of_others:
        state.take_from_others()
    tf.train.Checkpoint(state=taker).read(str(tmp_path / "state"))
    made = make(1.0)  # as in the first step, after a backup was taken up
    found = {name: np.unique(getattr(made, name)).tolist() for name in (*OWN, *COMMON)}
    assert {name: found[name] for name in COMMON} == {name: [5.0] for name in COMMON}
    kept = [0.0] if is_of_others else [5.0]
    assert {name: found[name] for name in OWN} == {name: kept for name in OWN}
    assert state.is_of_others == is_of_others


@pytest.mark.parametrize(
    ("codec", "above", "num_lists", "keeps"),
    [
        ("fp32", "error_feedback(onebit)", 2, True),  # of lists behind the first, above a server
        ("fp32", "error_feedback(onebit)", 1, False),  # which keeps what its encoding drops
        ("error_feedback(onebit)", None, 1, True),
        ("fp32", "onebit", 2, False),
        ("fp32", None, 1, False),
    ],
)
def test_what_a_rank_keeps_is_no_other_ones(tmp_path, codec, above, num_lists, keeps):
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies.state import StrategyState

    primitives.init()

    def taken_up(rank):
        own = [_Strategy(codec, above, one) for one in (0, rank)]
        giver, taker = (StrategyState(one) for one in own)
        giver._books.num_lists = num_lists  # the taker has not made them yet
        tf.train.Checkpoint(state=giver).write(str(tmp_path / "state"))
        tf.train.Checkpoint(state=taker).read(str(tmp_path / "state"))

    taken_up(0)
    if keeps:
        with pytest.raises(ProtocolError, match="rank is 1 and was 0 when the state was saved"):
            taken_up(1)
    else:
        taken_up(1)
