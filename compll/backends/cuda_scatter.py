# SPDX-License-Identifier: Apache-2.0
"""Values to places of a vector that has zeros elsewhere, in CUDA (select.cuh).

    places    where values go; they must ascend, in the vector
    clear     zeros, and
    scatter   values to their places: of a vector that is kept, and of a residual, from which they
              are taken away

A gradient that is decoded is written in one pass, by

    places    which also notes the first value of each tile
    fill      a tile of zeros and values

and one that is added to by

    add       which checks its own places. What a call that is refused leaves of such a sum is of no
              use; a residual stays what it was, so nothing is written to it before all is checked

The first kernel of a decode begins while packets are checked, and waits for that as late as it can.
"""

import dataclasses

from compll.backends.cuda_kernels import HERE, Kernels
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import part_of
from compll.backends.cuda_sums import whole_of
from compll.ir import nodes
from compll.ir.types import FLOAT, INT

_WAIT = "if (call.is_just_checked) follow();"
_COMPLAIN = "complain(call.report, call.rows.first, spot.chunk, TF_HIPS_BODY_CONTRADICTS_PARAMS);"


class Scatters:
    """Emits the scatters of one function."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: of the function."""
        self.kernels = kernels
        self.lines = kernels.lines
        # Which kernel of a decode is the first, and knows nothing but packets.
        self._is_first = kernels.side.is_decode and not kernels.launches

    def keep(self, value: nodes.Scatter, member: str) -> None:
        """Makes a vector for later kernels."""
        target = f"(call.{member} + spot.chunk * call.{member}_room)"
        loop, place = self.kernels.loop(part_of(value.indices).size), "int64_t"
        places = self.kernels.array(place, "places", f"kTile * call.tiles[{loop}]")
        placed = self.kernels.array("Placed", "placed", "1")
        self._is_first = False
        self._places(value, (place, places, placed), "")
        self._clear(value, placed, target)
        self._scatter(part_of(value.values), (place, places, placed), target, "TF_HIPS_SET")

    def decode(self, value: nodes.Scatter) -> None:
        """Writes the gradient of a decode, in the way that `mode` asks for."""
        kernels, values = self.kernels, part_of(value.values)
        launches = kernels.launches
        loop, whole = kernels.loop(part_of(value.indices).size), kernels.loop(value.size)
        # A chunk of the gradient has no more than 32 bits count.
        place = "int32_t"
        places = kernels.array(place, "places", f"kTile * call.tiles[{loop}]")
        placed = kernels.array("Placed", "placed", "1")
        firsts = kernels.array("int32_t", "firsts", f"call.tiles[{whole}] + 1")
        names = place, places, placed
        needed = kernels.side.needed([values])
        # Values that packets tell can be read before the report.
        is_early = self._is_first and all(made.form == "let" for made in needed)
        is_set, is_rest, is_sum = (
            f"call.mode == TF_HIPS_{mode}" for mode in ("SET", "RESIDUAL", "ADD")
        )

        def limit(grid: str, alone: str | None = None, *, counts: bool = True) -> None:
            """Says when the last kernel is launched, and when it is done alone; "": never.

            `counts`: it is one of those that a call has most often.
            """
            last = launches[-1]
            grid = f"if ({grid}) {last.grid}" if grid else ""
            if alone is None:
                alone = last.alone
            elif alone:
                alone = f"if ({alone}) {last.alone}"
            number = last.number if counts else 0
            launches[-1] = dataclasses.replace(last, grid=grid, alone=alone, number=number)

        self._places(value, names, firsts)
        if is_early:
            limit(f"!({is_sum})")
        self._clear(value, placed, "out")
        limit("", is_set, counts=False)
        self._fill(values, whole, names, firsts)
        limit(is_set, "")
        self._scatter(values, names, "out", "call.mode", is_early=is_early)
        limit(is_rest if is_early else f"!({is_set})", counts=False)
        if is_early:
            self._add(value)
            limit(is_sum, "", counts=False)
        # Of what is not at a place none is left, if the sum had none.
        opening = ["if (call.broken != nullptr && *call.broken == 0) return;"]
        kernels.begin("finite", whole, opening=opening)
        self.lines.add("TF_HIPS_PHASE(t) { make_finite(t, spot.base, n, out); }")
        kernels.end()
        # Most often there is nothing to do, so a grid is small.
        grid = (
            "TF_HIPS_FOLLOW(finite_all, finite_blocks(call.tensor.n), kThreads, stream, call.out, "
            "call.tensor.n, finite_blocks(call.tensor.n), call.report, call.broken);"
        )
        launches[-1] = dataclasses.replace(launches[-1], grid=grid)
        limit(is_rest, is_rest)

    def _clear(self, value: nodes.Scatter, placed: str, target: str) -> None:
        kernels = self.kernels
        kernels.begin("clear", kernels.loop(value.size))
        size = f"call.{placed}[spot.chunk].whole"
        self.lines.add(f"TF_HIPS_PHASE(t) {{ clear_tile(t, spot.base, {size}, {target}); }}")
        kernels.end()

    def _scatter(
        self,
        values: nodes.Elementwise,
        names: tuple[str, str, str],
        target: str,
        mode: str,
        *,
        is_early: bool = False,
    ) -> None:
        """A kernel that brings values to their places.

        Args:
            values: of the scatter.
            names: the type of a place, where they are, and the member with how many there are.
            target: C++ for where they go.
            mode: C++ for how.
            is_early: they can be read before the report.
        """
        kernels, add = self.kernels, self.lines.add
        place, places, placed = names
        kernels.begin("scatter", kernels.loop(values.size), is_check=is_early)
        scope = kernels.scope()
        scope.unpack([values, values.size])
        fresh = scope.names.fresh
        used, made, there = fresh("used_here"), fresh("values_here"), fresh("there")
        add(f"const int64_t {used} = call.{placed}[spot.chunk].used;")
        elements = used
        if is_early:
            add("const Report report = *call.report;")
            elements = whole_of(scope, values)
        place_at = f"call.{places} + spot.chunk * call.{places}_room"
        item = Item(
            values,
            FLOAT,
            [
                f"float {made}[kEach];",
                f"{place} {there}[kEach];",
                f"if (first < call.{places}_room) take8({place_at} + first, {there});",
            ],
            lambda text: f"{made}[u] = {text};",
            [
                *(["if (report != TF_HIPS_CUDA_FINE) return;"] if is_early else []),
                f"scatter8({made}, {there}, {used} - first, {mode}, {target});",
            ],
        )
        kernels.each(scope, values.size, HERE, elements, [item])
        self.lines.close()
        kernels.end()

    def _fill(
        self, values: nodes.Elementwise, whole: int, names: tuple[str, str, str], firsts: str
    ) -> None:
        """A kernel that writes all of the gradient.

        Args:
            values: of the scatter.
            whole: number of the loop over the gradient.
            names: the type of a place, where they are, and the member with how many there are.
            firsts: the member that says which value is the first of each tile.
        """
        kernels, add = self.kernels, self.lines.add
        _, places, placed = names
        # Report and numbers are under way together.
        kernels.begin("fill", whole, is_check=True)
        scope = kernels.scope()
        scope.unpack([values, values.size])
        fresh = scope.names.fresh
        first, end, size = fresh("first_here"), fresh("end_here"), fresh("size")
        tile, number = fresh("tile_values"), fresh("number")
        at = f"call.{firsts}[spot.chunk * call.{firsts}_room + spot.base / kTile"
        add(
            "const Report report = *call.report;",
            f"const int32_t {first} = {at}], {end} = {at} + 1];",
            f"const int64_t {size} = call.{placed}[spot.chunk].whole;",
            f"if (report != TF_HIPS_CUDA_FINE || spot.base >= {size}) return;",
            f"TF_HIPS_SHARED float {tile}[kTile];",
            f"TF_HIPS_PHASE(t) {{ clear_tile(t, 0, kTile, {tile}); }}",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open(
            f"for (int64_t {number} = {first} + t; {number} < {end}; {number} += kThreads) {{"
        )
        statements, text = scope.element(values, FLOAT, number)
        place_at = f"call.{places}[spot.chunk * call.{places}_room + {number}]"
        add(*statements, f"{tile}[{place_at} - spot.base] = 0.0f + {text};")
        self.lines.close()
        self.lines.close()
        add(f"TF_HIPS_PHASE(t) {{ put_tile(t, spot.base, {size}, {tile}, out); }}")
        self.lines.close()
        kernels.end()

    def _place_item(self, scope: Scope, value: nodes.Scatter, place: str, size: str) -> Item:
        """What leaves the places of a tile behind the place before it, in `places_here`."""
        made = scope.names.fresh("made")
        return Item(
            part_of(value.indices),
            INT,
            [f"{place} {made}[kEach];"],
            lambda text: f"{made}[u] = place_of<{place}>({text}, {size});",
            [f"for (int u = 0; u < kEach; ++u) places_here[kEach * t + u + 1] = {made}[u];"],
        )

    def _limits(self, scope: Scope, value: nodes.Scatter, size: str) -> tuple[str, str]:
        """Declares how many values are used; C++ for whether that is wrong, and for it."""
        indices, values = part_of(value.indices), part_of(value.values)
        elements, most = whole_of(scope, indices), scope.names.fresh("most")
        used = scope.names.fresh("used")
        self.lines.add(
            f"const int64_t {size} = {scope.c(value.size)};",
            f"const int64_t {most} = least({elements}, {scope.c(values.size)});",
            f"const int64_t {used} = {most if value.used is None else scope.c(value.used)};",
        )
        return f"({used} < 0 || {used} > {most})", used

    def _place_before(self, scope: Scope, value: nodes.Scatter, place: str, size: str) -> None:
        """Puts the place before a tile into `places_here`."""
        self.lines.open("if (t == 0 && spot.base != 0) {")
        statements, text = scope.element(part_of(value.indices), INT, "spot.base - 1")
        self.lines.add(*statements, f"places_here[0] = place_of<{place}>({text}, {size});")
        self.lines.close()

    def _places(self, value: nodes.Scatter, names: tuple[str, str, str], firsts: str) -> None:
        """A kernel that leaves the places of a scatter, and checks them.

        Args:
            value: the scatter.
            names: the type of a place, where they go, and the member that says how many there are.
            firsts: the member that takes which value is the first of each tile, if any.
        """
        kernels, add = self.kernels, self.lines.add
        place, places, placed = names
        indices, values = part_of(value.indices), part_of(value.values)
        useds = [] if value.used is None else [value.used]
        kernels.begin("places", kernels.loop(indices.size), is_check=True)
        kernels.waits_late = self._is_first
        add(f"TF_HIPS_SHARED {place} places_here[kTile + 1];")
        scope = kernels.scope()
        scope.unpack([indices, indices.size, value.size])
        elements, size = whole_of(scope, indices), scope.names.fresh("size")
        add(f"const int64_t {size} = {scope.c(value.size)};")
        item = self._place_item(scope, value, place, size)
        [made] = [line.split()[1].partition("[")[0] for line in item.before]
        item.after.insert(
            0, f"keep8({made}, call.{places} + spot.chunk * call.{places}_room + first);"
        )
        if firsts:
            item.after.append(f"if (call.mode != TF_HIPS_SET) fetch_ahead({made}, out);")
        kernels.each(scope, indices.size, HERE, elements, [item])
        self.lines.close()

        scope = kernels.scope()
        scope.unpack([indices, indices.size, values.size, value.size, *useds])
        size = scope.names.fresh("size")
        is_bad, used = self._limits(scope, value, size)
        if self._is_first:
            add(_WAIT)
        placed_here = f"{{{is_bad} ? 0 : {used}, {size}}}"
        firsts_at = f"call.{firsts} + spot.chunk * call.{firsts}_room"
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0 && spot.base == 0) {")
        add(
            "places_here[0] = -1;",
            f"call.{placed}[spot.chunk] = {placed_here};",
            f"if {is_bad} {_COMPLAIN}",
            *([f"note_no_first({placed_here}, {firsts_at});"] if firsts else []),
        )
        self.lines.close()
        self._place_before(scope, value, place, size)
        self.lines.close()
        self.lines.open("TF_HIPS_PHASE(t) {")
        last = scope.names.fresh("last")
        add(f"const int64_t {last} = least(kTile, ({is_bad} ? 0 : {used}) - spot.base);")
        self.lines.open(f"for (int k = t; k < {last}; k += kThreads) {{")
        add(f"if (places_here[k + 1] <= places_here[k]) {_COMPLAIN}")
        if firsts:
            add(
                "if (call.mode == TF_HIPS_SET) {",
                f"  note_first(places_here[k], places_here[k + 1], spot.base + k, {placed_here}, "
                f"{firsts_at});",
                "}",
            )
        self.lines.close()
        self.lines.close()
        self.lines.close()
        kernels.end()

    def _add(self, value: nodes.Scatter) -> None:
        """A kernel that adds values at their places, which it checks."""
        kernels, add = self.kernels, self.lines.add
        indices, values = part_of(value.indices), part_of(value.values)
        useds = [] if value.used is None else [value.used]
        kernels.begin("add", kernels.loop(indices.size), is_check=True)
        kernels.waits_late = True
        add("TF_HIPS_SHARED int32_t places_here[kTile + 1];")
        scope = kernels.scope()
        scope.unpack([indices, indices.size, values, values.size, value.size, *useds])
        size, made = scope.names.fresh("size"), scope.names.fresh("values_here")
        tile = scope.names.fresh("tile_values")
        add(f"TF_HIPS_SHARED float {tile}[kTile];")
        is_bad, used = self._limits(scope, value, size)
        item = Item(
            values,
            FLOAT,
            [f"float {made}[kEach];"],
            lambda text: f"{made}[u] = {text};",
            [f"keep8({made}, {tile} + kEach * t);"],
        )
        items = [self._place_item(scope, value, "int32_t", size), item]
        kernels.each(scope, indices.size, HERE, scope.c(indices.size), items)
        for loaded in (scope.tiles, scope.drawn, scope.hoisted, scope.gathered):
            loaded.clear()
        self.lines.open("TF_HIPS_PHASE(t) {")
        add("if (t == 0 && spot.base == 0) places_here[0] = -1;")
        self._place_before(scope, value, "int32_t", size)
        self.lines.close()
        add(
            "const auto is_fine_now = [&] {",
            f"  {_WAIT}",
            "  return *call.report == TF_HIPS_CUDA_FINE;",
            "};",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        last, in_order = scope.names.fresh("last"), scope.names.fresh("in_order")
        add(
            f"const int64_t {last} = least(kTile, ({is_bad} ? 0 : {used}) - spot.base);",
            f"const bool {in_order} = "
            f"add_placed(t, places_here, {tile}, {last}, is_fine_now, out);",
            f"if (!{in_order} || (t == 0 && spot.base == 0 && {is_bad})) {_COMPLAIN}",
        )
        self.lines.close()
        self.lines.close()
        kernels.end()
