# SPDX-License-Identifier: Apache-2.0
"""The table of momentum at the workers: both of its columns train the same where nobody lies."""

import pytest

from benchmarks import robust_accuracy, robust_momentum
from tf_hips import robust


def test_behind_a_mean_both_are_the_same() -> None:
    found = [
        robust_momentum.trained(robust.mean(), None, 0, at_workers=one, workers=5, steps=40)
        for one in (False, True)
    ]
    assert found[0] == pytest.approx(found[1], abs=0.5)
    assert found[0] > 60


def test_a_median_of_running_means_bears_a_little_that_is_enough() -> None:
    attack = robust_accuracy.ATTACKS["alie"]
    behind, workers = (
        robust_momentum.trained(robust.median(), attack, 0, at_workers=one, steps=60)
        for one in (False, True)
    )
    assert workers > behind + 2
