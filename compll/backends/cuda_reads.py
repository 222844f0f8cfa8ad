# SPDX-License-Identifier: Apache-2.0
"""What a step reads, and so what can share a kernel of CUDA with it."""

from collections.abc import Sequence

from compll.backends.cuda_side import Side, element, part_of, reads, turned_by
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.sizes import blocks_in
from compll.ir.types import FLOAT, INT, UInt
from compll.ir.walk import free_vars, walk


def size_of(vector: nodes.Var) -> nodes.Expr:
    """The number of elements of a vector that has a name."""
    return nodes.Size(INT, vector.span, nodes.Ref(vector.type, vector.span, vector))


def roots_of(steps: Sequence[nodes.Step]) -> list[nodes.Expr]:
    """All expressions of steps."""
    roots: list[nodes.Expr] = []
    for step in steps:
        if isinstance(step, nodes.Sweep):
            roots += [step.size, *(reduce for _, reduce in step.reduces)]
            roots += [write.value for write in step.writes]
        else:
            roots.append(step.value)
    return roots


def only_index(vector: nodes.Var, roots: Sequence[nodes.Expr]) -> nodes.Expr | None:
    """The index at which expressions read a vector; None where there are none or several.

    Its length may be read, too.
    """
    found: list[nodes.Expr] = []
    others = 0
    for expr in (expr for root in roots for expr in walk(root)):
        match expr:
            case nodes.Ref(var=var) if var is vector:
                others += 1
            case nodes.Size(array=nodes.Ref(var=var)) if var is vector:
                others -= 1
            case nodes.Index(array=nodes.Ref(var=var), index=index) if var is vector:
                others -= 1
                found.append(index)
    is_one = bool(found) and others == 0 and all(index == found[0] for index in found)
    return found[0] if is_one else None


def covers(size: nodes.Expr, vector: nodes.Var) -> bool:
    """Whether a loop is as long as a vector, or as that rounded up to a multiple of a number."""
    match size:
        case nodes.Math(function="max", arguments=(length, nodes.Const(value=0))):
            return covers(length, vector)
        case nodes.Binary(
            op="*",
            left=nodes.Binary(
                op="/",
                left=nodes.Binary(op="+", left=whole, right=nodes.Const(value=int(more))),
                right=nodes.Const(value=int(each)),
            ),
            right=nodes.Const(value=int(again)),
        ):
            return whole == size_of(vector) and each == again == more + 1 > 0
        case _:
            return size == size_of(vector)


def is_in_order(root: nodes.Expr, vector: nodes.Var) -> bool:
    """Whether for an element of eight only those of a vector with the same numbers are read."""
    part = part_of(root)
    return all(
        turned_by(expr.index, part.position) is not None
        for expr in walk(part)
        if isinstance(expr, nodes.Index)
        and isinstance(expr.array, nodes.Ref)
        and expr.array.var is vector
    )


def reads_own(
    side: Side, parts: Sequence[nodes.Elementwise], besides: Sequence[nodes.Expr]
) -> bool:
    """Whether a kernel reads of the gradient only what each thread has as its own elements.

    Args:
        side: the function, and so the lets that the kernel computes again where it needs them.
        parts: vectors that it computes.
        besides: what else it computes.
    """
    gradient = side.gradient
    lets = [made.value for made in side.needed([*parts, *besides]) if made.value is not None]
    return not reads([*lets, *besides], gradient) and all(
        not reads([part], gradient) or (covers(part.size, gradient) and is_in_order(part, gradient))
        for part in parts
    )


def shares_tiles(store: nodes.Store, step: nodes.Step, side: Side) -> bool:
    """Whether a step can follow a block_reduce in its kernel: it needs what its own tile made."""
    value = store.value
    if not isinstance(value, nodes.BlockReduce) or not isinstance(step, nodes.Sweep):
        return False
    if side.is_decode or step.reduces or not free_vars(value.block) <= _params(side):
        return False
    whole = part_of(value.source).size
    is_whole = step.size == whole and whole == size_of(side.gradient)
    is_per_block = step.size == blocks_in(whole, value.block)
    known = side.known() | {store.var}
    for write in step.writes:
        if not isinstance(write.value, nodes.Elementwise) or not free_vars(write.value) <= known:
            return False
        part, kind = write.value, element(write.value.type)
        found = [
            expr.index
            for expr in walk(part)
            if isinstance(expr, nodes.Index)
            and isinstance(expr.array, nodes.Ref)
            and expr.array.var is store.var
        ]
        if is_whole:
            blocks = side.program.blocks
            if any(block_of(index, part.position, blocks) != value.block for index in found):
                return False
        elif is_per_block:
            is_own = all(isinstance(i, nodes.Ref) and i.var is part.position for i in found)
            whole_bytes = kind == FLOAT or (isinstance(kind, UInt) and kind.bits in (8, 16, 32))
            if not is_own or not whole_bytes:
                return False
        else:
            return False
    return True


def _params(side: Side) -> set[nodes.Var]:
    return {param.var for param in side.program.params}


def knows_tile(
    plan: nodes.Plan,
    writes: Sequence[nodes.Write],
    blocks: dict[int, nodes.Expr],
    *,
    had_header: bool,
) -> bool:
    """Whether all that decoding a tile needs was written by earlier kernels, or in this tile.

    Args:
        plan: one whose decode makes any element without the others.
        writes: of the kernel.
        blocks: of the fields with an element per block of the tile, the block.
        had_header: earlier kernels have written the scalars.
    """
    decode, last = plan.program.decode, plan.decode[-1]
    if decode is None or not isinstance(last, nodes.Sweep):
        return False
    if last.size != size_of(decode.gradient):
        return False
    parts = [part_of(last.writes[0].value)]
    for step in plan.decode:
        if isinstance(step, nodes.Store) and isinstance(step.value, nodes.Hadamard):
            parts.append(part_of(step.value.source))
    here = {write.field for write in writes}
    lets = [step.value for step in plan.decode if isinstance(step, nodes.Let)]
    numbers = {item.var: number for number, item in enumerate(decode.fields)}
    read = set().union(*map(free_vars, [*parts, *lets]))
    has_scalars = any(item.size is None and item.var in read for item in decode.fields)
    if has_scalars and not had_header:
        return False
    for root in (*parts, *lets):
        position = root.position if isinstance(root, nodes.Elementwise) else None
        for expr in walk(root):
            if not isinstance(expr, nodes.Index) or not isinstance(expr.array, nodes.Ref):
                continue
            number = numbers.get(expr.array.var)
            if number not in here:
                continue
            index = expr.index
            if number in blocks:
                if block_of(index, position, plan.program.blocks) != blocks[number]:
                    return False
            elif turned_by(index, position) is None:
                return False
    return True


def takes_tile(plan: nodes.Plan) -> bool:
    """Whether what decodes a tile needs shared memory in which threads exchange it."""
    return any(isinstance(step, nodes.Store) for step in plan.decode)
