# SPDX-License-Identifier: Apache-2.0
"""From logs to numbers and figures, and from nothing else: a figure can always be drawn again.

    rounds    one run: accuracy, bytes of the slow tier, fingerprints
    runs      several runs, from events or from trees, as values that can be compared
    trees     logs as HiPS and ESync write and read them
    ends      whether a run has ended, and how
    peers     who was refused or outvoted, how often, and who has found it out
    choices   how often rules that choose rows have chosen each peer's
    figures   runs beside each other; those of peers in `peer_figures`
    canvas    what all figures have in common
    page      all of it as one HTML page that needs no network

Imports no TensorFlow; matplotlib (extra `plots`) only to draw.
"""

from tf_hips.report.rounds import (
    Summary,
    Traffic,
    epochs,
    newest_run,
    summarise,
    traffic,
)

__all__ = [
    "Summary",
    "Traffic",
    "epochs",
    "newest_run",
    "summarise",
    "traffic",
]
