# SPDX-License-Identifier: Apache-2.0
"""When a custom loop's variables become rank 0's: before a step, and never what steps have written.

In one process, which stands for rank 1: what it is given are `THEIRS`, rank 0's values, with which
weights begin on both where a test does not say otherwise.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_hips
from tf_hips.strategies import meetings as meeting

pytestmark = pytest.mark.tf

THEIRS = 100.0
X = np.ones((4, 3), "float32")
_RATE = 0.5


class Meetings:
    """What ranks meet for."""

    def __init__(self, monkeypatch):
        self.shapes = []
        self.has_equal_weights = self.has_common_steps = self.has_equal_digests = True
        self._gather = meeting.primitives.gather_objects
        monkeypatch.setattr(meeting.primitives, "gather_objects", self._gather_two)
        monkeypatch.setattr(meeting, "check_equal_shapes", self._compare)
        monkeypatch.setattr(meeting, "synchronise", self._synchronise)

    def _gather_two(self, value, what="values"):
        if what == "which variables steps have changed":
            return [value, value if self.has_common_steps else []]
        if what == "weights that are trained first":
            others = [[kind, name, "other"] for kind, name, _ in value]
            return [value if self.has_equal_digests else others, value]
        if what != "what steps have computed, and with what":
            return self._gather(value, what)
        weights, computed, used = value
        theirs = weights if self.has_equal_weights else ["other"] * len(weights)
        return [(theirs, ["other"] * len(computed), used), value]

    def _compare(self, variables, advice=""):
        self.shapes.append([tuple(one.shape) for one in variables])

    def _synchronise(self, variables, first_sync=None, left=()):
        for place, variable in enumerate(variables):
            if place not in left and variable.shape.rank:
                value = tf.cast(tf.fill(variable.shape, THEIRS), variable.dtype)
                variable.assign(value, read_value=False)  # no tape sees it

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
            begun = keras.initializers.Constant(THEIRS)
            dense = keras.layers.Dense(2, kernel_initializer=begun, bias_initializer=begun)
            self.model = keras.Sequential([keras.Input((3,)), dense])
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

    def expected(self, gathered, batches, weight=THEIRS):
        """The accumulated gradients of `batches` at weights of `weight`, on top of `gathered`."""
        kernel, bias = np.full((3, 2), weight), np.full(2, weight)
        of_kernel, of_bias = (np.full(one.shape, gathered) for one in (kernel, bias))
        for x in batches:
            error = 2 * (x @ kernel + bias)
            of_kernel, of_bias = of_kernel + x.T @ error, of_bias + error.sum(0)
        return [of_kernel, of_bias]


def _with_parties(sent, theirs=THEIRS):
    """A strategy that meets other parties, which begin with `theirs`; `sent` notes each meeting."""

    def first_sync(values):
        sent.append(len(values))
        return [np.full_like(value, theirs) if value.ndim else value for value in values]

    strategy = tf_hips.CompressedRing()
    strategy.beginning.meetings.first_sync = first_sync
    return strategy


@pytest.mark.parametrize("is_in_graph", [True, False])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_gradients_that_are_accumulated_by_hand_stay(meetings, is_lazy, is_in_graph):
    loop = Loop(tf_hips.CompressedRing(), is_lazy=is_lazy, is_in_graph=is_in_graph)
    loop.micro(X)
    # Before an eager step ranks meet; what is traced may be one rank's alone.
    gathered = 0.0 if is_lazy or is_in_graph else THEIRS
    assert meetings.since() == (0 if is_in_graph else 1)
    loop.micro(X[:3])
    loop.micro(2 * X)
    assert meetings.since() == (1 if is_lazy and not is_in_graph else 0)
    expected = loop.expected(gathered, [X, X[:3], 2 * X])
    for one, values in zip(loop.made, expected, strict=True):
        np.testing.assert_allclose(one, values, rtol=1e-6)
    loop.apply()
    assert meetings.since() == 1
    for one, values in zip(loop.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, THEIRS - _RATE * values, rtol=1e-5)


def test_what_was_computed_with_weights_that_differ_is_refused(meetings):
    strategy = tf_hips.CompressedRing()
    meetings.has_equal_weights = False
    for _ in range(2):  # the second has the same code
        loop = Loop(strategy)
        name = loop.made[0].name
        loop.micro(X)
        assert meetings.since() == 0
        for _ in range(2):  # whoever tries again is told again
            with pytest.raises(tf_hips.errors.ProtocolError, match=rf"must be equal.*{name}"):
                loop.apply()
        meetings.since()
    meetings.has_equal_weights = True
    strategy.run(lambda: None)
    meetings.has_equal_weights = False
    for _ in range(2):
        loop = Loop(strategy)
        meetings.since()
        strategy.run(lambda: None)  # as the message says
        assert meetings.since() == 1
        loop.micro(X)
        assert meetings.since() == 0
        expected = loop.expected(THEIRS, [X])
        loop.apply()
        for one, values in zip(loop.model.get_weights(), expected, strict=True):
            np.testing.assert_allclose(one, THEIRS - _RATE * values, rtol=1e-5)


def test_one_rank_looks_at_the_model_alone(meetings):
    strategy = tf_hips.CompressedRing()
    loop = Loop(strategy)
    look = tf.function(lambda x: strategy.run(lambda x: loop.model(x), (x,)))
    with tf_hips.local():
        look(X)
    look(X)  # traced already here, not on the others
    look(X[:2])
    assert meetings.since() == 0
    loop.micro(X)
    meetings.has_common_steps = False  # only rank 0, here, has changed variables: it has loaded
    loop.apply()
    weights, values = loop.model.get_weights(), [np.full((3, 2), THEIRS), np.full(2, THEIRS)]
    for one, value in zip(weights, values, strict=True):
        np.testing.assert_allclose(one, THEIRS - _RATE * value)


def test_where_ranks_differ_they_meet_when_the_step_is_tried_again(meetings, monkeypatch):
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        weight, optimizer = tf.Variable(np.zeros(2, "float32")), keras.optimizers.SGD(1.0)
    step = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones(2)], [weight])))

    def differ(variables, advice=""):
        raise tf_hips.errors.ProtocolError("differ")

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "check_equal_shapes", differ)
        with pytest.raises(tf_hips.errors.ProtocolError, match="differ"):
            step()
    step()
    np.testing.assert_array_equal(weight, np.full(2, THEIRS - 1.0))


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


def test_what_steps_have_changed_before_the_parties_meet():
    sent = []
    begin = functools.partial(_with_parties, sent)
    strategy = begin()
    with strategy.scope():
        count, other = (tf.Variable(tf.zeros(2, tf.int32), trainable=False) for _ in range(2))
        mean = tf.Variable(1.0)
        lazy = keras.Sequential([keras.layers.Dense(2, use_bias=False)])
        optimizer = keras.optimizers.SGD(1.0)

    @tf.function
    def add():
        strategy.run(count.assign_add, ([1, 1],))
        strategy.run(mean.assign, (0.0,))

    @tf.function
    def train(x):
        def step(x):
            lazy(x)
            optimizer.apply([tf.ones((3, 2))], lazy.trainable_variables)

        strategy.run(step, (x,))

    add()
    assert not sent  # the model does not exist
    train(X)
    assert len(sent) == 1
    np.testing.assert_array_equal(count, [1, 1])
    np.testing.assert_array_equal(other, [THEIRS, THEIRS])
    np.testing.assert_array_equal(lazy.get_weights()[0], np.full((3, 2), THEIRS - 1.0))
    with strategy.scope():
        late = keras.optimizers.SGD(1.0)
    with pytest.raises(tf_hips.errors.ProtocolError, match=r"as it was made.*had changed before"):
        tf.function(lambda: strategy.run(lambda: late.apply([0.5], [mean])))()


@pytest.mark.parametrize("theirs", [THEIRS, THEIRS + 1])
def test_gradients_accumulated_before_the_parties_meet(theirs):
    sent = []
    loop = Loop(_with_parties(sent, theirs))
    loop.micro(X)
    if theirs == THEIRS:  # all parties have begun with these weights
        loop.apply()
    else:
        for _ in range(2):  # whoever tries again is told again, and parties meet once
            with pytest.raises(tf_hips.errors.ProtocolError, match="must be equal on all"):
                loop.apply()
        assert len(sent) == 1
        np.testing.assert_array_equal(loop.model.get_weights()[0], np.full((3, 2), THEIRS))
        loop = Loop(_with_parties(sent, theirs))
        loop.strategy.run(lambda: None)
        loop.micro(X)
        loop.apply()
    assert len(sent) == 1 + (theirs != THEIRS)
    gathered = 0.0 if theirs == THEIRS else theirs  # the loop that began with an empty step
    expected = loop.expected(gathered, [X], theirs)
    for one, values in zip(loop.model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(one, theirs - _RATE * values, rtol=1e-5)


@pytest.mark.parametrize("is_in_graph", [True, False])
def test_what_came_later_is_made_equal_where_parties_keep_step(is_in_graph):
    sent, later = [], []
    strategy = _with_parties(sent)
    convert = tf.function if is_in_graph else lambda function: function

    def next_sync(values):
        later.append(len(values))
        return [np.full_like(value, 2 * THEIRS) if value.ndim else value for value in values]

    strategy.beginning.meetings.next_sync = lambda: next_sync

    def train():
        """What two models have become of in a step, or why not."""
        with strategy.scope():
            weight, optimizer = tf.Variable(np.zeros(2, "float32")), keras.optimizers.SGD(1.0)
        step = convert(lambda: strategy.run(lambda: optimizer.apply([tf.ones(2)], [weight])))
        step()
        step()
        return weight.numpy().tolist()

    assert train() == [THEIRS - 2] * 2
    assert (len(sent), later) == (1, [])
    assert train() == [2 * THEIRS - 2] * 2  # the first model stays as it is
    assert (len(sent), len(later)) == (1, 1)
    strategy.beginning.meetings.next_sync = lambda: (
        None
    )  # as of parties that do not wait for each other
    with pytest.raises(tf_hips.errors.ProtocolError, match=r"one model.*came later"):
        train()


def test_what_steps_had_changed_in_one_party_decides_on_no_meeting():
    sent, later = [], []
    strategy = _with_parties(sent)

    def next_sync(values):
        later.append([value.shape for value in values if value.ndim])
        return values

    strategy.beginning.meetings.next_sync = lambda: next_sync

    def make():
        with strategy.scope():
            return tf.Variable(np.full(2, THEIRS, "float32")), keras.optimizers.SGD(1.0)

    with strategy.scope():
        gathered = tf.Variable(np.zeros(3, "float32"))  # trainable, as no one says otherwise
    weight, optimizer = make()
    tf.function(lambda: strategy.run(lambda: gathered.assign_add([1, 1, 1])))()
    for number in range(3):
        for _ in range(2):
            strategy.run(lambda: optimizer.apply([tf.ones(2)], [weight]))  # noqa: B023 - at once
        np.testing.assert_array_equal(weight, [THEIRS - 2] * 2)
        assert (len(sent), later) == (1, [[(2,)]] * number)
        weight, optimizer = make()
    np.testing.assert_array_equal(gathered, [1, 1, 1])
    with pytest.raises(tf_hips.errors.ProtocolError, match="as it was made"):
        strategy.run(lambda: optimizer.apply([tf.ones(3)], [gathered]))


@pytest.mark.parametrize("order", [None, [0, 1], [1, 0]])
def test_a_party_whose_variables_are_made_in_another_order_is_refused(order):
    def first_sync(values):
        assert len(values[-1]) == 2 * 8  # a few bytes for the name of each
        digests = np.split(values[-1], 2)
        # Names may differ; the first party's may be this one's, in an order.
        theirs = [digests[place] for place in order or [0, 0]]
        return [*values[:-1], np.concatenate(theirs)]

    strategy = tf_hips.CompressedRing()
    strategy.beginning.meetings.first_sync = first_sync
    with strategy.scope():
        made = [tf.Variable(np.zeros(2, "float32"), name=name) for name in "ab"]
    if order != [1, 0]:
        strategy.run(lambda: None)
        return
    told = "order. Received: number 0 of 2 is b in the first party and a here"
    for _ in range(2):  # parties have met
        with pytest.raises(tf_hips.errors.ProtocolError, match=told):
            strategy.run(lambda: made[0].assign_add([1, 1]))
    np.testing.assert_array_equal(made[0], [0, 0])


def _weight(strategy, optimizer=keras.optimizers.SGD):
    """A weight, and a function that trains it and computes in a graph."""
    with strategy.scope():
        weight, optimizer = tf.Variable(np.zeros(2, "float32")), optimizer(1.0)
    return weight, tf.function(
        lambda: strategy.run(lambda: optimizer.apply([tf.ones(2)], [weight])), autograph=False
    )


@pytest.mark.parametrize("is_used", [False, True])
def test_a_new_model_is_not_to_blame_for_what_steps_kept_before_they_used_it(meetings, is_used):
    strategy = tf_hips.CompressedRing()
    first, train = _weight(strategy)
    train()
    with strategy.scope():
        kept = tf.Variable(np.zeros(2, "float32"))
    second, train = _weight(strategy)
    weight = second if is_used else first
    keep = tf.function(lambda: strategy.run(lambda: kept.assign_add(weight + 1.0)), autograph=False)
    if not is_used:
        del second
        keep()
        keep()
        second, train = _weight(strategy)
    else:
        keep()
    meetings.has_equal_weights = False
    if is_used:
        with pytest.raises(tf_hips.errors.ProtocolError, match="must be equal on all"):
            train()
        return
    train()
    np.testing.assert_array_equal(second, [THEIRS - 1] * 2)
    np.testing.assert_array_equal(kept, [2 * THEIRS] * 2)


def test_steps_of_keras_use_what_there_is(meetings):
    strategy = tf_hips.CompressedRing()
    loop = Loop(strategy)
    loop.model.compile(loss="mse")
    with strategy.scope():
        kept = tf.Variable(np.zeros(2, "float32"))
    second, train = _weight(strategy)
    keep = tf.function(lambda: strategy.run(lambda: kept.assign_add(second)), autograph=False)
    keep.get_concrete_function()
    third, train = _weight(strategy)
    assert strategy.beginning._changes.is_unused(third)
    strategy.run(loop.model.test_step, ((X, X[:, :2]),))
    assert not strategy.beginning._changes.is_unused(third)
    second.assign_add([1.0, 1.0])
    keep()
    meetings.has_equal_weights = False
    with pytest.raises(tf_hips.errors.ProtocolError, match="must be equal on all"):
        train()


@pytest.mark.parametrize("is_equal", [True, False])
def test_slots_that_a_function_makes_are_compared_and_made_equal_where_they_differ(
    meetings, monkeypatch, is_equal
):
    strategy = tf_hips.CompressedRing()
    gather = meeting.primitives.gather_objects

    def gather_two(value, what="values"):
        everyone = gather(value, what)
        return [everyone[0] if is_equal else ["other"], *everyone] if what == "slots" else everyone

    monkeypatch.setattr(meeting.primitives, "gather_objects", gather_two)
    made = []

    def optimizer(rate):
        made.append(keras.optimizers.SGD(rate, momentum=0.5))
        return made[0]

    weight, train = _weight(strategy, optimizer)
    train()
    [momentum] = [one.value for one in made[0].variables if len(one.shape)]
    assert meetings.shapes == [[(2,), (), ()], [(2,)]]
    velocity = (0.0 if is_equal else THEIRS) * 0.5 - 1.0
    np.testing.assert_allclose(momentum, [velocity] * 2)
    np.testing.assert_allclose(weight, [THEIRS + velocity] * 2)
    assert strategy.beginning.meetings.is_equal(made[0].variables)
    train()
    assert len(meetings.shapes) == 2


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_later_trace_is_no_meeting_for_slots(meetings, is_outside):
    """It may be one rank's alone: a batch of another size."""
    strategy, kept = tf_hips.CompressedRing(), []
    with strategy.scope():
        weight = tf.Variable([THEIRS] * 2)
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)

    def apply(x):
        if not is_outside and not kept:  # no second trace finds values: this one cannot be lifted
            kept.append(tf.Variable(tf.reduce_sum(x), trainable=False))
        optimizer.apply([tf.ones(2) * tf.reduce_mean(x)], [weight])

    inner = tf.function(apply) if is_outside else apply

    def step(x):
        if is_outside and not optimizer.built:
            optimizer.build([weight])
        inner(x)

    train = tf.function(lambda x: strategy.run(step, (x,)))
    train(tf.ones(4))
    assert meetings.since() == 1
    train(tf.ones(3))
    assert meetings.since() == 0
    np.testing.assert_allclose(weight, [THEIRS - 1.0 - 1.5] * 2)


