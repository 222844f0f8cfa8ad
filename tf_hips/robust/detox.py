# SPDX-License-Identifier: Apache-2.0
"""DETOX: groups of workers that compute the same gradient vote; the votes are aggregated robustly.

    n workers --> groups of r, drawn anew every step --> one vote per group --> buckets --> rule

Workers of a group share a sampling seed, so honest ones send equal bytes. A vote needs more than
half of its group; a group without one is dropped, counts as a bad one, and nothing is guessed. r
need not divide n: the last group is then smaller, and one of a single worker says what that worker
says.

Who sits with whom must not be known to those who lie: placed at will, q of them spoil
floor(q / ceil(r / 2)) groups, and one of a smaller group more, which is worse than no groups at
all. So groups are drawn from the server's seed and the step. `fixed` has the groups of the
authors' code, neighbours for ever.

Sources: Rajput et al., "DETOX: A Redundancy-based Framework for Faster and More Robust Gradient
Aggregation", NeurIPS 2019; Chen et al., "DRACO", ICML 2018. Pure functions of rows and digests.
"""

import collections
import dataclasses
import difflib
import hashlib
import math
import numbers
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_hips.errors import ToleranceError
from tf_hips.ops import call_text
from tf_hips.ops.compressor import Compressor
from tf_hips.ops.native import Floats, derive_seed
from tf_hips.ops.registry import Parameter
from tf_hips.robust import rules
from tf_hips.robust.aggregator import Aggregation, Aggregator, parse
from tf_hips.robust.deciding import secret_order
from tf_hips.robust.rows import Limits, Rows, as_rows
from tf_hips.robust.value import Step

NAME = "detox"
VOTES = DIGEST, EXACT, TOLERANT = ("digest", "exact", "tolerant")
EPSILON = Parameter("epsilon", 1e-4, 1e-7, 0.5)
GROUP_SIZE = 5  # of the authors' code
APPROACHES = BASELINE, MAJ_VOTE, _DETOX = ("baseline", "maj_vote", "detox")
OF_GROUPS = ("group_size", "bucket_size", "vote", "fixed_groups")
"""Options of a command that mean nothing without groups."""
_APPROACH_ALIASES = {"draco_lite": "detox", "draco-lite": "detox", "maj-vote": "maj_vote"}


@dataclasses.dataclass(frozen=True)
class Vote:
    """How one group voted.

    Attributes:
        members: numbers of its workers.
        agreed: those who said what won; empty: nothing had more than half.
        outvoted: those who said something else.
        absent: those who said nothing.
        proven: those whose vector is not what they had sent the digest of.
    """

    members: tuple[int, ...]
    agreed: tuple[int, ...]
    outvoted: tuple[int, ...]
    absent: tuple[int, ...] = ()
    proven: tuple[int, ...] = ()

    @property
    def is_won(self) -> bool:
        """Whether there is a result."""
        return bool(self.agreed)


