# SPDX-License-Identifier: Apache-2.0
"""Values of expressions that hold numbers only, as `uint<2 * 4>` needs them while it is checked."""

from compll.ir import nodes, semantics


def integer_of(expr: nodes.Expr) -> int | None:
    """The value of an Int expression that holds numbers only; None if it holds anything else."""
    with semantics.quiet():
        value = _evaluate(expr)
    return None if value is None else int(value)


def _evaluate(expr: nodes.Expr) -> semantics.Value | None:
    match expr:
        case nodes.Const():
            return semantics.constant(expr.value, expr.type)
        case nodes.Unary():
            operand = _evaluate(expr.operand)
            return None if operand is None else semantics.unary(expr.op, operand)
        case nodes.Binary():
            left, right = _evaluate(expr.left), _evaluate(expr.right)
            if left is None or right is None:
                return None
            return semantics.binary(expr.op, left, right, expr.left.type)
        case nodes.Math():
            values = [_evaluate(argument) for argument in expr.arguments]
            return None if None in values else semantics.math(expr.function, values)
        case _:
            return None
