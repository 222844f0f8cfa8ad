# SPDX-License-Identifier: Apache-2.0
"""What `make bench-keras` concludes from its blocks."""

import pytest

from benchmarks import keras_overhead

MS = 1e-3


def row(measured: float, quartiles: str, name: str = "keras-cnn-step-1-worker") -> dict:
    return {"id": name, "measured": measured, "quartiles": quartiles}


@pytest.mark.parametrize(
    ("measured", "quartiles", "met"),
    [
        (1.03, "1.020 - 1.040", "yes"),
        (1.031, "1.020 - 1.040", "no"),
        # A busy machine can show anything, a good figure too: neither is a measurement.
        (0.723, "0.327 - 1.056", "noisy"),
        (1.2, "1.000 - 1.500", "noisy"),
    ],
)
def test_a_target_is_met_by_measurements_only(measured: float, quartiles: str, met: str) -> None:
    assert keras_overhead.with_target(row(measured, quartiles))["met"] == met


def test_seconds_have_no_noise_limit_and_other_rows_no_target() -> None:
    name = "keras-import-seconds"
    assert keras_overhead.with_target(row(0.29, "0.100 - 0.900", name))["met"] == "yes"
    assert keras_overhead.with_target(row(0.31, "0.310 - 0.310", name))["met"] == "no"
    other = keras_overhead.with_target(row(9.0, "9.000 - 9.000", "keras-mlp-step-1-worker"))
    assert (other["target"], other["met"]) == ("", "")


def test_a_ratio_is_formed_within_each_round() -> None:
    # The machine is half as fast in the last two rounds, for both alike.
    ours = [11 * MS, 11 * MS, 22 * MS, 22 * MS]
    baseline = [10 * MS, 10 * MS, 20 * MS, 20 * MS]
    ratio = keras_overhead._ratio(ours, baseline, ours, baseline, "plain")
    assert ratio.low == pytest.approx(1.1)
    assert ratio.middle == pytest.approx(1.1)
    assert ratio.high == pytest.approx(1.1)
