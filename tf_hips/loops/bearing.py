# SPDX-License-Identifier: Apache-2.0
"""How many members the robust rules above a loop need: when it ends, and who may stop it.

    a meeting is the last one    when fewer members are left without `ends` than a round needs, so
                                 that nobody is owned by those who never end
    it exchanges nothing         if no more rows than that have come to it
    all stop                     when more members want it than may lie

A member's own server may have a rule of its own, which others do not know: so members say how many
rows it needs, and of the members of one server the lesser median counts.

Invariant: all of it is a function of what all members have heard, and of what all have been told
when they joined; so it is the same on all of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tf_hips import log
from tf_hips.errors import ToleranceError
from tf_hips.ps import quorum as quorums
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.tree import BETWEEN
from tf_hips.robust.detox import spoilt_groups


@dataclasses.dataclass(frozen=True)
class Need:
    """What one server's rule needs of its children.

    Attributes:
        rows: how many of them a round needs; 0: the rule bears no liars, and takes what there is.
        f: how many of them may lie.
    """

    rows: int = 0
    f: int = 0


def need_of(rule: UpdateRule | None, children: int, least: int | None = None) -> Need:
    """What a synchronous rule needs.

    Args:
        rule: of a server; None: it has none.
        children: of the server, or leaves, where it looks at these.
        least: children that its quorum waits for; None: there is no quorum.
    """
    robust = None if rule is None else rule.robust
    if rule is None or robust is None:
        return Need()
    if rule.votes is not None:
        # Who has no data left votes for zeros, and so do its group's others: rows are no measure.
        groups = rule.votes.num_groups(children)
        then = rule.votes.with_rule(robust).aggregator(children, groups)
        borne = _borne(then, groups)
        liars = [q for q in range(children) if spoilt_groups(children, q, rule.votes.r) <= borne]
        f = rule.votes.q if rule.votes.q is not None else max(liars, default=0)
        return Need(min(f + 1, children), f)
    could = children if least is None else least
    enough = (n for n in range(1, children + 1) if _bears(robust, n, could))
    return Need(next(enough, children), _borne(robust, could))


class Bearing:
    """The rules of the servers above one worker's loop, as far as it knows them.

    Attributes:
        top: what the topmost server needs.
        needs: children with data that a server between needs, if this worker's own is one.
        most_rows: how many rows there could be in a round of the topmost server.
        may_miss: how many more there could be, without which its quorum may close a round.
        bears_liars: whether the topmost server or this worker's own has a robust rule.
    """

    def __init__(self, rule: UpdateRule, welcome: Any) -> None:
        """Looks at what the worker was told when it joined.

        Args:
            rule: of the topmost server, a synchronous one.
            welcome: what the worker's server has said.
        """
        self._names = tuple(welcome.parties)
        self._looks_at_leaves = rule.sketch is not None
        self._own = None if welcome.robust is None else parse(welcome.robust)
        parent = _parent(self._names[welcome.child])
        siblings = sum(_parent(one) == parent for one in self._names)
        # Of a server between, its quorum is known here, and not that of the one above.
        least = None if welcome.quorum is None else quorums.least_of(welcome.quorum)
        of_top = len(self._names) if self._looks_at_leaves else len(self._children())
        self.top = need_of(rule, of_top, None if parent else least)
        self.most_rows = of_top if parent or least is None else least
        self.may_miss = of_top - self.most_rows
        own = need_of(self._own, siblings, least)
        late = 0 if least is None else siblings - least
        self.needs = own.rows + late * (own.rows > 1) if parent else 0
        self.bears_liars = rule.is_robust or self._own is not None

    def is_enough(
        self, has_row: Sequence[bool], needs: Sequence[int | None], may_miss: int = 0
    ) -> bool:
        """Whether no server has some rows and yet fewer than it needs.

        Args:
            has_row: of each party.
            needs: what a worker of each party says of its own server; None: it is absent.
            may_miss: how many of the rows the topmost server may still go on without; a rule that
                is content with one has a result without any.
        """
        for server, members in self._by(_parent).items():
            if server and 0 < sum(has_row[one] for one in members) < self._said(members, needs):
                return False
        rows = sum(any(has_row[one] for one in members) for members in self._children())
        if self._looks_at_leaves:
            rows = sum(has_row)
        return not 0 < rows < self.top.rows + may_miss * (self.top.rows > 1)

    def stops(self, wants: Sequence[bool], needs: Sequence[int | None]) -> bool:
        """Whether all stop: more than may lie want it.

        Args:
            wants: of each party, whether it wants all to stop.
            needs: as for `is_enough`.
        """
        if self._looks_at_leaves:
            return sum(wants) > self.top.f
        count = 0
        for members in self._children():
            said = sum(wants[one] for one in members)
            is_borne = self.top.rows > 0 or self._said(members, needs) > 0
            count += 2 * said > len(members) if is_borne else said > 0
        return count > self.top.f

    def _said(self, members: Sequence[int], needs: Sequence[int | None]) -> int:
        """What the members of one server say of it together."""
        known = sorted(one for place in members if (one := needs[place]) is not None)
        return known[(len(known) - 1) // 2] if known else 0

    def _children(self) -> list[list[int]]:
        """The parties below each child of the topmost server."""
        return list(self._by(lambda name: name.partition(BETWEEN)[0]).values())

    def _by(self, key: Callable[[str], str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place, name in enumerate(self._names):
            found.setdefault(key(name), []).append(place)
        return found


def tell_last(number: int, meeting: Any) -> None:
    """Says in the log why a member's training ends that has data left, if nobody has stopped it."""
    if meeting.bearing is None or any(one.stops for one in meeting.everyone):
        return
    needed = meeting.bearing.top.rows
    log.warning(
        "Training ends with round %d, though there are data left here: so many others have ended "
        "that the robust rule of a server%s would bear nobody that lies.",
        number, f", which needs {needed} rows," if needed else "",
    )  # fmt: skip


def _parent(name: str) -> str:
    """The path of the server that a leaf is a child of; "": the topmost one."""
    return name.rpartition(BETWEEN)[0]


def bearing_of(strategy: Any) -> Bearing | None:
    """That of a loop's strategy; None: no server above has rounds in which all wait."""
    rule = strategy._rule if strategy._has_server() else None
    if rule is None or rule.is_asynchronous:
        return None
    return Bearing(rule, strategy._welcome)


def _bears(robust: Any, n: int, could: int) -> bool:
    try:
        robust.check(n, of=could)
    except ToleranceError:
        return False
    return True


def _borne(robust: Any, n: int) -> int:
    try:
        return robust.bears(n) or 0
    except ToleranceError:
        return 0  # the server has said why
