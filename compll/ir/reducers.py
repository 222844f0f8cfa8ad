# SPDX-License-Identifier: Apache-2.0
"""The accepted reducers and how a lambda is recognised as one of them.

A reducer must give the same result in any order on every back end, or in one fixed order that all
of them follow; only known reducers have that, so a lambda (a, b) is reduced to a normal form and
refused when it is none of

    sum  a + b          max  a > b ? a : b      count  a + (b != 0)     and  a && b
    prod a * b          min  a < b ? a : b                              or   a || b

with operands in either order, `>=` for `>`, the arms exchanged under the opposite comparison, or
the built-in min and max. Where the spellings differ (NaN, -0), the normal form counts.
"""

from compll.ir import nodes
from compll.ir.types import BOOL, Type

REDUCERS = ("sum", "prod", "min", "max", "count", "and", "or")
_SYMMETRIC = {"+": "sum", "*": "prod", "&&": "and", "||": "or"}

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
    lets = {let.var: let.value for let in function.lets}
    first, second = function.params

    def plain(expr: nodes.Expr) -> nodes.Expr:
        while isinstance(expr, nodes.Ref) and expr.var in lets:
            expr = lets[expr.var]
        return expr

    def who(expr: nodes.Expr) -> nodes.Var | None:
        expr = plain(expr)
        return expr.var if isinstance(expr, nodes.Ref) else None

    def truth(expr: nodes.Expr) -> nodes.Expr:
        """What is behind a conversion from or to a condition."""
        expr = plain(expr)
        return (
            plain(expr.operand) if isinstance(expr, nodes.Convert) and BOOL in _ends(expr) else expr
        )

    def is_pair(left: nodes.Expr, right: nodes.Expr) -> bool:
        return {who(left), who(right)} == {first, second}

    def is_count_of_second(expr: nodes.Expr) -> bool:
        test = truth(expr)
        if not isinstance(test, nodes.Binary) or test.op != "!=" or who(test.left) is not second:
            return False
        zero = plain(test.right)
        while isinstance(zero, nodes.Convert):
            zero = plain(zero.operand)
        return isinstance(zero, nodes.Const) and zero.value == 0

    body = truth(function.result)
    if isinstance(body, nodes.Binary) and body.op in ("&&", "||"):
        return _SYMMETRIC[body.op] if is_pair(truth(body.left), truth(body.right)) else None
    if isinstance(body, nodes.Binary) and body.op in ("+", "*"):
        if is_pair(body.left, body.right):
            return _SYMMETRIC[body.op]
        is_count = body.op == "+" and who(body.left) is first and is_count_of_second(body.right)
        return "count" if is_count else None
    if (
        isinstance(body, nodes.Math)
        and body.function in ("min", "max")
        and is_pair(*body.arguments)
    ):
        return body.function
    if not isinstance(body, nodes.Select):
        return None
    test = plain(body.condition)
    if not isinstance(test, nodes.Binary) or test.op not in ("<", "<=", ">", ">="):
        return None
    if not is_pair(test.left, test.right) or not is_pair(body.yes, body.no):
        return None
    takes_left = who(test.left) is who(body.yes)
    return "max" if (test.op in (">", ">=")) == takes_left else "min"


def order_of(function: nodes.Lambda) -> str | None:
    """`less` or `greater` where a lambda (a, b) compares its parameters so, else None."""
    lets = {let.var: let.value for let in function.lets}
    first, second = function.params

    def plain(expr: nodes.Expr) -> nodes.Expr:
        while isinstance(expr, nodes.Ref | nodes.Convert):
            if isinstance(expr, nodes.Convert):
                # A narrower type would make different numbers equal; a condition is one already.
                if BOOL not in _ends(expr):
                    break
                expr = expr.operand
            elif expr.var in lets:
                expr = lets[expr.var]
            else:
                break
        return expr

    test = plain(function.result)
    if isinstance(test, nodes.Select):
        arms = plain(test.yes), plain(test.no)
        if [getattr(arm, "value", None) for arm in arms] != [1, 0]:
            return None
        test = plain(test.condition)
    if not isinstance(test, nodes.Binary) or test.op not in ("<", ">"):
        return None
    sides = [getattr(plain(side), "var", None) for side in (test.left, test.right)]
    if sides == [first, second]:
        return "less" if test.op == "<" else "greater"
    return {"<": "greater", ">": "less"}[test.op] if sides == [second, first] else None


def _ends(expr: nodes.Convert) -> tuple[Type, Type]:
    return expr.type, expr.operand.type
