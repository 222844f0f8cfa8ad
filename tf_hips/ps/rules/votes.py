# SPDX-License-Identifier: Apache-2.0
"""Votes: what stands before a robust rule where workers in groups compute the same gradient.

    detox(r=3, vote=digest) >> median(f=auto)
    detox(r=3, q=4) >> krum                 4 of all children may lie: f follows

A plain value with its text, as rules are. Groups and counting are `tf_hips.robust.detox`'s.
"""

import dataclasses
import re
from collections.abc import Mapping

from tf_hips.errors import ToleranceError
from tf_hips.ops import call_text
from tf_hips.ops import compressor as compressors
from tf_hips.ops.registry import YES_OR_NO, Parameter, checked
from tf_hips.robust import Aggregator, detox
from tf_hips.robust.detox import Detox, check_compressor
from tf_hips.robust.value import AUTO

NAME, DIGEST, TOLERANT = detox.NAME, detox.DIGEST, detox.TOLERANT
_HEAD = re.compile(r"\s*detox\s*(?:\(([^()]*)\)\s*)?", re.ASCII)
_MAX_GROUPS = 1024
_KNOWN = {
    one.name: one
    for one in (
        Parameter("r", 3, 1, _MAX_GROUPS),
        Parameter("vote", 0, 0, 2, words=tuple((one, k) for k, one in enumerate(detox.VOTES))),
        Parameter("buckets", 0, 0, _MAX_GROUPS),
        Parameter("fixed", 0, 0, 1, words=YES_OR_NO),
        detox.EPSILON,
        Parameter("q", AUTO, 0, _MAX_GROUPS, words=(("auto", AUTO),)),
        Parameter("full", 0, 0, 1, words=YES_OR_NO),
    )
}


@dataclasses.dataclass(frozen=True)
class Votes:
    """How groups of children vote before a rule: a `tf_hips.robust.detox.Detox` without its rule.

    Raises:
        ValueError: a number is out of range, or there is no such vote.
        TypeError: a number is of the wrong kind.
    """

    r: int = 3
    vote: str = DIGEST
    buckets: int = 0
    fixed: bool = False
    epsilon: float = 1e-4
    q: int | None = None
    full: bool = False

    def __post_init__(self) -> None:
        said = {"r": self.r, "buckets": self.buckets, "epsilon": self.epsilon}
        # As the text holds them: a value is the one that its text makes.
        for name, value in said.items():
            object.__setattr__(self, name, _KNOWN[name].checked(value))
        _KNOWN["vote"].number(self.vote)
        if self.q is not None:
            _KNOWN["q"].checked(self.q)

    @classmethod
    def of(cls, value: Detox) -> "Votes":
        """Those of a value of `tf_hips.robust.detox`, without its rule."""
        epsilon = value.epsilon if value.vote == TOLERANT else cls.epsilon
        return cls(*(value.r, value.vote, value.buckets, value.fixed, epsilon, value.q, value.full))

    @property
    def text(self) -> str:
        """The text that `parse` reads."""
        return detox.head(self)

    @property
    def is_by_digest(self) -> bool:
        """Whether children send digests, and packets when they are asked."""
        return self.vote == DIGEST

    def with_rule(self, then: Aggregator) -> Detox:
        """The value of `tf_hips.robust.detox` with a rule behind it."""
        return Detox(
            *(self.r, then, self.vote, self.buckets, self.fixed),
            *(self.epsilon, self.q, self.full),
        )

    def num_groups(self, children: int) -> int:
        """Groups of so many children."""
        return -(-children // self.r)


def split(text: str) -> tuple[Votes | None, str]:
    """The votes that a text begins with, if any, and the rest of it.

    Raises:
        ValueError: an argument is wrong, or nothing stands behind the votes.
    """
    head, arrow, rest = text.partition(">>")
    match = _HEAD.fullmatch(head)
    if match is None:
        return None, text
    if not arrow:
        raise ValueError(
            f"a rule must stand behind the votes, such as `detox(r=3) >> median`. Received: "
            f"{text[:320]!r}"
        )
    given = call_text.values(NAME, _KNOWN, (match.group(1) or "").strip(), text)
    try:
        values = checked(NAME, _KNOWN.values(), given)
    except TypeError as error:
        raise ValueError(str(error)) from error
    votes = Votes(
        int(values["r"]),
        detox.VOTES[int(values["vote"])],
        int(values["buckets"]),
        bool(values["fixed"]),
        float(values["epsilon"]),
        None if values["q"] == AUTO else int(values["q"]),
        bool(values["full"]),
    )
    if votes.vote != TOLERANT and "epsilon" in given:
        raise ValueError(
            f"`epsilon` means nothing in {votes.text}. Received: epsilon={given['epsilon']!r}"
        )
    return votes, rest


def read(text: str) -> Votes:
    """The value whose `text` it is.

    Raises:
        ValueError: it is no such text.
    """
    votes, rest = split(f"{text} >> mean")
    if votes is None or rest.strip() != "mean":
        raise ValueError(f"votes must read like `detox(r=3)`. Received: {text[:320]!r}")
    return votes


def check(votes: Votes, then: Aggregator, children: int, compression: str | None) -> None:
    """Looks whether so many children can vote, and their votes can be borne.

    Args:
        votes: how they vote.
        then: the rule behind the votes.
        children: how many there are.
        compression: what they send is encoded with; None: not known yet.

    Raises:
        ToleranceError: there are too few groups for the rule, or packets of honest children could
            not agree.
    """
    chosen, num_groups = votes.with_rule(then), votes.num_groups(children)
    chosen.check_groups(children)
    behind = chosen.aggregator(children, num_groups)
    try:
        behind.check(num_groups)
    except ToleranceError as error:
        raise ToleranceError(f"{error} (n counts votes of groups)") from None
    if compression is not None:
        try:
            check_compressor(chosen, compressors.parse(compression))
        except ValueError as error:
            raise ToleranceError(str(error)) from None


def why_not_child(
    text: str, site: str, is_leaf: bool, workers: int, others: Mapping[str, int]
) -> str | None:
    """Why a child cannot vote beside others; None: it can, or nobody votes.

    Args:
        text: of the rule.
        site: name of the child.
        is_leaf: whether it stands for itself; else it is the server of others.
        workers: how many it has.
        others: workers of those that have joined, by name.
    """
    if split(text)[0] is None:
        return None
    if not is_leaf:
        return (
            "Children that vote must be parties, and not servers of others, which sit in no group. "
            f"Received: site `{site}` with sites below it"
        )
    for other, count in others.items():
        if count != workers:
            return (
                "Children that vote must have equally many workers, so that their batches can be "
                f"equal. Received: {count} of site `{other}`, {workers} of site `{site}`"
            )
    return None
