# SPDX-License-Identifier: Apache-2.0
"""The untyped tree: what the parser saw, with names as strings and nothing decided.

file      = { block | function }
block     = name, fields: (type, name, low, high, default)*
function  = result type, name, parameters: (type, name)*, body: stmt*
stmt      = Declare | Assign | If | Return | Evaluate
expr      = Number | Name | Unary | Binary | Ternary | Index | Field | Call | Lambda
"""

from dataclasses import dataclass

from compll.source import Span


@dataclass(frozen=True, slots=True)
class Node:
    """Anything with a place in the text."""

    span: Span


@dataclass(frozen=True, slots=True)
class TypeName(Node):
    """A type as written: `uint<width>*` has name "uint", a width and is an array."""

    name: str
    width: "Expr | None"
    is_array: bool


@dataclass(frozen=True, slots=True)
class Expr(Node):
    """Any expression."""


@dataclass(frozen=True, slots=True)
class Number(Expr):
    """A literal; int and float are told apart by the Python type."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Name(Expr):
    """A variable, parameter, lambda or named reducer."""

    name: str


@dataclass(frozen=True, slots=True)
class Unary(Expr):
    """`-x`, `!x`, `~x`, `+x`."""

    op: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Binary(Expr):
    """`left op right`; `op` as written."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True)
class Ternary(Expr):
    """`condition ? yes : no`."""

    condition: Expr
    yes: Expr
    no: Expr


@dataclass(frozen=True, slots=True)
class Index(Expr):
    """`base[index]`."""

    base: Expr
    index: Expr


@dataclass(frozen=True, slots=True)
class Field(Expr):
    """`base.name`."""

    base: Expr
    name: str


@dataclass(frozen=True, slots=True)
class Call(Expr):
    """`name(arguments)` or `name<type>(arguments)`."""

    name: str
    name_span: Span
    type_argument: TypeName | None
    arguments: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Parameter(Node):
    """A typed parameter of a function or lambda; the span is that of the name."""

    type: TypeName
    name: str


@dataclass(frozen=True, slots=True)
class Lambda(Expr):
    """`[&](parameters) -> result { body }`."""

    parameters: tuple[Parameter, ...]
    result: TypeName
    body: tuple["Stmt", ...]


@dataclass(frozen=True, slots=True)
class Stmt(Node):
    """Any statement."""


@dataclass(frozen=True, slots=True)
class Declare(Stmt):
    """`type name = value;` or `type name;`; the span is that of the name."""

    type: TypeName
    name: str
    value: Expr | None


@dataclass(frozen=True, slots=True)
class Assign(Stmt):
    """`name = value;`; the span is that of the name."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class If(Stmt):
    """`if (condition) { yes } else { no }`."""

    condition: Expr
    yes: tuple[Stmt, ...]
    no: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Return(Stmt):
    """`return value;`."""

    value: Expr | None


@dataclass(frozen=True, slots=True)
class Evaluate(Stmt):
    """An expression as a statement; only `extract(...)` means something."""

    value: Expr


@dataclass(frozen=True, slots=True)
class Function(Node):
    """A function; the span is that of the name."""

    result: TypeName
    name: str
    parameters: tuple[Parameter, ...]
    body: tuple[Stmt, ...]
    end: Span


@dataclass(frozen=True, slots=True)
class ParamField(Node):
    """`type name in [low, high] = default;`; the span is that of the name."""

    type: TypeName
    name: str
    low: Number | None
    high: Number | None
    default: Number | None


@dataclass(frozen=True, slots=True)
class ParamBlock(Node):
    """`param Codec { fields }`; the span is that of the name."""

    name: str
    fields: tuple[ParamField, ...]


@dataclass(frozen=True, slots=True)
class StateField(Node):
    """`type name;`; the span is that of the name."""

    type: TypeName
    name: str


@dataclass(frozen=True, slots=True)
class StateBlock(Node):
    """`state Codec { fields }`; the span is that of the name."""

    name: str
    fields: tuple[StateField, ...]


@dataclass(frozen=True, slots=True)
class File(Node):
    """A whole specification."""

    blocks: tuple[ParamBlock, ...]
    states: tuple[StateBlock, ...]
    functions: tuple[Function, ...]
