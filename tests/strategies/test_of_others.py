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

    global_rank = 0
    num_replicas_in_sync = 2

    def __init__(self):
        self.config = types.SimpleNamespace(seed=7)

    def _codecs(self):
        from tf_hips.ops.compressor import parse

        return {"compression": parse("error_feedback(onebit)")}

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
