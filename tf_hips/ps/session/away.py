# SPDX-License-Identifier: Apache-2.0
"""Why processes of children have ended in whose place others may come, and who hears of it.

Such a child has not left, so the run goes on and waits for it. The others hear at once whom they
wait for, why and for how long; when nobody has come, the reason is that of the end.

Part of a session, and under its lock.
"""

import collections

from tf_hips import log
from tf_hips.ps.session.members import Members
from tf_hips.ps.transport.news import Notice

_MOST_WAITING = 8  # notices for a child whose connection is away
_MOST_TOLD = 128  # notices about a child that ends and comes back without end
_REASON_CHARACTERS = 1000


class Away:
    """What one session knows of children whose processes have ended."""

    def __init__(self, members: Members) -> None:
        """Nobody has ended.

        Args:
            members: the children.
        """
        self._members = members
        self._noted: dict[int, tuple[str, str]] = {}  # of a child: which process, and why
        self._notices: dict[int, collections.deque[str]] = {}
        self._num_told: collections.Counter[int] = collections.Counter()

    def note(self, child: int, reason: str) -> bool:
        """The process of a child ends, and says why; whether that is news that may be written."""
        process = self._members.children[child].process
        if self._noted.get(child, ("", ""))[0] == process:
            return False
        reason = log.printable(reason[:_REASON_CHARACTERS]).rstrip(" .:")
        self._noted[child] = process, reason
        terms = self._members.terms
        another = f"one has {terms.lost_after_s:g} s to take its place (`--lost-after`)."
        if terms.quorum is not None:  # others may go on before, and it may come later
            another = "one may take its place."
        return self._tell_others(
            child,
            f"The process of site `{self._members.site(child)}` has ended with {reason}. Another "
            f"{another}",
        )

    def reason(self, child: int) -> str | None:
        """Why the process of a child has ended; None: it has said nothing, or another one came."""
        process, reason = self._noted.get(child, ("", ""))
        return reason if process == self._members.children[child].process else None

    def look(self, child: int) -> None:
        """A process of a child calls; where that is another one, the others hear of it."""
        if child in self._noted and self.reason(child) is None:
            del self._noted[child]
            site = self._members.site(child)
            self._tell_others(child, f"Site `{site}` is there again, as another process.")

    def tell(self, child: int, text: str) -> None:
        """Gives a child a notice, which its `Watch` takes."""
        waiting = self._notices.setdefault(child, collections.deque(maxlen=_MOST_WAITING))
        waiting.append(text)

    def has_notice(self, child: int) -> bool:
        """Whether there is something that a child has not been told."""
        return bool(self._notices.get(child))

    def next_notice(self, child: int) -> Notice:
        """The first of these."""
        return Notice(self._notices[child].popleft())

    def _tell_others(self, child: int, text: str) -> bool:
        """Tells it to all others, if that was not too often; whether it was told."""
        self._num_told[child] += 1
        if self._num_told[child] > _MOST_TOLD:
            return False
        if self._members.terms.shard.index == 0:  # all of them know, and one of them tells
            for other, one in self._members.children.items():
                if other != child and not one.has_left:
                    self.tell(other, text)
        return True
