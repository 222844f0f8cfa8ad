# SPDX-License-Identifier: Apache-2.0
"""The largest elements of a vector in CUDA (top_k.cuh).

    guess     a block of threads a chunk: from a sample, which keys are surely too small
    ranks     keys are made; those of a tile that are not too small go to its beginning; their first
              digits are counted
    settle    how many there are before each tile. If there are fewer than are wanted, the sample
              misled: all keys are left, by the same function of a block of threads
    run_top_k what is left, one behind another; digits of the k-th largest, counted and picked; the
              places of what is not smaller

One block of threads does a small one alone: all is left then.
"""

import dataclasses

from compll.backends.cuda_kernels import Launch
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_side import most_kept, part_of
from compll.backends.cuda_sums import Sums, whole_of
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
        self._guess(step, value, chosen, left[0])
        ranks = self._ranks(part, top, bins, chosen)
        self._settle(part, top, ranks)
        grid, alone = f"run_top_k({top}, stream);", f"top_k_alone({top});"
        kernels.launches.append(Launch(grid, alone, number=4))
        kernels.define_kept(step, member)

    def _guess(self, step: nodes.Store, value: nodes.TopK, chosen: str, keys: str) -> None:
        """A kernel that finds from a sample which keys are surely too small.

        `chosen`: the member that takes it; `keys`: one that has room for those of the sample.
        """
        kernels, add = self.kernels, self.lines.add
        part, count = part_of(value.source), value.count
        will_sum = self.sums.will_form([step])
        kernels.begin("guess", None)
        scope = kernels.scope()
        scope.unpack([part, part.size, count])
        if will_sum:
            self.sums.read_early(scope)
        elements, wanted = whole_of(scope, part), scope.names.fresh("wanted")
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
        elements = whole_of(scope, part)
        gradient = self.sums.load(part)
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
