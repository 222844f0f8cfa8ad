# SPDX-License-Identifier: Apache-2.0
"""What a loop of a CUDA kernel computes for each element, and how a reduction makes use of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import neutral, part_of
from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Type, UInt


@dataclass(frozen=True)
class Item:
    """A vector that a loop computes.

    Attributes:
        kind: of its values.
        before: statements before the loop over a thread's elements, and `after`: behind it.
        sink: what is done with the text of a value.
        wide: C++ for the vectors that `after` writes 16 bytes at a time.
        opening: statements before the phase, once it is known whether the tile is full.
        is_whole: the text of a value is that of the float that a code is made of.
    """

    part: nodes.Elementwise
    kind: Type
    before: list[str]
    sink: Callable[[str], str]
    after: list[str]
    wide: Sequence[str] = ()
    opening: Sequence[str] = ()
    is_whole: bool = False


def counted(reducer: str) -> Type:
    """As what elements enter a reduction of integers."""
    return BOOL if reducer in ("count", "and", "or") else INT


def reduce_item(
    scope: Scope,
    var: nodes.Var,
    reduce: nodes.Reduce,
    number: int,
    member: str,
    phases: tuple[list[str], list[str]],
) -> Item:
    """A reduction of a tile.

    Args:
        scope: of the loop.
        var: the result, for names.
        reduce: the reduction.
        number: among those of the loop.
        member: of the call; it takes the results of tiles.
        phases: take what is done in the two phases after the loop: lanes, and their joining.
    """
    second, third = phases
    name, names = neutral(reduce.reducer, reduce.type), scope.names
    lanes = names.fresh(f"{var.name}_lanes")
    # A warp each, as far as there are enough: two halves of one would wait for each other.
    warp = number % 4
    lane = f"t / kLanes == {2 * warp}"
    part = f"call.{member}[spot.chunk * call.{member}_room + spot.base / kTile]"
    if reduce.type == FLOAT:
        tile, values = names.fresh(f"{var.name}_tile"), names.fresh(f"{var.name}_values")
        scope.lines.add(f"TF_HIPS_SHARED float {tile}[kTile];")
        scope.lines.add(f"TF_HIPS_SHARED float {lanes}[kLanes];")
        fold = f"fold_lane<{name}>({tile}, 0, kTile / kLanes, t % kLanes)"
        second.append(f"if ({lane}) {lanes}[t % kLanes] = {fold};")
        third.append(f"if (t == {32 * warp}) {part} = join_lanes<{name}>({lanes});")
        return Item(
            part_of(reduce.source),
            FLOAT,
            [f"float {values}[kEach];"],
            lambda text: f"{values}[u] = is_inside ? {text} : {name}::neutral();",
            [f"stage8({values}, t, {tile});"],
        )
    total, totals = names.fresh(f"{var.name}_total"), names.fresh(f"{var.name}_totals")
    scope.lines.add(f"TF_HIPS_SHARED int64_t {totals}[kThreads];")
    scope.lines.add(f"TF_HIPS_SHARED int64_t {lanes}[kLanes];")
    second.append(f"if ({lane}) {lanes}[t % kLanes] = join_share<{name}>({totals}, t % kLanes);")
    third.append(f"if (t == {32 * warp}) {part} = join_shares<{name}>({lanes});")
    kind_of = part_of(reduce.source).value.type
    is_small = isinstance(kind_of, UInt) and kind_of.bits != 32
    if reduce.reducer == "count" or (reduce.reducer == "sum" and is_small):
        # Eight codes of at most 16 bits.
        return Item(
            part_of(reduce.source),
            BOOL if reduce.reducer == "count" else kind_of,
            [f"int32_t {total} = 0;"],
            lambda text: f"if (is_inside) {total} += static_cast<int32_t>({text});",
            [f"{totals}[t] = {total};"],
        )
    return Item(
        part_of(reduce.source),
        counted(reduce.reducer),
        [f"int64_t {total} = {name}::neutral();"],
        lambda text: f"if (is_inside) {total} = {name}::fold({total}, {text});",
        [f"{totals}[t] = {total};"],
    )
