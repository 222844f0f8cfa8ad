# SPDX-License-Identifier: Apache-2.0
"""Lengths of vectors, as expressions over parameters and the size of the gradient alone.

A packet's layout must be known before its contents are, so a length may not depend on data:
`size_of` follows a vector to its source and replaces every variable by what it stands for, and
refuses anything else.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from compll.ir import nodes
from compll.ir.types import INT
from compll.source import Span

MAX_NODES = 256


class SizeError(Exception):
    """A length or width cannot be used; `span` says where."""

    def __init__(self, span: Span) -> None:
        """`span`: the part that is at fault."""
        super().__init__()
        self.span = span


class DataDependentError(SizeError):
    """It depends on data, so it cannot be known beforehand."""


class LongSizeError(SizeError):
    """It is made of more than MAX_NODES operations, written out over parameters."""


_Values = Mapping[nodes.Var, nodes.Expr]


def size_of(
    vector: nodes.Expr, lets: _Values, params: frozenset[nodes.Var], sizes: _Values
) -> nodes.Expr:
    """Number of elements of `vector`.

    `lets` gives the values of variables, `sizes` the lengths of extracted vectors.

    Raises:
        DataDependentError: the length depends on more than parameters and vectors' sizes.
    """
    # As long as the ranges it is made from, whose lengths `scalar_of` has limited.
    return _Resolver(lets, params, sizes, math.inf).size(vector)


def scalar_of(
    value: nodes.Expr, lets: _Values, params: frozenset[nodes.Var], sizes: _Values
) -> nodes.Expr:
    """`value` over parameters and sizes alone; raises SizeError."""
    return _Resolver(lets, params, sizes, MAX_NODES).scalar(value)


class _Resolver:
    def __init__(
        self, lets: _Values, params: frozenset[nodes.Var], sizes: _Values, limit: float
    ) -> None:
        self._sizes = sizes
        self._lets = lets
        self._params = params
        self._left = limit

    def size(self, vector: nodes.Expr) -> nodes.Expr:
        # Chains of maps are long: a loop, not recursion.
        while True:
            if isinstance(vector, nodes.Map):
                vector = vector.source
            elif isinstance(vector, nodes.Ref) and vector.var in self._lets:
                vector = self._lets[vector.var]
            else:
                break
        match vector:
            case nodes.Elementwise():
                return self.scalar(vector.size)
            case nodes.Range():
                count = self.scalar(vector.count)
                zero = nodes.Const(INT, vector.span, 0)
                is_clamped = isinstance(count, nodes.Math) and (
                    count.function == "max" and count.arguments[1] == zero
                )
                if isinstance(count, nodes.Size) or is_clamped:
                    return count
                return nodes.Math(INT, vector.span, "max", (count, zero))
            case nodes.Ref() if vector.var in self._sizes:
                return self._sizes[vector.var]
            case nodes.Ref():
                return nodes.Size(INT, vector.span, vector)
            case _:
                raise DataDependentError(vector.span)

    def scalar(self, value: nodes.Expr) -> nodes.Expr:
        self._left -= 1
        if self._left < 0:
            raise LongSizeError(value.span)
        match value:
            case nodes.Const():
                return value
            case nodes.Size():
                return self.size(value.array)
            case nodes.Ref() if value.var in self._lets:
                return self.scalar(self._lets[value.var])
            case nodes.Ref() if value.var in self._params:
                return value
            case nodes.Unary() | nodes.Convert() | nodes.Bitcast():
                return replace(value, operand=self.scalar(value.operand))
            case nodes.Binary():
                return replace(value, left=self.scalar(value.left), right=self.scalar(value.right))
            case nodes.Select():
                condition, yes, no = map(self.scalar, (value.condition, value.yes, value.no))
                return replace(value, condition=condition, yes=yes, no=no)
            case nodes.Math():
                return replace(value, arguments=tuple(map(self.scalar, value.arguments)))
            case _:
                raise DataDependentError(value.span)
