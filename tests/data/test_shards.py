# SPDX-License-Identifier: Apache-2.0
"""What each group gets of arrays and of datasets, without any rank: joined, one order."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_hips.data import shard

pytestmark = pytest.mark.tf

ROWS = 37


def rows(num_rows=ROWS):
    return np.arange(num_rows, dtype=np.int64)


def uncounted(num_rows=ROWS):
    return tf.data.Dataset.range(num_rows).filter(lambda row: row >= 0)


SOURCES = {
    "array": rows,
    "dataset": lambda num_rows=ROWS: tf.data.Dataset.range(num_rows),
    "dataset of unknown length": uncounted,
}


def passes(dataset, number=1):
    """Batches of some passes, as lists."""
    return [[batch.tolist() for batch in dataset.as_numpy_iterator()] for _ in range(number)]


def groups_of(data, batch_size, groups, **options):
    """First passes of all groups."""
    options = {"seed": 1, **options}
    datasets = [
        shard(data, batch_size, group=group, groups=groups, **options) for group in range(groups)
    ]
    return [passes(dataset)[0] for dataset in datasets]


def interleave(parts):
    """The rows of several groups' batches in the order that they come from."""
    places = itertools.zip_longest(*parts)
    return [row for place in places for row in place if row is not None]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("shuffle", "groups", "batch_size"), [(True, 2, 4), (True, 3, 5), (False, 3, 5)]
)
def test_groups_together_train_as_one_process_would(source, shuffle, groups, batch_size):
    data = SOURCES[source]()
    parts = groups_of(data, batch_size, groups, shuffle=shuffle)
    steps = ROWS // (groups * batch_size)
    assert [[len(batch) for batch in part] for part in parts] == [[batch_size] * steps] * groups
    joined = [interleave(batches) for batches in zip(*parts, strict=True)]
    [alone] = groups_of(data, groups * batch_size, 1, shuffle=shuffle)
    assert joined == alone
    order = list(itertools.chain(*joined))
    assert len(set(order)) == steps * groups * batch_size
    assert (order == sorted(order)) is not shuffle


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("num_rows", "groups", "shuffle"),
    # The last has as many groups, each with a graph of its own, as there are rows.
    [(ROWS, 3, False), (ROWS, 3, True), (5, 5, False)],
)
def test_nothing_is_dropped_in_evaluation(source, num_rows, shuffle, groups):
    parts = groups_of(SOURCES[source](num_rows), 4, groups, shuffle=shuffle, drop_remainder=False)
    own = [list(itertools.chain(*part)) for part in parts]
    assert [len(part) for part in own] == [len(range(g, num_rows, groups)) for g in range(groups)]
    assert sorted(itertools.chain(*own)) == list(range(num_rows))
    if not shuffle:
        assert own == [list(range(g, num_rows, groups)) for g in range(groups)]


@pytest.mark.parametrize("source", SOURCES)
def test_epochs_differ_and_seeds_repeat(source):
    def three(seed):
        tf.random.set_seed(seed + three.calls)  # what a rank's own seed is must not matter
        three.calls += 1
        return passes(shard(SOURCES[source](), 4, group=1, groups=2, seed=seed), 3)

    three.calls = 0
    first = three(5)
    assert first == three(5)
    assert first[0] != first[1] != first[2] != first[0]
    assert first != three(6)
    in_order = shard(SOURCES[source](), 4, group=1, groups=2, seed=5, shuffle=False)
    assert passes(in_order, 2)[0] == passes(in_order)[0]


def test_an_order_stays_what_it_is():
    """A run that is taken up by a newer version goes on with the same rows."""
    for source, expected in (
        ("array", [[[23, 20, 9], [6, 5, 17]], [[10, 1, 20], [13, 7, 17]]]),
        ("dataset", [[[1, 31, 33], [21, 28, 19]], [[10, 21, 2], [35, 20, 36]]]),
    ):
        dataset = shard(SOURCES[source](), 3, group=1, groups=3, seed=5)
        assert [one[:2] for one in passes(dataset, 2)] == expected


