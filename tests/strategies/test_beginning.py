# SPDX-License-Identifier: Apache-2.0
"""When a custom loop's variables become rank 0's: before a step, and never what steps have written.

In one process, which stands for rank 1: what it is given are `THEIRS`, rank 0's values.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tf_hips.strategies import beginning

pytestmark = pytest.mark.tf

THEIRS = 100.0
X = np.ones((4, 3), "float32")
_RATE = 0.5


class Meetings:
    """What ranks meet for."""

    def __init__(self, monkeypatch):
        self.shapes = []
        monkeypatch.setattr(beginning, "check_equal_shapes", self._compare)
        monkeypatch.setattr(beginning, "synchronise", self._synchronise)

    def _compare(self, variables, advice=""):
        self.shapes.append([tuple(one.shape) for one in variables])

    def _synchronise(self, variables, first_sync=None, left=()):
        for place, variable in enumerate(variables):
            if place not in left and variable.shape.rank:
                variable.assign(tf.cast(tf.fill(variable.shape, THEIRS), variable.dtype))

    def since(self):
        """How often ranks have met since the last call."""
        number = len(self.shapes)
        self.shapes.clear()
        return number


@pytest.fixture
def meetings(monkeypatch):
    return Meetings(monkeypatch)


class Loop:
    """A loop that accumulates gradients by hand: `micro` steps, then `apply`."""

    def __init__(self, strategy, *, is_lazy=False, is_in_graph=True):
        self.strategy, self.made = strategy, []
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            self.optimizer = keras.optimizers.SGD(_RATE)
            if not is_lazy:
                self._make()
        convert = tf.function if is_in_graph else lambda function: function
        self.micro = convert(lambda x: strategy.run(self._micro, (x,)))
        self.apply = convert(lambda: strategy.run(self._apply))

    def _make(self):
        weights = self.model.trainable_variables
        self.made = [tf.Variable(tf.zeros_like(one.value)) for one in weights]

    def _micro(self, x):
        if not self.made:
            self._make()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(x) ** 2)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        for one, gradient in zip(self.made, gradients, strict=True):
            one.assign_add(gradient)

    def _apply(self):
        pairs = zip(self.made, self.model.trainable_variables, strict=True)
        self.optimizer.apply_gradients([(one + 0.0, variable) for one, variable in pairs])
        for one in self.made:
            one.assign(tf.zeros_like(one))

    def expected(self, gathered, batches):
        """The accumulated gradients of `batches` at weights of `THEIRS`, on top of `gathered`."""
        kernel, bias = np.full((3, 2), THEIRS), np.full(2, THEIRS)
        of_kernel, of_bias = (np.full(one.shape, gathered) for one in (kernel, bias))
        for x in batches:
            error = 2 * (x @ kernel + bias)
            of_kernel, of_bias = of_kernel + x.T @ error, of_bias + error.sum(0)
        return [of_kernel, of_bias]


@pytest.mark.parametrize("is_in_graph", [True, False])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_gradients_that_are_accumulated_by_hand_stay(meetings, is_lazy, is_in_graph):
    loop = Loop(tf_hips.CompressedRing(), is_lazy=is_lazy, is_in_graph=is_in_graph)
    loop.micro(X)
    # The weights were rank 0's before the step, and so were the accumulators, if they existed.
    gathered = 0.0 if is_lazy and not is_in_graph else THEIRS
    for one, expected in zip(loop.made, loop.expected(gathered, [X]), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
    # A function that makes variables is traced twice.
    assert meetings.since() == (2 if is_lazy and is_in_graph else 1)
    loop.micro(X[:3])  # in a graph as a last batch on this rank alone: nobody else would come
    loop.micro(2 * X)
    assert meetings.since() == (1 if is_lazy and not is_in_graph else 0)
    expected = loop.expected(gathered, [X, X[:3], 2 * X])
    for one, values in zip(loop.made, expected, strict=True):
        np.testing.assert_allclose(one, values, rtol=1e-6)
    loop.apply()
    assert meetings.since() == 1
    for one, values in zip(loop.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, THEIRS - _RATE * values, rtol=1e-5)


def test_a_second_model_and_what_is_local(meetings):
    strategy = tf_hips.CompressedRing()
    loops = [Loop(strategy)]
    with tf_hips.local():  # what one rank looks at alone
        tf.function(lambda: strategy.run(loops[0].model.call, (X,)))()
    assert meetings.since() == 0
    loops[0].micro(X)
    loops[0].apply()
    assert meetings.since() == 2
    loops.append(Loop(strategy))
    with strategy.scope():
        fixed = tf.Variable(np.ones(3, "float32"), trainable=False)
        count = tf.Variable(np.zeros(3, "float32"), trainable=False)

    @tf.function
    def add():
        strategy.run(count.assign_add, (fixed,))

    add()
    assert meetings.since() == 1
    np.testing.assert_array_equal(count, np.full(3, 2 * THEIRS))
    loops[0].micro(X[:1])  # which may be of one rank alone
    assert meetings.since() == 0
    loops[1].micro(X)
    loops[1].apply()
    assert meetings.since() == 1
    np.testing.assert_array_equal(count, np.full(3, 2 * THEIRS))
    expected = loops[1].expected(THEIRS, [X])
    for one, values in zip(loops[1].model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, THEIRS - _RATE * values, rtol=1e-5)


def test_what_eager_steps_change_stays_and_what_they_only_use_does_not(meetings):
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        weight = tf.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        own = tf.Variable(np.zeros(2, "float32"))
    strategy.run(lambda: None)
    own.assign([7, 7])  # as a checkpoint of this rank's
    with strategy.scope():
        fixed, count = (tf.Variable(np.ones(2, "float32"), trainable=False) for _ in range(2))

    def step():
        count.assign_add(fixed)
        optimizer.apply([tf.ones(2)], [weight])

    for _ in range(2):
        strategy.run(step)
    np.testing.assert_array_equal(count, [3, 3])  # each step of this rank
    np.testing.assert_array_equal(fixed, [THEIRS, THEIRS])
    np.testing.assert_allclose(weight, np.full(2, THEIRS - 1.0))  # both gradients are this rank's
    with strategy.scope():
        other = keras.optimizers.SGD(1.0)
    strategy.run(lambda: other.apply([tf.ones(2)], [count]))  # now it is trained
    np.testing.assert_array_equal(count, np.full(2, THEIRS - 1.0))
    np.testing.assert_array_equal(own, [7, 7])


def test_what_steps_have_changed_before_the_parties_meet_stays():
    strategy = tf_hips.CompressedRing()
    sent = []

    def first_sync(values):
        sent.append(len(values))
        return [np.full_like(value, THEIRS) if value.ndim else value for value in values]

    strategy.beginning.first_sync = first_sync
    with strategy.scope():
        count, other = (tf.Variable(tf.zeros(2, tf.int32), trainable=False) for _ in range(2))

    @tf.function
    def add():
        strategy.run(count.assign_add, ([1, 1],))

    add()
    assert not sent  # nothing that is trained exists
    loop = Loop(strategy)
    loop.micro(X)
    assert len(sent) == 1
    np.testing.assert_array_equal(count, [1, 1])
    np.testing.assert_array_equal(other, [THEIRS, THEIRS])
    for one, expected in zip(loop.made, loop.expected(THEIRS, [X]), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
    gathered = [one.numpy() for one in loop.made]
    loop.apply()
    assert len(sent) == 1
    for one, values in zip(loop.model.get_weights(), gathered, strict=True):
        np.testing.assert_allclose(one, THEIRS - _RATE * values, rtol=1e-5)


class Accumulating(keras.Model):
    """Accumulates in weights of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3,), initializer="ones")
        self.gathered = self.add_weight(shape=(3,), initializer="zeros", trainable=False)
        self.optimizer = keras.optimizers.SGD(_RATE)
        self.built = True

    def micro(self, x):
        """Adds to the gradients."""
        self.gathered.assign_add(self.kernel * x)

    def apply(self):
        """Makes a step."""
        self.optimizer.apply([self.gathered + 0.0], [self.kernel])


def test_methods_of_a_model_begin_as_functions_do(meetings):
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        model = Accumulating()
    tf.function(lambda x: strategy.run(model.micro, (x,)))(tf.ones(3))
    assert meetings.since() == 1
    np.testing.assert_array_equal(model.gathered, np.full(3, 2 * THEIRS))
    tf.function(lambda: strategy.run(model.apply))()
    np.testing.assert_allclose(model.kernel, np.full(3, THEIRS - _RATE * 2 * THEIRS))
