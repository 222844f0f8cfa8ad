# SPDX-License-Identifier: Apache-2.0
"""Weights that are made while a function is traced: made equal in time, or refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tests.strategies.test_beginning import X, _with_parties

pytestmark = pytest.mark.tf


def test_weights_made_from_what_a_worker_feeds_are_refused():
    strategy = _with_parties([])
    made = []

    def step(x):
        if not made:
            made.append(tf.Variable(tf.reduce_mean(x, 0), name="made"))
        optimizer.apply([made[0] + 0.0], made)

    def in_a_function(x):
        return tf.function(lambda x: strategy.run(step, (x,)))(x)

    for run in (
        in_a_function,
        lambda x: strategy.run(tf.function(step), (x,)),
        tf.function(lambda x: strategy.run(tf.function(step), (x,))),
    ):
        with strategy.scope():
            optimizer = keras.optimizers.SGD(1.0)
        made.clear()
        message = "must have their values before a step.*Received: made"
        with pytest.raises(tf_hips.errors.ProtocolError, match=message):
            run(tf.constant(X))

    alone = tf_hips.CompressedRing()  # nobody begins elsewhere
    strategy = alone
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
    made.clear()
    in_a_function(tf.constant(X))
    np.testing.assert_array_equal(made[0], np.zeros(3))


class Late:
    """A weight that a step makes, and an inner function that reduces its gradient."""

    def __init__(self, strategy, *, is_cached):
        self.made, self.is_cached = [], is_cached
        self.strategy = strategy
        with strategy.scope():
            self.optimizer = keras.optimizers.SGD(1.0)
        self._inner = tf.function(self._apply)

    def _apply(self, gradient):
        self.optimizer.apply([gradient], self.made)

    def step(self):
        if not self.made:
            self.made.append(tf.Variable([1.0, 2.0], name="made"))
        (self._inner if self.is_cached else tf.function(self._apply))(self.made[0] + 0.0)


@pytest.mark.parametrize(
    "around",
    [
        lambda late: tf.function(lambda: late.strategy.run(late.step)),
        lambda late: lambda: late.strategy.run(tf.function(late.step)),
    ],
)
def test_weights_made_around_a_function_that_reduces(around):
    sent = []
    late = Late(_with_parties(sent), is_cached=True)
    message = "must be equal on all workers.*Received: made.*without the inner"
    with pytest.raises(tf_hips.errors.ProtocolError, match=message):
        around(late)()
    assert not sent
    # Where the inner function is another one in each trace, its second trace meets.
    late = Late(_with_parties(sent), is_cached=False)
    train = around(late)
    train()
    assert len(sent) == 1
    np.testing.assert_array_equal(late.made[0], [0.0, 0.0])
    train()
