# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all workers, where some parties may lie: most of the parties are right.

Without a robust rule every worker is believed, and one that differs is an error on all: something
was done on one that all had to do. Below a robust rule one liar could end the run so, with one
message. There each party has a vote, what all of its workers say:

    most parties agree, this worker too    who differs is named, and the run goes on
    most agree, this worker differs        an error here, and only here
    no majority                            an error on all, as without a rule

A value that not all need know (the number of steps) is another's mistake only where more than half
know another one.

All workers decide by the same bytes, so that they decide alike.
"""

import collections
import dataclasses
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tf_hips import log
from tf_hips.errors import ProtocolError

if TYPE_CHECKING:
    from tf_hips.strategies.party import PartyStrategy

Named = list[tuple[str, Any]]
"""Whose values they are, and the values."""

MOST, THIS = "most parties", "this worker"
_UNKNOWN = json.dumps(None)


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
        sites: their names, in the order of the parties.
        workers: how many each of them has.
        write_event: writes an event of this process.
    """

    sites: Sequence[str]
    workers: Sequence[int]
    write_event: Callable[..., None]

    def by_party(self, told_by_all: Sequence[Any]) -> list[list[Any]]:
        """What the workers of each party have told; `told_by_all` is by worker."""
        values = iter(told_by_all)
        return [[next(values) for _ in range(count)] for count in self.workers]

    def name(self, odd: Sequence[str], what: str, why: str) -> None:
        """Says in the log and in an event which parties do not count.

        Called each time, also where all count. A party is named once in a streak of such times.

        Args:
            odd: the parties.
            what: was compared, for messages.
            why: they do not count; the same each time that the same thing is looked at.
        """
        writer = getattr(self.write_event, "__self__", self.write_event)
        with _streaks_lock:
            streaks = _streaks.setdefault(writer, _Streaks())
        told = streaks.told(odd, what, why)
        if told:
            self.write_event("parties_differ", what=what, sites=told, reason=why)
        if odd:
            (log.warning if told else log.debug)(
                "Of `%s` what the parties %s have told does not count: %s",
                what,
                ", ".join(told or odd),
                why,
            )


def doubted(strategy: "PartyStrategy") -> Doubted | None:
    """The parties that keep step with this one below a robust rule; None: all are believed.

    Args:
        strategy: a `PartyStrategy`.
    """
    welcome = strategy._together()
    if welcome is None or not welcome.bears_liars:
        return None
    return Doubted(welcome.parties, welcome.workers, strategy.write_event)


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
    for site, values in zip(parties.sites, parties.by_party(told_by_all), strict=True):
        if all(one is None or is_sound(one) for one in values):
            kept += values
            continue
        kept += [None] * len(values)
        odd.append(site)
    parties.name(odd, what, "it is none of the values that workers tell")
    return kept


def as_text(payload: bytes | None) -> str | None:
    """A party's payload as a text; one that is none becomes a text that is no JSON."""
    return None if payload is None else payload.decode(errors="backslashreplace")


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
    odd = []
    for text, count, site in told:
        values: Any = [None] * count if text is None else _from_json(text)
        if not isinstance(values, list) or len(values) != count:
            if parties is None:
                raise ProtocolError(
                    f"`{label}` of party `{site}` must be a JSON list with a value of each of "
                    f"{count} workers. Received: {str(text)[:80]!r}"
                )
            odd.append(site)
            values = [None] * count
        everyone += values
    if parties is not None:
        parties.name(odd, label, "it is no value of each of its workers")
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
        present = [one for one in told_by_all if one is not None]
        everyone = present if len(present) == len(told_by_all) else [*present, mine]
        return [(f"worker {worker}", select(one)) for worker, one in enumerate(everyone)]
    votes: dict[str, list[Any]] = {}
    for site, values in zip(parties.sites, parties.by_party(told_by_all), strict=True):
        if None not in values:
            votes[site] = [select(one) for one in values]
    if may_be_unknown:
        votes = {
            site: [one for one in values if one is not None] or [None]
            for site, values in votes.items()
        }
    keys = {site: _vote(values) for site, values in votes.items()}
    counts = collections.Counter(key for key in keys.values() if key)
    num_content = counts.pop(_UNKNOWN, 0) if may_be_unknown else 0
    [(key, count)] = counts.most_common(1) or [("", 0)]
    if 2 * count > len(votes):
        chosen = next(site for site in votes if keys[site] == key)
        content = {key, _UNKNOWN} if may_be_unknown else {key}
        odd = [site for site in votes if keys[site] not in content]
        parties.name(odd, what, "it is not that of most parties")
        return [(MOST, votes[chosen][0]), (THIS, select(mine))]
    if num_content and 2 * (count + num_content) > len(votes):
        # It may be that of all that know one, and too few know one to say who else is odd.
        return [(MOST, None), (THIS, select(mine))]
    return [
        *((f"party {site}", one) for site, values in votes.items() for one in values),
        (THIS, select(mine)),
    ]


def _vote(values: Sequence[Any]) -> str:
    """What a party says; "" where its own workers differ."""
    texts = {json.dumps(one) for one in values}
    return texts.pop() if len(texts) == 1 else ""


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
