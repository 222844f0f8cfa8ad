# SPDX-License-Identifier: Apache-2.0
"""A worker's wall clock, which a test may set wrong (`tf-hips run --clock-skew`)."""

import math
import os
import time

from tf_hips.errors import ConfigError

SKEW_VARIABLE = "TF_HIPS_CLOCK_SKEW"


def skew_s() -> float:
    """By how many seconds this process' clock is ahead of the machine's.

    Raises:
        ConfigError: the environment says no number.
    """
    text = os.environ.get(SKEW_VARIABLE, "0")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{SKEW_VARIABLE} must be a number of seconds. Received: {text!r}")
    return value


def wall_clock() -> float:
    """Seconds since the epoch, as this process has them. For the paper's rule and nothing else."""
    return time.time() + skew_s()
