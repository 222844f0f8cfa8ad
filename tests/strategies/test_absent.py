# SPDX-License-Identifier: Apache-2.0
"""Exact reductions where a server with a quorum has gone on without some parties."""

from typing import Any

import numpy as np
import pytest

from tf_hips.errors import ProtocolError

pytestmark = pytest.mark.tf

WORKERS = (2, 1, 3)
VALUES = ((1.5, 4.0), (2.0, 8.0), (3.25, 16.0))


def combined(operations: list[str], absent: set[int], dtype: Any = np.float64) -> Any:
    """What three parties make of VALUES, as each of them computes it."""
    from tf_hips.strategies.failures import Failures
    from tf_hips.strategies.over_parties import ExactReduction

    payloads = [
        None if place in absent else np.asarray(pair, dtype).tobytes()
        for place, pair in enumerate(VALUES)
    ]
    exact = ExactReduction(lambda title, payload: payloads, Failures(), lambda: WORKERS)
    kinds = [(np.dtype(dtype), False, 1)] * 2
    packed = np.frombuffer(np.asarray(VALUES[0], dtype).tobytes(), np.uint8)
    return exact._combine("values", operations, kinds, packed).view(dtype).tolist()


def test_who_differs_is_named_by_its_number_also_where_others_are_absent() -> None:
    from tf_hips.strategies.agreeing import compared

    def told(*values: Any, mine: Any) -> Any:
        return compared(None, values, mine, lambda one: one[0], "a value")

    assert told(["x"], ["y"], mine=["y"]) == [("worker 0", "x"), ("worker 1", "y")]
    found = told(None, ["x"], None, ["y"], mine=["y"])
    assert found == [("worker 1", "x"), ("worker 3", "y"), ("this worker", "y")]


def test_with_all_present_nothing_is_scaled() -> None:
    assert combined(["sum", "mean"], set()) == [6.75, 28.0]
    assert combined(["first", "whole"], set()) == [1.5, 28.0]
    assert combined(["min", "max"], set()) == [1.5, 16.0]


def test_results_are_those_of_who_is_present() -> None:
    assert combined(["sum", "mean"], {2}) == [3.5, 12.0 * 6 / 3]
    assert combined(["first", "first"], {0}) == [2.0, 8.0]
    assert combined(["min", "max"], {0, 2}) == [2.0, 8.0]
    assert combined(["mean", "sum"], {0}, np.float32) == [5.25 * 6 / 4, 24.0]
    with pytest.raises(ProtocolError, match="without 1 of 3"):
        combined(["sum", "whole"], {1})


