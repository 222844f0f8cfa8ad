# SPDX-License-Identifier: Apache-2.0
"""Statements: blocks of assignments, ifs and returns become single assignments and selects.

    if (c) { x = a; } else { x = b; }          -->  let x = c ? a : b
    if (c) { return a; }  rest; return b;      -->  result = c ? a : b     (`rest` is evaluated too)

Both arms are evaluated, which is right because expressions are pure and total. While a block is
run, `done` says whether it has returned: False, True, or a condition; a later return counts only
where it is false.
"""

from dataclasses import dataclass

from compll.errors import Report
from compll.frontend import ast, hints
from compll.frontend.lower import STATEMENTS, Frame, Lowerer
from compll.frontend.scalars import KEY_PARTS
from compll.frontend.scope import (
    POISONED,
    Exhausted,
    Function,
    Refused,
    Variable,
    unknown,
)
from compll.frontend.vectors import OPERATORS
from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Array, Type
from compll.source import Span


@dataclass
class _State:
    """How far a lambda has got: `result` counts where `done`."""

    done: "bool | nodes.Expr" = False
    result: nodes.Expr | None = None


class Statements:
    """Runs the statements of one function and of its lambdas."""

    def __init__(self, lowerer: Lowerer | None = None) -> None:
        """`lowerer` may be set later: each of the two needs the other.

        `misplaced` becomes the states whose assignment was refused, as inside of an `if`.
        """
        self._lowerer = lowerer
        self._branches = 0
        self.misplaced: set[str] = set()

    @property
    def lowerer(self) -> Lowerer:
        """The lowerer of expressions."""
        if self._lowerer is None:
            raise RuntimeError("`lowerer` must be set before statements are run")
        return self._lowerer

    @lowerer.setter
    def lowerer(self, value: Lowerer) -> None:
        self._lowerer = value

    def run_lambda(self, tree: ast.Lambda, frame: Frame, kind: Type) -> nodes.Expr:
        """The value of a lambda's body, as `kind`; its lets go to `frame`."""
        state = _State()
        outer, self._branches = self._branches, 0
        failed = not self._block(tree.body, frame, state, kind)
        self._branches = outer
        if failed:
            raise Refused
        if state.done is not True or state.result is None:
            raise self.lowerer.refuse(
                "E207", "this lambda does not return on every path", tree.span
            )
        return state.result

    def run(self, statement: ast.Stmt, frame: Frame) -> None:
        """Runs one statement at the top of a function."""
        self._statement(statement, frame, _State(), INT)

    def _block(self, body: tuple[ast.Stmt, ...], frame: Frame, state: _State, kind: Type) -> bool:
        is_good = True
        for statement in body:
            try:
                self._statement(statement, frame, state, kind)
            except Refused:
                is_good = False
                self.poison(statement, frame)
        return is_good

    def poison(self, statement: ast.Stmt, frame: Frame) -> None:
        """After an error: its variable is not complained about again."""
        if not isinstance(statement, ast.Declare | ast.Assign):
            return
        known = frame.scope.names.get(statement.name)
        if known is None or (isinstance(known, Variable) and known.kind == "local"):
            frame.scope.names[statement.name] = POISONED

    def _statement(self, statement: ast.Stmt, frame: Frame, state: _State, kind: Type) -> None:
        match statement:
            case ast.Declare():
                self.declare(statement, frame)
            case ast.Assign():
                self.assign(statement, frame)
            case ast.If():
                self._if(statement, frame, state, kind)
            case ast.Return():
                self._return(statement, frame, state, kind)
            case _:
                self.refuse_expression(statement)

    def refuse_expression(self, statement: ast.Stmt) -> None:
        """Refuses an expression that stands alone."""
        value = statement.value if isinstance(statement, ast.Evaluate) else None
        if isinstance(value, ast.Call) and value.name in hints.LATER:
            message = f"`{value.name}` belongs to CompLL, but this version does not have it"
            raise self.lowerer.refuse("E204", message, value.name_span, hints.later(value.name))
        if isinstance(value, ast.Call) and value.name in STATEMENTS:
            message = f"`{value.name}` is not allowed here"
            instead = _PLACES[value.name, self.lowerer.is_decode]
            raise self.lowerer.refuse("E511", message, value.name_span, instead)
        raise self.lowerer.refuse("E511", "this statement does nothing", statement.span)

    # The statements that functions and lambdas share.

    def declare(self, statement: ast.Declare, frame: Frame) -> None:
        """A new scalar, vector or lambda."""
        lower = self.lowerer
        names = frame.scope.names
        if statement.name in names:
            earlier = names[statement.name].declared
            message = f"`{statement.name}` is declared twice"
            line = lower.report.line(earlier)
            raise lower.refuse(
                "E203", message, statement.span, f"note: the first time on line {line}"
            )
        if (
            statement.type.name == "lambda_func"
            and statement.type.width is None
            and not statement.type.is_array
        ):
            self._declare_lambda(statement, frame)
            return
        try:
            kind = lower.type_of(statement.type, frame)
        except Exhausted:
            raise
        except Refused:
            if statement.value is not None and not isinstance(statement.value, ast.Lambda):
                lower.expr(statement.value, frame)  # for what is wrong in it
            raise
        if isinstance(kind, Array) and frame.is_lambda:
            message = "a lambda has no vectors of its own"
            raise lower.refuse(
                "E404", message, statement.span, "help: make it before the lambda, and capture it"
            )
        names[statement.name] = Variable(kind, "local", statement.span, None)
        if statement.value is not None:
            self._store(statement.name, statement.value, statement.span, frame)

    def _declare_lambda(self, statement: ast.Declare, frame: Frame) -> None:
        lower = self.lowerer
        if not isinstance(statement.value, ast.Lambda):
            message = f"`{statement.name}` must be given a lambda"
            raise lower.refuse(
                "E305", message, statement.span, "help: `[&](float x) -> float { ... }`"
            )
        position = nodes.Ref(INT, statement.span, nodes.Var("i", INT, statement.span))
        trial = Frame(frame.scope, [], frame.is_lambda, None, lenient=True)
        declared = Function(statement.value, statement.name, statement.span, frame.scope)
        lower.lambda_(declared, trial, position)
        frame.scope.names[statement.name] = declared

    def assign(self, statement: ast.Assign, frame: Frame) -> None:
        """A new value for a variable."""
        lower = self.lowerer
        found = frame.scope.find(statement.name)
        if found is None and statement.name in KEY_PARTS:
            message = f"`{statement.name}` belongs to the call, so it cannot be assigned"
            raise lower.refuse("E206", message, statement.span)
        if found is None:
            made = statement.value.name if isinstance(statement.value, ast.Call) else ""
            kind = _MADE.get(made, "float*" if made in OPERATORS else "float")
            help_lines = unknown(statement.name, frame.scope.all_names(), kind)
            raise lower.refuse(
                "E201", f"unknown name `{statement.name}`", statement.span, *help_lines
            )
        if found is POISONED:
            raise Refused
        if isinstance(found, Function) or found.kind != "local":
            if isinstance(found, Variable) and found.kind == "state":
                self.misplaced.add(statement.name)
            what = "lambda" if isinstance(found, Function) else _WHAT[found.kind]
            message = f"`{statement.name}` is a {what}, which cannot be assigned here"
            help_lines = (_INSTEAD[found.kind if isinstance(found, Variable) else "lambda"],)
            raise lower.refuse("E206", message, statement.span, *help_lines)
        self._store(statement.name, statement.value, statement.span, frame)

    def _store(self, name: str, tree: ast.Expr, span: Span, frame: Frame) -> None:
        lower = self.lowerer
        variable = frame.scope.names[name]
        if not isinstance(variable, Variable):
            raise Refused
        value = self.value_for(variable.type, tree, frame)
        if isinstance(variable.type, Array) and self._branches:
            message = "a vector cannot be assigned inside an `if`"
            raise lower.refuse(
                "E511", message, span, "help: put the condition into the lambda of the `map`"
            )
        frame.scope.names[name] = variable.assigned(lower.bind(frame, name, value, span))

    def value_for(self, kind: Type, tree: ast.Expr, frame: Frame) -> nodes.Expr:
        """An expression as a value of type `kind`; vectors convert element by element."""
        lower = self.lowerer
        value = lower.expr(tree, frame, str(kind))
        if kind == Array(FLOAT) and isinstance(value, nodes.TopK):
            # It would convert. Who writes this expects values, which are what others' top_k gives.
            message = "a vector of `float` cannot be a `top_k`, which gives indices"
            raise lower.refuse("E301", message, tree.span, _OF_TOP_K)
        if isinstance(kind, Array) and isinstance(value.type, Array):
            return lower.as_vector(value, kind.element)
        if isinstance(kind, Array) or isinstance(value.type, Array):
            raise lower.refuse(
                "E301",
                f"expected a value of type `{kind}`, found `{value.type}`",
                tree.span,
                "help: make a vector by `map`"
                if isinstance(kind, Array)
                else "help: declare a vector, with `*`, or `reduce` it to one number",
            )
        return lower.convert(value, kind)

    def _if(self, statement: ast.If, frame: Frame, state: _State, kind: Type) -> None:
        lower = self.lowerer
        span = statement.condition.span
        is_good = True
        try:
            value = lower.condition(statement.condition, frame)
        except Exhausted:
            raise
        except Refused:
            is_good, value = False, nodes.Const(BOOL, span, True)  # to see what is in the arms
        condition = lower.bind(frame, "c", value, span)
        before = dict(frame.scope.names)
        drawn = lower.draws.reached
        reached = drawn
        ends = []
        self._branches += 1
        for body in (statement.yes, statement.no):
            frame.scope.names = dict(before)
            lower.draws.reached = drawn
            end = _State(state.done, state.result)
            with lower.nested(statement.span):
                is_good = self._block(body, frame, end, kind) and is_good
            ends.append((frame.scope.names, end))
            if end.done is not True:  # what comes next is no path from an arm that has returned
                reached |= lower.draws.reached
        lower.draws.reached = reached
        self._branches -= 1
        (yes_names, yes), (no_names, no) = ends
        merged: dict[str, Variable | Function] = {}
        for name, old in before.items():
            one, two = yes_names[name], no_names[name]
            if (
                not isinstance(old, Variable)
                or not isinstance(one, Variable)
                or not isinstance(two, Variable)
            ):
                merged[name] = old
            elif one is POISONED or two is POISONED:
                merged[name] = POISONED  # it has no value because of an error, which was reported
            elif yes.done is True:
                merged[name] = two
            elif no.done is True or one.value is two.value:
                merged[name] = one
            elif one.value is None or two.value is None:
                merged[name] = old.assigned(None)
            else:
                choice = nodes.Select(old.type, statement.span, condition, one.value, two.value)
                merged[name] = old.assigned(lower.bind(frame, name, choice, statement.span))
        frame.scope.names = merged
        if not is_good:
            # Whatever the arms return, the lambda is refused; a missing return is not worth a
            # message of its own.
            raise Refused
        state.result = self._merge_results(condition, yes, no, frame, kind)
        state.done = self._merge_done(condition, yes.done, no.done, frame)

    def _merge_results(
        self, condition: nodes.Expr, yes: _State, no: _State, frame: Frame, kind: Type
    ) -> nodes.Expr | None:
        if yes.result is None or no.result is None or yes.result is no.result:
            return yes.result if no.result is None else no.result
        choice = nodes.Select(kind, condition.span, condition, yes.result, no.result)
        return self.lowerer.bind(frame, "r", choice, condition.span)

    def _merge_done(
        self, condition: nodes.Expr, yes: "bool | nodes.Expr", no: "bool | nodes.Expr", frame: Frame
    ) -> "bool | nodes.Expr":
        if yes is no:
            return yes
        span = condition.span
        arms = [
            nodes.Const(BOOL, span, done) if isinstance(done, bool) else done for done in (yes, no)
        ]
        choice = nodes.Select(BOOL, span, condition, arms[0], arms[1])
        return self.lowerer.bind(frame, "d", choice, span)

    def _return(self, statement: ast.Return, frame: Frame, state: _State, kind: Type) -> None:
        lower = self.lowerer
        if not frame.is_lambda:
            help_line = "help: assign the result: `packet = concat(...);` or `gradient = ...;`"
            raise lower.refuse("E511", "only lambdas return", statement.span, help_line)
        if statement.value is None:
            help_line = "help: write the value, as in `return x;`"
            message = f"this lambda returns a `{kind}`"
            raise lower.refuse("E301", message, statement.span, help_line)
        value = lower.convert(lower.scalar(statement.value, frame), kind)
        if state.done is True:
            return
        if isinstance(state.done, nodes.Expr) and state.result is not None:
            value = nodes.Select(kind, statement.span, state.done, state.result, value)
        state.result = lower.bind(frame, "r", value, statement.span)
        state.done = True


