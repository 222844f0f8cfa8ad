# SPDX-License-Identifier: Apache-2.0
"""What the loops of a tile read, and what is made before they begin (loops.py).

    noise      drawn for all elements of a tile
    fields     unpacked to a tile of codes or floats
    blocks     what is computed for a block of elements, once; then spread to these, or not

Also the `Access` of expressions: where the loop's own element of a vector is found.
"""

from dataclasses import dataclass, field, replace

from compll.backends.blocks import block_lets
from compll.backends.c_common import Expressions, Lines, Names, float_literal
from compll.backends.narrow import Narrow
from compll.backends.stored import Stored, is_in_memory, tile_bytes
from compll.ir import nodes
from compll.ir.blocks import block_of, blocks_under
from compll.ir.groups import mirror_of
from compll.ir.ranges import Ranges
from compll.ir.sizes import is_as_long
from compll.ir.types import INT, Array, UInt
from compll.ir.walk import changed, walk

# How what an encoder reads is asked for; see tiles.h.
ASK_AHEAD = "prefetch_tile({} + base, count);"


def ask_for_packet(at: str, size: str) -> str:
    """C++ that asks for more of a packet than the `size` bytes that a tile needs from `at` on.

    Functions that decode declare `is_part` (hot.py).
    """
    return f"prefetch_packet({at}, {size}, count, is_part);"


