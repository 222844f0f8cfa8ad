# SPDX-License-Identifier: Apache-2.0
"""Reads of a value per block, so that loops find them once per block.

    let j = i / 64;  ... scales[j] ...              -->  ... scales[i / 64] ...
    ... tops[j / 256] ...                           -->  let t = tops[i / 64 / 256];  ... t ...
    0 <= j && j < (n + 63) / 64 ? f(top[j]) : 0     -->  f(top[i / 64])      for 0 <= i < n
    max((n + 63) / 64, 0)                           -->  (n + 63) / 64

`i` is the element's number and 64 a size of blocks: `v[i / 64]` is what back ends recognise. A
number of blocks that is no negative one is what `range(top.size)` gives.
"""

from dataclasses import replace

from compll.ir import nodes
from compll.ir.blocks import blocks_under
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
        sizes = tuple(size and _counted(size, known) for size in encode.sizes)
        encode = replace(encode, sizes=sizes)
    if decode is not None:
        result = _change(decode.result, known)
        items = tuple(
            replace(item, size=item.size and _counted(item.size, known)) for item in decode.fields
        )
        decode = replace(decode, fields=items, lets=_lets(decode.lets, known), result=result)
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
            return _counted(expr, known)


def _counted(expr: nodes.Expr, known: tuple[nodes.Expr, ...]) -> nodes.Expr:
    """A scalar in which numbers of blocks are not held to 0."""
    expr = rebuild(expr, lambda child: _counted(child, known))
    match expr:
        case nodes.Math(function="max", arguments=(count, nodes.Const(value=0))) if _is_count(
            count, known
        ):
            return count
    return expr


def _is_count(count: nodes.Expr, known: tuple[nodes.Expr, ...]) -> bool:
    """Whether this is the number of blocks of a vector, or of blocks of blocks."""
    match count:
        case nodes.Binary(op="/", left=nodes.Binary(left=size), right=block):
            is_block = block in known or (
                isinstance(block, nodes.Const) and block.value in nodes.BLOCKS
            )
            is_length = isinstance(size, nodes.Size) or _is_count(size, known)
            return is_block and is_length and count == blocks_in(size, block)
    return False


class _Part:
    """One vector while it is rewritten: its variables that number blocks."""

    def __init__(self, part: nodes.Elementwise, known: tuple[nodes.Expr, ...]) -> None:
        self._part = replace(part, size=_counted(part.size, known))
        self._known = known
        self._numbers: dict[nodes.Var, nodes.Expr] = {}
        self._lets: list[nodes.Let] = []
        self._read: dict[nodes.Index, nodes.Var] = {}

    def run(self) -> nodes.Elementwise:
        for let in self._part.lets:
            value = self._expr(_counted(let.value, self._known))
            number = self._number(value)
            if number is not None:
                self._numbers[let.var] = number
            self._lets.append(replace(let, value=value))
        value = self._expr(_counted(self._part.value, self._known))
        return replace(self._part, lets=tuple(self._lets), value=value)

    def _blocks(self, number: nodes.Expr) -> tuple[nodes.Expr, ...]:
        return blocks_under(number, self._part.position, self._known)

    def _expr(self, expr: nodes.Expr) -> nodes.Expr:
        if isinstance(expr, nodes.Select) and self._is_inside(expr.condition):
            return self._expr(expr.yes)
        expr = rebuild(expr, self._expr)
        if not isinstance(expr, nodes.Index):
            return expr
        number = self._number(expr.index)
        if number is None:
            return expr
        expr = replace(expr, index=number)
        return expr if len(self._blocks(number)) == 1 else self._named(expr)

    def _named(self, read: nodes.Index) -> nodes.Expr:
        """What is read per block of blocks, as a variable: these are found once per block."""
        var = self._read.get(read)
        if var is None:
            name = read.array.var.name if isinstance(read.array, nodes.Ref) else "read"
            var = self._read[read] = nodes.Var(name, read.type, read.span)
            self._lets.append(nodes.Let(var, read, read.span))
        return nodes.Ref(read.type, read.span, var)

    def _number(self, expr: nodes.Expr) -> nodes.Expr | None:
        """The number of a block, written out; None: it is something else."""
        expr = self._written(expr)
        return expr if self._blocks(expr) else None

    def _written(self, expr: nodes.Expr) -> nodes.Expr:
        if isinstance(expr, nodes.Ref):
            return self._numbers.get(expr.var, expr)
        if isinstance(expr, nodes.Binary) and expr.op == "/":
            return replace(expr, left=self._written(expr.left))
        return expr

    def _is_inside(self, condition: nodes.Expr) -> bool:
        """Whether this asks if a block's number is one of its vector's: it always is."""
        if not isinstance(condition, nodes.Binary) or condition.op != "&&":
            return False
        low, high = condition.left, condition.right
        if not isinstance(high, nodes.Binary) or high.op != "<":
            return False
        number = self._number(high.left)
        if number is None:
            return False
        count = self._part.size
        for block in self._blocks(number):
            count = blocks_in(count, block)
        zero = nodes.Const(INT, high.span, 0)
        return high.right == count and low == replace(high, op="<=", left=zero, right=high.left)