# What operators of vectors make, where that is no `float*`.
_MADE = {"reduce": "float", "range": "int*", "top_k": "int*"}
# What to do where a statement of packets stands in a wrong place, of an Encode or of a Decode.
_PLACES = {
    ("concat", False): "help: assign it, by the last statement: `packet = concat(a, b, ...);`",
    ("concat", True): "help: only an Encode makes a packet; a Decode ends with `gradient = ...;`",
    ("extract", False): "help: only a Decode reads a packet; use the values themselves here",
    ("extract", True): "help: move it out of the `if` or the lambda, to the top of the Decode",
}

_OF_TOP_K = (
    "help: `int* kept = top_k(v, k);`, and the values are "
    "`map(kept, [&](int i) -> float { return v[i]; })`"
)

_WHAT = {
    "parameter": "parameter",
    "output": "result",
    "packet": "packet",
    "state": "state",
    "captured": "captured variable",
}

_INSTEAD = {
    "lambda": "help: declare another lambda",
    "parameter": "help: copy it to a variable of your own, and change that",
    "output": "help: assign it once, by the last statement of the Decode",
    "packet": "help: assign it once, by the last statement of the Encode",
    "state": (
        "help: assign it once in the Encode, outside of any `if`: a `map` whose lambda returns "
        "`c ? a : b`"
    ),
    "captured": "help: let the lambda return the value, and assign what it returns",
}


def new_statements(report: Report, params: frozenset[nodes.Var]) -> Statements:
    """A `Statements` with its `Lowerer`, for one function."""
    statements = Statements()
    statements.lowerer = Lowerer(report, params, statements.run_lambda)
    return statements