class NoVoteError(ToleranceError):
    """No group has a vote.

    Attributes:
        votes: of all groups.
    """

    def __init__(self, votes: Sequence[Vote]) -> None:
        """Of groups none of which is won."""
        super().__init__(
            f"at least one of {len(votes)} groups must agree. Received: no majority in any"
        )
        self.votes = tuple(votes)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step came to.

    Attributes:
        aggregation: of the votes; its rows are numbers of groups that have a vote, in order.
        votes: of all groups.
    """

    aggregation: Aggregation
    votes: tuple[Vote, ...]

    @property
    def vector(self) -> Floats:
        """The result."""
        return self.aggregation.vector

    @property
    def outvoted(self) -> tuple[int, ...]:
        """Workers that said something else than their group."""
        return tuple(sorted(worker for vote in self.votes for worker in vote.outvoted))


@dataclasses.dataclass(frozen=True)
class Detox:
    """Groups, votes, buckets and a rule; a plain value.

    Attributes:
        r: workers of a group; 1: each is one, and goes on to buckets and rule by itself.
        then: what aggregates the votes.
        vote: "digest": equal SHA-256 of the bytes, so that one vector of a group travels; "exact":
            equal bytes; "tolerant": within `epsilon` of each other, for replicas on unequal
            machines.
        buckets: how many means of votes `then` gets at most: v votes are shuffled into means of
            ceil(v / buckets); 0: the votes themselves.
        fixed: whether groups are neighbours, and stay.
        epsilon: of a tolerant vote, relative to the norm, in [1e-7, 0.5].
        q: how many of all workers may lie: f="auto" in `then` is how many groups they spoil at
            worst (`spoilt_groups`). None: as many as `then` bears.
        full: whether r must divide the workers; else the rest is a smaller group, in which fewer
            liars are more than half.

    Raises:
        TypeError: `r`, `buckets` or `q` is no integer, `fixed` or `full` no truth value, `epsilon`
            no number, or `then` no rule.
        ValueError: a number is out of range, there is no such vote, or `then` takes no f from `q`.
    """

    r: int
    then: Aggregator
    vote: str = DIGEST
    buckets: int = 0
    fixed: bool = False
    epsilon: float = 1e-4
    q: int | None = None
    full: bool = False

    def __post_init__(self) -> None:
        for name in ("r", "buckets", "q"):
            number = getattr(self, name)
            is_integer = isinstance(number, numbers.Integral) and not isinstance(number, bool)
            if not is_integer and (name, number) != ("q", None):
                raise TypeError(f"`{name}` must be an integer. Received: {name}={number!r}")
        for name in ("fixed", "full"):
            # A word such as "False" would be true here, and false in the text that a server reads.
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise call_text.wrong_kind(name, "True or False", getattr(self, name))
            object.__setattr__(self, name, bool(getattr(self, name)))
        if not isinstance(self.then, Aggregator):
            raise call_text.wrong_kind("then", "a rule such as robust.median()", self.then)
        if self.r < 1:
            raise ValueError(f"`r` must be 1 or more. Received: r={self.r}")
        if self.vote not in VOTES:
            raise ValueError(f"`vote` must be one of {', '.join(VOTES)}. Received: {self.vote!r}")
        if self.buckets < 0:
            raise ValueError(f"`buckets` must be 0 or more. Received: buckets={self.buckets}")
        # As the text holds it, which a server reads.
        object.__setattr__(self, "epsilon", EPSILON.checked(self.epsilon))
        if self.q is not None and self.q < 0:
            raise ValueError(f"`q` must be 0 or more. Received: q={self.q}")
        if self.q is not None and not self.then.is_auto:
            raise ValueError(
                '`q` says what f="auto" is of the rule behind the votes. Received: '
                f"q={self.q} before {self.then}"
            )

    @property
    def text(self) -> str:
        """The rule of a server that does the same, `detox(r=3, ...) >> median(f=auto)`."""
        return f"{head(self)} >> {self.then.text}"

    def __repr__(self) -> str:
        return self.text

    def aggregator(self, workers: int, votes: int) -> Aggregator:
        """What so many votes of so many workers go through: buckets, and `then` with its f.

        Raises:
            ToleranceError: `then` never bears so many bad votes.
        """
        then = self.then
        if self.q is not None:
            f = spoilt_groups(workers, min(self.q, workers), self.r)
            try:
                then = then.bearing(f)
            except ValueError as error:
                raise ToleranceError(
                    f"{then} cannot bear f={f}, the groups that q={self.q} of {workers} spoil: "
                    f"{error}"
                ) from error
        if 0 < self.buckets < votes:
            bucketed: Aggregator = rules.bucketing(-(-votes // self.buckets)) >> then
            return bucketed
        return then

    def check(self, workers: int) -> int:
        """Looks whether so many workers are enough.

        Returns:
            How many bad votes the rule bears, 0 for one that knows no f.

        Raises:
            ToleranceError: they are not; says the formula.
        """
        self.check_groups(workers)
        votes = -(-workers // self.r)
        return self.aggregator(workers, votes).check(votes)

    def bears(self, workers: int) -> int | None:
        """How many of the workers may lie at worst, placed at will.

        None: the rule knows no f, and bears spoilt votes by their influence.

        Raises:
            ToleranceError: as for `check`.
        """
        self.check(workers)
        votes = -(-workers // self.r)
        borne = self.aggregator(workers, votes).bears(votes)
        if borne is None and self.then.is_bounded:
            return None
        q = 0
        while q < workers and spoilt_groups(workers, q + 1, self.r) <= (borne or 0):
            q += 1
        return q

    def check_groups(self, workers: int) -> None:
        """Raises ToleranceError where r must divide the workers, and does not."""
        if self.full and workers % self.r:
            raise ToleranceError(
                f"a repetition code needs full groups: r={self.r} must divide the workers, or the "
                f"rest has fewer to outvote. Received: {workers} workers"
            )

    def run(
        self,
        rows: Rows,
        *,
        reference: Floats | None = None,
        seed: int = 0,
        step: int = 0,
        limits: Limits | None = None,
    ) -> Result:
        """Aggregates the rows of all workers.

        Args:
            rows: of each worker its gradient.
            reference: as for `Aggregator.run`.
            seed: of the server; secret from the workers.
            step: of the run.
            limits: what norms of votes may be.

        Raises:
            NoVoteError: no group has a vote; says how they voted.
            ToleranceError: too few have one for the rule.
            NonFiniteError: the result would not be finite.
            ValueError, TypeError: rows differ in length.
        """
        given = as_rows(rows)
        self.check(len(given))
        votes = []
        for members in groups(len(given), self.r, seed, step, fixed=self.fixed):
            mine = [given[worker] for worker in members]
            if self.vote == TOLERANT:
                votes.append(vote_tolerant(mine, members, self.epsilon))
            elif self.vote == DIGEST:
                votes.append(vote_by_digest([digest(row) for row in mine], members))
            else:
                votes.append(vote_exact(mine, members))
        winners = [given[vote.agreed[0]] for vote in votes if vote.is_won]
        how = {"reference": reference, "seed": seed, "step": step, "limits": limits}
        return self._aggregate(len(given), winners, votes, **how)

    def run_digests(
        self,
        digests: Sequence[bytes | None],
        fetch: Callable[[int], Floats | None],
        *,
        reference: Floats | None = None,
        seed: int = 0,
        step: int = 0,
        limits: Limits | None = None,
    ) -> Result:
        """Votes by digest, and fetches one vector of each group.

        A vector that has not the digest that its worker sent, or is none of float32 [d], proves a
        fault; the next one of those who agreed is asked. A group that agrees on a vector of another
        length than most groups' has no vote.

        Args:
            digests: of each worker; None: it said nothing.
            fetch: the vector of a worker; None: it does not come.
            reference: as for `run`.
            seed: as for `run`.
            step: as for `run`.
            limits: as for `run`.

        Raises:
            NoVoteError, ToleranceError, NonFiniteError: as for `run`.
        """
        self.check(len(digests))
        found = []
        for members in groups(len(digests), self.r, seed, step, fixed=self.fixed):
            vote = vote_by_digest([digests[worker] for worker in members], members)
            found.append(_fetched(vote, digests, fetch))
        sizes = collections.Counter(row.size for _, row in found if row is not None)
        length = max(sizes, key=sizes.__getitem__, default=0)
        votes, winners = [], []
        for vote, row in found:
            is_row = row is not None and row.size == length
            votes.append(vote if is_row else dataclasses.replace(vote, agreed=(), outvoted=()))
            if row is not None and is_row:
                winners.append(row)
        how = {"reference": reference, "seed": seed, "step": step, "limits": limits}
        return self._aggregate(len(digests), winners, votes, **how)

    def _aggregate(
        self, workers: int, winners: list[Floats], votes: list[Vote], **how: Any
    ) -> Result:
        if not winners:
            raise NoVoteError(votes)
        then = self.aggregator(workers, len(winners))
        # Liars that keep a group from agreeing could as well have owned it.
        missing = len(votes) - len(winners)
        return Result(then.run(winners, missing=missing, **how), tuple(votes))


def head(chosen: Any) -> str:
    """What stands before the rule in a text, of a `Detox` or of what else has its attributes."""
    told = f"r={chosen.r}, vote={chosen.vote}, buckets={chosen.buckets}, fixed={chosen.fixed}"
    if chosen.vote == TOLERANT:
        told += f", epsilon={EPSILON.shown(chosen.epsilon)}"
    if chosen.q is not None:
        told += f", q={chosen.q}"
    if chosen.full:
        told += ", full=True"
    return f"{NAME}({told})"


def groups(
    n: int, r: int, seed: int, step: int, *, fixed: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Who sits with whom: groups of r of n workers; the last is smaller where r does not divide n.

    Args:
        n: workers.
        r: workers of a group.
        seed: of the server.
        step: of the run.
        fixed: neighbours, whatever seed and step.
    """
    if n < 1 or r < 1:
        raise ValueError(f"`n` and `r` must be 1 or more. Received: n={n}, r={r}")
    order = list(range(n)) if fixed else secret_order(n, seed, step, "detox/groups")
    return tuple(tuple(sorted(order[first : first + r])) for first in range(0, n, r))


