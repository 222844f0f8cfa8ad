# SPDX-License-Identifier: Apache-2.0
"""Rounds that all sites begin and end together: sync, fedavg, esync.

    begin --model down--> local steps --packets up--> the last one arrives: the next begins

Where all sites are at the same place, a round is a few operations on arrays. Early stops of `esync`
are two more looks at it: at the deadline, and when all but one have arrived.
"""

from typing import Protocol

import numpy as np

from tf_hips.esync.pacer import Pacer, Report
from tf_hips.esync.rule import Pace
from tf_hips.ops.native import Doubles
from tf_hips.simulation.results import UNCOUNTED, Result, Tally
from tf_hips.simulation.sites import Counts, Sites


class Scheduler(Protocol):
    """Says how many steps sites take."""

    def steps(self) -> Counts:
        """Of each site in the round that begins."""

    def play(self, sites: Sites, begin: Doubles, steps: Counts) -> tuple[Counts, Doubles, Doubles]:
        """From the begin of local steps to arrivals: steps, seconds of them, arrivals."""


class Fixed:
    """The same number of steps at all sites: sync and fedavg."""

    def __init__(self, num_sites: int, steps: int) -> None:
        """So many steps of so many sites."""
        self._steps = np.full(num_sites, steps, np.int64)

    def steps(self) -> Counts:
        """Of each site in the round that begins."""
        return self._steps

    def play(self, sites: Sites, begin: Doubles, steps: Counts) -> tuple[Counts, Doubles, Doubles]:
        """From the begin of local steps to arrivals: steps, seconds of them, arrivals."""
        lasting = sites.lasting(steps)
        return steps, lasting, sites.arrived(begin + lasting)


class Paced:
    """Steps as the server assigns them, with the code of the server."""

    def __init__(self, num_sites: int, pace: Pace) -> None:
        """Nothing is known of the sites."""
        self._pacer = Pacer(pace, num_sites)
        self._steps = np.full(num_sites, pace.first_steps, np.int64)
        self._local_s: Doubles = np.full(num_sites, np.inf)
        self._number = 0

    def steps(self) -> Counts:
        """Of each site in the round that begins."""
        return self._steps

    def play(self, sites: Sites, begin: Doubles, steps: Counts) -> tuple[Counts, Doubles, Doubles]:
        """From the begin of local steps to arrivals: steps, seconds of them, arrivals."""
        number, pacer = self._number, self._pacer
        steps = steps.copy()
        lasting = sites.lasting(steps)
        # A step is begun where half of it ends in time: `Assignment.is_over`.
        _cut(sites, self._local_s - lasting / steps / 2, steps, lasting)
        arrivals = sites.arrived(begin + lasting)
        deadline = pacer.deadline(number)
        if deadline is not None:
            # Half of them have to wait: `Pacer.to_stop`.
            deadline = max(deadline, float(np.sort(arrivals)[(len(arrivals) - 1) // 2]))
        if deadline is not None and arrivals.max() > deadline:
            heard = np.where(arrivals > deadline, deadline + sites.latency_s - begin, np.inf)
            if _cut(sites, heard, steps, lasting):
                arrivals = sites.arrived(begin + lasting)
        order = np.argsort(arrivals, kind="stable")
        for site in order[:-1]:
            self._arrive(pacer, int(site), arrivals, steps, lasting)
        if len(order) > 1:
            told = float(arrivals[order[-2]])
            heard = np.full(len(order), np.inf)
            for site in pacer.to_stop(number, told):
                heard[site] = told + sites.latency_s[site] - begin[site]
            if _cut(sites, heard, steps, lasting):
                arrivals = sites.arrived(begin + lasting)
        self._arrive(pacer, int(order[-1]), arrivals, steps, lasting)
        assigned = [pacer.assignment(site, number) for site in range(len(order))]
        self._steps = np.array([one.steps for one in assigned if one is not None], np.int64)
        self._local_s = np.array([one.local_s for one in assigned if one is not None])
        self._number += 1
        return steps, lasting, arrivals

    def _arrive(
        self, pacer: Pacer, site: int, arrivals: Doubles, steps: Counts, lasting: Doubles
    ) -> None:
        count, busy_s = int(steps[site]), float(lasting[site])
        report = Report(count, max(busy_s / count, 1e-12), busy_s)
        pacer.arrived(site, self._number, float(arrivals[site]), report)


def _cut(sites: Sites, after_s: Doubles, steps: Counts, lasting: Doubles) -> bool:
    """Cuts the steps of sites so many seconds after their first step began; whether any was cut."""
    late = np.flatnonzero(after_s < lasting)
    for site in late:
        steps[site], lasting[site] = sites.stopped(
            int(site), int(steps[site]), float(lasting[site]), float(after_s[site])
        )
    return bool(len(late))


def play(label: str, sites: Sites, scheduler: Scheduler, rounds: int) -> Result:
    """Simulates so many rounds; the first three do not count."""
    tally = Tally()
    now = 0.0
    for number in range(rounds):
        begin = sites.got(now)
        steps, lasting, arrivals = scheduler.play(sites, begin, scheduler.steps())
        close = float(arrivals.max())
        if number >= UNCOUNTED:
            # A difference of large sums, which rounding takes below 0 where links take no time.
            transfer = np.maximum(0.0, (begin - now) + (arrivals - begin - lasting))
            tally.add(close - now, lasting, transfer, steps)
        now = close
    return tally.result(label, sites.up_bytes, sites.down_bytes)
