# SPDX-License-Identifier: Apache-2.0
"""IR to text, for people, for goldens and for the hash that packets carry.

The hash covers what decides the bytes of a packet: functions, types, names of functions and
variables; it does not cover defaults and ranges of parameters, which only limit what may be asked
for.
"""

from compll.ir import nodes
from compll.ir.types import Bool, Float
from compll.ir.walk import children


def print_program(program: nodes.Program) -> str:
    """The whole program, interface first."""
    lines = [f"codec {program.name}"]
    for param in program.params:
        default = "" if param.default is None else f" = {param.default:.9g}"
        lines.append(
            f"param {param.var.name}: {param.var.type} "
            f"in [{param.low:.9g}, {param.high:.9g}]{default}"
        )
    return "\n".join(lines) + "\n" + print_functions(program)


def print_functions(program: nodes.Program) -> str:
    """Both functions: the text that is hashed."""
    lines: list[str] = []
    printer = _Printer()
    params = ", ".join(f"{param.var.name}: {param.var.type}" for param in program.params)
    for param in program.params:
        printer.name(param.var)
    if program.encode is not None:
        encode = program.encode
        lines.append(f"{encode.name}({printer.name(encode.gradient)}: float*; {params})")
        lines += [f"  state {printer.name(update.state)}: float*" for update in encode.updates]
        lines += printer.lets(encode.lets, 1)
        for update in encode.updates:
            lines.append(f"  update {printer.name(update.state)} = {printer.expr(update.value)}")
        lines.append(f"  concat({', '.join(printer.expr(item) for item in encode.fields)})")
    if program.decode is not None:
        decode = program.decode
        lines.append(f"{decode.name}({printer.name(decode.gradient)}: float*; {params})")
        for item in decode.fields:
            size = "" if item.size is None else f"[{printer.expr(item.size)}]"
            equals = "" if item.equals is None else f" == {printer.name(item.equals)}"
            lines.append(f"  field {printer.name(item.var)}: {item.var.type}{size}{equals}")
        lines += printer.lets(decode.lets, 1)
        lines.append(f"  result {printer.expr(decode.result)}")
    return "\n".join(lines) + "\n"


def print_plan(plan: nodes.Plan) -> str:
    """The loops that back ends emit, function by function."""
    lines: list[str] = []
    for title, steps in (("encode", plan.encode), ("decode", plan.decode)):
        printer = _Printer()
        lines.append(title)
        for step in steps:
            if isinstance(step, nodes.Let):
                lines += printer.lets((step,), 1)
                continue
            if isinstance(step, nodes.Store):
                name, value = printer.name(step.var), printer.expr(step.value)
                lines.append(f"  store {name}: {step.var.type} = {value}")
                continue
            lines.append(f"  sweep {printer.expr(step.size)}")
            for var, reduce in step.reduces:
                lines.append(f"    {printer.name(var)} = {printer.expr(reduce)}")
            for write in step.writes:
                lines.append(f"    write {write.field}: {printer.expr(write.value)}")
    if plan.body:
        lines.append("body")
    for number, item in enumerate(plan.body):
        size = "" if item.size is None else f"[{print_expr(item.size)}]"
        lines.append(f"  field {number}: {item.name}: {item.element}{size}")
    if plan.specialised is not None:
        param = plan.specialised.param.var.name
        for number, known in plan.specialised.plans.items():
            lines.append(f"where {param} is {number}")
            lines += [f"  {line}" for line in print_plan(known).splitlines()]
    return "\n".join(lines) + "\n"


def print_expr(expr: nodes.Expr) -> str:
    """One expression on one line."""
    return _Printer().expr(expr)


def spec_hash(program: nodes.Program) -> int:
    """FNV-1a-32 of the printed functions."""
    return fnv1a32(print_functions(program).encode("ascii"))


def fnv1a32(data: bytes, value: int = 0x811C9DC5) -> int:
    """FNV-1a of `data`, going on from `value`."""
    for byte in data:
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


