# SPDX-License-Identifier: Apache-2.0
"""Inside of `tf.function(jit_compile=True)` every codec's op says why XLA has no kernel for it."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tf_hips.ops import REGISTRY, Compressor, Key, error_feedback, graph, library, momentum, native

pytestmark = [pytest.mark.tf, pytest.mark.timeout(180)]

N = 8
KEY = {"seed": 1, "step": 2, "tensor_id": 3}


def uses(compressor: Compressor, rows: tf.Tensor) -> list[Callable[[tf.Tensor], object]]:
    """What a graph does with a codec."""
    found = [
        lambda x: graph.decode(compressor, rows[0], N) + x,
        lambda x: graph.merge(compressor, rows, N) + x,
    ]
    if compressor.has_state:
        state = tf.zeros(compressor.state_shape([N]))
        return [*found, lambda x: graph.encode(compressor, x, kept=state, **KEY)]
    feedback = error_feedback(compressor)
    return [
        *found,
        lambda x: graph.encode(compressor, x, **KEY),
        lambda x: graph.encode(feedback, x, kept=x, **KEY),
        lambda x: graph.encode(momentum(compressor), x, kept=x[tf.newaxis], **KEY),
        lambda x: graph.merge_encode(feedback, rows, N, x, **KEY),
    ]


def test_every_op_explains_itself() -> None:
    """Those of loaded codecs: test_jit. What no codec is made of has TensorFlow's own words."""
    explained = set()
    for name in sorted(REGISTRY):
        compressor = Compressor(name)
        has_state = compressor.has_state
        state = np.zeros(compressor.state_shape([N]), np.float32) if has_state else None
        packet = native.encode(compressor, np.ones(N, np.float32), Key(1, 2, 3), state)
        for use in uses(compressor, tf.constant(np.stack([packet, packet]))):
            compiled = tf.function(lambda x, use=use: use(x * 2.0), jit_compile=True)
            pattern = "`TfHips>(.*)` has no XLA kernel: .*outside of"
            with pytest.raises(tf.errors.UnimplementedError, match=pattern) as told:
                compiled(tf.ones([N]))
            explained.update(re.findall("`TfHips>(.*)` has no", str(told.value)))
    others = {"finite", "firstnonfinite", "opaque", "orthonormal", "yield"}
    others |= {f"lowrank{what}" for what in ("left", "right", "product", "rest")}
    others |= {f"robust{what}" for what in ("coordinate", "distances", "mix")}
    all_ops = {
        op.removeprefix("tf_hips_").replace("_", "")
        for op in dir(library.ops(tf))
        if op.startswith("tf_hips_") and not op.endswith("_eager_fallback")
    }
    of_codecs = {op for op in all_ops - others if not op.startswith("loaded")}
    assert {op.lower() for op in explained} == of_codecs
