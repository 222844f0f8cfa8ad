# SPDX-License-Identifier: Apache-2.0
"""What rows have an operation of their own for, and how specifications write it."""

from dataclasses import dataclass

import numpy as np

from compll.backends.stored import unnamed
from compll.ir import nodes
from compll.ir.float_ranges import is_number_or_0
from compll.ir.ranges import Ranges
from compll.ir.types import FLOAT, INT, UInt

_MOST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class FiniteSize:
    """`abs(x) <= most ? min(abs(x), cap) : 0`: the size of a number, 0 for NaN and infinities.

    Attributes:
        operand: x.
        cap: what sizes are held to, above 0; None: nothing.
    """

    operand: nodes.Expr
    cap: nodes.Const | None


def finite_size_of(part: nodes.Elementwise) -> FiniteSize | None:
    """What a part computes, if it is that."""
    match unnamed(part, part.value):
        case nodes.Select(
            condition=nodes.Binary(
                op="<=",
                left=nodes.Math(function="abs", arguments=(operand,)),
                right=nodes.Const(value=most),
            ),
            yes=size,
            no=nodes.Const(value=none),
        ) if operand.type == FLOAT and most == _MOST and str(float(none)) == "0.0":
            pass
        case _:
            return None
    match size:
        case nodes.Math(function="abs", arguments=(same,)) if same == operand:
            return FiniteSize(operand, None)
        case nodes.Math(
            function="min",
            arguments=(nodes.Math(function="abs", arguments=(same,)), nodes.Const() as cap),
        ) if same == operand and cap.value > 0:
            return FiniteSize(operand, cap)
    return None


@dataclass(frozen=True)
class Clamp:
    """`min(max(x, -bound), bound)` of a number x, where `bound` is above 0."""

    operand: nodes.Expr
    bound: nodes.Expr


def clamp_of(part: nodes.Elementwise, expr: nodes.Math, ranges: Ranges) -> Clamp | None:
    """What an expression is, if it is that."""
    match expr:
        case nodes.Math(
            function="min",
            arguments=(nodes.Math(function="max", arguments=(operand, low)), high),
        ):
            number = unnamed(part, operand)
            is_number = isinstance(number, nodes.Select) and is_number_or_0(number)
            is_pair = _is_negative_of(low, high) and _is_above_0(high, ranges)
            return Clamp(operand, high) if is_number and is_pair else None
    return None


def _is_negative_of(low: nodes.Expr, high: nodes.Expr) -> bool:
    match low, high:
        case nodes.Const(), nodes.Const():
            return low.value == -high.value
        case nodes.Convert(operand=inner), nodes.Convert(operand=same) if same.type == INT:
            # Of integers that are as far from 0 floats are, too; the least one has no other side.
            return isinstance(inner, nodes.Unary) and inner.op == "-" and inner.operand == same
    return False


def _is_above_0(bound: nodes.Expr, ranges: Ranges) -> bool:
    match bound:
        case nodes.Const():
            return bool(bound.value > 0)
        case nodes.Convert() if bound.operand.type == INT:
            found = ranges(bound.operand)
            return found is not None and found.low > 0
    return False


def is_code(expr: nodes.Expr) -> bool:
    """Whether it is a code as a number, which is no negative one."""
    if not isinstance(expr, nodes.Convert) or expr.type != INT:
        return False
    return isinstance(expr.operand.type, UInt)
