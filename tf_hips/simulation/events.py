# SPDX-License-Identifier: Apache-2.0
"""Methods whose sites act one by one: ESync with the paper's rule, and FedBuff.

Events come from a heap in the order of time. With the paper's rule an event is a question of a site
to the state server, which costs a journey there and back before every step; with FedBuff it is the
end of a site's steps, or an arrival at the server.
"""

import heapq

import numpy as np

from tf_hips.esync.compat import StateTable
from tf_hips.simulation.results import UNCOUNTED, Result, Tally
from tf_hips.simulation.sites import Sites

# Updates of every site that are counted, after `UNCOUNTED` that are not.
_COUNTED = 10
# Of all sites together before, and again while it is counted: one that is a million times slower
# than the others is not waited for.
_MOST_UPDATES = 2_000_000
_END, _ARRIVAL = 0, 1


def compat(label: str, sites: Sites, epsilon: float, rounds: int) -> Result:
    """ESync as its paper has it: a question before every step; the first three do not count."""
    count = len(sites)
    table = StateTable(count, epsilon)
    tally = Tally()
    latency = sites.latency_s.tolist()
    clock = sites.clock_s.tolist()
    # Before training the original times one forward pass; here it is a step.
    last_s = [sites.lasts(site) for site in range(count)]
    now = 0.0
    for number in range(1, rounds + 1):
        begin = sites.got(now)
        steps, busy = [0] * count, [0.0] * count
        ends = begin.tolist()
        ready = np.zeros(count)
        # Of each site: its model has come, which the state server hears one journey later, and with
        # that its first question.
        events = [(ends[site] + latency[site], site) for site in range(count)]
        heapq.heapify(events)
        is_reset = [False] * count
        while events:
            time_s, site = heapq.heappop(events)
            wall = ends[site] + clock[site]
            if not is_reset[site]:
                table.reset(site, number, wall)
                is_reset[site] = True
            answered = time_s + latency[site]
            if table.apply(site, steps[site], last_s[site], wall, time_s):
                ready[site] = answered
                continue
            lasts_s = sites.lasts(site)
            last_s[site] = lasts_s
            steps[site] += 1
            busy[site] += lasts_s
            ends[site] = answered + lasts_s
            heapq.heappush(events, (ends[site] + latency[site], site))
        arrivals = sites.arrived(ready)
        close = float(arrivals.max())
        if number > UNCOUNTED:
            transfer = (begin - now) + (arrivals - ready)
            tally.add(close - now, np.array(busy), transfer, np.array(steps, np.int64))
        now = close
    return tally.result(label, sites.up_bytes, sites.down_bytes)


def fedbuff(label: str, sites: Sites, steps: int, k: int, rounds: int) -> Result:
    """FedBuff: nobody waits; the server makes a step of every `k` updates.

    All begin at once, so first updates come in bursts, the quick sites' before any of the others,
    and change a model that is hardly older than they. So what is counted begins with a step of the
    server when three updates of every site have come, and ends with one when ten more have, after
    `rounds` steps at least.
    """
    count = len(sites)
    course = _Course(sites, steps, k)
    passes = _Passes(count, UNCOUNTED)
    while not passes.are_over:
        first = course.advance(passes)
    course.count_from(first)
    passes = _Passes(count, _COUNTED)
    times = [first]
    while not passes.are_over or len(times) <= rounds or times[-1] == first:
        times.append(course.advance(passes))
    versions, seconds = len(times) - 1, times[-1] - first
    compute_share = course.busy_s(times[-1]) / (count * seconds)
    return Result(
        label,
        versions,
        seconds,
        seconds / versions,
        float(np.quantile(np.diff(times), 0.95)),
        compute_share,
        max(0.0, 1 - compute_share),
        0.0,
        k * steps / count,
        steps,
        steps,
        versions * k * steps / seconds,
        sites.up_bytes * k,
        sites.down_bytes * k,
        course.stale / (versions * k),
    )


class _Passes:
    """Counts updates until there are some of every site, or very many."""

    def __init__(self, num_sites: int, wanted: int) -> None:
        """There are none; `wanted` are those of a site."""
        self._wanted = [wanted] * num_sites
        self._num_behind = num_sites
        self._most = max(_MOST_UPDATES, wanted * num_sites)

    def add(self, site: int) -> None:
        """Counts an update of `site`."""
        self._most -= 1
        self._wanted[site] -= 1
        self._num_behind -= self._wanted[site] == 0

    @property
    def are_over(self) -> bool:
        """Whether enough was counted."""
        return self._num_behind == 0 or self._most <= 0


class _Course:
    """Sites that make so many steps, send and go on with what they get, each by itself.

    An event is the end of a site's steps, or the arrival of its update.
    """

    def __init__(self, sites: Sites, steps: int, k: int) -> None:
        """All sites begin."""
        count = len(sites)
        self._sites, self._steps, self._k = sites, steps, k
        self._begins: list[float] = sites.got(0.0).tolist()
        lasting = sites.lasting(np.full(count, steps, np.int64))
        self._ends: list[float] = (np.array(self._begins) + lasting).tolist()
        self._events = [(self._ends[site], _END, site) for site in range(count)]
        heapq.heapify(self._events)
        self._version = 0
        self._pulled = [0] * count  # the version that each site has begun with
        self.count_from(0.0)

    def count_from(self, now: float) -> None:
        """Forgets what was counted before `now`, at which the server has made a step."""
        self._since = now
        self._busy_s = 0.0
        self.stale = 0  # the sum over updates

    def busy_s(self, now: float) -> float:
        """Seconds that sites have been in steps, from `count_from` to `now`, the last step."""
        return self._busy_s + sum(self._spent(site, now) for site in range(len(self._sites)))

    def advance(self, passes: _Passes) -> float:
        """Goes on until the server has `k` more updates; returns when.

        Args:
            passes: counts these.
        """
        for missing in reversed(range(self._k)):
            now, site = self._arrival()
            passes.add(site)
            self.stale += self._version - self._pulled[site]
            self._busy_s += self._spent(site, now)
            self._version += missing == 0
            self._pulled[site] = self._version
            self._begins[site] = self._sites.gets(site, now)
            self._ends[site] = self._begins[site] + self._sites.lasts(site, self._steps)
            heapq.heappush(self._events, (self._ends[site], _END, site))
        return now

    def _arrival(self) -> tuple[float, int]:
        """The next update that arrives: when, and of whom."""
        while True:
            now, kind, site = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                return now, site
            heapq.heappush(self._events, (self._sites.arrives(site, now), _ARRIVAL, site))

    def _spent(self, site: int, now: float) -> float:
        """Seconds of a site's present steps that lie between `count_from` and `now`."""
        return max(0.0, min(self._ends[site], now) - max(self._begins[site], self._since))
