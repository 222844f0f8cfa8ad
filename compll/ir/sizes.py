# SPDX-License-Identifier: Apache-2.0
"""Lengths of vectors, as expressions over parameters and the size of the gradient alone.

A packet's layout must be known before its contents are: `size_of` and `capacity_of` follow a vector
to its source and replace every variable by what it stands for. A vector whose length depends on
data, such as a Filter, has a capacity only.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from compll.ir import nodes
from compll.ir.types import INT
from compll.source import Span

MAX_NODES = 256
# Of vectors that are cut from vectors that are cut: each is a level of the expression.
_MAX_DEPTH = 32


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


def capacity_of(
    vector: nodes.Expr, lets: _Values, params: frozenset[nodes.Var], sizes: _Values
) -> nodes.Expr:
    """The largest number of elements that `vector` can have; arguments as for `size_of`."""
    return _Resolver(lets, params, sizes, math.inf, is_capacity=True).size(vector)


def scalar_of(
    value: nodes.Expr, lets: _Values, params: frozenset[nodes.Var], sizes: _Values
) -> nodes.Expr:
    """`value` over parameters and sizes alone; raises SizeError."""
    return _Resolver(lets, params, sizes, MAX_NODES).scalar(value)


def blocks_in(size: nodes.Expr, block: nodes.Expr) -> nodes.Expr:
    """Number of blocks of `block` elements that hold `size` elements."""
    span = size.span
    if isinstance(block, nodes.Const):
        rest: nodes.Expr = nodes.Const(INT, span, int(block.value) - 1)
    else:
        rest = nodes.Binary(INT, span, "-", block, nodes.Const(INT, span, 1))
    return nodes.Binary(INT, span, "/", nodes.Binary(INT, span, "+", size, rest), block)


# Of a larger multiple the length may wrap.
_LARGEST_WHOLE = 1 << 20


def is_as_long(size: nodes.Expr, least: nodes.Expr) -> bool:
    """Whether a length is seen to be another, or that rounded up to a multiple of a number."""
    match size:
        case nodes.Math(function="max"):
            return any(is_as_long(one, least) for one in size.arguments) or size == least
        case nodes.Binary(op="*", left=count, right=nodes.Const() as whole) if (
            0 < whole.value <= _LARGEST_WHOLE
        ):
            return count == blocks_in(least, whole) or size == least
        case _:
            return size == least


def _is_natural(count: nodes.Expr) -> bool:
    """Whether a length is seen not to be negative."""
    match count:
        case nodes.Size() | nodes.Const():  # literals have no sign
            return True
        case nodes.Math(function="max"):
            return any(map(_is_natural, count.arguments))
        case nodes.Math(function="min"):
            return all(map(_is_natural, count.arguments))
        case _:
            return False


class _Resolver:
    def __init__(
        self,
        lets: _Values,
        params: frozenset[nodes.Var],
        sizes: _Values,
        limit: float,
        is_capacity: bool = False,
    ) -> None:
        self._is_capacity = is_capacity
        self._depth = 0
        self._sizes = sizes
        self._lets = lets
        self._params = params
        self._left = limit

    def size(self, vector: nodes.Expr) -> nodes.Expr:
        # Chains of maps are long: a loop, not recursion.
        while True:
            if isinstance(vector, nodes.Map | nodes.Sort | nodes.Hadamard) or self._is_open(vector):
                vector = vector.source
            elif isinstance(vector, nodes.Ref) and vector.var in self._lets:
                vector = self._lets[vector.var]
            else:
                break
        match vector:
            case nodes.Elementwise():
                return self.scalar(vector.size)
            case nodes.Range():
                return self._count(vector.count)
            case nodes.Sample():
                return self._count(vector.count)
            case nodes.Scatter():
                return self._count(vector.size)
            case nodes.BlockReduce():
                return blocks_in(self.size(vector.source), self.scalar(vector.block))
            case nodes.TopK():
                return self._least(vector.count, vector.source)
            case nodes.Filter(limit=limit) if self._is_capacity and limit is not None:
                return self._least(limit, vector.source)
            case nodes.Ref() if vector.var in self._sizes:
                return self._sizes[vector.var]
            case nodes.Ref():
                return nodes.Size(INT, vector.span, vector)
            case _:
                raise DataDependentError(vector.span)

    def _is_open(self, vector: nodes.Expr) -> TypeGuard[nodes.Filter]:
        """Whether this is a filter that can hold as much as its source."""
        return self._is_capacity and isinstance(vector, nodes.Filter) and vector.limit is None

    def _count(self, count: nodes.Expr) -> nodes.Expr:
        count = self.scalar(count)
        zero = nodes.Const(INT, count.span, 0)
        if _is_natural(count):
            return count
        return nodes.Math(INT, count.span, "max", (count, zero))

    def _exact(self, size: nodes.Size) -> nodes.Expr:
        """The size of a vector that is asked for by name: a capacity will not do."""
        outer, self._is_capacity = self._is_capacity, False
        try:
            return self.size(size.array)
        except DataDependentError as error:
            raise DataDependentError(size.span) from error
        finally:
            self._is_capacity = outer

    def _least(self, count: nodes.Expr, source: nodes.Expr) -> nodes.Expr:
        if self._depth == _MAX_DEPTH:
            raise LongSizeError(source.span)
        self._depth += 1
        least = nodes.Math(INT, count.span, "min", (self._count(count), self.size(source)))
        self._depth -= 1
        return least

    def scalar(self, value: nodes.Expr) -> nodes.Expr:
        self._left -= 1
        if self._left < 0:
            raise LongSizeError(value.span)
        match value:
            case nodes.Const():
                return value
            case nodes.Size():
                return self._exact(value)
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
