# SPDX-License-Identifier: Apache-2.0
"""Sweeps as C++ loops over tiles of 256 elements, or 1024 where whole blocks are needed.

A tile is a part of a block of a float reduction, and small enough that what is computed for one
element after another (noise, codes, values) stays in the first-level cache between the simple loops
that compilers turn into vector code. Before each, memory is asked for what a later one reads, so
that it never rests while a tile is computed:

    for each tile:   draw noise, unpack  ->  one loop for all values, counts and codes  ->  fold,
                     pack, store

`base` is the first element of the tile, `count` their number, `j` an element's number in the tile.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from compll.backends.choices import Choices
from compll.backends.stored import (
    Stored,
    is_in_memory,
    parts_of,
    tile_bytes,
    unnamed,
    uses_position,
)
from compll.backends.tile_feedback import NO_FEEDBACK, TileFeedback
from compll.backends.tile_needs import TileNeeds
from compll.ir import nodes
from compll.ir.types import FLOAT, INT, Array, Type, UInt
from compll.ir.walk import is_same

__all__ = ["Loops", "Stored", "parts_of"]


@dataclass
class Loops(TileNeeds):
    """Emits the sweeps of one function.

    Attributes:
        floats: targets of writes that are vectors of float in memory, and no fields of a body.
        overwritten: pointers to vectors that the writes of a loop may be stored over.
    """

    floats: set[str] = field(default_factory=set)
    overwritten: set[str] = field(default_factory=set)
    _made: list[tuple[nodes.Elementwise, Type, str]] = field(default_factory=list)
    _shared: list[str] = field(default_factory=list)
    _stores: list[str] = field(default_factory=list)
    _after: list[str] = field(default_factory=list)
    _is_single: bool = False
    _choices: Choices = field(default_factory=Choices)

    # Sweeps.

    def number(self, size: nodes.Expr, name: str) -> str:
        """C++ for a length that is used more than once: a variable, unless it is one already."""
        if isinstance(size, nodes.Size):
            return self.c(size)
        text = self.names.fresh(name)
        self.lines.add(f"const int64_t {text} = {self.c(size)};")
        return text

    @contextlib.contextmanager
    def tiles(
        self,
        size: nodes.Expr,
        count: str,
        parts: list[nodes.Elementwise],
        condition: str = "",
        *,
        asks_ahead: bool = True,
    ) -> Iterator[None]:
        """A loop over the tiles of `count` elements; what is emitted within belongs to a tile.

        `size`: the length of `parts`, of which the first `count` are visited; the loop ends early
        where `condition` (C++) does not hold. `asks_ahead`: else who emits a tile asks.
        """
        more = f" && {condition}" if condition else ""
        self.lines.open(f"for (int64_t base = 0; base < {count}{more}; base += kTile) {{")
        self.lines.add(f"const int64_t count = std::min(kTile, {count} - base);")
        with self._body(size, parts, asks_ahead=asks_ahead):
            yield

    @contextlib.contextmanager
    def runs(
        self, size: nodes.Expr, top: str, parts: list[nodes.Elementwise], first: tuple[str, ...]
    ) -> Iterator[None]:
        """A loop over the runs of elements that a TopK asks for; else as `tiles`.

        `first`: statements at the beginning of each run.
        """
        # Runs begin anywhere in a group.
        self._has_groups = False
        loop = f"for (TopRun run = {top}.first(); run.count > 0; run = {top}.next()) {{"
        self.lines.open(loop)
        self.lines.add("const int64_t base = run.base, count = run.count;", *first)
        # A run of several vectors would be asked for in one burst, for which the tile then waits;
        # the processor sees by itself that they are read in order.
        with self._body(size, parts, asks_ahead=len(self.read_in_order(parts)) == 1):
            yield
        self._has_groups = True

    @contextlib.contextmanager
    def _body(
        self, size: nodes.Expr, parts: list[nodes.Elementwise], *, asks_ahead: bool = True
    ) -> Iterator[None]:
        """What is done for each tile of a loop, which ends with it."""
        self._size = size
        self._step = "kTile"
        self.ask_ahead(self.read_in_order(parts) if asks_ahead else [])
        self._prepare(parts)
        self.run_spreads()
        yield
        self.lines.close()
        self._forget()

    def ask_ahead(self, pointers: list[str]) -> None:
        """Asks for what a tile of each vector, of which it has C++, is followed by."""
        self.lines.add(*(f"prefetch_tile({pointer} + base, count);" for pointer in pointers))

    def tile(self, part: nodes.Elementwise, kind: Type) -> str:
        """C++ for the values of a tile, in a loop that `tiles` began."""
        values = self._values(part, kind)
        self._run_shared()
        return values

    def sized(self, part: nodes.Elementwise) -> str | None:
        """C++ for the elements of a tile of whose sizes a part consists; None: it does not."""
        value = unnamed(part, part.value)
        if not isinstance(value, nodes.Math) or value.function != "abs":
            return None
        inner = unnamed(part, value.arguments[0])
        if not isinstance(inner, nodes.Index) or not isinstance(inner.array, nodes.Ref):
            return None
        self._position = part.position
        vector = self.stored[inner.array.var]
        is_plain = is_in_memory(vector) and vector.size == self._size
        return (
            f"{vector.pointer} + {self._at(vector)}"
            if is_plain and self._is_here(inner.index)
            else None
        )

    def sweep(
        self,
        sweep: nodes.Sweep,
        count: str,
        targets: dict[int, str],
        *,
        begin: str = "0",
        feedback: TileFeedback = NO_FEEDBACK,
    ) -> None:
        """One loop over tiles.

        Args:
            sweep: what it computes.
            count: C++ for the element that it ends before.
            targets: where each field is written to.
            begin: C++ for the element that it begins with.
            feedback: what is done about feedback.
        """
        parts = parts_of(sweep)
        results = [self._start(var, reduce) for var, reduce in sweep.reduces]
        begin = self._at_once(sweep, targets, begin, count)
        self._size, self._step = sweep.size, "kStep"
        head = f"for_tiles<kStep>({begin}, {count}, [&](int64_t base, auto count)"
        self.lines.open(f"{head} TF_HIPS_INLINED {{")
        self._asks = feedback.asks(sweep)
        self._prepare(parts)
        self._is_single = len(parts) == 1
        self._feedback_rows(sweep, results, targets, feedback)
        self.lines.add(*self._asks_later, *feedback.first)
        self._asks_later.clear()
        if not feedback.has_last:
            self._sweep_rows(sweep, results, targets)
        for (_, reduce), result in zip(sweep.reduces, results, strict=True):
            self._reduce(reduce, result)
        for write in sweep.writes:
            self._write(write, targets[write.field])
        self._run_shared()
        self.lines.add(*feedback.last_lines())
        self.lines.close("});")
        for (var, reduce), result in zip(sweep.reduces, results, strict=True):
            self._finish(var, reduce, result)
        self._forget()

    def _forget(self) -> None:
        """Forgets what was made for the tiles of a loop."""
        self._noise.clear()
        self._tiles.clear()
        self._fetched.clear()
        self._spread.clear()
        self._made.clear()
        self._mirrors.clear()
        self._block_lets.clear()
        self._block_values.clear()
        self._hoisted.clear()
        self._unpacks.clear()
        self._spreads.clear()
        self._is_single = False
        self._size = None

    def prepare(self, sweep: nodes.Sweep) -> None:
        """Emits what the loops of a tile of a sweep need before they begin."""
        self._size, self._step = sweep.size, "kTile"
        self._prepare(parts_of(sweep))

    def _at_once(self, sweep: nodes.Sweep, targets: dict[int, str], begin: str, count: str) -> str:
        """Does elements before the tiles, if it can; returns C++ for what these begin with."""
        return begin

    def _feedback_rows(
        self,
        sweep: nodes.Sweep,
        results: list[str],
        targets: dict[int, str],
        feedback: TileFeedback,
    ) -> None:
        """Does a step of an encoder with feedback another way, if there is one, and ends it."""

    def chosen_rows(self, flags: nodes.Elementwise, ahead: list[str]) -> str | None:
        """How else it is said which elements of a tile a filter keeps, as bits; None: not so."""
        return None

    def _sweep_rows(self, sweep: nodes.Sweep, results: list[str], targets: dict[int, str]) -> None:
        """Reduces and writes a step another way, if there is one, and ends it then."""

    def _write_rows(self, part: nodes.Elementwise, kind: UInt, target: str) -> bool:
        """Writes the codes of a tile another way, if there is one."""
        return False

    def _gradient_rows(self, part: nodes.Elementwise, target: str, tile: str, stream: str) -> None:
        """Writes a tile of a decode another way, if there is one, and ends the step then."""

    def _values(self, part: nodes.Elementwise, kind: Type) -> str:
        """A tile of values; the vector itself where nothing is computed."""
        self._position = part.position
        value = part.value
        if (
            isinstance(value, nodes.Index)
            and value.type == kind
            and not part.lets
            and isinstance(value.array, nodes.Ref)
        ):
            vector = self.stored[value.array.var]
            self.run_unpacks()
            if self._is_here(value.index) and vector.is_local:
                return vector.pointer
            if self._is_here(value.index) and self._is_whole(vector):
                return (
                    self._tiles[vector.var]
                    if vector.is_field
                    else f"{vector.pointer} + {self._at(vector)}"
                )
        for other, its_kind, made in self._made:
            if its_kind == kind and is_same(part, other):
                return made
        name = self.names.fresh("tile")
        self._made.append((part, kind, name))
        self.lines.add(f"alignas(64) {self.c.type(kind)} {name}[{self._step}];")
        self._share(part, lambda text: f"{name}[j] = {text};", kind)
        return name

    def statements(
        self, part: nodes.Elementwise, statement: Callable[[str], str], kind: Type
    ) -> list[str]:
        """What is done for element j; `statement` makes a statement of the text of its value."""
        self.c.narrow = self.narrow
        try:
            return self._statements(part, statement, kind)
        finally:
            self.c.narrow = None

    def _statements(
        self, part: nodes.Elementwise, statement: Callable[[str], str], kind: Type
    ) -> list[str]:
        self._position = part.position
        value = part.value
        if value.type != kind:
            value = nodes.Convert(kind, value.span, value)
        lines = []
        named: set[nodes.Var] = set()
        own = replace(part, lets=tuple(let for let in part.lets if let.var not in self._hoisted))
        if uses_position(own, self.blocks, self.reads_in_order, self.is_mirrored):
            lines.append(f"const int64_t {self.names.of(part.position)} = base + j;")
        for let in part.lets:
            if let.var in self._block_lets:
                name, tile = self.names.of(let.var), self._block_lets[let.var]
                lines.append(f"const {self.c.type(let.var.type)} {name} = {tile}[j];")
            elif let.var not in self._hoisted:
                choices, made = self._choices.apart(let.value, part.position, named)
                lines += map(self.c.let, [*choices, replace(let, value=made)])
        choices, value = self._choices.apart(value, part.position, named)
        return [*lines, *map(self.c.let, choices), statement(self.c(value))]

    def _loop(self, part: nodes.Elementwise, statement: Callable[[str], str], kind: Type) -> None:
        """A loop over a tile, of its own."""
        self.loop(self.statements(part, statement, kind))

    def _share(self, part: nodes.Elementwise, statement: Callable[[str], str], kind: Type) -> None:
        """As _loop, in the loop that a tile has for all that compilers turn into vector code."""
        for line in self.statements(part, statement, kind):
            # Two parts may share a let, which then is there.
            if line not in self._shared:
                self._shared.append(line)

    def loop(self, statements: list[str]) -> None:
        """A loop over the elements j of a tile."""
        self.run_spreads()
        self.lines.open("for (int64_t j = 0; j < count; ++j) {")
        self.lines.add(*statements)
        self.lines.close()

    def _use(self, values: str, statement: str) -> None:
        """Emits what is done with a tile of values, behind the loop that makes them.

        Those of a vector itself are there already, and may be overwritten in that loop.
        """
        if values.removesuffix(" + base") in self.overwritten:
            self.lines.add(statement)
        else:
            self._after.append(statement)

    def _run_shared(self) -> None:
        """Emits the loop of what was shared, and what waits for it."""
        if self._shared:
            self.loop([*self._shared, *self._stores])
        self.lines.add(*self._after)
        self._shared.clear()
        self._stores.clear()
        self._after.clear()

    # Reductions.

    def _start(self, var: nodes.Var, reduce: nodes.Reduce) -> str:
        result = self.names.fresh(
            f"{var.name}_tree" if reduce.type == FLOAT else f"{var.name}_part"
        )
        if reduce.type == FLOAT:
            self.lines.add(f"Tree<{reduce.reducer.capitalize()}> {result};")
        elif reduce.reducer in ("and", "or"):
            self.lines.add(f"bool {result} = {self.c(reduce.init, 9)} != 0;")
        else:
            self.lines.add(f"int64_t {result} = {self.c(reduce.init)};")
        return result

    def _reduce(self, reduce: nodes.Reduce, result: str) -> None:
        part = reduce.source
        if not isinstance(part, nodes.Elementwise):
            raise TypeError(f"a reduction must be inlined before it is emitted. Received: {part!r}")
        if reduce.type == FLOAT:
            values = self._values(part, FLOAT)
            self._use(values, f"{result}.take({values}, count);")
            return
        kind = part.value.type
        is_small = isinstance(kind, UInt) and kind.bits != 32
        match reduce.reducer:
            case "sum" if is_small and self.c.type(kind) == "uint8_t":
                values = self._values(part, kind)
                self._after.append(f"{result} = int_add({result}, sum_codes({values}, count));")
            case "sum" if is_small:
                # 1024 codes of 16 bits fit 32 bits, and 32-bit lanes are twice as many.
                self._small_sum(part, lambda text: text, kind, result)
            case "count":
                self._small_sum(part, lambda text: f"{text} != 0 ? 1u : 0u", kind, result)
            case "and":
                self._loop(part, lambda text: f"{result} &= ({text}) != 0;", kind)
            case "or":
                self._loop(part, lambda text: f"{result} |= ({text}) != 0;", kind)
            case _:
                function = {"sum": "int_add", "prod": "int_mul"}.get(
                    reduce.reducer, f"{reduce.reducer}imum<int64_t>"
                )
                self._loop(part, lambda text: f"{result} = {function}({result}, {text});", INT)

    def _small_sum(
        self, part: nodes.Elementwise, term: Callable[[str], str], kind: Type, result: str
    ) -> None:
        name = self.names.fresh("total")
        self.lines.add(f"uint32_t {name} = 0;")
        self._share(part, lambda text: f"{name} += {term(f'({text})')};", kind)
        self._after.append(f"{result} = int_add({result}, {name});")

    def _finish(self, var: nodes.Var, reduce: nodes.Reduce, result: str) -> None:
        value = f"{result}.finish({self.c(reduce.init)})" if reduce.type == FLOAT else result
        if reduce.reducer in ("and", "or"):
            value = f"static_cast<int64_t>({result})"
        self.lines.add(f"const {self.c.type(var.type)} {self.names.of(var)} = {value};")

    # Writes.

    def _write(self, write: nodes.Write, target: str) -> None:
        if not isinstance(write.value, nodes.Elementwise):
            raise TypeError(f"a sweep writes Elementwise only. Received: {write.value!r}")
        kind = write.value.type.element if isinstance(write.value.type, Array) else write.value.type
        if target == "out":
            self._write_gradient(write.value)
        elif target in self.floats:
            # Stored behind all that the loop reads, which may be the same vector as it was.
            name = self.names.fresh("next")
            self._share(write.value, lambda text: f"const float {name} = {text};", FLOAT)
            self._stores.append(f"{target}[base + j] = {name};")
        elif isinstance(kind, UInt):
            bits = self.bits(kind)
            at = f"{target} + {tile_bytes(bits, is_of_blocks=self._step == 'kMaxBlocks')}"
            if not self._write_rows(write.value, kind, at):
                values = self._values(write.value, kind)
                self._after.append(f"pack_codes({values}, count, {bits}, {at});")
        else:
            values = self._values(write.value, FLOAT)
            self._use(values, f"store_floats({values}, count, {target} + base * 4);")

    def _write_gradient(self, part: nodes.Elementwise) -> None:
        """A tile of a decode, in the way that `mode` asks for (codec.h)."""
        self._run_shared()
        target, tile = self.names.fresh("target"), self.names.fresh("tile")
        if self._declared is None:
            raise RuntimeError("a function must begin before its loops.")
        stream = self.names.fresh("stream")
        self._declared.add(f"Stream {stream};")
        self.lines.add(f"float* const {target} = out + (base - begin);")
        self._gradient_rows(part, target, tile, stream)
        self.run_spreads()
        self.lines.open("if (mode == TF_HIPS_ADD) {")
        self.lines.add(f"prefetch_tile({target}, count);")
        self._loop(part, lambda text: f"{target}[j] += {text};", FLOAT)
        self.lines.turn("} else if (mode == TF_HIPS_SET) {")
        self._loop(part, lambda text: f"{target}[j] = {text};", FLOAT)
        self.lines.turn("} else {")
        self.lines.add(f"alignas(64) float {tile}[{self._step}];")
        self._loop(part, lambda text: f"{tile}[j] = {text};", FLOAT)
        self.lines.add(f"put_tile({tile}, count, mode, {target}, &{stream});")
        self.lines.close()