def sampling_seed(seed: int, step: int, group: int) -> int:
    """The seed with which all workers of a group choose their batch of a step, in [0, 2^64)."""
    return derive_seed(seed, f"detox/{step}/{group}")


def digest(row: Floats) -> bytes:
    """SHA-256 of a row's bytes: 32 bytes. 0 and -0 differ, as do rows of other length."""
    return hashlib.sha256(np.ascontiguousarray(row, np.float32).data).digest()


def vote_by_digest(digests: Sequence[bytes | None], members: Sequence[int]) -> Vote:
    """The vote of a group that has sent digests; who sends none counts as one of the group."""
    return _count([None if one is None else bytes(one) for one in digests], members)


def vote_exact(rows: Sequence[Floats], members: Sequence[int]) -> Vote:
    """The vote of a group on the bytes of its rows."""
    kinds: list[npt.NDArray[np.uint32]] = []
    said = []
    for row in rows:
        bits = np.ascontiguousarray(row, np.float32).view(np.uint32)
        same = (number for number, one in enumerate(kinds) if np.array_equal(bits, one))
        number = next(same, len(kinds))
        if number == len(kinds):
            kinds.append(bits)
        said.append(number)
    return _count(said, members)


def vote_tolerant(rows: Sequence[Floats], members: Sequence[int], epsilon: float = 1e-4) -> Vote:
    """The vote of replicas that round differently.

    Who agrees is within `epsilon` of the norm of one member, the one to whom most are that near; of
    several the first. The result is that member's row, which `agreed` begins with; whoever lies and
    agrees is within `epsilon` of it.
    """
    near: list[list[int]] = []
    for row in rows:
        radius = epsilon * float(np.linalg.norm(row.astype(np.float64)))
        if not math.isfinite(radius):
            near.append([])  # NaN agrees with nobody, itself included
            continue
        with np.errstate(all="ignore"):
            apart = [np.linalg.norm(row.astype(np.float64) - other) for other in rows]
        near.append([i for i, distance in enumerate(apart) if distance <= radius])
    centre = max(range(len(rows)), key=lambda i: (len(near[i]), -i))
    if 2 * len(near[centre]) <= len(rows):
        return Vote(tuple(members), (), ())
    agreed = [centre, *(i for i in near[centre] if i != centre)]
    others = tuple(members[i] for i in range(len(rows)) if i not in agreed)
    return Vote(tuple(members), tuple(members[i] for i in agreed), others)


