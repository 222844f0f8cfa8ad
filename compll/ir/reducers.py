# SPDX-License-Identifier: Apache-2.0
"""The accepted reducers and how a lambda is recognised as one of them.

A reducer must give the same result in any order on every back end, or in one fixed order that all
of them follow; only known reducers have that, so a lambda (a, b) is brought into a form (forms.py)
and refused when it is none of

    sum  a + b          max  a > b ? a : b      count  a + (b != 0)     and  a && b
    prod a * b          min  a < b ? a : b                              or   a || b

Where the spellings differ (NaN, -0), the named form counts.
"""

from compll.ir import nodes
from compll.ir.forms import Forms
from compll.ir.walk import free_vars

REDUCERS = ("sum", "prod", "min", "max", "count", "and", "or")
_SYMMETRIC = {"+": "sum", "*": "prod", "max": "max", "min": "min"}
_OF_CONDITIONS = {"&&": "and", "||": "or"}

# Neutral values that pad the last block of a reduction.
IDENTITY = {
    "sum": 0.0,
    "prod": 1.0,
    "max": float("-inf"),
    "min": float("inf"),
    "count": 0.0,
    "and": 1.0,
    "or": 0.0,
}


def recognise(function: nodes.Lambda) -> str | None:
    """The reducer that a lambda of two parameters computes, or None."""
    forms = Forms()
    total, item = map(forms.variable, function.params)
    found = forms.of_lambda(function)
    parts = set(found.parts)
    if found.op in _SYMMETRIC and parts == {total, item}:
        return _SYMMETRIC[found.op]
    if found.op in _OF_CONDITIONS and parts == {forms.condition(total), forms.condition(item)}:
        return _OF_CONDITIONS[found.op]
    return "count" if found.op == "+" and parts == {total, forms.condition(item)} else None


def behind_map(function: nodes.Lambda) -> str | None:
    """The reducer that would do behind a `map`: of a lambda (a, b) that is one of a and f(b)."""
    lets = {let.var: let.value for let in function.lets}
    body = _value(function.result, lets)
    if isinstance(body, nodes.Binary) and body.op in ("+", "*"):
        op, pair = body.op, (body.left, body.right)
    elif isinstance(body, nodes.Math) and body.function in ("max", "min"):
        op, pair = body.function, (body.arguments[0], body.arguments[1])
    else:
        return None
    total = function.params[0]
    for one, other in (pair, pair[::-1]):
        found = _value(one, lets)
        needed = free_vars(other)
        while not needed.isdisjoint(lets):
            needed = {
                v for var in needed for v in (free_vars(lets[var]) if var in lets else (var,))
            }
        if isinstance(found, nodes.Ref) and found.var == total and total not in needed:
            return _SYMMETRIC[op]
    return None


def _value(expr: nodes.Expr, lets: dict[nodes.Var, nodes.Expr]) -> nodes.Expr:
    while isinstance(expr, nodes.Ref) and expr.var in lets:
        expr = lets[expr.var]
    return expr


def order_of(function: nodes.Lambda) -> str | None:
    """`less` or `greater` where a lambda (a, b) compares its parameters so, else None."""
    forms = Forms()
    first, second = map(forms.variable, function.params)
    test = forms.condition(forms.of_lambda(function))
    if test.op != "<":
        return None
    return {(first, second): "less", (second, first): "greater"}.get((test.parts[0], test.parts[1]))
