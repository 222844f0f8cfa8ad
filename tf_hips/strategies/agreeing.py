# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all workers, where some parties may lie: most of the parties are right.

Without a robust rule every worker is believed, and one that differs is an error on all: something
was done on one that all had to do. Below a robust rule one liar could end the run so, with one
message. There each child of a server has a vote, however large it says that it is: a party what all
of its workers say, the server of parties what most of its own children say, and so on up the tree:

    most parties agree, this worker too    who differs is named, and the run goes on
    most agree, this worker differs        an error here, and only here
    no majority                            an error on all, as without a rule

A value that not all need know (the number of steps) is another's mistake only where more than half
know another one.

All workers decide by the same bytes, so that they decide alike.
"""

import collections
import dataclasses
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_hips import log
from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.tree import BETWEEN, Branch, branches, merged
from tf_hips.robust.rows import lesser_median

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

Named = list[tuple[str, Any]]
"""Whose values they are, and the values."""

MOST, THIS = "most parties", "this worker"
_UNKNOWN = json.dumps(None)
_NO_MAJORITY = ""
_TOO_LONG = ""  # no JSON, as what it stands for is none of the values that are looked at
# JSON takes up to 30 times its length in memory. What honest parties say differs in few digits, and
# of a number of workers nobody knows whether it is true.
_TIMES, _BYTES_OF_WORKER, _BYTES_OF_CHILD = 16, 4 << 10, 1 << 20


class _Streaks:
    """Which parties do not count, each time that something is compared. Thread-safe.

    A liar may lie each time, or every other time, and nobody's logs and disks may be filled by it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._odd: dict[tuple[str, str], frozenset[str]] = {}  # the last time, by what and why
        self._counts: collections.Counter[tuple[str, str, str]] = collections.Counter()  # streaks

    def told(self, odd: Sequence[str], what: str, why: str) -> list[str]:
        """Those of `odd` to tell of: once in a streak of times, in streaks 1, 2, 4, 8, ..."""
        told = []
        with self._lock:
            before = self._odd.get((what, why), frozenset())
            if odd or before:
                self._odd[what, why] = frozenset(odd)
            for site in odd:
                if site not in before:
                    self._counts[what, why, site] += 1
                    count = self._counts[what, why, site]
                    if count & (count - 1) == 0:
                        told.append(site)
        return told


# By who writes the events: parties are looked up each time, and a process may have several runs.
_streaks: weakref.WeakKeyDictionary[Any, _Streaks] = weakref.WeakKeyDictionary()
_streaks_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Doubted:
    """The parties of a run below a robust rule.

    Attributes:
        paths: where each of them stands, in their order; its name alone where each has a row of its
            own at the topmost server.
        workers: how many each of them has.
        write_event: writes an event of this process.
    """

    paths: tuple[str, ...]
    workers: Sequence[int]
    write_event: Callable[..., None]

    @property
    def sites(self) -> list[str]:
        """The names of the parties."""
        return [path.rpartition(BETWEEN)[2] for path in self.paths]

    def by_party(self, told_by_all: Sequence[Any]) -> list[list[Any]]:
        """What the workers of each party have told; `told_by_all` is by worker."""
        values = iter(told_by_all)
        return [[next(values) for _ in range(count)] for count in self.workers]

    def most(self, votes: Sequence[Any]) -> Any:
        """What more than half say, of the children of each server that are present.

        Args:
            votes: of each party; None: it is absent.

        Returns:
            The vote that the topmost server's children have given; "": there is no such half.
        """
        return merged(self.paths, votes, majority)

    def name(self, odd: Sequence[bool], what: str, why: str) -> None:
        """Says in the log and in an event which parties do not count.

        Called each time, also where all count. A party is named once in a streak of such times, by
        its path, as a liar below a server may have made up its own name; the server of parties
        instead of them where that is all of its parties.

        Args:
            odd: of each party, whether it does not.
            what: was compared, for messages.
            why: they do not count; the same each time that the same thing is looked at.
        """
        sites = self._sites_of(odd)
        writer = getattr(self.write_event, "__self__", self.write_event)
        with _streaks_lock:
            streaks = _streaks.setdefault(writer, _Streaks())
        told = streaks.told(sites, what, why)
        if told:
            self.write_event("parties_differ", what=what, sites=told, reason=why)
        if sites:
            (log.warning if told else log.debug)(
                "Of `%s` what the parties %s have told does not count: %s",
                what,
                ", ".join(told or sites),
                why,
            )

    def _sites_of(self, odd: Sequence[bool]) -> list[str]:
        return list(itertools.chain(*(_odd_sites(one, odd)[1] for one in branches(self.paths))))