def test_metrics_and_statistics_are_means_over_those_present() -> None:
    """Two parties of one worker; the second is absent, and computes the same as the first."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies import logs

    def total(mine: Any) -> Any:
        def reduce(tensors: Any, operations: Any) -> Any:
            scales = {"sum": 1.0, "first": 1.0, "mean": 2.0}  # of 2 workers, 1 is present
            return [
                one * tf.cast(scales[operation], one.dtype)
                for one, operation in zip(mine, operations, strict=True)
            ]

        return reduce

    layer = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.moving_mean.assign([0.5, -1.0])
    own = [tf.cast(weight.value, tf.float64) for weight in model.non_trainable_weights]
    other = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
    present = logs.digests(model.non_trainable_weights)
    for one in (model, other):
        chosen = logs.average_statistics(one, total(own), lambda *_: [present, None], True, 2)
        assert chosen == 2
    for here, there in zip(model.weights, other.weights, strict=True):
        np.testing.assert_array_equal(here.numpy(), there.numpy())
    np.testing.assert_array_equal(layer.moving_mean.numpy(), [0.5, -1.0])
    present = tf.constant([3.0, 1.0], tf.float64)  # its loss, and that a metric explains it
    assert logs._means({"loss": 9.0}, [True], total([present]), 2) == ({"loss": 3.0}, [2])


def test_statistics_that_are_not_finite_count_only_on_others() -> None:
    """Of two replicas; of the second one the sums are known."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies import logs

    def averaged(own: list[float], others: list[Any]) -> tuple[list[float], list[str]]:
        layer = keras.layers.BatchNormalization(scale=False, center=False)
        model = keras.Sequential([keras.Input((2,)), layer])
        layer.moving_mean.assign(own)
        seen = []

        def total(tensors: Any, operations: Any) -> Any:
            seen.extend(operations)
            return [a + tf.cast(b, a.dtype) for a, b in zip(tensors, others, strict=True)]

        def gather(mine: Any, label: str) -> list[Any]:
            return [mine, [mine[0] + 1, mine[1]]]  # variances are equal

        assert logs.average_statistics(model, total, gather, True, 2, only_finite=True) == 1
        return layer.moving_mean.numpy().tolist(), seen

    nan, inf = float("nan"), float("inf")
    all_finite, nothing = [1.0, 1.0], [0.0, 0.0]
    both = averaged([1.0, 2.0], [[3.0, 6.0], all_finite, nothing])
    assert both == ([2.0, 4.0], ["mean"] * 3)
    # What is finite counts, beside what is not.
    assert averaged([nan, 2.0], [[3.0, 6.0], all_finite, nothing])[0] == [3.0, 4.0]
    assert averaged([1.0, 2.0], [nothing, nothing, [nan, nan]])[0] == [1.0, 2.0]
    # The least value that was seen may be infinite on all, beside one that differs.
    assert averaged([-inf, 2.0], [[0.0, 6.0], [0.0, 1.0], [-inf, 0.0]])[0] == [-inf, 4.0]
    # By one that lies about it: equal on all.
    for own, count in (([-inf, 2.0], -1.0), ([1.0, 2.0], -2.0), ([1.0, 2.0], nan)):
        assert np.isnan(averaged(own, [nothing, [count] * 2, nothing])[0][1])


def test_a_mask_that_is_infinite_on_all_stays_what_it_is() -> None:
    """Also where somebody is absent, of whom it is not known."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies import logs

    layer = keras.layers.BatchNormalization(scale=False, center=False)
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.moving_mean.assign([float("-inf"), 1.0])

    def total(tensors: Any, operations: Any) -> Any:
        return [one * tf.cast(2.0, one.dtype) for one in tensors]  # of 2, 1 is present

    def gather(mine: Any, label: str) -> list[Any]:
        return [mine, None]

    assert logs.average_statistics(model, total, gather, True, 2, only_finite=True) == 2
    assert layer.moving_mean.numpy().tolist() == [float("-inf"), 1.0]
    assert layer.moving_variance.numpy().tolist() == [1.0, 1.0]


def test_what_is_not_finite_at_a_party_that_is_back_for_the_sums_counts_on_the_others() -> None:
    """It was absent where all told what they have, so there nobody's differed."""
    import keras
    import tensorflow as tf

    from tf_hips.strategies import logs

    layer = keras.layers.BatchNormalization(scale=False, center=False)
    model = keras.Sequential([keras.Input((2,)), layer])
    layer.moving_mean.assign([3.0, 4.0])
    of_other = logs.digests(model.non_trainable_weights)
    layer.moving_mean.assign([float("nan"), 4.0])

    def total(tensors: Any, operations: Any) -> Any:
        others = [[3.0, 4.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
        return [a + tf.cast(b, a.dtype) for a, b in zip(tensors, others, strict=True)]

    def gather(mine: Any, label: str) -> list[Any]:
        return [None, of_other]

    assert logs.average_statistics(model, total, gather, True, 2, only_finite=True) == 2
    assert layer.moving_mean.numpy().tolist() == [3.0, 4.0]
    assert layer.moving_variance.numpy().tolist() == [1.0, 1.0]


def test_a_party_that_is_absent_compares_itself_with_the_others() -> None:
    from tf_hips.strategies.agreeing import compared

    def values(told: list[Any]) -> list[Any]:
        return [one for _, one in compared(None, told, [2], lambda one: one, "x")]

    assert values([[1], [2]]) == [[1], [2]]
    assert values([[1], None]) == [[1], [2]]