def test_an_order_looks_like_one_of_all_orders():
    for data in (rows(2000), tf.data.Dataset.range(2000)):
        [order] = groups_of(data, 2000, 1)
        order = np.array(order[0])
        assert abs(np.corrcoef(order, np.arange(2000))[0, 1]) < 0.1
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.1
        # Of a random order, 1 row is expected to stay, and 1 pair of neighbours to stay together.
        assert np.sum(order == np.arange(2000)) < 8
        assert np.sum(np.diff(order) == 1) < 8


def test_a_small_buffer_shuffles_little():
    [order] = groups_of(tf.data.Dataset.range(1000), 1, 1, shuffle=5)
    order = np.array(order)[:, 0]
    assert np.all(order - np.arange(1000) <= 5)
    assert np.any(order != np.arange(1000))
    [order] = groups_of(tf.data.Dataset.range(9), 1, 1, shuffle=1)
    assert order == [[row] for row in range(9)]


@pytest.mark.parametrize("kind", ["arrays", "dataset", "unknown"])
@pytest.mark.parametrize(
    "structure",
    [
        lambda a: (a, 2 * a),
        lambda a: (a, 2 * a, 3 * a),
        lambda a: ({"left": a, "right": (a + 1, a + 2)}, -a),
        lambda a: {"only": a},
        lambda a: (a,),
    ],
)
def test_structures_stay_as_they_are(kind, structure):
    data = structure(np.arange(20.0, dtype=np.float32).reshape(10, 2))
    source = data
    if kind != "arrays":
        source = tf.data.Dataset.from_tensor_slices(data)
    if kind == "unknown":
        source = source.filter(lambda *parts: True)
    dataset = shard(source, 2, group=1, groups=2, seed=0, shuffle=False)
    tf.nest.assert_same_structure(dataset.element_spec, data)
    assert all(spec.shape == (2, 2) for spec in tf.nest.flatten(dataset.element_spec))
    second = list(dataset.as_numpy_iterator())[1]
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(a, b[[5, 7]]), second, data)


def test_sparse_rows_of_unknown_length():
    def row(number):
        return tf.SparseTensor(tf.reshape(number, [1, 1]), tf.reshape(number, [1]), [ROWS])

    dataset = uncounted().map(row)
    parts = []
    for group in range(3):
        made = shard(dataset, 4, group=group, groups=3, shuffle=False, seed=1)
        parts.append([tf.sparse.to_dense(one).numpy().max(axis=1).tolist() for one in made])
    assert parts == groups_of(uncounted(), 4, 3, shuffle=False)


def test_arrays_are_what_keras_takes():
    x = np.arange(4)
    for array in (x, x.astype(np.float64), tf.constant(x), tf.Variable(x), x.astype(bool)):
        [batch] = shard(array, 4, group=0, groups=1, seed=0, shuffle=False)
        assert batch.dtype == (tf.float32 if str(array.dtype) == "float64" else array.dtype)
    [names] = shard(np.array(["a", "b"], object), 2, group=0, groups=1, seed=0, shuffle=False)
    assert names.numpy().tolist() == [b"a", b"b"]
    [batch] = shard([x, x, None], 4, group=0, groups=1, seed=0, shuffle=False)
    assert isinstance(batch, tuple) and len(batch) == 2


def test_length_is_known_where_it_can_be():
    def steps(data, **options):
        return int(shard(data, 4, group=1, groups=2, seed=0, **options).cardinality())

    assert steps(rows()) == steps(tf.data.Dataset.range(ROWS)) == 4
    assert steps(rows(), drop_remainder=False) == 5
    assert steps(tf.data.Dataset.range(ROWS), drop_remainder=False) == 5
    assert steps(uncounted()) < 0
    assert steps(tf.data.Dataset.range(3).repeat()) < 0
    never_ends = shard(tf.data.Dataset.range(3).repeat(), 2, group=1, groups=2, seed=0, shuffle=0)
    assert [batch.tolist() for batch in never_ends.take(3).as_numpy_iterator()] == [
        [1, 0],
        [2, 1],
        [0, 2],
    ]


