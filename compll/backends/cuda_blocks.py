# SPDX-License-Identifier: Apache-2.0
"""A block_reduce as a CUDA kernel, with the sweeps that need of it what their own tile made."""

import dataclasses
import math
from collections.abc import Sequence

from compll.backends.cuda_kernels import Kernels
from compll.backends.cuda_reads import roots_of, size_of
from compll.backends.cuda_reduce import Item, counted
from compll.backends.cuda_side import element, neutral, part_of, reads
from compll.backends.cuda_sweeps import Sweeps
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.types import FLOAT, INT
from compll.ir.walk import children, free_vars

# Floats of each block that shared memory has room for.
_MAX_LETS = 4


class Blocks:
    """Emits the reductions of blocks of one function."""

    def __init__(self, kernels: Kernels, sweeps: Sweeps) -> None:
        """Both of the function."""
        self._kernels = kernels
        self._sweeps = sweeps
        self._lines = kernels.lines
        self._num_lets = 0
        self._is_open = False
        # Blocks of a tile that lie behind the last element have a value, too.
        self._has_all = False

    def run(
        self, step: nodes.Store, after: Sequence[nodes.Sweep], left: Sequence[nodes.Step]
    ) -> None:
        """A block_reduce, and sweeps that need of it what their own tile made.

        `left`: the steps behind these. What they don't need is in shared memory only.
        """
        value, kernels = step.value, self._kernels
        if not isinstance(value, nodes.BlockReduce):
            raise TypeError(f"`step` must be a block_reduce. Received: {value!r}")
        part, add = part_of(value.source), self._lines.add
        loop = kernels.loop(part.size)
        is_float = value.init.type == FLOAT
        kind = "float" if is_float else "int64_t"
        is_kept = not after or self._is_read(step.var, left)
        member = ""
        if is_kept:
            room = f"(kTile / kLanes) * call.tiles[{loop}]"
            member = kernels.array(kind, step.var.name, room)
        parts = [part, *(part_of(write.value) for sweep in after for write in sweep.writes)]
        kernels.begin("blocks", loop, parts=parts, besides=[value.block, value.init])
        add(
            f"TF_HIPS_SHARED {kind} tile_blocks[kTile / kLanes];",
            f"const {kind}* own_blocks = tile_blocks;",
            "[[maybe_unused]] int own_size = kTile;",
        )
        own, self._num_lets = self._lines.later(), 0
        scope = kernels.scope()
        scope.unpack([part, value.block, value.init, part.size])
        elements, tile = scope.names.fresh("elements"), scope.names.fresh("tile_values")
        values, block = scope.names.fresh("values_here"), scope.names.fresh("block")
        count = scope.names.fresh("tile_count")
        sizes = sizes_of(part.value) if is_float and value.reducer == "max" else None
        add(
            f"const int64_t {elements} = {scope.c(part.size)};",
            f"const int {block} = static_cast<int>({scope.c(value.block)});",
        )
        if sizes is None:
            add(
                f"TF_HIPS_SHARED {kind} {tile}[kTile];",
                f"const int {count} = static_cast<int>(least(kTile, {elements} - spot.base));",
            )
        else:
            own.add("TF_HIPS_SHARED float tile_sizes[kThreads];")
        name = neutral(value.reducer, FLOAT if is_float else INT)
        behind = f"{name}::neutral()"
        stage = f"stage8({values}, t, {tile});"
        if sizes is not None:
            part, behind = dataclasses.replace(part, value=sizes.size), "0.0f"
            most = scope.c(sizes.most)
            stage = f"tile_sizes[t] = largest_near({values}, {most}, {block} / kEach);"
        elif not is_float:
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
        if sizes is None:
            function = "reduce_blocks" if is_float else "reduce_int_blocks"
            init = scope.c(value.init)
            add(f"{function}<{name}>({tile}, {count}, {block}, {init}, tile_blocks);")
        add(f"own_blocks -= block_number(spot.base, {block});", f"own_size = {block};")
        self._lines.close()
        self._has_all = sizes is not None
        if sizes is not None:
            self._fold_sizes(name, value.init, sizes)
        if is_kept:
            self._close_blocks()
            scope = kernels.scope()
            scope.unpack([part.size])
            to = f"call.{member} + spot.chunk * call.{member}_room"
            add(
                f"const int {count} = "
                f"static_cast<int>(least(kTile, {scope.c(part.size)} - spot.base));",
                f"keep_blocks(tile_blocks, {count}, own_size, "
                f"{to} + block_number(spot.base, own_size));",
            )
            self._lines.close()
        kernels.define_kept(step, member, here="own_blocks")
        per_block: list[nodes.Sweep] = []
        for sweep in after:
            if sweep.size != part.size:
                per_block.append(sweep)
                continue
            whole, given = self._block_lets(sweep, step.var, value)
            self._per_block(per_block, step.var)
            per_block = []
            self._close_blocks()
            lets = [let for write in sweep.writes for let in part_of(write.value).lets]
            self._sweeps.body(whole, loop, given, lets)
        self._per_block(per_block, step.var)
        self._close_blocks()
        if self._num_lets:
            own.add(f"TF_HIPS_SHARED float own_lets[{self._num_lets} * kTile / kLanes];")
        # What blocks have is there for a header only when all tiles are done.
        kernels.write_header(in_tiles=True, unknown=[step.var])
        if not left and part.size == size_of(kernels.side.gradient):
            per_block = [sweep for sweep in after if sweep.size != part.size]
            blocks = {write.field: value.block for sweep in per_block for write in sweep.writes}
            kernels.decode_tile([write for sweep in after for write in sweep.writes], blocks)
        kernels.end()
        kernels.side.leave_kernel()

    def _block_lets(
        self, sweep: nodes.Sweep, made: nodes.Var, value: nodes.BlockReduce
    ) -> tuple[nodes.Sweep, dict[nodes.Var, str]]:
        """Computes for each block of the tile what is the same for all of its elements.

        By a thread a block: each thread of a tile would make the same divisions for its own eight.

        Returns: the sweep without these lets, and C++ for what is left to read of them.
        """
        kernels, add = self._kernels, self._lines.add
        given: dict[nodes.Var, str] = {}
        writes = []
        for write in sweep.writes:
            part = part_of(write.value)
            lets, own = self._split(part, made, value.block)
            rest = dataclasses.replace(part, lets=own)
            writes.append(dataclasses.replace(write, value=rest))
            read = [let for let in lets if let.var in free_vars(rest) and let.var not in given]
            if not read:
                continue
            if self._num_lets + len(read) > _MAX_LETS:
                writes[-1] = write
                continue
            numbers = range(self._num_lets, self._num_lets + len(read))
            self._num_lets += len(read)
            self._open_blocks()
            scope = kernels.scope()
            scope.unpack([value.block, *(let.value for let in lets)])
            scope.position = part.position
            if reads([let.value for let in lets], made):
                here = scope.hoisted[made, value.block] = scope.names.fresh(f"{made.name}_here")
                kind = scope.c.type(element(made.type))
                found = "tile_blocks[t]"
                if not self._has_all:
                    index = "block_number(spot.base, own_size) + t"
                    found = scope.anywhere(scope.vectors[made], index)
                add(f"const {kind} {here} = {found};")
            add(*scope.lets(lets))
            for let, number in zip(read, numbers, strict=True):
                add(f"own_lets[{number} * kTile / kLanes + t] = {scope.names.of(let.var)};")
                at = f"{number} * kTile / kLanes + block_number(kEach * t, own_size)"
                given[let.var] = f"own_lets[{at}]"
            self._lines.close()
        return dataclasses.replace(sweep, writes=tuple(writes)), given

    def _split(
        self, part: nodes.Elementwise, made: nodes.Var, block: nodes.Expr
    ) -> tuple[list[nodes.Let], tuple[nodes.Let, ...]]:
        """The floats of a part that are the same for all elements of a block; all other lets."""
        side = self._kernels.side
        known = side.known() - {side.gradient, made} - set(side.states)
        lets, own = [], []
        for let in part.lets:
            if let.var.type == FLOAT and self._is_of_block(let.value, part, made, block, known):
                lets.append(let)
                known = known | {let.var}
            else:
                own.append(let)
        return lets, tuple(own)

    def _is_of_block(
        self,
        expr: nodes.Expr,
        part: nodes.Elementwise,
        made: nodes.Var,
        block: nodes.Expr,
        known: set[nodes.Var],
    ) -> bool:
        if isinstance(expr, nodes.Random | nodes.KeyPart):
            return False
        if isinstance(expr, nodes.Index):
            is_made = isinstance(expr.array, nodes.Ref) and expr.array.var is made
            blocks = self._kernels.side.program.blocks
            return is_made and block_of(expr.index, part.position, blocks) == block
        if isinstance(expr, nodes.Ref):
            return expr.var in known
        return all(self._is_of_block(one, part, made, block, known) for one in children(expr))

    def _is_read(self, var: nodes.Var, left: Sequence[nodes.Step]) -> bool:
        """Whether later steps, or the header, need a vector."""
        roots = [*roots_of(left), *(value for _, value in self._kernels.header)]
        return any(var in free_vars(root) for root in roots)

    def _per_block(self, sweeps: Sequence[nodes.Sweep], made: nodes.Var) -> None:
        """Sweeps with an element per block: those of the tile, a thread each.

        `made`: the reductions of the blocks.
        """
        kernels, add = self._kernels, self._lines.add
        for sweep in sweeps:
            self._open_blocks()
            scope = kernels.scope()
            parts = [part_of(write.value) for write in sweep.writes]
            scope.unpack([sweep.size, *parts])
            if self._has_all:
                scope.own[made] = "tile_blocks[t]"
            elements, first = scope.names.fresh("elements"), scope.names.fresh("first_block")
            add(
                f"const int64_t {elements} = {scope.length(sweep.size)};",
                f"const int64_t {first} = block_number(spot.base, own_size);",
            )
            self._lines.open(f"if ({first} + t < {elements}) {{")
            done: list[str] = []
            for write, part in zip(sweep.writes, parts, strict=True):
                kind = element(write.value.type)
                statements, text = scope.element(part, kind, f"{first} + t")
                number = scope.names.of(part.position)
                bits = scope.bits(kind)
                is_float = kind == FLOAT
                store = f"store_float({text}, " if is_float else f"store_code({text}, {bits}, "
                at = f"body + layout.offset[{write.field}] + {number} * {int(bits) // 8}"
                done += [line for line in [*statements, f"{store}{at});"] if line not in done]
            add(*done)
            self._lines.close()
            self._lines.close()

    # A phase in which a thread has a block of the tile: what is done for blocks, one thing after
    # another, up to a loop over elements.

    def _open_blocks(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._lines.open("TF_HIPS_PHASE(t) {")
        self._lines.open("if (t < block_number(kTile, own_size)) {")

    def _close_blocks(self) -> None:
        if self._is_open:
            self._is_open = False
            self._lines.close()
            self._lines.close()

    def _fold_sizes(self, reducer: str, init: nodes.Expr, sizes: "_Sizes") -> None:
        """The largest of each block, of what its threads have found."""
        self._open_blocks()
        scope = self._kernels.scope()
        scope.unpack([init])
        largest = "largest_of_threads(tile_sizes, t, own_size)"
        if sizes.cap is not None:
            largest = f"bounded_min({largest}, {scope.c(sizes.cap)})"
        self._lines.add(f"tile_blocks[t] = {reducer}::fold({scope.c(init)}, {largest});")
        self._lines.close()


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Finite sizes, of which the largest is the same in any order: none is NaN or -0.

    Attributes:
        size: an absolute value; +0 is taken where that is NaN, or larger than `most`.
        cap: what is taken of larger ones, a positive number. The smaller of the largest and that
            is the largest of all the smaller ones.
    """

    size: nodes.Expr
    most: nodes.Const
    cap: nodes.Const | None


def sizes_of(value: nodes.Expr) -> _Sizes | None:
    """What a float is, if that is a finite size, |x| or a smaller one, or +0."""
    match value:
        case nodes.Select(
            condition=nodes.Binary(
                op="<=",
                left=nodes.Math(function="abs") as size,
                right=nodes.Const(value=float(number)) as most,
            ),
            yes=yes,
            no=nodes.Const(value=no),
        ) if math.isfinite(number) and _is_plus_zero(no):
            match yes:
                case nodes.Math(
                    function="min", arguments=(left, nodes.Const(value=float(number)) as cap)
                ) if left == size and number > 0:
                    return _Sizes(size, most, cap)
            return _Sizes(size, most, None) if yes == size else None
    return None


def _is_plus_zero(value: float | bool) -> bool:
    return value == 0 and math.copysign(1, value) > 0
