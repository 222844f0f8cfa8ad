# SPDX-License-Identifier: Apache-2.0
"""Models whose packets are more bytes than an int32 counts: graphs of them, which nothing runs."""

import pytest

pytestmark = pytest.mark.tf


def _sizes(function, *specs):
    """Elements of each result of a function, which is traced; how it cuts is looked at.

    TensorFlow may end the process where a cut beyond 2^31 is counted in int32.
    """
    import tensorflow as tf

    traced = tf.function(function).get_concrete_function(*specs)
    cuts = [one for one in traced.graph.get_operations() if one.type == "SplitV"]
    assert cuts
    assert {one.get_attr("Tlen") for one in cuts} == {tf.int64}
    return [one.shape.num_elements() for one in traced.structured_outputs]


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
    assert _sizes(uplink._merged, tf.TensorSpec([num_bytes], tf.uint8)) == sizes


def test_exact_values_of_2_pow_31_bytes_are_cut():
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.over_parties import ExactReduction

    primitives.init()
    exact, sizes = ExactReduction(lambda *_: [], Failures()), [2**28, 2**28, 8]
    specs = [tf.TensorSpec([size], tf.float32) for size in sizes]
    assert _sizes(lambda tensors: exact(tensors, "large", "sum"), specs) == sizes
