# SPDX-License-Identifier: Apache-2.0
"""Which epoch a pass is, and runs that are taken up again in the middle of one, under Keras' `fit`
as it is: `Feeding` stands for what a strategy does.
"""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_hips.data import Feed, check_whole, positions_of, shard

pytestmark = [pytest.mark.tf, pytest.mark.heavy]

X = np.arange(24, dtype=np.float32)[:, None]


class Recorder(keras.Model):
    """Remembers the first row of every batch that it trains on."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x * self.weight

    def train_step(self, data):
        tf.py_function(lambda x: self.seen.append(int(x[0, 0])), [data[0]], [])
        return super().train_step(data)


class Feeding(tf.distribute.OneDeviceStrategy):
    """Lets `fit` iterate a feed, without tuning, as ours."""

    def __init__(self):
        super().__init__("/cpu:0")
        self.feed = None
        self.fit_options = {}

    def experimental_distribute_dataset(self, dataset, options=None):
        self.feed = Feed(dataset, **self.fit_options)
        choice = tf.data.Options()
        choice.autotune.enabled = False
        return self.feed.dataset.with_options(choice)


class Begin(keras.callbacks.Callback):
    """Tells the feed about every epoch, and ends the one that was begun before."""

    def __init__(self, strategy, first_step, steps):
        super().__init__()
        self.strategy, self.first_step, self.steps = strategy, first_step, steps
        self.left = steps

    def on_epoch_begin(self, epoch, logs=None):
        self.strategy.feed.begin(epoch, self.first_step)
        self.left = self.steps - self.first_step
        self.first_step = 0

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= self.left:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = False


@functools.cache
def recorder(steps_per_execution):
    """A strategy and its model: one trace of the steps for all tests."""
    strategy = Feeding()
    with strategy.scope():
        model = Recorder()
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return strategy, model


def run(dataset, *, resume=None, steps_per_execution=1, is_new=False, **options):
    """First rows of the batches of one `fit`.

    Args:
        resume: epoch and step where the run is taken up again.
        is_new: whether Keras has still to build the model, for which it takes a batch.
    """
    make_it = recorder.__wrapped__ if is_new else recorder
    strategy, model = make_it(steps_per_execution)
    strategy.fit_options = {
        name: options[name] for name in ("initial_epoch", "steps_per_epoch") if name in options
    } | {"steps_per_execution": steps_per_execution}
    first_step, steps = 0, options.get("steps_per_epoch") or int(dataset.cardinality())
    model._initial_epoch = None
    if resume is not None:
        model._initial_epoch, first_step = resume
    model.build((None, 1))
    model.seen.clear()
    callback = Begin(strategy, first_step, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="`shuffle=True` was passed")
        model.fit(dataset, verbose=0, callbacks=[callback], **options)
    return [*model.seen]


def make(kind, batch_size=2):
    x = X if kind == "arrays" else tf.data.Dataset.from_tensor_slices(X)
    sharded = shard((X, X), batch_size, group=1, groups=2, seed=4)
    if kind == "dataset":
        rows = tf.data.Dataset.zip((x, x))
        sharded = shard(rows, batch_size, group=1, groups=2, seed=4)
    if kind == "chained":
        generator = tf.random.Generator.from_seed(1)

        def augment(x, y):
            return x + tf.floor(generator.uniform([]) * 3) * 100, y

        sharded = sharded.map(augment).prefetch(2)
    return sharded


def rows_of(epoch):
    """First rows of the batches of an epoch of `make("arrays")`."""
    dataset = make("arrays")
    positions_of(dataset)[0].set(epoch)
    return [int(x[0, 0]) for x, _ in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "chained"])
def test_passes_are_epochs(kind):
    def two():
        return [[int(x[0, 0]) % 100 for x, _ in dataset.as_numpy_iterator()] for _ in range(2)]

    dataset = make(kind)
    first, second = two()
    assert len(first) == 6
    assert first != second
    [position] = positions_of(dataset)
    position.set(1)
    third = two()
    assert third[0] == second
    assert third[1] not in (first, second)
    joined = tf.data.Dataset.zip((dataset, make(kind).repeat()))
    assert len(positions_of(joined)) == 2
    assert positions_of(tf.data.Dataset.range(3)) == []
    for epoch in (-1, 1.0, True):
        with pytest.raises(ValueError, match="`epoch` must be an int"):
            position.set(epoch)


@pytest.mark.parametrize(("kind", "steps_per_execution"), [("arrays", 4), ("dataset", 1)])
def test_a_fit_goes_on_where_it_was_left(kind, steps_per_execution):
    whole = run(make(kind), epochs=3, steps_per_execution=steps_per_execution)
    assert len(whole) == 18
    again = run(make(kind), epochs=3, resume=(1, 4), steps_per_execution=steps_per_execution)
    assert again == whole[10:]
    again = run(make(kind), epochs=3, initial_epoch=2)
    assert again == whole[12:]


def test_random_state_of_a_pipeline_goes_on():
    whole = run(make("chained"), epochs=1, is_new=True)
    # The pass that Keras takes one batch of, to build the model, uses the generator also.
    again = run(make("chained"), epochs=1, resume=(0, 3), is_new=True)
    assert again == whole[3:]


def test_one_fit_after_another_goes_on_with_the_epochs():
    whole = run(make("arrays"), epochs=3)
    dataset = make("arrays")
    parts = run(dataset, epochs=1, is_new=True) + run(dataset, epochs=1)
    parts += run(dataset, epochs=3, initial_epoch=2)
    assert parts == whole
    next(iter(dataset))  # a look, perhaps of one rank alone
    assert run(dataset, epochs=4, initial_epoch=3) == run(make("arrays"), epochs=4)[18:]
    positions_of(dataset)[0].set(0)
    assert run(dataset, epochs=3) == whole


@pytest.mark.parametrize(("steps", "steps_per_execution"), [(4, 1), (8, 3)])
def test_epochs_of_another_length_than_the_data(steps, steps_per_execution):
    options = {"steps_per_epoch": steps, "steps_per_execution": steps_per_execution}
    taken = {4: 4, 8: 9}[steps]
    whole = run(make("arrays").repeat(), epochs=4, **options)
    assert len(whole) == 4 * taken
    passes = run(make("arrays"), epochs=-(-4 * taken // 6))
    assert whole == passes[: 4 * taken]
    again = run(make("arrays").repeat(), epochs=4, resume=(2, 3), **options)
    assert again == whole[2 * taken + 3 :]


def test_data_without_a_position_are_skipped():
    def rows():
        return tf.data.Dataset.from_tensor_slices((X, X)).batch(4)

    whole = run(rows(), epochs=2)
    assert run(rows(), epochs=2, resume=(0, 2)) == whole[2:]
    whole = run(rows().repeat(), epochs=3, steps_per_epoch=4)
    again = run(rows().repeat(), epochs=3, steps_per_epoch=4, resume=(1, 2))
    assert again == whole[6:]
    endless = run(rows().repeat(), epochs=2, initial_epoch=1, steps_per_epoch=4)
    assert endless == whole[:4]


def test_where_a_fit_cannot_begin_is_said():
    with pytest.raises(ValueError, match=r"use `dataset.repeat\(\)`.*a dataset of 6 batches"):
        run(make("arrays"), epochs=3, steps_per_epoch=4, resume=(1, 0))


def test_a_fit_of_the_same_data_is_taken_up_where_it_counted():
    dataset = make("arrays")
    whole = run(dataset, epochs=2) + run(dataset, epochs=2)
    # The second call is broken off in its second epoch; the data have counted on.
    feed = Feed(dataset)
    positions_of(dataset)[0].offset_of_resumed = 2
    feed.begin(1, 0)
    assert int(next(iter(feed.dataset))[0][0, 0]) == whole[18]
    # Told once; what nobody took is forgotten.
    positions_of(dataset)[0].offset_of_resumed = 7
    feed = Feed(dataset)
    feed.begin(0, 0)
    assert positions_of(dataset)[0].next_of_fit == 5


def test_a_later_fit_that_is_taken_up_counts_its_own_epochs():
    """It began with epoch 3 of Keras, when the data had counted 2 epochs further."""
    dataset = make("arrays")
    [position] = positions_of(dataset)
    feed = Feed(dataset, initial_epoch=3)
    position.offset_of_resumed = 2
    feed.begin(4, 5)
    assert position.next_of_fit == 7
    assert int(next(iter(feed.dataset))[0][0, 0]) == rows_of(6)[5]


def test_as_many_steps_as_there_are_batches_are_a_pass():
    """Then Keras makes a new iterator in each epoch, and it can begin in the middle of any."""
    dataset = make("arrays")
    feed = Feed(dataset, steps_per_epoch=6)
    feed.begin(0)
    feed.begin(1, 4)
    assert [int(x[0, 0]) for x, _ in feed.dataset.as_numpy_iterator()] == rows_of(1)[4:]


def test_a_cache_behind_a_shuffled_shard_is_refused():
    for cached in (make("arrays").cache(), make("dataset").map(lambda x, y: (x, y)).cache()):
        with pytest.raises(ValueError, match=r"cache before `tf_hips\.shard`"):
            Feed(cached.prefetch(1))
    in_order = shard(X, 2, group=1, groups=2, seed=4, shuffle=False).cache()
    source = tf.data.Dataset.from_tensor_slices(X).cache()
    for fine in (in_order, shard(source, 2, group=1, groups=2, seed=4)):
        Feed(fine)


def test_predictions_and_evaluations_need_all_rows():
    def of(data=X, batch_size=2, **options):
        return shard(data, batch_size, group=1, groups=2, seed=4, **options).prefetch(1)

    uncounted = tf.data.Dataset.from_tensor_slices(X).filter(lambda x: True)
    remedy = r"shuffle=False, drop_remainder=False\)`. Received: a shard that "
    for dataset, method, told in (
        (of(), "predict", "is shuffled$"),
        (of(shuffle=False, batch_size=5), "predict", "leaves out rows"),
        (of(batch_size=5), "predict", "is shuffled and leaves out rows"),
        (of(batch_size=5), "evaluate", "leaves out rows"),
        (of(uncounted), "evaluate", "leaves out rows"),
        (of(uncounted, shuffle=5, drop_remainder=False), "predict", "is shuffled$"),
    ):
        with pytest.raises(ValueError, match=f"`{method}` must have .*{remedy}{told}"):
            check_whole(dataset, method)
    for dataset, method in (
        (of(), "evaluate"),
        (of(shuffle=False), "predict"),
        (of(uncounted, shuffle=1, drop_remainder=False), "predict"),
        (of(uncounted.repeat(), shuffle=False), "evaluate"),
        (tf.data.Dataset.range(3), "predict"),
    ):
        check_whole(dataset, method)
