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

from compll.backends.c_common import Lines, c_type, max_bits
from compll.backends.cuda_blocks import is_size
from compll.backends.cuda_chain import Chain
from compll.backends.cuda_kernels import HEAD, HERE, ROWS, Kernels
from compll.backends.cuda_reads import is_in_order, roots_of, size_of
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Gradient, Scope
from compll.backends.cuda_side import (
    Definition,
    element,
    kept_size,
    most_kept,
    neutral,
    part_of,
    reads,
)
from compll.backends.cuda_sweeps import Sweeps
from compll.backends.cuda_widths import width_of
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.types import FLOAT, INT, UInt
from compll.ir.walk import changed, children, free_vars, is_same, walk

# Floats of each block that shared memory has room for, besides what blocks are reduced to.
_MAX_LETS = 4


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
        self._numbers = {var: number for number, var in enumerate(self._made.blocks)}
        # Of each reduction, what its thread does for a block when it is done.
        self._behind: dict[nodes.Var, Lines] = {}
        self._shared: list[nodes.Elementwise] = []
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
        number = len(self._numbers)
        if number:
            made.add(f"int own_sizes[{number}];")
            made.add(f"TF_HIPS_SHARED float own_made[{number} * kTile / kLanes];")
        if self._shared:
            made.add(f"TF_HIPS_SHARED float own_lets[{len(self._shared)} * kTile / kLanes];")

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
                    part, found = self._block_lets(part_of(write.value))
                    writes.append(dataclasses.replace(write, value=part))
                    given |= found
                whole = dataclasses.replace(step, writes=tuple(writes))
                self._sweeps.body(whole, loop, given)
            case nodes.Sweep():
                self._per_block(step)
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
        part, given = self._block_lets(part_of(value.source))
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
        code = self._only_code(part)
        if code is not None:
            item = self._looked_up(scope, item, code, values)
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
        values, number = scope.names.fresh("values_here"), self._numbers[step.var]
        reducer = neutral(value.reducer, FLOAT)
        is_of_sizes = value.reducer == "max" and is_size(part.value)
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
        function, at = "reduce_found" if is_of_sizes else "reduce_padded", _of_blocks(number)
        is_kept = self._is_read(step.var, left)
        word = "true" if is_open and not is_kept else "false"
        self._lines.open(
            f"{function}<{reducer}, {word}>(own_tile, {count}, {block}, {scope.c(value.init)}, "
            "[&](int k, float result) {"
        )
        add(f"own_made[{at} + k] = result;")
        self._behind[step.var] = self._lines.later()
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

    def _only_code(self, part: nodes.Elementwise) -> nodes.Index | None:
        """The code that alone makes an element, if few are different; None: there is more."""
        roots = [part.value, *(let.value for let in part.lets)]
        found = {expr for root in roots for expr in walk(root) if isinstance(expr, nodes.Index)}
        fields = {item.var for item in self._side.fields}
        own = {let.var for let in part.lets} | self._side.known()
        if len(found) != 1 or not set().union(*map(free_vars, roots)) <= own | {part.position}:
            return None
        [code] = found
        kind = code.type
        is_few = isinstance(kind, UInt) and max_bits(kind, self._side.program.params) <= 5
        is_here = isinstance(code.index, nodes.Ref) and code.index.var is part.position
        is_field = isinstance(code.array, nodes.Ref) and code.array.var in fields

        def uses_position(expr: nodes.Expr) -> bool:
            if expr == code:
                return False
            if isinstance(expr, nodes.Ref):
                return expr.var is part.position
            return isinstance(expr, nodes.Random) or any(map(uses_position, children(expr)))

        return (
            code if is_few and is_here and is_field and not any(map(uses_position, roots)) else None
        )

    def _looked_up(self, scope: Scope, item: Item, code: nodes.Index, values: str) -> Item:
        """A loop over codes that asks for what each of them makes."""
        var = nodes.Var("code_here", code.type, code.span)

        def change(expr: nodes.Expr) -> nodes.Expr:
            if expr == code:
                return nodes.Ref(code.type, code.span, var)
            return changed(expr, change)

        lets = tuple(dataclasses.replace(let, value=change(let.value)) for let in item.part.lets)
        part = dataclasses.replace(item.part, lets=lets, value=change(item.part.value))
        function, table = scope.names.fresh("made_of"), scope.names.fresh("table")
        statements, text = scope.element(part, FLOAT, "0")
        width = "kWidth" if self._kernels.width is not None else "kAnyWidth"
        before = [
            *item.before,
            f"const auto {function} = [&]({scope.c.type(code.type)} {scope.names.of(var)}) {{",
            *(f"  {line}" for line in statements),
            f"  return {text};",
            "};",
            f"const auto {table} = table_of<{width}>({function});",
        ]
        looked = scope.names.fresh("looked_up")
        return dataclasses.replace(
            item,
            part=dataclasses.replace(item.part, lets=(), value=code),
            kind=code.type,
            before=before,
            # Asked for by all threads, whether they have the element or not.
            sink=lambda text: (
                f"const float {looked} = {table}({text}); "
                f"{values}[u] = is_inside ? {looked} : 0.0f;"
            ),
        )

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

    # What is the same for all elements of a block.

    def _block_lets(
        self, part: nodes.Elementwise
    ) -> tuple[nodes.Elementwise, dict[nodes.Var, str]]:
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
        if len(self._shared) + len(shared) > _MAX_LETS:
            return part, {}
        given: dict[nodes.Var, str] = {}
        for let in shared:
            value = _with_lets(part, of_block[: of_block.index(let)], let.value)
            number = self._shared_number(value, used[-1])
            size = f"own_sizes[{self._numbers[used[0]]}]"
            given[let.var] = f"own_lets[{_of_blocks(number)} + block_number(kEach * t, {size})]"
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
        for number, other in enumerate(self._shared):
            if is_same(value, other):
                return number
        number = len(self._shared)
        self._shared.append(value)
        [value], scope, behind = self._begin_block(made, [value])
        behind.add(*map(scope.c.let, value.lets))
        behind.add(f"own_lets[{_of_blocks(number)} + k] = {scope.c(value.value)};")
        behind.close()
        return number

    def _begin_block(
        self, made: nodes.Var, parts: Sequence[nodes.Elementwise]
    ) -> tuple[list[nodes.Elementwise], Scope, Lines]:
        """Begins what the thread that has reduced a block does then.

        Args:
            made: what it is reduced to, the last that is read.
            parts: what is computed, of any element of the block, or of the block.

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
                if is_number or block_of(expr, part.position, known) is not None:
                    return nodes.Ref(INT, expr.span, here)
                return changed(expr, change)

            lets = tuple(dataclasses.replace(let, value=change(let.value)) for let in part.lets)
            return dataclasses.replace(part, lets=lets, value=change(part.value))

        changed_parts = [of(part) for part in parts]
        behind = self._behind[made]
        behind.open("{")
        scope = self._kernels.scope_of(behind)
        scope.unpack(changed_parts)
        first = f"block_number(spot.base, own_sizes[{self._numbers[made]}])"
        behind.add(f"[[maybe_unused]] const int64_t {scope.names.of(here)} = {first} + k;")
        for var, value in values.items():
            at = _of_blocks(self._numbers[var])
            behind.add(f"const float {scope.names.of(value)} = own_made[{at} + k];")
        return changed_parts, scope, behind

    def _per_block(self, step: nodes.Sweep) -> None:
        """A sweep with an element per block, by the thread that has reduced the block."""
        of = self._made.fields[step.writes[0].field]
        made = [var for var, block in self._made.blocks.items() if block == of][-1]
        parts = [part_of(write.value) for write in step.writes]
        first = f"block_number(spot.base, own_sizes[{self._numbers[made]}])"
        parts, scope, behind = self._begin_block(made, parts)
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


def _of_blocks(number: int) -> str:
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
