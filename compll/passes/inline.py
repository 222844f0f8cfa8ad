# SPDX-License-Identifier: Apache-2.0
"""Lambdas and vectors into elementwise form.

    (x) { lets; e }(a)                     -->  let x = a; lets; e
    map(map(v, f), g)                      -->  each i < v.size { let x = f(v[i]); g(x) }
    map(range(n), f)                       -->  each i < n { f(i) }
    let q = map(v, f);  ... q[j] ...       -->  ... 0 <= j && j < q.size ? f(v[j]) : 0 ...
    let s = 1 + reduce(v, ...)             -->  let t = reduce(v, ...); let s = 1 + t

Every vector that is computed is computed again wherever it is used, so nothing is stored between
loops. That is right because expressions are pure, random ones included: their value depends on the
element's position alone. It can multiply operations, so their number is limited.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from compll.ir import nodes
from compll.ir.sizes import size_of
from compll.ir.types import BOOL, FLOAT, INT, Array, Type
from compll.source import Span

# The C++ compiler sees all operations; their depth is kept far from the end of Python's stack.
MAX_OPERATIONS = 4000
MAX_DEPTH = 200


class TooLargeError(Exception):
    """A function grows beyond what is reasonable; `span` says where it became too much."""

    def __init__(self, message: str, span: Span) -> None:
        """`message`: which limit, in the words of a diagnostic."""
        super().__init__(message)
        self.span = span


# What an element of a vector is, given its index and the list that takes the lets it needs.
Element = Callable[[nodes.Expr, list[nodes.Let]], nodes.Expr]


@dataclass(frozen=True)
class _Vector:
    """A vector while it is inlined: how long it is, and what its elements are."""

    size: nodes.Expr
    element: Element
    is_stored: bool


def inline(program: nodes.Program) -> nodes.Program:
    """Rewrites both functions to elementwise form.

    Raises:
        TooLargeError: a function has more than MAX_OPERATIONS operations in that form, or they are
            nested more than MAX_DEPTH deep, vectors that are computed from vectors counted in.
    """
    params = frozenset(param.var for param in program.params)
    encode, decode = program.encode, program.decode
    if encode is not None:
        inliner = _Inliner(params, {})
        inliner.function(encode.lets)
        fields = tuple(inliner.leaving(value) for value in encode.fields)
        encode = replace(encode, lets=tuple(inliner.lets), fields=fields)
    if decode is not None:
        sizes = {item.var: item.size for item in decode.fields if item.size is not None}
        inliner = _Inliner(params, sizes)
        inliner.function(decode.lets)
        result = inliner.leaving(decode.result)
        decode = replace(decode, lets=tuple(inliner.lets), result=result)
    return replace(program, encode=encode, decode=decode)


class _Inliner:
    def __init__(self, params: frozenset[nodes.Var], sizes: dict[nodes.Var, nodes.Expr]) -> None:
        self.lets: list[nodes.Let] = []
        self._params = params
        self._sizes = sizes
        self._values: dict[nodes.Var, nodes.Expr] = {}
        self._vectors: dict[nodes.Var, _Vector] = {}
        self._left = MAX_OPERATIONS
        self._depth = 0

    def function(self, lets: tuple[nodes.Let, ...]) -> None:
        """The lets at the top of a function: scalars stay, vectors are remembered."""
        for let in lets:
            self._values[let.var] = let.value
            if isinstance(let.var.type, Array):
                self._vectors[let.var] = self._vector(let.value)
            elif isinstance(let.value, nodes.Reduce):
                self.lets.append(replace(let, value=self._reduce(let.value, {}, self.lets)))
            else:
                value = self._scalar(let.value, {}, self.lets)
                self.lets.append(replace(let, value=value))

    def leaving(self, value: nodes.Expr) -> nodes.Expr:
        """A field or result: a scalar, or a vector as Elementwise."""
        return (
            self._elementwise(value)
            if isinstance(value.type, Array)
            else self._scalar(value, {}, self.lets)
        )

    def _elementwise(self, value: nodes.Expr) -> nodes.Elementwise:
        vector = self._vector(value)
        position = nodes.Var("i", INT, value.span)
        lets: list[nodes.Let] = []
        element = vector.element(nodes.Ref(INT, value.span, position), lets)
        return nodes.Elementwise(
            value.type, value.span, position, vector.size, tuple(lets), element
        )

    def _size(self, value: nodes.Expr) -> nodes.Expr:
        return size_of(value, self._values, self._params, self._sizes)

    def _vector(self, value: nodes.Expr) -> _Vector:
        match value:
            case nodes.Ref() if value.var in self._vectors:
                return self._vectors[value.var]
            case nodes.Ref():
                kind = value.type.element if isinstance(value.type, Array) else value.type
                return _Vector(
                    self._size(value), lambda i, _: nodes.Index(kind, i.span, value, i), True
                )
            case nodes.Range():
                return _Vector(self._size(value), lambda i, _: i, False)
            case nodes.Map():
                source = self._vector(value.source)
                mapped = value

                def element(i: nodes.Expr, lets: list[nodes.Let]) -> nodes.Expr:
                    self._enter(mapped.span)
                    argument = source.element(i, lets)
                    value = self._apply(mapped.function, [argument], {mapped.position: i}, lets)
                    self._depth -= 1
                    return value

                return _Vector(source.size, element, False)
            case _:
                raise TypeError(f"`value` must be a vector. Received: {value!r}")

    def _apply(
        self,
        function: nodes.Lambda,
        arguments: list[nodes.Expr],
        names: dict[nodes.Var, nodes.Expr],
        lets: list[nodes.Let],
    ) -> nodes.Expr:
        """The body of a lambda with its parameters bound; its lets become new ones in `lets`."""
        inner = dict(names)
        for var, argument in zip(function.params, arguments, strict=True):
            value = (
                argument
                if argument.type == var.type
                else nodes.Convert(var.type, argument.span, argument)
            )
            inner[var] = _bind(var, value, lets)
        for let in function.lets:
            inner[let.var] = _bind(let.var, self._scalar(let.value, inner, lets), lets)
        return self._scalar(function.result, inner, lets)

    def _enter(self, span: Span) -> None:
        """Counts an operation, and a level of nesting until the caller takes it back."""
        self._left -= 1
        self._depth += 1
        end = "once vectors are written out"
        if self._left < 0:
            raise TooLargeError(f"more than {MAX_OPERATIONS} operations {end}", span)
        if self._depth > MAX_DEPTH:
            raise TooLargeError(f"nested more than {MAX_DEPTH} levels deep {end}", span)

    def _scalar(
        self, expr: nodes.Expr, names: dict[nodes.Var, nodes.Expr], lets: list[nodes.Let]
    ) -> nodes.Expr:
        self._enter(expr.span)
        value = self._inside(expr, names, lets)
        self._depth -= 1
        return value

    def _inside(
        self, expr: nodes.Expr, names: dict[nodes.Var, nodes.Expr], lets: list[nodes.Let]
    ) -> nodes.Expr:
        match expr:
            case nodes.Ref():
                return names.get(expr.var, expr)
            case nodes.Size():
                return self._size(expr.array)
            case nodes.Index():
                index = self._scalar(expr.index, names, lets)
                return self._element(expr, index, lets)
            case nodes.Apply():
                arguments = [self._scalar(argument, names, lets) for argument in expr.arguments]
                return self._apply(expr.function, arguments, names, lets)
            case nodes.Reduce():
                return _bind(
                    nodes.Var("reduced", expr.type, expr.span),
                    self._reduce(expr, names, lets),
                    lets,
                )
            case _:
                return rebuild(expr, lambda child: self._scalar(child, names, lets))

    def _reduce(
        self, expr: nodes.Reduce, names: dict[nodes.Var, nodes.Expr], lets: list[nodes.Let]
    ) -> nodes.Reduce:
        return replace(
            expr, init=self._scalar(expr.init, names, lets), source=self._elementwise(expr.source)
        )

    def _element(self, expr: nodes.Index, index: nodes.Expr, lets: list[nodes.Let]) -> nodes.Expr:
        vector = self._vector(expr.array)
        if vector.is_stored:
            return vector.element(index, lets)
        span = expr.span
        index = _bind(nodes.Var("j", INT, span), index, lets)
        value = vector.element(index, lets)
        low = nodes.Binary(BOOL, span, "<=", nodes.Const(INT, span, 0), index)
        high = nodes.Binary(BOOL, span, "<", index, vector.size)
        inside = nodes.Binary(BOOL, span, "&&", low, high)
        return nodes.Select(value.type, span, inside, value, _zero(value.type, span))


def _bind(var: nodes.Var, value: nodes.Expr, lets: list[nodes.Let]) -> nodes.Expr:
    fresh = nodes.Var(var.name, value.type, var.span)
    lets.append(nodes.Let(fresh, value, value.span))
    return nodes.Ref(value.type, value.span, fresh)


def _zero(kind: Type, span: Span) -> nodes.Expr:
    return nodes.Const(kind, span, 0.0 if kind == FLOAT else 0)


def rebuild(expr: nodes.Expr, change: Callable[[nodes.Expr], nodes.Expr]) -> nodes.Expr:
    """`expr` with `change` applied to what is directly inside; not for nodes that bind."""
    match expr:
        case nodes.Unary() | nodes.Convert() | nodes.Bitcast():
            return replace(expr, operand=change(expr.operand))
        case nodes.Binary():
            return replace(expr, left=change(expr.left), right=change(expr.right))
        case nodes.Select():
            condition, yes, no = change(expr.condition), change(expr.yes), change(expr.no)
            return replace(expr, condition=condition, yes=yes, no=no)
        case nodes.Math():
            return replace(expr, arguments=tuple(map(change, expr.arguments)))
        case nodes.Index():
            return replace(expr, array=change(expr.array), index=change(expr.index))
        case nodes.Random():
            low, high, position = change(expr.low), change(expr.high), change(expr.position)
            return replace(expr, low=low, high=high, position=position)
        case nodes.Size():
            return replace(expr, array=change(expr.array))
        case nodes.Const() | nodes.Ref() | nodes.KeyPart():
            return expr
        case _:
            raise TypeError(f"`expr` must not bind variables. Received: {expr!r}")