def test_a_step_named_as_those_of_keras_begins_as_others_do(meetings):
    strategy = tf_hips.CompressedRing()
    loop = Loop(strategy)

    def test_step(x):
        return loop.model(x)

    def one_step_on_data(x):
        return loop.model(x)

    loop.model.compile(loss="mse")
    with tf_hips.local():
        strategy.run(test_step, (X,))
    strategy.run(loop.model.test_step, ((X, X[:, :2]),))  # as Keras calls it
    assert meetings.since() == 0
    strategy.run(test_step, (X,))
    assert meetings.since() == 1
    loop = Loop(strategy)
    strategy.run(one_step_on_data, (X,))
    assert meetings.since() == 1


class Accumulating(keras.Model):
    """Accumulates in weights of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = self.add_weight(shape=(3,), initializer=keras.initializers.Constant(THEIRS))
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
    assert meetings.since() == 0
    apply = tf.function(lambda: strategy.run(model.apply))
    meetings.has_equal_weights = False
    with pytest.raises(tf_hips.errors.ProtocolError, match="must be equal on all"):
        apply()
    meetings.has_equal_weights = True
    apply()
    np.testing.assert_allclose(model.kernel, np.full(3, THEIRS - _RATE * THEIRS))


def test_reductions_that_xla_would_compile_are_refused():
    strategy = tf_hips.CompressedRing()
    with strategy.scope():
        weight, optimizer = tf.Variable(np.zeros(2, "float32")), keras.optimizers.SGD(1.0)

    @tf.function(jit_compile=True)
    def gradient(x):
        return tf.nest.map_structure(tf.ones_like, x)

    def step(x):
        optimizer.apply([gradient(x)], [weight])

    whole = tf.function(lambda x: strategy.run(step, (x,)), jit_compile=True)
    with pytest.raises(ValueError, match=r"`jit_compile` must be False around what reduces"):
        whole(tf.ones(2))
    tf.function(lambda x: strategy.run(step, (x,)))(tf.ones(2))  # as the message says
    np.testing.assert_array_equal(weight, [-1, -1])
    # One worker has no collectives, only a look at what is not finite.
    alone = tf_hips.CompressedRing(nonfinite="zero")
    with alone.scope():
        weight, optimizer = tf.Variable(np.zeros(2, "float32")), keras.optimizers.SGD(1.0)
    tf.function(lambda x: alone.run(step, (x,)), jit_compile=True)(tf.ones(2))
    np.testing.assert_array_equal(weight, [-1, -1])
