# SPDX-License-Identifier: Apache-2.0
"""Aggregator: n rows of d floats in, one row out, of which f may lie.

    rows --> squares, distances --> refuse rows --> decide (n x n numbers) --> one pass --> vector

Rules of coordinates need no distances: they sort first, and again without the rows that turn out to
be refused. `measure` and `decide` are apart from the rest, so that servers with other parts of the
rows put their sums together and decide alike.

Invariants: the result is finite, or there is none: no element of a row that takes part is over
1e18, and all weights are those of means. Rows are never changed. Results do not depend on the
number of threads or shards. What is drawn comes from (seed, step).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tf_hips.errors import NonFiniteError, ToleranceError
from tf_hips.ops import native_robust
from tf_hips.ops.native import Doubles, Floats
from tf_hips.ops.native_robust import CoordinateRule
from tf_hips.robust import deciding
from tf_hips.robust.points import Points, only, points
from tf_hips.robust.rows import Limits, Rejected, Rows, as_rows, refused, totals
from tf_hips.robust.value import (
    AUTO,
    SHORTENING,
    PreAggregator,
    Step,
    check_steps,
    make_step,
    needs_pairs,
    parse_steps,
)

_MAX_REFERENCE = 1e18


@dataclasses.dataclass(frozen=True)
class Measures:
    """What a rule must know of rows, or of some chunks of them.

    Attributes:
        squares: sums of squares of the rows, [chunks, n].
        pairs: squared distances of each two, [chunks, n (n - 1) / 2].
    """

    squares: Doubles
    pairs: Doubles

    def joined(self, other: "Measures") -> "Measures":
        """Those of both servers' chunks."""
        return Measures(
            np.concatenate([self.squares, other.squares]), np.concatenate([self.pairs, other.pairs])
        )


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is left to do once distances are known.

    Attributes:
        accepted: numbers of the rows that take part.
        rejected: the others, with the reason.
        f: bad rows that the rule bears among those that take part.
        mixing: [m, accepted]: weighted sums of rows.
        coordinate: what then becomes of each coordinate of those sums, and `drop`; None: there is
            one sum, and it is the result.
        selected: numbers of the rows that the result is made of, where the rule chooses some.
    """

    accepted: tuple[int, ...]
    rejected: tuple[Rejected, ...]
    f: int
    mixing: Doubles
    coordinate: tuple[CoordinateRule, int] | None
    selected: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The result of a rule, and who had a part in it.

    Attributes:
        vector: the result, float32 [d]; finite.
        accepted: numbers of the rows that took part.
        rejected: the others, with the reason.
        f: bad rows that the rule bore among those that took part.
        selected: numbers of the rows that the result is made of, where the rule chooses some.
    """

    vector: Floats
    accepted: tuple[int, ...]
    rejected: tuple[Rejected, ...]
    f: int
    selected: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Aggregator:
    """A robust rule, with what is done to rows before it. A plain value; call it with rows.

    Attributes:
        steps: pre-aggregators, and one rule.

    Raises:
        ValueError: there is no rule at the end, or one before it.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        check_steps(self.steps)

    @property
    def text(self) -> str:
        """The text that `parse` turns into this value; the same for equal values."""
        return " >> ".join(step.text for step in self.steps)

    def __repr__(self) -> str:
        return self.text

    @property
    def rule(self) -> Step:
        """The last step."""
        return self.steps[-1]

    @property
    def is_coordinate(self) -> bool:
        """Whether parts of rows can be aggregated each by itself."""
        return len(self.steps) == 1 and (self.rule.kind.is_coordinate or self.rule.name == "mean")

    @property
    def is_bounded(self) -> bool:
        """Whether one row moves the result only so far; of a mean, if rows are shortened first."""
        return self.rule.name != "mean" or any(step.name in SHORTENING for step in self.steps)

    @property
    def is_auto(self) -> bool:
        """Whether a step bears as many bad rows as it can, and no number that was said."""
        return any(step.f == AUTO for step in self.steps)

    def bearing(self, f: int) -> "Aggregator":
        """This rule with f in the place of each "auto"."""
        return Aggregator(tuple(step.bearing(f) for step in self.steps))

    def check(self, n: int, missing: int = 0, of: int | None = None) -> int:
        """Looks whether n rows are enough, none of which is refused.

        Args:
            n: rows.
            missing: as for `run`.
            of: as for `run`.

        Returns:
            How many bad ones of them the rule bears, 0 for one that knows no f.

        Raises:
            ToleranceError: they are not; says the formula.
        """
        f = self._budgets(n, (), missing, of)[-1]
        if self.rule.name == "multi_krum":
            deciding.count_of(self.rule, self._counts(n)[-1], f)
        return f

    def budgets(self, n: int) -> tuple[int, ...]:
        """How many bad ones of n rows each step bears, the rule last; 0 for one that knows no f.

        Raises:
            ToleranceError: n rows are not enough; says the formula.
        """
        self.check(n)
        return tuple(self._budgets(n, (), 0))

    def bears(self, n: int) -> int | None:
        """How many bad ones of n rows all steps bear that know an f.

        None: no step knows one, or a mean at the end is of rows of any length, so that one of them
        moves the result anywhere.

        Raises:
            ToleranceError: n rows are not enough; says the formula.
        """
        pairs = zip(self.steps, self.budgets(n), strict=True)
        known = (f for step, f in pairs if step.f is not None and self.is_bounded)
        return min(known, default=None)

    def __call__(
        self,
        rows: Rows,
        *,
        reference: Floats | None = None,
        seed: int = 0,
        step: int = 0,
        limits: Limits | None = None,
    ) -> Floats:
        """Aggregates rows, and returns the result alone, float32 [d]; `run` says more of it.

        Args:
            rows: as for `run`, which see for the others, too.
            reference: where `centred_clipping` begins.
            seed: of the run.
            step: of the run.
            limits: what norms may be.

        Raises:
            ToleranceError, NonFiniteError, ValueError, TypeError: as for `run`.
        """
        return self.run(rows, reference=reference, seed=seed, step=step, limits=limits).vector

    def run(
        self,
        rows: Rows,
        *,
        reference: Floats | None = None,
        seed: int = 0,
        step: int = 0,
        limits: Limits | None = None,
        missing: int = 0,
        of: int | None = None,
        out: Floats | None = None,
    ) -> Aggregation:
        """Aggregates rows.

        Args:
            rows: n rows of d floats, as one array [n, d] or wherever they are; never changed.
            reference: where `centred_clipping` begins, the result before; None: with the row that
                is nearest to the others. Other rules do not look at it.
            seed: of the run; what `bucketing` draws comes from it. Secret from the rows' senders.
            step: of the run.
            limits: what norms may be; None: `Limits()`.
            missing: bad rows that are known already and not among `rows`; they count among the f.
            of: how many rows there could be, where some senders may choose to send none; f="auto"
                is at least 1 if that many rows bear a bad one. None: those here and `missing`.
            out: float32 [d] to write, none of the rows; made when None. New memory costs as much as
                sorting.

        Raises:
            ToleranceError: too few rows are left, or have come, or more than f were refused; or
                there are more than `max_rows`.
            NonFiniteError: the reference is not finite, or its norm over 1e18.
            ValueError, TypeError: there are no rows, or not all are of the same length.
        """
        given = as_rows(rows)
        self._check_most(len(given))
        bounds = limits if limits is not None else Limits()
        if self.rule.kind.is_coordinate and len(self.steps) == 1:
            return self._by_coordinate(given, bounds, missing, of, out)
        extra = self._reference(reference, given)
        measures = self.measure(given, reference=extra)
        decision = self.decide(
            measures,
            rows=given,
            seed=seed,
            step=step,
            limits=bounds,
            missing=missing,
            of=of,
            with_reference=bool(extra),
        )
        return self.apply(decision, given, reference=extra[0] if extra else None, out=out)

    @property
    def max_rows(self) -> int:
        """Rows that it takes at most. Where a rule begins is a row more in its passes."""
        return native_robust.MAX_ROWS - self._has_reference

    @property
    def _has_reference(self) -> bool:
        return self.rule.name == "centred_clipping"

    def measure(self, rows: Sequence[Floats], *, reference: Sequence[Floats] = ()) -> Measures:
        """What `decide` must know of rows, or of some chunks of them; one pass over memory.

        Args:
            rows: float32 arrays, as `as_rows` has them.
            reference: none, or where `centred_clipping` begins.
        """
        with np.errstate(all="ignore"):
            found = native_robust.distances([*rows, *reference], needs_pairs(self.steps))
        return Measures(*found)

    def decide(
        self,
        measures: Measures,
        *,
        rows: Sequence[Floats],
        seed: int = 0,
        step: int = 0,
        limits: Limits | None = None,
        missing: int = 0,
        of: int | None = None,
        with_reference: bool = False,
        known: Sequence[Rejected] = (),
    ) -> Decision:
        """Which rows take part, and with which weights.

        Args:
            measures: of all chunks of all rows.
            rows: as far as they are here; looked at for the element that is not finite.
            seed: as for `run`.
            step: as for `run`.
            limits: as for `run`.
            missing: as for `run`.
            of: as for `run`.
            with_reference: whether the last row of `measures` is the reference.
            known: rows that are refused for what `measures` do not show.

        Raises:
            ToleranceError: as for `run`.
            NonFiniteError: as for `run`.
        """
        squares, pairs = totals(measures.squares), totals(measures.pairs)
        n = len(squares) - with_reference
        if with_reference and not squares[-1] <= _MAX_REFERENCE**2:
            raise NonFiniteError(
                f"the reference must be finite and its norm at most {_MAX_REFERENCE:g}. Received: "
                f"norm {squares[-1] ** 0.5:g}"
            )
        found = refused(rows, squares[:n], limits if limits is not None else Limits())
        reasons = {one.row: one for one in (*known, *found)}
        rejected = tuple(reasons[row] for row in sorted(reasons))
        accepted = _accepted(n, rejected)
        where = [*accepted, *range(n, len(squares))]
        budgets = self._budgets(len(accepted), rejected, missing, of)
        if not pairs:
            pairs = [0.0] * (len(squares) * (len(squares) - 1) // 2)
        # A row that is refused may be at no finite distance: it goes before anything is computed.
        all_points = only(points(squares, pairs), where)
        mine = Points(np.eye(len(where), len(where) + 1), all_points.squared)
        num_rows = len(accepted)
        for one, f in zip(self.steps[:-1], budgets[:-1], strict=True):
            mine, num_rows = deciding.before(one, f, mine, num_rows, seed, step)
        coordinate, weights, chosen = deciding.of_rule(self.rule, budgets[-1], mine, num_rows)
        selected = None
        if chosen is not None:
            made_of = np.abs(mine.weights[chosen][:, : len(accepted)]).sum(axis=0)
            selected = tuple(accepted[i] for i in np.flatnonzero(made_of))
        mixing = np.einsum("ik,kj->ij", weights, mine.weights)[:, :-1]
        return Decision(accepted, rejected, budgets[-1], mixing, coordinate, selected)

    def apply(
        self,
        decision: Decision,
        rows: Sequence[Floats],
        *,
        reference: Floats | None = None,
        out: Floats | None = None,
    ) -> Aggregation:
        """Makes the result, or a shard's part of it; one pass over memory.

        Args:
            decision: of all rows.
            rows: float32 arrays, also those that do not take part.
            reference: as for `run`; None if there is none.
            out: as for `run`.
        """
        taking_part = [rows[i] for i in decision.accepted]
        taking_part += [] if reference is None else [reference]
        weights = decision.mixing.astype(np.float32)
        used = np.flatnonzero(weights.any(axis=0))
        # A row that nobody asks for need not be read.
        used = used if used.size else np.arange(1)
        kept, weights = [taking_part[i] for i in used], np.ascontiguousarray(weights[:, used])
        if decision.coordinate is None:
            vector = native_robust.mix(kept, weights, out)[0]
        else:
            rule, drop = decision.coordinate
            mixing = None if _picks(weights) else weights
            vector, _ = native_robust.coordinate(kept, rule, drop, mixing, out)
        return Aggregation(
            vector, decision.accepted, decision.rejected, decision.f, decision.selected
        )

    def _by_coordinate(
        self,
        rows: list[Floats],
        limits: Limits,
        missing: int,
        of: int | None,
        out: Floats | None,
    ) -> Aggregation:
        """A rule of coordinates: sorts, and sorts again if a row turns out to be refused."""
        # As if nobody were refused. What is not enough then may be enough without those who are, as
        # with the rules that look at distances: so it is judged when they are known.
        said = self.rule.most(len(rows) + missing) if self.rule.f == AUTO else int(self.rule["f"])
        first = min(max(said - missing, 0), (len(rows) - 1) // 2)
        rule = deciding.COORDINATE[self.rule.name]
        vector, squares = native_robust.coordinate(
            rows, rule, deciding.drop_of(rule, first), None, out
        )
        rejected = refused(rows, totals(squares), limits)
        accepted = _accepted(len(rows), rejected)
        f = self._budgets(len(accepted), rejected, missing, of)[0]
        if rejected:
            kept = [rows[i] for i in accepted]
            vector, _ = native_robust.coordinate(kept, rule, deciding.drop_of(rule, f), None, out)
        return Aggregation(vector, accepted, rejected, f, None)

    def _reference(self, reference: Floats | None, rows: list[Floats]) -> list[Floats]:
        if reference is None or not self._has_reference:
            return []
        return [as_rows([*rows[:1], reference])[1]]

    def _budgets(
        self, n: int, rejected: Sequence[Rejected], missing: int, of: int | None = None
    ) -> list[int]:
        """How many bad ones of n rows each step bears; those that are gone count.

        Raises:
            ToleranceError: n is too small for f, or more than f were refused; or f is "auto", and
                so few rows have come that it would be 0.
        """
        gone = len(rejected) + missing
        named = "; ".join([str(one) for one in rejected] + [f"{missing} missing"] * (missing > 0))
        refusals = f" ({gone} refused: {named})" if gone else ""
        if n == 0:
            raise ToleranceError(f"{self.text} needs n >= 1. Received: n=0{refusals}")
        self._check_most(n)
        budgets: list[int] = []
        of_rule: int | None = None  # what the rule at the end bears, if it takes an f
        whole_rule: int | None = None  # the same if all had a row
        most = max(of or 0, n + gone)
        numbers = (self._counts(one) for one in (n, n + gone, most))
        for step, count, given, whole in reversed(list(zip(self.steps, *numbers, strict=True))):
            if step.f is None:
                budgets.append(0)
                continue
            f = step.f
            if f == AUTO:
                # Of all rows that were given: else a liar more would be borne for each refused.
                f = max(step.most(given), 0)
                # Before a rule there is no use in bearing more than the rule does.
                f = f if of_rule is None else min(f, of_rule + gone)
                could = max(step.most(whole), 0)
                could = could if whole_rule is None else min(could, whole_rule)
                if not f and could:
                    # Who stays away says so itself: else whoever does not would own the result.
                    raise ToleranceError(
                        f"{step.formula} rows; f=auto bears {could} of {whole}, and none of those "
                        f"that have come. Received: n={given}{refusals}"
                    )
            if gone > f:
                said = "auto" if step.f == AUTO else str(f)
                of_whom = f", {f} of {given} rows" if step.f == AUTO else " bad rows"
                raise ToleranceError(
                    f"{self.text} bears f={said}{of_whom}. "
                    f"Received: {gone} that were refused: {named}"
                )
            most_left = step.most(count)
            f = min(f - gone, max(most_left, 0)) if step.f == AUTO else f - gone
            if f > most_left:
                raise ToleranceError(f"{step.formula} rows. Received: n={count}, f={f}{refusals}")
            budgets.append(f)
            if len(budgets) == 1:
                of_rule, whole_rule = f, could if step.f == AUTO else step.f
        return budgets[::-1]

    def _check_most(self, n: int) -> None:
        if n > self.max_rows:
            raise ToleranceError(f"{self.text} bears {self.max_rows} rows at most. Received: n={n}")

    def _counts(self, n: int) -> list[int]:
        """How many of n rows come to each step."""
        counts = []
        for step in self.steps:
            counts.append(n)
            n = -(-n // int(step["s"])) if step.name == "bucketing" else n
        return counts


def parse(text: str) -> Aggregator:
    """Turns a text such as "nnm(f=2) >> krum(f=2)" into what it names; nothing is evaluated.

    Spellings of DETOX ("coord-median", "sign-sgd", ...) are understood.

    Raises:
        ValueError: an unknown name, with the known ones and the nearest, or a wrong argument.
        TypeError: `text` is not a string.
    """
    return Aggregator(parse_steps(text))


def make(name: str, **params: int | float | str) -> Aggregator:
    """A rule by name."""
    return Aggregator((make_step(name, **params),))


def make_pre(name: str, **params: int | float | str) -> PreAggregator:
    """A pre-aggregator by name."""
    return PreAggregator((make_step(name, **params),))


def _accepted(n: int, rejected: Sequence[Rejected]) -> tuple[int, ...]:
    bad = {one.row for one in rejected}
    return tuple(row for row in range(n) if row not in bad)


def _picks(weights: Floats) -> bool:
    """Whether weighted sums are the rows themselves."""
    is_square = weights.shape[0] == weights.shape[1]
    return is_square and bool((weights == np.eye(len(weights), dtype=np.float32)).all())
