# SPDX-License-Identifier: Apache-2.0
"""A program for each value of a parameter that says how wide codes are, if it has few.

    bits == 4 ? 0.26 : 0.98            -->  0.98          where bits is 2
    uint<bits>                         -->  uint2
    abs(code - 1.5) > 2 ? high : low   -->  low           of a code of two bits

What tables of levels cost is a choice for each level that some value of the parameter has; where
the value is known, no more are left than that value has. A comparison goes where ranges decide it
(ir/ranges.py). What is specialised computes the same bits as its program does with that value, and
its packets are the same, so its plan carries the same hash.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from compll.ir import nodes
from compll.ir.float_ranges import FloatRange, FloatRanges
from compll.ir.ranges import Range, Ranges
from compll.ir.types import BOOL, FLOAT, INT, MAX_PACKED_BITS, UInt
from compll.ir.walk import changed
from compll.ir.widths import width_param
from compll.passes.dead import dead
from compll.passes.fold import fold, folded
from compll.source import Span

MOST_VALUES = 4
"""For a parameter that has more nothing is specialised: what is compiled grows by as many times."""
_OPPOSITES = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


@dataclass(frozen=True)
class Programs:
    """Programs by value of a parameter."""

    param: nodes.Param
    programs: dict[int, nodes.Program]


def specialise(program: nodes.Program) -> Programs | None:
    """Specialises a program without values that nobody reads; None: there is no such parameter."""
    param = width_param(program, MOST_VALUES)
    if param is None:
        return None
    found = {}
    for value in range(int(param.low), int(param.high) + 1):
        known = _Known(param.var, value)
        if known.is_possible(program):
            found[value] = _specialised(program, known)
    return Programs(param, found) if found else None


def _specialised(program: nodes.Program, known: "_Known") -> nodes.Program:
    # Types first: a range is that of a type.
    program = fold(known.program(program))
    return dead(fold(_Decided(program.params).program(program)))


class _Known:
    """Writes a number where a parameter is read, in types, too."""

    def __init__(self, param: nodes.Var, value: int) -> None:
        self._param = param
        self._value = value
        self._vars: dict[nodes.Var, nodes.Var] = {}

    def is_possible(self, program: nodes.Program) -> bool:
        """Whether widths and blocks may be what they are then; else calls are refused."""
        widths = [kind.bits for kind in map(self, program.widths)]
        blocks = [folded(self(block)) for block in program.blocks]
        return all(
            1 <= bits <= MAX_PACKED_BITS for bits in widths if isinstance(bits, int)
        ) and all(block.value in nodes.BLOCKS for block in blocks if isinstance(block, nodes.Const))

    def program(self, program: nodes.Program) -> nodes.Program:
        """Both functions; parameters, and what a call is checked for, stay."""
        encode, decode = self(program.encode), self(program.decode)
        return replace(program, encode=encode, decode=decode)

    def __call__(self, item: Any) -> Any:
        match item:
            case nodes.Ref() if item.var is self._param:
                return nodes.Const(item.type, item.span, self._value)
            case nodes.Var():
                return self._var(item)
            case UInt(bits=nodes.Expr() as bits):
                width = folded(self(bits))
                return UInt(int(width.value)) if isinstance(width, nodes.Const) else item
            case tuple():
                return tuple(map(self, item))
            case Span():
                return item
            case _ if is_dataclass(item) and not isinstance(item, type):
                return replace(item, **{f.name: self(getattr(item, f.name)) for f in fields(item)})
            case _:
                return item

    def _var(self, var: nodes.Var) -> nodes.Var:
        """The variable of the same, another one where its type is."""
        if var not in self._vars:
            kind = self(var.type)
            self._vars[var] = var if kind == var.type else replace(var, type=kind)
        return self._vars[var]


class _Decided:
    """Writes what comes of a comparison where the ranges of its sides leave one answer."""

    def __init__(self, params: tuple[nodes.Param, ...]) -> None:
        self._integers = Ranges(params)
        self._floats = FloatRanges(self._integers)

    def program(self, program: nodes.Program) -> nodes.Program:
        """Both functions; no variable is one of both."""
        encode, decode = program.encode, program.decode
        if encode is not None:
            lets = self._lets(encode.lets)
            encode = encode.with_values(lets, tuple(map(self, encode.values)))
        if decode is not None:
            lets = self._lets(decode.lets)
            decode = replace(decode, lets=lets, result=self(decode.result))
        return replace(program, encode=encode, decode=decode)

    def _lets(self, lets: tuple[nodes.Let, ...]) -> tuple[nodes.Let, ...]:
        made = []
        for let in lets:
            made.append(replace(let, value=self(let.value)))
            self._integers.learn(made[-1])
            self._floats.learn(made[-1])
        return tuple(made)

    def __call__(self, expr: nodes.Expr) -> nodes.Expr:
        if isinstance(expr, nodes.Elementwise):
            lets = self._lets(expr.lets)
            return replace(expr, size=self(expr.size), lets=lets, value=self(expr.value))
        expr = changed(expr, self)
        if isinstance(expr, nodes.Binary) and expr.op in _OPPOSITES:
            answer = self._answer(expr)
            return expr if answer is None else nodes.Const(BOOL, expr.span, answer)
        return expr

    def _answer(self, expr: nodes.Binary) -> bool | None:
        """What every pair of numbers that the sides can be gives; None: pairs differ."""
        if self._is_met(expr.op, expr.left, expr.right):
            return True
        # NaN meets no comparison, so it need not be excluded where the opposite is met.
        return False if self._is_met(_OPPOSITES[expr.op], expr.left, expr.right, nan=True) else None

    def _is_met(self, op: str, left: nodes.Expr, right: nodes.Expr, *, nan: bool = False) -> bool:
        """Whether all numbers of both sides meet it; `nan`: whatever else is among them."""
        x, y = self._range(left), self._range(right)
        if x is None or y is None:
            return False
        has_nan = any(isinstance(side, FloatRange) and side.has_nan for side in (x, y))
        if has_nan and not nan:
            return False
        match op:
            case "<":
                return x.high < y.low
            case "<=":
                return x.high <= y.low
            case ">":
                return x.low > y.high
            case _:
                return x.low >= y.high

    def _range(self, expr: nodes.Expr) -> Range | FloatRange | None:
        if expr.type == FLOAT:
            return self._floats(expr)
        return self._integers(expr) if expr.type == INT else None
