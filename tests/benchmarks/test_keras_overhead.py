# SPDX-License-Identifier: Apache-2.0
"""What `make bench-keras` concludes from its blocks."""

import numpy as np
import pytest

from benchmarks import keras_overhead

MS = 1e-3


def row(measured: float, interval: str, name: str = "keras-cnn-step-1-worker") -> dict:
    return {"id": name, "measured": measured, "interval": interval}


@pytest.mark.parametrize(
    ("measured", "interval", "met"),
    [
        (1.03, "1.020 - 1.030", "yes"),
        (1.02, "0.990 - 1.045", "noisy"),
        # However narrow, an interval on both sides of the target does not tell.
        (1.03, "1.029 - 1.031", "noisy"),
        (1.0301, "1.030 - 1.040", "no"),
        # A busy machine can show anything, a good figure too: neither is a measurement.
        (0.723, "0.327 - 1.056", "noisy"),
        (1.2, "1.000 - 1.500", "noisy"),
    ],
)
def test_a_target_is_met_by_measurements_only(measured: float, interval: str, met: str) -> None:
    assert keras_overhead.with_target(row(measured, interval))["met"] == met


def test_only_a_wide_ratio_says_that_the_machine_was_busy() -> None:
    assert keras_overhead.was_busy(row(1.02, "0.990 - 1.045"))
    assert not keras_overhead.was_busy(row(1.03, "1.020 - 1.040"))
    assert not keras_overhead.was_busy(row(1.4, "1.350 - 1.490", "keras-cnn-trace-1-worker"))
    assert not keras_overhead.was_busy(row(0.29, "0.100 - 0.900", "keras-import-seconds"))


def test_seconds_have_a_target_and_other_rows_none() -> None:
    name = "keras-import-seconds"
    assert keras_overhead.with_target(row(0.29, "0.100 - 0.299", name))["met"] == "yes"
    assert keras_overhead.with_target(row(0.31, "0.310 - 0.310", name))["met"] == "no"
    other = keras_overhead.with_target(row(9.0, "9.000 - 9.000", "keras-mlp-step-1-worker"))
    assert (other["target"], other["met"]) == ("", "")


def test_wide_intervals_are_allowed_where_targets_are() -> None:
    name = "keras-cnn-trace-1-worker"
    assert keras_overhead.with_target(row(1.4, "1.330 - 1.470", name))["met"] == "yes"
    assert keras_overhead.with_target(row(1.4, "1.350 - 1.520", name))["met"] == "noisy"
    # However wide, an interval on one side of the target is an answer.
    assert keras_overhead.with_target(row(0.83, "0.590 - 0.960", name))["met"] == "yes"
    assert keras_overhead.with_target(row(1.9, "1.600 - 2.200", name))["met"] == "no"


def test_what_else_runs_does_not_count() -> None:
    # Half of the steps are disturbed, differently for the two, and the machine is half as fast in
    # every second round, for both alike.
    ours = [[11 * MS * pace, 11 * MS * pace, 40 * MS, 70 * MS] for pace in (1, 2) * 20]
    baseline = [[10 * MS * pace, 10 * MS * pace, 20 * MS, 90 * MS] for pace in (1, 2) * 20]
    cpu = [block[0] for block in baseline], [block[0] for block in ours]
    ratio = keras_overhead._ratio([keras_overhead.Taken(ours, cpu[0], baseline, cpu[1])], "plain")
    # Times are medians, as the ratio is.
    assert (ratio.ours, ratio.baseline) == (pytest.approx(16.5 * MS), pytest.approx(15 * MS))
    assert ratio.middle == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1)
    assert ratio.high == pytest.approx(1.1)
    assert ratio.cpu == pytest.approx(1 / 1.1)
    assert ratio.rounds == 40


def test_an_interval_covers_what_rounds_differ_in() -> None:
    random = np.random.default_rng(1)
    ours = [[10.5 * MS * pace] for pace in random.normal(1.0, 0.05, 60)]
    baseline = [[10 * MS * pace] for pace in random.normal(1.0, 0.05, 60)]
    cpu = [1.0] * 60
    ratio = keras_overhead._ratio([keras_overhead.Taken(ours, cpu, baseline, cpu)], "plain")
    assert ratio.low < 1.05 < ratio.high
    assert 0.01 < ratio.high - ratio.low < 0.06


def test_an_interval_covers_what_pairs_of_processes_differ_in() -> None:
    cpu = [1.0] * 4
    taken = [
        keras_overhead.Taken([[10 * MS * luck]] * 4, cpu, [[10 * MS]] * 4, cpu)
        for luck in (0.98, 0.99, 1.0, 1.01, 1.02)
    ]
    ratio = keras_overhead._ratio(taken, "plain")
    assert (ratio.middle, ratio.rounds) == (1.0, 20)
    assert ratio.low <= 0.99
    assert ratio.high >= 1.01
