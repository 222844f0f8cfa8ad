# SPDX-License-Identifier: Apache-2.0
"""Chains of tasks on the cores and the link of one rank: when the last of them is done.

Each of the two runs one task at a time, first come, first served: Horovod's collectives are run one
by one, by one thread, and tasks that share cores take as long one after another as side by side.
Both run at once; so does a backward pass. While together they ask for more than the cores are,
everything that needs them runs proportionally slower.

Arithmetic only: the same input gives the same seconds everywhere.
"""

import dataclasses
import heapq
from collections import deque
from collections.abc import Sequence

_EPSILON = 1e-12  # seconds


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing that a chain waits for.

    Attributes:
        is_link: whether it needs the link, else the cores.
        seconds: that it keeps them busy, if it has the cores that it needs.
        cpu: share of this rank's cores that it needs meanwhile.
        delay: seconds before it, in which it needs neither.
    """

    is_link: bool
    seconds: float
    cpu: float = 1.0
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Chain:
    """Tasks that follow each other.

    Attributes:
        tasks: in order.
        ready: seconds of the backward pass after which they may begin.
        after: places of chains that must have ended before.
    """

    tasks: tuple[Task, ...]
    ready: float = 0.0
    after: tuple[int, ...] = ()


def simulate(chains: Sequence[Chain], backward_s: float = 0.0, on_cores: bool = False) -> float:
    """Runs all chains.

    Args:
        chains: a chain's `after` are places of earlier ones.
        backward_s: seconds of the backward pass, if nothing else ran.
        on_cores: whether the backward pass takes the cores, too.

    Returns:
        Seconds until everything is done, the backward pass included.
    """
    return _Run(chains, backward_s, on_cores).seconds()


class _Run:
    """One simulation: what is queued, what is left of what runs, and the clock."""

    def __init__(self, chains: Sequence[Chain], backward_s: float, on_cores: bool) -> None:
        self._rest = [deque(chain.tasks) for chain in chains]
        self._missing = [len(chain.after) for chain in chains]
        self._followers: list[list[int]] = [[] for _ in chains]
        for place, chain in enumerate(chains):
            for one in chain.after:
                self._followers[one].append(place)
        self._ready = [chain.ready for chain in chains]
        free = [place for place, chain in enumerate(chains) if not chain.after]
        self._arrivals = deque(sorted(free, key=lambda place: chains[place].ready))
        self._queues: tuple[deque[tuple[int, Task]], deque[tuple[int, Task]]] = deque(), deque()
        self._left = [0.0, 0.0]  # seconds of what runs on the cores and on the link
        self._waiting: list[tuple[float, int]] = []  # until when the delay of a chain lasts
        self._now = 0.0
        self._done = 0.0  # of the backward pass
        self._backward_s = backward_s
        self._on_cores = on_cores

    def seconds(self) -> float:
        while True:
            self._begin()
            running = [place for place in (0, 1) if self._queues[place]]
            is_backward = self._done < self._backward_s - _EPSILON
            if not running and not self._waiting and not is_backward:
                return self._now
            self._advance(running, is_backward)

    def _begin(self) -> None:
        """Lets chains begin whose time has come."""
        while self._arrivals and self._ready[self._arrivals[0]] <= self._done + _EPSILON:
            self._follow(self._arrivals.popleft())
        while self._waiting and self._waiting[0][0] <= self._now + _EPSILON:
            _, chain = heapq.heappop(self._waiting)
            task = self._rest[chain].popleft()
            queue = self._queues[task.is_link]
            if not queue:
                self._left[task.is_link] = task.seconds
            queue.append((chain, task))

    def _follow(self, chain: int) -> None:
        """Goes on with the next task of a chain, or with what waits for its end."""
        if self._rest[chain]:
            heapq.heappush(self._waiting, (self._now + self._rest[chain][0].delay, chain))
            return
        for follower in self._followers[chain]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._follow(follower)

    def _advance(self, running: list[int], is_backward: bool) -> None:
        """Goes to the next moment at which something ends or begins."""
        asked = sum(self._queues[place][0][1].cpu for place in running)
        asked += 1.0 if is_backward and self._on_cores else 0.0
        slow = 1.0 / max(1.0, asked)
        rates = {place: slow if self._queues[place][0][1].cpu else 1.0 for place in running}
        backward_rate = slow if self._on_cores else 1.0
        spans = [self._left[place] / rates[place] for place in running]
        if self._waiting:
            spans.append(self._waiting[0][0] - self._now)
        if is_backward:
            until = self._ready[self._arrivals[0]] if self._arrivals else self._backward_s
            spans.append((until - self._done) / backward_rate)
        span = max(0.0, min(spans))
        self._now += span
        if is_backward:
            self._done += span * backward_rate
        for place in running:
            self._left[place] -= span * rates[place]
            if self._left[place] <= _EPSILON:
                queue = self._queues[place]
                chain, _ = queue.popleft()
                if queue:
                    self._left[place] = queue[0][1].seconds
                self._follow(chain)
