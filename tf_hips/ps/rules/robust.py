# SPDX-License-Identifier: Apache-2.0
"""Robust rules of a server: who may lie, and rules by which each coordinate is that of most.

Those that look at whole rows are in `whole`. What children say that they stand for is not looked
at, because whoever lies would say that it stands for much; but who stands for nothing, 0, has no
row.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tf_hips.errors import ToleranceError
from tf_hips.ops import native, native_robust
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Bytes, Floats
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.ps.rules import leaves, votes
from tf_hips.ps.rules.rule import Keeping
from tf_hips.ps.rules.value import UpdateRule, parse
from tf_hips.ps.terms.assignment import WHOLE, Shard
from tf_hips.ps.terms.quorum import DROP, Quorum
from tf_hips.ps.transport.wire import REFUSED_WEIGHT
from tf_hips.robust import Aggregator, bearing, codecs
from tf_hips.robust import votes as votes_of_signs
from tf_hips.robust.codecs import why_not_sparse
from tf_hips.robust.rows import lesser_median, totals

OWN_REFUSAL = "it has refused its own update: NaN or infinity"
# Names in a message, at most.
_NAMED = 5
_RULES = {
    "median": CoordinateRule.MEDIAN,
    "trimmed_mean": CoordinateRule.TRIMMED,
    "meamed": CoordinateRule.NEAREST,
    "majority": CoordinateRule.MAJORITY,
}


class Rows(Keeping):
    """The rows of all children side by side, and of each coordinate what most of them say.

    Memory: a chunk of float32 for each child, while it is merged; of signs of onebit, which are
    counted in their packets, a bit for each element and child.

    Attributes:
        squares: of the rows of the chunk that was finished last, by child; of signs that are
            counted in their packets there are none.
    """

    needs_rows = True

    def __init__(
        self,
        rule: Aggregator,
        compressor: Compressor,
        weights: Mapping[int, float],
        of: int | None = None,
    ) -> None:
        """Takes nothing yet.

        Args:
            rule: one of coordinates alone.
            compressor: what packets are encoded with.
            weights: what children stand for, by child.
            of: how many rows there could be in a round; None: as many as come.
        """
        super().__init__(compressor)
        self._rule = rule
        self._of = of
        self._weights = weights
        self._num_refused = 0
        self.squares: Mapping[int, float] = {}

    def begin(self, num_elements: int) -> None:
        """Starts a chunk of `num_elements` elements."""
        super().begin(num_elements)
        self._num_refused = 0
        self.squares = {}

    def add(self, child: int, packet: Bytes) -> None:
        """Takes the packet of `child`."""
        weight = self._weights.get(child, 1.0)
        if weight > 0:
            super().add(child, packet)
        else:
            self._num_refused += is_refused(weight)

    def finish(self) -> Floats:
        """The result, shape [num_elements]; not finite where a mean of huge values overflows.

        Raises:
            ToleranceError: too few children have a row.
        """
        packets, self._packets = self._packets, {}
        n = self._num_elements
        if not packets and not self._num_refused:
            return np.zeros(n, np.float32)  # nobody has anything to say
        in_order = [packets[child] for child in sorted(packets)]
        if self._rule.rule.name == "majority" and votes_of_signs.can_be_counted(in_order, n):
            self._rule.check(len(in_order), self._num_refused, self._of)
            return votes_of_signs.onebit_majority(in_order, n)
        rows = [native.decode(self._compressor, packet, n) for packet in in_order]
        result, squares = of_coordinates(self._rule, rows, self._num_refused, self._of)
        self.squares = dict(zip(sorted(packets), squares, strict=True))
        return result


def of_coordinates(
    rule: Aggregator,
    rows: Sequence[Floats],
    missing: int = 0,
    of: int | None = None,
) -> tuple[Floats, list[float]]:
    """What a rule of coordinates makes of rows; not finite where a mean of huge values overflows.

    Args:
        rule: one of coordinates alone.
        rows: at least one.
        missing: bad rows that are known already and not among `rows`.
        of: how many rows there could be; None: those that are here or missing.

    Returns:
        The result, and the sum of squares of each row.

    Raises:
        ToleranceError: there are too few rows.
    """
    f = rule.check(len(rows), missing, of)
    kind = _RULES[rule.rule.name]
    drops = kind in (CoordinateRule.TRIMMED, CoordinateRule.NEAREST)
    result, squares = native_robust.coordinate(rows, kind, f if drops else 0)
    return result, totals(squares)


def is_refused(weight: float) -> bool:
    """Whether a child that says it stands for `weight` has refused its own update."""
    return weight == 0 and math.copysign(1.0, weight) == math.copysign(1.0, REFUSED_WEIGHT)


def with_no_row(names: Sequence[str]) -> str:
    """Who has said that it takes no part, in brackets, for a message; "": nobody."""
    if not names:
        return ""
    named = ", ".join(f"`{name}`" for name in names[:_NAMED])
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" (with weight 0 took no part: {named}{more})"


def robust_weight(weights: Sequence[float]) -> float:
    """What children stand for together, of whom some may lie: each for the lesser median.

    Args:
        weights: what they say; who says 0 is not there.
    """
    present = [weight for weight in weights if weight > 0]
    return len(present) * lesser_median(present) if present else 0.0


def borne(text: str, children: int, quorum: Quorum | None = None) -> str | None:
    """How many bad rows a rule bears, as people read it; None: none, or it is not known here.

    Args:
        text: of any rule.
        children: how many there are.
        quorum: when a round closes without some; None: it waits for all.
    """
    rule = parse(text)
    robust = rule.robust
    if robust is None or rule.sketch is not None:
        return None  # how many leaves there are, only the topmost server knows, when all have come
    try:
        if rule.votes is not None:
            n, rows = rule.votes.num_groups(children), "groups"
            robust = rule.votes.with_rule(robust).aggregator(children, n)
        elif rule.is_asynchronous:
            n, rows = int(rule["k"]), "rows in a step"
        else:
            n, rows = children if quorum is None else quorum.least, "children in a round"
        f = robust.bears(n)
    except ToleranceError:
        return None  # the server has said why
    return None if f is None else f"{f} of {n} {rows}"


def why_weak(text: str, children: int, quorum: Quorum | None = None) -> str | None:
    """Why one child alone may spoil what a rule makes of so many; None: none can, or it was said.

    It is said by `f=0`, by a mean without votes, and by the warning of a mean behind steps.

    Args:
        text: of any rule.
        children: how many there are.
        quorum: when a round closes without some; None: it waits for all.
    """
    rule = parse(text)
    robust = rule.robust
    if robust is None or rule.sketch is not None:
        return None
    if rule.votes is not None:
        return _why_weak_votes(rule.votes, robust, children)
    n, rows = children if quorum is None else quorum.least, "children in a round"
    if rule.is_asynchronous:
        n, rows = int(rule["k"]), "rows in a step"
    return bearing.why_nobody(robust, n, rows, text=rule.text)


def _why_weak_votes(voting: votes.Votes, robust: Aggregator, children: int) -> str | None:
    """Why one child, or few, may spoil what comes of votes; None: less than half a group cannot."""
    num_groups = voting.num_groups(children)
    if num_groups == 1:
        bears = (children - 1) // 2
        return (
            f"The parties vote in one group of {children}, so the rule behind the vote has one "
            f"row, and {f'more than {bears}' if bears else 'any'} of them can spoil it. Groups of "
            f"{voting.r} need more than {voting.r} parties; --group-size makes smaller ones"
        )
    try:
        if voting.q is not None or voting.with_rule(robust).bears(children) != 0:
            return None
    except ToleranceError:
        return None  # the run is refused, and says why
    smallest = children % voting.r or voting.r
    return (
        f"The parties vote in {num_groups} groups, the smallest of {smallest}: one of them can "
        f"spoil its vote, and {robust} behind the votes bears no spoilt one. Groups of 3 or more "
        "whose size divides the parties bear one that lies"
    )


def why_noisy(text: str, compression: str) -> str | None:
    """Why a rule may not find liars among what a codec makes of rows; None: not that we know.

    Args:
        text: of any rule.
        compression: text of what the children send with.
    """
    rule = parse(text)
    chain = rule.robust if rule.sketched is None else rule.sketched.then
    return None if chain is None else codecs.why_noisy(chain, compression)


def why_unbounded(text: str) -> str | None:
    """Why a rule bears nobody that lies, though steps of it say so; None: it does, or none says so.

    Args:
        text: of any rule.
    """
    robust = parse(text).robust
    return None if robust is None else bearing.why_unbounded(robust)


def why_not(
    text: str,
    children: int,
    compression: str | None,
    quorum: Quorum | None = None,
    shard: Shard = WHOLE,
    *,
    is_led: bool = False,
) -> str | None:
    """Why a rule cannot bear what it is told to with so many children; None: it can.

    Args:
        text: of any rule.
        children: how many there are.
        compression: what they send is encoded with; None: not known yet.
        quorum: when a round closes without some; None: it waits for all.
        shard: which part of the model the server has.
        is_led: whether a shard is the first one, or knows where that is.
    """
    rule = parse(text)
    robust = rule.robust
    if robust is None:
        return None
    n, name, rows = children if quorum is None else quorum.least, "n", "children in a round"
    if rule.is_asynchronous:
        n, name, rows = int(rule["k"]), "k", "rows in a buffer"
        if n > children:
            return (
                f"Rule {rule} takes one row of each child, so that `k` must be at most their "
                f"number. Received: k={n}, {children} children"
            )
    given = n if rule.is_asynchronous else children
    given = given if rule.votes is None else rule.votes.num_groups(children)
    if given > robust.max_rows:
        return f"Rule {rule} bears {robust.max_rows} rows at most. Received: {given}"
    if rule.is_whole:
        if not shard.is_whole:
            found = _why_not_in_shards(rule, quorum, shard, is_led=is_led)
            if found is not None:
                return found
        if rule.sketch is not None:
            return leaves.why_not(rule, quorum)
        try:
            if rule.votes is not None:
                votes.check(rule.votes, robust, children, compression)
            else:
                robust.check(n)
        except ToleranceError as error:
            return f"Rule {rule} cannot work with {n} {rows}: {error}"
    f = 0 if rule.is_whole else _bad(robust.rule.f, n)
    if n < 2 * f + 1:
        return f"Rule {rule} needs {name} >= 2 f + 1 {rows}. Received: {name}={n}, f={f}"
    if quorum is not None and quorum.late != DROP:
        return (
            f"Rule {rule} needs late={DROP}: what comes late is added to a result, past the rule. "
            f"Received: late={quorum.late}"
        )
    return None if compression is None else why_not_sparse(robust, compression, name=rule.text)


def _why_not_in_shards(
    rule: UpdateRule, quorum: Quorum | None, shard: Shard, *, is_led: bool
) -> str | None:
    """Why a rule of whole rows cannot do with a part of the model; None: it can."""
    if rule.sketch is not None:
        return (
            f"Rule {rule} is decided on sketches of all leaves, so one server must have all of the "
            f"model. Received: {shard}"
        )
    if rule.votes is not None:
        return (
            f"Rule {rule} votes on all packets of a round, so one server must have all of the "
            f"model. Received: {shard}"
        )
    if rule.is_asynchronous:
        return (
            f"Rule {rule} makes a step when enough whole rows have come, so one server must have "
            f"all of the model. Received: {shard}"
        )
    if quorum is not None:
        return (
            f"Rule {rule} looks at whole rows, so where servers share a model a round waits for "
            f"all children: no `quorum` and no `close_at`. Received: {shard}, a quorum of "
            f"{quorum.least}"
        )
    if not is_led:
        return (
            f"Rule {rule} looks at whole rows, so servers that share a model decide together: "
            "each but shard 0 must be told where that is, `lead` (--lead HOST:PORT). Received: "
            f"{shard} without it"
        )
    return None


def _bad(f: int | None, children: int) -> int:
    """How many children may lie."""
    return f if f is not None and f >= 0 else (children - 1) // 2
