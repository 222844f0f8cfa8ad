# SPDX-License-Identifier: Apache-2.0
"""`flow`: values that no optimiser looks through, and the look at gradients."""

import numpy as np
import pytest

from tests.support.ranks import start_alone

pytestmark = pytest.mark.tf

SIZES = (0, 1, 7, 64, 100_003)  # the last takes several tasks


def test_opaque_hands_on_values_of_all_kinds():
    import tensorflow as tf

    from tf_hips.ops.flow import opaque

    values = [tf.constant([[1.5, 2.5]]), tf.constant("text"), tf.constant([True]), tf.zeros([0, 3])]
    assert opaque([]) == []
    assert opaque(values) == values

    @tf.function
    def same(*tensors):
        out = opaque(tensors)
        assert [one.shape for one in out] == [one.shape for one in tensors]
        assert [one.dtype for one in out] == [one.dtype for one in tensors]
        return out

    for got, value in zip(same(*values), values, strict=True):
        np.testing.assert_array_equal(got.numpy(), value.numpy())


def test_opaque_values_are_computed_and_never_folded():
    import tensorflow as tf

    from tf_hips.ops.flow import opaque

    calls = []

    def note(value):
        calls.append(float(value))
        return value

    @tf.function
    def step():
        [constant] = opaque([tf.constant(2.0)])
        # A pure function to TensorFlow: without `opaque` it is computed once, or not at all.
        opaque([tf.numpy_function(note, [constant], tf.float32, stateful=False)])
        return tf.constant(0.0)

    for _ in range(3):
        step()
    assert calls == [2.0] * 3


def test_collectives_need_no_order():
    """tf.function would let each operation with side effects wait for the one before."""
    import tensorflow as tf

    from tf_hips.ops.flow import opaque, yielded

    @tf.function(autograph=False)
    def step(x):
        [first] = opaque([x + 1.0])
        [second] = opaque([x + 2.0])
        return first, yielded(second), tf.cond(x > 0.0, lambda: opaque([x])[0], lambda: x)

    graph = step.get_concrete_function(tf.TensorSpec([])).graph
    waiting = {op.type: op.control_inputs for op in graph.get_operations()}
    assert (waiting["TfHipsOpaque"], waiting["TfHipsYield"]) == ([], [])
    assert [float(one) for one in step(tf.constant(5.0))] == [6.0, 7.0, 5.0]


def test_what_follows_a_yield_follows():
    import tensorflow as tf

    from tf_hips.ops.flow import yielded

    calls = []

    def note(value):
        calls.append(float(value))
        return value

    @tf.function(autograph=False)
    def step(x):
        value = x
        for number in range(5):
            # Nobody reads what is yielded; Grappler would drop an operation without side effects.
            with tf.control_dependencies([yielded(value)]):
                value = tf.numpy_function(note, [x + number], tf.float32, stateful=False)
        return value

    for _ in range(3):
        calls.clear()
        step(tf.constant(1.0))
        assert calls == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert yielded(tf.constant(3.0)).numpy() == 3.0


def _at_the_limit():
    import os
    import resource
    import threading

    import tensorflow as tf

    from tf_hips.ops import library

    ops = library.ops(tf)
    tf.constant(1.0) + 1.0  # TensorFlow makes its threads
    try:
        if os.geteuid() == 0:  # for whom there is no limit
            os.setuid(54321)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        threading.Thread(target=int).start()
    except (OSError, RuntimeError) as error:
        print(type(error).__name__)
    print([float(ops.tf_hips_yield(value=tf.constant(one))) for one in (2.0, 3.0)], flush=True)
    # To end as ranks do takes threads, and files of the user that this process was.
    os._exit(0)


def test_a_yield_at_the_limit_of_threads_only_loses_the_order(tmp_path):
    """No thread could be made for what is yielded, and the process went down."""
    limited, _, values = start_alone(_at_the_limit, tmp_path, 50).partition("\n")
    if limited != "RuntimeError":
        pytest.skip("this system does not limit threads")
    assert values == "[2.0, 3.0]\n"


def test_opaque_passes_gradients_on():
    import tensorflow as tf

    from tf_hips.ops.flow import opaque

    @tf.function
    def slope(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, second = opaque([x, y])
            value = first * first + 3.0 * second
        return tape.gradient(value, [x, y])

    assert [one.numpy() for one in slope(tf.constant(5.0), tf.constant(1.0))] == [10.0, 3.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_all_finite_is_exact(dtype, size):
    import tensorflow as tf

    from tf_hips.ops.flow import all_finite, finite

    kind = tf.as_dtype(dtype)
    # Of both signs, subnormal, and so large that their sum overflows.
    pattern = [0.0, -0.0, kind.max, kind.min, float(np.finfo("float16").smallest_subnormal), 1.0]
    fine = np.resize(np.array(pattern, kind.as_numpy_dtype), size)
    assert all_finite([tf.constant(fine)]).numpy()
    same = finite(tf.constant(fine), tf.constant(12, tf.int64), "bad at ")
    assert same.numpy().tobytes() == fine.tobytes()
    assert all_finite([tf.constant(fine), tf.zeros([2, 3]), tf.constant(fine)]).numpy()
    for place in {0, size // 2, size - 1} if size else ():
        for bad in (np.nan, np.inf, -np.inf):
            values = fine.copy()
            values[place] = bad
            assert not all_finite([tf.zeros([4]), tf.constant(values)]).numpy(), (place, bad)
            with pytest.raises(tf.errors.InvalidArgumentError, match="bad at 12"):
                finite(tf.constant(values), tf.constant(12, tf.int64), "bad at ")


def test_the_number_of_a_complaint_is_a_scalar():
    import tensorflow as tf

    from tf_hips.ops.flow import finite

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"scalar\. Received: shape \[2\]"):
        finite(tf.constant(np.nan), tf.constant([1, 2], tf.int64), "bad at ")
    with pytest.raises(ValueError, match="Shape must be rank 0 but is rank 1"):
        tf.function(finite)(tf.constant(1.0), tf.constant([1, 2], tf.int64), "bad at ")


def test_all_finite_of_nothing_and_of_integers():
    import tensorflow as tf

    from tf_hips.ops.flow import all_finite

    assert all_finite([]).numpy()
    with pytest.raises(TypeError, match=r"must be of float16, .*Received: dtype=int32"):
        all_finite([tf.constant([1])])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_looks_where_a_gpu_holds_the_values(monkeypatch, bad):
    import tensorflow as tf

    from tf_hips.ops import flow

    # TensorFlow's own operations take the place of ours, which runs on the CPU.
    monkeypatch.setattr(flow, "on_gpu", lambda: True)
    monkeypatch.setattr(flow.library, "ops", lambda tf: pytest.fail("an operation of ours"))
    fine = [tf.constant([1.0, 2.0]), tf.constant(3.0), tf.zeros([0])]
    assert flow.all_finite(fine).numpy()
    assert not flow.all_finite([*fine, tf.constant([[0.0, bad]])]).numpy()
