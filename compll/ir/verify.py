# SPDX-License-Identifier: Apache-2.0
"""What every program must satisfy, whoever made it; run after check and after every pass.

A violation is a mistake of the compiler, not of the specification: it raises IrError, which no
caller catches. Checked: every variable is bound once and before its use, every expression has the
type of its parts (verify_types.py), and after inlining no vector is left that would have to be
stored.
"""

from compll.ir import nodes
from compll.ir.types import FLOAT, Array
from compll.ir.verify_types import IrError as IrError
from compll.ir.verify_types import check_types
from compll.ir.walk import children


def verify(program: nodes.Program, is_inlined: bool = False) -> None:
    """Checks a program; `is_inlined`: the inline pass has run."""
    params = {param.var for param in program.params}
    if program.encode is not None:
        encode = program.encode
        states = {update.state for update in encode.updates}
        if len(states) < len(encode.updates):
            raise IrError("a state must be updated once")
        checker = _Checker(params | {encode.gradient} | states, is_inlined, has_key=True)
        checker.lets(encode.lets)
        for value in encode.values:
            checker.expr(value)
            checker.field(value)
        for update in encode.updates:
            if update.state.type != Array(FLOAT) or update.value.type != Array(FLOAT):
                raise IrError(f"the state `{update.state.name}` must be a vector of float")
    if program.decode is not None:
        decode = program.decode
        checker = _Checker(params | {decode.gradient}, is_inlined, has_key=False)
        for item in decode.fields:
            if (item.size is None) == isinstance(item.var.type, Array):
                raise IrError(
                    f"field `{item.var.name}` must have a size if and only if it is a vector"
                )
            if item.size is not None:
                checker.expr(item.size)
            checker.bind(item.var)
        checker.lets(decode.lets)
        checker.expr(decode.result)
        checker.field(decode.result, is_result=True)
        if decode.result.type != Array(FLOAT):
            raise IrError(f"a decode must give a vector of float. Received: {decode.result.type}")


class _Checker:
    def __init__(self, bound: set[nodes.Var], is_inlined: bool, has_key: bool) -> None:
        self._bound = set(bound)
        self._has_key = has_key
        self._is_inlined = is_inlined

    def bind(self, var: nodes.Var) -> None:
        if var in self._bound:
            raise IrError(f"`{var.name}` is bound twice")
        self._bound.add(var)

    def lets(self, lets: tuple[nodes.Let, ...]) -> None:
        for let in lets:
            self.expr(let.value)
            if let.var.type != let.value.type:
                raise IrError(f"`{let.var.name}` is {let.var.type}, its value {let.value.type}")
            if self._is_inlined and isinstance(let.var.type, Array):
                if not isinstance(let.value, nodes.Kept):
                    raise IrError(f"the vector `{let.var.name}` would have to be stored")
                self._kept(let.value)
            self.bind(let.var)

    def _kept(self, value: nodes.Expr) -> None:
        for child in children(value):
            if isinstance(child.type, Array) and not isinstance(child, nodes.Elementwise):
                raise IrError(f"a vector that is kept must be made from Elementwise: {child!r}")

    def field(self, value: nodes.Expr, is_result: bool = False) -> None:
        is_vector = isinstance(value.type, Array)
        if self._is_inlined and is_result and isinstance(value, nodes.Scatter):
            self._kept(value)
        elif self._is_inlined and is_vector and not isinstance(value, nodes.Elementwise):
            raise IrError(
                f"a vector that leaves must be Elementwise after inlining. Received: {value!r}"
            )

    def _inside(
        self, bound: tuple[nodes.Var, ...], lets: tuple[nodes.Let, ...], value: nodes.Expr
    ) -> None:
        inner = _Checker(self._bound, self._is_inlined, self._has_key)
        for var in bound:
            inner.bind(var)
        inner.lets(lets)
        inner.expr(value)

    def expr(self, expr: nodes.Expr) -> None:
        gone = nodes.Map | nodes.Range | nodes.Apply | nodes.Sample
        if self._is_inlined and isinstance(expr, gone):
            raise IrError(f"{type(expr).__name__} must be gone after inlining")
        if isinstance(expr, nodes.Elementwise):
            self.expr(expr.size)
            self._inside((expr.position,), expr.lets, expr.value)
            check_types(expr)
            return
        for child in children(expr):
            self.expr(child)
        match expr:
            case nodes.Ref() if expr.var not in self._bound:
                raise IrError(f"`{expr.var.name}` is used before it is bound")
            case nodes.Map():
                function = expr.function
                self._inside((expr.position, *function.params), function.lets, function.result)
            case nodes.Apply():
                self._inside(expr.function.params, expr.function.lets, expr.function.result)
            case nodes.KeyPart() if not self._has_key:
                raise IrError(f"`{expr.name}` is not known here")
        check_types(expr)
