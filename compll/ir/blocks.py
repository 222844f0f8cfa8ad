# SPDX-License-Identifier: Apache-2.0
"""How a value per block of elements is read: `v[i / n]`, i the number of the loop's element."""

from compll.ir import nodes


def block_of(
    index: nodes.Expr, position: nodes.Var | None, known: tuple[nodes.Expr, ...]
) -> nodes.Expr | None:
    """The size of blocks by which an index divides the element's number; None for any other."""
    if not isinstance(index, nodes.Binary) or index.op != "/" or position is None:
        return None
    if not isinstance(index.left, nodes.Ref) or index.left.var is not position:
        return None
    block = index.right
    is_number = isinstance(block, nodes.Const) and block.value in nodes.BLOCKS
    return block if is_number or block in known else None


def blocks_under(
    index: nodes.Expr, position: nodes.Var | None, known: tuple[nodes.Expr, ...]
) -> tuple[nodes.Expr, ...]:
    """By what an index divides the element's number, one after the other; empty for any other.

    The first is the size of a block of elements, the second of a block of such blocks.
    """
    found: list[nodes.Expr] = []
    while isinstance(index, nodes.Binary) and index.op == "/":
        block = block_of(index, position, known)
        if block is not None:
            return (block, *reversed(found))
        if not isinstance(index.right, nodes.Const) or index.right.value not in nodes.BLOCKS:
            break
        found.append(index.right)
        index = index.left
    return ()
