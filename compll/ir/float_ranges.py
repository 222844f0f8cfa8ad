# SPDX-License-Identifier: Apache-2.0
"""Between which numbers the floats of a loop are, as far as that is known.

Rounding keeps order, so the ends of a result are those that the ends of its operands have, rounded
as the loop rounds. What is known of integers says ranges.py.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from compll.ir import nodes, semantics
from compll.ir.ranges import Range, Ranges
from compll.ir.types import FLOAT, INT, UInt

_MAX_WIDTHS = 32


@dataclass(frozen=True)
class FloatRange:
    """The numbers from `low` to `high`, both binary32; and NaN, if `has_nan`.

    `least`: no number but a zero is nearer to zero.
    """

    low: float = -np.inf
    high: float = np.inf
    has_nan: bool = True
    least: float = field(default=0.0, compare=False)

    @property
    def is_finite(self) -> bool:
        """Whether no infinity is among them."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high))

    @property
    def has_zero(self) -> bool:
        """Whether a zero is among them."""
        return self.low <= 0 <= self.high

    def __or__(self, other: "FloatRange") -> "FloatRange":
        """What holds both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        least = min(self._nearest(), other._nearest())
        return FloatRange(low, high, self.has_nan or other.has_nan, least)

    def _nearest(self) -> float:
        if self.low == self.high == 0:
            return np.inf
        return self.least if self.has_zero else min(abs(self.low), abs(self.high))


class FloatRanges:
    """Those of floats, as far as they follow from what has been learned."""

    def __init__(self, ranges: Ranges) -> None:
        """`ranges`: of integers."""
        self._ranges = ranges
        self._lets: dict[nodes.Var, FloatRange] = {}

    def learn(self, let: nodes.Let) -> None:
        """Finds that of a variable."""
        if let.var.type == FLOAT:
            self._lets[let.var] = self(let.value)

    def __call__(self, expr: nodes.Expr) -> FloatRange:
        """That of a float."""
        return _found(expr, self._lets, self._ranges)


def never_above_top(part: nodes.Elementwise, value: nodes.Convert, ranges: Ranges) -> bool:
    """Whether the float that a code is made of is below the first one that is no code.

    Codes need not be held to the largest one then. A width that is a parameter is taken for each
    value that the parameter can have, for what else depends on it.
    """
    if not isinstance(value.type, UInt):
        return False
    for bits, known in _widths(value.type, ranges):
        if not float_range(part, value.operand, known).high < 2.0**bits:
            return False
    return True


def is_whole_code(part: nodes.Elementwise, value: nodes.Convert, ranges: Ranges) -> bool:
    """Whether, besides, the float is a number from 0 on, and the code one of at most 16 bits."""
    if not isinstance(value.type, UInt):
        return False
    for bits, known in _widths(value.type, ranges):
        found = float_range(part, value.operand, known)
        if found.has_nan or found.low < 0 or bits > 16 or not found.high < 2.0**bits:
            return False
    return True


def is_nonzero(expr: nodes.Expr, ranges: Ranges) -> bool:
    """Whether a float that no lets of a loop are needed for is known to be no zero, and not NaN."""
    found = _found(expr, {}, ranges)
    return not found.has_nan and (found.low > 0 or found.high < 0)


def float_range(part: nodes.Elementwise, expr: nodes.Expr, ranges: Ranges) -> FloatRange:
    """That of a float that a part computes for each element."""
    lets: dict[nodes.Var, FloatRange] = {}
    # Each let once: expanded where they are used, chains of them would be exponentially long.
    for let in part.lets:
        if let.var.type == FLOAT:
            lets[let.var] = _found(let.value, lets, ranges)
    return _found(expr, lets, ranges)


def is_number_or_0(expr: nodes.Select) -> bool:
    """Whether it is `x == x ? x : 0`: 0 for NaN, and else the number that it is."""
    test, no = expr.condition, expr.no
    if not isinstance(test, nodes.Binary) or test.op != "==" or not isinstance(no, nodes.Const):
        return False
    refs = [e for e in (test.left, test.right, expr.yes) if isinstance(e, nodes.Ref)]
    is_one = len(refs) == 3 and all(e.var is refs[0].var for e in refs)
    return is_one and str(float(no.value)) == "0.0"


def is_unit(expr: nodes.Random) -> bool:
    """Whether noise is 16 bits from 0 to 1."""
    low, high = expr.low, expr.high
    if not isinstance(low, nodes.Const) or not isinstance(high, nodes.Const):
        return False
    return expr.bits == 16 and low.value == 0 and high.value == 1


def _found(expr: nodes.Expr, lets: dict[nodes.Var, FloatRange], ranges: Ranges) -> FloatRange:
    match expr:
        case nodes.Ref() if expr.var in lets:
            return lets[expr.var]
        case nodes.Const() if expr.type == FLOAT:
            return FloatRange(expr.value, expr.value, bool(np.isnan(expr.value)))
        case nodes.Convert() if expr.operand.type != FLOAT:
            return _of_integers(ranges(expr.operand))
        case nodes.Random() if is_unit(expr):
            return FloatRange(0.0, 1 - 2.0**-16, has_nan=False)
        case nodes.Unary(op="-"):
            found = _found(expr.operand, lets, ranges)
            return FloatRange(-found.high, -found.low, found.has_nan)
        case nodes.Select() if is_number_or_0(expr):
            found = _found(expr.yes, lets, ranges)
            return FloatRange(min(found.low, 0.0), max(found.high, 0.0), has_nan=False)
        case nodes.Select() if expr.type == FLOAT:
            yes = _found(expr.yes, _where(expr.condition, lets, is_met=True), ranges)
            return yes | _found(expr.no, _where(expr.condition, lets, is_met=False), ranges)
        case nodes.Binary(op="+" | "-" | "*" | "/") if expr.type == FLOAT:
            x, y = (_found(side, lets, ranges) for side in (expr.left, expr.right))
            return _of_sides(expr.op, x, y)
        case nodes.Math(function="min" | "max"):
            x, y = (_found(side, lets, ranges) for side in expr.arguments)
            return _of_bounds(expr.function, x, y)
        case nodes.Math(function="abs"):
            x = _found(expr.arguments[0], lets, ranges)
            ends = abs(x.low), abs(x.high)
            return FloatRange(0.0 if x.has_zero else min(ends), max(ends), x.has_nan, x.least)
    return FloatRange()


def _where(
    condition: nodes.Expr, lets: dict[nodes.Var, FloatRange], *, is_met: bool
) -> dict[nodes.Var, FloatRange]:
    """What is known where a variable is compared with a number, and that is met, or is not."""
    match condition:
        case nodes.Binary(
            op="<" | "<=" | ">" | ">=", left=nodes.Ref(var=var), right=nodes.Const(value=value)
        ) if var in lets:
            known, bound = lets[var], np.float32(value)
        case _:
            return lets
    op: str = condition.op
    if not is_met:
        op = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[op]
    low, high = known.low, known.high
    with semantics.quiet():
        if op == "<":
            high = min(high, float(np.nextafter(bound, np.float32(-np.inf))))
        elif op == "<=":
            high = min(high, float(bound))
        elif op == ">":
            low = max(low, float(np.nextafter(bound, np.float32(np.inf))))
        else:
            low = max(low, float(bound))
    if low > 0:
        low = max(low, known.least)
    # NaN meets nothing. Where no number is left, nothing is said.
    found = FloatRange(low, high, known.has_nan and not is_met, known.least)
    return lets if low > high else {**lets, var: found}


def _widths(kind: UInt, ranges: Ranges) -> Iterator[tuple[int, Ranges]]:
    """Each width that codes can have, and what is known where they have it."""
    if isinstance(kind.bits, int):
        yield kind.bits, ranges
        return
    bits = kind.bits
    # What a conversion to fewer bits leaves is another width.
    while isinstance(bits, nodes.Convert) and bits.type == INT:
        bits = bits.operand
    found = ranges(bits)
    if not isinstance(bits, nodes.Ref) or found is None or found.high - found.low >= _MAX_WIDTHS:
        # Nothing is below a code of no bits that has no least value.
        yield 0, ranges
        return
    for width in range(found.low, found.high + 1):
        yield width, ranges.where(bits.var, width)


def _of_integers(found: Range | None) -> FloatRange:
    if found is None:
        return FloatRange(has_nan=False)
    low, high = (float(np.int64(end).astype(np.float32)) for end in (found.low, found.high))
    return FloatRange(low, high, has_nan=False)


def _of_sides(op: str, x: FloatRange, y: FloatRange) -> FloatRange:
    # Infinities of which one could be taken from another, or be multiplied by a zero; and zeros by
    # which something could be divided.
    if op == "/":
        is_unknown = not x.is_finite or not y.low > 0
    elif op == "*":
        is_unknown = any(a.has_zero and not b.is_finite for a, b in ((x, y), (y, x)))
    else:
        is_unknown = not (x.is_finite or y.is_finite)
    if is_unknown:
        return FloatRange()
    with semantics.quiet():
        ends = [
            float(semantics.binary(op, np.float32(a), np.float32(b), FLOAT))
            for a, b in itertools.product((x.low, x.high), (y.low, y.high))
        ]
    return FloatRange(min(ends), max(ends), x.has_nan or y.has_nan)


def _of_bounds(function: str, x: FloatRange, y: FloatRange) -> FloatRange:
    """The second operand is what NaN gives, on either side."""
    choose = min if function == "min" else max
    low, high = choose(x.low, y.low), choose(x.high, y.high)
    if x.has_nan:
        low, high = min(low, y.low), max(high, y.high)
    return FloatRange(low, high, y.has_nan)