def corrupt_groups(n: int, q: int, r: int) -> tuple[float, int]:
    """How many groups of r liars own, of q among n workers: on average, and placed at will.

    On average over groups that are drawn; a group is theirs when they are more than half of it.
    """
    if not 0 <= q <= n:
        raise ValueError(f"`q` must be in [0, n]. Received: q={q}, n={n}")
    expected = 0.0
    budget, worst = q, 0
    sizes = [len(one) for one in groups(n, r, 0, 0, fixed=True)]
    for size in sorted(sizes):
        needed = size // 2 + 1
        expected += sum(
            math.comb(q, k) * math.comb(n - q, size - k) for k in range(needed, min(q, size) + 1)
        ) / math.comb(n, size)
        if budget >= needed:
            budget, worst = budget - needed, worst + 1
    return expected, worst


def spoilt_groups(n: int, q: int, r: int) -> int:
    """How many groups q liars among n workers spoil at worst, placed at will.

    A group is spoilt when it says what they say, or has no majority: when half of it lies. The
    group that is left where r does not divide n is the cheapest.
    """
    if not 0 <= q <= n:
        raise ValueError(f"`q` must be in [0, n]. Received: q={q}, n={n}")
    spoilt = 0
    for size in sorted(len(one) for one in groups(n, r, 0, 0, fixed=True)):
        q -= (size + 1) // 2
        if q < 0:
            break
        spoilt += 1
    return spoilt


