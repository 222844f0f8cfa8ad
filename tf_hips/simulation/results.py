# SPDX-License-Identifier: Apache-2.0
"""What is counted of a simulated method."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_hips.ops.native import Doubles
from tf_hips.simulation.sites import Counts

# Rounds before what is counted: in the first ESync knows no times, in two more no transfers that
# count.
UNCOUNTED = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """What a method would be like. Rounds are those after the first three.

    Rounds of `fedbuff` are steps of the server, after the first three updates of every site.

    Attributes:
        method: the method's label.
        rounds: how many rounds were counted.
        seconds: how long they lasted together.
        round_s: seconds of a round on the mean.
        round_p95_s: seconds that one round of twenty exceeds.
        compute_share: share of the sites' time in local steps.
        transfer_share: share in which a site's packets travel.
        idle_share: the rest: waiting for others.
        steps_per_site: local steps of a site in a round, on the mean.
        least_steps: the fewest of any site in the last round.
        most_steps: the most.
        steps_per_s: local steps of all sites in a second.
        up_bytes: bytes of all sites in a round.
        down_bytes: the same, down.
        staleness: server's steps between the model that an update began with and the one that it
            changed, on the mean; 0 where rounds are common.
    """

    method: str
    rounds: int
    seconds: float
    round_s: float
    round_p95_s: float
    compute_share: float
    transfer_share: float
    idle_share: float
    steps_per_site: float
    least_steps: int
    most_steps: int
    steps_per_s: float
    up_bytes: int
    down_bytes: int
    staleness: float = 0.0


class Tally:
    """Sums over common rounds."""

    def __init__(self) -> None:
        """Nothing is counted."""
        self._lengths: list[float] = []
        self._compute_s = self._transfer_s = self._all_s = 0.0
        self._steps = 0
        self._last: Counts = np.zeros(1, np.int64)

    def add(self, length_s: float, compute_s: Doubles, transfer_s: Doubles, steps: Counts) -> None:
        """Counts a round: how long it was, and what each site did in it."""
        self._lengths.append(length_s)
        self._compute_s += float(compute_s.sum())
        self._transfer_s += float(transfer_s.sum())
        self._all_s += length_s * len(steps)
        self._steps += int(steps.sum())
        self._last = steps

    def result(self, method: str, up_bytes: int, down_bytes: int) -> Result:
        """All of it; bytes are those of one site in a round."""
        lengths: Sequence[float] = self._lengths
        seconds = sum(lengths)
        sites = len(self._last)
        compute, transfer = self._compute_s / self._all_s, self._transfer_s / self._all_s
        return Result(
            method,
            len(lengths),
            seconds,
            seconds / len(lengths),
            float(np.quantile(lengths, 0.95)),
            compute,
            transfer,
            max(0.0, 1 - compute - transfer),
            self._steps / (len(lengths) * sites),
            int(self._last.min()),
            int(self._last.max()),
            self._steps / seconds,
            up_bytes * sites,
            down_bytes * sites,
        )
