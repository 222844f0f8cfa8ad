# SPDX-License-Identifier: Apache-2.0
"""What a filter of places leaves of the gradient, kept beside the places.

    found = filter(range(n), flags of gradient[i]);  ... gradient[found[j]] ...
        -->  found, beside = filter(...);  ... beside[j] ...

The loop that looks for places has the gradient at hand. Later loops would look for each place in a
chunk that has left the nearer caches by then, which takes as long as a dozen elements in order.
"""

from dataclasses import dataclass, replace
from typing import TypeGuard

from compll.ir import nodes
from compll.ir.types import FLOAT
from compll.ir.walk import changed, walk


@dataclass(frozen=True, slots=True)
class FilterBeside(nodes.Filter):
    """A filter of places: `beside` is what `vector` has at each of those that it leaves."""

    vector: nodes.Var
    beside: nodes.Var


def with_beside(plan: nodes.Plan) -> nodes.Plan:
    """A plan whose encoder reads its gradient once where it has filtered places of it."""
    encode = plan.program.encode
    if encode is None:
        return plan
    gradient = encode.gradient
    steps = plan.encode
    for number in range(len(steps)):
        step = steps[number]
        if not isinstance(step, nodes.Store) or not _is_of_places(step.value, gradient):
            continue
        found = step.value
        beside = nodes.Var(f"{step.var.name}_{gradient.name}", gradient.type, found.span)
        later = tuple(_read(other, gradient, step.var, beside) for other in steps[number + 1 :])
        if later != steps[number + 1 :]:
            parts = (found.source, found.flags, found.limit)
            value = FilterBeside(found.type, found.span, *parts, gradient, beside)
            steps = (*steps[:number], replace(step, value=value), *later)
    return replace(plan, encode=steps)


def _is_of_places(value: nodes.Expr, gradient: nodes.Var) -> TypeGuard[nodes.Filter]:
    """Whether a filter chooses numbers of elements by what the gradient has there.

    Of a longer range places would be read behind the gradient, where an element is 0.
    """
    if not isinstance(value, nodes.Filter):
        return False
    source, flags = value.source, value.flags
    if not isinstance(source, nodes.Elementwise) or not isinstance(flags, nodes.Elementwise):
        return False
    if not isinstance(source.size, nodes.Size) or not _is_ref(source.size.array, gradient):
        return False
    is_range = isinstance(source.value, nodes.Ref) and source.value.var is source.position
    return (
        is_range
        and not source.lets
        and any(
            isinstance(expr, nodes.Index)
            and _is_ref(expr.array, gradient)
            and _is_ref(expr.index, flags.position)
            for expr in walk(flags)
        )
    )


def _is_ref(expr: nodes.Expr, var: nodes.Var) -> bool:
    return isinstance(expr, nodes.Ref) and expr.var is var


def _read(step: nodes.Step, gradient: nodes.Var, found: nodes.Var, beside: nodes.Var) -> nodes.Step:
    """A step that reads `beside` where it read the gradient at a place of `found`."""

    def part(value: nodes.Expr) -> nodes.Expr:
        if isinstance(value, nodes.Elementwise):
            return _part(value, gradient, found, beside)
        return changed(value, part)

    if isinstance(step, nodes.Let):
        return step
    if isinstance(step, nodes.Store):
        return replace(step, value=part(step.value))
    reduces = tuple((var, replace(r, source=part(r.source))) for var, r in step.reduces)
    writes = []
    for write in step.writes:
        value = part(write.value)
        if not isinstance(value, nodes.Elementwise | nodes.Scatter):
            raise TypeError(f"a sweep writes vectors only. Received: {value!r}")
        writes.append(replace(write, value=value))
    return replace(step, reduces=reduces, writes=tuple(writes))


def _part(
    part: nodes.Elementwise, gradient: nodes.Var, found: nodes.Var, beside: nodes.Var
) -> nodes.Elementwise:
    named: dict[nodes.Var, nodes.Expr] = {}
    is_changed = False

    def change(expr: nodes.Expr) -> nodes.Expr:
        nonlocal is_changed
        if isinstance(expr, nodes.Index) and _is_ref(expr.array, gradient):
            place = expr.index
            if isinstance(place, nodes.Ref):
                place = named.get(place.var, place)
            if isinstance(place, nodes.Index) and _is_ref(place.array, found):
                is_changed = True
                array = nodes.Ref(beside.type, expr.span, beside)
                return nodes.Index(FLOAT, expr.span, array, place.index)
        return changed(expr, change)

    lets = []
    for let in part.lets:
        named[let.var] = let.value
        lets.append(replace(let, value=change(let.value)))
    value = change(part.value)
    if not is_changed:
        return part
    return replace(part, lets=_needed(lets, value), value=value)


def _needed(lets: list[nodes.Let], value: nodes.Expr) -> tuple[nodes.Let, ...]:
    """The lets that a value needs, itself or through others."""
    found: list[nodes.Let] = []
    roots = [value]
    for let in reversed(lets):
        if any(_is_ref(expr, let.var) for root in roots for expr in walk(root)):
            found.insert(0, let)
            roots.append(let.value)
    return tuple(found)
