# SPDX-License-Identifier: Apache-2.0
"""Reads of a value per block, so that loops find them once per block.

    let j = i / 64;  ... scales[j] ...              -->  ... scales[i / 64] ...
    0 <= j && j < (n + 63) / 64 ? f(top[j]) : 0     -->  f(top[i / 64])      for 0 <= i < n

`i` is the element's number and 64 a size of blocks: `v[i / 64]` is what back ends recognise.
"""

from dataclasses import replace

from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.sizes import blocks_in
from compll.ir.types import INT
from compll.passes.inline import rebuild


def blocks(program: nodes.Program) -> nodes.Program:
    """Rewrites both functions; they have been folded."""
    encode, decode = program.encode, program.decode
    known = program.blocks
    if encode is not None:
        values = tuple(_change(value, known) for value in encode.values)
        encode = encode.with_values(_lets(encode.lets, known), values)
    if decode is not None:
        result = _change(decode.result, known)
        decode = replace(decode, lets=_lets(decode.lets, known), result=result)
    return replace(program, encode=encode, decode=decode)


def _lets(lets: tuple[nodes.Let, ...], known: tuple[nodes.Expr, ...]) -> tuple[nodes.Let, ...]:
    return tuple(replace(let, value=_change(let.value, known)) for let in lets)


def _change(expr: nodes.Expr, known: tuple[nodes.Expr, ...]) -> nodes.Expr:
    match expr:
        case nodes.Elementwise():
            return _Part(expr, known).run()
        case nodes.Reduce():
            return replace(expr, source=_change(expr.source, known))
        case _ if isinstance(expr, nodes.Kept):
            return rebuild(expr, lambda child: _change(child, known))
        case _:
            return expr


class _Part:
    """One vector while it is rewritten: its variables that number blocks."""

    def __init__(self, part: nodes.Elementwise, known: tuple[nodes.Expr, ...]) -> None:
        self._part = part
        self._known = known
        self._numbers: dict[nodes.Var, nodes.Expr] = {}

    def run(self) -> nodes.Elementwise:
        lets = []
        for let in self._part.lets:
            value = self._expr(let.value)
            if block_of(value, self._part.position, self._known) is not None:
                self._numbers[let.var] = value
            lets.append(replace(let, value=value))
        return replace(self._part, lets=tuple(lets), value=self._expr(self._part.value))

    def _expr(self, expr: nodes.Expr) -> nodes.Expr:
        if isinstance(expr, nodes.Select) and self._is_inside(expr.condition):
            return self._expr(expr.yes)
        expr = rebuild(expr, self._expr)
        if isinstance(expr, nodes.Index):
            number = self._number(expr.index)
            return expr if number is None else replace(expr, index=number)
        return expr

    def _number(self, expr: nodes.Expr) -> nodes.Expr | None:
        if isinstance(expr, nodes.Ref):
            return self._numbers.get(expr.var)
        return expr if block_of(expr, self._part.position, self._known) is not None else None

    def _is_inside(self, condition: nodes.Expr) -> bool:
        """Whether this asks if a block's number is one of its vector's: it always is."""
        if not isinstance(condition, nodes.Binary) or condition.op != "&&":
            return False
        low, high = condition.left, condition.right
        if not isinstance(high, nodes.Binary) or high.op != "<":
            return False
        number = self._number(high.left)
        if not isinstance(number, nodes.Binary):
            return False
        zero = nodes.Const(INT, high.span, 0)
        return low == replace(high, op="<=", left=zero, right=high.left) and high.right == (
            blocks_in(self._part.size, number.right)
        )
