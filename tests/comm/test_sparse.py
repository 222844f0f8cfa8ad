# SPDX-License-Identifier: Apache-2.0
"""Sums of rows: their order, their bytes, and when a table goes dense."""

import pytest

from tests.support.ranks import ranks

pytestmark = pytest.mark.tf


def test_bytes_decide_between_rows_and_table():
    import tensorflow as tf

    from tf_hips.comm.sparse import is_cheaper, is_small

    # A row is 16 values and its index: 68 bytes; the table of 64000 bytes passes twice.
    shape = (1000, 16)
    assert is_cheaper(1882, shape, tf.float32)
    assert not is_cheaper(1883, shape, tf.float32)
    assert bool(is_cheaper(tf.constant(1882, tf.int64), shape, tf.float32))
    assert is_cheaper(1939, shape, tf.float64)
    assert not is_cheaper(1940, shape, tf.float64)
    assert not is_cheaper(0, (0, 16), tf.float32)
    # A table of scalars: an index costs as much as its value.
    assert is_cheaper(999, (1000,), tf.float32)
    assert not is_cheaper(1000, (1000,), tf.float32)
    assert is_small((2**18, 1), tf.float32)
    assert not is_small((2**18, 1), tf.float64)


def test_rows_of_equal_index_are_added_in_their_order():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm.sparse import deduplicated

    def of(values, indices):
        return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([9, 2]))

    one = deduplicated(of([[1e8, 1.0], [5.0, 6.0], [1.0, 1.0], [-1e8, 1.0]], [7, 0, 7, 7]))
    assert one.indices.numpy().tolist() == [7, 0]
    # (1e8 + 1) - 1e8 is 0 in float32, and 1 in any other order.
    assert one.values.numpy().tolist() == [[0.0, 3.0], [5.0, 6.0]]
    assert one.dense_shape.numpy().tolist() == [9, 2]
    none = deduplicated(of(np.zeros([0, 2], np.float32), np.zeros([0], np.int64)))
    assert none.values.shape == (0, 2)
    assert none.indices.dtype == tf.int64


@ranks(2)
def test_sums_of_rows():
    import numpy as np
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.sparse import sparse_sum

    rank = primitives.rank()
    # Three tables: of different widths, types of values, and types of indices.
    shapes = [(40, 3), (50,), (60, 2, 2)]
    types = [(np.float32, np.int32), (np.float32, np.int64), (np.float64, np.int32)]

    def rows(of, step):
        """Rows of one rank: in step 1 rank 0 has none of table 0, in step 2 nobody has any."""
        generator = np.random.default_rng([of, step])
        result = []
        for place, (shape, (value_type, index_type)) in enumerate(zip(shapes, types, strict=True)):
            count = [5 + 7 * of, [7 * of, 9, 2][place], 0, 70][step]
            indices = generator.integers(0, shape[0] // 4, count).astype(index_type)
            values = generator.normal(size=(count, *shape[1:])).astype(value_type)
            result.append((values, indices))
        return result

    sent = {"allreduce": 0, "allgather": 0}

    def count(kind, collective):
        def counting(tensor, *args):
            def add(size):
                sent[kind] += int(size)
                return np.int64(0)

            counted = tf.numpy_function(add, [tf.size(tensor)], tf.int64)
            with tf.control_dependencies([counted]):
                return collective(tf.identity(tensor), *args)

        return counting

    primitives.allreduce = count("allreduce", primitives.allreduce)
    primitives.allgather = count("allgather", primitives.allgather)

    def total(is_additive, label, *tensors):
        slices = [
            tf.IndexedSlices(values, indices, tf.constant(shape))
            for values, indices, shape in zip(tensors[::2], tensors[1::2], shapes, strict=True)
        ]
        return sparse_sum(slices, shapes, label, is_additive=is_additive)

    def dense(values, indices, shape):
        table = np.zeros(shape)
        np.add.at(table, indices, values)
        return table

    for is_additive in (False, True):
        signature = [
            tf.TensorSpec([None, *shape[1:]] if kind == 0 else [None], types[place][kind])
            for place, shape in enumerate(shapes)
            for kind in (0, 1)
        ]
        traced = tf.function(
            lambda *tensors, is_additive=is_additive: total(is_additive, "graph", *tensors),
            input_signature=signature,
            autograph=False,  # as in strategies
        )
        for step in (0, 1, 2, 3, 3):
            both = [rows(of, step) for of in range(2)]
            own = [tf.constant(array) for pair in both[rank] for array in pair]
            for result in (total(is_additive, "eager", *own), traced(*own)):
                for place, one in enumerate(result):
                    values = np.concatenate([each[place][0] for each in both])
                    indices = np.concatenate([each[place][1] for each in both])
                    assert one.values.dtype == values.dtype
                    assert one.indices.dtype == indices.dtype
                    assert one.dense_shape.numpy().tolist() == list(shapes[place])
                    if not is_additive:
                        np.testing.assert_array_equal(one.values.numpy(), values)
                        np.testing.assert_array_equal(one.indices.numpy(), indices)
                        continue
                    got = one.indices.numpy().tolist()
                    assert len(got) == len(set(got))
                    np.testing.assert_allclose(
                        dense(one.values.numpy(), one.indices.numpy(), shapes[place]),
                        dense(values, indices, shapes[place]),
                        rtol=1e-6,
                        atol=1e-6,
                    )
                bits = [one.values.numpy().tobytes().hex() for one in result]
                everyone = primitives.gather_objects(bits)
                assert everyone[0] == everyone[1]

    # One table: unique rows and two numbers are all that travels while they are few; the rows of a
    # full table are not sent.
    def of_one(num_rows, is_additive):
        indices = np.arange(2 * num_rows) % num_rows
        one = tf.IndexedSlices(tf.ones([2 * num_rows, 8]), tf.constant(indices), [1000, 8])
        sent.update(allreduce=0, allgather=0)
        [result] = sparse_sum([one], [(1000, 8)], "one", is_additive=is_additive)
        return result

    result = of_one(10, True)
    assert sent == {"allreduce": 0, "allgather": 1 + 10 + 80}
    assert result.values.numpy().tolist() == [[4.0] * 8] * 10
    result = of_one(1000, True)
    assert sent == {"allreduce": 8000, "allgather": 1}
    assert result.indices.numpy().tolist() == list(range(1000))
    assert float(tf.reduce_sum(result.values)) == 4 * 8000
    result = of_one(1000, False)
    assert sent == {"allreduce": 0, "allgather": 2000 + 16000}
    assert result.values.shape == (4000, 8)
