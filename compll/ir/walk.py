# SPDX-License-Identifier: Apache-2.0
"""Walking over expressions: what is inside one, and which variables it needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from compll.ir import nodes
from compll.ir.types import UInt

# Of each kind of expression: to ask `dataclasses` each time took longer than all else.
_NAMES: dict[type[nodes.Expr], tuple[str, ...]] = {}


def _parts(expr: nodes.Expr) -> tuple[str, ...]:
    """Names of what may hold expressions."""
    found = _NAMES.get(type(expr))
    if found is None:
        found = tuple(item.name for item in fields(expr) if item.name not in ("type", "span"))
        _NAMES[type(expr)] = found
    return found


def children(expr: nodes.Expr) -> list[nodes.Expr]:
    """The expressions directly inside an expression, in order; lambdas and lets are not entered."""
    found: list[nodes.Expr] = []
    for name in _parts(expr):
        value = getattr(expr, name)
        if isinstance(value, nodes.Expr):
            found.append(value)
        elif isinstance(value, tuple):
            found += [part for part in value if isinstance(part, nodes.Expr)]
    return found


def walk(expr: nodes.Expr) -> Iterator[nodes.Expr]:
    """An expression and all inside it, lets of Elementwise included; for inlined programs."""
    waiting = [expr]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children(found)
        if isinstance(found, nodes.Elementwise):
            waiting += [let.value for let in found.lets]


def changed(expr: nodes.Expr, change: Callable[[nodes.Expr], nodes.Expr]) -> nodes.Expr:
    """An expression whose direct parts are changed; the same where there is none."""
    updates: dict[str, Any] = {}
    for name in _parts(expr):
        value = getattr(expr, name)
        if isinstance(value, nodes.Expr):
            updates[name] = change(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], nodes.Expr):
            updates[name] = tuple(map(change, value))
    return replace(expr, **updates) if updates else expr


def length_in_place(part: nodes.Elementwise) -> int:
    """Nodes of a value in which each name is replaced by what it stands for.

    It may be astronomic: names that each stand for something with the one before in it twice.
    """
    lengths: dict[nodes.Var, int] = {}
    for let in part.lets:
        lengths[let.var] = length_with(lengths, let.value)
    return length_with(lengths, part.value)


def length_with(lengths: Mapping[nodes.Var, int], expr: nodes.Expr) -> int:
    """Nodes of an expression in which each name counts as many as `lengths` says, or one."""
    return sum(
        lengths.get(inner.var, 1) if isinstance(inner, nodes.Ref) else 1 for inner in walk(expr)
    )


def free_vars(expr: nodes.Expr) -> set[nodes.Var]:
    """Variables that an expression needs from outside."""
    match expr:
        case nodes.Ref():
            return {expr.var}
        case nodes.Elementwise():
            inner = free_vars(expr.value)
            for let in reversed(expr.lets):
                inner = (inner - {let.var}) | free_vars(let.value)
            found = (inner - {expr.position}) | free_vars(expr.size)
        case _:
            found = set().union(*map(free_vars, children(expr)))
    if isinstance(expr.type, UInt) and isinstance(expr.type.bits, nodes.Expr):
        found = found | free_vars(expr.type.bits)
    return found


def is_same(a: nodes.Elementwise, b: nodes.Elementwise) -> bool:
    """Whether two vectors are computed in the same way, whatever their own variables are called."""
    return _is_same(a, b, {})


def _is_same(a: object, b: object, renamed: dict[object, object]) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, nodes.Var):
        return renamed.get(a, a) is b
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(lambda x, y: _is_same(x, y, renamed), a, b))
    if isinstance(a, nodes.Elementwise) and isinstance(b, nodes.Elementwise):
        renamed[a.position] = b.position
        return _is_same(a.size, b.size, renamed) and _same_rest(a, b, renamed)
    if isinstance(a, nodes.Let) and isinstance(b, nodes.Let):
        value = _is_same(a.value, b.value, renamed)
        renamed[a.var] = b.var
        return value and a.var.type == b.var.type
    if isinstance(a, nodes.Const) or not is_dataclass(a) or isinstance(a, type):
        return a == b
    names = [item.name for item in fields(a) if item.name != "span"]
    return all(_is_same(getattr(a, name), getattr(b, name), renamed) for name in names)


def _same_rest(a: nodes.Elementwise, b: nodes.Elementwise, renamed: dict[object, object]) -> bool:
    return _is_same(a.lets, b.lets, renamed) and _is_same(a.value, b.value, renamed)
