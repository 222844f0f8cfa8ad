# SPDX-License-Identifier: Apache-2.0
"""What is the same for all elements of a block, in a kernel that takes a tile through its steps.

The thread that has reduced a block goes on with what follows from it: floats that the elements of
the block need, which go to shared memory, and elements of vectors that have one for each block.
"""

import dataclasses
from collections.abc import Sequence

from compll.backends.c_common import Lines
from compll.backends.cuda_chain import Chain
from compll.backends.cuda_kernels import Kernels
from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import element, part_of
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.types import FLOAT, INT
from compll.ir.walk import changed, children, free_vars, is_same

# Floats of each block that shared memory has room for, besides what blocks are reduced to.
_MAX_LETS = 4


class OfBlocks:
    """Emits it for one kernel.

    Attributes:
        numbers: of the vectors that blocks are reduced to.
        behind: of each of these that is made, where its threads go on.
        shared: floats that are in shared memory, as vectors of any element.
    """

    def __init__(self, kernels: Kernels, made: Chain) -> None:
        """`made`: by the steps of the kernel."""
        self._kernels = kernels
        self._side = kernels.side
        self._made = made
        self.numbers = {var: number for number, var in enumerate(made.blocks)}
        self.behind: dict[nodes.Var, Lines] = {}
        self.shared: list[nodes.Elementwise] = []

    def lets(self, part: nodes.Elementwise) -> tuple[nodes.Elementwise, dict[nodes.Var, str]]:
        """Computes for each block of the tile the floats that are the same for its elements.

        By a thread a block: each thread of a tile would make the same divisions for its own eight.

        Returns: the vector without these lets, and C++ for what is left to read of them.
        """
        used = [var for var in self._made.blocks if var in free_vars(part)]
        if not used or any(self._made.blocks[var] != self._made.blocks[used[0]] for var in used):
            return part, {}
        of_block = self._of_block(part, self._made.blocks[used[0]])
        need = free_vars(part.value).union(
            *(free_vars(let.value) for let in part.lets if let not in of_block)
        )
        own: list[nodes.Let] = []
        shared: list[nodes.Let] = []
        for let in reversed(part.lets):
            if let in of_block and let.var.type == FLOAT:
                shared += [let] if let.var in need else []
            elif let not in of_block or let.var in need:
                own.insert(0, let)
                need |= free_vars(let.value)
        if len(self.shared) + len(shared) > _MAX_LETS:
            return part, {}
        given: dict[nodes.Var, str] = {}
        for let in shared:
            value = _with_lets(part, of_block[: of_block.index(let)], let.value)
            number = self._shared_number(value, used[-1])
            size = f"own_sizes[{self.numbers[used[0]]}]"
            given[let.var] = f"own_lets[{of_blocks(number)} + block_number(kEach * t, {size})]"
        return dataclasses.replace(part, lets=tuple(own)), given

    def _of_block(self, part: nodes.Elementwise, block: nodes.Expr) -> list[nodes.Let]:
        """The lets of a part that are the same for all elements of a block."""
        side = self._side
        known = side.known() - {side.gradient, *self._made.blocks, *self._made.whole}
        known -= {*side.states, *(item.var for item in side.fields)}
        found = []
        for let in part.lets:
            if self._is_of_block(let.value, part, block, known):
                found.append(let)
                known = known | {let.var}
        return found

    def _is_of_block(
        self, expr: nodes.Expr, part: nodes.Elementwise, block: nodes.Expr, known: set[nodes.Var]
    ) -> bool:
        if isinstance(expr, nodes.Random | nodes.KeyPart):
            return False
        if isinstance(expr, nodes.Index):
            is_made = isinstance(expr.array, nodes.Ref) and expr.array.var in self._made.blocks
            blocks = self._side.program.blocks
            return is_made and block_of(expr.index, part.position, blocks) == block
        if isinstance(expr, nodes.Ref):
            return expr.var in known
        if block_of(expr, part.position, self._side.program.blocks) == block:
            return True
        return all(self._is_of_block(one, part, block, known) for one in children(expr))

    def _shared_number(self, value: nodes.Elementwise, made: nodes.Var) -> int:
        """Where shared memory has a float of each block, which is computed unless it is there.

        `value`: the float for any element; `made`: the last vector of such blocks that it may read.
        """
        for number, other in enumerate(self.shared):
            if is_same(value, other):
                return number
        number = len(self.shared)
        self.shared.append(value)
        [value], scope, behind = self._begin_block(made, [value])
        behind.add(*map(scope.c.let, value.lets))
        behind.add(f"own_lets[{of_blocks(number)} + k] = {scope.c(value.value)};")
        behind.close()
        return number

    def _begin_block(
        self, made: nodes.Var, parts: Sequence[nodes.Elementwise], *, is_per_block: bool = False
    ) -> tuple[list[nodes.Elementwise], Scope, Lines]:
        """Begins what the thread that has reduced a block does then.

        Args:
            made: what it is reduced to, the last that is read.
            parts: what is computed, of any element of the block, or of the block.
            is_per_block: it is computed of the block, whose number is their position.

        Returns: what is computed, of the block's number; a scope; where statements go.
        """
        here = nodes.Var("number", INT, made.span)
        values: dict[nodes.Var, nodes.Var] = {}
        known = self._side.program.blocks

        def of(part: nodes.Elementwise) -> nodes.Elementwise:
            def change(expr: nodes.Expr) -> nodes.Expr:
                if isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
                    var = expr.array.var
                    if var in self._made.blocks:
                        value = values.setdefault(var, nodes.Var(var.name, FLOAT, var.span))
                        return nodes.Ref(FLOAT, expr.span, value)
                is_number = isinstance(expr, nodes.Ref) and expr.var is part.position
                # Of an element; the number of a block may be divided by such a number itself.
                is_block = block_of(expr, part.position, known) is not None
                if is_number or (is_block and not is_per_block):
                    return nodes.Ref(INT, expr.span, here)
                return changed(expr, change)

            lets = tuple(dataclasses.replace(let, value=change(let.value)) for let in part.lets)
            return dataclasses.replace(part, lets=lets, value=change(part.value))

        changed_parts = [of(part) for part in parts]
        behind = self.behind[made]
        behind.open("{")
        scope = self._kernels.scope_of(behind)
        scope.unpack(changed_parts)
        first = f"block_number(spot.base, own_sizes[{self.numbers[made]}])"
        behind.add(f"[[maybe_unused]] const int64_t {scope.names.of(here)} = {first} + k;")
        for var, value in values.items():
            at = of_blocks(self.numbers[var])
            behind.add(f"const float {scope.names.of(value)} = own_made[{at} + k];")
        return changed_parts, scope, behind

    def per_block(self, step: nodes.Sweep) -> None:
        """A sweep with an element per block, by the thread that has reduced the block."""
        of = self._made.fields[step.writes[0].field]
        made = [var for var in self.behind if self._made.blocks[var] == of][-1]
        parts = [part_of(write.value) for write in step.writes]
        first = f"block_number(spot.base, own_sizes[{self.numbers[made]}])"
        parts, scope, behind = self._begin_block(made, parts, is_per_block=True)
        done: list[str] = []
        for write, part in zip(step.writes, parts, strict=True):
            kind = element(write.value.type)
            statements, text = scope.element(part, kind, f"{first} + k")
            number, bits = scope.names.of(part.position), scope.bits(kind)
            function = f"store_float({text}, " if kind == FLOAT else f"store_code({text}, {bits}, "
            to = f"body + layout.offset[{write.field}] + {number} * {int(bits) // 8}"
            done += [line for line in [*statements, f"{function}{to});"] if line not in done]
        behind.add(*done)
        behind.close()


def of_blocks(number: int) -> str:
    """C++ for where what blocks have begins, of a vector of them."""
    return f"{number} * kTile / kLanes"


def _with_lets(
    part: nodes.Elementwise, lets: Sequence[nodes.Let], value: nodes.Expr
) -> nodes.Elementwise:
    """A value, with those lets that it needs."""
    need = free_vars(value)
    used: list[nodes.Let] = []
    for let in reversed(lets):
        if let.var in need:
            used.insert(0, let)
            need |= free_vars(let.value)
    kind = dataclasses.replace(part, lets=(), value=value)
    return dataclasses.replace(kind, lets=tuple(used))
