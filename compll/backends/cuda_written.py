# SPDX-License-Identifier: Apache-2.0
"""Kernels of CUDA as far as they are written before it is known what follows them."""

from dataclasses import dataclass

from compll.backends.c_common import Lines
from compll.ir import nodes

# The function that decodes a tile.
ROWS = "decode_tile_of_rows"


@dataclass
class Written:
    """A kernel that is emitted, but for what depends on those behind it.

    Attributes:
        kind: what its name says.
        loop: number of its loop; None: it is over chunks.
        has_sum: it forms the sum, in shared memory if it `leaves` the residual.
        leaves: it may leave the residual, too.
        has_width: it is compiled for each value of a parameter.
        vectors: how many of codes it writes.
        has_words: some of them have 32 bits.
        step: the sweep that it is, if that is all.
        template, head, sum: where its template and its name are to be, and what the sum is formed
            of.
    """

    kind: str
    name: str
    call: str
    loop: int | None
    template: Lines
    head: Lines
    sum: Lines
    has_sum: bool = False
    leaves: bool = False
    has_width: bool = False
    vectors: int = 0
    has_words: bool = False
    step: nodes.Sweep | None = None

    def settle(self, *, may_hold: bool) -> None:
        """Says it. `may_hold`: it is a part of a kernel that keeps tiles, too."""
        options = ["int kWidth"] if self.has_width else []
        options += ["bool leaves_rest"] if self.leaves else []
        options += ["bool holds = false"] if may_hold else []
        if options:
            self.template.add(f"template <{', '.join(options)}>")
        head = f"TF_HIPS_BLOCK {self.name}(const {self.call}& call, uint32_t block_index"
        if may_hold:
            self.head.add(f"{head},", "    [[maybe_unused]] float* held = nullptr) {")
        else:
            self.head.add(f"{head}) {{")
        if self.has_sum:
            self._declare_sum(may_hold=may_hold)

    def _declare_sum(self, *, may_hold: bool) -> None:
        """What the sum is formed of, and where it goes.

        Where the same kernel takes away what the packet holds, only its threads need the sum.
        """
        has_none = "!leaves_rest || " if self.leaves else ""
        self.sum.add(
            "const float* const gradient = call.gradient + begin;",
            f"const float* const residual = {has_none}call.residual == nullptr ? nullptr : "
            "call.residual + begin;",
        )
        memory = "call.residual == nullptr ? nullptr : call.value + begin"
        if self.leaves:
            self.sum.add(
                "TF_HIPS_SHARED float own_sums[kTile];",
                "const SumTile value = {own_sums, spot.base};",
            )
        elif may_hold:
            self.sum.add(f"const auto value = held_or<holds>(held, spot.base, {memory});")
        else:
            self.sum.add(f"float* const value = {memory};")
