# SPDX-License-Identifier: Apache-2.0
"""Walking over expressions: what is inside one, and which variables it needs."""

from collections.abc import Iterator
from dataclasses import fields

from compll.ir import nodes
from compll.ir.types import UInt


def children(expr: nodes.Expr) -> Iterator[nodes.Expr]:
    """The expressions directly inside an expression, in order; lambdas and lets are not entered."""
    for item in fields(expr):
        value = getattr(expr, item.name)
        if isinstance(value, nodes.Expr):
            yield value
        elif isinstance(value, tuple):
            yield from (part for part in value if isinstance(part, nodes.Expr))


def walk(expr: nodes.Expr) -> Iterator[nodes.Expr]:
    """An expression and all inside it, lets of Elementwise included; for inlined programs."""
    waiting = [expr]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children(found)
        if isinstance(found, nodes.Elementwise):
            waiting += [let.value for let in found.lets]


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