class _Printer:
    """Gives every variable its own name: the second `x` is printed as `x.2`."""

    def __init__(self) -> None:
        self._names: dict[nodes.Var, str] = {}
        self._used: dict[str, int] = {}

    def name(self, var: nodes.Var) -> str:
        if var not in self._names:
            count = self._used[var.name] = self._used.get(var.name, 0) + 1
            self._names[var] = var.name if count == 1 else f"{var.name}.{count}"
        return self._names[var]

    def lets(self, lets: tuple[nodes.Let, ...], depth: int) -> list[str]:
        lines = []
        for let in lets:
            value = self.expr(let.value)
            lines.append(f"{'  ' * depth}let {self.name(let.var)}: {let.var.type} = {value}")
        return lines

    def _block(self, head: str, lets: tuple[nodes.Let, ...], value: nodes.Expr) -> str:
        inner = [line.strip() for line in self.lets(lets, 0)]
        return f"{head} {{ {'; '.join([*inner, self.expr(value)])} }}"

    def _lambda(self, function: nodes.Lambda) -> str:
        params = ", ".join(f"{self.name(var)}: {var.type}" for var in function.params)
        return self._block(f"({params})", function.lets, function.result)

    def expr(self, expr: nodes.Expr) -> str:
        match expr:
            case nodes.Const(type=Bool()):
                return "true" if expr.value else "false"
            case nodes.Const(type=Float()):
                return f"{expr.value:.9g}f"
            case nodes.Const():
                return str(expr.value)
            case nodes.Ref():
                return self.name(expr.var)
            case nodes.Size():
                return f"{self.expr(expr.array)}.size"
            case nodes.Unary():
                return f"{expr.op}{self.expr(expr.operand)}"
            case nodes.Binary():
                return f"({self.expr(expr.left)} {expr.op} {self.expr(expr.right)})"
            case nodes.Select():
                return (
                    f"({self.expr(expr.condition)} ? {self.expr(expr.yes)} : {self.expr(expr.no)})"
                )
            case nodes.Convert():
                return f"{expr.type}({self.expr(expr.operand)})"
            case nodes.Bitcast():
                return f"bitcast<{expr.type}>({self.expr(expr.operand)})"
            case nodes.KeyPart():
                return expr.name
            case nodes.Math():
                return f"{expr.function}({', '.join(map(self.expr, expr.arguments))})"
            case nodes.Index():
                return f"{self.expr(expr.array)}[{self.expr(expr.index)}]"
            case nodes.Random():
                parts = (self.expr(expr.low), self.expr(expr.high), self.expr(expr.position))
                wide = "" if expr.bits == 16 else f":{expr.bits}"
                return f"random<{expr.type}>#{expr.site}{wide}({', '.join(parts)})"
            case nodes.Range():
                return f"range({self.expr(expr.count)})"
            case nodes.Map():
                source = self.expr(expr.source)
                return f"map[{self.name(expr.position)}]({source}, {self._lambda(expr.function)})"
            case nodes.Reduce():
                return f"reduce {expr.reducer}({self.expr(expr.init)}, {self.expr(expr.source)})"
            case nodes.Sample():
                return f"sample#{expr.site}({self.expr(expr.source)}, {self.expr(expr.count)})"
            case nodes.BlockReduce():
                parts = (self.expr(expr.init), self.expr(expr.source), self.expr(expr.block))
                return f"block_reduce {expr.reducer}({', '.join(parts)})"
            case nodes.Hadamard():
                return f"hadamard({self.expr(expr.source)}, {self.expr(expr.block)})"
            case nodes.Filter() | nodes.TopK() | nodes.Scatter():
                name = {nodes.Filter: "filter", nodes.TopK: "top_k"}.get(type(expr), "scatter")
                return f"{name}({', '.join(map(self.expr, children(expr)))})"
            case nodes.Sort():
                order = "greater" if expr.is_descending else "less"
                return f"sort({self.expr(expr.source)}, {order})"
            case nodes.Apply():
                return f"{self._lambda(expr.function)}({', '.join(map(self.expr, expr.arguments))})"
            case nodes.Elementwise():
                head = f"each {self.name(expr.position)} < {self.expr(expr.size)}"
                return self._block(head, expr.lets, expr.value)
            case _:
                raise TypeError(f"`expr` must be an IR expression. Received: {expr!r}")
