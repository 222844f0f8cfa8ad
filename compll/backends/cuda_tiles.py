# SPDX-License-Identifier: Apache-2.0
"""Steps that need of each other only what their own tile made, as one CUDA kernel.

Every block of a `hadamard` or a `block_reduce` lies in a tile, so a block of threads can go from
step to step with what it has. Between them

    elements    of a vector, or of the gradient, are kept by the thread that has them (Eights)
    blocks      what a block has is in shared memory, and so are the floats that follow from it
    own_tile    is where threads exchange what a transform or a reduction needs (tiles.cuh)

and memory sees what is read, what is written to the packet, and what later steps need. A decode is
such a chain that ends in the gradient; it sums rows as it goes, and an encoder decodes its own tile
by it. cuda_chain.py says which steps can be in such a kernel; others have kernels of their own.
"""

import dataclasses
from collections.abc import Sequence

from compll.backends.c_common import Lines, c_type
from compll.backends.cuda_blocks import sizes_of
from compll.backends.cuda_chain import Chain
from compll.backends.cuda_kernels import HEAD, HERE, Kernels
from compll.backends.cuda_of_blocks import OfBlocks, of_blocks
from compll.backends.cuda_reads import is_in_order, roots_of, size_of
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Gradient, Scope
from compll.backends.cuda_side import (
    Definition,
    kept_size,
    most_kept,
    neutral,
    part_of,
    reads,
)
from compll.backends.cuda_sweeps import Sweeps
from compll.backends.cuda_tables import looked_up, only_code
from compll.backends.cuda_widths import width_of
from compll.backends.cuda_written import ROWS
from compll.ir import nodes
from compll.ir.types import FLOAT
from compll.ir.walk import free_vars, walk


