# SPDX-License-Identifier: Apache-2.0
"""The largest elements of a vector in CUDA (top_k.cuh).

    guess     a wide block of threads a chunk: from a sample, which keys are surely too small
    ranks     those of a run of tiles that are not too small go to its beginning, with their places
    settle    where there are fewer than are wanted the sample misled: all are left, by the same
              function of a block of threads
    top_k     a wide block of threads a chunk: which of what is left are the largest

Of a vector of few tiles all are left: in place of the first three a kernel makes keys, the last one
if no sum is formed on the way. One block of threads does a small one alone, with the same keys.
"""

import dataclasses

from compll.backends.cuda_kernels import Launch
from compll.backends.cuda_reads import reads_own
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_side import most_kept, part_of
from compll.backends.cuda_sums import Sums, declare_keys, whole_of
from compll.ir import nodes
from compll.ir.types import FLOAT


class TopK:
    """Emits the selections of one function."""

    def __init__(self, sums: Sums) -> None:
        """`sums`: of the function."""
        self.sums = sums
        self.kernels = sums.kernels
        self.lines = sums.kernels.lines

    def run(self, step: nodes.Store, value: nodes.TopK) -> None:
        """Keeps the places of the largest elements of a vector, ascending."""
        kernels, name = self.kernels, step.var.name
        part = part_of(value.source)
        loop, room = kernels.loop(part.size), kernels.loop(most_kept(step))
        whole = f"kTile * call.tiles[{loop}]"
        keys, places = (
            kernels.array("uint32_t", f"{name}_{what}", whole) for what in ("keys", "places")
        )
        chosen = kernels.array("Chosen", f"{name}_chosen", "1")
        counts = kernels.array("int32_t", f"{name}_counts", f"call.tiles[{loop}]")
        member = kernels.array("int64_t", name, f"kTile * call.tiles[{room}]")
        is_few = f"is_few_tiles(call.tiles[{loop}])"
        fields = ", ".join(
            [
                *(f"call.{keys}, call.{places}, call.{keys}_room",),
                *(f"call.{counts}, call.{counts}_room, call.{chosen}",),
                *(f"call.{member}, call.{member}_room",),
                *(f"kTile * ({is_few} ? 1 : call.run[{loop}]), call.tensor.chunks, {is_few}",),
            ]
        )
        top = f"TopK{{{fields}}}"
        before, had_sum = kernels.side.has_read, kernels.takes_sum
        self._guess(step, value, chosen)
        guess = kernels.launches.pop()
        self._keys(value, keys, chosen)
        # Either kernel makes the keys, and the sum.
        kernels.side.has_read = before
        only_keys = kernels.launches.pop()
        alone = Launch("", f"top_k_alone({top});")
        if kernels.takes_sum == had_sum:
            # Then one kernel can make them and find the largest.
            self._few(value, keys, top)
            kernels.side.has_read = before
            few = [dataclasses.replace(kernels.launches.pop(), alone="").only_if(is_few)]
            few.append(dataclasses.replace(only_keys, grid="", number=0))
            run = f"if (!{is_few}) "
        else:
            few = [dataclasses.replace(only_keys, grid=f"if ({is_few}) {only_keys.grid}")]
            run = ""
        ranks = self._ranks(value, (keys, places, counts, chosen))
        left = kernels.launches.pop()
        self._settle(part, ranks, chosen)
        settle = kernels.launches.pop()
        kernels.launches += [
            *few,
            *(
                Launch(f"if (!{is_few}) {launch.grid}", "", number=0)
                for launch in (guess, left, settle)
            ),
            dataclasses.replace(alone, grid=f"{run}run_top_k({top}, stream);"),
        ]
        kernels.define_kept(step, member, is_roomy=True)

    def _guess(self, step: nodes.Store, value: nodes.TopK, chosen: str) -> None:
        """A kernel that finds from a sample which keys are surely too small."""
        kernels, add = self.kernels, self.lines.add
        part, count = part_of(value.source), value.count
        will_sum = self.sums.will_form([step])
        kernels.begin("guess", None, is_wide=True)
        scope = kernels.scope()
        scope.unpack([part, part.size, count])
        if will_sum:
            self.sums.read_early(scope)
        elements, wanted = whole_of(scope, part), scope.names.fresh("wanted")
        number = scope.names.fresh("number")
        add(f"const int64_t {wanted} = least(maximum<int64_t>({scope.c(count)}, 0), {elements});")
        self.lines.open(
            f"guess_least({elements}, {wanted}, &call.{chosen}[spot.chunk], "
            f"[&](int64_t {number}) {{"
        )
        statements, text = scope.element(part, FLOAT, number)
        add(*statements, f"return rank_key({text});")
        self.lines.close("});")
        self.lines.close()
        kernels.end()

    def _keys(self, value: nodes.TopK, keys: str, chosen: str) -> None:
        """A kernel that makes keys, and leaves all."""
        kernels, add = self.kernels, self.lines.add
        part = part_of(value.source)
        kernels.begin("keys", kernels.loop(part.size), parts=[part], besides=[value.count])
        scope = kernels.scope()
        scope.unpack([part, part.size, value.count])
        elements = whole_of(scope, part)
        gradient = self.sums.load(part)
        made = scope.names.fresh("keys_here")
        item = Item(
            part,
            FLOAT,
            [f"uint32_t {made}[kEach];"],
            lambda text: f"{made}[u] = is_inside ? rank_key({text}) : 0;",
            [f"keep8({made}, call.{keys} + spot.chunk * call.{keys}_room + first);"],
        )
        kernels.each(scope, part.size, gradient, elements, [item])
        count = f"least(maximum<int64_t>({scope.c(value.count)}, 0), {elements})"
        self.lines.open("TF_HIPS_PHASE(t) {")
        self.lines.open("if (t == 0 && spot.base == 0) {")
        add(f"call.{chosen}[spot.chunk] = chosen_of({elements}, {count});")
        for _ in range(3):
            self.lines.close()
        kernels.end()

    def _few(self, value: nodes.TopK, keys: str, top: str) -> None:
        """A kernel that makes keys, leaves all, and finds the largest of them."""
        kernels, add = self.kernels, self.lines.add
        part = part_of(value.source)
        kernels.begin("largest", None, is_wide=True)
        scope = kernels.scope()
        scope.unpack([part, part.size, value.count])
        elements = whole_of(scope, part)
        count = f"least(maximum<int64_t>({scope.c(value.count)}, 0), {elements})"
        add(f"const int64_t wanted_ = {count};")
        declare_keys(scope, part, keys, lambda text: f"rank_key({text})")
        add(f"find_largest_of({top}, spot.chunk, {elements}, wanted_, keys, key_at);")
        self.lines.close()
        kernels.end()

    def _ranks(self, value: nodes.TopK, members: tuple[str, str, str, str]) -> str:
        """A kernel that leaves keys that are not too small; returns its name.

        `members`: what takes keys, their places, and how many there are; what is known of a chunk.
        """
        kernels, add = self.kernels, self.lines.add
        keys, places, counts, chosen = members
        part = part_of(value.source)
        loop = kernels.loop(part.size)
        run = f"call.run[{loop}]"
        chunk = f"find_spot(block_index * static_cast<uint32_t>({run}), call.tiles[{loop}]).chunk"
        opening = [
            # Keys before each tile of the run, and behind the last.
            "TF_HIPS_SHARED int32_t before_here[17];",
            f"const uint32_t least_key = call.{chosen}[{chunk}].least;",
            "const float lowest = least_value(least_key);",
            "const bool is_any = least_key == 0;",
            "int tiles_here = 0;",
            "TF_HIPS_PHASE(t) {",
            "  if (t == 0) before_here[0] = 0;",
            "}",
        ]
        # What it reads beside the gradient would have no registers.
        is_crowded = not kernels.side.states and reads_own(kernels.side, [part], [])
        name = kernels.begin(
            "ranks",
            loop,
            opening=opening,
            parts=[part],
            besides=[value.count],
            is_crowded=is_crowded,
        )
        scope = kernels.scope()
        scope.unpack([part, part.size])
        elements = whole_of(scope, part)
        gradient = self.sums.load(part)
        made, mask = scope.names.fresh("values_here"), scope.names.fresh("mask")
        tile, kept = scope.names.fresh("tile_values"), scope.names.fresh("kept_here")
        at = scope.names.fresh("run_begin")
        add(
            f"TF_HIPS_SHARED float {tile}[kTile];",
            f"TF_HIPS_SHARED Kept {kept};",
            f"const int64_t {at} = "
            f"spot.chunk * call.{keys}_room + spot.base - int64_t{{turn}} * kTile;",
        )
        item = Item(
            part,
            FLOAT,
            [f"float {made}[kEach];", f"uint32_t {mask} = 0;"],
            lambda text: (
                f"{made}[u] = {text}; "
                f"{mask} |= is_inside & (({made}[u] >= lowest) | is_any) ? 1u << u : 0u;"
            ),
            [
                f"if ({mask} != 0) keep8({made}, {tile} + kEach * t);",
                f"note_kept(t, {mask}, &{kept});",
            ],
        )
        kernels.each(scope, part.size, gradient, elements, [item])
        add(
            f"leave_tile(call.{keys} + {at}, call.{places} + {at}, spot.base, {tile}, {kept}, "
            f"before_here + turn);",
            "tiles_here = turn + 1;",
        )
        self.lines.close()
        kernels.end(
            [
                "TF_HIPS_PHASE(t) {",
                "  if (t == 0) {",
                f"    const int32_t chunk = {chunk};",
                f"    call.{counts}[chunk * call.{counts}_room + block_index - "
                f"chunk * (call.tiles[{loop}] / {run})] = before_here[tiles_here];",
                f"    atomicAdd(&call.{chosen}[chunk].left, before_here[tiles_here]);",
                "  }",
                "}",
            ]
        )
        return name

    def _settle(self, part: nodes.Elementwise, ranks: str, chosen: str) -> None:
        """A kernel that leaves all of a chunk where the sample was wrong.

        `ranks`: the function of a block of threads that leaves keys.
        """
        kernels, add = self.kernels, self.lines.add
        loop = kernels.loop(part.size)
        kernels.begin("settle", None)
        add(
            f"Chosen& chosen = call.{chosen}[spot.chunk];",
            "if (chosen.left >= chosen.wanted) return;",
            f"{kernels.call} again = call;",
        )
        if not kernels.side.is_decode:
            add("// The sum is formed.", "again.residual = nullptr;", "again.gradient = call.in;")
        add(
            "TF_HIPS_PHASE(t) {",
            "  if (t == 0) {",
            "    // At once: warps that come here later ask what is left.",
            "    Chosen anew = chosen_of(chosen.count, chosen.wanted);",
            "    anew.left = 0;",
            "    chosen = anew;",
            "  }",
            "}",
            f"const int64_t runs = call.tiles[{loop}] / call.run[{loop}];",
            "for (int64_t k = runs * spot.chunk; k < runs * (spot.chunk + 1); ++k) {",
            f"  {ranks}(again, static_cast<uint32_t>(k));",
            "}",
        )
        kernels.end()
