# SPDX-License-Identifier: Apache-2.0
"""The steps that workers make of merged movements are those that a server would make."""

import numpy as np
import pytest

pytestmark = pytest.mark.tf

SHAPES = [(2, 3), (4,)]


def movement(number):
    generator = np.random.default_rng(number)
    return [generator.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("text", ["fedavg(0.5)", "diloco", "adam(0.1)", "fedadam(0.1)", None])
def test_steps_are_those_of_a_server(text):
    import tensorflow as tf

    from tf_hips.errors import NonFiniteError
    from tf_hips.loops.outer import Outer
    from tf_hips.ps import rules
    from tf_hips.ps.rules import steps

    rule = None if text is None else rules.parse(text)  # None: the server has made them
    outer = Outer(rule)
    outer.make(
        [tf.TensorShape(shape) for shape in SHAPES],
        lambda value, name: tf.Variable(value, trainable=False, name=name),
    )
    slots = [None if rule is None else steps.first_slots(rule, int(np.prod(s))) for s in SHAPES]
    for number in range(3):
        moved = movement(number)
        wanted = list(moved)
        if rule is not None:
            for place, one in enumerate(moved):
                made, slots[place] = steps.advance(rule, one.reshape(-1), slots[place])
                wanted[place] = made.reshape(one.shape)
            # One that is refused leaves all as it was, also of the tensors before it.
            with pytest.raises(NonFiniteError):
                outer.steps([tf.constant(moved[0]), tf.fill(SHAPES[1], np.float32(np.inf))])
        found = outer.steps([tf.constant(one) for one in moved])
        for one, expected in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one.numpy(), expected)
