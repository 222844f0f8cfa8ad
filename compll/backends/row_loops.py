# SPDX-License-Identifier: Apache-2.0
"""Loops over tiles some of which are functions of rows, too (row_code.py)."""

from compll.backends.blocks import block_lets
from compll.backends.c_common import Lines, max_bits
from compll.backends.loops import Loops, parts_of
from compll.backends.row_code import Packed, Rest, RowCode
from compll.backends.row_function import Apart
from compll.backends.row_results import RowResult, can_fold, chosen_of_rows, results_of_rows
from compll.backends.row_table import look_up_values
from compll.backends.stored import is_in_memory, is_of_floats, tile_bytes
from compll.backends.tile_feedback import TileFeedback
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.groups import mirror_of
from compll.ir.sizes import blocks_in
from compll.ir.types import FLOAT, Array, UInt

# Bits of codes that a row has in one or two words.
_PACKED_WIDTHS = (1, 2, 4, 8)


class RowLoops(Loops):
    """Emits functions of rows, and calls them.

    Attributes:
        apart: where they go; None: there are none.
    """

    apart: Apart | None = None
    _whole: tuple[RowCode, str] | None = None

    def __post_init__(self) -> None:
        """No codes have been read yet."""
        super().__post_init__()
        self._packed: dict[nodes.Var, str] = {}

    # Sources of functions of rows.

    def row_in_memory(self, expr: nodes.Index) -> str | None:
        """C++ for where the floats of a tile begin; None: it is no vector of floats in memory."""
        tile = self.mirrored(expr)
        if tile is not None and isinstance(expr.array, nodes.Ref):
            return tile if is_of_floats(self.stored[expr.array.var]) else None
        if not isinstance(expr.array, nodes.Ref) or not self._is_here(expr.index):
            return None
        vector = self.stored[expr.array.var]
        is_plain = self._is_whole(vector) and is_in_memory(vector)
        return f"{vector.pointer} + {self._at(vector)}" if is_plain else None

    def row_of_codes(self, expr: nodes.Index) -> str | None:
        """C++ for the codes of a tile, a byte each; None: it is no vector of such."""
        tile = self.mirrored(expr)
        if not isinstance(expr.array, nodes.Ref) or not (tile or self._is_here(expr.index)):
            return None
        vector = expr.array.var
        kind = vector.type.element if isinstance(vector.type, Array) else vector.type
        is_small = isinstance(kind, UInt) and max_bits(kind, self.params) <= 8
        return (tile or self._tiles.get(vector)) if is_small else None

    def row_of_bits(self, expr: nodes.Index) -> str | None:
        """C++ for the bits of a tile in memory; None: it is no vector of such."""
        if not isinstance(expr.array, nodes.Ref) or not self._is_here(expr.index):
            return None
        vector = self.stored[expr.array.var]
        is_plain = vector.is_field and vector.bits == "1" and self._is_whole(vector)
        return f"{vector.pointer} + base / 8" if is_plain else None

    def row_of_packed(self, expr: nodes.Index) -> Packed | None:
        """Codes in memory, of widths that rows can have; None: there are no such."""
        if not isinstance(expr.array, nodes.Ref):
            return None
        vector, mirror = self.stored[expr.array.var], mirror_of(expr.index, self._position)
        kind = vector.var.type
        kind = kind.element if isinstance(kind, Array) else kind
        if not isinstance(kind, UInt) or not vector.is_field:
            return None
        if mirror is None and (not self._is_here(expr.index) or not self._is_whole(vector)):
            return None
        if vector.bits is None or vector.is_local or max_bits(kind, self.params) > 8:
            return None
        if isinstance(kind.bits, int) and kind.bits not in _PACKED_WIDTHS:
            return None
        if vector.var not in self._packed:
            self._packed[vector.var] = self.names.fresh(f"{vector.var.name}_packed")
        at = f"{vector.pointer} + {tile_bytes(vector.bits)}"
        # The last group of the other way round need not be whole.
        has_all = self._is_whole(vector) if mirror is None else vector.size == self._size
        count = None if has_all else vector.count
        return Packed(self._packed[vector.var], at, vector.bits, count, mirror or 0)

    def run_before(self, rows: RowCode) -> None:
        """Emits what a function of rows needs before it is called."""
        if rows.uses_bytes:
            self.run_unpacks()
        # One vector may be read in order, and the other way round.
        self.lines.add(*dict.fromkeys(codes.declaration for codes in rows.packed))

    def take_bytes(self, rows: RowCode) -> None:
        """Declares the codes that a function of rows has as packed, from tiles of bytes."""
        for codes in rows.packed:
            [vector] = [v for v, name in self._packed.items() if name == codes.name]
            self.lines.add(f"const uint8_t* const {codes.name} = {self._tiles[vector]};")

    def row_code(
        self, part: nodes.Elementwise, tag: str = "p", *, is_varied: bool = False
    ) -> RowCode | None:
        """How a decode computes a tile in rows; None: it cannot.

        Args:
            part: what it computes.
            tag: what names of parameters begin with.
            is_varied: only from codes as they are in memory, whose width may depend on parameters,
                and whose number need not be that of the elements.
        """
        self._position = part.position
        for uses_bits, uses_packed, is_table in (
            (False, True, True),
            (True, False, False),
            (False, True, False),
            (False, False, False),
        ):
            rows = RowCode(
                self.c, self, part, tag=tag, uses_bits=uses_bits, uses_packed=uses_packed
            )
            if not rows.prepare_value() or (is_varied and rows.uses_bytes):
                continue
            # In a tile there may be fewer codes than elements, and codes as bytes are there too.
            is_whole = rows.varied_bits is None and all(c.count is None for c in rows.packed)
            if not is_varied and not is_whole:
                continue
            if not is_table or look_up_values(rows):
                return rows
        return None

    def _at_once(self, sweep: nodes.Sweep, targets: dict[int, str], begin: str, count: str) -> str:
        """Decodes all whole rows in one call, if they need nothing that is made tile by tile."""
        self._whole = None
        parts = parts_of(sweep)
        # A sweep that reduces must see all elements.
        is_store = bool(sweep.writes) and not sweep.reduces
        if not is_store or self.apart is None or list(targets.values()) != ["out"]:
            return begin
        if len(parts) != 1:
            return begin
        self._size, self._position = sweep.size, parts[0].position
        hoisted, _ = block_lets(parts[0], self.blocks, self._hoisted)
        rows = None if hoisted else self.row_code(parts[0], is_varied=True)
        if rows is None:
            return begin
        call = rows.values(self.apart)
        self._whole = rows, call
        rest, lines = self.names.fresh("rest"), self.lines
        lines.add(f"int64_t {rest} = {begin};")
        lines.open("{")
        ends = {count, *(codes.count for codes in rows.packed if codes.count is not None)}
        end = count if len(ends) == 1 else f"std::min<int64_t>({', '.join(sorted(ends))})"
        lines.add(f"const int64_t base = {begin};")
        lines.add(f"const int64_t count = std::max<int64_t>({end} - base, 0) / 16 * 16;")
        self.run_before(rows)
        # Rows go past the caches where they are lines of memory.
        is_done = f"(mode != TF_HIPS_STREAM || is_line(out)) && {call}mode, out)"
        if rows.varied_bits is None:
            lines.add(f"if ({is_done}) {rest} += count;")
        else:
            head = f"if (with_packed_width({rows.varied_bits}, [&](auto packed_bits)"
            lines.open(f"{head} TF_HIPS_INLINED {{")
            lines.add("constexpr int kBits = decltype(packed_bits)::value;", f"return {is_done};")
            lines.close("})) {")
            lines.add(f"  {rest} += count;", "}")
        lines.close()
        return rest

    def row_of_field(self, expr: nodes.Index) -> tuple[str, str] | None:
        """C++ for a field with a float for each block, and for the size of these; None: no such."""
        block = block_of(expr.index, self._position, self.blocks)
        if block is None or not isinstance(expr.array, nodes.Ref):
            return None
        vector = self.stored[expr.array.var]
        # Rows do not ask whether there is such a block.
        if self._size is None or vector.size != blocks_in(self._size, block):
            return None
        is_plain = vector.is_field and is_of_floats(vector)
        return (vector.pointer, self.c(block)) if is_plain else None

    def row_of_blocks(self, expr: nodes.Expr) -> tuple[str, str] | None:
        """C++ for the values of the blocks of a tile, and for the size of these; None: no such."""
        if isinstance(expr, nodes.Ref):
            return self._block_values.get(expr.var)
        if not isinstance(expr, nodes.Index) or not isinstance(expr.array, nodes.Ref):
            return None
        block = block_of(expr.index, self._position, self.blocks)
        vector = self.stored[expr.array.var]
        if block is None or not vector.is_local or not is_of_floats(vector):
            return None
        return vector.pointer, self.c(block)

    def row_noise(self, expr: nodes.Random) -> str | None:
        """C++ for where the noise of a tile begins; None: it is not drawn in order."""
        # Where rows begin before a tile there is none yet.
        return self._noise.get(expr.site) if self._is_here(expr.position) else None

    def _gradient_rows(self, part: nodes.Elementwise, target: str, tile: str, stream: str) -> None:
        """Writes a tile of a decode in rows where the machine has them, if it can be."""
        if self.apart is None or self._step != "kStep" or self._hoisted:
            return
        if self._whole is not None and all(c.count is None for c in self._whole[0].packed):
            rows, call = self._whole
        else:
            found = self.row_code(part)
            if found is None:
                return
            rows, call = found, found.values(self.apart)
        if rows.varied_bits is not None:
            # Of the other widths, as bytes.
            self.run_unpacks()
            self.lines.add("constexpr int kBits = 8;")
            self.take_bytes(rows)
        else:
            self.run_before(rows)
        late = self.names.fresh("is_late")
        self.lines.add(
            "// Rows go past the caches from here where they are lines of memory.",
            f"const bool {late} = mode == TF_HIPS_STREAM && !is_line({target});",
            f"alignas(64) float {tile}[{self._step}];",
            f"if ({call}{late} ? TF_HIPS_SET : mode, {late} ? {tile} : {target})) {{",
            f"  if ({late}) {stream}.put({tile}, count, {target});",
            "  return;",
            "}",
        )

    def row_of_held(
        self, sweep: nodes.Sweep, codes: nodes.Var, arguments: dict[str, tuple[str, str]]
    ) -> RowCode | None:
        """How the one sweep of a decode computes a row of codes in a register; None: it cannot."""
        part = sweep.writes[0].value
        if not isinstance(part, nodes.Elementwise):
            return None
        self._size, self._position = sweep.size, part.position
        rows = RowCode(self.c, self, part, letter="w", held=codes, arguments=arguments)
        return rows if rows.prepare_value() and not rows.uses_bytes else None

    def _feedback_rows(
        self,
        sweep: nodes.Sweep,
        results: list[str],
        targets: dict[int, str],
        feedback: TileFeedback,
    ) -> None:
        """Does a step with feedback in rows where the machine has them, if all of it can be."""
        if self.apart is None or feedback.gradient is None:
            return
        if feedback.has_last:
            self._codes_and_left(sweep, targets, feedback, is_first=bool(feedback.first))
        elif feedback.first:
            self._sweep_rows(sweep, results, targets, sums=feedback.gradient)

    def _codes_and_left(
        self,
        sweep: nodes.Sweep,
        targets: dict[int, str],
        feedback: TileFeedback,
        *,
        is_first: bool,
        done: str = "",
    ) -> None:
        """Writes codes and what they leave of the sum, and ends the step; `done` counts it."""
        write = sweep.writes[0]
        part, target = write.value, targets[write.field]
        kind = part.type.element if isinstance(part.type, Array) else part.type
        if feedback.held is None or sweep.reduces or not isinstance(part, nodes.Elementwise):
            return
        if not isinstance(kind, UInt) or not self._can_write_rows(part, kind):
            return
        if self._code_rows(part).codes(Apart(Lines(), ""), self._top(kind)) is None:
            return
        needs: dict[str, tuple[str, str]] = {}
        left = feedback.held(needs)
        if left is None or self.apart is None:
            return
        rows = self._code_rows(part, sums=feedback.gradient, arguments=needs)
        call = rows.codes(self.apart, self._top(kind), Rest(is_first=is_first, left=left))
        bits = self.bits(kind)
        at = f"{target} + {tile_bytes(bits)}"
        self._open_feedback(is_first)
        if kind.bits == 8:
            self.lines.open(f"if ({call}{at})) {{")
        else:
            name = self.names.fresh("tile")
            self.lines.add(f"alignas(64) {self.c.type(kind)} {name}[{self._step}];")
            self.lines.open(f"if ({call}{name})) {{")
            self.lines.add(f"pack_codes({name}, count, {bits}, {at});")
        self.lines.add(*[f"{done} += count;"] * bool(done), "return;")
        self.lines.close()
        self.lines.close()

    def _open_feedback(self, is_first: bool, how: str = "prefetch_page<4>") -> None:
        self.lines.open("if constexpr (kFeedback) {")
        if is_first:
            self.lines.add(f"{how}(gradient + base, count);", f"{how}(residual + base, count);")

    def _sweep_rows(
        self,
        sweep: nodes.Sweep,
        results: list[str],
        targets: dict[int, str],
        sums: nodes.Var | None = None,
    ) -> None:
        """Reduces and writes a step in rows where the machine has them, if all of it can be.

        `sums`: what the encoder reads, of which the rows of an encoder with feedback form the sum.
        """
        if self.apart is None or not sweep.reduces:
            return
        found: list[RowResult] = []
        trees = []
        needs: dict[str, tuple[str, str]] = {}
        for (_, reduce), result in zip(sweep.reduces, results, strict=True):
            rows = self._rows_of(reduce.source, needs, sums)
            if rows is not None and reduce.type == FLOAT and can_fold(reduce.reducer):
                if rows.prepare_value():
                    trees.append(result)
                    found.append(RowResult(rows, reduce.reducer, f"{result}.lanes()"))
            elif rows is not None and reduce.reducer == "sum" and rows.prepare_flags():
                found.append(RowResult(rows, None, f"&{result}", is_count=True))
        for write in sweep.writes:
            rows = self._rows_of(write.value, needs, sums)
            if rows is not None and rows.prepare_flags():
                at = f"{targets[write.field]} + {tile_bytes('1')}"
                found.append(RowResult(rows, None, at))
        is_plain = not any(row.code.uses_bytes or row.code.uses_blocks for row in found)
        if not is_plain or len(found) != len(sweep.reduces) + len(sweep.writes):
            return
        rest = None if sums is None else Rest(is_first=True)
        if sums is not None:
            self._open_feedback(is_first=True, how="prefetch_tile")
        self.lines.open(f"if ({results_of_rows(self.apart, found, rest)}) {{")
        self.lines.add(*(f"{tree}.taken(count);" for tree in trees), "return;")
        self.lines.close()
        if sums is not None:
            self.lines.close()

    def _rows_of(
        self, part: nodes.Expr, needs: dict[str, tuple[str, str]], sums: nodes.Var | None
    ) -> RowCode | None:
        """`needs`: the arguments of the function that the part belongs to."""
        if not isinstance(part, nodes.Elementwise):
            return None
        self._position = part.position
        return RowCode(self.c, self, part, frozenset(self._hoisted), arguments=needs, sums=sums)

    def chosen_rows(self, flags: nodes.Elementwise, ahead: list[str]) -> str | None:
        """Writes the function that says which elements of a tile a filter keeps.

        Args:
            flags: the filter's decision.
            ahead: C++ for the vectors that are read in order.

        Returns:
            Its call, but for where the bits go; None: it cannot be decided in rows.
        """
        if self.apart is None or self._hoisted:
            return None
        rows = self._rows_of(flags, {}, None)
        if rows is None or not rows.prepare_chosen():
            return None
        return chosen_of_rows(self.apart, rows, [f"{pointer} + base" for pointer in ahead])

    def _write_rows(self, part: nodes.Elementwise, kind: UInt, target: str) -> bool:
        """Writes the codes of a tile, made in rows where the machine has them, if they can be."""
        if self.apart is None or not self._can_write_rows(part, kind):
            return False
        call = self._code_rows(part).codes(self.apart, self._top(kind))
        if call is None:
            return False
        name = self.names.fresh("tile")
        # Codes of a byte need no packing.
        is_packed = kind.bits != 8
        tile = f"alignas(64) {self.c.type(kind)} {name}[{self._step}];"
        pack = f"pack_codes({name}, count, {self.bits(kind)}, {target});"
        self.lines.add(*[tile] * is_packed)
        self.lines.open(f"if (!({call}{name if is_packed else target}))) {{")
        self.lines.add(*[tile] * (not is_packed))
        self._loop(part, lambda text: f"{name}[j] = {text};", kind)
        self.lines.add(*[pack] * (not is_packed))
        self.lines.close()
        self.lines.add(*[pack] * is_packed)
        return True

    def _can_write_rows(self, part: nodes.Elementwise, kind: UInt) -> bool:
        """Whether rows may make the codes of a step."""
        is_small = max_bits(kind, self.params) <= 8 and part.value.type == kind
        return is_small and self._is_single and self._step == "kStep"

    def _code_rows(
        self,
        part: nodes.Elementwise,
        sums: nodes.Var | None = None,
        arguments: dict[str, tuple[str, str]] | None = None,
    ) -> RowCode:
        self._position = part.position
        return RowCode(
            self.c,
            self,
            part,
            frozenset(self._hoisted),
            begin=self._begin,
            sums=sums,
            arguments={} if arguments is None else arguments,
        )

    def _top(self, kind: UInt) -> str:
        """C++ for the largest code."""
        if isinstance(kind.bits, int):
            return self._bound(float((1 << kind.bits) - 1))
        return f"{self.widths[kind]}.top"
