# SPDX-License-Identifier: Apache-2.0
"""Lambdas and vectors into elementwise form.

    (x) { lets; e }(a)                     -->  let x = a; lets; e
    map(map(v, f), g)                      -->  each i < v.size { let x = f(v[i]); g(x) }
    map(range(n), f)                       -->  each i < n { f(i) }
    let q = map(v, f);  ... q[j] ...       -->  ... 0 <= j && j < q.size ? f(v[j]) : 0 ...
    let s = 1 + reduce(v, ...)             -->  let t = reduce(v, ...); let s = 1 + t
    sample(v, m)                           -->  each i < m { v[noise * v.size >> 32] }
    sort(v, less)[3]                       -->  let s = sort(each ..); s[3]

Every vector whose elements can be computed one by one is computed again wherever it is used, so it
is not stored between loops. That is right because expressions are pure, random ones included: their
value depends on the element's position alone. It can multiply operations, so their number is
limited. The others (filter, sort, top_k, scatter, block_reduce, hadamard) become lets of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from compll.ir import nodes
from compll.ir.sizes import DataDependentError, size_of
from compll.ir.types import BOOL, FLOAT, INT, Array, Type
from compll.ir.walk import free_vars
from compll.source import Span

# The C++ compiler sees all operations; their depth is kept far from the end of Python's stack.
MAX_OPERATIONS = 4000
MAX_DEPTH = 200
_READ_LESS = (
    "a vector made by `map` is computed again at every `v[j]`: read it once, into a variable, as "
    "in `float a = v[j];`, and write fewer reads of such vectors in one another; or store it, by a "
    "filter that keeps all: `float* w = filter(v, [&](float x) -> uint1 { return 1; });`, and read "
    "it over `range(v.size)`, as the length of a filter is not known"
)
_MAP_LESS = (
    "write the steps in one lambda, with variables in between, in place of a `map` of a `map`"
)


class TooLargeError(Exception):
    """A function grows beyond what is reasonable; `span` says where it became too much.

    `advice`: what to do, as a line of help.
    """

    def __init__(self, message: str, span: Span, advice: str) -> None:
        """`message`: which limit, in the words of a diagnostic."""
        super().__init__(message)
        self.span = span
        self.advice = f"help: {advice}"


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
        whole = nodes.Ref(encode.gradient.type, encode.span, encode.gradient)
        size = nodes.Size(INT, encode.span, whole)
        inliner = _Inliner(params, {update.state: size for update in encode.updates})
        inliner.function(encode.lets)
        capacities = (*encode.sizes, *(size for _ in encode.updates))
        pairs = zip(encode.values, capacities, strict=True)
        values = tuple(inliner.leaving(value, capacity) for value, capacity in pairs)
        encode = encode.with_values(tuple(inliner.lets), values)
    if decode is not None:
        sizes = {item.var: item.size for item in decode.fields if item.size is not None}
        inliner = _Inliner(params, sizes)
        inliner.function(decode.lets)
        result = inliner.result(decode.result)
        decode = replace(decode, lets=tuple(inliner.lets), result=result)
    return replace(program, encode=encode, decode=decode)


class _Inliner:
    def __init__(self, params: frozenset[nodes.Var], sizes: dict[nodes.Var, nodes.Expr]) -> None:
        self.lets: list[nodes.Let] = []
        self._params = params
        self._sizes = sizes
        self._values: dict[nodes.Var, nodes.Expr] = {}
        self._vectors: dict[nodes.Var, _Vector] = {}
        self._kept: dict[nodes.Var, nodes.Expr] = {}
        self._left = MAX_OPERATIONS
        self._depth = 0

    def function(self, lets: tuple[nodes.Let, ...]) -> None:
        """The lets at the top of a function: scalars stay, vectors are remembered."""
        for let in lets:
            self._values[let.var] = let.value
            if isinstance(let.value, nodes.Kept):
                self._vectors[let.var] = self._keep(let.var, let.value)
            elif isinstance(let.var.type, Array):
                self._vectors[let.var] = self._vector(let.value)
            elif isinstance(let.value, nodes.Reduce):
                self.lets.append(replace(let, value=self._reduce(let.value, {}, self.lets)))
            else:
                value = self._scalar(let.value, {}, self.lets)
                self.lets.append(replace(let, value=value))

    def leaving(self, value: nodes.Expr, capacity: nodes.Expr | None) -> nodes.Expr:
        """A field: a scalar, or a vector as Elementwise of as many elements as it can have."""
        if capacity is None:
            return self._scalar(value, {}, self.lets)
        return self._elementwise(value, capacity)

    def result(self, value: nodes.Expr) -> nodes.Expr:
        """What a decode gives: a Scatter that it ends with, or an Elementwise."""
        kept = self._kept.get(value.var) if isinstance(value, nodes.Ref) else None
        if isinstance(value, nodes.Ref) and isinstance(kept, nodes.Scatter):
            others = [let for let in self.lets if let.var is not value.var]
            if not any(value.var in free_vars(let.value) for let in others):
                self.lets = others
                return kept
        if isinstance(value, nodes.Scatter):
            return self._sources(value)
        return self._elementwise(value)

    def _elementwise(
        self, value: nodes.Expr, capacity: nodes.Expr | None = None
    ) -> nodes.Elementwise:
        vector = self._vector(value)
        position = nodes.Var("i", INT, value.span)
        lets: list[nodes.Let] = []
        index = nodes.Ref(INT, value.span, position)
        if capacity is None or capacity == vector.size:
            size, element = vector.size, vector.element(index, lets)
        else:
            size, element = capacity, self._guarded(vector, index, lets, value.span)
        return nodes.Elementwise(value.type, value.span, position, size, tuple(lets), element)

    def _keep(self, var: nodes.Var, value: nodes.Kept) -> _Vector:
        """Makes a vector a let of its own."""
        kind = value.type.element if isinstance(value.type, Array) else value.type
        kept = self._kept[var] = self._sources(value)
        self.lets.append(nodes.Let(var, kept, value.span))
        try:
            size = self._size(value)
        except DataDependentError:
            size = nodes.Size(INT, value.span, nodes.Ref(value.type, value.span, var))
        whole = nodes.Ref(value.type, value.span, var)
        return _Vector(size, lambda i, _: nodes.Index(kind, i.span, whole, i), True)

    def _sources(self, value: nodes.Kept) -> nodes.Expr:
        """A vector that is kept, with what it is made from in elementwise form."""

        def change(child: nodes.Expr) -> nodes.Expr:
            if isinstance(child.type, Array):
                return self._elementwise(child)
            return self._scalar(child, {}, self.lets)

        self._enter(value.span)
        made = rebuild(value, change)
        self._depth -= 1
        return made

    def _sample(self, value: nodes.Sample) -> _Vector:
        source, span = self._vector(value.source), value.span
        zero = nodes.Const(INT, span, 0)

        def element(i: nodes.Expr, lets: list[nodes.Let]) -> nodes.Expr:
            self._enter(span)
            drawn = nodes.Random(INT, span, zero, source.size, i, value.site, bits=32)
            index = _bind(nodes.Var("drawn", INT, span), drawn, lets)
            found = self._guarded(source, index, lets, span)
            self._depth -= 1
            return found

        return _Vector(self._size(value), element, False)

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
            case nodes.Sample():
                return self._sample(value)
            case _ if isinstance(value, nodes.Kept):
                return self._keep(nodes.Var("kept", value.type, value.span), value)
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
            message = f"more than {MAX_OPERATIONS} operations {end}"
            raise TooLargeError(message, span, _READ_LESS)
        if self._depth > MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} levels deep {end}"
            raise TooLargeError(message, span, _MAP_LESS)

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
                return self._vector(expr.array).size
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
        return self._guarded(self._vector(expr.array), index, lets, expr.span)

    def _guarded(
        self, vector: _Vector, index: nodes.Expr, lets: list[nodes.Let], span: Span
    ) -> nodes.Expr:
        """Element `index` of a vector, 0 where there is none."""
        if vector.is_stored:
            return vector.element(index, lets)
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
        case nodes.Filter():
            limit = None if expr.limit is None else change(expr.limit)
            source, flags = change(expr.source), change(expr.flags)
            return replace(expr, source=source, flags=flags, limit=limit)
        case nodes.BlockReduce():
            block, init, source = map(change, (expr.block, expr.init, expr.source))
            return replace(expr, block=block, init=init, source=source)
        case nodes.Sort():
            return replace(expr, source=change(expr.source))
        case nodes.Hadamard():
            return replace(expr, block=change(expr.block), source=change(expr.source))
        case nodes.TopK():
            return replace(expr, source=change(expr.source), count=change(expr.count))
        case nodes.Scatter():
            used = None if expr.used is None else change(expr.used)
            size, indices, values = map(change, (expr.size, expr.indices, expr.values))
            return replace(expr, size=size, indices=indices, values=values, used=used)
        case nodes.Const() | nodes.Ref() | nodes.KeyPart():
            return expr
        case _:
            raise TypeError(f"`expr` must not bind variables. Received: {expr!r}")
