# SPDX-License-Identifier: Apache-2.0
"""Which peers were refused, outvoted or turned away, how often, and who has found it out.

`KINDS` says which events of a log tell of such a thing. An event names whom it is about by `who`,
`sites` or `child_site` (a name, or several), else by the address it came from; the round by `round`
or `number`; the reason by `reason` or `text`. One that tells of several ranks has `rows`, of each
its `rank` and its `reason`. Several processes may tell of one thing: it counts once. What has no
round counts once for each thing that was compared (`what`), or else each time.

Children of two servers may have one name. Such a child of the server of a party is called by its
path from there, `west/a`.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tf_hips.log import Event

# The role of the server of a party, which writes as the site that it is above.
_PARTY_SERVER = "server"
# What a worker calls a party; servers have the bare name.
_PARTY = re.compile(r"party `([^`]+)`")


@dataclasses.dataclass(frozen=True)
class Kind:
    """What an event says of a peer.

    Attributes:
        name: in a legend.
        by: how that was found out.
    """

    name: str
    by: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "row_refused": Kind("row refused", "a robust rule: not finite, or an absurd norm"),
        "norm_absurd": Kind("absurd norm", "a rule of coordinates, which bears it in each of them"),
        "outvoted": Kind("outvoted", "the majority of its group"),
        "proven": Kind("proven to lie", "its own digest, which is not that of what it sent"),
        "passed_over": Kind(
            "asked in vain", "its server: it did not send in time what its group had agreed on"
        ),
        # Why a group has no row (no majority, nobody sent what was agreed on) is the reason.
        "dropped": Kind("group dropped", "the vote of its group"),
        "absent": Kind("absent", "the others of its round, which closed without it"),
        "rows_refused": Kind("row refused", "a robust rule: not finite, or an absurd norm"),
        "update_refused": Kind(
            "update refused", "itself, or the meeting of a loop: it is not finite"
        ),
        "call_refused": Kind(
            "call refused", "a server: a call or packet that is not what it must be"
        ),
        "turned_away": Kind("turned away", "a server: too many calls refused in a minute"),
        "parties_differ": Kind("differs", "most parties, in what must be equal on all"),
    }
)
"""By the name of an event."""
NAMES = tuple(dict.fromkeys(kind.name for kind in KINDS.values()))
"""Those of the kinds, in the order of tables and legends."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """One thing that was found out about one peer.

    Attributes:
        peer: its name.
        kind: name of the kind.
        round: of the run; None where there is none.
        by: how it was found out, and which process tells so.
        reason: as the event says it; empty where it does not.
    """

    peer: str
    kind: str
    round: int | None
    by: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Line:
    """All marks of one peer and one kind.

    Attributes:
        peer: its name.
        kind: name of the kind.
        times: how often.
        rounds: in which rounds, in order.
        by: of the first mark.
        reason: of the last mark that has one.
    """

    peer: str
    kind: str
    times: int
    rounds: tuple[int, ...]
    by: str
    reason: str


def marks(events: Iterable[Event]) -> tuple[Mark, ...]:
    """What the events of one run tell of peers, in order of time."""
    events = list(events)
    shared = _shared_names(events)
    found: dict[Any, Mark] = {}
    for number, event in enumerate(events):
        kind = KINDS.get(event["event"])
        if kind is None:
            continue
        place = _round(event)
        once = event.get("what", number) if place is None else place
        for name, reason in _who(event):
            is_path = name in shared and event.get("role") == _PARTY_SERVER
            peer = f"{event.get('site', '?')}/{name}" if is_path else name
            key = (peer, kind.name, str(once), type(once))
            teller = f"{event.get('role', '?')} {event.get('site', '')}".strip()
            mark = Mark(peer, kind.name, place, f"{kind.by} ({teller})", reason)
            found.setdefault(key, mark)
    return tuple(found.values())


def lines(found: Sequence[Mark]) -> list[Line]:
    """One line for each peer and kind, those with the most marks first."""
    groups: dict[tuple[str, str], list[Mark]] = collections.defaultdict(list)
    for mark in found:
        groups[mark.peer, mark.kind].append(mark)
    made = [
        Line(
            peer,
            kind,
            len(group),
            tuple(sorted(one.round for one in group if one.round is not None)),
            group[0].by,
            next((one.reason for one in reversed(group) if one.reason), ""),
        )
        for (peer, kind), group in groups.items()
    ]
    return sorted(made, key=lambda line: (-line.times, line.peer, line.kind))


def kinds(found: Sequence[Mark]) -> list[str]:
    """Names of the kinds that there are, in the order of the table."""
    return [name for name in NAMES if any(mark.kind == name for mark in found)]


def names(found: Sequence[Mark]) -> list[str]:
    """The peers, those with the most marks first."""
    counts = collections.Counter(mark.peer for mark in found)
    return sorted(counts, key=lambda peer: (-counts[peer], peer))


def rounds_text(rounds: Sequence[int]) -> str:
    """`3`, `3 to 17`; nothing where there is none."""
    if not rounds:
        return "-"
    return str(rounds[0]) if len(set(rounds)) == 1 else f"{rounds[0]} to {rounds[-1]}"


def _shared_names(events: Iterable[Event]) -> set[str]:
    """Names that children of several servers have. Servers that share a model are one."""
    servers: dict[str, set[str]] = collections.defaultdict(set)
    for event in events:
        name = event.get("child_site")
        if isinstance(name, str) and event.get("role") != "worker":
            servers[name].add(str(event.get("site")))
    return {name for name, sites in servers.items() if len(sites) > 1}


def _who(event: Event) -> list[tuple[str, str]]:
    """Names, and of each the reason."""
    reason = _reason(event)
    if isinstance(rows := event.get("rows"), list):
        told = [row for row in rows if isinstance(row, Mapping)]
        return [(f"rank {row.get('rank', '?')}", _reason(row)) for row in told]
    for name in ("who", "sites", "child_site"):
        value = event.get(name)
        if isinstance(value, str) and value:
            party = _PARTY.fullmatch(value)
            return [(value if party is None else party[1], reason)]
        if isinstance(value, list) and value:
            return [(str(one), reason) for one in value]
    if isinstance(peer := event.get("peer"), str):
        # "ipv4:127.0.0.1:40312": each connection has another port.
        return [(f"calls from {peer.partition(':')[2].rpartition(':')[0] or peer}", reason)]
    return [("a peer without a name", reason)]


def _round(event: Event) -> int | None:
    for name in ("round", "number", "step"):
        value = event.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _reason(event: Event) -> str:
    found = str(event.get("reason") or event.get("text") or "")
    if isinstance(what := event.get("what"), str):
        found = f"{what}: {found}"
    return " ".join(found.split())
