# SPDX-License-Identifier: Apache-2.0
"""Loops over floats in rows of 16 elements, where that is what they are made of.

Compilers turn loops over a tile into vector code, but not always into good code: NaN and signed
zeros keep them from the machine's own minima and from its saturating conversions, and values of
blocks must be spread first. So a loop that computes floats from floats alone, to give codes of up
to 8 bits or to reduce blocks, is also written as a function of its own with the operations of
tf_hips/cc/runtime/row.h. It is called where the machine has registers for rows; the loop that it
stands for remains, defines what it does, and does the rest.
"""

import contextlib
import functools
from dataclasses import dataclass, field, replace
from typing import Protocol

from compll.backends.c_common import Expressions, float_literal
from compll.backends.row_forms import (
    clamp_of,
    finite_size_of,
    is_code,
)
from compll.backends.row_function import Apart, blocks_in_chains, emit_function
from compll.backends.stored import unnamed
from compll.ir import nodes
from compll.ir.float_ranges import is_number_or_0, is_unit, never_above_top
from compll.ir.ranges import Ranges
from compll.ir.types import BOOL, FLOAT, INT, UInt
from compll.ir.walk import length_with, walk

_COMPARISONS = {"<": "less", "<=": "at_most", ">": "more", ">=": "at_least", "==": "equal"}
_COMPARISONS |= {"!=": "unequal"}
FOLDS = {"max": "row_maximum({a}, x)", "min": "row_minimum({a}, x)"}
FOLDS |= {"sum": "{a} + x", "prod": "{a} * x"}
_SUMMED = ("gradient", "residual")
_BIT = UInt(1)
# Parts of an expression that is still put in place where its name is used.
_LONG = 12


class _NoRowsError(Exception):
    """A part needs more than there is for rows."""


@dataclass(frozen=True)
class Packed:
    """Codes in memory.

    Attributes:
        name: C++ for a pointer to those of a tile, which `text` says where they are.
        bits: C++ for their width; it may depend on parameters.
        count: C++ for their number, where that need not be the loop's; None: it is.
        mirror: groups of one element more are read the other way round; 0: in order.
    """

    name: str
    text: str
    bits: str
    count: str | None = None
    mirror: int = 0

    @property
    def width(self) -> str:
        """C++ for their width, which compilers know: the argument of a template, if need be."""
        return self.bits if self.bits.isdigit() else "kBits"

    @property
    def declaration(self) -> str:
        """The pointer, where codes are in memory."""
        return f"const uint8_t* const {self.name} = {self.text};"


class Sources(Protocol):
    """How the loop that a function stands for reads its element; None for what it does not know."""

    def row_in_memory(self, expr: nodes.Index) -> str | None:
        """C++ for where the floats of a tile begin."""

    def row_of_blocks(self, expr: nodes.Expr) -> tuple[str, str] | None:
        """C++ for where the values of the blocks of a tile begin, and for the size of these."""

    def row_of_codes(self, expr: nodes.Index) -> str | None:
        """C++ for the codes of a tile, a byte each."""

    def row_of_bits(self, expr: nodes.Index) -> str | None:
        """C++ for the codes of a tile, a bit each, as they are in memory."""

    def row_of_packed(self, expr: nodes.Index) -> Packed | None:
        """Codes as they are in memory, of a width that rows can take from there."""

    def row_of_field(self, expr: nodes.Index) -> tuple[str, str] | None:
        """C++ for a field with a float for each block, and for the size of these."""

    def row_noise(self, expr: nodes.Random) -> str | None:
        """C++ for where the noise of a tile begins."""


