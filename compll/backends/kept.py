# SPDX-License-Identifier: Apache-2.0
"""Vectors that are kept between loops, as C++: filter, sort, top_k and scatter (select.h).

    filter    for each tile:  flags, values  ->  those with a flag are appended
    sort      for each tile:  values  ->  memory, which is sorted
    top_k     for some groups, then each tile:  values  ->  those that may belong to the largest
    blocks    for each tile:  values  ->  a number per block of it
    hadamard  for each tile:  values  ->  memory, whose blocks are transformed in place
    scatter   for each tile:  indices, checked; then  values to their places, zeros around them

They lie in memory that the thread reuses (`scratch`), each in its own slots, numbered within a
function. Where there is none, or a packet's indices are bad, the function returns a status.
"""

from dataclasses import dataclass

from compll.backends.beside import FilterBeside
from compll.backends.blocks import block_reducer, decode_groups, encode_groups, is_shared
from compll.backends.loops import Loops, Stored
from compll.backends.masks import Masks
from compll.backends.rooms import SLOTS_OF_SORT, SLOTS_OF_TOP_K
from compll.ir import nodes
from compll.ir.sizes import blocks_in
from compll.ir.types import BOOL, FLOAT, INT, Array, Type

# With feedback, what is encoded is a sum that the runs of a top_k form. A group of the sample comes
# before the sweep, so its residual is put back.
_ADD_RUN = (
    "[[maybe_unused]] float held[kTopGroup];",
    "if constexpr (kFeedback) {",
    "  prefetch_tile(gradient + base, count);",
    "  if (run.is_sample) std::copy(residual + base, residual + base + count, held);",
    "  if (!run.is_again) {",
    "    all_finite &= sum_tile(gradient + base, residual + base, count, value + base);",
    "  }",
    "}",
)
_PUT_BACK = (
    "if constexpr (kFeedback) {",
    "  if (run.is_sample) std::copy(held, held + count, value + base);",
    "}",
)


