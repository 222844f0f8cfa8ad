# SPDX-License-Identifier: Apache-2.0
"""Expressions, names and indentation of C++: what back ends for C-like languages share.

Scalars are float, int64_t, bool, and uint8_t, uint16_t or uint32_t for UInt. Operators whose
meaning in C++ differs from CompLL's are calls of tf_hips/cc/runtime/convert.h. How a vector is read
and where noise comes from depends on the loop around, so the emitter of loops passes that in
(`Access`).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from compll.backends.c_names import RESERVED, is_reserved
from compll.backends.narrow import Narrow
from compll.ir import nodes
from compll.ir.ranges import Ranges
from compll.ir.types import BOOL, FLOAT, INT, MAX_PACKED_BITS, Type, UInt

_PRECEDENCE = {
    **{
        "?": 1,
        "||": 2,
        "&&": 3,
        "|": 4,
        "^": 5,
        "&": 6,
        "==": 7,
        "!=": 7,
        "<": 8,
        ">": 8,
        "<=": 8,
        ">=": 8,
    },
    **{"+": 10, "-": 10, "*": 11, "/": 11},
}
_UNARY, _ATOM = 12, 13
_INT_CALLS = {
    "+": "int_add",
    "-": "int_sub",
    "*": "int_mul",
    "/": "int_div",
    "%": "int_rem",
    "<<": "int_shl",
    ">>": "int_shr",
}


class Names:
    """C++ names of variables: each its own, none that C++ or the emitter uses."""

    def __init__(self) -> None:
        """No names yet."""
        self._names: dict[nodes.Var, str] = {}
        self._taken = set(RESERVED)

    def fork(self) -> "Names":
        """The same names for what has one; new variables get others than those of any fork."""
        other = Names()
        other._names = dict(self._names)
        other._taken = self._taken
        return other

    def fresh(self, wanted: str) -> str:
        """A name that nothing else has, as near to `wanted` as can be."""
        base = re.sub("_+", "_", wanted).strip("_") or "x"
        # Guards of headers end in `_`, as what is reserved does once it is renamed.
        if base[0].isdigit() or base.startswith("TF_HIPS_"):
            base = f"x{base}"
        if is_reserved(base):
            base += "_"
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}{number}"
        self._taken.add(name)
        return name

    def of(self, var: nodes.Var) -> str:
        """The name of a variable."""
        if var not in self._names:
            self._names[var] = self.fresh(var.name)
        return self._names[var]


def param_names(program: nodes.Program) -> dict[nodes.Var, str]:
    """Names of the parameters in the struct of all of them."""
    names = Names()
    return {param.var: names.of(param.var) for param in program.params}


class Lines:
    """Indented text."""

    def __init__(self, depth: int = 0) -> None:
        """No text yet."""
        self._lines: list[str | Lines] = []
        self._depth = depth

    def add(self, *lines: str) -> None:
        """Adds lines at the present depth; an empty one stays empty."""
        self._lines += [f"{'  ' * self._depth}{line}" if line else "" for line in lines]

    def open(self, line: str) -> None:
        """Adds a line that ends in `{`; what follows is indented."""
        self.add(line)
        self._depth += 1

    def open_later(self) -> "Lines":
        """As `open`, of lines that are said later."""
        found = self.later()
        self._depth += 1
        return found

    def close(self, line: str = "}") -> None:
        """Ends what `open` began."""
        self._depth -= 1
        self.add(line)

    def turn(self, line: str) -> None:
        """Ends what `open` began and begins the next, as in `} else {`."""
        self.close(line)
        self._depth += 1

    def later(self) -> "Lines":
        """Lines that are to be here, at the present depth, once it is known what they are."""
        self._lines.append(found := Lines(self._depth))
        return found

    def same_depth(self) -> "Lines":
        """No lines, at the present depth, that may become a part of these."""
        return Lines(self._depth)

    def include(self, lines: "Lines") -> None:
        """Adds what has been written apart."""
        self._lines.append(lines)

    def _flat(self) -> list[str]:
        return [
            line
            for part in self._lines
            for line in (part._flat() if isinstance(part, Lines) else [part])
        ]

    def text(self) -> str:
        """Everything, with a newline at the end."""
        return "\n".join(self._flat()) + "\n"


class Access(Protocol):
    """How the loop around an expression reads vectors and noise, and knows widths."""

    def index(self, array: nodes.Var, index: nodes.Expr, c: "Expressions") -> str:
        """Element `index` of a stored vector."""

    def noise(self, expr: nodes.Random, c: "Expressions") -> str:
        """The random bits of a call site for an element."""

    def width(self, kind: UInt) -> str:
        """Name of the Width of a type whose width depends on parameters."""


def max_bits(kind: UInt, params: tuple[nodes.Param, ...]) -> int:
    """The largest width a UInt can have, given the ranges of parameters."""
    if isinstance(kind.bits, int):
        return kind.bits
    expr = kind.bits
    # Other conversions may give more than what they are given: of -1 a uint8 makes 255.
    while isinstance(expr, nodes.Convert) and expr.type == INT:
        expr = expr.operand
    if isinstance(expr, nodes.Ref):
        for param in params:
            if param.var is expr.var:
                return min(MAX_PACKED_BITS, int(param.high))
    return MAX_PACKED_BITS


def c_type(kind: Type, params: tuple[nodes.Param, ...]) -> str:
    """The C++ type that holds a scalar."""
    if isinstance(kind, UInt):
        bits = max_bits(kind, params)
        return "uint8_t" if bits <= 8 else "uint16_t" if bits <= 16 else "uint32_t"
    return {FLOAT: "float", INT: "int64_t", BOOL: "bool"}[kind]


def float_literal(value: float) -> str:
    """A finite or infinite binary32 as C++."""
    if value in (float("inf"), float("-inf")):
        sign = "-" if value < 0 else ""
        return f"{sign}std::numeric_limits<float>::infinity()"
    text = f"{value:.9g}"
    return (text if "." in text or "e" in text else text + ".0") + "f"


def double_literal(value: float) -> str:
    """A binary64 as C++; short where the value is."""
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _constant(expr: nodes.Expr) -> float | None:
    """The value of a literal, converted or negated; None: it is something else."""
    match expr:
        case nodes.Const():
            return float(expr.value)
        case nodes.Convert(operand=operand) if expr.type == FLOAT:
            return _constant(operand)
        case nodes.Unary(op="-", operand=operand):
            value = _constant(operand)
            return None if value is None else -value
        case _:
            return None


def _is_unit(expr: nodes.Random) -> bool:
    """Whether it is a float from 0 to 1, which needs no sum: 0 is added to no -0."""
    ends = expr.low, expr.high
    return expr.type == FLOAT and [_constant(end) for end in ends] == [0, 1]


def int_literal(value: int) -> str:
    """An Int as C++."""
    if value == -(2**63):
        return "INT64_MIN"
    return f"INT64_C({value})" if abs(value) >= 2**31 else str(value)


@dataclass
class Expressions:
    """Turns expressions into C++ text.

    Attributes:
        names: of variables.
        access: how vectors and noise are read.
        params: of the program.
        sizes: C++ for the lengths of vectors.
        bound: C++ for a float that bounds others, in a minimum or a maximum.
        ranges: of the lets that are printed; None: nobody asks.
        narrow: prints numbers of 32 bits, in loops; None: all have 64.
        zero: name of a float 0 that the compiler does not know; empty: it may know. nvcc takes
            `x < 0.0f ? x : 0.0f` for its min.f32 and `x > -0.0f ? x : -0.0f` for its max.f32, to
            which -0 is less than 0. With another constant they are what is meant.
        is_nonzero: whether a float is known to be neither a zero nor NaN: as the second argument of
            a minimum or maximum that makes one instruction of it.
        divisor: C++ for what integers are divided by, where there is something faster; else None.
        is_number: whether a float is known not to be NaN, of which there are many bits.
    """

    names: Names
    access: Access
    params: tuple[nodes.Param, ...]
    sizes: dict[nodes.Var, str] = field(default_factory=dict)
    bound: Callable[[float], str] | None = None
    ranges: Ranges | None = None
    narrow: Narrow | None = None
    zero: str = ""
    is_nonzero: Callable[[nodes.Expr], bool] = lambda expr: False
    divisor: Callable[[nodes.Expr], str | None] = lambda expr: None
    is_number: Callable[[nodes.Expr], bool] = lambda expr: False

    def type(self, kind: Type) -> str:
        """The C++ type of a scalar."""
        return c_type(kind, self.params)

    def let(self, let: nodes.Let) -> str:
        """A let as a statement."""
        if self.ranges is not None:
            self.ranges.learn(let)
        name = self.names.of(let.var)
        found = self.narrow.declared(let, name) if self.narrow is not None else None
        if found is not None:
            return f"const {found.kind} {name} = {found.text};"
        return f"const {self.type(let.var.type)} {name} = {self(let.value)};"

    def __call__(self, expr: nodes.Expr, lowest: int = 0) -> str:
        """C++ text, in parentheses if it binds less tightly than `lowest`."""
        text, precedence = self._text(expr)
        return f"({text})" if precedence < lowest else text

    def _text(self, expr: nodes.Expr) -> tuple[str, int]:
        if not isinstance(expr, nodes.Const | nodes.Ref) and expr.type == INT:
            found = self._narrow(expr)
            if found is not None:
                return f"static_cast<int64_t>({found})", _ATOM
        match expr:
            case nodes.Const():
                return self._literal(expr)
            case nodes.Ref():
                narrow = self.narrow.named(expr.var) if self.narrow is not None else None
                if narrow is not None:
                    # C++ would take what is around it for unsigned as well.
                    return f"static_cast<int64_t>({narrow.text})", _ATOM
                return self.names.of(expr.var), _ATOM
            case nodes.Size(array=nodes.Ref(var=var)):
                return self.sizes[var], _ATOM
            case nodes.Unary():
                if expr.type == INT and expr.op == "-":
                    return f"int_neg({self(expr.operand)})", _ATOM
                return f"{expr.op}{self(expr.operand, _ATOM)}", _UNARY
            case nodes.Binary():
                return self._binary(expr)
            case nodes.Select():
                # clang++ warns of a bare `a & b ? c : d`.
                parts = self(expr.condition, 7), self(expr.yes, 2), self(expr.no, 1)
                return f"{parts[0]} ? {parts[1]} : {parts[2]}", 1
            case nodes.Convert():
                return self._convert(expr), _ATOM
            case nodes.Bitcast():
                function = "bits_float" if expr.type == FLOAT else "float_bits"
                if function == "float_bits" and self.is_number(expr.operand):
                    function = "number_bits"
                inside = self._narrow(expr.operand) or self(expr.operand)
                return f"{function}({inside})", _ATOM
            case nodes.KeyPart():
                return f"static_cast<int64_t>(key.{expr.name})", _ATOM
            case nodes.Math():
                return self._math(expr), _ATOM
            case nodes.Index(array=nodes.Ref(var=var)):
                return self.access.index(var, expr.index, self), _ATOM
            case nodes.Random():
                noise = self.access.noise(expr, self)
                if self.zero and _is_unit(expr):
                    return f"random_unit({noise})", _ATOM
                function = "random_int" if expr.type == INT else "random_float"
                function = function if expr.bits == 16 else f"wide_{function}"
                return f"{function}({self(expr.low)}, {self(expr.high)}, {noise})", _ATOM
            case _:
                raise TypeError(f"`expr` must be a scalar after inlining. Received: {expr!r}")

    def _narrow(self, expr: nodes.Expr) -> str | None:
        """A number of 32 bits; None: it has 64, or is no Int."""
        found = self.narrow(expr) if self.narrow is not None else None
        return None if found is None else found.text

    def _literal(self, expr: nodes.Const) -> tuple[str, int]:
        if expr.type == FLOAT:
            return float_literal(float(expr.value)), _ATOM if expr.value >= 0 else _UNARY
        if expr.type == BOOL:
            return "true" if expr.value else "false", _ATOM
        return int_literal(int(expr.value)), _ATOM if expr.value >= 0 else _UNARY

    def _binary(self, expr: nodes.Binary) -> tuple[str, int]:
        if expr.left.type == INT and expr.op in _INT_CALLS:
            divisor = self.divisor(expr.right) if expr.op == "/" else None
            by = self(expr.right) if divisor is None else divisor
            return f"{_INT_CALLS[expr.op]}({self(expr.left)}, {by})", _ATOM
        # Both sides are evaluated: with a branch between them, loops would not be vector code.
        op = {"&&": "&", "||": "|"}.get(expr.op, expr.op)
        precedence = _PRECEDENCE[op]
        # Mixed | and &, & and == read better, and compile without warnings, with parentheses.
        lowest = precedence if op in "+-*/" else 9
        sides = self.narrow.compared(expr) if self.narrow is not None else None
        if sides is not None:
            return f"{sides[0]} {op} {sides[1]}", precedence
        if expr.left.type == FLOAT and op in ("<", "<=", ">", ">="):
            return (
                f"{self._compared(expr.left, 9)} {op} {self._compared(expr.right, 9)}",
                precedence,
            )
        right = precedence + 1 if op in "+-*/" else 9
        left = self(expr.left, lowest)
        if op == "-" and expr.left.type == FLOAT and _constant(expr.left) == 0:
            # GCC 12 takes `0.0f - static_cast<float>(n)` for -n, which is -0 where n is 0.
            left = self._bounding(expr.left)
        return f"{left} {op} {self(expr.right, right)}", precedence

    def _compared(self, expr: nodes.Expr, lowest: int) -> str:
        """One side of a comparison that says which float is less."""
        return self.zero if self.zero and _constant(expr) == 0 else self(expr, lowest)

    def _bounding(self, expr: nodes.Expr) -> str:
        value = _constant(expr)
        if self.zero and value == 0 and expr.type == FLOAT:
            return f"-{self.zero}" if math.copysign(1, value) < 0 else self.zero
        if self.bound is not None and isinstance(expr, nodes.Const) and expr.type == FLOAT:
            return self.bound(float(expr.value))
        return self(expr)

    def _math(self, expr: nodes.Math) -> str:
        if expr.function in ("min", "max"):
            bounds = ", ".join(map(self._bounding, expr.arguments))
            if expr.type == FLOAT and self.is_nonzero(expr.arguments[1]):
                return f"bounded_{expr.function}({bounds})"
            return f"{expr.function}imum<{self.type(expr.type)}>({bounds})"
        arguments = ", ".join(map(self, expr.arguments))
        if expr.function == "abs" and expr.type == INT:
            return f"int_abs({arguments})"
        name = {
            "abs": "std::fabs",
            "round": "round_half_away",
            "sign": "sign_of",
            "exp2": "exp2_exact",
            "log2": "log2_exact",
        }.get(expr.function, f"std::{expr.function}")
        return f"{name}({arguments})"

    def _convert(self, expr: nodes.Convert) -> str:
        source, target = expr.operand.type, expr.type
        narrow = self._narrow(expr.operand)
        inner = self(expr.operand) if narrow is None else narrow
        if target == BOOL:
            return f"({self(expr.operand, 9) if narrow is None else narrow} != 0)"
        if isinstance(target, UInt):
            return self._to_uint(inner, source, target)
        if target == INT and source == FLOAT:
            return f"float_to_int({inner})"
        if target == FLOAT and isinstance(source, UInt) and max_bits(source, self.params) <= 16:
            # Through int32_t: there is a vector instruction for it on every machine.
            return f"static_cast<float>(static_cast<int32_t>({inner}))"
        return f"static_cast<{self.type(target)}>({inner})"

    def _to_uint(self, inner: str, source: Type, target: UInt) -> str:
        holder = self.type(target)
        if source == BOOL:
            return f"static_cast<{holder}>({inner})"
        if target.bits == 32:
            return (
                f"float_to_uint32({inner})"
                if source == FLOAT
                else f"static_cast<uint32_t>({inner})"
            )
        if isinstance(target.bits, int):
            top = (1 << target.bits) - 1
            limit, mask = f"{top}.0f", str(top)
        else:
            name = self.access.width(target)
            limit, mask = f"{name}.top", f"{name}.mask"
        if source == FLOAT and self.bound is not None:
            limit = self.bound(float(top)) if isinstance(target.bits, int) else limit
            limit = f"{limit}, {self.bound(0.0)}"
        if source == FLOAT:
            return f"static_cast<{holder}>(float_to_code({inner}, {limit}))"
        return f"static_cast<{holder}>(({inner}) & {mask})"
