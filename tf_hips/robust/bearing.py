# SPDX-License-Identifier: Apache-2.0
"""Whom a rule does not bear, though it looks as if it did: texts of warnings."""

from tf_hips.errors import ToleranceError
from tf_hips.robust.aggregator import Aggregator


def why_unbounded(rule: Aggregator) -> str | None:
    """Why a chain bears nobody that lies, for a warning; None: it does, or is a mean that says so.

    Args:
        rule: any.
    """
    if rule.is_bounded or len(rule.steps) == 1:
        return None
    return (
        f"Rule {rule} bears nobody that lies: one row moves the mean at its end anywhere. Take "
        "another rule at the end, such as trimmed_mean, or `clip` or `arc` before it"
    )


def why_nobody(rule: Aggregator, n: int, rows: str, *, text: str | None = None) -> str | None:
    """Why a rule in which an f is "auto" bears nobody that lies; None: it does, or each f was said.

    Args:
        rule: any.
        n: how many rows there are.
        rows: what they are, as it is said, such as "children in a round".
        text: what the rule is called; None: its own text.
    """
    try:
        # Who is alone has nobody to be protected from.
        if n == 1 or not rule.is_auto or rule.bears(n) != 0:
            return None
    except ToleranceError:
        return None  # it is refused, which says why
    enough = next((more for more in range(n + 1, rule.max_rows + 1) if _borne(rule, more)), None)
    advice = "" if enough is None else f". It takes {enough} or more to bear one"
    return (
        f"Rule {text or rule} bears nobody that lies among {n} {rows}: one of them can spoil the "
        f"result{advice}"
    )


def _borne(rule: Aggregator, n: int) -> int:
    """How many bad ones of n rows; 0: none, or so few are not enough."""
    try:
        return rule.bears(n) or 0
    except ToleranceError:
        return 0
