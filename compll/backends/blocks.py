# SPDX-License-Identifier: Apache-2.0
"""Reductions of blocks whose results are used where they are made: one loop over tiles for all.

    largest = block_reduce(...); sweep { scales }; sweep { codes }
        -->  for each tile:  reduce its blocks  ->  their scales  ->  its codes
    rotated = hadamard(...); energies = block_reduce(rotated ...); sweep { codes }
        -->  for each tile:  rotate its blocks  ->  their energies  ->  its codes

A tile holds whole blocks, so what its blocks give needs no memory beyond it, and the data are read
once. The steps of such a loop are a group; every other step is a group of its own.
"""

from compll.ir import nodes
from compll.ir.blocks import block_of, blocks_under
from compll.ir.sizes import blocks_in
from compll.ir.types import BOOL, FLOAT, INT, Array, Type, UInt
from compll.ir.walk import children, walk

Group = tuple[nodes.Step, ...]


def encode_groups(plan: nodes.Plan) -> list[Group]:
    """The steps of an encoder by the loops that they share, in order."""
    encode = plan.program.encode
    scalars = [] if encode is None else encode.fields
    return _groups(plan.encode, [v for v in scalars if not isinstance(v, nodes.Elementwise)])


def decode_groups(plan: nodes.Plan) -> list[Group]:
    """The steps of a decoder by the loops that they share, in order."""
    return _groups(plan.decode, [])


def _groups(steps: tuple[nodes.Step, ...], results: list[nodes.Expr]) -> list[Group]:
    """`results`: what else the function computes from the variables of its steps."""
    found: list[Group] = []
    at = 0
    while at < len(steps):
        length = _length(steps[at:], results)
        found.append(steps[at : at + length])
        at += length
    return found


def is_shared(group: Group) -> bool:
    """Whether a group is a loop over blocks that needs no memory."""
    return isinstance(group[0], nodes.Store) and len(group) > 1


def _length(steps: tuple[nodes.Step, ...], results: list[nodes.Expr]) -> int:
    """How many steps the group that begins with the first of `steps` has."""
    first = _of_blocks(steps[0])
    if first is None:
        return 1
    size, block = _source(first).size, first.block
    made: set[nodes.Var] = set()
    whole: set[nodes.Var] = set()
    length, has_sweep = 0, False
    for step in steps:
        value = _of_blocks(step)
        if isinstance(step, nodes.Store) and value is not None and not has_sweep:
            source = _source(value)
            if source.size != size or value.block != block:
                break
            if isinstance(value, nodes.BlockReduce) and _reads(value.init, made):
                break
            if not _reads_near(source, block, made, whole, is_of_blocks=False):
                break
            made.add(step.var)
            if isinstance(value, nodes.Hadamard):
                whole.add(step.var)
        elif not isinstance(step, nodes.Sweep) or not _is_near(step, size, block, made, whole):
            break
        else:
            has_sweep = True
        length += 1
    others = [root for step in steps[length:] for root in roots(step)]
    if not has_sweep or any(_reads(root, made) for root in [*others, *results]):
        return 1
    return length


def roots(step: nodes.Step) -> list[nodes.Expr]:
    """The expressions that a step computes."""
    if isinstance(step, nodes.Sweep):
        reduces = [reduce for _, reduce in step.reduces]
        return [step.size, *reduces, *(write.value for write in step.writes)]
    return [step.value]


def _of_blocks(step: nodes.Step) -> nodes.BlockReduce | nodes.Hadamard | None:
    """What a step makes of whole blocks."""
    if isinstance(step, nodes.Store) and isinstance(step.value, nodes.BlockReduce | nodes.Hadamard):
        return step.value
    return None


def _source(value: nodes.BlockReduce | nodes.Hadamard) -> nodes.Elementwise:
    if not isinstance(value.source, nodes.Elementwise):
        raise TypeError(f"a vector must be inlined before it is emitted. Received: {value.source}")
    return value.source


def _reads(expr: nodes.Expr, made: set[nodes.Var]) -> bool:
    return any(isinstance(part, nodes.Ref) and part.var in made for part in walk(expr))


