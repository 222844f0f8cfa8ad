# SPDX-License-Identifier: Apache-2.0
"""The steps of a plan as CUDA kernels: sweeps, the ends of reductions, and blocks.

    sweep    a block of 128 threads has a tile of 1024 elements, eight neighbours a thread:
             phase 1   load, draw noise, compute; values and packed codes go to shared memory
             phase 2   16 threads a reduction fold its lanes; all threads write the codes
             phase 3   the tile's results of reductions
    finish   a block of threads a chunk: the tiles' results in the fixed tree
    header   by one thread, in the first kernel that knows the scalars of the body

A kernel is a function of the number of a block of threads, so that one block can also do all
kernels of a small call one after another: starting a kernel takes longer than a tile does.

Steps that need of each other only what their own tile made share a kernel: the largest value of
each block, the scales that follow from it, and the codes, are made while the tile is in the first
cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compll.backends.c_common import Lines, max_bits
from compll.backends.cuda_reads import knows_tile, reads_own, size_of
from compll.backends.cuda_reduce import Item, reduce_item
from compll.backends.cuda_scope import (
    Definition,
    Scope,
    Side,
    element,
    kept_size,
    most_kept,
    neutral,
    part_of,
    reads,
)
from compll.ir import nodes
from compll.ir.types import FLOAT, UInt
from compll.ir.walk import free_vars

_HEAD = (
    "[[maybe_unused]] const int64_t n = call.tensor.elements(spot.chunk);",
    "[[maybe_unused]] const Layout& layout = call.tensor.layout(spot.chunk);",
    "[[maybe_unused]] const int64_t begin = spot.chunk * kChunkElements;",
)
# The function that decodes a tile.
ROWS = "decode_tile_of_rows"
HERE = "load8(in, first, n, {tile});"
_SUM = "load_sum8(gradient, residual, value, first, n, {tile});"


def grid_of(name: str, call: str) -> list[str]:
    """The kernel that does a function of blocks of threads by as many of them as are launched."""
    return [f"TF_HIPS_KERNEL {name}_grid(const {call} call) {{ {name}(call, blockIdx.x); }}", ""]


def _grids_of(name: str) -> list[str]:
    """Two of one that may leave a residual: a call without one has no registers for it."""
    return [
        f"TF_HIPS_KERNEL {name}_grid(const EncodeCall call) {{",
        f"  {name}<false>(call, blockIdx.x);",
        "}",
        f"TF_HIPS_KERNEL {name}_rest_grid(const EncodeCall call) {{",
        f"  {name}<true>(call, blockIdx.x);",
        "}",
        f"inline void launch_{name}(const EncodeCall& call, int64_t blocks,",
        f"{' ' * len(f'inline void launch_{name}(')}cudaStream_t stream) {{",
        "  if (call.residual != nullptr) {",
        f"    TF_HIPS_LAUNCH({name}_rest_grid, blocks, kThreads, stream, call);",
        "  } else {",
        f"    TF_HIPS_LAUNCH({name}_grid, blocks, kThreads, stream, call);",
        "  }",
        "}",
        "",
    ]


@dataclass(frozen=True)
class Launch:
    """One kernel, or several, of a call.

    Attributes:
        grid: statement of the host that launches it.
        alone: statement of a block of threads that does it all; empty where it needs nothing.
        number: how many kernels are started.
    """

    grid: str
    alone: str
    number: int = 1

    def only_if(self, condition: str) -> "Launch":
        """The same where a condition (C++) of the call is met."""
        grid, alone = (f"if ({condition}) {text}" for text in (self.grid, self.alone))
        return Launch(grid, alone, self.number)


@dataclass
class Kernels:
    """Emits the kernels of one function, and notes what the host must do for them.

    Attributes:
        loops: lengths of loops; the host computes how many tiles each has.
        arrays: memory of a call: type, member, and C++ for the elements a chunk has of it.
        launches: what the host starts, in order.
        takes_sum: a kernel forms the sum of gradient and residual as it reads them.
        decoder: the plan, if its decode has a function for a tile.
        decodes_tiles: the last kernel leaves the residual, too.
    """

    side: Side
    lines: Lines
    header: tuple[tuple[int, nodes.Expr], ...] = ()
    loops: list[nodes.Expr] = field(default_factory=list)
    arrays: list[tuple[str, str, str]] = field(default_factory=list)
    scalars: list[tuple[str, str]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    takes_sum: bool = False
    decoder: nodes.Plan | None = None
    decodes_tiles: bool = False
    _had_header: bool = False
    _kernel: str = ""
    _blocks: str = ""
    _template: Lines = field(default_factory=Lines)
    _leaves: bool = False
    _in_loop: bool = False
    _is_header_written: bool = False
    _is_own: bool = False
    _may_sum: bool = False
    _number: int = 0

    @property
    def call(self) -> str:
        """The struct that kernels are given."""
        return "DecodeCall" if self.side.is_decode else "EncodeCall"

    @property
    def prefix(self) -> str:
        """What names of kernels begin with."""
        return "decode" if self.side.is_decode else "encode"

    def loop(self, size: nodes.Expr) -> int:
        """The number of a length among those that the host computes."""
        if size not in self.loops:
            self.loops.append(size)
        return self.loops.index(size)

    def array(self, kind: str, wanted: str, room: str) -> str:
        """Memory of the call, `room` (C++) elements a chunk; returns its member."""
        fresh = self.side.members.fresh
        member = fresh(wanted)
        while fresh(f"{member}_room") != f"{member}_room":  # where its length is told
            member = fresh(wanted)
        self.arrays.append((kind, member, room))
        return member

    def scalar(self, var: nodes.Var, kind: str, wanted: str = "") -> str:
        """A member of Scalars."""
        member = self.side.members.fresh(wanted or var.name)
        self.scalars.append((kind, member))
        return member

    def define(self, var: nodes.Var, form: str, value: nodes.Expr | None, member: str = "") -> None:
        """Makes a let or a scalar known to later kernels."""
        self.side.definitions.append(Definition(var, form, value, member))

    def define_kept(
        self, step: nodes.Store, member: str, count: str = "", *, is_picked: bool = False
    ) -> None:
        """Makes a vector that is kept known.

        `count`: the scalar that holds its length, if any; `is_picked`: `member` is a scalar, too.
        """
        size = kept_size(step)
        self.side.definitions.append(
            Definition(step.var, "kept", size, member, most_kept(step), count, is_picked)
        )

    # Kernels.

    def begin(
        self,
        kind: str,
        loop: int | None,
        *,
        is_check: bool = False,
        opening: Sequence[str] = (),
        parts: Sequence[nodes.Elementwise] = (),
        besides: Sequence[nodes.Expr] = (),
    ) -> str:
        """Opens a kernel over the tiles of a loop, or over chunks; returns its name.

        Args:
            kind: what its name says.
            loop: number of the loop; a block of threads has a run of neighbouring tiles.
            is_check: it may complain; of a decode all others do nothing when one has.
            opening: statements before the first tile.
            parts: all that its loops compute of the tile's elements and blocks.
            besides: what else it computes.
        """
        self._number += 1
        name = f"{self.prefix}_{kind}{self._number}"
        add = self.lines.add
        self._kernel = name
        self._had_header = self._is_header_written
        # It may write the header, too, if that is not written.
        header = [] if self._had_header else [value for _, value in self.header]
        self._is_own = reads_own(self.side, parts, [*besides, *header])
        self._may_sum = self._is_own and not self.side.has_read
        self._leaves = False
        self._template = self.lines.later()
        self.lines.open(f"TF_HIPS_BLOCK {name}(const {self.call}& call, uint32_t block_index) {{")
        if self.side.is_decode and not is_check:
            add("if (*call.report != TF_HIPS_CUDA_FINE) return;")
        if loop is None:
            add("const Spot spot = {static_cast<int64_t>(block_index), 0};")
        else:
            add(*opening)
            self.lines.open(f"for (int turn = 0; turn < call.run[{loop}]; ++turn) {{")
            self._in_loop = True
            add(
                f"const int64_t block_here = int64_t{{block_index}} * call.run[{loop}] + turn;",
                f"if (block_here >= call.blocks[{loop}]) break;",
                f"const Spot spot = find_spot(static_cast<uint32_t>(block_here), "
                f"call.tiles[{loop}]);",
            )
        add(*_HEAD)
        if self.scalars or kind == "finish":
            add("[[maybe_unused]] const Scalars& scalars = call.scalars[spot.chunk];")
        if self.side.is_decode:
            self._decode_head()
        else:
            add(
                "uint8_t* const packet = call.packets + spot.chunk * call.tensor.stride;",
                "[[maybe_unused]] uint8_t* const body = packet + kPrefixBytes;",
                "[[maybe_unused]] const float* const in = call.in + begin;",
                "[[maybe_unused]] TfHipsKey key = call.key;",
                "key.offset += static_cast<uint64_t>(begin);",
            )
        blocks = "call.tensor.chunks"
        if loop is not None:
            blocks = f"num_runs(call.blocks[{loop}], call.run[{loop}])"
        self._blocks = blocks
        self.launches.append(
            Launch(
                f"TF_HIPS_LAUNCH({name}_grid, {blocks}, kThreads, stream, call);",
                f"for (uint32_t k = 0; k < {blocks}; ++k) {name}(call, k);",
            )
        )
        return name

    def _decode_head(self) -> None:
        self.lines.add(
            "[[maybe_unused]] float* const out = call.out + begin;",
            "[[maybe_unused]] const int64_t at = spot.chunk * call.tensor.stride + kPrefixBytes;",
            "[[maybe_unused]] const uint8_t* const body = call.rows.row[0] + at;",
        )

    def end(self, closing: Sequence[str] = ()) -> None:
        """Closes a kernel; `closing`: statements behind the last tile."""
        if self._in_loop:
            self.lines.close()
            self.lines.add(*closing)
            self._in_loop = False
        self.lines.close()
        if not self._leaves:
            self.lines.add(*grid_of(self._kernel, self.call))
            return
        name, blocks = self._kernel, self._blocks
        self._template.add("template <bool leaves_rest>")
        self.lines.add(*_grids_of(name))
        alone = f"for (uint32_t k = 0; k < {blocks}; ++k) {name}<true>(call, k);"
        self.launches[-1] = Launch(f"launch_{name}(call, {blocks}, stream);", alone)

    def scope(self) -> Scope:
        """New variables, for what is put into braces."""
        self.lines.open("{")
        return Scope(self.side, self.lines)

    def write_header(self, *, in_tiles: bool, unknown: nodes.Var | None = None) -> None:
        """Writes prefix and scalars of the body here, if all are known and nothing has.

        `unknown`: what only later kernels may read anywhere.
        """
        if self.side.is_decode or self._is_header_written:
            return
        known = self.side.known() - {unknown}
        if not all(free_vars(value) <= known for _, value in self.header):
            return
        self._is_header_written = True
        if in_tiles:
            self.lines.open("if (spot.base == 0) {")
            scope = Scope(self.side, self.lines)
        else:
            scope = self.scope()
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0) {")
        scope.unpack([value for _, value in self.header])
        self.lines.add("write_prefix(call.tensor.hash, n, packet);")
        for number, value in self.header:
            at = f"body + layout.offset[{number}]"
            if value.type == FLOAT:
                self.lines.add(f"store_float({scope.c(value)}, {at});")
            else:
                bits = scope.bits(value.type)
                self.lines.add(f"store_code({scope.c(value)}, {bits}, {at});")
        self.lines.close()
        self.lines.close()
        self.lines.close()

    def finish_header(self) -> None:
        """Writes it in a kernel of its own, if no other could."""
        if self.side.is_decode or self._is_header_written:
            return
        self.begin("header", None)
        self.write_header(in_tiles=False)
        self.end()

    # Loops over the elements of a tile.

    def sum_lines(self, roots: Sequence[nodes.Expr]) -> str:
        """How a loop loads the gradient.

        The first kernel that reads it forms the sum as it does so, if it reads nothing of it that
        another thread has to form. Else a kernel before all forms it.
        """
        if self.side.is_decode or not self._may_sum or not reads(roots, self.side.gradient):
            return HERE
        self._may_sum = False
        self.takes_sum = True
        self.lines.add(
            "const float* const gradient = call.gradient + begin;",
            "const float* const residual = call.residual == nullptr ? nullptr : "
            "call.residual + begin;",
            "float* const value = call.residual == nullptr ? nullptr : call.value + begin;",
        )
        return _SUM

    def each(
        self,
        scope: Scope,
        size: nodes.Expr,
        gradient: str,
        elements: str,
        items: Sequence[Item],
    ) -> None:
        """A phase in which each thread computes eight elements of each vector."""
        add = self.lines.add
        self.lines.open("TF_HIPS_PHASE(t) {")
        add("const int64_t first = spot.base + kEach * t;")
        scope.load([item.part for item in items], size, gradient)
        for item in items:
            add(*item.before)
        inside = scope.names.fresh("inside")
        add(
            f"[[maybe_unused]] const int {inside} = "
            f"static_cast<int>(least(kEach, {elements} - first));",
            "TF_HIPS_UNROLL",
        )
        self.lines.open("for (int u = 0; u < kEach; ++u) {")
        add(f"[[maybe_unused]] const bool is_inside = u < {inside};")
        done: list[str] = []
        for item in items:
            statements, text = scope.element(item.part, item.kind, "first + u")
            # Two parts may share a let, which then is there.
            done += [line for line in [*statements, item.sink(text)] if line not in done]
        add(*done)
        self.lines.close()
        for item in items:
            add(*item.after)
        self.lines.close()

    # Sweeps.

    def sweep(
        self, step: nodes.Sweep, lets: Sequence[nodes.Let] = (), *, is_last: bool = False
    ) -> None:
        """A loop with reductions, writes or both, and what ends the reductions.

        `lets`: what is computed right after it, which may be all that the header waits for.
        """
        loop = self.loop(step.size)
        parts = [part_of(reduce.source) for _, reduce in step.reduces]
        parts += [part_of(write.value) for write in step.writes]
        self.begin("sweep", loop, parts=parts)
        self.sweep_body(step, loop)
        self.write_header(in_tiles=True)
        if is_last and not step.reduces and step.size == size_of(self.side.gradient):
            self.decode_tile(step.writes, {})
        self.end()
        if step.reduces:
            self._finish(step, lets)
        else:
            self._define_lets(lets)

    def sweep_body(self, step: nodes.Sweep, loop: int) -> None:
        """The phases of a sweep, in braces."""
        scope, add = self.scope(), self.lines.add
        roots: list[nodes.Expr] = [reduce.source for _, reduce in step.reduces]
        roots += [part_of(write.value) for write in step.writes]
        scope.unpack([step.size, *roots])
        elements = scope.names.fresh("elements")
        add(f"const int64_t {elements} = {scope.c(step.size)};")
        gradient = self.sum_lines(roots)
        items = []
        second: list[str] = []
        third: list[str] = []
        for number, (var, reduce) in enumerate(step.reduces):
            kind = "float" if reduce.type == FLOAT else "int64_t"
            member = self.array(kind, f"{var.name}_parts", f"2 * call.tiles[{loop}]")
            self._parts[var] = member
            items.append(reduce_item(scope, var, reduce, number, member, (second, third)))
        for write in step.writes:
            items.append(self._write(scope, write, elements, second))
        self.each(scope, step.size, gradient, elements, items)
        for phase in (second, third):
            if phase:
                self.lines.open("TF_HIPS_PHASE(t) {")
                add(*phase)
                self.lines.close()
        self.lines.close()

    _parts: dict[nodes.Var, str] = field(default_factory=dict)

    def _write(self, scope: Scope, write: nodes.Write, elements: str, second: list[str]) -> Item:
        part, names = part_of(write.value), scope.names
        kind = element(write.value.type)
        if self.side.is_decode:
            result = names.fresh("result")
            return Item(
                part,
                FLOAT,
                [
                    f"float {result}[kEach];",
                    f"if (call.mode != TF_HIPS_SET) load8(out, first, n, {result});",
                ],
                lambda text: f"{result}[u] = joined(call.mode, {result}[u], {text});",
                [f"put8({result}, first, n, out);"],
            )
        encode = self.side.program.encode
        state = write.field - (0 if encode is None else len(encode.fields))
        if state >= 0:
            result = names.fresh("result")
            return Item(
                part,
                FLOAT,
                [f"float {result}[kEach];"],
                lambda text: f"{result}[u] = {text};",
                [f"put8({result}, first, n, call.new_state[{state}] + begin);"],
            )
        bits = scope.bits(kind)
        held = scope.c.type(kind)
        most = max_bits(kind, self.side.program.params) if isinstance(kind, UInt) else 32
        codes, staged = names.fresh("codes"), names.fresh("staged")
        self.lines.add(f"TF_HIPS_SHARED uint32_t {staged}[{most} * kTile / 32 + 4];")
        count = f"least(kTile, {elements} - spot.base)"
        target = f"body + layout.offset[{write.field}] + spot.base / 8 * {bits}"
        second.append(f"write_staged(t, {staged}, packed_bytes({count}, {bits}), {target});")
        zero = f"static_cast<{held}>(0)"
        pack8 = "pack8" if bits.isdecimal() else "pack8_by"
        return Item(
            part,
            kind,
            [f"{held} {codes}[kEach];"],
            lambda text: f"{codes}[u] = is_inside ? {text} : {zero};",
            [f"{pack8}({codes}, {bits}, reinterpret_cast<uint8_t*>({staged}) + t * {bits});"],
        )

    def _define_lets(self, lets: Sequence[nodes.Let]) -> None:
        for let in lets:
            self.define(let.var, "let", let.value)

    def _finish(self, step: nodes.Sweep, lets: Sequence[nodes.Let]) -> None:
        self.begin("finish", None)
        scope = self.scope()
        inits = [reduce.init for _, reduce in step.reduces]
        scope.unpack([step.size, *inits])
        elements, tiles = scope.names.fresh("elements"), scope.names.fresh("filled")
        self.lines.add(
            f"const int64_t {elements} = {scope.c(step.size)};",
            f"const int64_t {tiles} = {elements} <= 0 ? 0 : num_tiles({elements});",
        )
        found = []
        for var, reduce in step.reduces:
            kind = "float" if reduce.type == FLOAT else "int64_t"
            member = self.scalar(var, kind)
            function = "finish_floats" if reduce.type == FLOAT else "finish_ints"
            parts = f"call.{self._parts[var]} + spot.chunk * call.{self._parts[var]}_room"
            self.lines.add(
                f"{function}<{neutral(reduce.reducer, reduce.type)}>({parts}, {tiles}, "
                f"{scope.c(reduce.init)}, &call.scalars[spot.chunk].{member});"
            )
            found.append((var, member))
        self.lines.close()
        for var, member in found:
            self.define(var, "scalar", None, member)
        self._define_lets(lets)
        self.write_header(in_tiles=False)
        self.end()

    # A decode whose one loop makes any element without the others: it sums rows as it goes.

    def rows(self, step: nodes.Sweep) -> None:
        """The sum of the decoded rows of a call, element by element, in one pass."""
        part = part_of(step.writes[0].value)
        add = self.lines.add
        add("// A tile of the sum of the rows.")
        self.lines.open(f"TF_HIPS_BLOCK {ROWS}(const DecodeCall& call, const Spot& spot) {{")
        add(*_HEAD)
        self._decode_head()
        self.lines.open("TF_HIPS_PHASE(t) {")
        add(
            "const int64_t first = spot.base + kEach * t;",
            "float sum[kEach];",
            "if (call.mode != TF_HIPS_SET) load8(out, first, n, sum);",
        )
        self.lines.open("for (int32_t row = 0; row < call.rows.num; ++row) {")
        scope = Scope(self.side, self.lines, "(call.rows.row[row] + at)")
        scope.unpack([step.size, part])
        add("const int32_t how = row == 0 ? call.mode : static_cast<int32_t>(TF_HIPS_ADD);")
        scope.load([part], step.size, HERE)
        add("TF_HIPS_UNROLL")
        self.lines.open("for (int u = 0; u < kEach; ++u) {")
        statements, text = scope.element(part, FLOAT, "first + u")
        add(*statements, f"sum[u] = joined(how, sum[u], {text});")
        self.lines.close()
        self.lines.close()
        add("put8(sum, first, n, out);")
        self.lines.close()
        self.lines.close()
        add("")
        self.begin("rows", self.loop(step.size))
        add(f"{ROWS}(call, spot);")
        self.end()

    # Error feedback: what is left, tile by tile, by the kernel that writes the codes.

    def decode_tile(self, writes: Sequence[nodes.Write], blocks: dict[int, nodes.Expr]) -> None:
        """Decodes the tile that a kernel, the last one, has just encoded, if that can be done.

        `blocks`: of the fields with an element per block of the tile, the block.
        """
        if self.decoder is None or not self._is_header_written or not self._is_own:
            # What this kernel or the header's reads anywhere must be there until it has.
            return
        if not knows_tile(self.decoder, writes, blocks, had_header=self._had_header):
            return
        self.decodes_tiles = self._leaves = True
        self.lines.open("if constexpr (leaves_rest) {")
        self.lines.add(f"if (call.residual != nullptr) decode_kernels::{ROWS}(call.rest, spot);")
        self.lines.close()