@dataclass
class RowCode:
    """The body of one such function.

    Attributes:
        c: prints what is the same for all elements.
        sources: where elements come from.
        part: what is computed for each.
        hoisted: lets of it that are computed once for each block.
        tag: what the names of parameters begin with.
        letter: what the names of lets begin with.
        uses_bits: codes of a bit are taken from memory as they are, for decisions alone.
        uses_packed: codes are taken from memory as they are, where that can be.
        uses_bytes: codes are taken from a tile of bytes; found by `prepare_value`.
        packed: codes that are taken from memory; found by `prepare_value`.
        begin: C++ for the element, of those that blocks are counted from, that a tile begins with.
        sums: the vector whose rows are in a register named `sum`; None: there is none.
        held: codes that are in a register named `held`, not in memory; None: there are none.
        looked_up: codes for which `held` has all that there can be, wherever they are read.
        arguments: what callers give for each parameter, whose name and type follow.
        setup: what is computed once, before the loop over rows.
        body: computes x, a row of a decode; made by `prepare_value`.
    """

    c: Expressions
    sources: Sources
    part: nodes.Elementwise
    hoisted: frozenset[nodes.Var] = frozenset()
    tag: str = "p"
    letter: str = "v"
    uses_bits: bool = False
    uses_packed: bool = False
    uses_bytes: bool = False
    begin: str = "base"
    sums: nodes.Var | None = None
    held: nodes.Var | None = None
    looked_up: nodes.Var | None = None
    setup: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    arguments: dict[str, tuple[str, str]] = field(default_factory=dict)
    _lets: dict[nodes.Var, str] = field(default_factory=dict, init=False)
    uses_blocks: bool = False
    packed: list[Packed] = field(default_factory=list)

    def codes(self, apart: Apart, top: str, rest: "Rest | None" = None) -> str | None:
        """Writes the function that makes codes; returns the call of it, but for the target.

        `top`: C++ for the largest code; `rest`: what is done about feedback.
        """
        value = unnamed(self.part, self.part.value)
        if not isinstance(value, nodes.Convert) or value.operand.type not in (FLOAT, INT):
            return None
        # Numbers that may be above the largest code are held to it.
        is_held = value.operand.type == FLOAT and not never_above_top(
            self.part, value, self._ranges
        )
        try:
            body = rest.before(self) if rest is not None else []
            body += self._declared()
            body.append(f"code[k] = {self._code_of(value, ', top' if is_held else '')};")
            body += rest.after(self) if rest is not None else []
        except _NoRowsError:
            return None
        lines = ["if (count % 64 != 0) return false;"]
        if is_held:
            lines.append(f"const Row top = row_of({self.argument('float', top)});")
        lines += [
            "for (int64_t j = 0; j < count; j += 64) {",
            "  RowCodes code[4];",
            "  for (int64_t k = 0; k < 4; ++k) {",
            *(f"    {line}" for line in ["const int64_t at = j + 16 * k;", *body]),
            "  }",
            "  store_codes(code, to + j);",
            "}",
            "return true;",
        ]
        return emit_function([self], apart, lines, "uint8_t* to")

    def prepare_value(self) -> bool:
        """Finds how a row of values is computed; False: there is no way."""
        value = unnamed(self.part, self.part.value)
        try:
            self.body = [*self._declared(), f"const Row x = {self._row(value)};"]
        except _NoRowsError:
            return False
        return True

    def prepare_flags(self) -> bool:
        """Finds how a row of codes of a bit is decided; False: there is no way."""
        value = unnamed(self.part, self.part.value)
        if not isinstance(value, nodes.Convert) or value.operand.type != BOOL:
            return False
        if not isinstance(value.type, UInt) or value.type.bits != 1:
            return False
        try:
            self.body = [*self._declared(), f"const RowFlags x = {self._flags(value.operand)};"]
        except _NoRowsError:
            return False
        return True

    def prepare_chosen(self) -> bool:
        """Finds how it is decided for a row which elements are kept; False: there is no way."""
        value = unnamed(self.part, self.part.value)
        while isinstance(value, nodes.Convert) and value.operand.type in (BOOL, _BIT):
            value = unnamed(self.part, value.operand)
        if any(isinstance(e, nodes.Random) for e in walk(self.part)):
            return False
        # Without the names that stood between.
        self.part = replace(self.part, value=value)
        try:
            self.body = [*self._declared(), f"const RowFlags x = {self._flags(value)};"]
        except _NoRowsError:
            return False
        return not (self.uses_bytes or self.uses_blocks or self.packed)

    def values(self, apart: Apart) -> str:
        """Writes the function that decodes; returns the call of it, but for mode and target."""
        lines = ["if (count % 16 != 0) return false;", *self.setup]
        for condition, reads, store in (
            ("if (mode == TF_HIPS_ADD) {", True, "row_store(to + at, row_at(to + at) + x);"),
            (
                "} else if (mode == TF_HIPS_RESIDUAL) {",
                True,
                "row_store(to + at, row_left(to + at, x));",
            ),
            ("} else if (mode == TF_HIPS_STREAM) {", False, "row_stream(to + at, x);"),
            ("} else {", False, "row_store(to + at, x);"),
        ):
            loop = ["for (int64_t at = 0; at < count; at += 16) {"]
            # Asked for row by row: many lines at once would keep others from being written.
            body = [*["prefetch_tile(to + at, 16);"] * reads, *self.body, store]
            loop += [f"  {line}" for line in body]
            lines += [condition, *(f"  {line}" for line in [*loop, "}"])]
        return emit_function(
            [self], apart, [*lines, "}", "return true;"], "int32_t mode, float* to"
        )

    def blocks(self, apart: Apart, reducer: str, rest: "Rest | None" = None) -> str | None:
        """Writes the function that reduces blocks; returns the call of it, but for the target.

        `rest`: what is done about feedback.
        """
        value = unnamed(self.part, self.part.value)
        if value.type != FLOAT or reducer not in FOLDS:
            return None
        size = finite_size_of(self.part) if reducer == "max" else None
        fold, first, result = FOLDS[reducer].format(a="a"), "x", "a"
        try:
            body = rest.before(self) if rest is not None else []
            body += self._declared()
            row = self._row(value) if size is None else f"row_finite({self._row(size.operand)})"
            body.append(f"const Row x = {row};")
        except _NoRowsError:
            return None
        if size is not None:
            # The largest of what is held to a cap is the largest, held to it.
            fold, first = "row_largest(a, x)", "row_abs(x)"
            result = "a" if size.cap is None else f"row_minimum(a, {self._row(size.cap)})"
        combined = f"*to++ = combine_row<{reducer.capitalize()}>(init, {result});"
        lines = ["if (count % length != 0) return false;"]
        if size is not None:
            lines += blocks_in_chains(body, first, fold, combined)
        lines += [
            "for (int64_t begin = 0; begin < count; begin += length) {",
            "  const int64_t at = begin;",
            *(f"  {line}" for line in body),
            f"  Row a = {first};",
            "  for (int64_t at = begin + 16; at < begin + length; at += 16) {",
            *(f"    {line}" for line in body),
            f"    a = {fold};",
            "  }",
            f"  {combined}",
            "}",
            "return true;",
        ]
        return emit_function([self], apart, lines, "int64_t length, float init, float* to")

    def _declared(self) -> list[str]:
        """What is computed before the value, where it is needed."""
        lines = []
        for let in self.part.lets:
            is_row = let.var.type in (FLOAT, BOOL) or isinstance(let.var.type, UInt)
            is_row = is_row or let.var in self._long
            if not is_row or let.var in self.hoisted or not self._is_used(let.var):
                continue
            name = f"{self.letter}{len(self._lets)}"
            if let.var.type == INT:
                with contextlib.suppress(_NoRowsError):  # who needs it may have another way
                    lines.append(f"const RowCodes {name} = {self._integers(let.value)};")
                    self._lets[let.var] = name
                continue
            if isinstance(let.var.type, UInt) and self.uses_bits:
                lines.append(f"const RowFlags {name} = {self._bits(let.value)};")
            elif isinstance(let.var.type, UInt):
                lines.append(f"const RowCodes {name} = {self._codes(let.value)};")
            elif let.var.type == FLOAT:
                lines.append(f"const Row {name} = {self._row(let.value)};")
            else:
                lines.append(f"const RowFlags {name} = {self._flags(let.value)};")
            self._lets[let.var] = name
        return lines

    @functools.cached_property
    def _values(self) -> dict[nodes.Var, nodes.Expr]:
        """What names stand for."""
        return {let.var: let.value for let in self.part.lets}

    @functools.cached_property
    def _long(self) -> set[nodes.Var]:
        """Integers that are computed once, because what they stand for is long.

        The others are put where they are used, and some have a form there. A chain of `if` that
        each add to a number names the number before twice, so putting it in place doubles it.
        """
        lengths: dict[nodes.Var, int] = {}
        found = set()
        for var, value in self._values.items():
            length = length_with(lengths, value)
            if var.type != INT:
                length = 1
            elif length > _LONG:
                found.add(var)
                length = 1
            lengths[var] = length
        return found

    def _is_used(self, var: nodes.Var) -> bool:
        roots = [self.part.value, *(let.value for let in self.part.lets)]
        return any(isinstance(e, nodes.Ref) and e.var is var for root in roots for e in walk(root))

    def argument(self, kind: str, text: str) -> str:
        """The name of a parameter, for which callers give `text`."""
        if text not in self.arguments:
            self.arguments[text] = (f"{self.tag}{len(self.arguments)}", kind)
        return self.arguments[text][0]

    def _is_same_for_all(self, expr: nodes.Expr) -> bool:
        own = {self.part.position, *(let.var for let in self.part.lets)}
        return not any(
            isinstance(e, nodes.Index | nodes.Random | nodes.Elementwise)
            or (isinstance(e, nodes.Ref) and e.var in own)
            for e in walk(expr)
        )

    def _row(self, expr: nodes.Expr) -> str:
        if expr.type != FLOAT:
            raise _NoRowsError
        if isinstance(expr, nodes.Const):
            return f"row_of({float_literal(float(expr.value))})"
        if self._is_same_for_all(expr):
            return f"row_of({self.argument('float', self.c(expr))})"
        match expr:
            case nodes.Ref() if expr.var in self._lets:
                return self._lets[expr.var]
            case nodes.Ref() | nodes.Index():
                return self._read(expr)
            case nodes.Unary(op="-"):
                return f"(-{self._row(expr.operand)})"
            case nodes.Binary(op="+", right=nodes.Random() as noise) if is_unit(noise):
                return f"row_plus_noise({self._row(expr.left)}, {self._noise(noise)})"
            case nodes.Binary() if expr.op in "+-*/":
                return f"({self._row(expr.left)} {expr.op} {self._row(expr.right)})"
            case nodes.Select() if is_number_or_0(expr):
                return f"row_number({self._row(expr.yes)})"
            case nodes.Select():
                parts = self._flags(expr.condition), self._row(expr.yes), self._row(expr.no)
                return f"row_select({', '.join(parts)})"
            case nodes.Math() if expr.function == "abs":
                return f"row_abs({self._row(expr.arguments[0])})"
            case nodes.Math() if (clamp := clamp_of(self.part, expr, self._ranges)) is not None:
                return f"row_clamped({self._row(clamp.operand)}, {self._row(clamp.bound)})"
            case nodes.Math() if expr.function in ("min", "max"):
                first, second = map(self._row, expr.arguments)
                return f"row_{expr.function}imum({first}, {second})"
            case nodes.Convert() if isinstance(expr.operand.type, UInt):
                return f"row_of_codes({self._codes(expr.operand)})"
            case nodes.Random() if is_unit(expr):
                return f"row_noise({self._noise(expr)})"
        raise _NoRowsError

    def _noise(self, expr: nodes.Random) -> str:
        begin = self.sources.row_noise(expr)
        if begin is None:
            raise _NoRowsError
        return f"{self.argument('const uint16_t*', begin)} + at"

    def _read(self, expr: nodes.Ref | nodes.Index) -> str:
        blocks = self.sources.row_of_blocks(expr)
        if blocks is not None:
            self.uses_blocks = True
            values = self.argument("const float*", blocks[0])
            return f"row_of({values}[{self._block(blocks[1])}])"
        if not isinstance(expr, nodes.Index):
            raise _NoRowsError
        blocks = self.sources.row_of_field(expr)
        if blocks is not None:
            self.uses_blocks = True
            values = self.argument("const uint8_t*", blocks[0])
            return f"row_of(load_float({values} + 4 * {self._block(blocks[1])}))"
        if self._is_of(expr, self.sums):
            return "sum"
        begin = self.sources.row_in_memory(expr)
        if begin is None:
            raise _NoRowsError
        return f"row_at({self.argument('const float*', begin)} + at)"

    def _block(self, length: str) -> str:
        """The number of a row's block."""
        first = self.argument("int64_t", self.begin)
        return f"first_block({first} + at, {self.argument('int64_t', length)})"

    def _is_of(self, expr: nodes.Expr, array: nodes.Var | None) -> bool:
        """Whether an expression is the part's own element of a vector."""
        if not isinstance(expr, nodes.Index) or not isinstance(expr.array, nodes.Ref):
            return False
        is_here = isinstance(expr.index, nodes.Ref) and expr.index.var is self.part.position
        return expr.array.var is array and is_here

    def _bits(self, expr: nodes.Expr) -> str:
        if isinstance(expr, nodes.Ref) and expr.var in self._lets:
            return self._lets[expr.var]
        begin = self.sources.row_of_bits(expr) if isinstance(expr, nodes.Index) else None
        if begin is None:
            raise _NoRowsError
        return f"row_bits({self.argument('const uint8_t*', begin)} + at / 8)"

    def _codes(self, expr: nodes.Expr) -> str:
        if self.uses_bits:
            raise _NoRowsError
        if isinstance(expr, nodes.Ref) and expr.var in self._lets:
            return self._lets[expr.var]
        if self._is_of(expr, self.held):
            return "held"
        if not isinstance(expr, nodes.Index):
            raise _NoRowsError
        if isinstance(expr.array, nodes.Ref) and expr.array.var is self.looked_up:
            return "held"
        if self.uses_packed:
            return self._packed_codes(expr)
        self.uses_bytes = True
        begin = self.sources.row_of_codes(expr)
        if begin is None:
            raise _NoRowsError
        return f"row_bytes({self.argument('const uint8_t*', begin)} + at)"

    def _packed_codes(self, expr: nodes.Index) -> str:
        found = self.sources.row_of_packed(expr)
        if found is None or any(
            other.width == found.width == "kBits" and other.bits != found.bits
            for other in self.packed
        ):
            raise _NoRowsError
        if found not in self.packed:
            self.packed.append(found)
        codes = self.argument("const uint8_t*", found.name)
        row = f"row_packed<{found.width}>({codes}, at)"
        return f"row_mirrored<{found.mirror}>({row})" if found.mirror else row

    @property
    def varied_bits(self) -> str | None:
        """C++ for the width of codes that depends on parameters; None: there are no such."""
        return next((codes.bits for codes in self.packed if codes.width == "kBits"), None)

    @property
    def _ranges(self) -> Ranges:
        if self.c.ranges is None:
            raise TypeError(f"rows need a printer that learns ranges. Received: {self.c!r}")
        return self.c.ranges

    def _code_of(self, value: nodes.Convert, held: str) -> str:
        if value.operand.type == FLOAT:
            return f"row_codes({self._row(value.operand)}{held})"
        if not isinstance(value.type, UInt) or not isinstance(value.type.bits, int):
            raise _NoRowsError
        low = (1 << value.type.bits) - 1
        return f"row_low_bits({self._integers(value.operand)}, row_of_number({low}))"

    def _integers(self, expr: nodes.Expr) -> str:
        """Numbers of which only the low bits are wanted, so that 32 bits are enough for all."""
        while isinstance(expr, nodes.Ref) and expr.var in self._values:
            if expr.type == INT and expr.var in self._lets:
                return self._lets[expr.var]
            expr = self._values[expr.var]
        match expr:
            case nodes.Const() if expr.type == INT and abs(int(expr.value)) < 2**31:
                return f"row_of_number({int(expr.value)})"
            case nodes.Convert() if isinstance(expr.operand.type, UInt):
                return self._codes(expr.operand)
            case nodes.Convert() if expr.operand.type == BOOL:
                return f"row_of_flags({self._flags(expr.operand)})"
            case nodes.Binary() if expr.op in "+-":
                function = {"+": "row_sum", "-": "row_difference"}[expr.op]
                return f"{function}({self._integers(expr.left)}, {self._integers(expr.right)})"
            case nodes.Select():
                sides = f"{self._integers(expr.yes)}, {self._integers(expr.no)}"
                return f"row_number_select({self._flags(expr.condition)}, {sides})"
        raise _NoRowsError

    def _flags(self, expr: nodes.Expr) -> str:
        match expr:
            case nodes.Convert() if isinstance(expr.operand.type, UInt) and self.uses_bits:
                return self._bits(expr.operand)
            case nodes.Convert() if isinstance(expr.operand.type, UInt):
                return f"row_is_set({self._codes(expr.operand)})"
            case nodes.Ref() if expr.var in self._lets and expr.type == BOOL:
                return self._lets[expr.var]
            case nodes.Binary() if expr.op in _COMPARISONS and expr.left.type == FLOAT:
                sides = f"{self._row(expr.left)}, {self._row(expr.right)}"
                return f"row_is_{_COMPARISONS[expr.op]}({sides})"
            case nodes.Binary() if expr.op in _COMPARISONS and is_code(expr.left):
                if not isinstance(expr.right, nodes.Const):
                    raise _NoRowsError
                sides = f"{self._integers(expr.left)}, {self._integers(expr.right)}"
                return f"row_number_is_{_COMPARISONS[expr.op]}({sides})"
            case nodes.Binary() if expr.op in ("&&", "||"):
                function = "row_both" if expr.op == "&&" else "row_either"
                return f"{function}({self._flags(expr.left)}, {self._flags(expr.right)})"
        raise _NoRowsError


@dataclass(frozen=True)
class Rest:
    """What a function of rows does beside, in an encoder with feedback (feedback.py).

    Attributes:
        is_first: the function forms the sum, which `RowCode.sums` names; else it is in memory.
        left: decodes codes that are held, so that what they miss is left; None: that comes later.
    """

    is_first: bool
    left: RowCode | None = None

    def before(self, code: RowCode) -> list[str]:
        """What is done before a row is computed."""
        value = code.argument("float*", "value + base")
        if not self.is_first:
            return [f"const Row sum = row_at({value} + at);"]
        parts = [code.argument("const float*", f"{name} + base") for name in _SUMMED]
        lines = [f"const Row sum = row_at({parts[0]} + at) + row_at({parts[1]} + at);"]
        return lines if self.left is not None else [*lines, f"row_store({value} + at, sum);"]

    def after(self, code: RowCode) -> list[str]:
        """What is done when the codes of a row are there."""
        if self.left is None:
            return []
        value = code.argument("float*", "value + base")
        lines = ["const RowCodes held = row_held(code[k]);", *self.left.body]
        lines += [f"row_store({value} + at, row_left(sum, x));"]
        return ["{", *(f"  {line}" for line in lines), "}"]
