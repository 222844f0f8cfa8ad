# SPDX-License-Identifier: Apache-2.0
"""The hot functions of a C++ codec: loops over the elements of a gradient.

encode_fields   a sweep is a loop over tiles (loops.py)
in_place_fields encode_fields whose new state is where the old one is
feedback_fields encode_fields with error feedback (feedback.py)
reserve         finds the memory that feedback_fields needs
decode_fields   elements from `begin` to `end`
decode_rows     a decode that adds ROWS bodies at a time, and decode_most_rows MOST_ROWS (rows.py)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from compll.backends.block_loops import BlockLoops
from compll.backends.blocks import decode_groups, encode_groups, is_shared
from compll.backends.blocks import roots as roots_of
from compll.backends.c_common import Lines, Names
from compll.backends.feedback import (
    Fusion,
    has_elements,
    has_feedback,
    has_ranges,
    returns_status,
)
from compll.backends.in_place import is_in_place
from compll.backends.kept import KeptVectors, decode_fails
from compll.backends.layout import unpack_params
from compll.backends.loops import Stored
from compll.backends.masks import Masks, masks
from compll.backends.rooms import rooms
from compll.backends.row_code import RowCode
from compll.backends.row_function import Apart
from compll.backends.rows import NAMES, emit_rows
from compll.backends.tile_feedback import NO_FEEDBACK, HeldRows, TileFeedback
from compll.ir import nodes
from compll.ir.types import FLOAT, INT, Array, Type, UInt
from compll.ir.walk import free_vars, walk

_ENCODE_PARAMETERS = (
    "const Params& params",
    "const TfHipsKey& key",
    "const float* gradient",
    "const float* residual",
    "float* value",
    "int64_t n",
    "const Layout& layout",
    "uint8_t* __restrict__ body",
)


# Of a codec with state, besides: its vectors as they are and as they will be.
_STATE_PARAMETERS = ("const float* const* state", "float* const* new_state")
_DECODE_PARAMETERS = (
    "const Params& params",
    "const uint8_t* __restrict__ body",
    "const Layout& layout",
    "float* __restrict__ out",
    "int64_t n",
    "int32_t mode",
    "int64_t begin",
    "int64_t end",
)
_RESERVE_PARAMETERS = ("const Params& params", "int64_t n")
_ROWS_PARAMETERS = (
    "const Params& params",
    "const uint8_t* const* rows",
    "const Layout& layout",
    "float* __restrict__ out",
    "int64_t n",
    "bool is_first",
    "int64_t begin",
    "int64_t end",
    "float* late",
)


def _parameters(head: str, parameters: tuple[str, ...]) -> list[str]:
    """The head of a function, one parameter a line; a specification need not use all of them."""
    indent = " " * 4
    lines = [f"{indent}[[maybe_unused]] {text}," for text in parameters]
    lines[-1] = lines[-1][:-1] + ") {"
    return [head, *lines]


def emit(plan: nodes.Plan, lines: Lines, *, rows: tuple[int, ...]) -> None:
    """Adds the hot functions of a plan; `Params` and `Layout` are there.

    `rows`: how many bodies at a time are decoded, too.
    """
    _Emitter(plan, lines, rows=rows).run()


@dataclass(frozen=True)
class Head:
    """What callers know of a hot function."""

    name: str
    result: str
    parameters: tuple[str, ...]

    def open(self, lines: Lines, *, prefix: str = "TF_HIPS_HOT") -> None:
        """Begins its definition."""
        head = _parameters(f"{prefix} {self.result} {self.name}(", self.parameters)
        lines.add(*head[:-1])
        lines.open(head[-1])

    @property
    def arguments(self) -> str:
        """Its parameters, as another function that has them passes them on."""
        return ", ".join(text.split()[-1].lstrip("*&") for text in self.parameters)


def heads(plan: nodes.Plan, *, rows: tuple[int, ...]) -> list[Head]:
    """Of the functions that a plan has."""
    program = plan.program
    found: list[Head] = []
    if program.decode is not None:
        result = _result(decode_fails(plan))
        found.append(Head("decode_fields", result, _DECODE_PARAMETERS))
        found += [Head(NAMES[count], "void", _ROWS_PARAMETERS) for count in rows]
    if program.encode is not None:
        result = _result(returns_status(plan))
        names = ["encode_fields"]
        names += ["in_place_fields"] if is_in_place(plan) else []
        names += ["feedback_fields"] if has_feedback(plan) else []
        found += [Head(name, result, _encode_parameters(program)) for name in names]
        if has_feedback(plan) and rooms(plan):
            found.append(Head("reserve", "bool", _RESERVE_PARAMETERS))
    return found


def _encode_parameters(program: nodes.Program) -> tuple[str, ...]:
    return (*_ENCODE_PARAMETERS, *(_STATE_PARAMETERS if program.state_names else ()))


@dataclass
class _Function:
    """What is needed to emit one C++ function."""

    program: nodes.Program
    lines: Lines
    names: Names = field(default_factory=Names)
    stored: dict[nodes.Var, Stored] = field(default_factory=dict)
    widths: dict[UInt, str] = field(default_factory=dict)
    apart: Apart | None = None

    def __post_init__(self) -> None:
        self.loops = BlockLoops(
            self.lines, self.names, self.program.params, self.stored, self.widths
        )
        self.loops.apart = self.apart
        self.loops.blocks = self.program.blocks
        self.c = self.loops.c
        self.kept = KeptVectors(self.loops)

    def unpack_params(self, used: set[nodes.Var]) -> None:
        """Begins a function: makes the parameters that are used local variables."""
        self.loops.begin()
        unpack_params(self.program, used, self.c, self.lines)


def _roots(steps: tuple[nodes.Step, ...]) -> list[nodes.Expr]:
    """The expressions that the steps of a function compute."""
    return [root for step in steps for root in roots_of(step)]


def _result(can_fail: bool) -> str:
    """The type that a hot function returns: a status where it can fail."""
    return "int32_t" if can_fail else "void"


def _vars(exprs: Iterable[nodes.Expr]) -> set[nodes.Var]:
    return set().union(*map(free_vars, exprs))


class _Emitter:
    def __init__(self, plan: nodes.Plan, lines: Lines, *, rows: tuple[int, ...]) -> None:
        self._rows = rows
        self._plan = plan
        self._program = plan.program
        self._lines = lines
        self._heads = {head.name: head for head in heads(plan, rows=rows)}

    def run(self) -> None:
        program = self._program
        if program.decode is not None:
            self._decode(program.decode)
            for count in self._rows:
                self._decode_rows(program.decode, count)
        if program.encode is not None:
            self._encode(program.encode)

    def _bits(self, kind: Type, function: _Function) -> str:
        return function.loops.bits(kind) if isinstance(kind, UInt) else "32"

    def _make_widths(self, kinds: list[UInt], function: _Function) -> None:
        """Declares widths that depend on parameters; make_layout has checked them."""
        for kind in kinds:
            if not isinstance(kind.bits, nodes.Expr) or kind in function.widths:
                continue
            name = function.names.fresh("width")
            function.widths[kind] = name
            function.lines.add(f"const Width {name}({function.c(kind.bits)});")

    # Encode.

    def _encode(self, encode: nodes.Encode) -> None:
        lines = self._lines
        function = _Function(self._program, lines, apart=Apart(lines.later(), "rows_of_encode"))
        size = nodes.Size(
            INT, encode.span, nodes.Ref(encode.gradient.type, encode.span, encode.gradient)
        )
        function.c.sizes[encode.gradient] = "n"
        stored = Stored(encode.gradient, size, "n", "in", is_field=False, bits=None)
        function.stored[encode.gradient] = stored
        scalars = [
            (k, value)
            for k, value in enumerate(encode.fields)
            if not isinstance(value, nodes.Elementwise)
        ]
        roots = [*_roots(self._plan.encode), *(value for _, value in scalars)]
        fusion = Fusion.of(self._plan)
        lines.add("// With feedback `in` is the sum of gradient and residual.")
        in_place = ", bool kInPlace" if self._program.state_names else ""
        lines.add(f"template <bool kFeedback{in_place}>")
        whole = self._heads["encode_fields"]
        replace(whole, name="encode_tiles").open(lines, prefix="TF_HIPS_INLINE")
        kinds = self._widths_in(roots)
        function.unpack_params(
            _vars([*roots, *(kind.bits for kind in kinds if isinstance(kind.bits, nodes.Expr))])
        )
        self._make_widths(kinds, function)
        targets = {k: f"body + layout.offset[{k}]" for k in range(len(encode.fields))}
        masked = masks(self._plan)
        targets |= self._unpack_state(encode, size, roots, function, masked)
        if has_feedback(self._plan):
            lines.add(*fusion.begin_lines())
        lines.add("[[maybe_unused]] const float* in = kFeedback ? value : gradient;")
        if masked is not None:
            self._masked_steps(masked, function, targets)
        number = 0
        for group in encode_groups(self._plan) if masked is None else []:
            steps = range(number, number + len(group))
            number += len(group)
            held = None
            if fusion.last in steps:
                self._store_scalars(scalars, function)
                held = self._held(function, _vars(roots))
            feedback = fusion.of_steps(steps, encode.gradient, held)
            self._steps(group, function, targets, feedback=feedback)
        if fusion.last is None:
            self._store_scalars(scalars, function)
        if masked is not None:
            function.kept.mask(masked)
        if has_feedback(self._plan):
            lines.add(*fusion.end_lines(decode_fails=decode_fails(self._plan)))
        if returns_status(self._plan):
            lines.add("return TF_HIPS_OK;")
        lines.close()
        lines.add("")
        self._wrap("encode_fields", feedback=False)
        if is_in_place(self._plan):
            self._wrap("in_place_fields", feedback=False, in_place=True)
        if has_feedback(self._plan):
            self._wrap("feedback_fields", feedback=True)
            self._reserve()

    def _masked_steps(self, masked: Masks, function: _Function, targets: dict[int, str]) -> None:
        """The loops of an encoder whose top_k writes the states."""
        self._lines.add("bool all_finite = true;")
        for step in masked.steps:
            if isinstance(step, nodes.Store) and step.var is masked.kept:
                function.kept.store(step, masks=masked)
            else:
                self._steps((step,), function, targets)

    def _unpack_state(
        self,
        encode: nodes.Encode,
        size: nodes.Expr,
        roots: list[nodes.Expr],
        function: _Function,
        masked: Masks | None,
    ) -> dict[int, str]:
        """Makes the states local variables; returns where the new ones go, by number of value."""
        targets = {}
        read = _vars(roots)
        for number, update in enumerate(encode.updates):
            var = update.state
            function.c.sizes[var] = "n"
            old = function.names.of(var)
            new = function.names.fresh(f"new_{var.name}")
            self._lines.add(f"float* __restrict__ {new} = new_state[{number}];")
            if var in read:
                self._lines.add(f"const float* {old} = kInPlace ? {new} : state[{number}];")
            function.stored[var] = Stored(var, size, "n", old, is_field=False, bits=None)
            if masked is not None:
                written = masked.written[number]
                function.c.sizes[written] = "n"
                function.stored[written] = Stored(
                    written, size, "n", new, is_field=False, bits=None
                )
            targets[len(encode.fields) + number] = new
            function.loops.floats.add(new)
            function.loops.overwritten.add(old)
        return targets

    def _wrap(self, name: str, *, feedback: bool, in_place: bool = False) -> None:
        """A hot function, which has clones, around encode_tiles, which is part of each."""
        self._heads[name].open(self._lines)
        flags = "true" if feedback else "false"
        if self._program.state_names:
            flags += ", true" if in_place else ", false"
        self._lines.add(
            f"return encode_tiles<{flags}>(params, key, gradient, residual, value, n, layout, body"
            f"{', state, new_state' if self._program.state_names else ''});"
        )
        self._lines.close()
        self._lines.add("")

    def _reserve(self) -> None:
        """Finds the memory of an encoder with feedback, and of its decoder, before it begins."""
        found = rooms(self._plan)
        if not found:
            return
        lines = self._lines
        lines.add("// Finds all memory that feedback_fields needs; false when there is none.")
        self._heads["reserve"].open(lines, prefix="[[maybe_unused]]")
        function = _Function(self._program, lines)
        for side in (self._program.encode, self._program.decode):
            if side is not None:
                function.c.sizes[side.gradient] = "n"
        function.unpack_params(_vars([room.count for room in found]))
        for room in found:
            count = f"std::max<int64_t>({function.c(room.count)}, 0)"
            text = f"scratch<{room.slot}, {room.kind}>({count}) == nullptr"
            if room.kind is None:
                text = f"!TopK<{room.slot}>::reserve({count})"
            lines.add(f"if ({text}) return false;")
        lines.add("return true;")
        lines.close()
        lines.add("")

    def _store_scalars(self, scalars: list[tuple[int, nodes.Expr]], function: _Function) -> None:
        for number, value in scalars:
            target = f"body + layout.offset[{number}]"
            text = f"store_float({function.c(value)}, {target});"
            if value.type != FLOAT:
                bits = self._bits(value.type, function)
                text = f"store_code({function.c(value)}, {bits}, {target});"
            self._lines.add(text)

    def _widths_in(self, roots: list[nodes.Expr]) -> list[UInt]:
        kinds = [expr.type for root in roots for expr in walk(root)]
        kinds += [kind.element for kind in kinds if isinstance(kind, Array)]
        return list(dict.fromkeys(kind for kind in kinds if isinstance(kind, UInt)))

    def _steps(
        self,
        steps: tuple[nodes.Step, ...],
        function: _Function,
        targets: dict[int, str],
        *,
        begin: str = "0",
        end: str = "n",
        feedback: TileFeedback = NO_FEEDBACK,
    ) -> None:
        if is_shared(steps):
            stores = [step for step in steps if isinstance(step, nodes.Store)]
            sweeps = [step for step in steps if isinstance(step, nodes.Sweep)]
            ranged = None if begin == "0" else end
            function.loops.blocks_sweep(stores, sweeps, targets, feedback, begin=begin, end=ranged)
            return
        for step in steps:
            if isinstance(step, nodes.Let):
                function.lines.add(function.c.let(step))
                continue
            if isinstance(step, nodes.Store):
                function.kept.store(step, is_first=bool(feedback.first))
                continue
            scatter = step.writes[0].value if step.writes else None
            if isinstance(scatter, nodes.Scatter):
                function.kept.decode(scatter)
                continue
            count = end if begin != "0" else function.loops.number(step.size, "size")
            function.loops.sweep(step, count, targets, begin=begin, feedback=feedback)

    def _held(self, encoder: _Function, declared: set[nodes.Var]) -> HeldRows | None:
        """What decodes codes in registers in the function of an encoder; None: nothing can.

        `declared`: parameters that are local variables of that function.
        """
        decode, sweep, last = self._program.decode, self._plan.decode[-1], self._plan.encode[-1]
        if decode is None or not isinstance(sweep, nodes.Sweep):
            return None
        if not isinstance(last, nodes.Sweep) or not has_elements(self._plan):
            return None
        roots = _roots(self._plan.decode)
        is_random = any(isinstance(e, nodes.Random) for root in roots for e in walk(root))
        if is_random or len(last.writes) != 1:
            return None
        codes = decode.fields[last.writes[0].field].var
        lines = self._lines.later()

        def rows(arguments: dict[str, tuple[str, str]]) -> RowCode | None:
            inside = lines.same_depth()
            decoder = _Function(
                self._program, inside, encoder.names.fork(), widths=dict(encoder.widths)
            )
            decoder.c.sizes[decode.gradient] = "n"
            element = codes.type.element if isinstance(codes.type, Array) else codes.type
            kinds = [kind for kind in self._widths_in(roots) if kind != element]
            unpack_params(self._program, _vars(roots) - declared, decoder.c, inside)
            self._make_widths(kinds, decoder)
            self._read_fields(decode, decoder, skipped=codes)
            for step in self._plan.decode[:-1]:
                self._steps((step,), decoder, {})
            found = decoder.loops.row_of_held(sweep, codes, arguments)
            if found is not None:
                lines.include(inside)
            return found

        return rows

    # Decode.

    def _open_decode(self, decode: nodes.Decode, head: Head, is_part: str) -> _Function:
        """Opens a function that decodes, with what does not depend on the body.

        `is_part`: C++ for whether others of a merge's packets are read behind each range.
        """
        lines = self._lines
        function = _Function(self._program, lines, apart=Apart(lines.later(), "rows_of_decode"))
        function.c.sizes[decode.gradient] = "n"
        head.open(lines)
        lines.add(f"[[maybe_unused]] const bool is_part = {is_part};")
        roots = _roots(self._plan.decode)
        read = [nodes.Ref(var.type, var.span, var) for var in _vars(roots)]
        kinds = self._widths_in([*roots, *read])
        if any(isinstance(expr, nodes.Random) for root in roots for expr in walk(root)):
            lines.add("const TfHipsKey key = {0, 0, 0, 0};")
        function.unpack_params(
            _vars([*roots, *(kind.bits for kind in kinds if isinstance(kind.bits, nodes.Expr))])
        )
        self._make_widths(kinds, function)
        return function

    def _read_fields(
        self,
        decode: nodes.Decode,
        function: _Function,
        body: str = "body",
        skipped: nodes.Var | None = None,
    ) -> None:
        """Declares the fields of a body that decoding needs, but for one."""
        read = _vars(_roots(self._plan.decode)) - {skipped}
        for number, item in enumerate(decode.fields):
            if item.var in read:
                self._read_field(number, item, function, body)

    def _decode(self, decode: nodes.Decode) -> None:
        lines = self._lines
        function = self._open_decode(
            decode, self._heads["decode_fields"], "end - begin < n && mode != TF_HIPS_RESIDUAL"
        )
        self._read_fields(decode, function)
        for group in decode_groups(self._plan):
            last = group[-1]
            is_last = isinstance(last, nodes.Sweep) and bool(last.writes)
            if is_last and has_ranges(self._plan):
                self._steps(group, function, {0: "out"}, begin="begin", end="end")
            else:
                self._steps(group, function, {0: "out"})
        if decode_fails(self._plan):
            lines.add("return TF_HIPS_OK;")
        lines.close()
        lines.add("")

    def _decode_rows(self, decode: nodes.Decode, count: int) -> None:
        """A decode that adds `count` bodies at a time."""
        lines = self._lines
        apart = Apart(lines.later(), f"rows_of_{NAMES[count]}")
        function = self._open_decode(decode, self._heads[NAMES[count]], "true")
        rows: list[BlockLoops] = []
        for number in range(count):
            row = _Function(self._program, lines, function.names.fork(), widths=function.widths)
            row.c.sizes[decode.gradient] = "n"
            row.loops.begin()
            body = row.names.fresh("row_body")
            lines.add(f"[[maybe_unused]] const uint8_t* const {body} = rows[{number}];")
            self._read_fields(decode, row, body)
            for step in self._plan.decode[:-1]:
                self._steps((step,), row, {})
            rows.append(row.loops)
        last = self._plan.decode[-1]
        if not isinstance(last, nodes.Sweep):
            raise TypeError(f"a decode by ranges must end with its sweep. Received: {last!r}")
        emit_rows(lines, rows, last, apart)
        lines.close()
        lines.add("")

    def _read_field(
        self, number: int, item: nodes.Field, function: _Function, body: str = "body"
    ) -> None:
        var, at = item.var, f"{body} + layout.offset[{number}]"
        element = var.type.element if isinstance(var.type, Array) else var.type
        bits = self._bits(element, function) if isinstance(element, UInt) else None
        if item.size is not None:
            pointer = function.names.of(var)
            function.lines.add(f"const uint8_t* {pointer} = {at};")
            stored = Stored(
                var, item.size, f"layout.count[{number}]", pointer, is_field=True, bits=bits
            )
            function.stored[var] = stored
            return
        text = f"load_float({at})"
        kind = function.c.type(element)
        if bits is not None:
            text = f"static_cast<{kind}>(load_code({at}, {bits}))"
        function.lines.add(f"const {kind} {function.names.of(var)} = {text};")