@dataclass
class TileNeeds:
    """Emits what a tile needs beforehand, in one function.

    Attributes:
        stored: vectors that can be read.
        widths: names of the Width of each type that depends on parameters.
        blocks: numbers of elements of blocks that depend on parameters.
    """

    lines: Lines
    names: Names
    params: tuple[nodes.Param, ...]
    stored: dict[nodes.Var, Stored]
    widths: dict[UInt, str]
    _size: nodes.Expr | None = None
    _step: str = "kTile"
    _position: nodes.Var | None = None
    blocks: tuple[nodes.Expr, ...] = ()
    _noise: dict[int, str] = field(default_factory=dict)
    _tiles: dict[nodes.Var, str] = field(default_factory=dict)
    _fetched: set[nodes.Var] = field(default_factory=set)
    _asks: tuple[str, ...] = (ASK_AHEAD,)
    _asks_later: list[str] = field(default_factory=list)
    _mirrors: dict[tuple[nodes.Var, int], str] = field(default_factory=dict)
    _has_groups: bool = True
    _spread: dict[tuple[nodes.Var, nodes.Expr], str] = field(default_factory=dict)
    _in_blocks: bool = False
    _begin: str = "0"
    _block_values: dict[nodes.Var, tuple[str, str]] = field(default_factory=dict)
    _block_lets: dict[nodes.Var, str] = field(default_factory=dict)
    _hoisted: set[nodes.Var] = field(default_factory=set)
    _declared: Lines | None = None
    _unpacks: list[str] = field(default_factory=list)
    _spreads: list[str] = field(default_factory=list)
    _bounds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the printer of expressions, which reads vectors through this object."""
        ranges = Ranges(self.params)
        self.c = Expressions(self.names, self, self.params, bound=self._bound, ranges=ranges)
        self.narrow = Narrow(ranges, self.c, lambda expr: self.noise(expr, self.c))

    def begin(self) -> None:
        """Says that a function begins here: what all its loops need is declared here."""
        self._declared = self.lines.later()

    def _bound(self, value: float) -> str:
        """A constant of a minimum or maximum (hidden, convert.h)."""
        if self._declared is None:
            return float_literal(value)
        # By what is printed: zeros of both signs are equal.
        literal = float_literal(value)
        if literal not in self._bounds:
            self._bounds[literal] = name = self.names.fresh("bound")
            self._declared.add(f"[[maybe_unused]] const float {name} = hidden({literal});")
        return self._bounds[literal]

    # Access.

    def _is_here(self, index: nodes.Expr) -> bool:
        return (
            isinstance(index, nodes.Ref)
            and index.var is self._position
            and self._position is not None
        )

    def _is_whole(self, vector: Stored) -> bool:
        """Whether a vector has an element for each of the loop, if not more."""
        return self._size is not None and is_as_long(vector.size, self._size)

    def index(self, array: nodes.Var, index: nodes.Expr, c: Expressions) -> str:
        """Element `index` of a stored vector, from the tile when it is the loop's own element."""
        vector = self.stored[array]
        if vector.is_local and self._is_here(index):
            return f"{vector.pointer}[j]"
        if self._is_here(index) and self._is_whole(vector):
            if vector.is_field:
                return f"{self._tiles[array]}[j]"
            at = self._at(vector)
            return f"{vector.pointer}[j]" if at == "0" else f"{vector.pointer}[{at} + j]"
        mirrored = self._mirrors.get((array, mirror_of(index, self._position) or 0))
        if mirrored is not None:
            return f"{mirrored}[j]"
        sizes = blocks_under(index, self._position, self.blocks)
        if sizes and self._in_blocks:
            return self._of_block(vector, sizes[1:])
        block = block_of(index, self._position, self.blocks)
        if block is not None:
            return f"{self._spread[array, block]}[j]"
        return self._anywhere(vector, c(index))

    def _at(self, vector: Stored) -> str:
        """C++ for the number that element 0 of the loop has in a vector of floats in memory."""
        return self._begin if vector.is_cached else "base"

    def _of_block(self, vector: Stored, sizes: tuple[nodes.Expr, ...]) -> str:
        """What block k of the tile has in a vector, or its block of blocks of `sizes` has."""
        if vector.is_local:
            return f"{vector.pointer}[k]"
        number = "first + k"
        for size in sizes:
            number = f"({number}) / {self.c(size)}"
        return self._anywhere(vector, number)

    def _anywhere(self, vector: Stored, index: str) -> str:
        """Element `index`, C++ for any number, of a stored vector."""
        if vector.bits is not None:
            return f"code_at({vector.pointer}, {vector.count}, {vector.bits}, {index})"
        if vector.beyond is not None:
            return f"value_or({vector.pointer}, {vector.count}, {index}, {vector.beyond})"
        function = "float_at" if vector.is_field else "value_at"
        return f"{function}({vector.pointer}, {vector.count}, {index})"

    def noise(self, expr: nodes.Random, c: Expressions) -> str:
        """The random bits of an element, from the tile when it is the loop's own element."""
        if self._is_here(expr.position):
            return f"{self._noise[expr.site]}[j]"
        wide = "" if expr.bits == 16 else "wide_"
        return f"{wide}noise_at(key, {expr.site}, {c(expr.position)})"

    def width(self, kind: UInt) -> str:
        """Name of the Width of a type."""
        return self.widths[kind]

    def reads_in_order(self, array: nodes.Var) -> bool:
        """Whether the loop's own element of a vector is found without its number."""
        return self._is_whole(self.stored[array])

    def is_mirrored(self, expr: nodes.Index) -> bool:
        """Whether an element of the group of the loop's own is in a tile."""
        return self.mirrored(expr) is not None

    def mirrored(self, expr: nodes.Index) -> str | None:
        """C++ for a tile of elements that are read the other way round in groups; None: no such."""
        if not isinstance(expr.array, nodes.Ref):
            return None
        mirror = mirror_of(expr.index, self._position)
        return None if mirror is None else self._mirrors.get((expr.array.var, mirror))

    def bits(self, kind: UInt) -> str:
        """C++ for the width of a type."""
        return str(kind.bits) if isinstance(kind.bits, int) else f"{self.widths[kind]}.bits"

    def _prepare(self, parts: list[nodes.Elementwise]) -> None:
        """Draws the noise and unpacks the fields that the loops of a tile read in order.

        What they read from memory is asked for ahead of time.
        """
        for part in parts:
            self._position = part.position
            self._hoist(part)
            self._spread_lets(part)
            for expr in self._inside(part):
                if isinstance(expr, nodes.Random) and self._is_here(expr.position):
                    self._prepare_noise(expr.site, expr.bits)
                elif (
                    isinstance(expr, nodes.Index)
                    and isinstance(expr.array, nodes.Ref)
                    and self._is_here(expr.index)
                ):
                    self._prepare_field(self.stored[expr.array.var])
                    self._prefetch(self.stored[expr.array.var])
                elif isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
                    block = block_of(expr.index, self._position, self.blocks)
                    mirror = mirror_of(expr.index, self._position)
                    if block is not None:
                        self._prepare_block(self.stored[expr.array.var], block)
                    elif mirror is not None and self._has_groups:
                        self._prepare_mirror(self.stored[expr.array.var], mirror)
        self._position = None

    def _inside(self, part: nodes.Elementwise) -> list[nodes.Expr]:
        """What is computed for each element: everything but what is for its block."""
        found = list(walk(part.value))
        for let in part.lets:
            if let.var not in self._hoisted:
                found += walk(let.value)
        return found

    def _hoist(self, part: nodes.Elementwise) -> None:
        """Computes once per block the lets that need nothing else of the element.

        Quotients, such as inverse scales, would otherwise cost more than all the rest.
        """
        hoisted, block = block_lets(part, self.blocks, self._hoisted)
        if block is None:
            return
        self._hoisted |= set(hoisted)
        needed = {e.var for e in self._inside(part) if isinstance(e, nodes.Ref)}
        made = {var: self.names.fresh(f"{var.name}_blocks") for var in hoisted if var in needed}
        for var, name in made.items():
            self.lines.add(f"alignas(64) {self.c.type(var.type)} {name}[kMaxBlocks];")
        length = self.c(block)
        self.lines.open("{")
        self.lines.add(f"[[maybe_unused]] const int64_t first = first_block(base, {length});")
        self.lines.open(f"for (int64_t k = 0; k < num_blocks(count, {length}); ++k) {{")
        lets, number = self._numbered(part, hoisted)
        if number is not None:
            self.lines.add(f"const int64_t {self.names.of(number)} = first + k;")
        self._in_blocks = True
        self.lines.add(*map(self.c.let, lets))
        self._in_blocks = False
        self.lines.add(*(f"{name}[k] = {self.names.of(var)};" for var, name in made.items()))
        self.lines.close()
        self.lines.close()
        self._block_values |= {var: (name, length) for var, name in made.items()}

    def _numbered(
        self, part: nodes.Elementwise, hoisted: dict[nodes.Var, nodes.Let]
    ) -> tuple[list[nodes.Let], nodes.Var | None]:
        """Lets of a block with a variable where they compute its number; None: they don't."""
        number: nodes.Var | None = None

        def change(expr: nodes.Expr) -> nodes.Expr:
            nonlocal number
            if isinstance(expr, nodes.Index):
                return expr
            if block_of(expr, part.position, self.blocks) is None:
                return changed(expr, change)
            number = number or nodes.Var("block_number", INT, expr.span)
            return nodes.Ref(INT, expr.span, number)

        lets = [replace(let, value=change(let.value)) for let in hoisted.values()]
        return lets, number

    def _spread_lets(self, part: nodes.Elementwise) -> None:
        """Gives every element what was computed for its block."""
        for var in [let.var for let in part.lets]:
            if var not in self._block_values or var in self._block_lets:
                continue
            name, length = self._block_values[var]
            tile = self._block_lets[var] = self.names.fresh(f"{var.name}_tile")
            spread = f"spread_blocks<{self._step}>([&](int64_t k) {{ return {name}[k]; }},"
            self._spreads += [
                f"alignas(64) {self.c.type(var.type)} {tile}[{self._step}];",
                f"{spread} {self._begin}, {length}, count, {tile});",
            ]

    def _prepare_noise(self, site: int, bits: int) -> None:
        if site not in self._noise:
            self._noise[site] = self._draw(site, bits)

    def _draw_ahead(self, parts: list[nodes.Elementwise]) -> None:
        """Draws at once what the steps of a tile need, which takes less time than step by step."""
        for part in parts:
            self._position = part.position
            for expr in self._inside(part):
                if not isinstance(expr, nodes.Random) or not self._is_here(expr.position):
                    continue
                if expr.site not in self._noise:
                    self._noise[expr.site] = f"({self._draw(expr.site, expr.bits)} + at)"
        self._position = None

    def _draw(self, site: int, bits: int) -> str:
        """Writes the call that draws the noise of a tile; returns its name."""
        noise, buffer = self.names.fresh("noise"), self.names.fresh("noise_buffer")
        self.lines.add(
            f"alignas(64) uint{bits}_t {buffer}[kNoiseSize];",
            f"const uint{bits}_t* {noise} = "
            f"{'' if bits == 16 else 'wide_'}noise_tile(key, {site}, base, count, {buffer});",
        )
        return noise

    def _prepare_field(self, vector: Stored) -> None:
        if not vector.is_field or vector.var in self._tiles or not self._is_whole(vector):
            return
        tile = self._tiles[vector.var] = self.names.fresh(f"{vector.var.name}_tile")
        kind = vector.var.type
        element = self.c.type(kind.element if isinstance(kind, Array) else kind)
        self._unpacks.append(f"alignas(64) {element} {tile}[{self._step}];")
        if vector.bits is None:
            at = f"{vector.pointer} + base * 4"
            asked, unpack = (at, "count * 4"), f"load_floats({at}, count, {tile});"
        else:
            at = f"{vector.pointer} + {tile_bytes(vector.bits)}"
            asked = at, f"count * {vector.bits} / 8"
            unpack = f"unpack_codes({at}, count, {vector.bits}, {tile});"
        self._unpacks += [ask_for_packet(*asked), unpack]

    def _prefetch(self, vector: Stored) -> None:
        """Asks for what short tiles of a vector need soon; see prefetch_tile."""
        if vector.var in self._fetched or not is_in_memory(vector) or vector.is_cached:
            return
        if self._step == "kStep" and self._is_whole(vector):
            self._fetched.add(vector.var)
            asks = self._asks if vector.pointer == "in" else (ASK_AHEAD,)
            self.lines.add(asks[0].format(vector.pointer))
            self._asks_later += [line.format(vector.pointer) for line in asks[1:]]

    def read_in_order(self, parts: list[nodes.Elementwise]) -> list[str]:
        """C++ for the vectors of floats in memory that parts read element by element."""
        found: dict[str, None] = {}
        for part in parts:
            for expr in walk(part):
                if isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
                    # What the same loop makes first is not there yet, nor in memory.
                    vector = self.stored.get(expr.array.var)
                    is_here = isinstance(expr.index, nodes.Ref) and expr.index.var is part.position
                    if vector is None or vector.is_cached:
                        continue
                    if is_here and is_in_memory(vector):
                        found[vector.pointer] = None
        return list(found)

    def _prepare_block(self, vector: Stored, block: nodes.Expr) -> None:
        """Gives every element of a tile what belongs to its block, so that loops stay simple."""
        if (vector.var, block) in self._spread:
            return
        tile = self.names.fresh(f"{vector.var.name}_tile")
        self._spread[vector.var, block] = tile
        kind = vector.var.type
        element = self.c.type(kind.element if isinstance(kind, Array) else kind)
        begin, found = (
            (self._begin, f"{vector.pointer}[k]")
            if vector.is_local
            else (
                "base",
                self._anywhere(vector, "k"),
            )
        )
        self._spreads += [
            f"alignas(64) {element} {tile}[{self._step}];",
            f"spread_blocks<{self._step}>([&](int64_t k) {{",
            f"  return static_cast<{element}>({found});",
            f"}}, {begin}, {self.c(block)}, count, {tile});",
        ]

    def _prepare_mirror(self, vector: Stored, mirror: int) -> None:
        """Turns the groups of a tile of a vector round; beyond its end there are zeros."""
        is_code = vector.is_field and vector.bits is not None
        if (vector.var, mirror) in self._mirrors or not (is_code or is_in_memory(vector)):
            return
        if vector.beyond is not None:
            return
        tile = self._mirrors[vector.var, mirror] = self.names.fresh(f"{vector.var.name}_mirrored")
        kind = vector.var.type
        element = self.c.type(kind.element if isinstance(kind, Array) else kind)
        there = f"std::max<int64_t>({vector.count} - base, 0)"
        declared = f"alignas(64) {element} {tile}[{self._step}];"
        if is_code:
            codes, bits = self.names.fresh(f"{vector.var.name}_tile"), str(vector.bits)
            held = self.names.fresh("there")
            self._unpacks += [
                declared,
                f"alignas(64) {element} {codes}[{self._step}];",
                f"const int64_t {held} = std::min<int64_t>({there}, (count + 7) / 8 * 8);",
                f"unpack_codes({vector.pointer} + {tile_bytes(bits)}, {held}, {bits}, {codes});",
                f"mirror_tile<{mirror}>({codes}, {held}, count, {tile});",
            ]
            return
        at = f"{vector.pointer} + base"
        turned = f"mirror_tile<{mirror}>({at}, {there}, count, {tile});"
        self.lines.add(f"prefetch_tile({at}, count);", declared, turned)

    def run_unpacks(self) -> None:
        """Unpacks the fields of a tile, before what needs them."""
        self.lines.add(*self._unpacks)
        self._unpacks.clear()

    def run_spreads(self) -> None:
        """The same, and gives elements what belongs to their blocks."""
        self.run_unpacks()
        self.lines.add(*self._spreads)
        self._spreads.clear()
