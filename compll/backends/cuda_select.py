# SPDX-License-Identifier: Apache-2.0
"""Vectors that are kept between kernels: filter, sort, top_k, scatter (select.cuh, top_k.cuh).

    filter    what a tile keeps to its beginning; the counts scanned; then one behind another
    sort      keys; a block of threads a chunk sorts them, or, where one element is all that is
              read, finds that by counting digits
    top_k     of a sample of the keys one; those of all that are not below it, counted by tile;
              the counts scanned; digits of the k-th largest counted and picked; places written; a
              block of threads does a small one alone
    scatter   places, checked; zeros; values to their places

Nothing is written to the gradient of a decode before all places of all its chunks are checked.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from compll.backends.cuda_kernels import HERE, Kernels, Launch
from compll.backends.cuda_reads import only_index, reads_own, roots_of
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Scope, element, most_kept, part_of, reads
from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Type
from compll.ir.walk import free_vars


class Selections:
    """Emits what the steps of one function keep."""

    def __init__(self, kernels: Kernels) -> None:
        """`kernels`: of the function."""
        self.kernels = kernels
        self.lines = kernels.lines

    def store(self, step: nodes.Store, left: list[nodes.Step]) -> None:
        """Makes a vector; later kernels may read it.

        `left`: the steps behind it, of which lets are taken away that are defined here.
        """
        value = step.value
        match value:
            case nodes.Filter():
                self._filter(step, value)
            case nodes.Sort():
                self._sort(step, value, left)
            case nodes.TopK():
                self._top_k(step, value)
            case nodes.Scatter():
                loop = self.kernels.loop(value.size)
                member = self.kernels.array("float", step.var.name, f"kTile * call.tiles[{loop}]")
                target = f"(call.{member} + spot.chunk * call.{member}_room)"
                self._scatter(value, target)
                self.kernels.define_kept(step, member)
            case _:
                raise TypeError(f"`step` must keep a vector. Received: {value!r}")

    def decode(self, value: nodes.Scatter) -> None:
        """Writes a scatter to the gradient of a decode, in the way that `mode` asks for."""
        self._scatter(value, "out", is_out=True)
        kernels = self.kernels
        kernels.begin("finite", kernels.loop(value.size))
        self.lines.add("TF_HIPS_PHASE(t) { make_finite(t, spot.base, n, out); }")
        kernels.end()
        kernels.launches[-1] = kernels.launches[-1].only_if("call.mode == TF_HIPS_RESIDUAL")

    def _whole(self, scope: Scope, part: nodes.Elementwise) -> str:
        """A variable for the length of a loop."""
        name = scope.names.fresh("elements")
        self.lines.add(f"const int64_t {name} = {scope.c(part.size)};")
        return name

    def _limit(self, scope: Scope, value: nodes.Filter, source: nodes.Elementwise) -> str:
        if value.limit is None:
            return scope.c(source.size)
        return f"least(maximum<int64_t>({scope.c(value.limit)}, 0), {scope.c(source.size)})"

    # Filter.

    def _filter(self, step: nodes.Store, value: nodes.Filter) -> None:
        kernels, add, name = self.kernels, self.lines.add, step.var.name
        source, flags, kind = part_of(value.source), part_of(value.flags), element(value.type)
        limits = [] if value.limit is None else [value.limit]
        loop, room = kernels.loop(source.size), kernels.loop(most_kept(step))
        counts = kernels.array("int64_t", f"{name}_tiles", f"call.tiles[{loop}]")
        placed = kernels.array("Placed", f"{name}_placed", "1")
        held = Scope(kernels.side, self.lines).c.type(kind)
        left = kernels.array(held, f"{name}_left", f"kTile * call.tiles[{loop}]")
        member = kernels.array(held, name, f"kTile * call.tiles[{room}]")
        total = kernels.scalar(step.var, "int64_t", f"{name}_count")
        tile_at = f"call.{counts} + spot.chunk * call.{counts}_room"

        kernels.begin("flags", loop, parts=[flags, source])
        scope = kernels.scope()
        scope.unpack([flags, source, source.size])
        elements, mask = self._whole(scope, flags), scope.names.fresh("mask")
        kept, at = scope.names.fresh("kept_here"), scope.names.fresh("left_here")
        add(
            f"TF_HIPS_SHARED Kept {kept};",
            f"{held}* const {at} = call.{left} + spot.chunk * call.{left}_room + spot.base;",
        )
        gradient = kernels.sum_lines([flags])
        after = [f"note_kept(t, {mask}, &{kept});"]

        def note(text: str) -> str:
            return f"{mask} |= is_inside & ({text}) ? 1u << u : 0u;"

        item = Item(flags, BOOL, [f"uint32_t {mask} = 0;"], note, after)
        kernels.each(scope, flags.size, gradient, elements, [item])
        # In the next phase a thread has only what is in memory.
        for loaded in (scope.tiles, scope.drawn, scope.hoisted):
            loaded.clear()
        self.lines.open("TF_HIPS_PHASE(t) {")
        place = scope.names.fresh("place")
        self.lines.open(
            f"each_kept(t, {kept}, {tile_at} + spot.base / kTile, [&](int u, int {place}) {{"
        )
        statements, text = scope.element(source, kind, "spot.base + kEach * t + u")
        add(*statements, f"{at}[{place}] = {text};")
        self.lines.close("});")
        for _ in range(2):
            self.lines.close()
        kernels.end()

        kernels.begin("places", None)
        scope = kernels.scope()
        scope.unpack([source.size, *limits])
        elements, sums = self._whole(scope, source), scope.names.fresh("sums")
        limit = scope.names.fresh("limit")
        add(
            f"TF_HIPS_SHARED int64_t {sums};",
            f"const int64_t {limit} = {self._limit(scope, value, source)};",
            f"scan_tiles({tile_at}, num_tiles({elements}), &{sums});",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0) {")
        add(
            f"call.scalars[spot.chunk].{total} = least({sums}, {limit});",
            f"call.{placed}[spot.chunk] = {{least({sums}, {limit}), {elements}}};",
        )
        for _ in range(3):
            self.lines.close()
        kernels.end()

        fields = ", ".join(
            [
                *(f"call.{left}, call.{left}_room, call.{counts}, call.{counts}_room",),
                *(f"call.{placed}, call.{member}, call.{member}_room, call.tiles[{loop}]",),
            ]
        )
        packing = f"Packing<{held}>{{{fields}}}"
        blocks = f"num_packers(call.tiles[{loop}]) * call.tensor.chunks"
        grid = f"launch_pack({packing}, {blocks}, stream);"
        alone = f"for (uint32_t k = 0; k < {blocks}; ++k) pack_tiles({packing}, k);"
        kernels.launches.append(Launch(grid, alone))
        kernels.define_kept(step, member, total)

    # Sort.

    def _keys(
        self, part: nodes.Elementwise, kind: Type, key: Callable[[str], str], keys: str
    ) -> None:
        """A kernel that leaves the keys of a vector.

        Args:
            part: the vector.
            kind: of its elements.
            key: C++ for the key of a value.
            keys: the member that takes them.
        """
        kernels = self.kernels
        kernels.begin("keys", kernels.loop(part.size), parts=[part])
        scope = kernels.scope()
        scope.unpack([part, part.size])
        elements = self._whole(scope, part)
        gradient = kernels.sum_lines([part])
        made, at = scope.names.fresh("keys_here"), f"spot.chunk * call.{keys}_room + first"
        item = Item(
            part,
            kind,
            [f"{'uint32_t' if kind == FLOAT else 'uint64_t'} {made}[kEach];"],
            lambda text: f"{made}[u] = is_inside ? {key(text)} : 0;",
            [f"keep8({made}, call.{keys} + {at});"],
        )
        kernels.each(scope, part.size, gradient, elements, [item])
        self.lines.close()
        kernels.end()

    def _sort(self, step: nodes.Store, value: nodes.Sort, left: list[nodes.Step]) -> None:
        kernels, add, name = self.kernels, self.lines.add, step.var.name
        part, kind = part_of(value.source), element(value.type)
        loop = kernels.loop(part.size)
        lets = [*itertools.takewhile(lambda item: isinstance(item, nodes.Let), left)]
        index = self._only_read(step.var, lets, left) if kind == FLOAT else None
        room = f"kTile * call.tiles[{loop}]"
        room = room if index is not None else f"padded_count({room})"
        keys = kernels.array("uint32_t" if kind == FLOAT else "uint64_t", f"{name}_keys", room)
        order = "true" if value.is_descending else "false"

        def key(text: str) -> str:
            number = text if kind == FLOAT else f"static_cast<int64_t>({text})"
            return f"sort_key({number}, {order})"

        self._keys(part, kind, key, keys)
        if index is not None:
            member = kernels.scalar(step.var, "float")
            kernels.define_kept(step, member, is_picked=True)
            for let in left[: len(lets)]:
                if isinstance(let, nodes.Let):
                    kernels.define(let.var, "let", let.value)
            del left[: len(lets)]
            self._pick(part, keys, member, order, index)
            return
        held = Scope(kernels.side, self.lines).c.type(kind)
        member = kernels.array(held, name, f"kTile * call.tiles[{loop}]")
        kernels.begin("sort", None)
        scope = kernels.scope()
        scope.unpack([part.size])
        elements = self._whole(scope, part)
        at = scope.names.fresh("keys")
        key_type = "uint32_t" if kind == FLOAT else "uint64_t"
        add(
            f"{key_type}* const {at} = call.{keys} + spot.chunk * call.{keys}_room;",
            f"sort_keys<{key_type}>({at}, {elements});",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open(f"for (int64_t k = t; k < {elements}; k += kThreads) {{")
        add(
            f"call.{member}[spot.chunk * call.{member}_room + k] = "
            f"sorted_value({at}[k], {order}, {held}{{}});"
        )
        for _ in range(3):
            self.lines.close()
        kernels.end()
        kernels.define_kept(step, member)

    def _only_read(
        self, var: nodes.Var, lets: Sequence[nodes.Step], left: Sequence[nodes.Step]
    ) -> nodes.Expr | None:
        """The only place that is read of a vector, if the lets behind it tell which that is."""
        kernels = self.kernels
        index = only_index(var, [*roots_of(left), *(value for _, value in kernels.header)])
        if index is None:
            return None
        needs, need = [index], free_vars(index)
        for let in reversed(lets):
            if isinstance(let, nodes.Let) and let.var in need:
                needs.append(let.value)
                need = (need - {let.var}) | free_vars(let.value)
        return index if need <= kernels.side.known() | {var} and not reads(needs, var) else None

    def _pick(
        self, part: nodes.Elementwise, keys: str, member: str, order: str, index: nodes.Expr
    ) -> None:
        """A kernel that leaves one element of a sorted vector."""
        kernels, add = self.kernels, self.lines.add
        kernels.begin("pick", None)
        scope = kernels.scope()
        scope.unpack([part.size, index])
        elements = self._whole(scope, part)
        place, found = scope.names.fresh("place"), scope.names.fresh("found")
        add(
            f"TF_HIPS_SHARED uint32_t {found};",
            f"const int64_t {place} = {scope.c(index)};",
            f"pick_sorted(call.{keys} + spot.chunk * call.{keys}_room, {elements}, {place}, "
            f"&{found});",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0) {")
        add(
            f"const bool is_there = {place} >= 0 && {place} < {elements};",
            f"call.scalars[spot.chunk].{member} = "
            f"is_there ? sorted_value({found}, {order}, 0.0f) : 0.0f;",
        )
        for _ in range(3):
            self.lines.close()
        kernels.end()

    # Top k.

    def _top_k(self, step: nodes.Store, value: nodes.TopK) -> None:
        kernels, name = self.kernels, step.var.name
        part = part_of(value.source)
        loop, room = kernels.loop(part.size), kernels.loop(most_kept(step))
        keys = kernels.array("uint32_t", f"{name}_keys", f"kTile * call.tiles[{loop}]")
        bins = kernels.array("int32_t", f"{name}_bins", "kCounts")
        chosen = kernels.array("Chosen", f"{name}_chosen", "1")
        totals = kernels.array("int64_t", f"{name}_totals", f"call.tiles[{loop}]")
        member = kernels.array("int64_t", name, f"kTile * call.tiles[{room}]")
        left = [
            kernels.array("uint32_t", f"{name}_{what}", f"kTile * call.tiles[{loop}]")
            for what in ("tile_keys", "tile_places", "few_places")
        ]
        members = ", ".join(f"call.{item}" for item in (bins, chosen, totals))
        fields = [
            *(f"call.{keys}, call.{keys}_room, {members}, call.{totals}_room",),
            *(f"call.{item}" for item in left),
            *(f"call.{member}, call.{member}_room, call.tiles[{loop}], call.tensor.chunks",),
        ]
        top = f"{{{', '.join(fields)}}}"
        clear = (
            f"cudaMemsetAsync(call.{bins}, 0, "
            f"static_cast<size_t>(call.tensor.chunks) * kCounts * sizeof(int32_t), stream);"
        )
        kernels.launches.append(Launch(clear, ""))
        self._guess(part, value.count, chosen, left[0])
        ranks = self._ranks(part, top, bins, chosen)
        self._settle(part, top, ranks)
        grid, alone = f"run_top_k({top}, stream);", f"top_k_alone({top});"
        kernels.launches.append(Launch(grid, alone, number=4))
        kernels.define_kept(step, member)

    def _guess(self, part: nodes.Elementwise, count: nodes.Expr, chosen: str, keys: str) -> None:
        """A kernel that finds from a sample which keys are surely too small.

        `chosen`: the member that takes it; `keys`: one that has room for those of the sample.
        """
        kernels, add, side = self.kernels, self.lines.add, self.kernels.side
        has_read = side.has_read
        kernels.begin("guess", None)
        scope = kernels.scope()
        scope.unpack([part, part.size, count])
        # It leaves nothing of the gradient, so that a later kernel may be the first that reads it.
        side.has_read = has_read
        header = [expr for _, expr in kernels.header]
        if not side.is_decode and not has_read and reads_own(side, [part], header):
            summed = scope.names.fresh("summed")
            add(
                f"const Summed {summed} = {{call.gradient + begin, call.residual == nullptr ? "
                "nullptr : call.residual + begin};"
            )
            own = scope.vectors[side.gradient]
            scope.vectors[side.gradient] = dataclasses.replace(own, pointer=summed)
        elements, wanted = self._whole(scope, part), scope.names.fresh("wanted")
        at, made = scope.names.fresh("keys"), scope.names.fresh("made")
        add(
            f"const int64_t {wanted} = least(maximum<int64_t>({scope.c(count)}, 0), {elements});",
            f"uint32_t* const {at} = call.{keys} + spot.chunk * call.{keys}_room;",
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        add(f"if (t == 0) call.{chosen}[spot.chunk] = chosen_of({elements}, {wanted});")
        self.lines.close()
        self.lines.open("if (call.alone == 0) {")
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open(f"for (int k = t; k < num_samples({elements}); k += kTile) {{")
        add(f"uint32_t {made}[kEach];", "TF_HIPS_UNROLL")
        self.lines.open("for (int u = 0; u < kEach; ++u) {")
        number = f"sample_place(k + kThreads * u, {elements})"
        statements, text = scope.element(part, FLOAT, number)
        add(*statements, f"{made}[u] = rank_key({text});")
        self.lines.close()
        add(
            "TF_HIPS_UNROLL",
            f"for (int u = 0; u < kEach; ++u) {at}[k + kThreads * u] = {made}[u];",
        )
        self.lines.close()
        self.lines.close()
        add(f"guess_least({at}, &call.{chosen}[spot.chunk]);")
        self.lines.close()
        self.lines.close()
        kernels.end()

    def _ranks(self, part: nodes.Elementwise, top: str, bins: str, chosen: str) -> str:
        """A kernel that makes keys, and leaves those that are not too small; returns its name."""
        kernels, add = self.kernels, self.lines.add
        loop = kernels.loop(part.size)
        chunk = (
            f"find_spot(block_index * static_cast<uint32_t>(call.run[{loop}]), "
            f"call.tiles[{loop}]).chunk"
        )
        first = f"digit_of(call.{chosen}[{chunk}].least, 0)"
        opening = ["TF_HIPS_SHARED int32_t bins_here[kBins];", f"clear_bins(bins_here, {first});"]
        name = kernels.begin("ranks", loop, opening=opening, parts=[part])
        scope = kernels.scope()
        scope.unpack([part, part.size])
        elements = self._whole(scope, part)
        gradient = kernels.sum_lines([part])
        made, mask = scope.names.fresh("keys_here"), scope.names.fresh("mask")
        tile, kept = scope.names.fresh("tile_keys"), scope.names.fresh("kept_here")
        lowest, run = scope.names.fresh("lowest"), scope.names.fresh("call_of_top_k")
        add(
            f"TF_HIPS_SHARED uint32_t {tile}[kTile];",
            f"TF_HIPS_SHARED Kept {kept};",
            f"const TopK {run} = {top};",
            f"const uint32_t {lowest} = call.{chosen}[spot.chunk].least;",
        )
        item = Item(
            part,
            FLOAT,
            [f"uint32_t {made}[kEach];", f"uint32_t {mask} = 0;"],
            lambda text: (
                f"{made}[u] = rank_key({text}); "
                f"{mask} |= is_inside & ({made}[u] >= {lowest}) ? 1u << u : 0u;"
            ),
            [f"keep8({made}, {tile} + kEach * t);", f"note_kept(t, {mask}, &{kept});"],
        )
        kernels.each(scope, part.size, gradient, elements, [item])
        add(f"leave_tile({run}, spot, {tile}, {kept}, bins_here);")
        self.lines.close()
        flush = f"add_bins(bins_here, call.{bins} + {chunk} * kCounts, {first});"
        kernels.end([f"if (call.alone == 0) {flush}"])
        return name

    def _settle(self, part: nodes.Elementwise, top: str, ranks: str) -> None:
        """A kernel that finds how many keys are left, and leaves all where the sample was wrong.

        `ranks`: the function of a block of threads that leaves keys.
        """
        kernels, add = self.kernels, self.lines.add
        loop = kernels.loop(part.size)
        kernels.begin("settle", None)
        add(f"const TopK top = {top};")
        self.lines.open("if (!scan_left(top, spot.chunk)) {")
        add(f"{kernels.call} again = call;")
        if not kernels.side.is_decode:
            add("// The sum is formed.", "again.residual = nullptr;", "again.gradient = call.in;")
        add(
            "leave_all(top, spot.chunk);",
            f"const int64_t runs = call.tiles[{loop}] / call.run[{loop}];",
            f"for (int64_t k = runs * spot.chunk; k < runs * (spot.chunk + 1); ++k) "
            f"{ranks}(again, static_cast<uint32_t>(k));",
            "scan_left(top, spot.chunk);",
        )
        self.lines.close()
        add("pick_pass(top, spot.chunk, 0);")
        kernels.end()
        # Where one block of threads does it all, all keys are left.
        kernels.launches[-1] = dataclasses.replace(kernels.launches[-1], alone="")

    # Scatter.

    def _scatter(self, value: nodes.Scatter, target: str, *, is_out: bool = False) -> None:
        kernels, add = self.kernels, self.lines.add
        values, whole = part_of(value.values), kernels.loop(value.size)
        # A chunk of the gradient has no more than 32 bits count.
        place = "int32_t" if is_out else "int64_t"
        loop = kernels.loop(part_of(value.indices).size)
        places = kernels.array(place, "places", f"kTile * call.tiles[{loop}]")
        placed = kernels.array("Placed", "placed", "1")
        place_at = f"call.{places} + spot.chunk * call.{places}_room"
        self._places(value, loop, (place, place_at, placed))

        kernels.begin("clear", whole)
        size = f"call.{placed}[spot.chunk].whole"
        add(f"TF_HIPS_PHASE(t) {{ clear_tile(t, spot.base, {size}, {target}); }}")
        kernels.end()
        if is_out:
            kernels.launches[-1] = kernels.launches[-1].only_if("call.mode == TF_HIPS_SET")

        kernels.begin("scatter", kernels.loop(values.size))
        scope = kernels.scope()
        scope.unpack([values, values.size])
        used, made = f"call.{placed}[spot.chunk].used", scope.names.fresh("values_here")
        mode = "call.mode" if is_out else "TF_HIPS_SET"
        item = Item(
            values,
            FLOAT,
            [f"float {made}[kEach];"],
            lambda text: f"{made}[u] = {text};",
            [f"scatter8({made}, {place_at} + first, {used} - first, {mode}, {target});"],
        )
        kernels.each(scope, values.size, HERE, used, [item])
        self.lines.close()
        kernels.end()

    def _places(self, value: nodes.Scatter, loop: int, names: tuple[str, str, str]) -> None:
        """A kernel that leaves the places of a scatter, and checks them.

        `names`: the type of a place, where they go, and the member that says how many there are.
        """
        kernels, add = self.kernels, self.lines.add
        place, place_at, placed = names
        indices, values = part_of(value.indices), part_of(value.values)
        useds = [] if value.used is None else [value.used]
        kernels.begin("places", loop, is_check=True)
        # Behind the place before the tile those of the tile.
        add(f"TF_HIPS_SHARED {place} places_here[kTile + 1];")
        scope = kernels.scope()
        scope.unpack([indices, indices.size, value.size])
        elements, size = self._whole(scope, indices), scope.names.fresh("size")
        add(f"const int64_t {size} = {scope.c(value.size)};")
        made = scope.names.fresh("made")
        item = Item(
            indices,
            INT,
            [f"{place} {made}[kEach];"],
            lambda text: f"{made}[u] = place_of<{place}>({text}, {size});",
            [
                f"keep8({made}, {place_at} + first);",
                f"for (int u = 0; u < kEach; ++u) places_here[kEach * t + u + 1] = {made}[u];",
            ],
        )
        kernels.each(scope, indices.size, HERE, elements, [item])
        self.lines.close()

        scope = kernels.scope()
        scope.unpack([indices, indices.size, values.size, value.size, *useds])
        elements, size = self._whole(scope, indices), scope.names.fresh("size")
        most, used = scope.names.fresh("most"), scope.names.fresh("used")
        is_bad = f"{used} < 0 || {used} > {most}"
        add(
            f"const int64_t {size} = {scope.c(value.size)};",
            f"const int64_t {most} = least({elements}, {scope.c(values.size)});",
            f"const int64_t {used} = {most if value.used is None else scope.c(value.used)};",
        )
        complaint = (
            "complain(call.report, call.rows.first, spot.chunk, TF_HIPS_BODY_CONTRADICTS_PARAMS);"
        )
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0 && spot.base == 0) {")
        add(
            "places_here[0] = -1;",
            f"call.{placed}[spot.chunk] = {{{is_bad} ? 0 : {used}, {size}}};",
            f"if ({is_bad}) {complaint}",
        )
        self.lines.close()
        self.lines.open("if (t == 0 && spot.base != 0) {")
        statements, text = scope.element(indices, INT, "spot.base - 1")
        add(*statements, f"places_here[0] = place_of<{place}>({text}, {size});")
        self.lines.close()
        self.lines.close()
        self.lines.open("TF_HIPS_PHASE(t) {")
        last = scope.names.fresh("last")
        add(
            f"const int64_t {last} = least(kTile, ({is_bad} ? 0 : {used}) - spot.base);",
            f"for (int k = t; k < {last}; k += kThreads) {{",
            f"  if (places_here[k + 1] <= places_here[k]) {complaint}",
            "}",
        )
        self.lines.close()
        self.lines.close()
        kernels.end()
