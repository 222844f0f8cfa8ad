# SPDX-License-Identifier: Apache-2.0
"""Whether a run is below its quorum: fewer children are there than that, and for how long.

A child that is lost is not there. Nor is one that says that it has no row, where a round waits for
children that are lost for want of it.
"""

import threading
from collections.abc import Callable, Iterable

from tf_hips import log
from tf_hips.log import Tell
from tf_hips.ps.session.members import Members
from tf_hips.ps.terms.quorum import Clock, Quorum

# What the reason of a run begins with that has ended below its quorum.
_BELOW = "Below quorum"


class Below:
    """Ends one run when too few have been there for too long. The session's lock guards it.

    Attributes:
        has_ended: whether the run has ended so.
        without_row: for want of whose rows a round waits for lost children.
        why_lost: why others go on without a child, by child.
    """

    def __init__(
        self,
        quorum: Quorum,
        members: Members,
        changed: threading.Condition,
        clock: Clock,
        end: Callable[[str], None],
        is_over: Callable[[], bool],
        tell: Tell,
    ) -> None:
        """All are there.

        Args:
            quorum: what the server was told.
            members: the children.
            changed: the session's lock.
            clock: tells when the time is over.
            end: ends the run for a reason; called with the lock held.
            is_over: whether the run has ended.
            tell: writes an event: its name, and fields.
        """
        self.has_ended = False
        self.without_row: list[int] = []
        self.why_lost: dict[int, str] = {}
        self._quorum = quorum
        self._members = members
        self._changed = changed
        self._clock = clock
        self._end = end
        self._is_over = is_over
        self._tell = tell
        self._cancel: Callable[[], None] | None = None

    def look(self) -> None:
        """Begins to wait for more, or need not any longer."""
        if self._is_enough or not self._members.is_started or self._is_over():
            self.stop()
        elif self._cancel is None:
            there = self._members.living - set(self.without_row)
            self._tell("below_quorum", sites=[self._members.site(child) for child in sorted(there)])
            log.warning(
                "Below quorum: %d of %d sites are there, %d are needed. The run ends in %g s",
                self._num_there,
                len(self._members.terms.parties),
                self._quorum.least,
                self._quorum.below_s,
            )
            self._cancel = self._clock.after(self._quorum.below_s, self._give_up)

    def stop(self) -> None:
        """Nobody is waited for."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def ended_elsewhere(self, reason: str) -> None:
        """The run has ended at another server of it."""
        self.has_ended = reason.startswith(_BELOW)

    @property
    def _num_there(self) -> int:
        members = self._members
        return len(members.children) - len(set(members.lost) | set(self.without_row))

    @property
    def _is_enough(self) -> bool:
        return self._num_there >= self._quorum.least

    def _give_up(self) -> None:
        with self._changed:
            if self._is_enough or self._is_over():
                return
            self.has_ended = True
            self._end(
                f"{_BELOW} for {self._quorum.below_s:g} s: {self._num_there} of "
                f"{len(self._members.terms.parties)} sites are there, {self._quorum.least} are "
                f"needed. {' '.join(self._reasons())}"
            )

    def _reasons(self) -> Iterable[str]:
        for child in self._members.lost:
            site = self._members.site(child)
            yield self.why_lost.get(child, f"Site `{site}` was lost.")
        for child in set(self.without_row) - set(self._members.lost):
            yield f"Site `{self._members.site(child)}` says that it has no row (weight 0)."