def _odd_sites(branch: Branch, odd: Sequence[bool]) -> tuple[bool, list[str]]:
    """Whether all parties of a branch are odd, and which are; all of them are the branch itself."""
    if branch.leaf is not None:
        is_odd = odd[branch.leaf]
        return is_odd, [branch.path] if is_odd else []
    found = [_odd_sites(one, odd) for one in branch.below]
    if all(is_odd for is_odd, _ in found):
        return True, [branch.path]
    return False, list(itertools.chain(*(sites for _, sites in found)))


def doubted(strategy: "PartyStrategy") -> Doubted | None:
    """The parties that keep step with this one below a robust rule; None: all are believed.

    Args:
        strategy: a `PartyStrategy`.
    """
    welcome = strategy._together()
    if welcome is None or not welcome.bears_liars:
        return None
    paths = welcome.parties if welcome.looks_at_leaves else welcome.paths
    return Doubted(paths, welcome.workers, strategy.write_event)


def sound(
    parties: Doubted | None,
    told_by_all: Sequence[Any],
    is_sound: Callable[[Any], bool],
    what: str,
) -> list[Any]:
    """`told_by_all` without what no honest worker says: such a party is taken for absent.

    Args:
        parties: of which some may lie; None: all are believed.
        told_by_all: by worker, None of absent ones.
        is_sound: whether a worker may say such a thing.
        what: it is, for messages.

    Raises:
        ProtocolError: a worker that is believed has told something else.
    """
    if parties is None:
        for worker, one in enumerate(told_by_all):
            if one is not None and not is_sound(one):
                raise ProtocolError(
                    f"Of `{what}` every worker must tell what workers tell. Received: "
                    f"{str(one)[:80]!r} of worker {worker}"
                )
        return list(told_by_all)
    kept: list[Any] = []
    odd = []
    for values in parties.by_party(told_by_all):
        odd.append(not all(one is None or is_sound(one) for one in values))
        kept += [None] * len(values) if odd[-1] else values
    parties.name(odd, what, "it is none of the values that workers tell")
    return kept


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a child of a server brings to what is told: payloads of parties, by number."""

    parties: tuple[int, ...]
    num_bytes: int
    workers: int


def as_texts(payloads: Sequence[bytes | None], parties: Doubted | None) -> list[str | None]:
    """Payloads of all parties as texts; one that is none becomes a text that is no JSON.

    So does one that is far longer than those of others, before anybody reads it as JSON or passes
    it on to the workers of a party.

    Args:
        payloads: of each party; None: it is absent.
        parties: of which some may lie; None: all are believed.
    """
    kept = set(range(len(payloads)))
    if parties is not None:
        shares = [
            None if payload is None else _Share((number,), len(payload), count)
            for number, (payload, count) in enumerate(zip(payloads, parties.workers, strict=True))
        ]
        found = merged(parties.paths, shares, _not_too_long)
        kept = set() if found is None else set(found.parties)
    return [
        None
        if payload is None
        else payload.decode(errors="backslashreplace")
        if number in kept
        else _TOO_LONG
        for number, payload in enumerate(payloads)
    ]


def _not_too_long(children: list[_Share]) -> _Share | None:
    """A server's share: those of its children, but for those that are far longer than others.

    None where each of them is longer than one of the bounds.
    """
    of_child = lesser_median([one.num_bytes for one in children])
    of_worker = lesser_median([one.num_bytes / one.workers for one in children])
    most_of_child = _BYTES_OF_CHILD + _TIMES * of_child
    most_of_worker = _BYTES_OF_WORKER + _TIMES * of_worker
    kept = [
        one for one in children if one.num_bytes <= min(one.workers * most_of_worker, most_of_child)
    ]
    if not kept:
        return None
    return _Share(
        tuple(number for one in kept for number in one.parties),
        sum(one.num_bytes for one in kept),
        sum(one.workers for one in kept),
    )


def from_texts(
    told: Sequence[tuple[str | None, int, str]], label: str, parties: Doubted | None
) -> list[Any]:
    """The values of all workers, from a JSON list of each party.

    Args:
        told: of each party the text, None where it is absent, how many workers it has, and its
            name.
        label: what they are, for messages.
        parties: of which some may lie; None: all are believed.

    Returns:
        By worker; None of absent ones, and of a party that may lie and has sent no such list.

    Raises:
        ProtocolError: a party that is believed has sent something else.
    """
    everyone: list[Any] = []
    odd = [False] * len(told)
    for number, (text, count, site) in enumerate(told):
        values: Any = [None] * count if text is None else _from_json(text)
        if not isinstance(values, list) or len(values) != count:
            if parties is None:
                raise ProtocolError(
                    f"`{label}` of party `{site}` must be a JSON list with a value of each of "
                    f"{count} workers. Received: {str(text)[:80]!r}"
                )
            values, odd[number] = [None] * count, True
        everyone += values
    if parties is not None:
        reason = "it is far longer than those of others, or no value of each of its workers"
        parties.name(odd, label, reason)
    return everyone


def compared(
    parties: Doubted | None,
    told_by_all: Sequence[Any],
    mine: Any,
    select: Callable[[Any], Any],
    what: str,
    *,
    may_be_unknown: bool = False,
) -> Named:
    """The values that this worker compares: an error is due where they differ.

    Args:
        parties: of which some may lie; None: all are believed.
        told_by_all: by worker, None of absent ones.
        mine: what this worker has told, which may be absent.
        select: of what was told that which is compared.
        what: it is, for messages.
        may_be_unknown: whether a worker may not know it, says None, and is content with any value.
    """
    if parties is None:
        present = [
            (f"worker {worker}", select(one))
            for worker, one in enumerate(told_by_all)
            if one is not None
        ]
        return present if len(present) == len(told_by_all) else [*present, (THIS, select(mine))]
    votes: list[list[Any] | None] = [
        None if None in values else [select(one) for one in values]
        for values in parties.by_party(told_by_all)
    ]
    if may_be_unknown:
        votes = [
            None if values is None else [one for one in values if one is not None] or [None]
            for values in votes
        ]
    keys = [None if values is None else _vote(values) for values in votes]
    chosen = merged(parties.paths, keys, _majority_that_knows if may_be_unknown else majority)
    if chosen == _UNKNOWN and may_be_unknown:
        # It may be that of all that know one, and too few know one to say who else is odd.
        return [(MOST, None), (THIS, select(mine))]
    if chosen:
        content = {None, chosen, *([_UNKNOWN] if may_be_unknown else [])}
        parties.name([key not in content for key in keys], what, "it is not that of most parties")
        return [(MOST, (votes[keys.index(chosen)] or [None])[0]), (THIS, select(mine))]
    return [
        *(
            (f"party {site}", one)
            for site, values in zip(parties.sites, votes, strict=True)
            for one in values or ()
        ),
        (THIS, select(mine)),
    ]


def majority(votes: list[Any]) -> Any:
    """What more than half of `votes`, at least one, say; "": there is no such half."""
    [(vote, count)] = collections.Counter(votes).most_common(1)
    return vote if 2 * count > len(votes) else _NO_MAJORITY


def _majority_that_knows(votes: list[str]) -> str:
    """The same; who does not know is content with what others say."""
    num_content = votes.count(_UNKNOWN)
    known = collections.Counter(vote for vote in votes if vote not in (_UNKNOWN, _NO_MAJORITY))
    [(vote, count)] = known.most_common(1) or [(_NO_MAJORITY, 0)]
    if 2 * count > len(votes):
        return vote
    return _UNKNOWN if num_content and 2 * (count + num_content) > len(votes) else _NO_MAJORITY


def _vote(values: Sequence[Any]) -> str:
    """What a party says; "" where its own workers differ."""
    texts = {json.dumps(one) for one in values}
    return texts.pop() if len(texts) == 1 else _NO_MAJORITY


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