@dataclass
class KeptVectors:
    """Emits the vectors that one function keeps."""

    loops: Loops
    slots: int = 0

    def store(
        self, step: nodes.Store, *, is_first: bool = False, masks: Masks | None = None
    ) -> None:
        """Makes a vector and a variable for its length; later loops may read it.

        `is_first`: with feedback, this top_k forms the sum of gradient and residual. `masks`: it
        writes the states.
        """
        value = step.value
        match value:
            case nodes.Filter():
                count, pointer = self._filter(step.var, value)
            case nodes.Sort():
                count, pointer = self._sort(step.var, value)
            case nodes.TopK():
                count, pointer = self._top_k(step.var, value, is_first, masks)
            case nodes.BlockReduce():
                count, pointer = self._blocks(step.var, value)
            case nodes.Hadamard():
                count, pointer = self._hadamard(step.var, value)
            case nodes.Scatter():
                count, pointer = self._scattered(step.var, value)
            case _:
                raise TypeError(f"`step` must keep a vector. Received: {value!r}")
        size: nodes.Expr = nodes.Size(
            INT, value.span, nodes.Ref(step.var.type, value.span, step.var)
        )
        if isinstance(value, nodes.Scatter):
            size = value.size
        elif isinstance(value, nodes.Sort | nodes.Hadamard):
            size = _part(value.source).size
        elif isinstance(value, nodes.BlockReduce):
            size = blocks_in(_part(value.source).size, value.block)
        self.loops.c.sizes[step.var] = count
        self.loops.stored[step.var] = Stored(
            step.var, size, count, pointer, is_field=False, bits=None
        )

    def decode(self, value: nodes.Scatter) -> None:
        """Writes a scatter to the gradient of a decode, in the way that `mode` asks for."""
        self.scatter(value, "out", "mode")

    def scatter(self, value: nodes.Scatter, target: str, mode: str) -> None:
        """Writes a scatter to `target` as `mode` (C++) asks for, after it has been checked."""
        loops, lines = self.loops, self.loops.lines
        indices, values = _part(value.indices), _part(value.values)
        whole = loops.number(value.size, "whole")
        lines.add(f"if ({whole} > kMaxScatter) return TF_HIPS_BAD_PARAMETER;")
        number, other = (loops.number(part.size, "number") for part in (indices, values))
        used = loops.names.fresh("used")
        if value.used is None:
            lines.add(f"const int64_t {used} = std::min({number}, {other});")
        else:
            lines.add(
                f"const int64_t {used} = {loops.c(value.used)};",
                f"if ({used} < 0 || {used} > std::min({number}, {other})) {{",
                "  return TF_HIPS_BODY_CONTRADICTS_PARAMS;",
                "}",
            )
        places, last = loops.names.fresh("places"), loops.names.fresh("last")
        self._room(places, "uint32_t", used)
        lines.add(f"int64_t {last} = -1;")
        with loops.tiles(indices.size, used, [indices]):
            tile = loops.tile(indices, INT)
            lines.add(
                f"if (!take_indices({tile}, count, {whole}, &{last}, {places} + base)) {{",
                "  return TF_HIPS_BODY_CONTRADICTS_PARAMS;",
                "}",
            )
        scattered = loops.names.fresh("scattered")
        lines.add(f"Scattered {scattered}({target}, {whole}, {mode});")
        with loops.tiles(values.size, used, [values]):
            tile = loops.tile(values, FLOAT)
            lines.add(f"{scattered}.put({places} + base, {tile}, count);")
        lines.add(f"{scattered}.finish();")

    def _room(self, pointer: str, kind: str, count: str) -> None:
        self.loops.lines.add(
            f"{kind}* {pointer} = scratch<{self.slots}, {kind}>({count});",
            f"if ({pointer} == nullptr) return TF_HIPS_NO_SCRATCH;",
        )
        self.slots += 1

    def _filter(self, var: nodes.Var, value: nodes.Filter) -> tuple[str, str]:
        loops, lines = self.loops, self.loops.lines
        source, flags, kind = _part(value.source), _part(value.flags), _element(value.type)
        size = loops.number(source.size, "size")
        limit = size
        if value.limit is not None:
            limit = loops.names.fresh("limit")
            wanted = f"std::max<int64_t>({loops.c(value.limit)}, 0)"
            lines.add(f"const int64_t {limit} = std::min({wanted}, {size});")
        pointer, found = loops.names.of(var), loops.names.fresh(f"{var.name}_count")
        self._room(pointer, loops.c.type(kind), limit)
        beside = ""
        if isinstance(value, FilterBeside):
            beside = self._beside(var, value, limit, found)
        lines.add(f"int64_t {found} = 0;")
        is_range = isinstance(source.value, nodes.Ref) and source.value.var is source.position
        is_range = is_range and not source.lets
        more = f"{found} < {limit}"
        with loops.tiles(source.size, size, [source, flags], more, asks_ahead=False):
            ahead = loops.read_in_order([source, flags])
            rows = loops.chosen_rows(flags, ahead) if is_range else None
            if rows is not None:
                bits = loops.names.fresh("bits")
                keep = f"keep_bits({bits}, base, count, {found}, {pointer}{beside})"
                lines.add(
                    f"alignas(64) uint64_t {bits}[kTile / 64];",
                    f"if ({rows}reinterpret_cast<uint8_t*>({bits}))) {{",
                    f"  {found} = {keep};",
                    "  continue;",
                    "}",
                )
            loops.ask_ahead(ahead)
            chosen = loops.tile(flags, BOOL)
            if is_range:
                keep = f"keep_range({chosen}, base, count, {found}, {pointer}{beside})"
            else:
                values = loops.tile(source, kind)
                keep = f"keep_values({chosen}, {values}, count, {found}, {pointer})"
            # No more than `limit` before a tile, so the tile that the room has beyond it suffices.
            lines.add(f"{found} = {keep};")
        lines.add(f"{found} = std::min({found}, {limit});")
        return found, pointer

    def _beside(self, var: nodes.Var, value: FilterBeside, limit: str, count: str) -> str:
        """Memory for what is kept beside the places of a filter; the arguments that fill it."""
        loops = self.loops
        vector = loops.stored[value.vector]
        name = loops.names.of(value.beside)
        self._room(name, "float", limit)
        span = value.span
        size = nodes.Size(INT, span, nodes.Ref(var.type, span, var))
        # Beyond what was found a place is 0.
        first = f"value_at({vector.pointer}, {vector.count}, 0)"
        loops.stored[value.beside] = Stored(
            value.beside, size, count, name, is_field=False, bits=None, beyond=first
        )
        return f", {vector.pointer} + base, {name}"

    def _sort(self, var: nodes.Var, value: nodes.Sort) -> tuple[str, str]:
        loops, lines = self.loops, self.loops.lines
        source, kind = _part(value.source), _element(value.type)
        size = loops.number(source.size, "size")
        pointer = loops.names.of(var)
        self._room(pointer, loops.c.type(kind), size)
        with loops.tiles(source.size, size, [source]):
            tile = loops.tile(source, kind)
            lines.add(f"std::copy({tile}, {tile} + count, {pointer} + base);")
        arguments = [pointer, size, "true" if value.is_descending else "false"]
        if kind == FLOAT:
            spare = [loops.names.fresh("spare") for _ in range(SLOTS_OF_SORT - 1)]
            for name in spare:
                self._room(name, "uint32_t", size)
            arguments += spare
        lines.add(f"sort_values({', '.join(arguments)});")
        return size, pointer

    def _hadamard(self, var: nodes.Var, value: nodes.Hadamard) -> tuple[str, str]:
        loops, lines = self.loops, self.loops.lines
        source = _part(value.source)
        size, block = loops.number(source.size, "size"), loops.names.fresh("block")
        lines.add(f"const int64_t {block} = {loops.c(value.block)};")
        pointer = loops.names.of(var)
        self._room(pointer, "float", size)
        with loops.tiles(source.size, size, [source]):
            tile = loops.tile(source, FLOAT)
            # A tile holds whole blocks, and is in the first cache now.
            lines.add(f"hadamard_tile({tile}, count, {block}, {pointer} + base);")
        return size, pointer

    def _blocks(self, var: nodes.Var, value: nodes.BlockReduce) -> tuple[str, str]:
        loops, lines = self.loops, self.loops.lines
        source, kind = _part(value.source), value.init.type
        size = loops.number(source.size, "size")
        blocks = loops.number(blocks_in(source.size, value.block), "blocks")
        block, init = loops.names.fresh("block"), loops.names.fresh("init")
        lines.add(
            f"const int64_t {block} = {loops.c(value.block)};",
            f"const {loops.c.type(kind)} {init} = {loops.c(value.init)};",
        )
        pointer = loops.names.of(var)
        self._room(pointer, loops.c.type(kind), blocks)
        function, element = block_reducer(value)
        with loops.tiles(source.size, size, [source]):
            tile = loops.tile(source, element)
            lines.add(f"{function}({tile}, count, {block}, {init}, {pointer} + base / {block});")
        return blocks, pointer

    def _top_k(
        self, var: nodes.Var, value: nodes.TopK, is_first: bool, masks: Masks | None
    ) -> tuple[str, str]:
        loops, lines = self.loops, self.loops.lines
        source = _part(value.source)
        size = loops.number(source.size, "size")
        name, count = loops.names.fresh("top"), loops.names.fresh(f"{var.name}_count")
        pointer = loops.names.of(var)
        lines.add(
            f"TopK<{self.slots}> {name};",
            f"if (!{name}.start({size}, {loops.c(value.count)})) return TF_HIPS_NO_SCRATCH;",
        )
        self.slots += SLOTS_OF_TOP_K
        with loops.runs(source.size, name, [source], _ADD_RUN if is_first else ()):
            sized = loops.sized(source) if masks is None else None
            if sized is not None:
                lines.add(f"{name}.add<true>({sized}, run);")
            else:
                tile = loops.tile(source, FLOAT) if masks is None else self._masked(masks)
                lines.add(f"{name}.add({tile}, run);")
            lines.add(*(_PUT_BACK if is_first else ()))
        lines.add(f"int64_t {count} = 0;", f"int64_t* {pointer} = {name}.finish(&{count});")
        return count, pointer

    def _masked(self, masks: Masks) -> str:
        """A tile of what a top_k compares, where it is also what writes the states."""
        loops, lines = self.loops, self.loops.lines
        tile, wrong = loops.names.fresh("tile"), loops.names.fresh("wrong")

        def of(part: nodes.Elementwise) -> list[str]:
            return loops.statements(part, lambda text: f"{tile}[j] = {text};", FLOAT)

        lines.add(f"alignas(64) float {tile}[kTile];")
        lines.open("if (run.is_again) {")
        loops.loop(of(masks.again))
        lines.turn("} else if (run.is_sample) {")
        loops.loop(of(masks.size))
        lines.turn("} else {")
        lines.add(f"uint32_t {wrong} = 0;")
        stores = []
        for let, var in zip(masks.size.lets, masks.written, strict=True):
            name = loops.names.of(let.var)
            stores.append(f"{loops.stored[var].pointer}[base + j] = {name};")
            stores.append(f"{wrong} |= is_finite({name}) ? 0u : 1u;")
        loops.loop([*of(masks.size), *stores])
        lines.add(f"all_finite &= {wrong} == 0;")
        lines.close()
        return tile

    def mask(self, masks: Masks) -> None:
        """Behind all loops: zeros where something was chosen, and for what is not finite."""
        lines, kept = self.loops.lines, self.loops.stored[masks.kept]
        targets = [self.loops.stored[var].pointer for var in masks.written]
        lines.open(f"for (int64_t j = 0; j < {kept.count}; ++j) {{")
        lines.add(*(f"{target}[{kept.pointer}[j]] = 0.0f;" for target in targets))
        lines.close()
        lines.open("if (!all_finite) {")
        lines.add(*(f"keep_finite(n, {target});" for target in targets))
        lines.close()

    def _scattered(self, var: nodes.Var, value: nodes.Scatter) -> tuple[str, str]:
        size = self.loops.number(value.size, "size")
        pointer = self.loops.names.of(var)
        self._room(pointer, "float", size)
        self.scatter(value, pointer, "TF_HIPS_SET")
        return size, pointer


def _part(vector: nodes.Expr) -> nodes.Elementwise:
    if not isinstance(vector, nodes.Elementwise):
        raise TypeError(f"a vector must be inlined before it is emitted. Received: {vector!r}")
    return vector


def _element(kind: Type) -> Type:
    return kind.element if isinstance(kind, Array) else kind


def encode_fails(plan: nodes.Plan) -> bool:
    """Whether the hot function of an encoder can return a status."""
    return any(map(can_fail, encode_groups(plan)))


def decode_fails(plan: nodes.Plan) -> bool:
    """Whether the hot function of a decoder can return a status."""
    return any(map(can_fail, decode_groups(plan)))


def can_fail(group: tuple[nodes.Step, ...]) -> bool:
    """Whether the steps of a loop can make a function return a status."""
    step = group[0]
    if isinstance(step, nodes.Sweep):
        return any(isinstance(write.value, nodes.Scatter) for write in step.writes)
    return isinstance(step, nodes.Store) and not is_shared(group)
