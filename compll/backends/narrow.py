# SPDX-License-Identifier: Apache-2.0
"""Integers of 32 bits in loops, where those of 64 would hold the same numbers.

Int has 64 bits: a vector register holds half as many, and most machines lack instructions for them.
So the range of every number in a loop is found from where it comes from: codes, bits of a float,
parameters. Where it fits, and so do those that it is computed from, C++ computes in int32_t or
uint32_t.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from compll.ir import nodes
from compll.ir.ranges import Range, Ranges
from compll.ir.types import BOOL, INT, UInt

SIGNED, UNSIGNED = "int32_t", "uint32_t"
_LIMITS = {SIGNED: (-(2**31), 2**31 - 1), UNSIGNED: (0, 2**32 - 1)}


def holder(*ranges: Range | None) -> str | None:
    """The type of 32 bits that holds all numbers of some ranges; None: none does."""
    for kind, limits in _LIMITS.items():
        if all(found is not None and found.is_within(*limits) for found in ranges):
            return kind
    return None


@dataclass(frozen=True)
class Text:
    """C++ for a number of 32 bits; `kind`: its type."""

    text: str
    kind: str

    def as_a(self, kind: str) -> str:
        """The same in one of the types that hold it."""
        return self.text if kind == self.kind else f"static_cast<{kind}>({self.text})"


@dataclass(frozen=True)
class _Form:
    """A number of 32 bits that is not printed yet.

    Whether a number can be printed so is asked at each level of an expression. To print it, with
    the conditions in it, each time that it cannot be, took as long as there are paths through it.
    """

    kind: str
    text: Callable[[], str]

    def as_a(self, kind: str) -> str:
        """Text, in one of the types that hold it."""
        return Text(self.text(), self.kind).as_a(kind)


_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


class Printer(Protocol):
    """Prints expressions."""

    def __call__(self, expr: nodes.Expr, lowest: int = 0) -> str:
        """C++ text, in parentheses if it binds less tightly than `lowest`."""


class Narrow:
    """Prints what is computed with 32 bits in the loops of one function."""

    def __init__(
        self,
        ranges: Ranges,
        scalar: Printer,
        noise: Callable[[nodes.Random], str],
    ) -> None:
        """`scalar`: prints what has no 32 bits; `noise`: the random bits of an element."""
        self.ranges = ranges
        self._scalar, self._noise = scalar, noise
        self._names: dict[nodes.Var, Text] = {}

    def declared(self, let: nodes.Let, name: str) -> Text | None:
        """What a let of a loop is, if that has 32 bits; from then on `name` has that type."""
        found = self(let.value) if let.var.type == INT else None
        if found is not None:
            self._names[let.var] = Text(name, found.kind)
        return found

    def named(self, var: nodes.Var) -> Text | None:
        """The name of a variable that was declared with 32 bits; None: it was not."""
        return self._names.get(var)

    def __call__(self, expr: nodes.Expr) -> Text | None:
        """An Int; None: it needs 64 bits, or what it is computed from does."""
        found = self._form(expr)
        return None if found is None else Text(found.text(), found.kind)

    def compared(self, expr: nodes.Binary) -> tuple[str, str] | None:
        """Both sides of a comparison."""
        if expr.op not in _COMPARISONS or expr.left.type != INT:
            return None
        found = self._both(expr.left, expr.right, None)
        if found is None:
            return None
        left, right, kind = found
        return left.as_a(kind), right.as_a(kind)

    def _both(
        self, left: nodes.Expr, right: nodes.Expr, result: nodes.Expr | None
    ) -> tuple[_Form, _Form, str] | None:
        """Two numbers, and the type that holds both and their result; None: there is none."""
        ranges = [self.ranges(expr) for expr in (left, right, result) if expr is not None]
        kind, sides = holder(*ranges), (self._form(left), self._form(right))
        if kind is None or sides[0] is None or sides[1] is None:
            return None
        return sides[0], sides[1], kind

    def _form(self, expr: nodes.Expr) -> _Form | None:
        kind = holder(self.ranges(expr)) if expr.type == INT else None
        if kind is None:
            return None
        match expr:
            case nodes.Const():
                number = int(expr.value)
                # C++ has no literals below 0: what -2147483648 negates is 64 bits wide.
                text = str(number) if number > -(2**31) else f"({number + 1} - 1)"
                return _Form(kind, lambda: f"{text}{'u' * (kind == UNSIGNED)}")
            case nodes.Ref():
                name = self.named(expr.var)
                if name is not None:
                    return _Form(name.kind, lambda: name.text)
                return _Form(kind, lambda: f"static_cast<{kind}>({self._scalar(expr)})")
            case nodes.Convert(operand=inner) if inner.type == BOOL or isinstance(inner.type, UInt):
                return _Form(kind, lambda: f"static_cast<{kind}>({self._scalar(inner)})")
            case nodes.Unary(op="-"):
                inside = self._form(expr.operand)
                # An int32_t has no -(-2**31), and no 2**31 to be negated.
                is_signed = holder(self.ranges(expr.operand), self.ranges(expr)) == SIGNED
                if inside is None or not is_signed:
                    return None
                return _Form(SIGNED, lambda: f"(-{inside.as_a(SIGNED)})")
            case nodes.Binary(op="<<" | ">>"):
                return self._shifted(expr)
            case nodes.Binary() if expr.op in "+-*&|^":
                return self._joined(expr, expr.left, expr.right) or self._masked(expr)
            case nodes.Select():
                return self._joined(expr, expr.yes, expr.no)
            case nodes.Math() if expr.function in ("min", "max"):
                return self._joined(expr, *expr.arguments)
            case nodes.Random(bits=16, low=nodes.Const(value=begin), high=nodes.Const(value=end)):
                low, span = int(begin), int(end) - int(begin)
                if 0 < span <= 2**16 and kind == SIGNED:
                    return _Form(
                        SIGNED, lambda: f"random_int32({low}, {span}u, {self._noise(expr)})"
                    )
        return None

    def _masked(self, expr: nodes.Binary) -> _Form | None:
        """What a mask leaves of the low 32 bits of a number that has more, as hashes do."""
        for mask, value in ((expr.right, expr.left), (expr.left, expr.right)):
            if expr.op == "&" and isinstance(mask, nodes.Const) and holder(self.ranges(mask)):
                if mask.value < 0:
                    return None
                return self._masked_by(int(mask.value), value)
        return None

    def _masked_by(self, mask: int, value: nodes.Expr) -> _Form:
        return _Form(UNSIGNED, lambda: f"({self._low(value)} & {mask}u)")

    def _low(self, expr: nodes.Expr) -> str:
        """The low 32 bits of an Int, which the low ones of sums and products are made of."""
        found = self._form(expr)
        if found is not None:
            return found.as_a(UNSIGNED)
        match expr:
            case nodes.Const():
                return f"{int(expr.value) & 0xFFFFFFFF}u"
            case nodes.Binary() if expr.op in "+-*&|^":
                return f"({self._low(expr.left)} {expr.op} {self._low(expr.right)})"
            case nodes.Binary(op="<<", right=nodes.Const(value=by)) if 0 <= by < 32:
                return f"({self._low(expr.left)} << {int(by)})"
        return f"static_cast<{UNSIGNED}>({self._scalar(expr)})"

    def _joined(self, expr: nodes.Expr, left: nodes.Expr, right: nodes.Expr) -> _Form | None:
        """What an operator, a choice, a minimum or a maximum makes of two numbers."""
        found = self._both(left, right, expr)
        if found is None:
            return None
        one, two, kind = found

        def text() -> str:
            match expr:
                case nodes.Select():
                    condition = self._scalar(expr.condition, 2)
                    return f"({condition} ? {one.as_a(kind)} : {two.as_a(kind)})"
                case nodes.Math():
                    return f"{expr.function}imum({one.as_a(kind)}, {two.as_a(kind)})"
                case nodes.Binary():
                    return f"({one.as_a(kind)} {expr.op} {two.as_a(kind)})"
            raise TypeError(f"`expr` must join two numbers. Received: {expr!r}")

        return _Form(kind, text)

    def _shifted(self, expr: nodes.Binary) -> _Form | None:
        """By numbers from 0 to 31; of negative ones only to the right."""
        by, value, count = self.ranges(expr.right), self._form(expr.left), self._form(expr.right)
        kind = holder(self.ranges(expr.left), self.ranges(expr))
        if by is None or not by.is_within(0, 31) or value is None or count is None or kind is None:
            return None
        return _Form(kind, lambda: f"({value.as_a(kind)} {expr.op} {count.text()})")
