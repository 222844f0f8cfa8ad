# SPDX-License-Identifier: Apache-2.0
"""States that are zero where a top_k chooses, written in the loop that looks for the largest.

    kept  = top_k(size, k)                                  size[i] depends on element i alone
    least = the smallest size[kept], last = the last of kept with this size
    s     = for each i:  size[i] < least || (size[i] == least && i > last)  ?  x[i]  :  0

The condition holds for all elements that are not in `kept`, and for no other, as long as no size is
NaN. So every x[i] can be
written as soon as it is known, and a zero over each of the few that are chosen, instead of a second
loop over gradient and states. What other loops compute of x[kept[j]] they read where it was
written, and so may overwrite the states that it was made of (in_place.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from compll.backends.blocks import roots
from compll.ir import nodes
from compll.ir.sizes import SizeError, size_of
from compll.ir.types import BOOL, FLOAT, INT
from compll.ir.walk import length_in_place, walk

_LARGEST = 3.4028234663852886e38
# Nodes of a value without names that are worth looking through; those of DGC are some 20.
_MOST = 1000


@dataclass(frozen=True)
class Masks:
    """How an encoder writes its states.

    Attributes:
        kept: what the top_k is called.
        size: what the top_k compares, of the gradient and the old states; its lets are the new
            states where nothing is chosen, which may not be finite yet.
        again: the same, of `written`.
        written: what the new states are called once they are written, in their order.
        steps: the loops of the encoder but for the one that writes the states.
    """

    kept: nodes.Var
    size: nodes.Elementwise
    again: nodes.Elementwise
    written: tuple[nodes.Var, ...]
    steps: tuple[nodes.Step, ...]


def masks(plan: nodes.Plan) -> Masks | None:
    """None: the encoder is not of this kind."""
    encode = plan.program.encode
    if encode is None or not encode.updates or not plan.encode:
        return None
    try:
        return _Match(plan, encode).run()
    except _OtherwiseError:
        return None


class _OtherwiseError(Exception):
    """The encoder is not of this kind."""


def _check(condition: bool) -> None:
    if not condition:
        raise _OtherwiseError


def _rewrite(expr: nodes.Expr, change: Callable[[nodes.Expr], nodes.Expr | None]) -> nodes.Expr:
    """An expression with all replaced that `change` has something for, the outermost first."""
    found = change(expr)
    if found is not None:
        return found
    updates: dict[str, Any] = {}
    for item in fields(expr):
        value = getattr(expr, item.name)
        if isinstance(value, nodes.Expr):
            updates[item.name] = _rewrite(value, change)
        elif isinstance(value, tuple) and value and isinstance(value[0], nodes.Expr):
            updates[item.name] = tuple(_rewrite(part, change) for part in value)
    return replace(expr, **updates) if updates else expr


def _plain(expr: nodes.Expr) -> nodes.Expr:
    """Without a conversion of a Bool there and back."""

    def change(part: nodes.Expr) -> nodes.Expr | None:
        match part:
            case nodes.Convert(type=kind, operand=nodes.Convert(operand=inner)) if (
                kind == BOOL and inner.type == BOOL
            ):
                return _rewrite(inner, change)
        return None

    return _rewrite(expr, change)


class _Match:
    def __init__(self, plan: nodes.Plan, encode: nodes.Encode) -> None:
        self.plan, self.encode = plan, encode
        self.states = [update.state for update in encode.updates]
        self.span = encode.span
        self.position = nodes.Var("i", INT, self.span)
        self.here = nodes.Ref(INT, self.span, self.position)
        self.n = nodes.Size(
            INT, self.span, nodes.Ref(encode.gradient.type, self.span, encode.gradient)
        )
        self.lets = {s.var: s.value for s in plan.encode if not isinstance(s, nodes.Sweep)}
        self.reduces = {
            var: reduce
            for step in plan.encode
            if isinstance(step, nodes.Sweep)
            for var, reduce in step.reduces
        }

    def run(self) -> Masks:
        last = self.plan.encode[-1]
        if not isinstance(last, nodes.Sweep) or last.reduces or last.size != self.n:
            raise _OtherwiseError
        first = len(self.encode.fields)
        writes = {write.field - first: write.value for write in last.writes}
        _check(sorted(writes) == list(range(len(self.states))))
        found = [self._update(writes[number]) for number in range(len(self.states))]
        size, least, latest = found[0][1:]
        _check(all(other[1:] == (size, least, latest) for other in found))
        values = tuple(value for value, *_ in found)
        _check(_is_number(size))
        top, source = self._top(size)
        self.kept = top.var
        self.count = self._count(top)
        self._check_bounds(size, least, latest)
        written = tuple(
            nodes.Var(f"next_{state.name}", state.type, state.span) for state in self.states
        )
        for value in (*values, size):
            self._check_early(value)
        self.values, self.written = values, written
        at = self.plan.encode.index(top)
        before, behind = self.plan.encode[: at + 1], self.plan.encode[at + 1 : -1]
        scalars = [
            value for value in self.encode.fields if not isinstance(value, nodes.Elementwise)
        ]
        for value in scalars:
            self._check_stateless(value)
        steps = (*before, *_used([self._step(step) for step in behind], scalars))
        source = replace(source, position=self.position, lets=())
        again = replace(source, value=self._read(size))
        return Masks(self.kept, self._named(source, size), again, written, steps)

    def _named(self, source: nodes.Elementwise, size: nodes.Expr) -> nodes.Elementwise:
        """A size with the new states as lets, each of which may need those before it."""
        lets: list[nodes.Let] = []

        def change(expr: nodes.Expr) -> nodes.Expr | None:
            for let, value in zip(lets, self.values, strict=False):
                if expr == value:
                    return nodes.Ref(FLOAT, self.span, let.var)
            return None

        for value, var in zip(self.values, self.written, strict=True):
            named = nodes.Var(var.name, FLOAT, self.span)
            lets.append(nodes.Let(named, _rewrite(value, change), self.span))
        return replace(source, lets=tuple(lets), value=_rewrite(size, change))

    def _expand(self, part: nodes.Expr, position: nodes.Expr) -> nodes.Expr:
        """The value of an element, without lets, its position being `position`."""
        part = _elementwise(part)
        _check(length_in_place(part) <= _MOST)
        known: dict[nodes.Var, nodes.Expr] = {part.position: position}

        def change(expr: nodes.Expr) -> nodes.Expr | None:
            return known.get(expr.var) if isinstance(expr, nodes.Ref) else None

        for let in part.lets:
            known[let.var] = _rewrite(let.value, change)
        return _plain(_rewrite(part.value, change))

    def _update(self, part: nodes.Expr) -> tuple[nodes.Expr, nodes.Expr, nodes.Var, nodes.Var]:
        """What is written where nothing is chosen, what is compared, and with what."""
        match self._expand(part, self.here):
            case nodes.Select(
                condition=nodes.Binary(
                    op="<=",
                    left=nodes.Math(function="abs", arguments=(held,)),
                    right=nodes.Const(value=most),
                ),
                yes=nodes.Select(
                    condition=nodes.Binary(
                        op="||",
                        left=nodes.Binary(op="<", left=size, right=nodes.Ref(var=least)),
                        right=nodes.Binary(
                            op="&&",
                            left=nodes.Binary(op="==", left=same, right=nodes.Ref(var=other)),
                            right=nodes.Binary(op=">", left=place, right=nodes.Ref(var=latest)),
                        ),
                    ),
                    yes=value,
                    no=nodes.Const(value=zero),
                ) as chosen,
                no=nodes.Const(value=nothing),
            ) if (held, same, place, other) == (chosen, size, self.here, least):
                _check(most == _LARGEST)
                # Masks write 0, and -0 is another number.
                _check(all(str(float(one)) == "0.0" for one in (zero, nothing)))
                return value, size, least, latest
        raise _OtherwiseError

    def _top(self, size: nodes.Expr) -> tuple[nodes.Store, nodes.Elementwise]:
        for step in self.plan.encode:
            if isinstance(step, nodes.Store) and isinstance(step.value, nodes.TopK):
                source = _elementwise(step.value.source)
                if source.size == self.n and self._expand(source, self.here) == size:
                    return step, source
        raise _OtherwiseError

    def _count(self, top: nodes.Store) -> nodes.Expr:
        """How many elements are chosen."""
        params = frozenset(param.var for param in self.plan.program.params)
        try:
            return size_of(top.value, self.lets, params, {})
        except SizeError as error:
            raise _OtherwiseError from error

    def _chosen(self, part: nodes.Expr) -> nodes.Expr:
        """The value of an element of a vector over `kept`, at the place of what was chosen."""
        part = _elementwise(part)
        _check(part.size == self.count)
        own = nodes.Ref(INT, self.span, part.position)
        place = nodes.Index(INT, self.span, nodes.Ref(self.kept.type, self.span, self.kept), own)
        zero = nodes.Const(INT, self.span, 0)
        is_inside = nodes.Binary(
            BOOL,
            self.span,
            "&&",
            nodes.Binary(BOOL, self.span, "<=", zero, self.here),
            nodes.Binary(BOOL, self.span, "<", self.here, self.n),
        )

        def change(expr: nodes.Expr) -> nodes.Expr | None:
            return self.here if expr == place else None

        def inside(expr: nodes.Expr) -> nodes.Expr | None:
            # What top_k gives is the number of an element.
            if isinstance(expr, nodes.Select) and expr.condition == is_inside:
                return _rewrite(expr.yes, inside)
            return None

        return _rewrite(_rewrite(self._expand(part, own), change), inside)

    def _check_bounds(self, size: nodes.Expr, least: nodes.Var, latest: nodes.Var) -> None:
        smallest, place = self.reduces.get(least), self.reduces.get(latest)
        if smallest is None or place is None:
            raise _OtherwiseError
        _check(smallest.reducer == "min" and _is(smallest.init, float("inf")))
        _check(self._chosen(smallest.source) == size)
        _check(place.reducer == "max" and _is(place.init, -1))
        match self._chosen(place.source):
            case nodes.Select(
                condition=nodes.Binary(op="==", left=left, right=nodes.Ref(var=var)),
                yes=yes,
                no=no,
            ):
                _check((left, var, yes) == (size, least, self.here) and _is(no, -1))
            case _:
                raise _OtherwiseError

    def _check_early(self, value: nodes.Expr) -> None:
        """What is written early depends on parameters, gradient and states, at its place alone."""
        allowed = {param.var for param in self.plan.program.params}
        vectors = {self.encode.gradient, *self.states}
        for expr in walk(value):
            match expr:
                case nodes.Index(array=nodes.Ref(var=var), index=index):
                    _check(var in vectors and index == self.here)
                case nodes.Ref(var=var):
                    _check(var in allowed | vectors | {self.position})
                case nodes.Random():
                    raise _OtherwiseError

    def _check_stateless(self, value: nodes.Expr) -> None:
        _check(not any(isinstance(e, nodes.Ref) and e.var in self.states for e in walk(value)))

    def _read(self, value: nodes.Expr) -> nodes.Expr:
        """What has been written is read instead of being computed again."""

        def change(expr: nodes.Expr) -> nodes.Expr | None:
            for made, var in zip(self.values, self.written, strict=True):
                if expr == made:
                    return nodes.Index(
                        FLOAT, self.span, nodes.Ref(var.type, self.span, var), self.here
                    )
            return None

        found = _rewrite(value, change)
        self._check_stateless(found)
        return found

    def _part(self, part: nodes.Expr) -> nodes.Elementwise:
        value = self._read(self._chosen(part))
        part = _elementwise(part)
        own = nodes.Ref(INT, self.span, part.position)
        place = nodes.Index(INT, self.span, nodes.Ref(self.kept.type, self.span, self.kept), own)
        let = nodes.Let(nodes.Var("i", INT, self.span), place, self.span)
        named = nodes.Ref(INT, self.span, let.var)

        def change(expr: nodes.Expr) -> nodes.Expr | None:
            return named if expr == self.here else None

        return replace(part, lets=(let,), value=_rewrite(value, change))

    def _step(self, step: nodes.Step) -> nodes.Step:
        if isinstance(step, nodes.Let):
            self._check_stateless(step.value)
            return step
        if not isinstance(step, nodes.Sweep):
            raise _OtherwiseError
        reduces = tuple(
            (var, replace(reduce, source=self._part(reduce.source))) for var, reduce in step.reduces
        )
        for _, reduce in reduces:
            self._check_stateless(reduce.init)
        writes = tuple(replace(write, value=self._part(write.value)) for write in step.writes)
        return replace(step, reduces=reduces, writes=writes)


def _elementwise(part: nodes.Expr) -> nodes.Elementwise:
    if not isinstance(part, nodes.Elementwise):
        raise _OtherwiseError
    return part


def _used(steps: list[nodes.Step], results: list[nodes.Expr]) -> list[nodes.Step]:
    """The steps that write something, and of reductions those that they or `results` need."""
    found: list[nodes.Step] = []
    needed = {expr.var for root in results for expr in walk(root) if isinstance(expr, nodes.Ref)}
    for step in reversed(steps):
        if isinstance(step, nodes.Sweep):
            reduces = tuple((var, reduce) for var, reduce in step.reduces if var in needed)
            step = replace(step, reduces=reduces)
            if not reduces and not step.writes:
                continue
        found.insert(0, step)
        needed |= {expr.var for r in roots(step) for expr in walk(r) if isinstance(expr, nodes.Ref)}
    return found


def _is_number(size: nodes.Expr) -> bool:
    """Whether a size is `x >= c ? x : d`, and so never NaN."""
    match size:
        case nodes.Select(
            condition=nodes.Binary(op=">=", left=left, right=nodes.Const()),
            yes=yes,
            no=nodes.Const(),
        ):
            return left == yes
    return False


def _is(expr: nodes.Expr, value: float) -> bool:
    return isinstance(expr, nodes.Const) and expr.value == value
