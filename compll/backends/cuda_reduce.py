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


@dataclass(frozen=True)
class TileReduce:
    """A reduction of a loop; `part`: C++ for where the result of a tile goes."""

    var: nodes.Var
    reduce: nodes.Reduce
    part: str

    @property
    def name(self) -> str:
        """C++ for the reducer's type."""
        return neutral(self.reduce.reducer, self.reduce.type)


def reduce_items(
    scope: Scope, reduces: Sequence[TileReduce], second: list[str], third: list[str]
) -> list[Item]:
    """The reductions of a loop, as far as tiles.

    Two of floats by the same function share a warp, in which 16 threads each have the lanes of
    one: the instructions are the same for both. Others have a warp each, as far as there are
    enough: two halves that do different things would wait for each other.

    Args:
        scope: of the loop.
        reduces: all of them.
        second: takes what is done in the phase after the loop: lanes.
        third: takes what is done in the next one: their joining.
    """
    groups: list[list[TileReduce]] = []
    for one in reduces:
        is_float = one.reduce.type == FLOAT
        like = [group for group in groups if is_float and [one.name] == [at.name for at in group]]
        if like:
            like[0].append(one)
        else:
            groups.append([one])
    items: dict[nodes.Var, Item] = {}
    for number, group in enumerate(groups):
        warp = number % 4
        if group[0].reduce.type == FLOAT:
            items |= _of_floats(scope, group, warp, second, third)
        else:
            items[group[0].var] = _of_ints(scope, group[0], warp, second, third)
    return [items[one.var] for one in reduces]


def _sink(values: str, name: str) -> Callable[[str], str]:
    return lambda text: f"{values}[u] = is_inside ? {text} : {name}::neutral();"


@dataclass(frozen=True)
class Extreme:
    """A largest or least float of a tile, found in any order: with a sign, it is the one.

    Attributes:
        item: of the loop.
        name: C++ for the result, which `line` declares.
    """

    item: Item
    name: str
    line: str


def extremes_of(scope: Scope, reduces: Sequence[TileReduce]) -> list[Extreme]:
    """All reductions of a loop, if it only looks for such floats; else none."""
    if not all(one.name in ("Max", "Min") for one in reduces):
        return []
    found = []
    for one in reduces:
        fresh, wanted = scope.names.fresh, one.var.name
        values, here = fresh(f"{wanted}_values"), fresh(f"{wanted}_found")
        name = fresh(f"{wanted}_of_tile")
        scope.lines.add(f"TF_HIPS_SHARED float {here}[kGroups];")
        item = Item(
            part_of(one.reduce.source),
            FLOAT,
            [f"float {values}[kEach];"],
            _sink(values, one.name),
            [f"note_extreme<{one.name}>({values}, t, {here});"],
        )
        line = f"const float {name} = extreme_found<{one.name}>({here});"
        found.append(Extreme(item, name, line))
    return found


def _of_floats(
    scope: Scope, group: list[TileReduce], warp: int, second: list[str], third: list[str]
) -> dict[nodes.Var, Item]:
    """One reduction, or two of the same kind."""
    names, first = scope.names, group[0]
    tile, lanes = names.fresh(f"{first.var.name}_tile"), names.fresh(f"{first.var.name}_lanes")
    # The second tile begins where its lanes have other banks than those of the first.
    apart = "kTile + kLanes"
    room = "kTile" if len(group) == 1 else f"{apart} + kTile"
    scope.lines.add(
        f"TF_HIPS_SHARED float {tile}[{room}];",
        f"TF_HIPS_SHARED float {lanes}[{len(group)} * kLanes];",
    )
    if len(group) == 1:
        fold = f"fold_lane<{first.name}>({tile}, 0, kTile / kLanes, t % kLanes)"
        second.append(f"if (t / kLanes == {2 * warp}) {lanes}[t % kLanes] = {fold};")
        third.append(f"if (t == {32 * warp}) {first.part} = join_lanes<{first.name}>({lanes});")
    else:
        here = f"{tile} + t % 32 / kLanes * ({apart})"
        fold = f"fold_lane<{first.name}>({here}, 0, kTile / kLanes, t % kLanes)"
        second.append(f"if (t / 32 == {warp}) {lanes}[t % 32] = {fold};")
        to = f"*(t % 32 == 0 ? &{first.part} : &{group[1].part})"
        join = f"{to} = join_lanes<{first.name}>({lanes} + t % 32);"
        third.append(f"if (t / 32 == {warp} && t % kLanes == 0) {join}")
    items = {}
    for number, one in enumerate(group):
        values = names.fresh(f"{one.var.name}_values")
        to = f"{tile} + {apart}" if number else tile
        items[one.var] = Item(
            part_of(one.reduce.source),
            FLOAT,
            [f"float {values}[kEach];"],
            _sink(values, one.name),
            [f"stage8({values}, t, {to});"],
        )
    return items


def _of_ints(scope: Scope, one: TileReduce, warp: int, second: list[str], third: list[str]) -> Item:
    reduce, name, names = one.reduce, one.name, scope.names
    total = names.fresh(f"{one.var.name}_total")
    kind_of = part_of(reduce.source).value.type
    is_small = isinstance(kind_of, UInt) and kind_of.bits != 32
    if reduce.reducer == "count" or (reduce.reducer == "sum" and is_small):
        # Eight codes of at most 16 bits.
        found = names.fresh(f"{one.var.name}_found")
        scope.lines.add(f"TF_HIPS_SHARED int32_t {found}[kGroups];")
        third.append(f"if (t == {32 * warp}) {one.part} = sum_found({found});")
        return Item(
            part_of(reduce.source),
            BOOL if reduce.reducer == "count" else kind_of,
            [f"int32_t {total} = 0;"],
            lambda text: f"if (is_inside) {total} += static_cast<int32_t>({text});",
            [f"sum_group({total}, t, {found});"],
        )
    totals, lanes = names.fresh(f"{one.var.name}_totals"), names.fresh(f"{one.var.name}_lanes")
    scope.lines.add(f"TF_HIPS_SHARED int64_t {totals}[kThreads];")
    scope.lines.add(f"TF_HIPS_SHARED int64_t {lanes}[kLanes];")
    share = f"join_share<{name}>({totals}, t % kLanes)"
    second.append(f"if (t / kLanes == {2 * warp}) {lanes}[t % kLanes] = {share};")
    third.append(f"if (t == {32 * warp}) {one.part} = join_shares<{name}>({lanes});")
    return Item(
        part_of(reduce.source),
        counted(reduce.reducer),
        [f"int64_t {total} = {name}::neutral();"],
        lambda text: f"if (is_inside) {total} = {name}::fold({total}, {text});",
        [f"{totals}[t] = {total};"],
    )
