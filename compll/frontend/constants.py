# SPDX-License-Identifier: Apache-2.0
"""Values of expressions over numbers and parameters, as far as they are known while checking."""

from collections.abc import Mapping

from compll.ir import nodes, semantics
from compll.ir.functions import Value
from compll.ir.types import UInt
from compll.ir.walk import walk


def integer_of(expr: nodes.Expr) -> int | None:
    """The value of an Int expression that holds numbers only, as `uint<2 * 4>` does.

    None if it holds anything else; conversions and choices, too, stay in the IR and its hash.
    """
    kept = (nodes.Convert, nodes.Bitcast, nodes.Select)
    return None if any(isinstance(found, kept) for found in walk(expr)) else integer_with(expr, {})


def integer_with(expr: nodes.Expr, values: Mapping[nodes.Var, float]) -> int | None:
    """The value of an Int expression where variables have `values`; None if another is needed."""
    with semantics.quiet():
        value = _evaluate(expr, values)
    return None if value is None else int(value)


def _evaluate(expr: nodes.Expr, values: Mapping[nodes.Var, float]) -> Value | None:
    match expr:
        case nodes.Const():
            return semantics.constant(expr.value, expr.type)
        case nodes.Ref():
            value = values.get(expr.var)
            return None if value is None else semantics.constant(value, expr.type)
        case nodes.Unary() | nodes.Convert() | nodes.Bitcast():
            operand = _evaluate(expr.operand, values)
            return None if operand is None else _of_one(expr, operand)
        case nodes.Binary():
            left, right = _evaluate(expr.left, values), _evaluate(expr.right, values)
            if left is None or right is None:
                return None
            return semantics.binary(expr.op, left, right, expr.left.type)
        case nodes.Select():
            parts = [_evaluate(part, values) for part in (expr.condition, expr.yes, expr.no)]
            return None if any(part is None for part in parts) else semantics.select(*parts)
        case nodes.Math():
            parts = [_evaluate(argument, values) for argument in expr.arguments]
            return None if any(p is None for p in parts) else semantics.math(expr.function, parts)
        case _:
            return None


def _of_one(expr: nodes.Unary | nodes.Convert | nodes.Bitcast, operand: Value) -> Value | None:
    if isinstance(expr, nodes.Unary):
        return semantics.unary(expr.op, operand)
    if isinstance(expr, nodes.Bitcast):
        return semantics.bitcast(operand, expr.type)
    bits = expr.type.bits if isinstance(expr.type, UInt) else 0
    if not isinstance(bits, int):
        return None
    return semantics.convert(operand, expr.operand.type, expr.type, bits)
