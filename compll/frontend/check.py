# SPDX-License-Identifier: Apache-2.0
"""The tree to a typed program: the bodies of both functions, and the fields of the packet.

    void XEncode(float* gradient, uint8* packet, scalars...)
                 ends with   packet = concat(...)
    void XDecode(uint8* packet, float* gradient, scalars...)
                 holds       extract(packet, ...)   and   gradient = vector

Decode extracts fields of the types that Encode concatenates, in that order; their lengths are those
of Encode, and a field that it extracts into a parameter is that parameter in Encode, too. What
expressions and statements mean is in lower.py and statements.py, what a codec shows outside in
interface.py.
"""

from compll.errors import Report
from compll.frontend import ast
from compll.frontend.interface import Interface, read_interface
from compll.frontend.limits import check_limits
from compll.frontend.lower import MAX_FLOAT, Frame
from compll.frontend.pairing import parameter_of
from compll.frontend.scope import POISONED, Refused, Scope, Variable, each, unknown
from compll.frontend.statements import new_statements
from compll.ir import nodes
from compll.ir.sizes import DataDependentError, SizeError, capacity_of, size_of
from compll.ir.types import BOOL, FLOAT, INT, Array, Type, UInt
from compll.source import Span


def check(tree: ast.File, name: str, report: Report) -> nodes.Program | None:
    """The program that a tree describes; findings go to `report`, and None means one or more."""
    interface = read_interface(tree, report)
    if interface is None:
        return None
    encode = decode = None
    widths: dict[UInt, None] = {}
    blocks: dict[nodes.Expr, None] = {}
    if interface.encode is not None:
        encoder = _Encoder(interface.encode, interface, report)
        encode = encoder.run()
        widths |= encoder.lower.widths
        blocks |= encoder.lower.blocks
    if interface.decode is not None:
        decoder = _Decoder(interface.decode, interface, report, encode)
        decode = decoder.run()
        widths |= decoder.lower.widths
        blocks |= decoder.lower.blocks
    check_limits(interface, widths, blocks, report)
    params = tuple(interface.params)
    return nodes.Program(
        name, interface.prefix, params, encode, decode, tuple(widths), tuple(blocks)
    )


class _Body:
    """A function while it is lowered: its scope, and the lowerer of its statements."""

    def __init__(
        self, tree: ast.Function, interface: Interface, report: Report, gradient_at: int
    ) -> None:
        self.tree = tree
        self.interface = interface
        self.report = report
        self.params = frozenset(param.var for param in interface.params)
        self.statements = new_statements(report, self.params)
        self.lower = self.statements.lowerer
        self.frame = Frame(Scope(), [])
        names = self.frame.scope.names
        for param in interface.params:
            var = param.var
            names[var.name] = Variable(
                var.type, "parameter", var.span, nodes.Ref(var.type, var.span, var)
            )
        gradient, packet = tree.parameters[gradient_at], tree.parameters[1 - gradient_at]
        self.gradient = gradient.name
        self.packet = packet.name
        whole = nodes.Ref(Array(FLOAT), gradient.span, interface.gradient)
        if gradient_at == 0:
            names[gradient.name] = Variable(Array(FLOAT), "parameter", gradient.span, whole)
        else:
            names[gradient.name] = Variable(Array(FLOAT), "output", gradient.span, None, whole)
        names[packet.name] = Variable(Array(UInt(8)), "packet", packet.span, None)
        for state in interface.states:
            value = nodes.Ref(state.type, state.span, state) if gradient_at == 0 else None
            names[state.name] = Variable(state.type, "state", state.span, value)
            self.lower.sizes[state] = nodes.Size(INT, state.span, whole)

    def capacity(self, vector: nodes.Expr) -> nodes.Expr:
        """The largest length that a vector can have, over parameters and the gradient's size."""
        try:
            return capacity_of(vector, self.lower.lets, self.params, self.lower.sizes)
        except SizeError as error:
            raise self.lower.refuse_size(error) from error

    def refuse_formless(self, kind: Type, argument: ast.Expr) -> None:
        """Refuses a field that is neither float nor uint: its width should be written down."""
        element = kind.element if isinstance(kind, Array) else kind
        span = argument.span
        if element in (INT, BOOL):
            help_line = "help: give it a type with a width, such as `uint32 x = ...;`"
            found = None
            if isinstance(argument, ast.Name):
                found = self.frame.scope.find(argument.name)
            if isinstance(found, Variable) and found.kind == "parameter":
                help_line = "help: declare the parameter as `uint32`, wherever it is declared"
            raise self.lower.refuse(
                "E510", f"a value of type `{kind}` has no form in a packet", span, help_line
            )