def draco(s: int) -> Detox:
    """DRACO's repetition code: groups of 2 s + 1, whose mean is exact whatever s of each send.

    2 s + 1 must divide the workers: s liars would be more than half of a smaller group.
    """
    if s < 0:
        raise ValueError(f"`s` must be 0 or more. Received: s={s}")
    return Detox(2 * s + 1, rules.mean(), fixed=True, full=True)


def approach(
    name: str,
    mode: str = "normal",
    *,
    group_size: int | None = None,
    worker_fail: int | None = None,
    bucket_size: int | None = None,
    vote: str | None = None,
    fixed: bool = False,
    compat: bool = False,
) -> Detox:
    """The options of the authors' code, `--approach`, `--mode`, `--group-size`, ..., and ours.

    Args:
        name: "baseline": no groups; "maj_vote": groups, and the mean of their votes; "detox" (also
            "draco_lite", "draco-lite"): groups, buckets, and a rule.
        mode: "normal" or any text of `parse`, their spellings ("coord-median", "sign-sgd")
            included; of "maj_vote" also "maj_vote".
        group_size: r; None: GROUP_SIZE.
        worker_fail: how many of all workers lie; f="auto" in the mode is then how many groups they
            can spoil at worst (`spoilt_groups`), without groups how many they are. The mean of
            "maj_vote" bears no spoilt group, so groups must be DRACO's, of 2 worker_fail + 1 or
            more; a smaller last one has fewer to outvote. None: the rule bears as many as it can.
        bucket_size: how many buckets at most; 0 or None: none.
        vote: how groups vote, one of VOTES; None: by digest.
        fixed: whether groups are neighbours, and stay.
        compat: fixed groups, and their form of Bulyan.

    Raises:
        ValueError: there is no such approach or mode, it has no groups or no buckets,
            `worker_fail` is negative, or it does not bear so many who lie: groups are too small for
            it, the mode says its own f or knows none, or without groups it never bears as many.
    """
    chosen = _APPROACH_ALIASES.get(name, name)
    if chosen not in APPROACHES:
        known = (*APPROACHES, *_APPROACH_ALIASES)
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ValueError(f"`approach` must be one of {', '.join(known)}{hint} Received: {name!r}")
    if worker_fail is not None and worker_fail < 0:
        raise ValueError(f"`worker_fail` must be 0 or more. Received: worker_fail={worker_fail}")
    if chosen != _DETOX and bucket_size:
        raise ValueError(
            f"buckets are of the approach detox. Received: bucket_size={bucket_size} with {name}"
        )
    if chosen == BASELINE and (vote is not None or fixed or group_size not in (None, 1)):
        raise ValueError(
            f"baseline has no groups that vote. Received: group_size={group_size}, vote={vote!r}, "
            f"fixed={fixed}"
        )
    group_size = GROUP_SIZE if group_size is None else group_size
    vote = DIGEST if vote is None else vote
    fixed = fixed or compat
    if chosen == MAJ_VOTE:
        if mode not in ("normal", "maj_vote"):
            raise ValueError(f"maj_vote takes the mean of the votes. Received: mode={mode!r}")
        if worker_fail is not None and group_size < 2 * worker_fail + 1:
            raise ValueError(
                "maj_vote takes the mean of the votes, which bears no spoilt group: `group_size` "
                f"must be at least 2 worker_fail + 1. Received: group_size={group_size}, "
                f"worker_fail={worker_fail}"
            )
        return Detox(group_size, rules.mean(), vote, fixed=fixed)
    then = parse(mode)
    if worker_fail is not None and not then.is_auto:
        raise ValueError(
            "`worker_fail` says what f=auto is in the mode, which has none. Received: "
            f"worker_fail={worker_fail} with {then}"
        )
    if compat and then.rule.name == "bulyan":
        theirs = tuple((dict(then.rule.params) | {"compat": 1}).items())
        then = Aggregator((*then.steps[:-1], Step("bulyan", theirs)))
    if chosen == BASELINE:
        try:
            return Detox(1, then if worker_fail is None else then.bearing(worker_fail))
        except ValueError as error:
            raise ValueError(f"{then} cannot bear f={worker_fail}: {error}") from error
    return Detox(group_size, then, vote, bucket_size or 0, fixed, q=worker_fail)