def test_options_and_caches_of_a_source_stay():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    source = tf.data.Dataset.range(8).with_options(options).cache()
    dataset = shard(source, 2, group=0, groups=2, seed=0)
    assert dataset.options().threading.private_threadpool_size == 3
    assert len(passes(dataset, 2)[1]) == 2


def test_what_is_left_out_is_said_once_by_one_group(caplog):
    with caplog.at_level("WARNING", "absl"):
        groups_of(rows(1000), 32, 3)
        groups_of(rows(96), 32, 3)
        groups_of(rows(), 4, 2, drop_remainder=False)
        groups_of(uncounted(), 4, 2)
        groups_of(uncounted(), 4, 2, drop_remainder=False)
        groups_of(uncounted(), 1, 1)
        groups_of(rows(100), 32, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "shard: each epoch leaves out 40 of 1000 rows, others each time, so that 3 workers take 10 "
        "equal steps of 32 rows.",
        "shard: up to 7 rows of each epoch are left out, others each time, so that 2 workers take "
        "equal steps of 4 rows.",
        "shard: each epoch leaves out 4 of 100 rows, others each time, so that 1 worker takes 3 "
        "equal steps of 32 rows.",
    ]


DIVIDED = r"\. What makes batches by itself is divided.*`strategy\.global_rank`"


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ((rows(3), rows(4)), {}, r"same number of rows. Received shapes: \(3,\), \(4,\)"),
        ((rows(3), np.float32(1)), {}, "same number of rows"),
        ((), {}, "at least one array"),
        (rows(7), {}, "at least 8 rows, 4 for each of 2 workers. Received: 7 rows"),
        (rows(1), {"drop_remainder": False}, "at least 2 rows, 1 for each of 2 workers"),
        (tf.data.Dataset.range(7), {}, "Received: 7 rows"),
        (tf.data.Dataset.range(64).batch(8), {}, "batched already"),
        (tf.data.Dataset.range(64).batch(8).map(lambda x: x + 1).prefetch(1), {}, "batched"),
        (tf.data.Dataset.range(64).shuffle(8), {}, "shuffles anew"),
        (tf.data.Dataset.range(64).shuffle(8, seed=1).map(abs), {}, "shuffles anew"),
        ([1, 2, 3], {}, "dense arrays.*Received: int; of numbers in lists `np.array`"),
        (keras.utils.PyDataset(), {}, rf"dense arrays.*Received: PyDataset{DIVIDED}"),
        ((row for row in range(9)), {}, rf"dense arrays.*Received: generator{DIVIDED}"),
        ("rows", {}, r"dense arrays.*Received: str$"),
        (tf.ragged.constant([[1], [1, 2]]), {}, "dense arrays.*Received: RaggedTensor"),
        (rows(), {"batch_size": 0}, "`batch_size` must be an int, at least 1"),
        (rows(), {"batch_size": 2.0}, "`batch_size` must be an int"),
        (rows(), {"seed": -1}, "`seed` must be an int, at least 0"),
        (rows(), {"seed": True}, "`seed` must be an int"),
        (rows(), {"shuffle": 100}, "True or False for arrays"),
        (tf.data.Dataset.range(64), {"shuffle": -1}, "`shuffle` must be"),
    ],
)
def test_what_cannot_be_sharded_is_refused(data, options, message):
    options = {"batch_size": 4, "seed": 0, **options}
    with pytest.raises(ValueError, match=message):
        shard(data, group=1, groups=2, **options)


def test_rows_made_of_batches_are_rows():
    sums = tf.data.Dataset.range(64).batch(8).map(tf.reduce_sum)
    assert len(passes(shard(sums, 2, group=0, groups=2, seed=0))[0]) == 2
    once = tf.data.Dataset.range(64).shuffle(8, seed=1, reshuffle_each_iteration=False)
    assert len(passes(shard(once, 2, group=0, groups=2, seed=0))[0]) == 16
    loose = tf.data.Dataset.range(64).batch(8).unbatch()
    assert len(passes(shard(loose, 2, group=0, groups=2, seed=0))[0]) == 16