class _Encoder(_Body):
    def __init__(self, tree: ast.Function, interface: Interface, report: Report) -> None:
        super().__init__(tree, interface, report, gradient_at=0)
        self.lower.has_key = True
        self.updates: dict[nodes.Var, nodes.Expr | None] = {}

    def run(self) -> nodes.Encode | None:
        fields: tuple[nodes.Expr, ...] | None = None
        has_concat = False
        for number, statement in enumerate(self.tree.body):
            is_concat = isinstance(statement, ast.Assign) and statement.name == self.packet
            has_concat = has_concat or is_concat
            try:
                if isinstance(statement, ast.Assign) and is_concat:
                    if number != len(self.tree.body) - 1:
                        message = f"`{self.packet}` must be assigned once, by the last statement"
                        raise self.lower.refuse("E504", message, statement.span)
                    fields = self._concat(statement)
                elif isinstance(statement, ast.Assign) and (state := self._state(statement)):
                    self._update(state, statement)
                else:
                    self.statements.run(statement, self.frame)
            except Refused:
                self.statements.poison(statement, self.frame)
        if not has_concat:
            message = f"`{self.tree.name}` does not end with `{self.packet} = concat(...)`"
            self.report.add("E504", message, self.tree.end)
        for state in self.interface.states:
            if state not in self.updates and state.name not in self.statements.misplaced:
                help_line = f"help: `{state.name} = map(...);`"
                message = f"`{self.tree.name}` does not assign the state `{state.name}`"
                self.report.add("E606", message, state.span, help_line)
        updates = tuple(
            nodes.Update(state, value)
            for state in self.interface.states
            if (value := self.updates.get(state)) is not None
        )
        if fields is None or len(updates) < len(self.interface.states):
            return None
        lets = tuple(self.frame.lets)
        try:
            sizes = tuple(
                self.capacity(value) if isinstance(value.type, Array) else None for value in fields
            )
        except Refused:
            return None
        return nodes.Encode(
            self.tree.name, self.interface.gradient, lets, fields, sizes, self.tree.span, updates
        )

    def _state(self, statement: ast.Assign) -> nodes.Var | None:
        """The state that a statement at the top assigns."""
        states = self.interface.states
        return next((state for state in states if state.name == statement.name), None)

    def _update(self, state: nodes.Var, statement: ast.Assign) -> None:
        if state in self.updates:
            message = f"the state `{state.name}` is assigned twice"
            raise self.lower.refuse("E606", message, statement.span)
        self.updates[state] = None
        value = self.statements.value_for(state.type, statement.value, self.frame)
        gradient = self.interface.gradient
        whole = nodes.Size(INT, value.span, nodes.Ref(gradient.type, value.span, gradient))
        try:
            size = size_of(value, self.lower.lets, self.params, self.lower.sizes)
        except DataDependentError:
            size = None
        except SizeError as error:
            raise self.lower.refuse_size(error) from error
        if size != whole:
            message = f"this vector does not have `{gradient.name}.size` elements"
            raise self.lower.refuse("E608", message, value.span)
        kept = self.lower.bind(self.frame, state.name, _finite(value), statement.span)
        self.updates[state] = kept
        names = self.frame.scope.names
        names[state.name] = Variable(state.type, "state", state.span, kept)

    def _concat(self, statement: ast.Assign) -> tuple[nodes.Expr, ...]:
        call = statement.value
        if not isinstance(call, ast.Call) or call.name != "concat":
            help_line = f"help: `{self.packet} = concat(a, b, ...);`"
            raise self.lower.refuse(
                "E504", f"`{self.packet}` can only be made by `concat`", call.span, help_line
            )
        if not call.arguments:
            help_line = f"help: `{self.packet} = concat(a, b, ...);`"
            message = "`concat` takes at least one argument"
            raise self.lower.refuse("E303", message, call.span, help_line)
        return tuple(each(call.arguments, self._field))

    def _field(self, argument: ast.Expr) -> nodes.Expr:
        value = self.lower.expr(argument, self.frame)
        self.refuse_formless(value.type, argument)
        return value


