# SPDX-License-Identifier: Apache-2.0
"""Expressions: from the untyped tree to typed IR.

Conversions that the language makes by itself become Convert nodes here, so later stages see
operands of equal types. An error is reported where it is found and unwinds to the statement
(`Refused`), which goes on with the next one; on the way the operands and arguments beside it are
lowered, too, for what is wrong in them.

Lambdas are lowered at each use, with the values that their captured variables have there (`[&]`
captures by reference), and once more at their declaration, so that unused ones are checked too.
Which variables those are is decided by where the lambda is declared, not by where it is used.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from compll.errors import Report
from compll.frontend import ast, hints, scalars
from compll.frontend.constants import integer_of
from compll.frontend.draws import Draws
from compll.frontend.scalars import KEY_PARTS, SCALAR
from compll.frontend.scope import (
    POISONED,
    Exhausted,
    Function,
    Refused,
    Scope,
    Variable,
    both,
    each,
    nearest,
    unknown,
)
from compll.frontend.vectors import OPERATORS, check_scatter
from compll.ir import nodes, semantics
from compll.ir.sizes import MAX_NODES, DataDependentError, LongSizeError, SizeError, scalar_of
from compll.ir.types import (
    BOOL,
    FIXED_WIDTHS,
    FLOAT,
    INT,
    MAX_PACKED_BITS,
    Array,
    Type,
    UInt,
    joined,
)
from compll.ir.walk import free_vars, walk
from compll.source import Span

STATEMENTS = ("concat", "extract")
BUILT_IN = (*SCALAR, *OPERATORS, *STATEMENTS)
MAX_FLOAT = float(np.finfo(np.float32).max)
_MAX_EXPANSION = 20_000
# Keeps every later stage, which recurses too, far from the end of Python's stack.
_MAX_DEPTH = 128


@dataclass
class Frame:
    """Where expressions are being lowered: names, the lets made so far, and what is allowed here.

    Attributes:
        position: in the lambda of a `map` or `filter`, the element's number; None elsewhere.
        lenient: a lambda is only being looked at, so captured variables have no value yet.
    """

    scope: Scope
    lets: list[nodes.Let]
    is_lambda: bool = False
    position: nodes.Expr | None = None
    lenient: bool = False


class Lowerer:
    """Lowers the expressions of one function.

    `run_lambda` lowers the statements of a lambda; it is passed in because statements are built on
    expressions.
    """

    def __init__(
        self,
        report: Report,
        params: frozenset[nodes.Var],
        run_lambda: Callable[[ast.Lambda, Frame, Type], nodes.Expr],
    ) -> None:
        """`params`: the scalar parameters of the codec, which widths and lengths may depend on."""
        self.report = report
        self.has_key = False
        self.params = params
        self.is_decode = False
        self.lets: dict[nodes.Var, nodes.Expr] = {}
        self.sizes: dict[nodes.Var, nodes.Expr] = {}
        self._run_lambda = run_lambda
        self._sites: dict[int, int] = {}
        self.draws = Draws()
        self._later_values: set[nodes.Var] = set()
        self._budget = _MAX_EXPANSION
        self._depth = 0
        self.widths: dict[UInt, None] = {}
        self.blocks: dict[nodes.Expr, None] = {}

    def refuse(self, code: str, message: str, span: Span, *notes: str) -> Refused:
        """Reports an error; the caller raises what is returned."""
        self.report.add(code, message, span, *notes)
        return Refused()

    @contextlib.contextmanager
    def nested(self, span: Span) -> Iterator[None]:
        """Counts a level of nesting, calls of lambdas included; refuses one too many."""
        if self._depth == _MAX_DEPTH:
            message = f"nested more than {_MAX_DEPTH} levels deep once lambdas are expanded"
            self.report.add("E102", message, span)
            raise Exhausted
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def bind(self, frame: Frame, name: str, value: nodes.Expr, span: Span) -> nodes.Expr:
        """Gives a new variable a value; returns the reference to it."""
        var = nodes.Var(name, value.type, span)
        frame.lets.append(nodes.Let(var, value, span))
        self.lets[var] = value
        return nodes.Ref(value.type, span, var)

    # Types.

    def type_of(self, tree: ast.TypeName, frame: Frame) -> Type:
        """The type that a type name stands for."""
        is_known = tree.name in ("float", "int", *FIXED_WIDTHS)
        if tree.width is not None and is_known:
            raise self.refuse(
                "E304", f"`{tree.name}` takes no width", tree.span, "help: `uint<...>` does"
            )
        if tree.name == "uint":
            element: Type = UInt(self._width(tree, frame))
        elif tree.name in FIXED_WIDTHS:
            element = UInt(FIXED_WIDTHS[tree.name])
        elif tree.name in ("float", "int"):
            element = FLOAT if tree.name == "float" else INT
        else:
            known = ("float", "int", "uint<expr>", *FIXED_WIDTHS)
            raise self.refuse(
                "E208",
                f"`{tree.name}` is not a type of a value",
                tree.span,
                *(
                    hints.type_help(tree.name, nearest(tree.name, known))
                    or (f"help: the types are {', '.join(known)}, and vectors of them",)
                ),
            )
        return Array(element) if tree.is_array else element

    def _width(self, tree: ast.TypeName, frame: Frame) -> int | nodes.Expr:
        if tree.width is None:
            raise self.refuse(
                "E304", "`uint` needs a width", tree.span, "help: `uint32`, or `uint<expr>`"
            )
        width = self.scalar(tree.width, frame, kind="int")
        if width.type == FLOAT:
            raise self.refuse("E304", "the width of `uint` must be an integer", tree.width.span)
        note = "note: the packet's layout must be known before its contents"
        message = "a width must be made of numbers and parameters"
        try:
            known = self.params | self._later_values
            width = scalar_of(self.convert(width, INT), self.lets, known, self.sizes)
        except LongSizeError as error:
            raise self.refuse("E304", _too_long("width"), error.span) from error
        except DataDependentError as error:
            raise self.refuse("E304", message, error.span, note) from error
        size = next((found for found in walk(width) if isinstance(found, nodes.Size)), None)
        if size is not None:
            raise self.refuse("E304", message, tree.width.span, note)
        if free_vars(width) & self._later_values:
            return MAX_PACKED_BITS
        value = integer_of(width)
        if value is None:
            self.widths[UInt(width)] = None
            return width
        if not 1 <= value <= MAX_PACKED_BITS:
            message = f"a width must be from 1 to {MAX_PACKED_BITS}. Received: {value}"
            notes = ("help: write `uint32`",) if value == 32 else ()
            raise self.refuse("E304", message, tree.width.span, *notes)
        return value

    # Conversions.

    def convert(self, value: nodes.Expr, target: Type) -> nodes.Expr:
        """A scalar as another scalar type."""
        if value.type == target:
            return value
        return nodes.Convert(target, value.span, value)

    def number(self, value: nodes.Expr) -> nodes.Expr:
        """A scalar as what is computed with: Float or Int."""
        return value if value.type == FLOAT else self.convert(value, INT)

    def scalar(
        self, tree: ast.Expr, frame: Frame, use: str = "", kind: str = "float"
    ) -> nodes.Expr:
        """Lowers an expression that must not be a vector.

        `use`: what is done with it, as a lambda of `x` would write it, for the line of help.
        `kind`: a type that it may have, for that of an unknown name.
        """
        value = self.expr(tree, frame, kind)
        if isinstance(value.type, Array):
            help_line = "help: take an element, as in `v[0]`, or `reduce` or `map` the vector"
            if use:
                help_line = hints.mapped(use, str(value.type.element))
            raise self._refuse_vector(value, tree.span, frame, help_line)
        return value

    def _refuse_vector(
        self, value: nodes.Expr, span: Span, frame: Frame, help_line: str
    ) -> Refused:
        if frame.is_lambda:
            # No vector can be made there.
            help_line = (
                "help: take an element, as in `v[i]` in the lambda of a `map` over `range(v.size)`"
            )
        message = f"expected a scalar, found a vector of type `{value.type}`"
        return self.refuse("E301", message, span, help_line)

    def condition(self, tree: ast.Expr, frame: Frame) -> nodes.Expr:
        """Lowers an expression that is used as a condition."""
        return self.convert(self.scalar(tree, frame), BOOL)

    def integer(self, tree: ast.Expr, frame: Frame, what: str) -> nodes.Expr:
        """Lowers an expression that must be an integer."""
        value = self.scalar(tree, frame, kind="int")
        if value.type == FLOAT:
            message = f"{what} must be an integer, found a `float`"
            help_line = "help: declare `int j = ...;` before, which drops the fraction, and use j"
            raise self.refuse("E301", message, tree.span, help_line)
        return self.convert(value, INT)

    # Expressions.

    def expr(self, tree: ast.Expr, frame: Frame, kind: str = "float") -> nodes.Expr:
        """Lowers any expression; `kind`: a type that it may have, where it is an unknown name."""
        self._budget -= 1
        if self._budget < 0:
            # Lambdas that call lambdas can grow without bound; a specification is a page of text.
            message = f"more than {_MAX_EXPANSION} operations once lambdas are expanded"
            self.report.add("E102", message, tree.span)
            raise Exhausted
        with self.nested(tree.span):
            return self._expr(tree, frame, kind)

    def _expr(self, tree: ast.Expr, frame: Frame, kind: str) -> nodes.Expr:
        match tree:
            case ast.Number():
                return self._literal(tree)
            case ast.Name():
                return self._name(tree, frame, kind)
            case ast.Unary():
                return self._unary(tree, frame)
            case ast.Binary():
                return self._binary(tree, frame)
            case ast.Ternary():
                condition, (yes, no) = both(
                    lambda: self.condition(tree.condition, frame),
                    lambda: self.draws.apart(
                        (tree.yes, tree.no), lambda arm: self.scalar(arm, frame)
                    ),
                )
                both_are = yes.type if yes.type == no.type else joined(yes.type, no.type)
                yes, no = self.convert(yes, both_are), self.convert(no, both_are)
                return nodes.Select(both_are, tree.span, condition, yes, no)
            case ast.Index():
                return self._index(tree, frame)
            case ast.Field():
                return self._field(tree, frame)
            case ast.Call():
                return self._call(tree, frame)
            case _:
                raise self.refuse(
                    "E301",
                    "a lambda is not a value",
                    tree.span,
                    "help: `lambda_func name = [&]...`",
                )

    def _index(self, tree: ast.Index, frame: Frame) -> nodes.Expr:
        base, index = both(
            lambda: self.expr(tree.base, frame, "float*"),
            lambda: self.integer(tree.index, frame, "an index"),
        )
        if not isinstance(base.type, Array):
            raise self.refuse("E307", f"a `{base.type}` cannot be indexed", tree.base.span)
        return nodes.Index(base.type.element, tree.span, base, index)

    def _literal(self, tree: ast.Number) -> nodes.Expr:
        if isinstance(tree.value, int):
            return nodes.Const(INT, tree.span, tree.value)
        value = semantics.binary32(tree.value)
        if abs(value) > MAX_FLOAT:
            raise self.refuse("E308", f"a `float` holds at most {MAX_FLOAT:.9g}", tree.span)
        return nodes.Const(FLOAT, tree.span, value)

    def _name(self, tree: ast.Name, frame: Frame, kind: str) -> nodes.Expr:
        found = frame.scope.find(tree.name)
        if found is None:
            if tree.name in KEY_PARTS:
                return scalars.key_part(self, tree.name, tree.span)
            if tree.name in hints.LATER:
                raise self._later(tree.name, tree.span)
            raise self.refuse(
                "E201",
                f"unknown name `{tree.name}`",
                tree.span,
                *unknown(tree.name, frame.scope.all_names(), kind),
            )
        if found is POISONED:
            raise Refused
        if isinstance(found, Function):
            message = f"`{tree.name}` is a lambda, not a value"
            raise self.refuse("E301", message, tree.span, f"help: call it, as in `{tree.name}(x)`")
        if found.kind == "state" and found.value is None:
            raise self.refuse_state(tree.name, tree.span)
        if found.kind == "packet":
            message = (
                f"`{tree.name}` is a packet: it can only be made by `concat` and read by `extract`"
            )
            note = "help: give values to `concat`, and get them back with `extract`"
            raise self.refuse("E301", message, tree.span, note)
        is_captured = frame.lenient and found.kind == "captured"
        if is_captured and not isinstance(found.type, Array):
            # Its value is that of where the lambda is used.
            later = nodes.Var(tree.name, found.type, tree.span)
            self._later_values.add(later)
            return nodes.Ref(found.type, tree.span, later)
        if found.value is None:
            if found.kind == "output":
                help_line = f"help: read what was extracted; only `{tree.name}.size` is known here"
                raise self.refuse("E205", f"`{tree.name}` has no value yet", tree.span, help_line)
            if is_captured:
                return nodes.Ref(found.type, tree.span, nodes.Var(tree.name, found.type, tree.span))
            raise self.refuse(
                "E205",
                f"`{tree.name}` is read before it has a value on every path",
                tree.span,
                "help: give it a value where it is declared, or in both branches of the `if`",
            )
        return replace(found.value, span=tree.span)

    def refuse_state(self, name: str, span: Span) -> Refused:
        """Reports a state in a Decode; the caller raises what is returned."""
        note = "note: what a decode gives depends on the packet alone"
        return self.refuse("E607", f"`{name}` is a state", span, note)

    def _unary(self, tree: ast.Unary, frame: Frame) -> nodes.Expr:
        if tree.op == "!":
            return nodes.Unary(BOOL, tree.span, "!", self.condition(tree.operand, frame))
        value = self.number(self.scalar(tree.operand, frame, f"{tree.op}x"))
        if tree.op == "+":
            return value
        if tree.op == "~" and value.type == FLOAT:
            raise self.refuse("E302", "`~` takes integers, found a `float`", tree.span)
        return nodes.Unary(value.type, tree.span, tree.op, value)

    def _binary(self, tree: ast.Binary, frame: Frame) -> nodes.Expr:
        if tree.op in ("&&", "||"):
            left, right = each(
                (tree.left, tree.right), lambda operand: self.condition(operand, frame)
            )
            return nodes.Binary(BOOL, tree.span, tree.op, left, right)
        left, right = each((tree.left, tree.right), lambda operand: self.expr(operand, frame))
        if isinstance(left.type, Array) and isinstance(right.type, Array):
            raise self._refuse_vector(left, tree.left.span, frame, hints.zipped(tree.op))
        for value, at, use in (
            (left, tree.left, f"x {tree.op} y"),
            (right, tree.right, f"y {tree.op} x"),
        ):
            if isinstance(value.type, Array):
                help_line = hints.mapped(use, str(value.type.element))
                raise self._refuse_vector(value, at.span, frame, help_line)
        kind = joined(left.type, right.type)
        if kind == FLOAT and tree.op in ("%", "<<", ">>", "&", "|", "^"):
            message = f"`{tree.op}` takes integers, found `{left.type}` and `{right.type}`"
            raise self.refuse("E302", message, tree.span)
        result = BOOL if tree.op in ("<", "<=", ">", ">=", "==", "!=") else kind
        return nodes.Binary(
            result, tree.span, tree.op, self.convert(left, kind), self.convert(right, kind)
        )

    def _field(self, tree: ast.Field, frame: Frame) -> nodes.Expr:
        if tree.name != "size":
            raise self.refuse(
                "E306", f"unknown field `{tree.name}`", tree.span, "note: vectors have `.size`"
            )
        if isinstance(tree.base, ast.Name):
            found = frame.scope.find(tree.base.name)
            if isinstance(found, Variable) and found.kind == "output":
                return nodes.Size(INT, tree.span, _output(found))
        base = self.expr(tree.base, frame, "float*")
        if not isinstance(base.type, Array):
            raise self.refuse(
                "E306", f"`{base.type}` has no `.size`", tree.span, "note: vectors have it"
            )
        return nodes.Size(INT, tree.span, base)

    def _call(self, tree: ast.Call, frame: Frame) -> nodes.Expr:
        found = frame.scope.find(tree.name)
        if found is POISONED:
            raise Refused
        if isinstance(found, Function):
            return self._apply(tree, found, frame)
        if tree.name in SCALAR:
            return scalars.call(self, tree, frame)
        if tree.name in OPERATORS:
            if tree.name == "scatter":
                check_scatter(self, tree)  # elsewhere it helps nobody to move it out of a lambda
            if frame.is_lambda:
                note = "help: compute it before the lambda; the lambda captures it"
                raise self.refuse("E404", f"`{tree.name}` inside a lambda", tree.name_span, note)
            counts, operator = OPERATORS[tree.name]
            self.arity(tree, *counts)
            return operator(self, tree, frame)
        if tree.name in STATEMENTS:
            form = (
                "packet = concat(a, b, ...)"
                if tree.name == "concat"
                else "extract(packet, a, b, ...)"
            )
            raise self.refuse(
                "E511", f"`{tree.name}` is not a value", tree.name_span, f"help: `{form};`"
            )
        if tree.name in hints.LATER:
            raise self._later(tree.name, tree.name_span)
        raise self.refuse(
            "E202",
            f"unknown function `{tree.name}`",
            tree.name_span,
            *self._unknown_function(tree.name, frame),
        )

    def _unknown_function(self, name: str, frame: Frame) -> tuple[str, ...]:
        declared = frame.scope.lambda_name()
        if name == declared:
            return ("help: a function cannot call itself; write out the steps, or use `reduce`",)
        return (
            hints.elsewhere_called(name)
            or nearest(name, BUILT_IN)
            or (f"help: the functions are {', '.join(sorted(BUILT_IN))}, and lambdas",)
        )

    def _later(self, name: str, span: Span) -> Refused:
        note = f"note: this version has {', '.join(sorted(BUILT_IN))}"
        message = f"`{name}` belongs to CompLL, but this version does not have it"
        return self.refuse("E204", message, span, note, hints.later(name))

    def arity(self, tree: ast.Call, *counts: int) -> None:
        """Refuses a call with another number of arguments."""
        if len(tree.arguments) not in counts:
            plural = "" if counts == (1,) else "s"
            wanted = " or ".join(map(str, counts))
            message = f"`{tree.name}` takes {wanted} argument{plural}, found {len(tree.arguments)}"
            raise self.refuse("E303", message, tree.span, hints.form(tree.name))

    def _apply(self, tree: ast.Call, found: Function, frame: Frame) -> nodes.Expr:
        wanted = len(found.tree.parameters)
        if len(tree.arguments) != wanted:
            plural = "" if wanted == 1 else "s"
            message = f"`{tree.name}` takes {wanted} argument{plural}, found {len(tree.arguments)}"
            line = self.report.line(found.declared)
            help_line = f"help: give it what the lambda on line {line} takes"
            raise self.refuse("E303", message, tree.span, help_line)
        function, values = both(
            lambda: self._called(tree, found, frame),
            lambda: each(tree.arguments, lambda argument: self.scalar(argument, frame)),
        )
        arguments = tuple(
            self.convert(v, p.type) for v, p in zip(values, function.params, strict=True)
        )
        return nodes.Apply(function.result.type, tree.span, function, arguments)

    def _called(self, tree: ast.Call, found: Function, frame: Frame) -> nodes.Lambda:
        with self.draws.call(tree.span):
            return self.lambda_(found, frame, frame.position)

    def site(self, tree: ast.Call) -> int:
        """The number of a call that draws noise, by its place in the text."""
        return self._sites.setdefault(tree.span.start, len(self._sites))

    # Vectors.

    def as_vector(self, value: nodes.Expr, element: Type) -> nodes.Expr:
        """A vector with its elements converted."""
        if not isinstance(value.type, Array) or value.type.element == element:
            return value
        position = nodes.Var("i", INT, value.span)
        item = nodes.Var("x", value.type.element, value.span)
        body = self.convert(nodes.Ref(item.type, value.span, item), element)
        function = nodes.Lambda((item,), (), body, value.span)
        return nodes.Map(Array(element), value.span, position, function, value)

    def refuse_size(
        self, error: SizeError, at: Span | None = None, what: str = "this length"
    ) -> Refused:
        """Reports a length that cannot be used; the caller raises what is returned.

        Args:
            error: what cannot be used in it, and where that is.
            at: where the length is given; None for `error.span`.
            what: the length, as messages name it.
        """
        if isinstance(error, LongSizeError):
            return self.refuse("E403", _too_long("length"), error.span)
        at = error.span if at is None else at
        notes = ["help: make it of parameters and the gradient's size"]
        if self.report.line(error.span) != self.report.line(at):
            notes.append(f"note: the data comes in on line {self.report.line(error.span)}")
        return self.refuse("E403", f"{what} depends on data", at, *notes)

    def vector(self, tree: ast.Expr, frame: Frame) -> nodes.Expr:
        """Lowers an expression that must be a vector."""
        value = self.expr(tree, frame, "float*")
        if not isinstance(value.type, Array):
            help_line = "help: give it the gradient, `range(n)` or another vector"
            message = f"expected a vector, found a `{value.type}`"
            raise self.refuse("E301", message, tree.span, help_line)
        return value

    def lambda_(
        self, function: Function, frame: Frame, position: nodes.Expr | None
    ) -> nodes.Lambda:
        """Lowers a lambda as it is used in `frame`."""
        with self.nested(function.declared):
            return self._lambda(function, frame, position)

    def _lambda(
        self, function: Function, frame: Frame, position: nodes.Expr | None
    ) -> nodes.Lambda:
        tree, at = function.tree, function.declared.start
        inner, around = (
            Frame(Scope(function.scope, at, function.name), [], True, position, frame.lenient)
            for _ in range(2)
        )
        params: list[nodes.Var] = []
        refused = None
        for parameter in tree.parameters:
            try:
                params.append(self._parameter(parameter, inner, around))
            except Refused as error:
                refused = error
        kind = self.type_of(tree.result, around)
        if isinstance(kind, Array):
            raise self.refuse("E305", "a lambda returns a scalar", tree.result.span)
        if refused is not None:
            raise refused
        result = self._run_lambda(tree, inner, kind)
        return nodes.Lambda(tuple(params), tuple(inner.lets), result, tree.span)

    def _parameter(self, parameter: ast.Parameter, inner: Frame, around: Frame) -> nodes.Var:
        """A parameter of a lambda, which becomes a name in `inner`."""
        kind = self.type_of(parameter.type, around)
        if isinstance(kind, Array):
            raise self.refuse(
                "E305", "a lambda takes scalars; it captures vectors", parameter.type.span
            )
        if parameter.name in inner.scope.names:
            raise self.refuse("E203", f"`{parameter.name}` is declared twice", parameter.span)
        var = nodes.Var(parameter.name, kind, parameter.span)
        value = nodes.Ref(kind, parameter.span, var)
        inner.scope.names[parameter.name] = Variable(kind, "local", parameter.span, value)
        return var


def _too_long(what: str) -> str:
    return f"a {what} must have at most {MAX_NODES} operations, variables replaced by their values"


def _output(variable: Variable) -> nodes.Expr:
    if variable.output is None:
        raise Refused
    return variable.output
