# SPDX-License-Identifier: Apache-2.0
"""The ballots of one round: who has said what, whom to ask for packets, and whose were true.

    digest of each child --> more than half of a group --> one of those is asked for its packets
                                                           packets that are not of the digest it
                                                           has sent: proven, and the next is asked

Children that send their packets at once have said the digest of these, and are asked by nobody.

Plain values: no lock, no clock, no file. `voted` tells it what comes.

Invariants:
- A group is settled once: it has the packets of a child, or it is dropped.
- What wins does not depend on who is asked, or on the order of what comes: two digests cannot both
  have more than half of a group, and packets are those of their digest.
"""

import collections
import dataclasses
import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence

from tf_hips.ps.transport.wire import Buffer
from tf_hips.robust.detox import Vote

DIGEST_BYTES = 32
# What a child says that has refused its own update; SHA-256 of nothing that is known.
REFUSED = bytes(DIGEST_BYTES)
_LENGTH = struct.Struct("<Q")


def digest_of(packets: Iterable[Buffer]) -> bytes:
    """SHA-256 over the packets of a round in the order of their chunks, each after its length."""
    found = hashlib.sha256()
    for packet in packets:
        view = memoryview(packet).cast("B")
        found.update(_LENGTH.pack(len(view)))
        found.update(view)
    return found.digest()


@dataclasses.dataclass
class Group:
    """One group of a round.

    Attributes:
        members: its children.
        asked: those who were asked for their packets, in order.
        winner: whose packets are the group's; None: nobody's, so far.
        is_dropped: whether it has none for good.
        why: why it has none.
        near: of a tolerant vote those whose rows are alike; digests say nothing of that.
        is_compared: whether these have been looked for.
    """

    members: tuple[int, ...]
    asked: list[int] = dataclasses.field(default_factory=list)
    winner: int | None = None
    is_dropped: bool = False
    why: str = ""
    near: tuple[int, ...] = ()
    is_compared: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing is open any more."""
        return self.is_dropped or self.winner is not None

    def drop(self, why: str) -> None:
        """It takes no part in the round."""
        if not self.is_settled:
            self.is_dropped, self.why = True, why


class Ballots:
    """What the children of one round have said."""

    def __init__(self, groups: Sequence[tuple[int, ...]], *, closes: bool = True) -> None:
        """Nobody has said anything.

        Args:
            groups: who sits with whom.
            closes: whether the last ballot closes the round; else `close` does.
        """
        self._closes = closes
        self.groups = [Group(tuple(members)) for members in groups]
        self.said: dict[int, bytes] = {}
        self.proven: set[int] = set()
        self.is_closed = False  # who has said nothing says nothing more
        self._group_of = {child: one for one in self.groups for child in one.members}

    @property
    def num_children(self) -> int:
        """How many could say something."""
        return len(self._group_of)

    @property
    def is_settled(self) -> bool:
        """Whether all groups are, and nobody more will say anything."""
        return self.is_closed and all(one.is_settled for one in self.groups)

    def group_of(self, child: int) -> Group:
        """The group that a child sits in."""
        return self._group_of[child]

    def say(self, child: int, digest: bytes) -> bool:
        """Takes a ballot; whether it is new. The first one counts."""
        if child in self.said or self.is_closed:
            return False
        self.said[child] = digest
        if self._closes and len(self.said) == self.num_children:
            self.is_closed = True
        return True

    def close(self) -> None:
        """Who has not said anything is absent."""
        self.is_closed = True

    def agreed(self, group: Group) -> list[int]:
        """Those of a group who say what more than half of it says; nobody: nothing has won yet."""
        if group.near:
            return list(group.near)
        counts = collections.Counter(
            self.said[child] for child in group.members if child in self.said
        )
        for digest, count in counts.items():
            if 2 * count > len(group.members):
                return [child for child in group.members if self.said.get(child) == digest]
        return []

    def is_complete(self, group: Group) -> bool:
        """Whether nobody of a group says anything more that is not settled."""
        is_whole = self.is_closed or all(child in self.said for child in group.members)
        return is_whole and not group.is_settled

    def look(self, group: Group) -> None:
        """Drops a group in which nothing can win any more."""
        if group.is_settled:
            return
        agreed = self.agreed(group)
        if agreed and self.said[agreed[0]] == REFUSED:
            group.drop("most of it have refused their own updates")
            return
        if agreed and (set(agreed) - self.proven):
            return
        silent = [child for child in group.members if child not in self.said]
        if silent and not self.is_closed:
            return  # they may say it, too
        group.drop("no majority" if not agreed else "all who agreed have sent something else")

    def next_to_ask(self, group: Group, passed_over: Mapping[int, int]) -> int | None:
        """Who of a group is asked next; None: it is settled, open, or all were asked.

        Args:
            group: which.
            passed_over: the last round in which a child was asked in vain, by child; who was not,
                or longer ago, is asked before others.
        """
        if group.is_settled:
            return None
        left = [
            child
            for child in self.agreed(group)
            if child not in self.proven and child not in group.asked
        ]
        return min(left, key=lambda child: passed_over.get(child, -1), default=None)

    def deliver(self, child: int, digest: bytes) -> bool:
        """All packets of a child have come; whether its group has its packets now.

        Args:
            child: whose they are.
            digest: what they are.
        """
        group = self._group_of[child]
        if digest == REFUSED:
            self.look(group)
            return False
        if digest != self.said.get(child):
            self.proven.add(child)
            self.look(group)
            return False
        if group.is_settled or child not in self.agreed(group):
            return False
        group.winner = child
        return True

    def vote(self, group: Group) -> Vote:
        """How a group has voted, as `tf_hips.robust.detox` says it."""
        proven = tuple(child for child in group.members if child in self.proven)
        absent = tuple(child for child in group.members if child not in self.said)
        agreed = [child for child in self.agreed(group) if child not in self.proven]
        if group.winner is None:
            return Vote(group.members, (), (), absent, proven)
        rest = [child for child in agreed if child != group.winner]
        others = tuple(
            child
            for child in group.members
            if child not in agreed and child not in absent and child not in proven
        )
        return Vote(group.members, (group.winner, *rest), others, absent, proven)

    def behind(self, child: int) -> tuple[int, ...]:
        """Those who have agreed on the packets of `child`; nobody: its group has not taken them."""
        group = self._group_of[child]
        return self.vote(group).agreed if group.winner == child else ()

    def winners(self) -> dict[int, int]:
        """By number of the group, whose packets it has; without those that are dropped."""
        return {
            number: one.winner for number, one in enumerate(self.groups) if one.winner is not None
        }

    def settle(
        self, winners: Mapping[int, int], dropped: Collection[int], *, are_alike: bool
    ) -> None:
        """Makes the outcome what it was; for a server that is restored.

        Args:
            winners: by number of the group, whose packets it had.
            dropped: the groups that had none.
            are_alike: whether packets of those who agree are equal, so that it may have another's.
        """
        self.is_closed = True
        for number, group in enumerate(self.groups):
            if number in dropped:
                group.winner, group.is_dropped = None, True
            elif number in winners and not (are_alike and group.winner is not None):
                group.winner, group.is_dropped = winners[number], False
