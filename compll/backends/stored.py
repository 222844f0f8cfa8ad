# SPDX-License-Identifier: Apache-2.0
"""Vectors that loops read, and what loops ask of the expressions of their elements."""

from collections.abc import Callable
from dataclasses import dataclass

from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.types import FLOAT, Array
from compll.ir.walk import children


@dataclass(frozen=True)
class Stored:
    """A vector in memory: floats at a pointer (the gradient), or a field of the body.

    Attributes:
        var: what expressions call it.
        size: its length, and `count`: the C++ for it.
        pointer: C++ for its first element or byte.
        bits: C++ for the width of a code; None for floats.
        is_local: it holds the blocks of the tile that is worked on, and no others.
        is_cached: it holds the elements of the tile that is worked on, and no others.
        beyond: C++ for what is read where there is no such element; None: 0.
    """

    var: nodes.Var
    size: nodes.Expr
    count: str
    pointer: str
    is_field: bool
    bits: str | None
    is_local: bool = False
    is_cached: bool = False
    beyond: str | None = None


def is_of_floats(vector: Stored) -> bool:
    """Whether the elements of a vector are floats."""
    kind = vector.var.type
    return (kind.element if isinstance(kind, Array) else kind) == FLOAT


def is_in_memory(vector: Stored) -> bool:
    """Whether a vector is floats at a pointer, one for each element."""
    return is_of_floats(vector) and not vector.is_field and not vector.is_local


def parts_of(sweep: nodes.Sweep) -> list[nodes.Elementwise]:
    """The vectors that a sweep computes element by element."""
    elements: list[nodes.Expr] = [reduce.source for _, reduce in sweep.reduces]
    elements += [write.value for write in sweep.writes]
    return [part for part in elements if isinstance(part, nodes.Elementwise)]


def unnamed(part: nodes.Elementwise, value: nodes.Expr) -> nodes.Expr:
    """A value of a part without the names that it was given last."""
    named = {let.var: let.value for let in part.lets}
    while isinstance(value, nodes.Ref) and value.var in named:
        value = named[value.var]
    return value


def tile_bytes(bits: str, *, is_of_blocks: bool = False) -> str:
    """C++ for the bytes before a tile: tiles start at multiples of 8 codes.

    `is_of_blocks`: it is the blocks of a tile, which start anywhere; their codes are whole bytes.
    """
    if is_of_blocks and bits in ("16", "32"):
        return f"base * {int(bits) // 8}"
    return {"1": "base / 8", "8": "base"}.get(bits, f"base / 8 * {bits}")


def uses_position(
    part: nodes.Elementwise,
    blocks: tuple[nodes.Expr, ...],
    reads_in_order: Callable[[nodes.Var], bool],
    is_mirrored: Callable[[nodes.Index], bool],
) -> bool:
    """Whether the element's number is needed as a number, and not only to find the element.

    `blocks`: their sizes; `reads_in_order`: whether the loop's own element of a vector is found
    without its number; `is_mirrored`: whether an element of its group is.
    """
    position = part.position

    def needed(expr: nodes.Expr) -> bool:
        if isinstance(expr, nodes.Ref):
            return expr.var is position
        if isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
            if block_of(expr.index, position, blocks) is not None or is_mirrored(expr):
                return False
            is_here = isinstance(expr.index, nodes.Ref) and expr.index.var is position
            return not (is_here and reads_in_order(expr.array.var)) and needed(expr.index)
        if isinstance(expr, nodes.Random):
            is_here = isinstance(expr.position, nodes.Ref) and expr.position.var is position
            return needed(expr.low) or needed(expr.high) or (not is_here and needed(expr.position))
        return any(map(needed, children(expr)))

    return needed(part.value) or any(needed(let.value) for let in part.lets)
