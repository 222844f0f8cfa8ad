# SPDX-License-Identifier: Apache-2.0
"""Embeddings: the numbers of one process, and few bytes for large tables."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf

LENGTH = 12
TABLE = (20000, 16)
TABLE_BYTES = 4 * TABLE[0] * TABLE[1]


@pytest.mark.timeout(120)
def test_what_is_known_of_optimizers_and_indices():
    import keras
    import tensorflow as tf

    from tf_hips.strategies.slices import depends_on_data, is_additive

    class Own(keras.optimizers.SGD):
        """May do anything with its gradients."""

    optimizers = keras.optimizers
    assert is_additive(optimizers.SGD(momentum=0.9, nesterov=True))
    assert is_additive(optimizers.Lion(weight_decay=0.1))
    assert not is_additive(Own())
    assert not is_additive(optimizers.Adam())
    for clip in ("clipnorm", "global_clipnorm", "clipvalue"):
        assert not is_additive(optimizers.SGD(**{clip: 1.0}))

    assert depends_on_data(tf.constant([0, 1]))  # an eager step has no graph to read
    offset = tf.Variable(1)
    kept = tf.range(4)
    table, words = (tf.Variable(tf.zeros([9, 2])) for _ in range(2))
    found = {}

    def note(name, indices):
        found[name] = depends_on_data(indices)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def lookups(tokens):
        length = tf.shape(tokens)[-1]
        note("tokens", tf.reshape(tokens, [-1]))
        note("noise", tf.random.uniform([4], maxval=9, dtype=tf.int32))
        note("rows of the batch", tf.range(tf.shape(tokens)[0]))
        turned, joined = tf.transpose(tokens), tf.reshape(tokens, [-1])
        note("rows of the batch, turned", tf.range(tf.shape(turned)[1]))
        note("rows of all tokens", tf.range(tf.shape(joined)[-1]))
        note("zero for each token", tf.zeros_like(tokens))
        note("positions of tokens", tf.broadcast_to(tf.range(length), tf.shape(tokens)))
        note("positions", tf.range(length))
        with tf.GradientTape() as tape:
            sums = tf.gather(table, tf.range(length)), tf.gather(words, tokens)
        looked_up = tape.gradient(sums, [table, words])
        for name, rows in zip(("positions", "tokens"), looked_up, strict=True):
            note(f"{name} that were looked up", rows.indices)
        note("as many as tokens", tf.range(tf.size(tokens)))
        note("constants", tf.reshape(tf.constant([[1, 2]]), [-1]))
        note("kept", kept + offset)
        both = tf.concat([tokens[0], tf.range(length)], 0)
        note("both", both)
        deep = tf.range(length)
        for _ in range(1100):
            deep = deep + 1
        note("deep", deep)

        @tf.function
        def inner(positions):
            note("argument", positions)
            note("captured", tf.range(length) + kept[0])
            note("captured tokens", tokens[0] + 1)
            return positions

        return inner(tf.range(length))

    lookups(tf.zeros([2, 3], tf.int32))
    fixed = {"positions", "positions that were looked up", "constants", "kept", "deep", "captured"}
    assert found == {name: name not in fixed for name in found}
    assert len(found) == 18


def build(optimizer, **options):
    """Two lookups in one large table, one in a tiny one, and learned positions."""
    import keras

    class Positions(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(LENGTH, TABLE[1])

        def build(self, shape):
            del shape
            self.table.build((None, LENGTH))

        def call(self, inputs):
            return inputs + self.table(keras.ops.arange(LENGTH))

    tokens = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.Embedding(*TABLE)
    parts = keras.layers.Concatenate(1)([table(tokens[:, :4]), table(tokens[:, 4:])])
    kinds = keras.layers.Embedding(5, TABLE[1])(tokens % 5)
    features = Positions()(keras.layers.Add()([parts, kinds]))
    features = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(features))
    model = keras.Model(tokens, keras.layers.Dense(3)(features))
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    return model


def data(num_rows, num_words=TABLE[0]):
    """Tokens of which few are frequent: int32 [n, LENGTH], and float32 [n, 3]."""
    import numpy as np

    generator = np.random.default_rng(4)
    x = (generator.zipf(1.4, (num_rows, LENGTH)) % num_words).astype(np.int32)
    y = np.stack([x[:, 0] % 7, x[:, 1] % 3, x[:, -1] % 2], 1).astype(np.float32)
    return x, y


class Counter:
    """Bytes that this rank hands to Horovod while steps run."""

    def __init__(self):
        from tf_hips.comm import primitives

        self.bytes = 0
        for name in ("allreduce", "allgather", "alltoall"):
            setattr(primitives, name, self._counting(getattr(primitives, name)))

    def _counting(self, collective):
        import numpy as np
        import tensorflow as tf

        def call(tensor, *arguments):
            def add(size):
                self.bytes += int(size) * tensor.dtype.size
                return np.int64(0)

            counted = tf.numpy_function(add, [tf.size(tensor)], tf.int64)
            with tf.control_dependencies([counted]):
                return collective(tf.identity(tensor), *arguments)

        return call

    def during(self, run):
        before = self.bytes
        run()
        return self.bytes - before


@pytest.mark.slow
@ranks(2, deadline_s=240.0)
def test_two_ranks_equal_one_process_on_the_joined_batch():
    import keras
    import numpy as np
    import tensorflow as tf

    from tests.strategies import training
    from tf_hips.comm import primitives
    from tf_hips.errors import NonFiniteError
    from tf_hips.strategies import CompressedRing, local

    rank = primitives.rank()
    counter = Counter()
    strategy = CompressedRing()
    optimizers = keras.optimizers
    x, y = data(160)
    own = training.shard([x, y], rank, 2)
    steps = len(own[0]) // training.BATCH
    assert len(np.unique(x)) < x.size // 4

    def compare(make, bytes_per_step, **options):
        keras.utils.set_random_seed(0)
        alone = build(make(), **options)
        with local():
            training.fit(alone, [x, y], batch=2 * training.BATCH)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = build(make(), **options)
        sent = counter.during(lambda: training.fit(model, own)) / steps
        training.assert_same_on_all_ranks(model)
        for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert sent < bytes_per_step, (sent, make().name)

    # Ten steps. Few bytes: 96 rows of 64 bytes for each table, and the dense layers.
    few = 25_000
    assert few < TABLE_BYTES / 50
    compare(lambda: optimizers.SGD(0.1, momentum=0.9), few)
    compare(lambda: optimizers.SGD(0.1), few, steps_per_execution=2, run_eagerly=False)
    compare(lambda: optimizers.Adam(0.01), few + 8000, steps_per_execution=5)
    compare(lambda: optimizers.SGD(0.1, clipnorm=0.01), few + 8000)

    # Ranks with batches of different lengths, eagerly; the loss is a sum.
    keras.utils.set_random_seed(0)
    options = {"loss": keras.losses.MeanSquaredError(reduction="sum"), "run_eagerly": True}
    with strategy.scope():
        model = build(optimizers.SGD(0.001), **options)
    alone = build(optimizers.SGD(0.001), **options)
    alone.set_weights(model.get_weights())
    for begin in (0, 9, 18):
        rows = slice(begin, begin + 2) if rank == 0 else slice(begin + 2, begin + 9)
        model.train_on_batch(x[rows], y[rows])
        with local():
            alone.train_on_batch(x[begin : begin + 9], y[begin : begin + 9])
    training.assert_same_on_all_ranks(model)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)

    # TensorFlow adds so many rows of equal index to a variable in any order.
    often = training.shard(data(2048, num_words=50), rank, 2, batch=512)
    with strategy.scope():
        model = build(optimizers.Adagrad(0.01))
    training.fit(model, often, batch=512)
    training.assert_same_on_all_ranks(model)

    # One variable in a loop of one's own: sparse in one step and dense in the next, no rows on
    # one rank, on both, and all rows of the table.
    with strategy.scope():
        table = tf.Variable(tf.ones(TABLE))
        descent = optimizers.SGD(1.0)

    def step(indices, is_dense):
        with tf.GradientTape() as tape:
            rows = table * 1.0 if is_dense else tf.gather(table, indices)
            loss = tf.reduce_sum(rows)
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices) != is_dense
        descent.apply_gradients([(gradient, table)])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def sparse_step(indices):
        strategy.run(step, args=(indices, False))

    @tf.function
    def dense_step():
        strategy.run(step, args=(tf.constant([0]), True))

    expected = np.ones(TABLE, np.float32)
    everything = np.arange(TABLE[0])
    for both, most in (
        ([[3, 3, 7], []], 700),  # the ranks meet before it, and tell names
        ([[], []], 200),
        ([everything, everything], TABLE_BYTES + 200),
    ):
        mine = tf.constant(both[rank], tf.int64)
        took = counter.during(lambda mine=mine: sparse_step(mine))
        assert took <= most, took
        for one in both:
            np.subtract.at(expected, np.array(one, np.int64), 1.0)
        np.testing.assert_array_equal(table.numpy(), expected)
        dense_step()
        expected -= 2.0
        np.testing.assert_array_equal(table.numpy(), expected)

    # What is not finite in rows is dropped as in tables, and half types come back as such.
    lenient = CompressedRing(nonfinite="zero")
    with lenient.scope():
        words = tf.Variable(tf.ones([9, 2], tf.bfloat16))
        descent = optimizers.Adagrad(1.0, initial_accumulator_value=0.1)

    @tf.function
    def spoiled_step(indices):
        def spoiled():
            rows = tf.constant([[1.0, float("nan") if rank else 1.0], [float("inf"), 1.0]])
            gradient = tf.IndexedSlices(tf.cast(rows, tf.bfloat16), indices, tf.constant([9, 2]))
            descent.apply_gradients([(gradient, words)])

        lenient.run(spoiled)

    spoiled_step(tf.constant([2, 4]))
    expected = np.ones([9, 2])
    expected[2] -= [2 / 2.1**0.5, 1 / 1.1**0.5]
    expected[4, 1] -= 2 / 2.1**0.5
    np.testing.assert_allclose(tf.cast(words, tf.float32).numpy(), expected, atol=0.02)

    # A sum that float32 holds, and the type of its variable does not, is no number for it.
    strict = CompressedRing()
    with strict.scope():
        half = tf.Variable(tf.ones([3], tf.float16))
        plain_descent = optimizers.SGD(1.0)

    def overflowing_step():
        gradient = tf.constant([1.0, 40000.0, 1.0], tf.float16)
        plain_descent.apply_gradients([(gradient, half)])

    with pytest.raises(NonFiniteError, match=r"Gradient 0 .* summed over all workers"):
        strict.run(overflowing_step)
    np.testing.assert_array_equal(half.numpy(), np.ones(3))

    # Compression leaves tables of so many rows alone: exact sums, no residual.
    compressed = CompressedRing("error_feedback(onebit)")
    large = (2**18, 2)
    keras.utils.set_random_seed(1)

    def users():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Embedding(*large), keras.layers.Flatten()]
        )
        model.compile("adam", "mse")
        return model

    with compressed.scope():
        model = users()
    alone = users()
    alone.set_weights(model.get_weights())
    x = np.random.default_rng(5).integers(0, large[0], (32, 4))
    y = np.ones((32, 8), np.float32)
    sent = counter.during(lambda: training.fit(model, training.shard([x, y], rank, 2)))
    assert sent < 4000, sent  # the table has 2 MiB
    with local():
        training.fit(alone, [x, y], batch=2 * training.BATCH)
    np.testing.assert_allclose(model.get_weights()[0], alone.get_weights()[0], rtol=1e-5, atol=1e-7)
    [total] = compressed._sums.values()
    assert total._reducer.residuals == {}


@pytest.mark.heavy
@ranks(2)
def test_rows_on_one_rank_and_a_dense_gradient_on_another_are_refused_by_name():
    import keras
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.errors import ProtocolError
    from tf_hips.strategies import CompressedRing

    rank = primitives.rank()
    refused = r"gradient {} \({}\) comes as rows on rank {} and dense on rank {}.*convert_to_tensor"

    def made(compression, shape):
        strategy = CompressedRing(compression)
        with strategy.scope():
            tables = [tf.Variable(tf.zeros(shape), name=name) for name in ("words", "users")]
            optimizer = keras.optimizers.Adam()

        def step(indices, are_rows):
            rows = tf.IndexedSlices(tf.ones([2, shape[1]]), indices, tf.constant(shape))
            optimizer.apply_gradients(
                (rows if is_rows else tf.ones(shape), table)
                for is_rows, table in zip(are_rows, tables, strict=True)
            )

        return lambda indices, *are_rows: strategy.run(step, (indices, are_rows))

    # With a codec, rows of a table as large as this one are apart from what it encodes.
    for compression, shape in ((None, [9, 2]), ("onebit", [2**18, 2])):
        for around in (tf.function, lambda step: step):
            with pytest.raises(ProtocolError, match=refused.format(1, "users", 1, 0)):
                around(made(compression, shape))(tf.constant([1, 2]), True, rank == 1)
    # Later steps may be others, alike on all ranks.
    step = made(None, [9, 2])
    for are_rows in ((False, False), (True, True), (False, False)):
        step(tf.constant([1, 2]), *are_rows)
    with pytest.raises(ProtocolError, match=refused.format(0, "words", 0, 1)):
        step(tf.constant([1, 2]), rank == 0, rank == 1)


@ranks(1, deadline_s=240.0)
def test_one_worker_gets_what_keras_gets():
    import contextlib

    import keras
    import numpy as np

    from tests.strategies import training
    from tf_hips.errors import NonFiniteError
    from tf_hips.strategies import CompressedRing, fingerprint

    x, y = data(64, num_words=50)
    results = set()
    scopes = [
        contextlib.nullcontext,
        lambda: CompressedRing(nonfinite="raise").scope(),
        lambda: CompressedRing("onebit", nonfinite="propagate").scope(),
    ]
    for scope in scopes:
        keras.utils.set_random_seed(5)
        with scope():
            model = build("adam")
        training.fit(model, [x, y])
        results.add(fingerprint(model))
    assert len(results) == 1

    y[0] = np.nan
    with scopes[1]():
        model = build("adam", run_eagerly=True)
    with pytest.raises(NonFiniteError, match=r"Gradient \d+ .*of rank 0 must"):
        training.fit(model, [x, y])
