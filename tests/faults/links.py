# SPDX-License-Identifier: Apache-2.0
"""A link that is cut at 90 % of a transfer: little of what had come travels again.

The relay counts the bytes of all connections, HTTP/2 included. With two children a way down is
travelled by both at once, so there the cut is at 90 % of both transfers together, and what comes
again is still measured against one.
"""

import dataclasses
import math
from pathlib import Path

from tests.faults.job import Failed, Job
from tests.faults.training import Setting, undisturbed

SHARE = 0.9
MOST = 0.15
BULK = Setting("bulk", "fp32", "fp32", shapes=((1 << 24,),), rounds=1)
BELOW = dataclasses.replace(BULK, parties=(("west", BULK.sites),))
_BYTES = 4 * sum(math.prod(shape) for shape in BULK.shapes)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A cut of one way of one transfer, `first` weights or a `round`."""

    transfer: str
    direction: str
    is_uplink: bool = False  # of a party server, which passes on what its two children bring

    @property
    def name(self) -> str:
        """By which command lines know it."""
        where = "uplink" if self.is_uplink else "link"
        return f"{where}/{self.transfer}/{self.direction}"

    def run(self, base: Path) -> str:
        """Runs it; what travelled again, in words."""
        with Job(base, BELOW if self.is_uplink else BULK) as job:
            for server in job.servers.values():
                server.serve()
            is_down = (self.transfer, self.direction) == ("round", "down")
            travellers = 2 if is_down and not self.is_uplink else 1
            expected = travellers * _BYTES
            if self.transfer == "first":
                job.relay.cut_after(self.direction, round(SHARE * expected))
                job.bring_children()
                job.reach(-1)
                # The children of a party's server go on before all has gone up from there.
                _await_journal(job, "top", _BYTES)
                moved = job.relay.moved[self.direction]
            else:
                moved = self._round(job, round(SHARE * expected))
            if job.relay.num_cuts != 1:
                raise Failed(f"the link must have been cut once. Received: {job.relay.num_cuts}")
            job.train(1)
            job.reach(0)
            job.finish()
        again = (moved - expected) / _BYTES
        if not 0.0 <= again <= MOST:
            raise Failed(f"at most {MOST:.0%} may travel again. Received: {again:.1%}")
        return f"{again:.1%} of {_BYTES >> 20} MiB travelled again"

    def _round(self, job: Job, num_bytes: int) -> int:
        """Bytes that moved while one round was cut."""
        job.bring_children()
        job.reach(-1)
        undisturbed(job.setting)  # takes long, and must not lie between the cut and the count
        # The last child's packets are there before the first one's way up is cut.
        job.children[1].tell("1")
        # The first weights are in the journal, too.
        _await_journal(job, "west" if self.is_uplink else "top", 2 * _BYTES)
        before = job.relay.moved[self.direction]
        job.relay.cut_after(self.direction, num_bytes)
        job.children[0].tell("1")
        job.reach(0)
        return job.relay.moved[self.direction] - before


def _await_journal(job: Job, server: str, num_bytes: int) -> None:
    """Waits until the journal of a server holds more than so many bytes."""
    state = job.servers[server].state
    job.eventually(lambda: sum(one.stat().st_size for one in state.glob("*/journal-*")) > num_bytes)


CUTS = (
    *(Cut(transfer, direction) for transfer in ("first", "round") for direction in ("up", "down")),
    *(Cut(*one, is_uplink=True) for one in (("first", "up"), ("round", "up"), ("round", "down"))),
)
