# SPDX-License-Identifier: Apache-2.0
"""Vectors that are kept between kernels: filter, sort, top_k, scatter, hadamard.

filter    what a tile keeps to its beginning; the counts scanned; then one behind another
sort      keys; a block of threads a chunk sorts them, or, where one element is all that is
read, finds that by counting digits
top_k     cuda_top_k.py
hadamard  a block of threads transforms the blocks of a tile in shared memory (hadamard.cuh)
scatter   cuda_scatter.py
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from compll.backends.cuda_kernels import Kernels, Launch
from compll.backends.cuda_reads import only_index, reads_own, roots_of
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scatter import Scatters
from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import element, most_kept, part_of, reads
from compll.backends.cuda_sums import Sums, declare_keys, whole_of
from compll.backends.cuda_top_k import TopK
from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, Type
from compll.ir.walk import free_vars


class Selections:
    """Emits what the steps of one function keep.

    Attributes:
        sums: of gradient and residual.
        looks_broken: a kernel of a decode looks for what is not finite, unless it is told of none.
    """

    def __init__(self, kernels: Kernels, *, may_note: bool = False) -> None:
        """`kernels`: of the function; `may_note`: its decode looks for what is not finite."""
        self.kernels = kernels
        self.lines = kernels.lines
        self.sums = Sums(kernels, may_note=may_note)
        self.looks_broken = False

    def store(self, step: nodes.Store, left: list[nodes.Step]) -> None:
        """Makes a vector; later kernels may read it.

        `left`: the steps behind it, of which lets are taken away that are defined here.
        """
        value = step.value
        self.kernels.keeps = True
        match value:
            case nodes.Filter():
                self._filter(step, value)
            case nodes.Sort():
                self._sort(step, value, left)
            case nodes.TopK():
                TopK(self.sums).run(step, value)
            case nodes.Hadamard():
                self._hadamard(step, value)
            case nodes.Scatter():
                loop = self.kernels.loop(value.size)
                member = self.kernels.array("float", step.var.name, f"kTile * call.tiles[{loop}]")
                Scatters(self.kernels).keep(value, member)
                self.kernels.define_kept(step, member)
            case _:
                raise TypeError(f"`step` must keep a vector. Received: {value!r}")

    def decode(self, value: nodes.Scatter) -> None:
        """Writes a scatter to the gradient of a decode, in the way that `mode` asks for."""
        Scatters(self.kernels).decode(value)
        self.looks_broken = True

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
        elements, mask = whole_of(scope, flags), scope.names.fresh("mask")
        kept, at = scope.names.fresh("kept_here"), scope.names.fresh("left_here")
        add(
            f"TF_HIPS_SHARED Kept {kept};",
            f"{held}* const {at} = call.{left} + spot.chunk * call.{left}_room + spot.base;",
        )
        gradient = self.sums.load(flags)
        after = [f"note_kept(t, {mask}, &{kept});"]

        def note(text: str) -> str:
            return f"{mask} |= is_inside & ({text}) ? 1u << u : 0u;"

        item = Item(flags, BOOL, [f"uint32_t {mask} = 0;"], note, after)
        kernels.each(scope, flags.size, gradient, elements, [item])
        # In the next phase a thread has only what is in memory.
        for loaded in (scope.tiles, scope.drawn, scope.hoisted, scope.gathered):
            loaded.clear()
        self.lines.open("TF_HIPS_PHASE(t) {")
        place = scope.names.fresh("place")
        self.lines.open(
            f"each_kept(t, {kept}, {tile_at} + spot.base / kTile, [&](int u, int {place}) {{"
        )
        statements, text = scope.element(source, kind, "spot.base + kEach * t + u")
        add(*statements, f"{at}[{place}] = {text};")
        self.lines.close("});")
        self.lines.close()
        self.lines.close()
        scope = kernels.scope()
        scope.unpack([source.size, *limits])
        elements = whole_of(scope, source)
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0 && spot.base == 0) {")
        add(f"call.{placed}[spot.chunk] = {{{self._limit(scope, value, source)}, {elements}}};")
        for _ in range(3):
            self.lines.close()
        kernels.end()

        # By one block of threads alone; in a grid each adds up by itself.
        kernels.begin("places", None)
        scope = kernels.scope()
        scope.unpack([source.size, *limits])
        elements, sums = whole_of(scope, source), scope.names.fresh("sums")
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
        kernels.launches[-1] = dataclasses.replace(kernels.launches[-1], grid="", number=0)

        fields = ", ".join(
            [
                *(f"call.{left}, call.{left}_room, call.{counts}, call.{counts}_room",),
                *(f"call.{placed}, call.{member}, call.{member}_room, call.tiles[{loop}]",),
            ]
        )
        packing = f"Packing<{held}>{{{fields}}}"
        blocks = f"num_packers(call.tiles[{loop}]) * call.tensor.chunks"
        sums = f"&call.scalars->{total}, sizeof(Scalars)"
        grid = f"launch_pack({packing}, {blocks}, {sums}, stream);"
        alone = f"for (uint32_t k = 0; k < {blocks}; ++k) pack_tiles({packing}, k);"
        kernels.launches.append(Launch(grid, alone))
        kernels.define_kept(step, member, total, is_roomy=True)

    # Sort.

    def _keys(
        self,
        part: nodes.Elementwise,
        kind: Type,
        key: Callable[[str], str],
        keys: str,
        left: Sequence[nodes.Step],
    ) -> bool:
        """A kernel that leaves the keys of a vector; whether it reads a sum that is not formed.

        Args:
            part: the vector.
            kind: of its elements.
            key: C++ for the key of a value.
            keys: the member that takes them.
            left: the steps behind it.
        """
        kernels, side = self.kernels, self.kernels.side
        # Of its own elements it forms the sum itself.
        is_own = reads_own(side, [part], [expr for _, expr in kernels.header])
        will_sum = not is_own and reads([part], side.gradient) and self.sums.will_form(left)
        kernels.begin("keys", kernels.loop(part.size), parts=[part])
        scope = kernels.scope()
        scope.unpack([part, part.size])
        if will_sum:
            self.sums.read_early(scope)
        elements = whole_of(scope, part)
        gradient = self.sums.load(part)
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
        return will_sum

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

        had_sum = kernels.takes_sum
        will_sum = self._keys(part, kind, key, keys, left)
        if index is not None:
            member = kernels.scalar(step.var, "float")
            kernels.define_kept(step, member, is_picked=True)
            for let in left[: len(lets)]:
                if isinstance(let, nodes.Let):
                    kernels.define(let.var, "let", let.value)
            del left[: len(lets)]
            picks = [kernels.launches.pop()]
            self._pick(part, keys, member, order, index)
            picks.append(kernels.launches.pop())
            if kernels.takes_sum == had_sum:
                self._pick_few(part, key, keys, member, order, index, will_sum=will_sum)
                few = f"is_few_picks(call.tiles[{loop}])"
                made = kernels.launches.pop().only_if(few)
                kernels.launches.append(dataclasses.replace(made, alone="", number=0))
                picks = [
                    dataclasses.replace(pick, grid=f"if (!{few}) {pick.grid}") for pick in picks
                ]
            kernels.launches += picks
            return
        held = Scope(kernels.side, self.lines).c.type(kind)
        member = kernels.array(held, name, f"kTile * call.tiles[{loop}]")
        kernels.begin("sort", None)
        scope = kernels.scope()
        scope.unpack([part.size])
        elements = whole_of(scope, part)
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
        elements = whole_of(scope, part)
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

    def _pick_few(
        self,
        part: nodes.Elementwise,
        key: Callable[[str], str],
        keys: str,
        member: str,
        order: str,
        index: nodes.Expr,
        *,
        will_sum: bool,
    ) -> None:
        """The same where a wide block makes the keys, too; `will_sum`: of a sum to be formed."""
        kernels, add, side = self.kernels, self.lines.add, self.kernels.side
        before = side.has_read
        kernels.begin("pick", None, is_wide=True)
        scope = kernels.scope()
        scope.unpack([part, part.size, index])
        if will_sum:
            self.sums.read_early(scope)
        elements = whole_of(scope, part)
        place, found = scope.names.fresh("place"), scope.names.fresh("found")
        add(f"const int64_t {place} = {scope.c(index)};")
        declare_keys(scope, part, keys, key)
        self.lines.open(f"pick_made({elements}, {place}, keys, key_at, [&](uint32_t {found}) {{")
        add(
            f"const bool is_there = {place} >= 0 && {place} < {elements};",
            f"call.scalars[spot.chunk].{member} = "
            f"is_there ? sorted_value({found}, {order}, 0.0f) : 0.0f;",
        )
        self.lines.close("});")
        self.lines.close()
        kernels.end()
        side.has_read = before

    # Hadamard.

    def _hadamard(self, step: nodes.Store, value: nodes.Hadamard) -> None:
        kernels, add = self.kernels, self.lines.add
        part = part_of(value.source)
        loop = kernels.loop(part.size)
        member = kernels.array("float", step.var.name, f"kTile * call.tiles[{loop}]")
        kernels.begin("hadamard", loop, parts=[part], besides=[value.block])
        scope = kernels.scope()
        scope.unpack([part, value.block, part.size])
        elements, tile = whole_of(scope, part), scope.names.fresh("tile_values")
        values, block = scope.names.fresh("values_here"), scope.names.fresh("block")
        count = scope.names.fresh("tile_count")
        add(
            f"TF_HIPS_SHARED float {tile}[kPaddedTile];",
            f"const int {block} = static_cast<int>({scope.c(value.block)});",
            f"const int {count} = static_cast<int>(least(kTile, {elements} - spot.base));",
        )
        item = Item(
            part,
            FLOAT,
            [f"float {values}[kEach];"],
            lambda text: f"{values}[u] = is_inside ? {text} : 0.0f;",
            [f"hadamard_begin({values}, t, {count}, {block}, {tile});"],
        )
        kernels.each(scope, part.size, self.sums.load(part), elements, [item])
        to = f"call.{member} + spot.chunk * call.{member}_room + spot.base"
        add(
            "Eights own_eight;",
            f"hadamard_end<true>({tile}, {count}, {block}, own_eight);",
            f"TF_HIPS_PHASE(t) {{ keep8(own_eight.eight_of(t), {to} + kEach * t); }}",
        )
        self.lines.close()
        kernels.end()
        kernels.define_kept(step, member)
