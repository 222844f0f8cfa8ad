# SPDX-License-Identifier: Apache-2.0
"""A block_reduce as a CUDA kernel, with the sweeps that need of it what their own tile made."""

from collections.abc import Sequence

from compll.backends.cuda_kernels import Kernels
from compll.backends.cuda_reads import size_of
from compll.backends.cuda_reduce import Item, counted
from compll.backends.cuda_scope import element, neutral, part_of
from compll.ir import nodes
from compll.ir.types import FLOAT, INT


class Blocks:
    """Emits the reductions of blocks of one function."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: of the function."""
        self._kernels = kernels
        self._lines = kernels.lines

    def run(
        self, step: nodes.Store, after: Sequence[nodes.Sweep], *, is_last: bool = False
    ) -> None:
        """A block_reduce, and sweeps that need of it what their own tile made."""
        value, kernels = step.value, self._kernels
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"`step` must be a block_reduce. Received: {value!r}")
        part, add = part_of(value.source), self._lines.add
        loop = kernels.loop(part.size)
        is_float = value.init.type == FLOAT
        kind = "float" if is_float else "int64_t"
        room = f"(kTile / kLanes) * call.tiles[{loop}]"
        member = kernels.array(kind, step.var.name, room)
        parts = [part, *(part_of(write.value) for sweep in after for write in sweep.writes)]
        kernels.begin("blocks", loop, parts=parts, besides=[value.block, value.init])
        scope = kernels.scope()
        scope.unpack([part, value.block, value.init, part.size])
        elements, tile = scope.names.fresh("elements"), scope.names.fresh("tile_values")
        values, block = scope.names.fresh("values_here"), scope.names.fresh("block")
        count = scope.names.fresh("tile_count")
        add(
            f"TF_HIPS_SHARED {kind} {tile}[kTile];",
            f"const int64_t {elements} = {scope.c(part.size)};",
            f"const int {block} = static_cast<int>({scope.c(value.block)});",
            f"const int {count} = static_cast<int>(least(kTile, {elements} - spot.base));",
        )
        name = neutral(value.reducer, FLOAT if is_float else INT)
        behind = f"{name}::neutral()"
        stage = f"stage8({values}, t, {tile});"
        if not is_float:
            stage = f"for (int u = 0; u < kEach; ++u) {tile}[kEach * t + u] = {values}[u];"
        gradient = kernels.sum_lines([part])
        item = Item(
            part,
            FLOAT if is_float else counted(value.reducer),
            [f"{kind} {values}[kEach];"],
            lambda text: f"{values}[u] = is_inside ? {text} : {behind};",
            [stage],
        )
        kernels.each(scope, part.size, gradient, elements, [item])
        function = "reduce_blocks" if is_float else "reduce_int_blocks"
        add(
            f"{function}<{name}>({tile}, {count}, {block}, {scope.c(value.init)},",
            f"    call.{member} + spot.chunk * call.{member}_room + "
            f"block_number(spot.base, {block}));",
        )
        self._lines.close()
        kernels.define_kept(step, member)
        for sweep in after:
            if sweep.size == part.size:
                kernels.sweep_body(sweep, loop)
            else:
                self._per_block(sweep, value, part.size)
        # What blocks have is there for a header only when all tiles are done.
        kernels.write_header(in_tiles=True, unknown=step.var)
        if is_last and part.size == size_of(kernels.side.gradient):
            per_block = [sweep for sweep in after if sweep.size != part.size]
            blocks = {write.field: value.block for sweep in per_block for write in sweep.writes}
            kernels.decode_tile([write for sweep in after for write in sweep.writes], blocks)
        kernels.end()

    def _per_block(self, sweep: nodes.Sweep, value: nodes.BlockReduce, size: nodes.Expr) -> None:
        """A sweep with an element per block: those of the tile, a thread each."""
        kernels, add = self._kernels, self._lines.add
        scope = kernels.scope()
        parts = [part_of(write.value) for write in sweep.writes]
        scope.unpack([sweep.size, value.block, size, *parts])
        block, first = scope.names.fresh("block"), scope.names.fresh("first_block")
        elements = scope.names.fresh("elements")
        add(
            f"const int64_t {block} = {scope.c(value.block)};",
            f"const int64_t {elements} = {scope.length(sweep.size)};",
            f"const int64_t {first} = block_number(spot.base, {block});",
        )
        self._lines.open("TF_HIPS_PHASE(t) {")
        self._lines.open(f"if (t < block_number(kTile, {block}) && {first} + t < {elements}) {{")
        done: list[str] = []
        for write, part in zip(sweep.writes, parts, strict=True):
            kind = element(write.value.type)
            statements, text = scope.element(part, kind, f"{first} + t")
            number = scope.names.of(part.position)
            bits = scope.bits(kind)
            function = f"store_float({text}, " if kind == FLOAT else f"store_code({text}, {bits}, "
            at = f"body + layout.offset[{write.field}] + {number} * {int(bits) // 8}"
            done += [line for line in [*statements, f"{function}{at});"] if line not in done]
        add(*done)
        self._lines.close()
        self._lines.close()
        self._lines.close()
