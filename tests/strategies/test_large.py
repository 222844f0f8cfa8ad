# SPDX-License-Identifier: Apache-2.0
"""Models whose packets are more bytes than an int32 counts: graphs of them, which nothing runs."""

import pytest

pytestmark = pytest.mark.tf


def _check_cuts(graph):
    """TensorFlow may end the process where a cut beyond 2^31 is counted in int32."""
    import tensorflow as tf

    cuts = [one for one in graph.get_operations() if one.type == "SplitV"]
    assert cuts
    assert {one.get_attr("Tlen") for one in cuts} == {tf.int64}


def test_packets_of_2_pow_31_bytes_are_cut():
    import tensorflow as tf

    from tf_hips.ops import algorithms
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.uplink import SlowTier, Uplink

    codec, sizes = algorithms.fp32(), [2**28, 2**28, 64]
    tier = SlowTier(lambda *_: None, 1, 0, Failures())
    uplink = Uplink(tier, codec, codec, sizes, "large", {})
    num_bytes = uplink._reply_bytes()
    assert num_bytes > 2**31
    with tf.Graph().as_default() as graph:
        sums = uplink._merged(tf.compat.v1.placeholder(tf.uint8, [num_bytes]))
    assert [one.shape.num_elements() for one in sums] == sizes
    _check_cuts(graph)


def test_exact_values_of_2_pow_31_bytes_are_cut():
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.over_parties import ExactReduction

    primitives.init()
    exact, sizes = ExactReduction(lambda *_: [], Failures()), [2**28, 2**28, 8]
    with tf.Graph().as_default() as graph:
        tensors = [tf.compat.v1.placeholder(tf.float32, [size]) for size in sizes]
        sums = exact(tensors, "large", "sum")
    assert [one.shape.num_elements() for one in sums] == sizes
    _check_cuts(graph)
