# SPDX-License-Identifier: Apache-2.0
"""How often a rule that chooses rows has chosen each peer's, from the events `rows_chosen`.

Such an event has the `sites` that were chosen, and all it has chosen `among`. Servers that share a
model, and one that was killed and goes on, may tell of one round twice: it counts once. Ranks tell
of a step once for each list of gradients: all of these count, and those of steps that are made
again after a restart.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from tf_hips.log import Event


@dataclasses.dataclass(frozen=True)
class Share:
    """Of one peer, at one server.

    Attributes:
        peer: its name.
        chosen: rounds whose result was made of its row.
        of: rounds in which it had a row that took part.
        by: which process has chosen.
    """

    peer: str
    chosen: int
    of: int
    by: str

    @property
    def share(self) -> float:
        """`chosen` of `of`."""
        return self.chosen / self.of


def shares(events: Iterable[Event]) -> tuple[Share, ...]:
    """Of one run: process by process, of each first who was chosen most often."""
    seen: set[tuple[str, Any]] = set()
    counts: dict[tuple[str, str], list[int]] = {}
    for number, event in enumerate(events):
        if event["event"] != "rows_chosen":
            continue
        by = f"{event.get('role', '?')} {event.get('site', '')}".strip()
        once = (by, event.get("round", f"event {number}"))
        if once in seen:
            continue
        seen.add(once)
        chosen = {str(one) for one in event["sites"]}
        for peer in event["among"]:
            count = counts.setdefault((by, str(peer)), [0, 0])
            count[0] += str(peer) in chosen
            count[1] += 1
    found = [Share(peer, chosen, of, by) for (by, peer), (chosen, of) in counts.items()]
    return tuple(sorted(found, key=lambda one: (one.by, -one.share, one.peer)))
