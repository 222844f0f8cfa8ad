# SPDX-License-Identifier: Apache-2.0
"""How many members the robust rules above a loop need: when it ends, and who may stop it.

    a meeting is the last one    when fewer members are left without `ends` than a round needs, so
                                 that nobody is owned by those who never end
    it exchanges nothing         if no more rows than that have come to it
    all stop                     when more members want it than may lie

Servers between have rules and quorums of their own; a child of theirs has a row if anybody below it
has one. Where such a server has rows, and fewer than its rule needs, these are void and it has none
itself, if a robust rule above goes on without; else they end the training, as the topmost one's do.
A liar may say that it is such a server, and must not end more by it than its own part.

All servers of a tree say their rules when they join, and all workers are told all of them. However
many leaves a child says that it has, it has one vote, one row, and one place in a median.

Invariant: all of it is a function of what all members have heard, and of what all have been told
when they joined; so it is the same on all of them.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tf_hips import log
from tf_hips.errors import ToleranceError
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.terms.tree import BETWEEN, merged
from tf_hips.robust.detox import spoilt_groups
from tf_hips.robust.rows import lesser_median
from tf_hips.strategies.agreeing import majority
from tf_hips.strategies.party import PartyStrategy


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
        f = rule.votes.q
        if f is None:
            # The more lie the more groups they spoil.
            spoilt = functools.partial(spoilt_groups, children, r=rule.votes.r)
            f = max(bisect.bisect_right(range(children), borne, key=spoilt) - 1, 0)
        return Need(min(f + 1, children), f)
    could = children if least is None else min(least, children)
    enough = (n for n in range(1, children + 1) if _bears(robust, n, could))
    return Need(next(enough, children), _borne(robust, could))


class Bearing:
    """The rules of all servers above the loops of a tree; the same on all of its workers.

    Attributes:
        children: the parties below each child of the topmost server; where it looks at leaves, each
            of these by itself.
        top: what the topmost server needs.
        most_rows: how many rows there could be in a round of the topmost server.
        may_miss: how many more there could be, without which its quorum may close a round.
        bears_liars: whether any server of the tree has a robust rule.
    """

    def __init__(self, welcome: Welcome) -> None:
        """Looks at what the worker was told when it joined.

        Args:
            welcome: what the worker's server has said.
        """
        self.bears_liars = welcome.bears_liars
        guards = {path: (rule, least) for path, rule, least in welcome.guards}
        text, least = guards.pop("", (None, None))
        self._rule = None if text is None else parse(text)
        looks_at_leaves = self._rule is not None and self._rule.sketch is not None
        self._paths = tuple(
            path.rpartition(BETWEEN)[2] if looks_at_leaves else path for path in welcome.paths
        )
        children_of = self._below({"", *guards})
        self.children = children_of[""]
        count = len(self.children)
        self.top = need_of(self._rule, count, least)
        self.most_rows = count if least is None else least
        self.may_miss = count - self.most_rows
        robust = [
            (path, parse(rule), wanted)
            for path, (rule, wanted) in guards.items()
            # Where the topmost one looks at leaves, no server between has a row.
            if rule is not None and children_of[path]
        ]
        above = {path for path, _, _ in robust}
        robust.sort(key=lambda one: -one[0].count(BETWEEN))  # from below
        self._between = [
            _Between.of(
                rule,
                children_of[path],
                wanted,
                is_borne=self.top.rows > 0 or not above.isdisjoint(_fronts(path)),
            )
            for path, rule, wanted in robust
        ]

    def is_enough(self, has_row: Sequence[bool], *, may_miss: bool = False) -> bool:
        """Whether no server that others cannot go on without has some rows and fewer than it needs.

        Args:
            has_row: of each party.
            may_miss: whether quorums may still close the round without some of them; a rule that
                is content with one row has a result without any.
        """
        rows, is_enough = self._counted(has_row, may_miss)
        top = _Between(self.top, self.children, self.may_miss)
        return is_enough and not top.lacks_rows(rows, may_miss)

    def void(self, has_row: Sequence[bool]) -> frozenset[int]:
        """The parties whose rows are void, as a server between has too few of them.

        Args:
            has_row: of each party.
        """
        rows, _ = self._counted(has_row, may_miss=False)
        return frozenset(place for place, row in enumerate(has_row) if row and not rows[place])

    def _counted(self, has_row: Sequence[bool], may_miss: bool) -> tuple[list[bool], bool]:
        """Which rows are not void, and whether no server between has too few that ends it all."""
        rows, is_enough = list(has_row), True
        for one in self._between:
            if not one.lacks_rows(rows, may_miss):
                continue
            is_enough &= one.is_borne
            for place in itertools.chain(*one.children) if one.is_borne else ():
                rows[place] = False
        return rows, is_enough

    def most(self, votes: Sequence[Any]) -> Any:
        """What more than half say, of the children of each server that are present.

        Args:
            votes: of each party; None: it is absent.

        Returns:
            The vote that the topmost server's children have given; "": there is no such half.
        """
        return merged(self._paths, votes, majority)

    def middle(self, values: Sequence[float | None]) -> float | None:
        """The lesser median of what the children of the topmost server say; None: nobody says any.

        A server says the lesser median of what its own children say.

        Args:
            values: of each party; None: it says none.
        """
        return merged(self._paths, values, lesser_median)

    def stops(self, wants: Sequence[bool]) -> bool:
        """Whether all stop: more than may lie want it.

        Args:
            wants: of each party, whether it wants all to stop.
        """
        borne = {place for one in self._between for child in one.children for place in child}
        count = 0
        for child in self.children:
            is_borne = self.top.rows > 0 or not borne.isdisjoint(child)
            if is_borne and len(child) > 1:
                said: list[bool | None] = [None] * len(wants)
                for place in child:
                    said[place] = wants[place]
                count += self.most(said) is True
            else:
                count += any(wants[place] for place in child)
        return count > self.top.f

    def check_drawn(self, drawn: int) -> None:
        """Looks whether a round has enough rows in which only some children take part.

        Args:
            drawn: how many do, each with all that are below it.

        Raises:
            ToleranceError: the topmost server could have too few.
        """
        # A quorum may close a round without some of those who are drawn.
        rule = None if self._rule is None else self._rule.robust
        if self._rule is not None and rule is not None:
            of = None if self._rule.votes is not None else self.most_rows
            count = max(drawn - self.may_miss, 1)
            try:
                rule.check(count, of=of)
            except ToleranceError as error:
                raise ToleranceError(f"{count} parties in a round at least: {error}") from error

    def _below(self, servers: set[str]) -> dict[str, list[list[int]]]:
        """The parties below each child of some servers, by their paths."""
        found: dict[str, dict[str, list[int]]] = {server: {} for server in servers}
        for place, path in enumerate(self._paths):
            for front in _fronts(path):
                if front in servers:
                    name = path[len(front) + 1 if front else 0 :].partition(BETWEEN)[0]
                    found[front].setdefault(name, []).append(place)
        return {server: list(below.values()) for server, below in found.items()}


def _fronts(path: str) -> Iterator[str]:
    """The paths of all servers above, the topmost one's "" first."""
    yield ""
    for end, character in enumerate(path):
        if character == BETWEEN:
            yield path[:end]


