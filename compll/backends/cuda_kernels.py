# SPDX-License-Identifier: Apache-2.0
"""The steps of a plan as CUDA kernels: sweeps, the ends of reductions, and blocks.

    sweep    a block of 128 threads has a tile of 1024 elements, eight neighbours a thread:
             phase 1   load, draw noise, compute; codes that are whole words are written, other
                       codes and values go to shared memory
             phase 2   16 threads a reduction fold its lanes, but of extremes, which warps have
                       found already; all threads write the other codes
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

from compll.backends.c_common import Lines
from compll.backends.cuda_reads import knows_tile, reads_own, takes_tile
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Gradient, Scope
from compll.backends.cuda_side import Definition, Side, kept_size, most_kept, reads
from compll.backends.cuda_widths import grids_of, width_in, width_of
from compll.backends.cuda_written import ROWS, Written
from compll.ir import nodes
from compll.ir.types import FLOAT
from compll.ir.walk import free_vars

HEAD = (
    "[[maybe_unused]] const int64_t n = call.tensor.elements(spot.chunk);",
    "[[maybe_unused]] const Layout& layout = call.tensor.layout(spot.chunk);",
    "[[maybe_unused]] const int64_t begin = spot.chunk * kChunkElements;",
)
# Vectors of codes of a kernel of which as many blocks share a multiprocessor as can.
_MAX_CROWDED = 2
# Those that shared memory has room for beside a block_reduce, sums, and a tile that is exchanged.
_MAX_BESIDE_TILE = 5
HERE = Gradient("load8<is_full>(in", ("in",))
_SUM = Gradient("load_sum8<is_full>(gradient, residual, value", ("gradient", "residual", "value"))
_AGAIN = Gradient("load_again8<is_full>(in, residual, value", ("in",))


def grid_of(name: str, call: str, *, opening: str = "follow();", kind: str = "") -> list[str]:
    """The kernel that does a function of blocks of threads by as many of them as are launched."""
    return [
        f"TF_HIPS_{kind}KERNEL {name}_grid(const {call} call) {{",
        f"  {opening}",
        f"  {name}(call, blockIdx.x);",
        "}",
        "",
    ]


def _grids_of(made: Written) -> list[str]:
    """Two of one that may leave a residual: a call without one has no registers for it."""
    name = made.name
    # More vectors of codes, or words, need more registers than so many blocks leave.
    is_crowded = made.vectors <= _MAX_CROWDED and not made.has_words
    kind = "CROWDED_" if is_crowded else ""
    return [
        f"TF_HIPS_{kind}KERNEL {name}_grid(const EncodeCall call) {{",
        "  follow();",
        "  TF_HIPS_ASSUME(call.residual == nullptr);",
        f"  {name}<false>(call, blockIdx.x);",
        "}",
        f"TF_HIPS_{kind}KERNEL {name}_rest_grid(const EncodeCall call) {{",
        "  follow();",
        f"  {name}<true>(call, blockIdx.x);",
        "}",
        f"inline void launch_{name}(const EncodeCall& call, int64_t blocks,",
        f"{' ' * len(f'inline void launch_{name}(')}cudaStream_t stream) {{",
        "  if (call.residual != nullptr) {",
        f"    TF_HIPS_FOLLOW({name}_rest_grid, blocks, kThreads, stream, call);",
        "  } else {",
        f"    TF_HIPS_FOLLOW({name}_grid, blocks, kThreads, stream, call);",
        "  }",
        "}",
        "",
    ]


@dataclass(frozen=True)
class Launch:
    """One kernel, or several, of a call.

    Attributes:
        grid: statement of the host that launches it; empty where one block of threads alone has it.
        alone: statement of a block of threads that does it all; empty where it needs nothing.
        number: how many kernels are started.
    """

    grid: str
    alone: str
    number: int = 1

    def only_if(self, condition: str) -> "Launch":
        """The same where a condition (C++) of the call is met."""
        grid, alone = (
            f"if ({condition}) {text}" if text else "" for text in (self.grid, self.alone)
        )
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
        written: all of them so far.
        keeps: its kernels keep vectors, and are many; one block of threads that does them all has
            no code for full tiles, or its code would not fit in a cache.
        width: a parameter that kernels are compiled for each value of, while one is written.
        waits_late: the kernel itself waits for the one before, if that has just checked packets.
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
    keeps: bool = False
    width: nodes.Param | None = None
    waits_late: bool = False
    written: list[Written] = field(default_factory=list)
    _had_header: bool = False
    _kind: str = ""
    _blocks: str = ""
    _in_loop: bool = False
    _is_header_written: bool = False
    _is_own: bool = False
    _may_sum: bool = False
    _has_tile: bool = False
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

    def define(
        self,
        var: nodes.Var,
        form: str,
        value: nodes.Expr | None,
        member: str = "",
        here: str = "",
    ) -> None:
        """Makes a let or a scalar known to later kernels; `here`: C++ for it in this one."""
        self.side.definitions.append(Definition(var, form, value, member, here=here))

    def define_kept(
        self,
        step: nodes.Store,
        member: str,
        count: str = "",
        *,
        is_picked: bool = False,
        here: str = "",
        is_roomy: bool = False,
    ) -> None:
        """Makes a vector that is kept known.

        Args:
            step: makes it.
            member: of the call, or of Scalars if `is_picked`.
            count: the scalar that holds its length, if any.
            is_picked: only one element of it is kept.
            here: C++ for it in the kernel that makes it, if that needs it.
            is_roomy: it begins at 16 bytes and has room for whole eights.
        """
        size = kept_size(step)
        most = most_kept(step)
        self.side.definitions.append(
            Definition(step.var, "kept", size, member, most, count, is_picked, here, is_roomy)
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
        is_wide: bool = False,
        is_crowded: bool = False,
    ) -> str:
        """Opens a kernel over the tiles of a loop, or over chunks; returns its name.

        Args:
            kind: what its name says.
            loop: number of the loop.
            is_check: it may complain; of a decode all others do nothing when one has.
            opening: statements before the first tile. A block of threads then has a run of
                neighbouring tiles, else one.
            parts: all that its loops compute of the tile's elements and blocks.
            besides: what else it computes.
            is_wide: its blocks have kWide threads.
            is_crowded: so few registers that as many blocks run as can, which hides latency.
        """
        self._number += 1
        name = f"{self.prefix}_{kind}{self._number}"
        add = self.lines.add
        self._kind = "WIDE_" if is_wide else "CROWDED_" if is_crowded else ""
        self._had_header = self._is_header_written
        # It may write the header, too, if that is not written.
        header = [] if self._had_header else [value for _, value in self.header]
        self._is_own = reads_own(self.side, parts, [*besides, *header])
        self._may_sum = self._is_own and not self.side.has_read
        self.waits_late = self._has_tile = False
        made = Written(
            kind,
            name,
            self.call,
            loop,
            self.lines.later(),
            self.lines.open_later(),
            self.lines.same_depth(),
        )
        self.written.append(made)
        if self.side.is_decode and not is_check:
            add("if (*call.report != TF_HIPS_CUDA_FINE) return;")
        blocks = "call.tensor.chunks" if loop is None else f"call.blocks[{loop}]"
        if loop is None:
            add("const Spot spot = {static_cast<int32_t>(block_index), 0};")
        elif not opening:
            add(f"const Spot spot = find_spot(block_index, call.tiles[{loop}]);")
        else:
            blocks = f"num_runs(call.blocks[{loop}], call.run[{loop}])"
            add(*opening)
            self.lines.open(f"for (int turn = 0; turn < call.run[{loop}]; ++turn) {{")
            self._in_loop = True
            add(
                f"const int64_t block_here = int64_t{{block_index}} * call.run[{loop}] + turn;",
                f"if (block_here >= call.blocks[{loop}]) break;",
                f"const Spot spot = find_spot(static_cast<uint32_t>(block_here), "
                f"call.tiles[{loop}]);",
            )
        add(*HEAD)
        if self.scalars or kind == "finish":
            add("[[maybe_unused]] const Scalars& scalars = call.scalars[spot.chunk];")
        if self.side.is_decode:
            self.decode_head()
        else:
            add(
                "uint8_t* const packet = call.packets + spot.chunk * call.tensor.stride;",
                "[[maybe_unused]] uint8_t* const body = packet + kPrefixBytes;",
                "[[maybe_unused]] const float* const in = call.in + begin;",
                "[[maybe_unused]] TfHipsKey key = call.key;",
                "key.offset += static_cast<uint64_t>(begin);",
            )
            made.sum = self.lines.later()
        self._blocks = blocks
        self.launches.append(
            Launch(
                f"TF_HIPS_FOLLOW({name}_grid, {blocks}, {'kWide' if is_wide else 'kThreads'}, "
                "stream, call);",
                f"for (uint32_t k = 0; k < {blocks}; ++k) {name}(call, k);",
            )
        )
        return name

    def decode_head(self) -> None:
        """What a kernel of a decode begins with."""
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
        made, blocks = self.written[-1], self._blocks
        name = made.name
        opening = "if (!call.is_just_checked) follow();" if self.waits_late else "follow();"
        if self.width is not None:
            made.has_width = True
            program, leaves = self.side.program, made.leaves
            self.lines.add(*grids_of(name, self.call, program, self.width, opening, leaves=leaves))
            inner = f"kAnyWidth{', true' if leaves else ''}"
            alone = f"for (uint32_t k = 0; k < {blocks}; ++k) {name}<{inner}>(call, k);"
            self.launches[-1] = Launch(f"launch_{name}(call, {blocks}, stream);", alone)
            return
        if not made.leaves:
            self.lines.add(*grid_of(name, self.call, opening=opening, kind=self._kind))
            return
        self.lines.add(*_grids_of(made))
        alone = f"for (uint32_t k = 0; k < {blocks}; ++k) {name}<true>(call, k);"
        self.launches[-1] = Launch(f"launch_{name}(call, {blocks}, stream);", alone)

    def scope(self) -> Scope:
        """New variables, for what is put into braces."""
        self.lines.open("{")
        return self.scope_of(self.lines)

    def scope_of(self, lines: Lines) -> Scope:
        """New variables of the kernel that is being written."""
        scope = Scope(self.side, lines)
        if self.width is not None:
            scope.fixed = {self.width.var: width_in(self.side.program, self.width)}
        return scope

    @property
    def is_header_written(self) -> bool:
        """Whether a kernel writes the header."""
        return self._is_header_written

    def knows_header(self, unknown: Sequence[nodes.Var] = ()) -> bool:
        """Whether all that it needs is known, without what only later kernels may read."""
        known = self.side.known() - set(unknown)
        return all(free_vars(value) <= known for _, value in self.header)

    def declare_tile(self) -> None:
        """Shared memory in which threads exchange what a tile has."""
        self._has_tile = True
        self.lines.add("TF_HIPS_SHARED float own_tile[kPaddedTile];")

    def write_header(
        self, *, in_tiles: bool, by_one: bool = False, unknown: Sequence[nodes.Var] = ()
    ) -> None:
        """Writes prefix and scalars of the body here, if all are known and nothing has.

        Args:
            in_tiles: where tiles are done; by the first.
            by_one: where one thread is at work.
            unknown: what only later kernels may read anywhere.
        """
        if self.side.is_decode or self._is_header_written or not self.knows_header(unknown):
            return
        self._is_header_written = True
        if in_tiles:
            self.lines.open("if (spot.base == 0) {")
            scope = Scope(self.side, self.lines)
        else:
            scope = self.scope()
        if not by_one:
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
        for _ in range(1 if by_one else 3):
            self.lines.close()

    def finish_header(self) -> None:
        """Writes it in a kernel of its own, if no other could."""
        if self.side.is_decode or self._is_header_written:
            return
        self.begin("header", None)
        self.write_header(in_tiles=False)
        self.end()

    # Loops over the elements of a tile.

    def sum_lines(self, roots: Sequence[nodes.Expr]) -> Gradient:
        """How a loop loads the gradient.

        The first kernel that reads it forms the sum as it does so, if it reads nothing of it that
        another thread has to form. Else a kernel before all forms it.
        """
        if self.side.is_decode or not reads(roots, self.side.gradient):
            return HERE
        if not self._may_sum:
            return _AGAIN if self.written[-1].has_sum else HERE
        self._may_sum = False
        self.takes_sum = self.written[-1].has_sum = True
        return _SUM

    def each(
        self,
        scope: Scope,
        size: nodes.Expr,
        gradient: Gradient,
        elements: str,
        items: Sequence[Item],
        phase: str = "TF_HIPS_PHASE",
    ) -> None:
        """A phase in which each thread computes eight elements of each vector.

        In two forms: most tiles are full, and need not ask of each element whether it is there.
        """
        add = self.lines.add
        whole = self.lines.later()
        self.lines.open(f"{phase}(t) {{")
        self.open_eight()
        scope.load([item.part for item in items], size, gradient)
        for item in items:
            add(*item.before)
        inside = scope.names.fresh("inside")
        add(
            f"[[maybe_unused]] const int {inside} = "
            f"is_full ? kEach : static_cast<int>(least(kEach, {elements} - first));",
            "TF_HIPS_UNROLL",
        )
        self.lines.open("for (int u = 0; u < kEach; ++u) {")
        add(f"[[maybe_unused]] const bool is_inside = u < {inside};")
        done: list[str] = []
        for item in items:
            statements, text = scope.element(
                item.part, item.kind, "first + u", is_whole=item.is_whole
            )
            # Two parts may share a let, which then is there.
            done += [line for line in [*statements, item.sink(text)] if line not in done]
        add(*done)
        self.lines.close()
        for item in items:
            add(*item.after)
        self.close_eight()
        self.lines.close()
        wide = [*scope.wide, *(to for item in items for to in item.wide)]
        besides = "call.alone == 0 && " if self.keeps else ""
        self.say_full(
            whole, f"least({elements}, n)", wide, draws=bool(scope.drawn), besides=besides
        )
        whole.add(*(line for item in items for line in item.opening))

    @staticmethod
    def say_full(
        lines: Lines,
        elements: str,
        wide: Sequence[str],
        *,
        draws: bool = False,
        besides: str = "",
    ) -> None:
        """Declares whether a tile has all its elements, and all is where it can be read fast.

        `draws`: noise, too; `besides`: C++ for what must hold as well.
        """
        aligned = f" && are_aligned({', '.join(dict.fromkeys(wide))})" if wide else ""
        aligned += " && is_noise_whole(key)" if draws else ""
        lines.add(f"const bool is_full_tile = {besides}spot.base + kTile <= {elements}{aligned};")

    def open_eight(self) -> None:
        """Begins what a thread does with its eight elements, in a phase; `is_full`: all of them."""
        self.lines.open("const auto eight = [&](auto is_whole) {")
        self.lines.add(
            "constexpr bool is_full = decltype(is_whole)::value;",
            "const int64_t first = spot.base + kEach * t;",
        )

    def close_eight(self) -> None:
        """Ends it, and does it."""
        self.lines.close("};")
        self.lines.open("if (is_full_tile) {")
        self.lines.add("eight(std::true_type{});")
        self.lines.turn("} else {")
        self.lines.add("eight(std::false_type{});")
        self.lines.close()

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
        if takes_tile(self.decoder) and not self._has_tile:
            if self.written[-1].vectors > _MAX_BESIDE_TILE:
                return
            self.declare_tile()
        self.decodes_tiles = self.written[-1].leaves = True
        self.lines.open("if constexpr (leaves_rest) {")
        sums = "own_sums" if self.written[-1].has_sum else "nullptr"
        self.lines.open("if (call.residual != nullptr) {")
        which, tile = "true", ""
        if takes_tile(self.decoder):
            tile = ", own_tile"
            if width_of(self.side.program) is not None:
                which += ", kAnyWidth" if self.width is None else ", kWidth"
        self.lines.add(f"decode_kernels::{ROWS}<{which}>(call.rest, spot, {sums}{tile});")
        self.lines.close()
        self.lines.close()
