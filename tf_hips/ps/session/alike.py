# SPDX-License-Identifier: Apache-2.0
"""What all children of a run must have in common when they join."""

from collections.abc import Mapping
from typing import Protocol

from tf_hips.ps.rules.votes import why_not_child

_COMMON = ("compression", "downlink", "rule", "seed", "above")


class Compared(Protocol):
    """What is compared of a child that joins, beside what `_COMMON` names."""

    workers: int
    above: str | None


def why_unlike(
    site: str,
    child: Compared,
    others: Mapping[str, Compared],
    merging: str | None,
    *,
    is_leaf: bool,
) -> str | None:
    """How a child differs from others in what all must have in common; None: in nothing.

    Args:
        site: name of the child.
        child: what it brings.
        others: what others have brought, by name.
        merging: the rule that merges their rows here; None: that of a server above.
        is_leaf: whether the child stands for itself; else it is the server of others.
    """
    if merging is not None:
        workers = {other: known.workers for other, known in others.items()}
        why_not = why_not_child(merging, site, is_leaf, child.workers, workers)
        if why_not is not None:
            return why_not
    for other, known in others.items():
        for what in _COMMON:
            if what == "above" and None in (known.above, child.above):
                continue  # who wishes for nothing, as servers do, takes what others wish for
            if getattr(known, what) != getattr(child, what):
                return (
                    f"All parties must agree on `{what}`. Site `{other}` has "
                    f"{getattr(known, what)}. Received: {what}={getattr(child, what)} from site "
                    f"`{site}`"
                )
    return None
