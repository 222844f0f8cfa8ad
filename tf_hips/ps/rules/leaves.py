# SPDX-License-Identifier: Apache-2.0
"""Rules that are decided on sketches of the rows of all leaves: who may be in such a tree.

    topmost server       decides on sketches, adds up one row of each party server
    party servers        have the rows of their leaves, and are trusted with them
    leaves               one row each; f of all of them may lie

Two levels, no more: a server between would have to make sketches of rows that it does not have.
"""

from collections.abc import Sequence

from tf_hips.errors import ToleranceError
from tf_hips.ops.native_robust import MAX_ROWS
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.terms.quorum import Quorum
from tf_hips.ps.terms.tree import BETWEEN
from tf_hips.robust.codecs import why_not_sparse


def why_not(rule: UpdateRule, quorum: Quorum | None) -> str | None:
    """Why a topmost server cannot decide on sketches; None: it can.

    Args:
        rule: one on sketches.
        quorum: when a round closes without some; None: it waits for all.
    """
    if quorum is None:
        return None
    return (
        f"Rule {rule} needs all parties: a seed is told when the rows of all are fixed, so who "
        f"comes later would know it. Received: a quorum of {quorum.least}"
    )


def why_not_child(text: str, site: str, is_leaf: bool, paths: Sequence[str]) -> str | None:
    """Why a child cannot join a server that decides on sketches; None: it can, or no server does.

    Args:
        text: of the rule.
        site: name of the child.
        is_leaf: whether it stands for itself; else it is the server of others.
        paths: of its leaves, from there.
    """
    if parse(text).sketch is None:
        return None
    if is_leaf:
        return (
            f"With rule {text} children must be the servers of parties, which are trusted to make "
            "sketches of what their leaves send; a leaf that lies would make a false one of its "
            f"own. Give it a server (`tf-hips server --uplink`). Received: site `{site}`"
        )
    deep = [path for path in paths if BETWEEN in path]
    if deep:
        return (
            f"With rule {text} a tree has two levels: the leaves' own server makes the sketches. "
            f"Received: site `{site}` with `{deep[0]}` below it"
        )
    return None


def why_too_few(text: str, count: int) -> str | None:
    """Why a rule cannot be decided with so many leaves; None: it can, or makes no sketches."""
    sketched = parse(text).sketched
    if sketched is None:
        return None
    if count > MAX_ROWS:
        return f"Rule {text} bears {MAX_ROWS} leaves at most. Received: {count}"
    try:
        sketched.then.check(count)
    except ToleranceError as error:
        return f"Rule {text} cannot work with {count} leaves: {error}"
    return None


def why_not_below(
    text: str, *, own: str | None, compression: str, quorum: Quorum | None
) -> str | None:
    """Why a party server cannot work below a rule on sketches; None: it can, or there is none.

    Args:
        text: of the rule above.
        own: rule of the party server itself; None: it has none.
        compression: what its children send with.
        quorum: when a round of it closes without some; None: it waits for all.
    """
    sketched = parse(text).sketched
    if sketched is None:
        return None
    if own is not None:
        return (
            f"Below rule {text} a party server sends no row of its own but sketches of its "
            f"children's, so it can have no rule. Received: {own}"
        )
    if quorum is not None:
        return (
            f"Below rule {text} a party server waits for all its children: what comes late would "
            f"be made by somebody who may know the seed. Received: a quorum of {quorum.least}"
        )
    return why_not_sparse(sketched.then, compression, name=text)
