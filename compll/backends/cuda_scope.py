# SPDX-License-Identifier: Apache-2.0
"""What the kernels of one function know, and how a kernel reads it: variables of C++ for CUDA.

Results of reductions and lengths that depend on data lie in device memory, one struct `Scalars` a
chunk; vectors that are kept lie there too, in memory of the call. Everything else that is computed
once per chunk, being cheap, is computed again by each thread that needs it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from compll.backends.c_common import Expressions, Lines, param_names
from compll.backends.cuda_side import (
    Definition,
    KernelNames,
    Side,
    element,
    reads,
    turned_by,
)
from compll.backends.narrow import Narrow
from compll.ir import nodes
from compll.ir.blocks import block_of
from compll.ir.float_ranges import (
    FloatRanges,
    is_nonzero,
    is_whole_code,
    never_above_top,
)
from compll.ir.ranges import Ranges
from compll.ir.types import FLOAT, INT, Type, UInt
from compll.ir.walk import changed, free_vars, walk

# A float 0 that nvcc does not know (c_common.Expressions).
_ZERO = "zero"


# Elements of which a thread can load eight at once, where a vector is kept.
_LOADED = ("float", "int64_t")

# A kernel need not use all that its expressions' lengths are made of.
_MAYBE = "[[maybe_unused]] "


@dataclass(frozen=True)
class Vector:
    """A vector in device memory; `size`: its length where a loop may be as long, `count`: C++."""

    var: nodes.Var
    size: nodes.Expr | None
    count: str
    pointer: str
    form: str  # "gradient", "state", "field", "kept", "tile" or "picked"
    bits: str | None = None
    room: str = ""  # of one that is kept and begins at 16 bytes: C++ for how many it has room for


@dataclass(frozen=True)
class Gradient:
    """How a loop loads eight elements of the gradient.

    Attributes:
        load: C++ up to where they are.
        wide: C++ for the vectors that this reads or writes.
        after: a statement about what {tile} has then.
    """

    load: str
    wide: tuple[str, ...]
    after: str = ""


class Scope:
    """The variables of a block of C++; also the `Access` of the expressions in it."""

    def __init__(self, side: Side, lines: Lines, body: str = "body") -> None:
        """`body`: C++ for where the body of the chunk's packet begins."""
        self.side = side
        self.lines = lines
        self.names = KernelNames()
        ranges, params = Ranges(side.program.params), side.program.params
        self.c = Expressions(self.names, self, params, ranges=ranges, zero=_ZERO)
        # In loops a number has 32 bits where that is enough: each operation of 64 is two or more.
        self._ranges = ranges
        self._floats = FloatRanges(ranges)
        self.c.is_nonzero = lambda expr: is_nonzero(expr, ranges)
        self.c.divisor = self._divisor
        self.c.is_number = lambda expr: not self._floats(expr).has_nan
        self._narrow = Narrow(ranges, self.c, lambda expr: self.noise(expr, self.c))
        self.widths: dict[UInt, str] = {}
        self.vectors: dict[nodes.Var, Vector] = {}
        self.position: nodes.Var | None = None
        self.size: nodes.Expr | None = None
        # In the loop over the eight elements of a thread: what was loaded before it.
        self.tiles: dict[nodes.Var, str] = {}
        self.drawn: dict[int, str] = {}
        self.hoisted: dict[tuple[nodes.Var, nodes.Expr], str] = {}
        self.gathered: dict[tuple[nodes.Var, nodes.Var], str] = {}
        # Vectors of which a thread has an element, at the number of the loop's own.
        self.own: dict[nodes.Var, str] = {}
        # Floats that a loop is given, the same for all eight elements of a thread.
        self.given: Mapping[nodes.Var, str] = {}
        # What a loop divides by, and what in it differs from element to element.
        self._divisors: dict[nodes.Var, str] = {}
        self._divisor_lines: Lines | None = None
        self._own: set[nodes.Var] | None = None
        # C++ for the parameters that are known when a kernel is compiled.
        self.fixed: Mapping[nodes.Var, str] = {}
        # C++ for the vectors that a full tile reads or writes 16 bytes at a time.
        self.wide: list[str] = []
        self._body = body

    # Access.

    def is_here(self, index: nodes.Expr) -> bool:
        """Whether an index is the number of the loop's own element."""
        is_own = isinstance(index, nodes.Ref) and index.var is self.position
        return is_own and self.position is not None

    def index(self, array: nodes.Var, index: nodes.Expr, c: Expressions) -> str:
        """Element `index` of a vector."""
        if array in self.own and self.is_here(index):
            return self.own[array]
        vector = self.vectors[array]
        if array in self.tiles:
            turned = turned_by(index, self.position)
            if turned is not None and self._is_loaded(vector):
                return f"{self.tiles[array]}[u{f' ^ {turned}' if turned else ''}]"
        if isinstance(index, nodes.Ref) and (array, index.var) in self.gathered:
            return f"{self.gathered[array, index.var]}[u]"
        block = block_of(index, self.position, self.side.program.blocks)
        if block is not None and (array, block) in self.hoisted:
            return self.hoisted[array, block]
        return self.anywhere(vector, c(index))

    def anywhere(self, vector: Vector, index: str) -> str:
        """Element `index`, C++ for any number, of a vector."""
        self.side.reads_anywhere |= vector.form == "gradient"
        if vector.form == "picked":
            return vector.pointer
        if vector.bits is not None:
            return f"code_at({vector.pointer}, {vector.count}, {vector.bits}, {index})"
        function = "float_at" if vector.form == "field" else "value_at"
        return f"{function}({vector.pointer}, {vector.count}, {index})"

    def noise(self, expr: nodes.Random, c: Expressions) -> str:
        """The random bits of an element."""
        if self.is_here(expr.position) and expr.site in self.drawn:
            return f"{self.drawn[expr.site]}[u]"
        wide = "" if expr.bits == 16 else "wide_"
        return f"{wide}noise_at(key, {expr.site}, {c(expr.position)})"

    def width(self, kind: UInt) -> str:
        """Name of the Width of a type."""
        return self.widths[kind]

    def bits(self, kind: Type) -> str:
        """C++ for the bits of an element in a packet."""
        if not isinstance(kind, UInt):
            return "32"
        return str(kind.bits) if isinstance(kind.bits, int) else f"{self.widths[kind]}.bits"

    def length(self, size: nodes.Expr) -> str:
        """C++ for a length; of `blocks_in` without a division, which each thread would do."""
        if isinstance(size, nodes.Binary) and size.op == "/":
            block, known = size.right, self.side.program.blocks
            if block in known or (isinstance(block, nodes.Const) and block.value in nodes.BLOCKS):
                return f"block_number({self.c(size.left)}, {self.c(block)})"
        return self.c(size)

    # What a block of C++ begins with.

    def unpack(self, roots: Iterable[nodes.Expr]) -> None:
        """Declares every variable that is needed for the expressions `roots`."""
        side, lines = self.side, self.lines
        roots = list(roots)
        # Here, where no condition stands before it: nvcc moves no assembler text out of a branch.
        lines.add(f"{_MAYBE}const float {_ZERO} = hidden(0.0f);")
        used = side.needed(roots)
        roots += [made.value for made in reversed(used) if made.value is not None]
        need: set[nodes.Var] = set().union(*map(free_vars, roots))
        side.has_read = side.has_read or reads(roots, side.gradient)
        for param, name in param_names(side.program).items():
            kind = self.c.type(param.type)
            if param in need or self._in_widths(param, roots, need):
                text = self.fixed.get(param, f"call.params.{name}")
                lines.add(f"{_MAYBE}const {kind} {self.names.of(param)} = {text};")
        self._declare_widths(roots, need)
        self.c.sizes[side.gradient] = "n"
        size = nodes.Size(
            INT,
            side.gradient.span,
            nodes.Ref(side.gradient.type, side.gradient.span, side.gradient),
        )
        if not side.is_decode:
            self.vectors[side.gradient] = Vector(side.gradient, size, "n", "in", "gradient")
        for number, var in enumerate(side.states):
            self.c.sizes[var] = "n"
            if var in need:
                name = self.names.of(var)
                lines.add(f"const float* const {name} = call.state[{number}] + begin;")
                self.vectors[var] = Vector(var, size, "n", name, "state")
        for number, item in enumerate(side.fields):
            if item.var in need:
                self._read_field(number, item)
        for made in used:
            self.declare(made)
        self._divisor_lines = lines.later()
        self._divisors.clear()

    def _divisor(self, expr: nodes.Expr) -> str | None:
        """What the elements of a loop divide by, if that is the same for all of them."""
        if self._own is None or self._divisor_lines is None:
            return None
        if not isinstance(expr, nodes.Ref) or expr.var in self._own:
            return None
        # What is made on the way, as the number of a block, is declared behind these lines.
        if expr.var not in self.side.known():
            return None
        if expr.var not in self._divisors:
            name = self._divisors[expr.var] = self.names.fresh("divisor")
            self._divisor_lines.add(f"{_MAYBE}const Divisor {name}({self.names.of(expr.var)});")
        return self._divisors[expr.var]

    def _kinds(self, roots: list[nodes.Expr], need: set[nodes.Var]) -> list[UInt]:
        kinds = [element(expr.type) for root in roots for expr in walk(root)]
        kinds += [element(var.type) for var in need]
        return list(dict.fromkeys(kind for kind in kinds if isinstance(kind, UInt)))

    def _in_widths(self, param: nodes.Var, roots: list[nodes.Expr], need: set[nodes.Var]) -> bool:
        return any(
            isinstance(kind.bits, nodes.Expr) and param in free_vars(kind.bits)
            for kind in self._kinds(roots, need)
        )

    def _declare_widths(self, roots: list[nodes.Expr], need: set[nodes.Var]) -> None:
        for kind in self._kinds(roots, need):
            if isinstance(kind.bits, nodes.Expr):
                name = self.widths[kind] = self.names.fresh("width")
                self.lines.add(f"{_MAYBE}const Width {name}({self.c(kind.bits)});")

    def _read_field(self, number: int, item: nodes.Field) -> None:
        var, at = item.var, f"{self._body} + layout.offset[{number}]"
        kind = element(var.type)
        bits = self.bits(kind) if isinstance(kind, UInt) else None
        name = self.names.of(var)
        if item.size is not None:
            self.lines.add(f"{_MAYBE}const uint8_t* {name} = {at};")
            count = f"layout.count[{number}]"
            self.c.sizes[var] = count
            self.vectors[var] = Vector(var, item.size, count, name, "field", bits)
            return
        text = f"load_float({at})" if bits is None else f"load_code({at}, {bits})"
        held = self.c.type(kind)
        self.lines.add(f"{_MAYBE}const {held} {name} = static_cast<{held}>({text});")

    def declare(self, made: Definition) -> None:
        """Makes a variable of what an earlier step has computed."""
        var, lines = made.var, self.lines
        name = self.names.of(var)
        if made.form == "let" and made.value is not None:
            let = nodes.Let(var, made.value, var.span)
            lines.add(_MAYBE + self.c.let(let))
            self._floats.learn(let)
        elif made.form == "scalar":
            found = made.here or f"scalars.{made.member}"
            lines.add(f"{_MAYBE}const {self.c.type(var.type)} {name} = {found};")
        elif made.form == "tile" and made.value is not None:
            count = self.names.fresh(f"{var.name}_count")
            lines.add(f"{_MAYBE}const int64_t {count} = {self.length(made.value)};")
            self.c.sizes[var] = count
            self.vectors[var] = Vector(var, made.value, count, made.here, "tile")
        else:
            kind = self.c.type(element(var.type))
            count = self.names.fresh(f"{var.name}_count")
            found = f"scalars.{made.count}" if made.value is None else self.length(made.value)
            at = f"call.{made.member} + spot.chunk * call.{made.member}_room"
            pointed = f"const {kind}* {name} = {made.here or at};"
            if made.is_picked:
                pointed = f"const {kind} {name} = scalars.{made.member};"
            lines.add(f"{_MAYBE}const int64_t {count} = {found};", _MAYBE + pointed)
            self.c.sizes[var] = count
            size = made.value
            if size is None or isinstance(size, nodes.Math):
                size = nodes.Size(INT, var.span, nodes.Ref(var.type, var.span, var))
            form = "picked" if made.is_picked else "kept"
            room = f"call.{made.member}_room" if made.is_roomy and kind in _LOADED else ""
            self.vectors[var] = Vector(var, size, count, name, form, room=room)

    # The loop over a thread's elements.

    def load(
        self, parts: Iterable[nodes.Elementwise], size: nodes.Expr, gradient: Gradient
    ) -> None:
        """Loads what the eight elements from `first` on read in order, and draws their noise.

        `size`: of the loop; `gradient`: where that is read.
        """
        self.size, parts = size, tuple(parts)
        draws: list[nodes.Random] = []
        for part in parts:
            self.position = part.position
            for expr in walk(part):
                if isinstance(expr, nodes.Random) and self.is_here(expr.position):
                    draws.append(expr)
                elif isinstance(expr, nodes.Index) and isinstance(expr.array, nodes.Ref):
                    self._load_read(self.vectors[expr.array.var], expr.index, gradient)
        self.lines.add(
            *(f"const float {self.names.of(var)} = {text};" for var, text in self.given.items())
        )
        # Behind the loads, which take as long.
        for draw in draws:
            self._draw(draw)
        for part in parts:
            self._gather(part)

    def _gather(self, part: nodes.Elementwise) -> None:
        """Loads what a part reads elsewhere, at places that it computes: all eight at once.

        In the loop that needs them nvcc would wait for those of an element before it asks for those
        of the next.
        """
        known = {let.var for let in part.lets}
        for root in (*(let.value for let in part.lets), part.value):
            for expr in walk(root):
                match expr:
                    case nodes.Index(array=nodes.Ref(var=array), index=nodes.Ref(var=place)):
                        pass
                    case _:
                        continue
                kind = self.c.type(element(array.type))
                is_far = self.vectors[array].form in ("gradient", "state", "kept")
                if place not in known or not is_far or (array, place) in self.gathered:
                    continue
                need, lets = {place}, list[nodes.Let]()
                for let in reversed(part.lets):
                    if let.var in need:
                        lets.insert(0, let)
                        need |= free_vars(let.value)
                name = self.names.fresh(f"{array.name}_there")
                self.lines.add(f"{kind} {name}[8];", "TF_HIPS_UNROLL")
                self.lines.open("for (int u = 0; u < kEach; ++u) {")
                made = replace(part, lets=tuple(lets), value=expr)
                statements, text = self.element(made, element(array.type), "first + u")
                self.lines.add(*statements, f"{name}[u] = {text};")
                self.lines.close()
                self.gathered[array, place] = name

    def _is_loaded(self, vector: Vector) -> bool:
        """Whether a thread loads its own eight elements, at which a loop reads a vector."""
        if vector.form == "kept":
            return bool(vector.room)
        if vector.form == "picked":
            return False
        if vector.form == "tile":
            return True
        # Behind its end are zeros, which eight that are loaded have there, too.
        return vector.size == self.size or vector.form in ("gradient", "field")

    def _draw(self, expr: nodes.Random) -> None:
        if expr.site in self.drawn:
            return
        name = self.drawn[expr.site] = self.names.fresh("noise")
        keys = f"key, call.philox[{expr.site}]"
        if expr.bits == 16:
            self.lines.add(f"const NoiseOfEight {name} = noise8<is_full>({keys}, first);")
        else:
            self.lines.add(f"uint32_t {name}[8];", f"wide_noise8<is_full>({keys}, first, {name});")
        self.side.sites = max(self.side.sites, expr.site + 1)

    def _load_read(self, vector: Vector, index: nodes.Expr, gradient: Gradient) -> None:
        var, lines = vector.var, self.lines
        block = block_of(index, self.position, self.side.program.blocks)
        kind = self.c.type(element(var.type))
        if block is not None and (var, block) not in self.hoisted:
            # Eight neighbours are in one block.
            name = self.hoisted[var, block] = self.names.fresh(f"{var.name}_here")
            number = f"block_number(first, {self.c(block)})"
            lines.add(
                f"const {kind} {name} = static_cast<{kind}>({self.anywhere(vector, number)});"
            )
        turned = turned_by(index, self.position)
        if turned is not None and self._is_loaded(vector) and var not in self.tiles:
            name = self.tiles[var] = self.names.fresh(f"{var.name}_tile")
            if vector.form == "tile":
                lines.add(f"const float (&{name})[kEach] = {vector.pointer}.eight_of(t);")
                return
            lines.add(f"{kind} {name}[8];")
            if vector.form == "gradient":
                lines.add(f"{gradient.load}, first, n, {name});")
                if gradient.after:
                    lines.add(gradient.after.format(tile=name))
                self.wide += gradient.wide
            elif vector.form == "kept":
                full = "is_full" if vector.size == self.size else "false"
                lines.add(
                    f"load_kept8<{full}>({vector.pointer}, first, {vector.count}, {vector.room}, "
                    f"{name});"
                )
            elif vector.form == "state":
                lines.add(f"load8<is_full>({vector.pointer}, first, n, {name});")
                self.wide.append(vector.pointer)
            else:
                bits = vector.bits or "32"
                by = "" if bits.isdecimal() else "_by"
                full = "is_full" if vector.size == self.size else "false"
                lines.add(
                    f"unpack8{by}<{full}>({vector.pointer}, first, {vector.count}, {bits}, {name});"
                )

    def is_whole(self, part: nodes.Elementwise, kind: Type) -> bool:
        """Whether what a part computes is a code that `whole_bits` can make of a float."""
        value = _converted(part.value, kind)
        return (
            isinstance(value, nodes.Convert)
            and value.operand.type == FLOAT
            and is_whole_code(part, value, self._ranges)
        )

    def element(
        self, part: nodes.Elementwise, kind: Type, number: str, *, is_whole: bool = False
    ) -> tuple[list[str], str]:
        """Statements for one element, and C++ for its value as `kind`.

        Args:
            part: what it is.
            kind: its type.
            number: C++ for the element's.
            is_whole: C++ is for the float that its code is made of.
        """
        self.position = part.position
        value = _converted(part.value, kind)
        lines = [f"[[maybe_unused]] const int64_t {self.names.of(part.position)} = {number};"]
        if number == "first + u":
            part, value, made = self._numbered(part, value)
            lines += made
        self.c.narrow = self._narrow
        self._own = {part.position, *(let.var for let in part.lets)}
        try:
            lines += self._let_lines(part.lets)
            if is_whole and isinstance(value, nodes.Convert):
                return lines, self.c(value.operand)
            return lines, self._value(part, value)
        finally:
            self.c.narrow = self._own = None

    def lets(self, lets: Iterable[nodes.Let]) -> list[str]:
        """Statements for what is the same for all elements of a block."""
        self.c.narrow = self._narrow
        try:
            return self._let_lines(lets)
        finally:
            self.c.narrow = None

    def learn(self, lets: Iterable[nodes.Let]) -> None:
        """Notes what floats can be that are given."""
        for let in lets:
            self._floats.learn(let)

    def _let_lines(self, lets: Iterable[nodes.Let]) -> list[str]:
        # Of what is loaded already the place is not needed.
        lines, unused = [], _MAYBE if self.gathered else ""
        for let in lets:
            lines.append(unused + self.c.let(let))
            self._floats.learn(let)
        return lines

    def _numbered(
        self, part: nodes.Elementwise, value: nodes.Expr
    ) -> tuple[nodes.Elementwise, nodes.Expr, list[str]]:
        """A part that has the numbers of its blocks, where it computes them, from the thread's.

        Eight neighbours are in one block, so no element divides, and what depends on the number
        alone is computed once for eight.
        """
        made: dict[nodes.Expr, nodes.Var] = {}

        def change(expr: nodes.Expr) -> nodes.Expr:
            if isinstance(expr, nodes.Index):
                return expr
            block = block_of(expr, part.position, self.side.program.blocks)
            if block is None:
                return changed(expr, change)
            var = made.setdefault(block, nodes.Var("block_number", INT, expr.span))
            return nodes.Ref(INT, expr.span, var)

        lets = tuple(replace(let, value=change(let.value)) for let in part.lets)
        value = change(value)
        part = replace(part, lets=lets)
        lines = [
            f"const int64_t {self.names.of(var)} = block_number(first, {self.c(block)});"
            for block, var in made.items()
        ]
        return part, value, lines

    def _is_bit(self, expr: nodes.Expr) -> bool:
        found = self._ranges(expr) if expr.type == INT else None
        return found is not None and found.is_within(0, 1)

    def _value(self, part: nodes.Elementwise, value: nodes.Expr) -> str:
        """C++ for what a part computes; of a code that no float can be too large for, plainly."""
        match value:
            case nodes.Select(
                condition=nodes.Convert(operand=bit),
                yes=nodes.Unary(op="-", operand=turned),
                no=same,
            ) if value.type == FLOAT and turned == same and self._is_bit(bit):
                sign = self._narrow(bit)
                if sign is not None:
                    return f"sign_turned({self.c(same)}, {sign.text})"
                return self.c(value)
            case nodes.Convert(type=UInt() as kind, operand=operand) if (
                operand.type == FLOAT and never_above_top(part, value, self._ranges)
            ):
                return f"static_cast<{self.c.type(kind)}>(whole_part({self.c(operand)}))"
            case _:
                return self.c(value)


def _converted(value: nodes.Expr, kind: Type) -> nodes.Expr:
    return value if value.type == kind else nodes.Convert(kind, value.span, value)
