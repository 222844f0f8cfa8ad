# SPDX-License-Identifier: Apache-2.0
"""A gradient whose parts go several ways is clipped as one; no ranks but an imagined number."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tf_hips.errors import ConfigError

pytestmark = pytest.mark.tf

RANKS = 4
SIZES = (3, 50, 7, 20)
ONEBIT = "error_feedback(onebit)"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are what one rank has; there are said to be RANKS."""
    from tf_hips.comm import planned, primitives

    monkeypatch.setattr(primitives, "size", lambda: RANKS)
    monkeypatch.setattr(planned, "plain", lambda vectors, label: list(vectors))


def summed(ways: Sequence[str | None], step: int = 0, factor: float = 1.0) -> list[np.ndarray]:
    """What comes to the reducers of a plan, or is summed exactly, of each gradient."""
    import tensorflow as tf

    from tf_hips.comm.plan import EXACT, Choice, Plan
    from tf_hips.comm.planned import PlannedSum
    from tf_hips.ops import graph
    from tf_hips.ops.compressor import parse

    choices = [
        Choice(str(place), size, text, EXACT if text is None else "ps")
        for place, (size, text) in enumerate(zip(SIZES, ways, strict=True))
    ]

    def make(shapes: Any, text: str, *more: Any) -> Any:
        # As the reducer of a group: it clips what it has.
        return lambda vectors, step: graph.clip(parse(text).at(int(step)), vectors, RANKS)

    total = PlannedSum([[size] for size in SIZES], Plan(RANKS, tuple(choices)), "test", make)
    found = total(
        [tf.constant(factor * values) for values in gradients()], tf.constant(step, tf.int64)
    )
    return [one.numpy() for one in found]


def gradients() -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.standard_normal(size).astype(np.float32) for size in SIZES]


@pytest.mark.parametrize(
    "ways",
    [
        ("dgc(ratio=0.1, clip_norm=2)",) * 4,
        ("dgc(ratio=0.1, clip_norm=2)", "dgc(ratio=0.2, clip_norm=2)") * 2,
        (None, "dgc(ratio=0.1, clip_norm=2)", None, "warmup(dgc(clip_norm=2), steps=5)"),
        ("dgc(ratio=0.1, clip_norm=2)", ONEBIT, None, "dgc"),
    ],
)
def test_all_of_a_gradient_is_clipped_by_its_own_norm(ways: tuple[str | None, ...]) -> None:
    whole = np.concatenate(gradients()).astype(np.float64)
    most = 2.0 / np.sqrt(RANKS)
    found = np.concatenate(summed(ways))
    assert np.linalg.norm(found) == pytest.approx(most, rel=1e-6)
    np.testing.assert_allclose(found, whole * (most / np.linalg.norm(whole)), rtol=1e-6)
    # What is shorter than that stays, to the bit.
    short = summed(ways, factor=0.01)
    for one, values in zip(short, gradients(), strict=True):
        np.testing.assert_array_equal(one, np.float32(0.01) * values)


def test_nothing_is_clipped_where_nobody_asks_for_it() -> None:
    for ways in ((ONEBIT, None, "dgc", ONEBIT), (None,) * 4):
        for one, values in zip(summed(ways), gradients(), strict=True):
            np.testing.assert_array_equal(one, values)


@pytest.mark.parametrize(
    "other", ["dgc(ratio=0.1, clip_norm=3)", "warmup(dgc(clip_norm=3), steps=5)"]
)
def test_several_norms_are_refused(other: str) -> None:
    with pytest.raises(ConfigError, match=r"must name the same `clip_norm`. Received: 2, 3$"):
        summed(("dgc(ratio=0.1, clip_norm=2)", None, other, ONEBIT))


@pytest.mark.parametrize("most", [3.0, 41.0, 47.0, 55.0, 61.0, 82.0])
def test_a_gradient_that_is_short_enough_keeps_its_bits(most: float) -> None:
    import tensorflow as tf

    from tf_hips.ops import graph
    from tf_hips.ops.algorithms import dgc

    values = gradients()[2]
    [kept] = graph.clip(dgc(clip_norm=most), [tf.constant(values)], 1)
    np.testing.assert_array_equal(kept.numpy(), values)


def test_a_table_that_travels_apart_is_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from tf_hips.comm import primitives
    from tf_hips.comm.plan import Choice, Plan
    from tf_hips.comm.planned import PlannedSum

    names = []
    monkeypatch.setattr(primitives, "allreduce", lambda one, name: names.append(name) or one)
    choices = tuple(Choice(str(place), 8, partitions=2) for place in range(2))
    total = PlannedSum([[0], [8]], Plan(RANKS, choices), "test", lambda *more: None)
    found = total([tf.zeros([0]), tf.ones([8])], tf.constant(0, tf.int64))
    assert [one.shape[0] for one in found] == [0, 8]
    assert names == ["test.exact.tensor_1.part_0", "test.exact.tensor_1.part_1"]
