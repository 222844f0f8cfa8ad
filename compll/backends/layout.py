# SPDX-License-Identifier: Apache-2.0
"""What every C-like back end says of a codec before its loops: parameters, and where fields lie.

read_params   values of the parameters, checked
make_layout   where each field of a body begins, from parameters and n alone
"""

from collections.abc import Iterable

from compll.backends.c_common import Expressions, Lines, Names, double_literal, param_names
from compll.ir import nodes
from compll.ir.types import FLOAT, MAX_PACKED_BITS, Type, UInt
from compll.ir.walk import free_vars


def unpack_params(
    program: nodes.Program, used: set[nodes.Var], c: Expressions, lines: Lines
) -> None:
    """Makes those parameters of a program that are used local variables of a function.

    `c`: the function's expressions, whose names they get.
    """
    fields = param_names(program)
    for param in program.params:
        if param.var in used:
            name = c.names.of(param.var)
            lines.add(f"const {c.type(param.var.type)} {name} = params.{fields[param.var]};")


class LengthExpressions:
    """Names and expressions of one function that reads no vectors: lengths, widths."""

    def __init__(self, program: nodes.Program, lines: Lines) -> None:
        """No names yet; `lines`: what the function is made of."""
        self.program = program
        self.lines = lines
        self.names = Names()
        self.widths: dict[UInt, str] = {}
        self.c = Expressions(self.names, self, program.params)
        self.fields = param_names(program)

    # Access (c_common.py): sizes, widths and blocks are made of numbers and parameters.

    def index(self, array: nodes.Var, index: nodes.Expr, c: Expressions) -> str:
        """Refused."""
        raise TypeError(f"a length must not read vectors. Received: {array.name}")

    def noise(self, expr: nodes.Random, c: Expressions) -> str:
        """Refused."""
        raise TypeError(f"a length must not draw noise. Received: {expr!r}")

    def width(self, kind: UInt) -> str:
        """Name of the Width of a type."""
        return self.widths[kind]

    def unpack_params(self, used: set[nodes.Var]) -> None:
        """Makes the parameters that are used local variables."""
        unpack_params(self.program, used, self.c, self.lines)

    def check_widths(self, kinds: list[UInt]) -> None:
        """Declares widths that depend on parameters, after they have been checked."""
        for kind in kinds:
            if not isinstance(kind.bits, nodes.Expr) or kind in self.widths:
                continue
            name, bits = self.names.fresh("width"), self.names.fresh("bits")
            self.lines.add(
                f"const int64_t {bits} = {self.c(kind.bits)};",
                f"if ({bits} < 1 || {bits} > {MAX_PACKED_BITS}) return TF_HIPS_BAD_PARAMETER;",
                f"const Width {name}({bits});",
            )
            self.widths[kind] = name

    def bound(self, var: nodes.Var, size: nodes.Expr) -> None:
        """Declares the most elements that a vector can have."""
        name = self.names.fresh(f"{var.name}_most")
        self.lines.add(f"const int64_t {name} = {self.c(size)};")
        self.c.sizes[var] = name

    def bits(self, kind: Type) -> str:
        """C++ for the bits of an element in a packet."""
        if not isinstance(kind, UInt):
            return "32"
        return str(kind.bits) if isinstance(kind.bits, int) else f"{self.widths[kind]}.bits"


def _vars(exprs: Iterable[nodes.Expr]) -> set[nodes.Var]:
    return set().union(*map(free_vars, exprs))


def emit_params(program: nodes.Program, lines: Lines) -> None:
    """Adds kParams, struct Params and read_params."""
    params = program.params
    if params:
        lines.open("const TfHipsParam kParams[] = {")
        for param in params:
            default = "std::numeric_limits<double>::quiet_NaN()"
            if param.default is not None:
                default = double_literal(param.default)
            is_integer = int(param.var.type != FLOAT)
            limits = f"{double_literal(param.low)}, {double_literal(param.high)}"
            lines.add(f'{{"{param.var.name}", {is_integer}, {default}, {limits}}},')
        lines.close("};")
        lines.add("")
    head = LengthExpressions(program, lines)
    lines.open("struct Params {")
    for param in params:
        lines.add(f"{head.c.type(param.var.type)} {head.fields[param.var]};")
    lines.close("};")
    lines.add("")
    values, target = ("values", "params") if params else ("", "")
    lines.open(f"int32_t read_params(const double* {values}, Params* {target}) {{")
    for number, param in enumerate(params):
        lines.add(
            f"if (!is_allowed(kParams[{number}], values[{number}])) return TF_HIPS_BAD_PARAMETER;"
        )
        kind, field = head.c.type(param.var.type), head.fields[param.var]
        lines.add(f"params->{field} = static_cast<{kind}>(values[{number}]);")
    lines.add("return TF_HIPS_OK;")
    lines.close()
    lines.add("")


def emit_layout(plan: nodes.Plan, lines: Lines) -> None:
    """Adds kFields, struct Layout and make_layout, which checks all widths and blocks."""
    program, fields = plan.program, plan.body
    lines.add(f"constexpr int kFields = {len(fields)};", "")
    lines.add("// Bytes and elements of each field of a body.")
    lines.open("struct Layout {")
    lines.add("int64_t offset[kFields];", "int64_t count[kFields];", "int64_t bytes;")
    lines.close("};")
    lines.add("")
    head = LengthExpressions(program, lines)
    functions = (program.encode, program.decode)
    head.c.sizes = {function.gradient: "n" for function in functions if function is not None}
    everything = [item.size for item in fields if item.size is not None]
    everything += program.blocks
    kinds = _widths(plan)
    used = _vars([*everything, *(kind.bits for kind in kinds if isinstance(kind.bits, nodes.Expr))])
    name = "params" if used & {param.var for param in program.params} else ""
    lines.open(f"int32_t make_layout(const Params& {name}, int64_t n, Layout* layout) {{")
    lines.add("if (n < 0 || n > kMaxElements) return TF_HIPS_BAD_PARAMETER;")
    head.unpack_params(used)
    head.check_widths(kinds)
    for block in program.blocks:
        lines.add(f"if (!is_block({head.c(block)})) return TF_HIPS_BAD_PARAMETER;")
    lines.add("layout->bytes = 0;")
    for number, item in enumerate(fields):
        count = "1" if item.size is None else head.c(item.size)
        lines.add(
            f"// {item.name}: {item.type}",
            f"if (!add_field({count}, {head.bits(item.element)}, {number}, layout)) "
            "return TF_HIPS_BAD_PARAMETER;",
        )
    lines.add("return TF_HIPS_OK;")
    lines.close()
    lines.add("")


def _widths(plan: nodes.Plan) -> list[UInt]:
    """Every width that depends on parameters, fields' first; make_layout checks them all."""
    kinds = [*(item.element for item in plan.body), *plan.program.widths]
    return list(
        dict.fromkeys(
            kind for kind in kinds if isinstance(kind, UInt) and isinstance(kind.bits, nodes.Expr)
        )
    )
