# SPDX-License-Identifier: Apache-2.0
"""Sweeps as CUDA kernels: their reductions and how these end, what they write, and rows."""

from collections.abc import Mapping, Sequence

from compll.backends.c_common import max_bits
from compll.backends.cuda_kernels import HEAD, HERE, Kernels
from compll.backends.cuda_reads import covers
from compll.backends.cuda_reduce import Extreme, Item, TileReduce, extremes_of, reduce_items
from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import element, neutral, part_of
from compll.backends.cuda_written import ROWS
from compll.ir import nodes
from compll.ir.types import FLOAT, UInt
from compll.ir.walk import free_vars, walk


class Sweeps:
    """Emits the loops over all elements of one function."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: of the function."""
        self._kernels = kernels
        self.lines = kernels.lines
        self.side = kernels.side
        self._parts: dict[nodes.Var, str] = {}

    def run(
        self, step: nodes.Sweep, lets: Sequence[nodes.Let] = (), *, is_last: bool = False
    ) -> None:
        """A loop with reductions, writes or both, and what ends the reductions.

        `lets`: what is computed right after it, which may be all that the header waits for.
        """
        loop = self._kernels.loop(step.size)
        parts = [part_of(reduce.source) for _, reduce in step.reduces]
        parts += [part_of(write.value) for write in step.writes]
        self._kernels.begin("sweep", loop, parts=parts)
        self._kernels.written[-1].step = step
        self.body(step, loop)
        self._kernels.write_header(in_tiles=True)
        if is_last and not step.reduces and covers(step.size, self.side.gradient):
            self._kernels.decode_tile(step.writes, {})
        self._kernels.end()
        if step.reduces:
            self._finish(step, lets)
        else:
            self._define_lets(lets)

    def body(
        self,
        step: nodes.Sweep,
        loop: int,
        given: Mapping[nodes.Var, str] | None = None,
        made_of: Sequence[nodes.Let] = (),
    ) -> None:
        """The phases of a sweep, in braces.

        Args:
            step: the sweep.
            loop: its number.
            given: C++ for floats that its parts read.
            made_of: what these are.
        """
        scope, add = self._kernels.scope(), self.lines.add
        scope.given = given or {}
        roots: list[nodes.Expr] = [reduce.source for _, reduce in step.reduces]
        roots += [part_of(write.value) for write in step.writes]
        scope.unpack([step.size, *roots])
        scope.learn(made_of)
        elements = scope.names.fresh("elements")
        add(f"const int64_t {elements} = {scope.c(step.size)};")
        gradient = self._kernels.sum_lines(roots)
        second: list[str] = []
        third: list[str] = []
        at_once: list[str] = []
        reduces = []
        for var, reduce in step.reduces:
            kind = "float" if reduce.type == FLOAT else "int64_t"
            member = self._kernels.array(kind, f"{var.name}_parts", f"2 * call.tiles[{loop}]")
            self._parts[var] = member
            part = f"call.{member}[spot.chunk * call.{member}_room + spot.base / kTile]"
            reduces.append(TileReduce(var, reduce, part))
        extremes = extremes_of(scope, reduces)
        if extremes:
            items = [extreme.item for extreme in extremes]
        else:
            items = reduce_items(scope, reduces, second, third)
        is_all = not second
        for write in step.writes:
            items.append(self._write(scope, write, elements, second, at_once))
        self._kernels.each(scope, step.size, gradient, elements, items)
        self._phase(second, f"if (!({' && '.join(at_once)})) {{" if is_all and at_once else "{")
        self._phase(third)
        if extremes:
            self._settle(step, reduces, extremes)
        self.lines.close()

    def _phase(self, statements: Sequence[str], opening: str = "{") -> None:
        if not statements:
            return
        self.lines.open(opening)
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.add(*statements)
        self.lines.close()
        self.lines.close()

    def _settle(
        self, step: nodes.Sweep, reduces: Sequence[TileReduce], extremes: Sequence[Extreme]
    ) -> None:
        """The results of a tile; where its zeros or NaN may tell, once more in their order."""
        add = self.lines.add
        add(*(extreme.line for extreme in extremes))
        self.lines.open(f"if ({' && '.join(f'is_signed({one.name})' for one in extremes)}) {{")
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0) {")
        add(*(f"{one.part} = {found.name};" for one, found in zip(reduces, extremes, strict=True)))
        self.lines.close()
        self.lines.close()
        self.lines.turn("} else {")
        scope = self._kernels.scope()
        second: list[str] = []
        third: list[str] = []
        roots = [one.reduce.source for one in reduces]
        scope.unpack([step.size, *roots])
        elements = scope.names.fresh("elements")
        add(f"const int64_t {elements} = {scope.c(step.size)};")
        # States are read again, too: new ones, which may be written by now, lie elsewhere
        # (codec_cuda.h).
        gradient = self._kernels.sum_lines(roots)
        items = reduce_items(scope, reduces, second, third)
        self._kernels.each(scope, step.size, gradient, elements, items)
        self._phase(second)
        self._phase(third)
        self.lines.close()
        self.lines.close()

    def _write(
        self,
        scope: Scope,
        write: nodes.Write,
        elements: str,
        second: list[str],
        at_once: list[str],
    ) -> Item:
        """A vector that is written.

        Args:
            scope: of the loop.
            write: the vector, and where it goes.
            elements: C++ for its length.
            second: takes what the next phase has to do for it.
            at_once: takes C++ for whether there is nothing to do then.
        """
        part, names = part_of(write.value), scope.names
        kind = element(write.value.type)
        if self.side.is_decode:
            result = names.fresh("result")
            return Item(
                part,
                FLOAT,
                [
                    f"float {result}[kEach];",
                    f"if (call.mode != TF_HIPS_SET) load8<is_full>(out, first, n, {result});",
                ],
                lambda text: f"{result}[u] = joined(call.mode, {result}[u], {text});",
                [f"put8<is_full>({result}, first, n, out);"],
                ["out"],
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
                [f"put8<is_full>({result}, first, n, call.new_state[{state}] + begin);"],
                [f"call.new_state[{state}] + begin"],
            )
        bits = scope.bits(kind)
        self._kernels.written[-1].vectors += 1
        self._kernels.written[-1].has_words |= bits == "32"
        held = scope.c.type(kind)
        most = max_bits(kind, self.side.program.params) if isinstance(kind, UInt) else 32
        codes, staged = names.fresh("codes"), names.fresh("staged")
        target, is_direct = names.fresh("target"), names.fresh("is_direct")
        self.lines.add(
            f"TF_HIPS_SHARED uint32_t {staged}[{most} * kTile / 32 + 4];",
            f"uint8_t* const {target} = "
            f"body + layout.offset[{write.field}] + spot.base / 8 * {bits};",
        )
        at_once.append(is_direct)
        count = f"packed_bytes(least(kTile, {elements} - spot.base), {bits})"
        second.append(f"if (!{is_direct}) write_staged(t, {staged}, {count}, {target});")
        is_whole = scope.is_whole(part, kind)
        code, zero = "{}", f"static_cast<{held}>(0)"
        if is_whole:
            held = f"WholeCode<{held}>"
            code, zero = f"{held}{{{{whole_bits({{}})}}}}", f"{held}{{kWhole}}"
        by = "" if bits.isdecimal() else "_by"
        return Item(
            part,
            kind,
            [f"{held} {codes}[kEach];"],
            lambda text: f"{codes}[u] = is_inside ? {code.format(text)} : {zero};",
            [
                f"if (is_full && {is_direct}) {{",
                f"  put_codes8{by}({codes}, {bits}, {target} + t * {bits});",
                "} else {",
                f"  pack8{by}({codes}, {bits}, reinterpret_cast<uint8_t*>({staged}) + t * {bits});",
                "}",
            ],
            opening=[f"const bool {is_direct} = is_full_tile && is_at_once({bits}, {target});"],
            is_whole=is_whole,
        )

    def _define_lets(self, lets: Sequence[nodes.Let]) -> None:
        for let in lets:
            self._kernels.define(let.var, "let", let.value)

    def _finish(self, step: nodes.Sweep, lets: Sequence[nodes.Let]) -> None:
        self._kernels.begin("finish", None)
        scope = self._kernels.scope()
        inits = [reduce.init for _, reduce in step.reduces]
        scope.unpack([step.size, *inits])
        elements, tiles = scope.names.fresh("elements"), scope.names.fresh("filled")
        self.lines.add(
            f"const int64_t {elements} = {scope.c(step.size)};",
            f"const int64_t {tiles} = {elements} <= 0 ? 0 : num_tiles({elements});",
        )
        add = self.lines.add
        ends, members, loads, folds = [], [], [], []
        for var, reduce in step.reduces:
            is_float = reduce.type == FLOAT
            kind = "float" if is_float else "int64_t"
            member = self._kernels.scalar(var, kind)
            name, init = neutral(reduce.reducer, reduce.type), scope.c(reduce.init)
            found, here = scope.names.fresh(f"{var.name}_found"), scope.names.fresh("here")
            parts = f"call.{self._parts[var]} + spot.chunk * call.{self._parts[var]}_room"
            add(f"TF_HIPS_SHARED {kind} {found}[kGroups];")
            if is_float:
                left = scope.names.fresh("left")
                add(f"const Parts {left} = few_parts<{name}>({parts}, {tiles});")
                loads += [f"float {here}[8];", f"take_parts({left}, t, {here});"]
                folds.append(f"fold_parts<{name}>({here}, {left}.count, t, {found});")
                result = f"fold_found<{name}>({found}, {left}.count, {init})"
            else:
                loads.append(f"const int64_t {here} = join_parts<{name}>({parts}, {tiles}, t);")
                folds.append(f"join_group<{name}>({here}, t, {found});")
                result = f"join_found<{name}>({found}, {init})"
            ends.append(f"call.scalars[spot.chunk].{member} = own_scalars.{member} = {result};")
            members.append((var, member))
        self.lines.open("TF_HIPS_PHASE(t) {")
        add(*loads, *folds)
        self.lines.close()
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0) {")
        # Of which this thread makes the rest without waiting for what it has written.
        add("[[maybe_unused]] Scalars own_scalars;", *ends)
        for var, member in members:
            self._kernels.define(var, "scalar", None, member, f"own_scalars.{member}")
        for let in lets:
            self._define_once(let)
        self._kernels.write_header(in_tiles=False, by_one=True)
        for _ in range(3):
            self.lines.close()
        self._kernels.end()
        self.side.leave_kernel()

    def _define_once(self, let: nodes.Let) -> None:
        """Makes a let known; one that has to divide or the like, by this one thread a chunk."""
        is_costly = let.var.type == FLOAT and any(
            (isinstance(expr, nodes.Binary) and expr.op == "/" and expr.type == FLOAT)
            or (isinstance(expr, nodes.Math) and expr.function in ("sqrt", "exp2", "log2"))
            for expr in walk(let.value)
        )
        if not is_costly or not free_vars(let.value) <= self.side.known():
            self._define_lets([let])
            return
        member = self._kernels.scalar(let.var, "float")
        scope = self._kernels.scope()
        scope.unpack([let.value])
        here = f"own_scalars.{member}"
        self.lines.add(f"call.scalars[spot.chunk].{member} = {here} = {scope.c(let.value)};")
        self.lines.close()
        self._kernels.define(let.var, "scalar", None, member, here)

    # A decode whose one loop makes any element without the others: it sums rows as it goes.

    def rows(self, step: nodes.Sweep) -> None:
        """The sum of the decoded rows of a call, element by element, in one pass."""
        part = part_of(step.writes[0].value)
        add = self.lines.add
        add(
            "// A tile of the sum of the rows. `is_rest`: of what a row does not hold of `sums`,",
            "// in shared memory, which are overwritten, or of `out` where that is nullptr.",
        )
        add("template <bool is_rest, typename Sums>")
        self.lines.open(f"TF_HIPS_BLOCK {ROWS}(const DecodeCall& call, const Spot& spot,")
        add(
            "    [[maybe_unused]] Sums sums) {",
            "constexpr bool has_sums = std::is_pointer_v<Sums>;",
        )
        add(*HEAD)
        self._kernels.decode_head()
        self._kernels.say_full(self.lines, "n", ["out"])
        self.lines.open("TF_HIPS_PHASE(t) {")
        self._kernels.open_eight()
        add("float sum[kEach];")
        self.lines.open("if constexpr (has_sums) {")
        add("take8(sums + kEach * t, sum);")
        self.lines.turn("} else if (is_rest || call.mode != TF_HIPS_SET) {")
        add("load8<is_full>(out, first, n, sum);")
        self.lines.turn("} else {")
        # What changes no number that is added to it, zeros of both signs included.
        add("TF_HIPS_UNROLL", "for (int u = 0; u < kEach; ++u) sum[u] = -0.0f;")
        self.lines.close()
        add("const int32_t num = is_rest ? 1 : call.rows.num;")
        self.lines.open("for (int32_t row = 0; row < num; ++row) {")
        scope = Scope(self.side, self.lines, "(call.rows.row[row] + at)")
        scope.unpack([step.size, part])
        scope.load([part], step.size, HERE)
        add("TF_HIPS_UNROLL")
        self.lines.open("for (int u = 0; u < kEach; ++u) {")
        statements, text = scope.element(part, FLOAT, "first + u")
        add(
            *statements,
            f"const float decoded = {text};",
            "sum[u] = is_rest ? taken(sum[u], decoded) : sum[u] + decoded;",
        )
        self.lines.close()
        self.lines.close()
        # Only here: to wait for the report before anything is read would cost as much again.
        self.lines.open("if constexpr (has_sums) {")
        add("put8_by<is_full>(sum, first, n, out, sums);")
        self.lines.turn("} else if (is_rest || is_fine(call)) {")
        add("put8<is_full>(sum, first, n, out);")
        self.lines.close()
        self._kernels.close_eight()
        self.lines.close()
        self.lines.close()
        add("")
        self._kernels.begin("rows", self._kernels.loop(step.size), is_check=True)
        self._kernels.waits_late = True
        self.lines.open("if (call.mode == TF_HIPS_RESIDUAL) {")
        add("if (!is_fine(call)) return;", f"{ROWS}<true>(call, spot, nullptr);")
        self.lines.turn("} else {")
        add(f"{ROWS}<false>(call, spot, nullptr);")
        self.lines.close()
        self._kernels.end()
