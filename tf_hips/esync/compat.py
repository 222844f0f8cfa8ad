# SPDX-License-Identifier: Apache-2.0
"""ESync's rule as its paper and its state server have it (Algorithm 2; `views.py`).

Before every local step worker r says k, the steps that it has done in this round, c, the seconds of
the last one, and te, the wall clock at its end. `now` is the state server's wall clock.

    k == 0                                    not ready: at least one step
    s = argmax c                              the slowest, the first of several
    round of s is not t                       not ready: s has not got its model yet
    rest = c_s - (now - te_s)
    r is s, or s is ready, or c_r + e > rest  ready: aggregate
    otherwise                                 not ready: another step

With constant times and one clock: n_i = max(1, floor((c_max - e) / c_i)). The weak points are kept
with the rule: `now - te_s` compares two clocks, e is in seconds, c is the last step alone, and the
time of transfers is in none of them. Invariant: the same requests at the same times get the answers
that the original gives, where it gives one.
"""

import dataclasses
import heapq
import math

MAX_WORKERS = 100_000
MAX_COUNT = 1 << 31


@dataclasses.dataclass
class Record:
    """What is known of a worker; the names are those of the original's status page."""

    rank: int
    k: int = 0
    c: float = 0.0
    te: float = 0.0
    ready: bool = False
    round: int = 1


class StateTable:
    """The records of all workers. Not thread-safe."""

    def __init__(self, num_workers: int = 6, epsilon: float = 0.5) -> None:
        """A table in round 1.

        Args:
            num_workers: number of workers.
            epsilon: seconds by which a step must end before the slowest worker's.

        Raises:
            ValueError: one of them is wrong.
        """
        if not 1 <= num_workers <= MAX_WORKERS:
            raise ValueError(
                f"`num_workers` must be from 1 to {MAX_WORKERS}. Received: {num_workers}"
            )
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"`epsilon` must be seconds >= 0. Received: {epsilon}")
        self.epsilon = epsilon
        self.t = 1
        self.records = [Record(rank) for rank in range(num_workers)]
        # (-c, rank) of every record and of some that have changed since: the slowest of thousands
        # is known without a look at all of them.
        self._slow = [(-0.0, rank) for rank in range(num_workers)]

    def apply(self, r: int, k: int, c: float, te: float, now: float) -> bool:
        """Whether worker `r` is to aggregate now; else it does another step.

        Args:
            r: the worker's rank.
            k: local steps that it has done in this round.
            c: seconds of the last one.
            te: its wall clock when that ended, in seconds.
            now: this side's wall clock, in seconds.

        Raises:
            ValueError: there is no such worker, or a number is out of its range.
        """
        record = self._record(r)
        if not 0 <= k < MAX_COUNT:
            raise ValueError(f"`k` must be a whole number >= 0. Received: {k}")
        if not (0 <= c < math.inf and math.isfinite(te)):
            raise ValueError(f"`c` and `te` must be finite, `c` >= 0. Received: c={c} te={te}")
        record.k, record.te = k, te
        if c != record.c:
            record.c = c
            heapq.heappush(self._slow, (-c, r))
            if len(self._slow) > 4 * len(self.records) + 64:
                self._slow = [(-one.c, one.rank) for one in self.records]
                heapq.heapify(self._slow)
        if k == 0:
            return False
        slowest = self._slowest()
        if slowest.c == 0:
            return False  # nobody has said how long a step takes; the original fails here
        if slowest.round != self.t:
            return False
        rest = slowest.c - now + slowest.te
        if r == slowest.rank or slowest.ready or record.c + self.epsilon > rest:
            record.ready = True
            return True
        return False

    def reset(self, r: int, t: int, te: float) -> None:
        """Worker `r` has got the model of round `t`.

        Args:
            r: the worker's rank.
            t: the round; the first worker of a new one clears what all have done.
            te: its wall clock, in seconds.

        Raises:
            ValueError: there is no such worker, or a number is out of its range.
        """
        record = self._record(r)
        if not 0 <= t < MAX_COUNT or not math.isfinite(te):
            raise ValueError(
                f"`t` must be a whole number >= 0 and `te` finite. Received: t={t} te={te}"
            )
        if t != self.t:
            self.t = t
            for one in self.records:
                one.k, one.ready = 0, False
        record.round, record.te = t, te

    def status(self) -> dict[str, object]:
        """What the original's status page shows."""
        return {
            "num_workers": len(self.records),
            "t": self.t,
            "epsilon": self.epsilon,
            "records": [list(dataclasses.astuple(one)) for one in self.records],
        }

    def _record(self, r: int) -> Record:
        if not 0 <= r < len(self.records):
            raise ValueError(f"`r` must be a rank from 0 to {len(self.records) - 1}. Received: {r}")
        return self.records[r]

    def _slowest(self) -> Record:
        while True:
            c, rank = self._slow[0]
            record = self.records[rank]
            if record.c == -c:
                return record
            heapq.heappop(self._slow)
