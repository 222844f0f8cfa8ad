# SPDX-License-Identifier: Apache-2.0
"""What must be equal on all workers, where some parties may lie: most of the parties are right.

Without a robust rule every worker is believed, and one that differs is an error on all: something
was done on one that all had to do. Below a robust rule one liar could end the run so, with one
message. There each party has a vote, what all of its workers say:

    most parties agree, this worker too    who differs is named, and the run goes on
    most agree, this worker differs        an error here, and only here
    no majority                            an error on all, as without a rule

All workers decide by the same bytes, so that they decide alike.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from tf_hips import log
from tf_hips.errors import ProtocolError

Named = list[tuple[str, Any]]
"""Whose values they are, and the values."""

MOST, THIS = "most parties", "this worker"


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
        """Says in the log and in an event which parties do not count, if there are any."""
        if not odd:
            return
        self.write_event("parties_differ", what=what, sites=list(odd), reason=why)
        log.warning(
            "Of `%s` what the parties %s have told does not count: %s",
            what,
            ", ".join(odd),
            why,
        )


def doubted(strategy: Any) -> Doubted | None:
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
    for text, count, site in told:
        values: Any = [None] * count if text is None else _from_json(text)
        if not isinstance(values, list) or len(values) != count:
            if parties is None:
                raise ProtocolError(
                    f"`{label}` of party `{site}` must be a JSON list with a value of each of "
                    f"{count} workers. Received: {str(text)[:80]!r}"
                )
            parties.name([site], label, "it is no value of each of its workers")
            values = [None] * count
        everyone += values
    return everyone


def compared(
    parties: Doubted | None,
    told_by_all: Sequence[Any],
    mine: Any,
    select: Callable[[Any], Any],
    what: str,
) -> Named:
    """The values that this worker compares: an error is due where they differ.

    Args:
        parties: of which some may lie; None: all are believed.
        told_by_all: by worker, None of absent ones.
        mine: what this worker has told, which may be absent.
        select: of what was told that which is compared.
        what: it is, for messages.
    """
    if parties is None:
        present = [one for one in told_by_all if one is not None]
        everyone = present if len(present) == len(told_by_all) else [*present, mine]
        return [(f"worker {worker}", select(one)) for worker, one in enumerate(everyone)]
    votes: dict[str, list[Any]] = {}
    for site, values in zip(parties.sites, parties.by_party(told_by_all), strict=True):
        if None not in values:
            votes[site] = [select(one) for one in values]
    keys = {site: _vote(values) for site, values in votes.items()}
    [(key, count)] = collections.Counter(keys.values()).most_common(1) or [("", 0)]
    if 2 * count <= len(votes) or key == "":
        return [
            *((f"party {site}", one) for site, values in votes.items() for one in values),
            (THIS, select(mine)),
        ]
    chosen = next(site for site in votes if keys[site] == key)
    odd = [site for site in votes if keys[site] != key]
    parties.name(odd, what, f"it is not that of the other {count} of {len(votes)}")
    return [(MOST, votes[chosen][0]), (THIS, select(mine))]


def _vote(values: Sequence[Any]) -> str:
    """What a party says; "" where its own workers differ."""
    texts = {json.dumps(one) for one in values}
    return texts.pop() if len(texts) == 1 else ""


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
