# SPDX-License-Identifier: Apache-2.0
"""What rounds of thousands of uneven sites would be like: length, idle share, bytes.

    description   what a YAML file says: sites, links, model, methods
    sites         the sites that are drawn from it, and their links
    rounds        sync, fedavg and esync: rounds that all sites end together
    events        compat ESync and fedbuff: one event after another
    results       what is counted
    calibration   from the logs of a run to a description

A discrete-event simulation of time, not of learning. Assignments, early stops and answers of the
state server come from `tf_hips.esync`, packets' lengths from the compressors: the code that runs.

Invariant: the same description gives the same results; methods see the same sites.
"""

from tf_hips.simulation.calibration import calibrated
from tf_hips.simulation.description import Description
from tf_hips.simulation.results import Result
from tf_hips.simulation.simulate import simulate

__all__ = ["Description", "Result", "calibrated", "simulate"]