@dataclasses.dataclass(frozen=True)
class _Between:
    """A server with a robust rule.

    Attributes:
        need: what it needs.
        children: the parties below each of its children.
        may_miss: how many children its quorum may go on without.
        is_borne: whether a robust rule above it goes on without its row.
    """

    need: Need
    children: Sequence[Sequence[int]]
    may_miss: int
    is_borne: bool = False

    @classmethod
    def of(
        cls, rule: UpdateRule, children: list[list[int]], least: int | None, *, is_borne: bool
    ) -> "_Between":
        """A server between, whose quorum waits for `least`; None: for all."""
        missing = 0 if least is None else max(len(children) - least, 0)
        return cls(need_of(rule, len(children), least), children, missing, is_borne)

    def lacks_rows(self, has_row: Sequence[bool], may_miss: bool) -> bool:
        """Whether it has some rows and yet fewer than it needs; arguments as of `is_enough`."""
        rows = sum(any(has_row[place] for place in child) for child in self.children)
        return 0 < rows < self.need.rows + self.may_miss * (may_miss and self.need.rows > 1)


def tell_void(number: int) -> None:
    """Says in the log why a member has no row that has trained."""
    log.warning(
        "Round %d goes on without what was trained here: so many others of this party's server "
        "have ended that its robust rule would bear nobody that lies.",
        number,
    )


def tell_last(number: int, meeting: Any) -> None:
    """Says in the log why a member's training ends that has data left, if nobody has stopped it."""
    bearing = meeting.bearing
    if bearing is None or not bearing.bears_liars or any(one.stops for one in meeting.everyone):
        return
    needed = bearing.top.rows
    log.warning(
        "Training ends with round %d, though there are data left here: so many others have ended "
        "that the robust rule of a server%s would bear nobody that lies.",
        number, f", which needs {needed} rows," if needed else "",
    )  # fmt: skip


def bearing_of(strategy: PartyStrategy) -> Bearing | None:
    """That of a loop's strategy; None: no server above has rounds in which all wait."""
    rule, welcome = strategy.rule, strategy.welcome
    if rule is None or welcome is None or rule.is_asynchronous:
        return None
    return Bearing(welcome)


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