def check_compressor(detox: Detox, compressor: Compressor) -> None:
    """Raises ValueError where votes on packets of `compressor` could not agree.

    A residual is of one worker's history. Members of groups that are drawn anew have other ones,
    so honest packets differ; with fixed groups they are equal as long as nobody is late.
    """
    if detox.r > 1 and not detox.fixed and compressor.has_state:
        raise ValueError(
            "workers whose groups change must be compressed without error feedback or momentum: "
            f"their packets would differ. Received: {compressor.text}"
        )


def _count(said: Sequence[Hashable], members: Sequence[int]) -> Vote:
    """The strict majority of all members, those who say None included."""
    counts = collections.Counter(one for one in said if one is not None)
    absent = tuple(who for who, one in zip(members, said, strict=True) if one is None)
    winner = next((one for one, count in counts.items() if 2 * count > len(members)), None)
    if winner is None:
        return Vote(tuple(members), (), (), absent)
    agreed = tuple(who for who, one in zip(members, said, strict=True) if one == winner)
    others = tuple(who for who in members if who not in agreed and who not in absent)
    return Vote(tuple(members), agreed, others, absent)


def _fetched(
    vote: Vote, digests: Sequence[bytes | None], fetch: Callable[[int], Floats | None]
) -> tuple[Vote, Floats | None]:
    """The vector of the first of those who agreed that sends what it sent the digest of."""
    proven: list[int] = []
    for worker in vote.agreed:
        row = fetch(worker)
        if row is None:
            continue
        if row.dtype == np.float32 and row.ndim == 1 and digest(row) == digests[worker]:
            agreed = (worker, *(other for other in vote.agreed if other not in (worker, *proven)))
            return dataclasses.replace(vote, agreed=agreed, proven=tuple(proven)), row
        proven.append(worker)
    return dataclasses.replace(vote, agreed=(), outvoted=(), proven=tuple(proven)), None
