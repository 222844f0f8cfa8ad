# SPDX-License-Identifier: Apache-2.0
"""The sites of a simulation, drawn once, and the links between them and the server.

A step of a site lasts its own mean times a draw from the gamma distribution of mean 1 and the
group's jitter. So n steps are one draw, exactly, and where an early stop asks for the single steps
of a known sum, their shares of it are independent of the sum.

A transfer takes its bytes at the site's rate. The server's links are shared: what goes up is taken
in the order in which it is ready, what goes down to all at once arrives when the server's link has
carried all of it, or the site's own link has carried the site's.
"""

import numpy as np
import numpy.typing as npt

from tf_hips.ops.native import Doubles
from tf_hips.ps.transport.wire import HEADER
from tf_hips.simulation.description import Description

Counts = npt.NDArray[np.int64]

_BYTES_PER_MBIT = 1e6 / 8
_LEAST_JITTER = 1e-4  # less is none: the parameters of its distribution would overflow
_MOST_SINGLE_STEPS = 1000  # of more steps, all count as equally long where they are cut


class Sites:
    """All sites of a description, in its order, and what they have of randomness."""

    def __init__(self, description: Description, method: int) -> None:
        """Draws the sites.

        Args:
            description: says what from.
            method: number of the method; sites are the same for all, steps are not.
        """
        groups = description.groups
        counts = [group.count for group in groups]
        drawn = np.random.default_rng([description.seed, 0])
        spread = _each(counts, [group.spread for group in groups])
        step_s = _each(counts, [group.step_s for group in groups])
        self.step_s: Doubles = step_s * np.exp(spread * drawn.standard_normal(len(step_s)))
        clock_s = _each(counts, [group.clock_s for group in groups])
        self.clock_s: Doubles = clock_s * drawn.uniform(-1, 1, len(step_s))
        self.latency_s: Doubles = _each(counts, [group.latency_ms / 1e3 for group in groups])
        jitter = _each(counts, [group.jitter for group in groups])
        self._overhead_s = _each(counts, [group.overhead_ms / 1e3 for group in groups])
        self._jitter = np.where(jitter < _LEAST_JITTER, 0.0, jitter)
        self._random = np.random.default_rng([description.seed, 1, method])
        frames = HEADER.size * description.model.num_chunks()
        up, down = description.model.packets()
        self.up_bytes, self.down_bytes = up + frames, down + frames
        self._up_s = self.up_bytes / _each(counts, [_rate(group.up_mbps) for group in groups])
        self._down_s = self.down_bytes / _each(counts, [_rate(group.down_mbps) for group in groups])
        self._server_up_s = self.up_bytes / _rate(description.server.down_mbps)
        self._server_down_s = self.down_bytes / _rate(description.server.up_mbps)
        self._up_free = self._down_free = 0.0

    def __len__(self) -> int:
        """How many there are."""
        return len(self.step_s)

    def lasting(self, steps: Counts) -> Doubles:
        """Seconds of so many steps of each site."""
        shape = steps / np.maximum(self._jitter, _LEAST_JITTER) ** 2
        drawn = np.where(
            self._jitter > 0,
            self._random.gamma(shape) * np.maximum(self._jitter, _LEAST_JITTER) ** 2,
            steps,
        )
        return self.step_s * drawn

    def lasts(self, site: int, steps: int = 1) -> float:
        """The same of one site."""
        jitter = self._jitter[site]
        drawn = self._random.gamma(steps / jitter**2) * jitter**2 if jitter > 0 else steps
        return float(self.step_s[site] * max(drawn, 1e-12))

    def stopped(self, site: int, steps: int, total_s: float, after_s: float) -> tuple[int, float]:
        """What becomes of steps that are cut: the one in progress after `after_s` is the last.

        Args:
            site: the site.
            steps: how many it would take.
            total_s: how long these would last.
            after_s: seconds from the first step's begin at which it is told.

        Returns:
            Steps that it takes, and how long these last.
        """
        jitter = self._jitter[site]
        if jitter > 0 and steps <= _MOST_SINGLE_STEPS:
            shares = np.maximum(self._random.gamma(1 / jitter**2, size=steps), 1e-300)
        else:
            shares = np.ones(steps)
        ends = np.cumsum(shares) * (total_s / shares.sum())
        done = min(int(np.searchsorted(ends, max(after_s, 0.0))), steps - 1) + 1
        return done, float(ends[done - 1])

    def got(self, now: float) -> Doubles:
        """When each site has what the server sends to all of them at `now`."""
        shared_s = len(self) * self._server_down_s
        received: Doubles = now + np.maximum(self._down_s, shared_s) + self.latency_s
        received += self._overhead_s
        return received

    def arrived(self, ready: Doubles) -> Doubles:
        """When the server has what each site sends at its time of `ready`."""
        order = np.argsort(ready, kind="stable")
        places = np.arange(len(order))
        # The link is never idle while something waits: F_i = max(F_(i-1), ready_i) + seconds.
        begins = np.maximum.accumulate(ready[order] - places * self._server_up_s)
        through = np.empty(len(order))
        through[order] = begins + (places + 1) * self._server_up_s
        there: Doubles = np.maximum(through, ready + self._up_s) + self.latency_s
        return there

    def arrives(self, site: int, ready: float) -> float:
        """The same of one site; asked for in the order of `ready`."""
        self._up_free = max(self._up_free, ready) + self._server_up_s
        return float(max(self._up_free, ready + self._up_s[site]) + self.latency_s[site])

    def gets(self, site: int, now: float) -> float:
        """When one site has what the server sends to it alone; asked for in the order of `now`."""
        self._down_free = max(self._down_free, now) + self._server_down_s
        there = max(self._down_free, now + self._down_s[site]) + self.latency_s[site]
        return float(there + self._overhead_s[site])


def _each(counts: list[int], values: list[float]) -> Doubles:
    return np.repeat(np.array(values, np.float64), counts)


def _rate(mbps: float | None) -> float:
    return np.inf if mbps is None else mbps * _BYTES_PER_MBIT
