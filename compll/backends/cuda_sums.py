# SPDX-License-Identifier: Apache-2.0
"""The sum of gradient and residual where vectors are kept: which kernel forms it, and who knows."""

import dataclasses
from collections.abc import Callable, Sequence

from compll.backends.cuda_kernels import HERE, Kernels
from compll.backends.cuda_reads import reads_own, roots_of
from compll.backends.cuda_scope import Gradient, Scope
from compll.backends.cuda_side import part_of, reads
from compll.ir import nodes
from compll.ir.types import FLOAT


class Sums:
    """Emits what the kernels of one function that keep vectors do for the sum.

    Attributes:
        kernels: of the function.
        notes_broken: the kernel that forms the sum tells of what is not finite.
    """

    def __init__(self, kernels: Kernels, *, may_note: bool) -> None:
        """`may_note`: the decode looks for what is not finite, unless it is told of none."""
        self.kernels = kernels
        self.notes_broken = False
        self._may_note = may_note

    def load(self, part: nodes.Elementwise) -> Gradient:
        """How a loop loads the gradient; where it forms a sum it notes what is not finite."""
        gradient = self.kernels.sum_lines([part])
        if gradient == HERE or not self._may_note:
            return gradient
        self.notes_broken = True
        return dataclasses.replace(gradient, after="note_broken({tile}, residual, call.broken);")

    def will_form(self, left: Sequence[nodes.Step]) -> bool:
        """Whether of the steps that are left the first that reads the gradient forms the sum."""
        side = self.kernels.side
        if side.is_decode or side.has_read:
            return False
        for step in left:
            if not reads(roots_of([step]), side.gradient):
                continue
            besides = [expr for _, expr in self.kernels.header]
            match step:
                case nodes.Store(value=nodes.Filter() as value):
                    parts = [part_of(value.flags), part_of(value.source)]
                case nodes.Store(value=nodes.TopK() as value):
                    parts = [part_of(value.source)]
                    besides.append(value.count)
                case _:
                    return False
            return reads(parts[:1], side.gradient) and reads_own(side, parts, besides)
        return False

    def read_early(self, scope: Scope) -> None:
        """Lets a kernel read the gradient anywhere as a later kernel forms it, and leaves."""
        side, name = self.kernels.side, scope.names.fresh("summed")
        self.kernels.lines.add(
            f"const Summed {name} = {{call.gradient + begin, "
            "call.residual == nullptr ? nullptr : call.residual + begin};"
        )
        own = scope.vectors[side.gradient]
        scope.vectors[side.gradient] = dataclasses.replace(own, pointer=name, form="kept")
        side.has_read = False


def whole_of(scope: Scope, part: nodes.Elementwise) -> str:
    """A variable for the length of a loop."""
    name = scope.names.fresh("elements")
    scope.lines.add(f"const int64_t {name} = {scope.c(part.size)};")
    return name


def declare_keys(
    scope: Scope, part: nodes.Elementwise, member: str, key: Callable[[str], str]
) -> None:
    """Declares where keys of a chunk lie, and a function that makes that of an element.

    Args:
        scope: of the kernel.
        part: has the elements.
        member: of the call, the memory of all chunks.
        key: C++ for the key of a float.
    """
    lines, number = scope.lines, scope.names.fresh("number")
    lines.add(f"uint32_t* const keys = call.{member} + spot.chunk * call.{member}_room;")
    lines.open(f"const auto key_at = [&](int64_t {number}) {{")
    statements, text = scope.element(part, FLOAT, number)
    lines.add(*statements, f"return {key(text)};")
    lines.close("};")
