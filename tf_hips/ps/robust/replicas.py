# SPDX-License-Identifier: Apache-2.0
"""Whether children that vote on equal bytes can compute them: what each says that decides on these.

    more than half of all children say the same    whoever differs is refused, by name; the others
                                                   go on
    nothing can be said by that many any more      nobody knows who is right: the run ends
    else                                           it is open; who has said something goes on

So one that lies about itself has no more weight than in a vote. Plain values: the session's lock
guards what they are of.
"""

import collections
import json
from collections.abc import Mapping
from typing import Any

from tf_hips.errors import ProtocolError

Facts = dict[str, str]

_MAX_FACTS = 64
_MAX_FACT = 200


def read(text: str) -> Facts:
    """What `client.vote.facts_to_json` wrote.

    Raises:
        ProtocolError: it is something else, or too long.
    """
    try:
        facts: Any = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    is_good = isinstance(facts, dict) and len(facts) <= _MAX_FACTS
    if not is_good or not all(
        isinstance(value, str) and len(name) <= _MAX_FACT and len(value) <= _MAX_FACT
        for name, value in facts.items()
    ):
        raise ProtocolError(
            f"`facts` must be texts by name, at most {_MAX_FACTS} of {_MAX_FACT} characters. "
            f"Received: {text[:80]!r}"
        )
    return dict(facts)


def most(said: Mapping[int, Facts], children: int) -> Facts | None:
    """What more than half of all `children` say; None: nothing, so far."""
    for facts, count in _counts(said).items():
        if 2 * count > children:
            return dict(facts)
    return None


def is_open(said: Mapping[int, Facts], children: int) -> bool:
    """Whether more than half of all `children` can still come to say the same."""
    silent = children - len(said)
    return 2 * (max(_counts(said).values(), default=0) + silent) > children


def difference(here: Facts, there: Facts) -> str:
    """In what two differ, for messages."""
    names = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    return "; ".join(
        f"{name} is {here.get(name, 'not said')} and {there.get(name, 'not said')}"
        for name in names
    )


def _counts(said: Mapping[int, Facts]) -> collections.Counter[tuple[tuple[str, str], ...]]:
    return collections.Counter(tuple(sorted(facts.items())) for facts in said.values())
