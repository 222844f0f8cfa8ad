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

    What is counted begins with the first step of the server and ends with the last.
    """
    count = len(sites)
    each = np.full(count, steps, np.int64)
    begin = sites.got(0.0).tolist()
    ends = (np.array(begin) + sites.lasting(each)).tolist()
    pulled = [0] * count
    events = [(ends[site], 0, site) for site in range(count)]
    heapq.heapify(events)
    versions: list[float] = []
    stale = updates = 0
    compute_s, first = 0.0, 0.0
    while len(versions) < rounds:
        now, kind, site = heapq.heappop(events)
        if kind == 0:
            heapq.heappush(events, (sites.arrives(site, now), 1, site))
            continue
        updates += 1
        if versions:
            stale += len(versions) - pulled[site]
            compute_s += max(0.0, ends[site] - max(begin[site], first))
        if updates % k == 0:
            versions.append(now)
            first = versions[0]
        pulled[site] = len(versions)
        begin[site] = sites.gets(site, now)
        ends[site] = begin[site] + sites.lasts(site, steps)
        heapq.heappush(events, (ends[site], 0, site))
    last = versions[-1]
    seconds = last - first
    for _, _, site in events:  # who is at work when it ends, or whose packets are on their way
        compute_s += max(0.0, min(ends[site], last) - max(begin[site], first))
    counted = (rounds - 1) * k
    compute_share = compute_s / (count * seconds)
    lengths = np.diff(np.array(versions))
    return Result(
        label,
        rounds - 1,
        seconds,
        seconds / (rounds - 1),
        float(np.quantile(lengths, 0.95)),
        compute_share,
        max(0.0, 1 - compute_share),
        0.0,
        counted * steps / ((rounds - 1) * count),
        steps,
        steps,
        counted * steps / seconds,
        sites.up_bytes * k,
        sites.down_bytes * k,
        stale / counted,
    )
