# SPDX-License-Identifier: Apache-2.0
"""The ops: the same bits as the C library, static shapes, refusals."""

import numpy as np
import pytest
import tensorflow as tf

from tf_hips import robust
from tf_hips.ops import native_robust
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.robust import graph

pytestmark = pytest.mark.tf


def test_ops_give_the_bits_of_the_c_library() -> None:
    rows = np.random.default_rng(0).standard_normal((9, 70_001)).astype(np.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def all_of(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        middle, squares = graph.coordinate(x, "median")
        trimmed, _ = graph.coordinate(x, "trimmed_mean", 2)
        nearest, _ = graph.coordinate(x, "nearest", 3)
        most, _ = graph.coordinate(x, "majority")
        _, pairs = graph.distances(x)
        return middle, squares, trimmed, nearest, most, pairs, graph.mix(x, tf.ones([2, 9]) / 9)

    found = [one.numpy().tobytes() for one in all_of(rows)]
    middle, squares = native_robust.coordinate(rows, CoordinateRule.MEDIAN)
    wanted = [
        middle,
        squares,
        native_robust.coordinate(rows, CoordinateRule.TRIMMED, 2)[0],
        native_robust.coordinate(rows, CoordinateRule.NEAREST, 3)[0],
        native_robust.coordinate(rows, CoordinateRule.MAJORITY)[0],
        native_robust.distances(rows)[1],
        native_robust.mix(rows, np.full((2, 9), np.float32(1) / np.float32(9))),
    ]
    assert found == [one.tobytes() for one in wanted]


def test_shapes_are_known_where_those_of_rows_are() -> None:
    graph_of = tf.Graph()
    with graph_of.as_default():
        rows = tf.zeros([5, 30])
        middle, squares = graph.coordinate(rows, "median")
        squares_too, pairs = graph.distances(rows)
        mixed = graph.mix(rows, tf.zeros([3, 5]))
        whole = graph.aggregate(robust.krum(f=1), rows)
    assert middle.shape == whole.shape == [30]
    assert squares.shape[1] == squares_too.shape[1] == 5
    assert pairs.shape[1] == 10
    assert mixed.shape == [3, 30]


def test_a_whole_rule_in_a_function() -> None:
    rows = np.random.default_rng(1).standard_normal((9, 500)).astype(np.float32)
    rows[2, 3] = np.nan
    rule = robust.bucketing(s=2) >> robust.median()
    in_graph = tf.function(lambda x, step: graph.aggregate(rule, x, seed=5, step=step))
    for step in (0, 1):
        found = in_graph(rows, tf.constant(step)).numpy()
        np.testing.assert_array_equal(found, rule(rows, seed=5, step=step))
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs n >= 1"):
        in_graph(np.full((9, 500), np.nan, np.float32), tf.constant(0))


def test_what_makes_no_sense_is_refused() -> None:
    rows = tf.zeros([4, 10])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must leave a value"):
        graph.coordinate(rows, "trimmed_mean", 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="matrix of 1 to 1024 rows"):
        graph.coordinate(tf.zeros([0, 10]), "median")
    with pytest.raises(ValueError, match="median, trimmed_mean, nearest, majority"):
        graph.coordinate(rows, "mean")
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="4"):
        graph.mix(rows, tf.zeros([2, 3]))
