# SPDX-License-Identifier: Apache-2.0
"""References to variables keep none alive, and are not kept themselves."""

import pytest

pytestmark = pytest.mark.tf


def test_variables_that_are_gone_are_forgotten_and_the_others_keep_their_order():
    import tensorflow as tf

    from tf_hips.strategies.references import References, add, holds

    references: References = {}
    # All at once, so that no id is used again.
    variables = [tf.Variable(0.0) for _ in range(1000)]
    for place in range(len(variables)):
        add(references, [variables[place]])
        if place % 10:
            variables[place] = None
    kept = [one for one in variables if one is not None]
    assert len(references) < 256
    alive = [one for one in (reference() for reference in references.values()) if one is not None]
    assert list(map(id, alive)) == list(map(id, kept))
    assert all(holds(references, one) for one in kept)
