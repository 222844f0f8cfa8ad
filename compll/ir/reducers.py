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


def order_of(function: nodes.Lambda) -> str | None:
    """`less` or `greater` where a lambda (a, b) compares its parameters so, else None."""
    forms = Forms()
    first, second = map(forms.variable, function.params)
    test = forms.condition(forms.of_lambda(function))
    if test.op != "<":
        return None
    return {(first, second): "less", (second, first): "greater"}.get((test.parts[0], test.parts[1]))