def _is_near(
    step: nodes.Sweep,
    size: nodes.Expr,
    block: nodes.Expr,
    made: set[nodes.Var],
    whole: set[nodes.Var],
) -> bool:
    """Whether a sweep needs of `made` only what belongs to its own element or block.

    `whole`: those of `made` that have as many elements as the loop.
    """
    is_of_blocks = step.size == blocks_in(size, block)
    if step.reduces or not (is_of_blocks or step.size == size):
        return False
    for write in step.writes:
        part = write.value
        if not isinstance(part, nodes.Elementwise):
            return False
        kind = part.type.element if isinstance(part.type, Array) else part.type
        # The codes of a tile's blocks must begin at a byte.
        is_whole = kind == FLOAT or (isinstance(kind, UInt) and kind.bits in (8, 16, 32))
        if is_of_blocks and not is_whole:
            return False
        if not _reads_near(part, block, made, whole, is_of_blocks=is_of_blocks):
            return False
    return True


def _reads_near(
    part: nodes.Elementwise,
    block: nodes.Expr,
    made: set[nodes.Var],
    whole: set[nodes.Var],
    *,
    is_of_blocks: bool,
) -> bool:
    near = 0
    for expr in walk(part):
        if not isinstance(expr, nodes.Index) or not isinstance(expr.array, nodes.Ref):
            continue
        if expr.array.var not in made:
            continue
        is_here = isinstance(expr.index, nodes.Ref) and expr.index.var is part.position
        is_block = block_of(expr.index, part.position, (block,)) == block
        if expr.array.var in whole:
            near += is_here and not is_of_blocks
        else:
            near += is_here if is_of_blocks else is_block
    # Their sizes are known without them; everything else that mentions them reads them elsewhere.
    mentioned = sum(isinstance(expr, nodes.Ref) and expr.var in made for expr in walk(part))
    return near == mentioned


def block_lets(
    part: nodes.Elementwise, known: tuple[nodes.Expr, ...], done: set[nodes.Var]
) -> tuple[dict[nodes.Var, nodes.Let], nodes.Expr | None]:
    """The lets of a part that depend on an element's block alone, and the size of the blocks.

    Args:
        part: a vector, element by element.
        known: sizes of blocks.
        done: lets that have been found before.
    """
    own = {let.var for let in part.lets}
    found: dict[nodes.Var, nodes.Let] = {}
    block: nodes.Expr | None = None
    for let in part.lets:
        behind = _block_behind(let.value, part.position, known, own, set(found), block)
        if behind is not None and let.var not in done:
            found[let.var], block = let, behind
    return found, block


def _block_behind(
    expr: nodes.Expr,
    position: nodes.Var,
    known: tuple[nodes.Expr, ...],
    own: set[nodes.Var],
    found: set[nodes.Var],
    block: nodes.Expr | None,
) -> nodes.Expr | None:
    """The size of the blocks on which alone a value depends; None: it depends on more, or less.

    `own`: lets of the part, of which `found` depend on blocks of size `block`.
    """
    behind: nodes.Expr | None = None
    waiting = [expr]
    while waiting:
        at = waiting.pop()
        if isinstance(at, nodes.Random | nodes.Elementwise):
            return None
        if isinstance(at, nodes.Index):
            sizes = blocks_under(at.index, position, known)
            if not sizes or (block is not None and sizes[0] != block):
                return None
            behind = block = sizes[0]
            continue
        number = block_of(at, position, known)
        if number is not None and number == (block or number):
            behind = block = number
            continue
        if isinstance(at, nodes.Ref):
            if at.var is position or (at.var in own and at.var not in found):
                return None
            behind = block if at.var in found else behind
        waiting += children(at)
    return behind


def block_source(store: nodes.Store) -> tuple[nodes.Elementwise, nodes.Expr]:
    """What a step makes blocks of, and their size."""
    value = store.value
    if isinstance(value, nodes.BlockReduce | nodes.Hadamard) and isinstance(
        value.source, nodes.Elementwise
    ):
        return value.source, value.block
    raise TypeError(f"a block_reduce of an inlined vector is expected. Received: {value!r}")


def makes_whole(store: nodes.Store) -> bool:
    """Whether a step leaves an element for each of its blocks' elements, and not for each block."""
    return isinstance(store.value, nodes.Hadamard)


def block_reducer(value: nodes.BlockReduce) -> tuple[str, Type]:
    """The C++ function that reduces the blocks of a tile, and the type of its elements."""
    reducer = value.reducer.capitalize()
    if value.init.type != INT:
        return f"reduce_blocks<{reducer}>", FLOAT
    is_flag = value.reducer in ("count", "and", "or")
    return f"reduce_int_blocks<Int{reducer}>", BOOL if is_flag else INT