class Tiles:
    """Emits the chains of one function."""

    def __init__(self, kernels: Kernels, sweeps: Sweeps) -> None:
        """Both of the function."""
        self._kernels = kernels
        self._sweeps = sweeps
        self._side = kernels.side
        self._lines = kernels.lines
        self._begin(())

    def _begin(self, steps: Sequence[nodes.Step]) -> None:
        self._made = Chain(self._side)
        if not all(map(self._made.takes, steps)):
            raise TypeError(f"`steps` must be a chain. Received: {steps!r}")
        self._of_blocks = OfBlocks(self._kernels, self._made)
        self._has_loaded = False

    def run(self, steps: Sequence[nodes.Step], left: Sequence[nodes.Step]) -> None:
        """The steps of a chain of an encode; `left`: those behind it."""
        kernels, side = self._kernels, self._side
        self._begin(steps)
        loop = kernels.loop(size_of(side.gradient))
        parts: list[nodes.Elementwise] = []
        besides: list[nodes.Expr] = []
        for step in steps:
            match step:
                case nodes.Store(value=nodes.Hadamard() | nodes.BlockReduce() as value):
                    parts.append(part_of(value.source))
                    besides.append(value.block)
                case nodes.Sweep():
                    parts += [part_of(write.value) for write in step.writes]
        self._define_by_chunk(roots_of(steps))
        kernels.width = width_of(side.program)
        kernels.begin("tile", loop, parts=parts, besides=besides)
        kernels.declare_tile()
        made = self._lines.later()
        for number, step in enumerate(steps, 1):
            self._step(step, loop, left, steps[number:])
        self._declare(made)
        # What tiles have made is there for a header only when all of them are done.
        kernels.write_header(in_tiles=True, unknown=(*self._made.blocks, *self._made.whole))
        writes = [w for step in steps if isinstance(step, nodes.Sweep) for w in step.writes]
        if writes and not left:
            kernels.decode_tile(writes, self._made.fields)
        kernels.end()
        kernels.width = None
        side.leave_kernel()

    def rows(self, steps: Sequence[nodes.Step]) -> None:
        """The sum of the decoded rows of a call: the steps of a decode, for each of them."""
        kernels, add = self._kernels, self._lines.add
        self._begin(steps)
        loop = kernels.loop(size_of(self._side.gradient))
        add(
            "// A tile of the sum of the rows. `is_rest`: of what a row does not hold of `sums`,",
            "// or of `out` where that is null. `own_tile`: shared memory.",
        )
        kernels.width = width_of(self._side.program)
        width = "" if kernels.width is None else ", int kWidth"
        add(f"template <bool is_rest{width}>")
        self._lines.open(f"TF_HIPS_BLOCK {ROWS}(const DecodeCall& call, const Spot& spot,")
        add("    [[maybe_unused]] const float* sums, float* own_tile) {")
        add(*HEAD)
        kernels.decode_head()
        made = self._lines.later()
        add("Eights own_sum;")
        self._each_of_out(
            "if (is_rest && sums != nullptr) {",
            "  take8(sums + kEach * t, own_sum.eight_of(t));",
            "} else if (is_rest || call.mode != TF_HIPS_SET) {",
            "  load8<is_full>(out, first, n, own_sum.eight_of(t));",
            "} else {",
            # What changes no number that is added to it, zeros of both signs included.
            "  TF_HIPS_UNROLL",
            "  for (int u = 0; u < kEach; ++u) own_sum.eight_of(t)[u] = -0.0f;",
            "}",
        )
        add("const int32_t num = is_rest ? 1 : call.rows.num;", "const Spot& whole_spot = spot;")
        self._lines.open("for (int32_t row = 0; row < num; ++row) {")
        add("const Spot spot = not_kept(whole_spot);")
        add("[[maybe_unused]] const uint8_t* const body = call.rows.row[row] + at;")
        # What the last step reads of the header is asked for before the first has its barriers.
        last = kernels.scope()
        last.unpack(roots_of(steps[-1:]))
        for number, step in enumerate(steps[:-1], 1):
            self._step(step, loop, after=steps[number:])
        self._add_row(steps[-1], last)
        self._lines.close()
        # Only here: to wait for the report before anything is read would cost as much again.
        self._lines.open("if (is_rest || is_fine(call)) {")
        add("const Spot spot = not_kept(whole_spot);")
        self._each_of_out("put8<is_full>(own_sum.eight_of(t), first, n, out);")
        self._lines.close()
        self._lines.close()
        self._declare(made)
        add("")
        kernels.begin("rows", loop, is_check=True)
        kernels.waits_late = True
        kernels.declare_tile()
        width = "" if kernels.width is None else ", kWidth"
        self._lines.open("if (call.mode == TF_HIPS_RESIDUAL) {")
        add("if (!is_fine(call)) return;", f"{ROWS}<true{width}>(call, spot, nullptr, own_tile);")
        self._lines.turn("} else {")
        add(f"{ROWS}<false{width}>(call, spot, nullptr, own_tile);")
        self._lines.close()
        kernels.end()
        kernels.width = None
        self._side.leave_kernel()

    def _define_by_chunk(self, roots: Sequence[nodes.Expr]) -> None:
        """What draws noise once a chunk, by one thread of it, as each thread would do it again.

        That thread writes the header, too, without which no kernel could decode its own tile.

        `roots`: what the kernel of the chain computes.
        """
        kernels, side = self._kernels, self._side
        drawn = [
            (made, made.value)
            for made in side.needed(roots)
            if made.value is not None and any(isinstance(e, nodes.Random) for e in walk(made.value))
        ]
        values = [value for _, value in drawn]
        header = [] if kernels.is_header_written else [value for _, value in kernels.header]
        lets = [made.value for made in side.needed([*values, *header]) if made.value is not None]
        if reads([*values, *header, *lets], side.gradient) or not kernels.knows_header():
            return
        if not drawn and (kernels.decoder is None or not header):
            return
        params = side.program.params
        members = [kernels.scalar(made.var, c_type(made.var.type, params)) for made, _ in drawn]
        kernels.begin("chunk", None, besides=values)
        scope = kernels.scope()
        scope.unpack(values)
        self._lines.open("TF_HIPS_PHASE(t) {")
        self._lines.open("if (t == 0) {")
        for (made, value), member in zip(drawn, members, strict=True):
            self._lines.add(f"call.scalars[spot.chunk].{member} = {scope.c(value)};")
            number = side.definitions.index(made)
            side.definitions[number] = Definition(made.var, "scalar", None, member)
        for _ in range(3):
            self._lines.close()
        kernels.write_header(in_tiles=False)
        kernels.end()

    def _each_of_out(self, *statements: str) -> None:
        """A phase in which threads do something with their eight of the gradient."""
        self._lines.open("{")
        self._kernels.say_full(self._lines, "n", ["out"])
        self._lines.open("TF_HIPS_OPEN_PHASE(t) {")
        self._kernels.open_eight()
        self._lines.add(*statements)
        self._kernels.close_eight()
        self._lines.close()
        self._lines.close()

    def _declare(self, made: Lines) -> None:
        """Where what steps make is."""
        made.add(f"Eights own_eights[{len(self._made.whole)}];")
        if self._has_loaded:
            made.add("Eights own_in;")
        number = len(self._made.blocks)
        if number:
            made.add(f"[[maybe_unused]] int own_sizes[{number}];")
            made.add(f"TF_HIPS_SHARED float own_made[{number} * kTile / kLanes];")
        if self._of_blocks.shared:
            made.add(
                f"TF_HIPS_SHARED float own_lets[{len(self._of_blocks.shared)} * kTile / kLanes];"
            )

    # Steps.

    def _step(
        self,
        step: nodes.Step,
        loop: int,
        left: Sequence[nodes.Step] = (),
        after: Sequence[nodes.Step] = (),
    ) -> None:
        """One step. `left`: those behind the chain; `after`: those of it that are behind this."""
        match step:
            case nodes.Let():
                self._kernels.define(step.var, "let", step.value)
            case nodes.Store(value=nodes.Hadamard() as value):
                self._hadamard(step, value, loop, left, after)
            case nodes.Store(value=nodes.BlockReduce() as value):
                self._reduce(step, value, loop, left, is_open=self._is_open(step.var, after))
            case nodes.Sweep(size=size) if size == size_of(self._side.gradient):
                writes = []
                given: dict[nodes.Var, str] = {}
                for write in step.writes:
                    part, found = self._of_blocks.lets(part_of(write.value))
                    writes.append(dataclasses.replace(write, value=part))
                    given |= found
                whole = dataclasses.replace(step, writes=tuple(writes))
                lets = [let for write in step.writes for let in part_of(write.value).lets]
                self._sweeps.body(whole, loop, given, lets)
            case nodes.Sweep():
                self._of_blocks.per_block(step)
            case _:
                raise TypeError(f"`step` must be of a chain. Received: {step!r}")

    def _is_open(self, var: nodes.Var, after: Sequence[nodes.Step]) -> bool:
        """Whether other threads can go on before a block is reduced: they don't need it.

        Nor do they write what is being reduced, and a barrier comes before anything else does.
        """
        size = size_of(self._side.gradient)
        whole = [step for step in after if isinstance(step, nodes.Sweep) and step.size == size]
        has_store = any(isinstance(step, nodes.Store) for step in after)
        return bool(whole) and not has_store and not reads(roots_of(whole), var)

    def _has_barrier_next(self, after: Sequence[nodes.Step]) -> bool:
        """Whether a loop that leaves own_tile alone ends with a barrier, before others write it."""
        size = size_of(self._side.gradient)
        for step in after:
            if isinstance(step, nodes.Store):
                return False
            if isinstance(step, nodes.Sweep) and step.size == size:
                return True
        return False

    def _is_read(self, var: nodes.Var, left: Sequence[nodes.Step]) -> bool:
        """Whether later steps, or the header, need a vector."""
        roots = [*roots_of(left), *(value for _, value in self._kernels.header)]
        return any(var in free_vars(root) for root in roots)

    def _tile(
        self, value: nodes.Hadamard | nodes.BlockReduce
    ) -> tuple[Scope, nodes.Elementwise, str, tuple[str, str]]:
        """Begins a loop over the elements of a tile.

        Returns: its scope; what it computes; C++ for its length, for the elements of a block, and
        for those that the tile has.
        """
        part, given = self._of_blocks.lets(part_of(value.source))
        scope = self._kernels.scope()
        scope.given = given
        besides = [value.init] if isinstance(value, nodes.BlockReduce) else []
        scope.unpack([part, value.block, part.size, *besides])
        elements = scope.names.fresh("elements")
        block, count = scope.names.fresh("block"), scope.names.fresh("tile_count")
        self._lines.add(
            f"const int64_t {elements} = {scope.c(part.size)};",
            f"const int {block} = static_cast<int>({scope.c(value.block)});",
            f"const int {count} = static_cast<int>(least(kTile, {elements} - spot.base));",
        )
        return scope, part, elements, (block, count)

    def _gradient(self, part: nodes.Elementwise) -> Gradient:
        """How a loop loads the gradient: once, as far as each thread reads its own elements."""
        gradient = self._side.gradient
        if self._side.is_decode or not reads([part], gradient):
            return HERE
        if not is_in_order(part, gradient):
            return self._kernels.sum_lines([part])
        if self._has_loaded:
            return Gradient("own_in.load_eight(t", ())
        self._has_loaded = True
        found = self._kernels.sum_lines([part])
        return dataclasses.replace(found, after="own_in.keep_eight(t, {tile});")

    def _hadamard(
        self,
        step: nodes.Store,
        value: nodes.Hadamard,
        loop: int,
        left: Sequence[nodes.Step],
        after: Sequence[nodes.Step],
    ) -> None:
        kernels, add = self._kernels, self._lines.add
        scope, part, elements, (block, count) = self._tile(value)
        values = scope.names.fresh("values_here")
        item = Item(
            part,
            FLOAT,
            [f"float {values}[kEach];"],
            lambda text: f"{values}[u] = is_inside ? {text} : 0.0f;",
            [f"hadamard_begin({values}, t, {count}, {block}, own_tile);"],
        )
        code = only_code(part, self._side)
        if code is not None:
            item = looked_up(scope, item, code, values, kernels.width)
        gradient, phase = self._gradient(part), "TF_HIPS_WARP_PHASE"
        kernels.each(scope, part.size, gradient, elements, [item], phase)
        own = f"own_eights[{self._made.whole.index(step.var)}]"
        word = "true" if self._has_barrier_next(after) else "false"
        add(f"hadamard_end<{word}>(own_tile, {count}, {block}, {own});")
        member = ""
        if self._is_read(step.var, left):
            member = kernels.array("float", step.var.name, f"kTile * call.tiles[{loop}]")
            to = f"call.{member} + spot.chunk * call.{member}_room + spot.base + kEach * t"
            add(f"TF_HIPS_PHASE(t) {{ keep8({own}.eight_of(t), {to}); }}")
        self._lines.close()
        kernels.side.definitions.append(
            Definition(step.var, "tile", kept_size(step), member, most_kept(step), here=own)
        )

    def _reduce(
        self,
        step: nodes.Store,
        value: nodes.BlockReduce,
        loop: int,
        left: Sequence[nodes.Step],
        *,
        is_open: bool,
    ) -> None:
        kernels, add = self._kernels, self._lines.add
        scope, part, elements, (block, count) = self._tile(value)
        values, number = scope.names.fresh("values_here"), self._of_blocks.numbers[step.var]
        reducer = neutral(value.reducer, FLOAT)
        is_of_sizes = value.reducer == "max" and sizes_of(part.value) is not None
        stage = f"keep_padded({values}, t, own_tile);"
        if is_of_sizes:
            stage = f"own_tile[t] = largest_of({values}, {block});"
        item = Item(
            part,
            FLOAT,
            [f"float {values}[kEach];"],
            lambda text: f"{values}[u] = is_inside ? {text} : {reducer}::neutral();",
            [stage],
        )
        add(f"own_sizes[{number}] = {block};")
        kernels.each(scope, part.size, self._gradient(part), elements, [item])
        function, at = "reduce_found" if is_of_sizes else "reduce_padded", of_blocks(number)
        is_kept = self._is_read(step.var, left)
        word = "true" if is_open and not is_kept else "false"
        self._lines.open(
            f"{function}<{reducer}, {word}>(own_tile, {count}, {block}, {scope.c(value.init)}, "
            "[&](int k, float result) {"
        )
        add(f"own_made[{at} + k] = result;")
        self._of_blocks.behind[step.var] = self._lines.later()
        self._lines.close("});")
        member = ""
        if is_kept:
            member = kernels.array("float", step.var.name, f"(kTile / kLanes) * call.tiles[{loop}]")
            to = f"call.{member} + spot.chunk * call.{member}_room"
            add(
                f"keep_blocks(own_made + {at}, {count}, {block}, "
                f"{to} + block_number(spot.base, {block}));"
            )
        self._lines.close()
        first = f"block_number(spot.base, own_sizes[{number}])"
        kernels.define_kept(step, member, here=f"own_made + ({at} - {first})")

    def _add_row(self, step: nodes.Step, scope: Scope) -> None:
        """The last sweep of a decode, in a scope that knows all but what the chain has made."""
        if not isinstance(step, nodes.Sweep):
            raise TypeError(f"`step` must be a sweep. Received: {step!r}")
        part = part_of(step.writes[0].value)
        for made in self._side.needed([part]):
            if made.var in self._made.whole:
                scope.declare(made)
        elements = scope.names.fresh("elements")
        self._lines.add(f"const int64_t {elements} = {scope.c(step.size)};")
        item = Item(
            part,
            FLOAT,
            ["float (&sum)[kEach] = own_sum.eight_of(t);"],
            lambda text: f"sum[u] = summed<is_rest>(sum[u], {text});",
            [],
        )
        self._kernels.each(scope, step.size, HERE, elements, [item])
        self._lines.close()