def _finite(vector: nodes.Expr) -> nodes.Expr:
    """A vector of Float with 0 for what is not finite: a state must not keep a NaN for ever."""
    span = vector.span
    x = nodes.Var("x", FLOAT, span)
    value = nodes.Ref(FLOAT, span, x)
    size = nodes.Math(FLOAT, span, "abs", (value,))
    is_finite = nodes.Binary(BOOL, span, "<=", size, nodes.Const(FLOAT, span, MAX_FLOAT))
    kept = nodes.Select(FLOAT, span, is_finite, value, nodes.Const(FLOAT, span, 0.0))
    function = nodes.Lambda((x,), (), kept, span)
    return nodes.Map(Array(FLOAT), span, nodes.Var("i", INT, span), function, vector)


class _Decoder(_Body):
    def __init__(
        self, tree: ast.Function, interface: Interface, report: Report, encode: nodes.Encode | None
    ) -> None:
        super().__init__(tree, interface, report, gradient_at=1)
        self.encode = encode
        self.lower.is_decode = True
        self.fields: tuple[nodes.Field, ...] | None = None
        self.result: nodes.Expr | None = None

    def run(self) -> nodes.Decode | None:
        is_refused = False
        for number, statement in enumerate(self.tree.body):
            call = statement.value if isinstance(statement, ast.Evaluate) else None
            try:
                if isinstance(call, ast.Call) and call.name == "extract":
                    self._extract(call)
                elif isinstance(statement, ast.Assign) and statement.name == self.gradient:
                    if number != len(self.tree.body) - 1 or self.result is not None:
                        message = f"`{self.gradient}` must be assigned once, by the last statement"
                        raise self.lower.refuse("E505", message, statement.span)
                    self._assign(statement)
                else:
                    self.statements.run(statement, self.frame)
            except Refused:
                is_refused = True
                self.statements.poison(statement, self.frame)
                for argument in call.arguments[1:] if isinstance(call, ast.Call) else ():
                    found = self.frame.scope.find(getattr(argument, "name", ""))
                    if isinstance(found, Variable) and found.kind == "local":
                        self.frame.scope.names[getattr(argument, "name", "")] = POISONED
        if is_refused:
            return None
        if self.fields is None or self.result is None:
            what = (
                f"`extract` from `{self.packet}`"
                if self.fields is None
                else f"assign `{self.gradient}`"
            )
            self.report.add("E505", f"`{self.tree.name}` does not {what}", self.tree.end)
            return None
        lets = tuple(self.frame.lets)
        gradient = self.interface.gradient
        return nodes.Decode(
            self.tree.name, gradient, self.fields, lets, self.result, self.tree.span
        )

    def _whole(self, span: Span) -> nodes.Expr:
        gradient = self.interface.gradient
        return nodes.Size(INT, span, nodes.Ref(gradient.type, span, gradient))

    def _extract(self, call: ast.Call) -> None:
        if self.fields is not None:
            raise self.lower.refuse("E505", "only one `extract` reads the packet", call.span)
        first = call.arguments[0] if call.arguments else None
        if len(call.arguments) < 2 or not isinstance(first, ast.Name) or first.name != self.packet:
            raise self.lower.refuse(
                "E303",
                f"the form is `extract({self.packet}, a, b, ...)`",
                call.span,
                "help: name the packet first, and then variables that have no value yet",
            )
        targets = each(call.arguments[1:], self._target)
        whole = [var for var, _ in targets if var.name == self.gradient]
        if len(whole) > 1:
            message = f"`{self.gradient}` must be assigned once"
            raise self.lower.refuse("E505", message, whole[1].span)
        sizes = self._sizes([var.type for var, _ in targets], call.span)
        self._check_equal(targets)
        fields = []
        for (var, equals), size in zip(targets, sizes, strict=True):
            fields.append(nodes.Field(var, size, equals))
            if size is not None:
                self.lower.sizes[var] = size
            if var.name == self.gradient:
                self._finish(nodes.Ref(var.type, var.span, var))
        self.fields = tuple(fields)

    def _target(self, argument: ast.Expr) -> tuple[nodes.Var, nodes.Var | None]:
        """The variable that a field goes to, and the parameter that it must equal."""
        if not isinstance(argument, ast.Name):
            raise self.lower.refuse("E206", "`extract` takes the names of variables", argument.span)
        found = self.frame.scope.find(argument.name)
        if found is POISONED:
            raise Refused
        if not isinstance(found, Variable):
            help_lines = unknown(argument.name, self.frame.scope.all_names(), "float*", "")
            raise self.lower.refuse(
                "E201", f"unknown name `{argument.name}`", argument.span, *help_lines
            )
        if found.kind == "state":
            raise self.lower.refuse_state(argument.name, argument.span)
        if found.kind == "packet" or (found.kind == "local" and found.value is not None):
            message = f"`{argument.name}` cannot be extracted: it is a value already"
            raise self.lower.refuse("E206", message, argument.span)
        self.refuse_formless(found.type, argument)
        var = nodes.Var(argument.name, found.type, argument.span)
        if found.kind == "local":
            value = nodes.Ref(found.type, argument.span, var)
            self.frame.scope.names[argument.name] = found.assigned(value)
        is_param = found.kind == "parameter" and isinstance(found.value, nodes.Ref)
        return var, found.value.var if is_param and isinstance(found.value, nodes.Ref) else None

    def _sizes(self, kinds: list[Type], span: Span) -> list[nodes.Expr | None]:
        """Lengths of the fields, None for scalars: Encode's, or the gradient's without one."""
        vectors = [kind for kind in kinds if isinstance(kind, Array)]
        if self.encode is None:
            if len(vectors) > 1 and not self.interface.has_encode:
                raise self.lower.refuse(
                    "E506",
                    "without an Encode, only one vector can be extracted",
                    span,
                    "note: their lengths are not known",
                    f"help: write `{self.interface.prefix}Encode`, too; it may be in another file",
                )
            return [self._whole(span) if isinstance(kind, Array) else None for kind in kinds]
        written = self.encode.fields
        if [value.type for value in written] != kinds:
            was = ", ".join(str(value.type) for value in written)
            message = f"`{self.tree.name}` extracts ({', '.join(map(str, kinds))})"
            note = f"note: `{self.encode.name}` concatenates ({was})"
            raise self.lower.refuse("E506", message, span, note)
        return list(self.encode.sizes)

    def _check_equal(self, targets: list[tuple[nodes.Var, nodes.Var | None]]) -> None:
        """Refuses a parameter that is extracted from where Encode does not put its value."""
        if self.encode is None:
            return
        params = self.interface.params
        refused = None
        for (var, equals), value in zip(targets, self.encode.fields, strict=True):
            if equals is None or parameter_of(value, self.encode.lets, params) is equals:
                continue
            put, line = self.report.text(value.span), self.report.place(value.span)
            refused = self.lower.refuse(
                "E506",
                f"`{self.encode.name}` does not concatenate the parameter `{var.name}` here",
                var.span,
                f"note: `{put}` stands there, on {line}; decode would refuse every packet in which "
                f"it is not `{var.name}`",
                f"help: concatenate `{var.name}` there, or extract it into another variable",
            )
        if refused is not None:
            raise refused

    def _assign(self, statement: ast.Assign) -> None:
        value = self.statements.value_for(Array(FLOAT), statement.value, self.frame)
        self._finish(value)

    def _finish(self, value: nodes.Expr) -> None:
        try:
            size = size_of(value, self.lower.lets, self.params, self.lower.sizes)
        except DataDependentError:
            size = None
        except SizeError as error:
            raise self.lower.refuse_size(error) from error
        if size != self._whole(value.span):
            message = f"this vector does not have `{self.gradient}.size` elements"
            raise self.lower.refuse("E508", message, value.span)
        self.result = value
