# SPDX-License-Identifier: Apache-2.0
"""Between which numbers the integers of a loop are.

That follows from where they come from: codes, bits of a float, parameters.
"""

import math
from dataclasses import dataclass

from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Array, Type, UInt

_INT64 = (-(2**63), 2**63 - 1)


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`."""

    low: int
    high: int

    def __or__(self, other: "Range") -> "Range":
        """What holds both."""
        return Range(min(self.low, other.low), max(self.high, other.high))

    def is_within(self, low: int, high: int) -> bool:
        """Whether all of them are."""
        return low <= self.low and self.high <= high


class Ranges:
    """The ranges of expressions, as far as they are known."""

    def __init__(self, params: tuple[nodes.Param, ...]) -> None:
        """Knows those of the parameters."""
        self._of_params = {param.var: _of_param(param) for param in params}
        self._lets: list[nodes.Let] = []
        self._known: dict[nodes.Var, Range] = {}
        self._positive: set[nodes.Var] = set()

    def learn(self, let: nodes.Let) -> None:
        """Finds that of a variable."""
        self._lets.append(let)
        if self._is_positive(let.value):
            self._positive.add(let.var)
        found = self(let.value) if let.var.type == INT else None
        if found is not None:
            self._known[let.var] = found

    def where(self, param: nodes.Var, value: int) -> "Ranges":
        """What is known where a parameter has a value."""
        found = Ranges(())
        found._of_params = {**self._of_params, param: Range(value, value)}
        for let in self._lets:
            found.learn(let)
        return found

    def __call__(self, expr: nodes.Expr) -> Range | None:
        """That of a scalar that is no Float; None: it is not known, or 64 bits do not hold it."""
        found = self._found(expr)
        return found if found is not None and found.is_within(*_INT64) else None

    def _found(self, expr: nodes.Expr) -> Range | None:
        match expr:
            case nodes.Const() if expr.type in (INT, BOOL):
                return Range(int(expr.value), int(expr.value))
            case nodes.Convert(type=kind) if kind == INT:
                return self(expr.operand)
            case nodes.Ref() if expr.type == INT:
                return self._known.get(expr.var) or self._of_params.get(expr.var)
            case nodes.Unary() if expr.type == INT:
                return self._unary(expr)
            case nodes.Binary() if expr.type == INT:
                return self._binary(expr)
            case nodes.Select() if expr.type == INT:
                yes, no = self(expr.yes), self(expr.no)
                return yes | no if yes is not None and no is not None else None
            case nodes.Math() if expr.type == INT and expr.function in ("min", "max"):
                return self._bounded(expr)
            case nodes.Random() if expr.type == INT:
                low, high = self(expr.low), self(expr.high)
                if low is None or high is None or high.low <= low.high:
                    return None
                # The product of a wider span and the noise wraps (rng.h).
                is_wide = high.high - low.low > 1 << (63 - expr.bits)
                return None if is_wide else Range(low.low, high.high - 1)
            case nodes.Bitcast() if self._is_positive(expr.operand):
                return Range(0, 2**31 - 1)
        return _of_type(expr.type)

    def _is_positive(self, expr: nodes.Expr) -> bool:
        """Whether the sign of a Float is not set, if it is a number."""
        match expr:
            case nodes.Const() if expr.type == FLOAT:
                return math.copysign(1.0, expr.value) > 0
            case nodes.Ref():
                return expr.var in self._positive
            case nodes.Math(function="abs") if expr.type == FLOAT:
                return True
            case nodes.Binary(op="+" | "*" | "/") if expr.type == FLOAT:
                return self._is_positive(expr.left) and self._is_positive(expr.right)
            case nodes.Math(function="min" | "max") if expr.type == FLOAT:
                return all(map(self._is_positive, expr.arguments))
            case nodes.Select() if expr.type == FLOAT:
                return self._is_positive(expr.yes) and self._is_positive(expr.no)
        return False

    def _unary(self, expr: nodes.Unary) -> Range | None:
        found = self(expr.operand)
        if found is None:
            return None
        return Range(-found.high, -found.low) if expr.op == "-" else Range(~found.high, ~found.low)

    def _bounded(self, expr: nodes.Math) -> Range | None:
        first, second = map(self, expr.arguments)
        if first is None or second is None:
            return None
        choose = min if expr.function == "min" else max
        return Range(choose(first.low, second.low), choose(first.high, second.high))

    def _binary(self, expr: nodes.Binary) -> Range | None:
        x, y = self(expr.left), self(expr.right)
        highs = [side.high for side in (x, y) if side is not None and side.low >= 0]
        if expr.op == "&" and highs:
            return Range(0, min(highs))
        if x is None or y is None:
            return None
        match expr.op:
            case "+":
                return Range(x.low + y.low, x.high + y.high)
            case "-":
                return Range(x.low - y.high, x.high - y.low)
            case "*":
                ends = [a * b for a in (x.low, x.high) for b in (y.low, y.high)]
                return Range(min(ends), max(ends))
            case "&" | "|" | "^":
                ends = [end if end >= 0 else ~end for end in (x.low, x.high, y.low, y.high)]
                power = 1 << max(ends).bit_length()
                return Range(0 if len(highs) == 2 else -power, power - 1)
            case "<<" if x.low >= 0 and y.is_within(0, 63):
                return Range(x.low << y.low, x.high << y.high)
            case ">>" if y.is_within(0, 63):
                ends = [a >> b for a in (x.low, x.high) for b in (y.low, y.high)]
                return Range(min(ends), max(ends))
        return None


def _of_param(param: nodes.Param) -> Range | None:
    if param.var.type != INT and not isinstance(param.var.type, UInt):
        return None
    return Range(int(param.low), int(param.high))


def _of_type(kind: Type) -> Range | None:
    if kind == BOOL:
        return Range(0, 1)
    kind = kind.element if isinstance(kind, Array) else kind
    if not isinstance(kind, UInt):
        return None
    return Range(0, (1 << kind.bits) - 1) if isinstance(kind.bits, int) else Range(0, 2**16 - 1)
