# SPDX-License-Identifier: Apache-2.0
"""Which steps of a plan can be one CUDA kernel that goes through a tile (cuda_tiles.py)."""

import dataclasses
from collections.abc import Sequence

from compll.backends.cuda_reads import size_of
from compll.backends.cuda_side import Side, element, part_of, turned_by
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.sizes import blocks_in
from compll.ir.types import FLOAT, UInt
from compll.ir.walk import free_vars, walk

# What registers and shared memory have room for in one kernel: vectors of elements, of blocks, and
# vectors that are written.
_MAX_WHOLE = 2
_MAX_BLOCKS = 4
_MAX_WRITES = 3


@dataclasses.dataclass
class Chain:
    """What the steps of a kernel have made.

    Attributes:
        blocks: vectors with an element per block, and the block.
        whole: vectors with an element per element of the gradient.
        fields: of what is written with an element per block, the block.
    """

    side: Side
    blocks: dict[nodes.Var, nodes.Expr] = dataclasses.field(default_factory=dict)
    whole: list[nodes.Var] = dataclasses.field(default_factory=list)
    fields: dict[int, nodes.Expr] = dataclasses.field(default_factory=dict)
    _lets: set[nodes.Var] = dataclasses.field(default_factory=set)
    _num_writes: int = 0

    def takes(self, step: nodes.Step) -> bool:
        """Whether a step can be the next one; adds what it makes."""
        size = size_of(self.side.gradient)
        match step:
            case nodes.Let():
                if not self._knows(step.value) or self._reads_made(step.value):
                    return False
                self._lets.add(step.var)
            case nodes.Store(value=nodes.Hadamard() as value):
                part = part_of(value.source)
                if len(self.whole) == _MAX_WHOLE or not self._is_by_params(value.block):
                    return False
                if part.size != size or not self._is_own(part):
                    return False
                self.whole.append(step.var)
            case nodes.Store(value=nodes.BlockReduce() as value):
                part = part_of(value.source)
                if len(self.blocks) == _MAX_BLOCKS or not self._is_by_params(value.block):
                    return False
                if value.init.type != FLOAT or not self._is_by_params(value.init):
                    return False
                if self.side.is_decode or part.size != size or not self._is_own(part):
                    return False
                self.blocks[step.var] = value.block
            case nodes.Sweep():
                return self._takes_sweep(step)
            case _:
                return False
        return True

    def _takes_sweep(self, step: nodes.Sweep) -> bool:
        self._num_writes += len(step.writes)
        if step.reduces or self._num_writes > _MAX_WRITES:
            return False
        if not all(isinstance(write.value, nodes.Elementwise) for write in step.writes):
            return False
        parts = [part_of(write.value) for write in step.writes]
        if step.size == size_of(self.side.gradient):
            return all(map(self._is_own, parts))
        for block in self.blocks.values():
            is_long = step.size == blocks_in(size_of(self.side.gradient), block)
            if is_long and all(self._is_of_blocks(part, block) for part in parts):
                self.fields |= {write.field: block for write in step.writes}
                return True
        return False

    def _is_of_blocks(self, part: nodes.Elementwise, block: nodes.Expr) -> bool:
        kind = element(part.type)
        if kind != FLOAT and not (isinstance(kind, UInt) and kind.bits in (8, 16, 32)):
            return False
        if not self._knows(part):
            return False
        for expr in walk(part):
            if isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
                var, index = expr.array.var, expr.index
                is_here = isinstance(index, nodes.Ref) and index.var is part.position
                if var in self.whole or (
                    var in self.blocks and not (is_here and self.blocks[var] == block)
                ):
                    return False
        return True

    def _is_own(self, part: nodes.Elementwise) -> bool:
        """Whether an element needs of what was made here only what its own eight or block has."""
        known = self.side.program.blocks
        if not self._knows(part):
            return False
        for expr in walk(part):
            if not isinstance(expr, nodes.Index) or not isinstance(expr.array, nodes.Ref):
                continue
            var = expr.array.var
            if var in self.whole and turned_by(expr.index, part.position) is None:
                return False
            if (
                var in self.blocks
                and block_of(expr.index, part.position, known) != (self.blocks[var])
            ):
                return False
        return True

    def _knows(self, expr: nodes.Expr) -> bool:
        made = {*self.blocks, *self.whole}
        if not free_vars(expr) <= self.side.known() | made | self._lets:
            return False
        # Of what is made only elements are read.
        refs = sum(isinstance(one, nodes.Ref) and one.var in made for one in walk(expr))
        indexed = sum(
            isinstance(one, nodes.Index)
            and isinstance(one.array, nodes.Ref)
            and one.array.var in made
            for one in walk(expr)
        )
        return refs == indexed

    def _reads_made(self, expr: nodes.Expr) -> bool:
        return not free_vars(expr).isdisjoint({*self.blocks, *self.whole})

    def _is_by_params(self, expr: nodes.Expr) -> bool:
        return free_vars(expr) <= {param.var for param in self.side.program.params}


def chain(steps: Sequence[nodes.Step], side: Side) -> int:
    """How many steps, the first ones, one kernel can do; 0: there is no transform among them."""
    found, made = 0, Chain(side)
    for number, step in enumerate(steps, 1):
        if not made.takes(step):
            break
        if not isinstance(step, nodes.Let):
            found = number
    stores = sum(isinstance(step, nodes.Store) for step in steps[:found])
    return found if made.whole and (stores > 1 or found > stores) else 0


def is_whole_decode(steps: Sequence[nodes.Step], side: Side) -> bool:
    """Whether all steps of a decode are one chain."""
    last = steps[-1]
    return (
        isinstance(last, nodes.Sweep)
        and last.size == size_of(side.gradient)
        and chain(steps, side) == len(steps)
    )
