# SPDX-License-Identifier: Apache-2.0
"""Gradients that have their values before ranks make weights equal: right, or refused by name.

As in `test_beginning` this process stands for rank 1, and `THEIRS` are rank 0's values, or those of
the first party. Two real ranks are in `test_divergence`.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tests.strategies.test_beginning import THEIRS, Loop, Meetings, X, _with_parties
from tf_hips.errors import ProtocolError
from tf_hips.strategies import meetings as meeting
from tf_hips.strategies.computed import Moved, are_fed

pytestmark = pytest.mark.tf

OWN = 3.0
REFUSED = "must exist, and be equal on all workers, before gradients.*Received: gradients of {}"


@pytest.fixture
def meet(monkeypatch):
    """A function that makes a strategy: of a party that meets others, or of rank 1."""

    def make(*, has_parties, is_equal=True):
        if has_parties:
            strategy = _with_parties([])
            _later(strategy)
            return strategy
        Meetings(monkeypatch).has_equal_digests = is_equal
        return tf_hips.CompressedRing()

    return make


def _later(strategy, theirs=THEIRS):
    """What parties make equal behind their first meeting; a list of what has come."""
    later = []

    def next_sync(values):
        later.append([value.shape for value in values if value.ndim])
        return [np.full_like(value, theirs) if value.ndim else value for value in values]

    strategy.beginning.meetings.next_sync = lambda: next_sync
    return later


def _traced(function, *arguments):
    """What `function` returns to Python while it is traced."""
    told = []

    def trace(*inputs):
        told.append(function(*inputs))

    tf.function(trace, autograph=False).get_concrete_function(*arguments)
    return told[-1]


def test_what_a_function_is_fed_with():
    weight, kept = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    rows = tf.constant([1.0, 2.0])
    large = tf.ones(1000)  # a small one becomes a constant of the graph

    def told(gradient, known=()):
        return are_fed([gradient], [weight], known)

    def slices(rows):
        return tf.IndexedSlices(2.0 * rows, tf.constant([0, 1]), tf.constant([2]))

    def inner(rows):
        found = []
        tf.function(lambda rows: found.append(told(rows + 1.0)), autograph=False)(rows)
        return found[0]

    def branch(rows):
        found = []

        def true():
            found.append(told(rows + 1.0))
            return 0

        tf.cond(tf.reduce_sum(rows) > 0, true, lambda: 0)
        return found[0]

    def after_reading(make):
        def trace(rows):
            weight.read_value()
            return make(rows)

        return trace

    for make in (lambda rows: told(rows / 2.0), lambda rows: told(slices(rows)), inner, branch):
        assert _traced(make, rows)
        assert not _traced(after_reading(make), rows)
    assert _traced(lambda: told(kept + 0.0))
    assert not _traced(lambda: told(kept + 0.0, [kept]))
    assert _traced(lambda: told(tf.reduce_sum(large)))
    assert _traced(lambda: told(rows + 0.0))
    assert not _traced(lambda: told(tf.ones(2)))
    assert not _traced(lambda: told(1.0))
    assert not _traced(lambda number: told(tf.cast(number, tf.float32)), tf.constant(1))


def test_which_weights_have_moved_since_their_gradients():
    moved, one, two = Moved(), tf.Variable(1.0), tf.Variable(2.0)
    moved.begin_step()
    old = tf.constant([1.0]), tf.constant([2.0])
    assert moved.first([one, two], old) is None
    moved.add([two], in_step=False)
    assert moved.first([one, two], old) is two
    assert moved.first([one, two], [old[0], 2.0]) is None  # a number is of no weights
    slices = tf.IndexedSlices(old[1], tf.constant([0]), None)
    assert moved.first([two], [slices]) is two
    assert moved.first([one, two], [tf.constant([1.0]), tf.constant([2.0])]) is None
    moved.add([one], in_step=True)
    assert moved.first([one], [tf.constant([1.0])]) is one  # made of an older one, maybe
    moved.begin_step()
    assert moved.first([one], [tf.constant([1.0])]) is None
    assert moved.first([one], [old[0]]) is one
    moved.add([two], in_step=False)
    told = functools.partial(_traced, lambda value: moved.first([two], [value]) is two)
    assert not told(old[0])  # the step has computed it
    for inputs, is_like in (({"one": [old[0]]}, True), ([slices], True), (tf.ones([2, 2]), False)):
        moved.begin_step(inputs)
        moved.add([two], in_step=False)
        assert told(old[0]) == is_like
        moved.end_step()
        assert not told(old[0])
    moved.begin_step(old)
    assert not told(old[0])


class Two:
    """A weight that a step makes, if it is not there, behind another one; each has an optimizer."""

    def __init__(self, strategy, *, begins=OWN):
        self.strategy, self.begins, self.late = strategy, begins, None
        with strategy.scope():
            self.first = tf.Variable([THEIRS, THEIRS])
            self.optimizers = [keras.optimizers.SGD(1.0) for _ in range(2)]

    def step(self):
        if self.late is None:
            self.late = tf.Variable([self.begins] * 3, name="late")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.first**2) + tf.reduce_sum(self.late**2)
        gradients = tape.gradient(loss, [self.first, self.late])
        pairs = zip(self.optimizers, gradients, [self.first, self.late], strict=True)
        for optimizer, gradient, weight in pairs:
            optimizer.apply([gradient], [weight])


@pytest.mark.parametrize("has_parties", [False, True])
def test_a_model_that_is_made_in_a_step_in_which_another_one_meets_first(meet, has_parties):
    two = Two(meet(has_parties=has_parties), begins=THEIRS)
    two.strategy.run(two.step)
    np.testing.assert_array_equal(two.late, [-THEIRS] * 3)
    two = Two(meet(has_parties=has_parties))
    with pytest.raises(ProtocolError, match=REFUSED.format("late")):
        two.strategy.run(two.step)
    np.testing.assert_array_equal(two.late, [THEIRS] * 3)
    two.strategy.run(two.step)  # whoever tries again has weights that all have
    np.testing.assert_array_equal(two.late, [-THEIRS] * 3)
    two = Two(meet(has_parties=has_parties))  # a trace computes nothing
    tf.function(lambda: two.strategy.run(two.step), autograph=False)()
    np.testing.assert_array_equal(two.late, [-THEIRS] * 3)


@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("apply", ["in a graph", "eagerly", "in a graph of a step"])
@pytest.mark.parametrize("has_parties", [False, True])
def test_gradients_that_come_from_another_function(meet, is_equal, apply, has_parties):
    strategy = meet(has_parties=has_parties, is_equal=is_equal)
    with strategy.scope():
        weight = tf.Variable([THEIRS if is_equal else OWN] * 2, name="weight")
        optimizer = keras.optimizers.SGD(0.5)

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        return tape.gradient(loss, weight)

    def step(gradient):
        optimizer.apply([gradient], [weight])

    computed = tf.function(lambda: strategy.run(gradient))()
    run = {
        "in a graph": tf.function(lambda one: strategy.run(step, (one,))),
        "eagerly": lambda one: strategy.run(step, (one,)),
        "in a graph of a step": lambda one: strategy.run(tf.function(step), (one,)),
    }[apply]
    if not is_equal:
        with pytest.raises(ProtocolError, match=REFUSED.format("weight")):
            run(computed)
        return
    run(computed)
    np.testing.assert_array_equal(weight, [0.0, 0.0])


@pytest.mark.parametrize("has_parties", [False, True])
def test_gradients_that_an_eager_step_feeds_into_a_function(meet, has_parties):
    """They are of the weights as they became before it."""
    strategy = meet(has_parties=has_parties)
    with strategy.scope():
        weight, optimizer = tf.Variable([OWN, OWN]), keras.optimizers.SGD(0.5)
    apply = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))

    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows) * tf.reduce_sum(weight**2)
        apply(tape.gradient(loss, weight))

    strategy.run(step, (tf.ones(1),))
    np.testing.assert_array_equal(weight, [0.0, 0.0])


@pytest.mark.parametrize("is_of_others", [False, True])
@pytest.mark.parametrize("has_parties", [False, True])
def test_zeros_from_before_a_meeting(meet, monkeypatch, has_parties, is_of_others):
    """They are given for what is not trained in a step, and are right whatever weights were."""
    strategy = meet(has_parties=has_parties)
    with strategy.scope():
        weight, other = tf.Variable([OWN, OWN]), tf.Variable([OWN, OWN], name="other")
        optimizer = keras.optimizers.SGD(1.0)
    zeros, gather = tf.zeros(2), meeting.primitives.gather_objects

    def told(value, what="values"):
        is_asked = what == "gradients from before a meeting" and is_of_others
        return [[True] * len(value), value] if is_asked else gather(value, what)

    monkeypatch.setattr(meeting.primitives, "gather_objects", told)
    step = functools.partial(
        strategy.run, lambda: optimizer.apply([weight + 0.0, zeros], [weight, other])
    )
    if is_of_others:  # another rank's are no zeros
        with pytest.raises(ProtocolError, match=REFUSED.format("other")):
            step()
        return
    step()
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    np.testing.assert_array_equal(other, [THEIRS, THEIRS])


@pytest.mark.parametrize("theirs", [THEIRS, THEIRS + 1])
def test_a_first_eager_step_that_waits_for_nobody(theirs):
    sent = []
    strategy = _with_parties(sent, theirs)
    with strategy.scope():
        weight = tf.Variable([THEIRS, THEIRS], name="weight")
        optimizer = keras.optimizers.SGD(1.0)
    step = functools.partial(strategy.run, lambda: optimizer.apply([weight + 0.0], [weight]))
    with tf_hips.local():
        if theirs == THEIRS:  # all parties have begun with these
            step()
            np.testing.assert_array_equal(weight, [0.0, 0.0])
        else:
            with pytest.raises(ProtocolError, match=REFUSED.format("weight")):
                step()
    assert len(sent) == 1


@pytest.mark.parametrize("theirs", [THEIRS, THEIRS + 1])
def test_what_steps_keep_of_a_later_model_while_others_meet(theirs):
    """Its weights become those of all parties with the next meeting, whatever that is for."""
    sent = []
    strategy = _with_parties(sent)
    later = _later(strategy, theirs)
    with strategy.scope():
        first, other = tf.Variable([1.0, 2.0]), [keras.optimizers.SGD(0.0) for _ in range(2)]

    def train(optimizer):
        tf.function(lambda: strategy.run(lambda: optimizer.apply([first + 0.0], [first])))()

    train(other[0])
    loop = Loop(strategy)
    loop.micro(X)
    assert not later
    if theirs != THEIRS:
        with pytest.raises(ProtocolError, match=rf"must be equal.*{loop.made[0].name}"):
            train(other[1])
        return
    train(other[1])
    assert len(later) == 1
    loop.micro(2 * X)
    loop.apply()
    assert len(later) == 2  # once more when they are trained: a party may have changed them
    for one, values in zip(loop.model.get_weights(), loop.expected(0.0, [X, 2 * X]), strict=True):
        np.testing.assert_allclose(one, THEIRS - 0.5 * values, rtol=1e-5)


@pytest.mark.parametrize("has_model", [False, True])
def test_a_later_model_that_steps_set_before_it_is_trained(has_model):
    """A copy of another one, say; parties meet for something else in between."""
    strategy = _with_parties([])
    later = _later(strategy, OWN)
    with strategy.scope():
        first, optimizers = tf.Variable([1.0, 2.0]), [keras.optimizers.SGD(1.0) for _ in range(3)]

    def train(optimizer, weight):
        tf.function(lambda: strategy.run(lambda: optimizer.apply([weight + 0.0], [weight])))()

    train(optimizers[0], first)
    with strategy.scope():
        model = Unlike()
        model.compile(optimizers[2])
    copied = model.kernel.value
    tf.function(lambda: strategy.run(lambda: copied.assign([THEIRS] * 3)))()
    train(optimizers[1], first)
    np.testing.assert_array_equal(copied, [THEIRS] * 3)  # each party's own
    for number in range(2):
        if has_model:
            tf.function(lambda: strategy.run(model.train_step, (None,)))()
        else:
            train(optimizers[2], copied)
        np.testing.assert_array_equal(copied, [0.0] * 3)
        assert later == [[(3,)]] * 2, number


@pytest.mark.parametrize("is_in_graph", [False, True])
def test_weights_that_one_rank_has_set_since_they_were_made_equal(monkeypatch, is_in_graph):
    meetings, strategy = Meetings(monkeypatch), tf_hips.CompressedRing()
    convert = tf.function if is_in_graph else lambda function: function
    with strategy.scope():
        weight, optimizer = tf.Variable([OWN, OWN], name="weight"), keras.optimizers.SGD(1.0)
    strategy.run(lambda: None)
    train = convert(lambda: strategy.run(lambda: optimizer.apply([weight + 0.0], [weight])))
    meetings.has_equal_digests = False
    with pytest.raises(ProtocolError, match=r"must be equal when.*weight.*ranks 0 and 1"):
        train()
    meetings.has_equal_digests = True
    train()
    np.testing.assert_array_equal(weight, [0.0, 0.0])


class Unlike(keras.Model):
    """Has a layer that nothing builds, and trains what is none of its own, too."""

    def __init__(self, pairs=()):
        super().__init__()
        self.unused = keras.layers.Dense(2)
        begin = keras.initializers.Constant(OWN)
        self.kernel = self.add_weight(shape=(3,), initializer=begin, name="own")
        self.others = lambda: pairs  # an attribute would be its own
        self.built = True

    def train_step(self, data):
        """Moves all weights to 0."""
        del data
        for optimizer, weight in [(self.optimizer, self.kernel), *self.others()]:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2) / 2
            [gradient] = tape.gradient(loss, [weight])
            optimizer.apply([gradient], [weight])
        return {}


@pytest.mark.parametrize("may_meet_again", [True, False])
def test_a_model_with_a_layer_that_nothing_builds(may_meet_again):
    """Parties meet before its eager step, where they can once more if the layer is built later."""
    strategy = _with_parties([])
    if may_meet_again:
        _later(strategy)
    with strategy.scope():
        model = Unlike()
        model.compile(keras.optimizers.SGD(1.0))
    run = functools.partial(strategy.run, model.train_step, (None,))
    if not may_meet_again:
        with pytest.raises(ProtocolError, match=REFUSED.format(".*own")):
            run()
        return
    run()
    np.testing.assert_array_equal(model.kernel, [0.0] * 3)


@pytest.mark.parametrize("is_in_graph", [True, False])
def test_weights_of_which_the_model_that_trains_them_knows_nothing(meet, is_in_graph):
    strategy = meet(has_parties=False, is_equal=False)
    with strategy.scope():
        other = tf.Variable([OWN, OWN], name="other")
        model = Unlike([(keras.optimizers.SGD(1.0), other)])
        model.compile(keras.optimizers.SGD(1.0))
    convert = tf.function if is_in_graph else lambda function: function
    run = convert(lambda: strategy.run(model.train_step, (None,)))
    if not is_in_graph:
        with pytest.raises(ProtocolError, match=REFUSED.format("other")):
            run()
        return
    run()
    np.testing.assert_array_equal(other, [0.0, 0.0])


class Student(keras.Model):
    """Is moved by the weight of a teacher that is none of its attributes."""

    def __init__(self, teacher):
        super().__init__()
        begin = keras.initializers.Constant(OWN)
        self.kernel = self.add_weight(shape=(2,), initializer=begin)
        self.teacher = lambda: teacher
        self.built = True

    def train_step(self, data):
        """Subtracts the teacher."""
        del data
        self.optimizer.apply([self.kernel * 0.0 + self.teacher()], [self.kernel])
        return {}


@pytest.mark.parametrize("has_model", [False, True])
@pytest.mark.parametrize("has_parties", [False, True])
def test_weights_that_a_step_computes_with_and_does_not_train(meet, has_parties, has_model):
    strategy = meet(has_parties=has_parties)
    with strategy.scope():
        teacher = tf.Variable([OWN, OWN])
        student = Student(teacher)
        student.compile(keras.optimizers.SGD(1.0))
        weight, optimizer = tf.Variable([OWN, OWN]), keras.optimizers.SGD(1.0)
    if has_model:
        tf.function(lambda: strategy.run(student.train_step, (None,)))()
        np.testing.assert_array_equal(teacher, [THEIRS] * 2)
        np.testing.assert_array_equal(student.kernel, [0.0, 0.0])
        return
    # The weights that are trained are known before there is a second model.
    tf.function(lambda: strategy.run(lambda: optimizer.apply([weight + 0.0], [weight])))()
    with strategy.scope():
        teacher = tf.Variable([OWN, OWN])

    @tf.function
    def train(rows):
        def step():
            optimizer.apply([weight + tf.reduce_sum(rows) * teacher], [weight])

        strategy.run(step)

    train(tf.ones(1))
    np.testing.assert_array_equal(teacher, [THEIRS] * 2)
    np.testing.assert_array_equal(weight, [-THEIRS] * 2)


def test_what_gets_its_value_as_a_graph_runs_is_no_meeting(monkeypatch):
    """It can be seen when a rank traces once more, alone, for a last batch of another size."""
    meetings, strategy = Meetings(monkeypatch), tf_hips.CompressedRing()
    with strategy.scope():
        weight, optimizer = tf.Variable([OWN, OWN]), keras.optimizers.SGD(1.0)
    made = {}

    @tf.function
    def train(rows):
        def step(rows):
            if not made:
                made["fed"] = tf.Variable(tf.reduce_mean(rows, 0))
                made["plain"] = tf.Variable([OWN, OWN])
            moved = weight * 0.0 + made["plain"] + tf.reduce_sum(rows - made["fed"])
            optimizer.apply([moved], [weight])

        strategy.run(step, (rows,))

    train(tf.ones((4, 2)))
    meetings.since()
    for count in (4, 3):
        train(tf.ones((count, 2)))
        assert meetings.since() == 0


def test_a_step_that_reads_nothing_new_is_no_meeting(monkeypatch):
    meetings, strategy = Meetings(monkeypatch), tf_hips.CompressedRing()
    with strategy.scope():
        weight, teacher = (tf.Variable([OWN, OWN]) for _ in range(2))
        optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def train(rows):
        strategy.run(lambda: optimizer.apply([teacher * tf.reduce_sum(rows)], [weight]))

    train(tf.ones(1))
    assert meetings.since() == 1
    with strategy.scope():
        other = tf.Variable([OWN, OWN])
    train(tf.ones(2))  # of another size, on this rank alone
    assert meetings.since() == 0
    np.testing.assert_array_equal(other, [OWN, OWN])
