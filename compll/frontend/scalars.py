# SPDX-License-Identifier: Apache-2.0
"""Calls of built-in functions that give a scalar, and the names that stand for the call's key."""

from typing import TYPE_CHECKING

from compll.frontend import ast
from compll.frontend.scope import each
from compll.ir import nodes
from compll.ir.types import FLOAT, INT, UInt
from compll.source import Span

if TYPE_CHECKING:
    from compll.frontend.lower import Frame, Lowerer

MATH = {
    **dict.fromkeys(("abs", "sign", "sqrt", "exp2", "log2", "floor", "ceil", "round"), 1),
    **dict.fromkeys(("min", "max"), 2),
}
SCALAR = (*MATH, "bitcast", "random")
KEY_PARTS = ("seed", "step")
_OF_INTS_TOO = ("abs", "sign", "min", "max")


def key_part(lower: "Lowerer", name: str, span: Span) -> nodes.Expr:
    """`seed` or `step` where nothing else has that name."""
    if not lower.has_key:
        note = "help: only an Encode knows it; put what Decode needs into the packet"
        raise lower.refuse("E201", f"unknown name `{name}`", span, note)
    return nodes.KeyPart(INT, span, name)


def check_key(lower: "Lowerer", tree: ast.Call) -> None:
    """Refuses a call that draws noise where nothing gives it a key."""
    if not lower.has_key:
        note = "help: draw it in the Encode and put what Decode needs into the packet"
        raise lower.refuse("E402", f"`{tree.name}` in a Decode", tree.name_span, note)


def call(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    """Lowers a call of one of SCALAR."""
    if tree.name == "random":
        return _random(lower, tree, frame)
    if tree.name == "bitcast":
        return _bitcast(lower, tree, frame)
    lower.arity(tree, MATH[tree.name])
    use = f"{tree.name}({'x' if len(tree.arguments) == 1 else 'x, y'})"
    values = each(tree.arguments, lambda argument: lower.number(lower.scalar(argument, frame, use)))
    is_float = tree.name not in _OF_INTS_TOO or any(value.type == FLOAT for value in values)
    kind = FLOAT if is_float else INT
    return nodes.Math(
        kind, tree.span, tree.name, tuple(lower.convert(value, kind) for value in values)
    )


def _bitcast(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    named = tree.type_argument
    kind = lower.type_of(named, frame) if named is not None else None
    if kind not in (FLOAT, UInt(32)):
        span = tree.name_span if named is None else named.span
        message = "`bitcast` must be `bitcast<float>` or `bitcast<uint32>`"
        help_line = "help: give the type in angle brackets, as in `bitcast<uint32>(x)`"
        raise lower.refuse("E301", message, span, help_line)
    lower.arity(tree, 1)
    value = lower.number(lower.scalar(tree.arguments[0], frame))
    if (kind == FLOAT) == (value.type == FLOAT):
        wanted = "an integer" if kind == FLOAT else "a `float`"
        message = f"`bitcast<{kind}>` takes {wanted}, found `{value.type}`"
        help_line = f"help: declare it as {'`uint32`' if kind == FLOAT else '`float`'} before"
        raise lower.refuse("E302", message, tree.arguments[0].span, help_line)
    return nodes.Bitcast(kind, tree.span, value)


def _random(lower: "Lowerer", tree: ast.Call, frame: "Frame") -> nodes.Expr:
    kind = tree.type_argument
    if kind is None or kind.name not in ("float", "int") or kind.is_array or kind.width is not None:
        span = tree.name_span if kind is None else kind.span
        raise lower.refuse("E402", "`random` must be `random<float>` or `random<int>`", span)
    if frame.position is None:
        note = "help: draw it there, in a lambda of one argument: noise belongs to an element"
        message = "`random` outside the lambda of a `map` or `filter`"
        raise lower.refuse("E402", message, tree.name_span, note)
    check_key(lower, tree)
    lower.arity(tree, 2)
    site = lower.site(tree)
    again = lower.draws.again(frame.position, site)
    if again is not None:
        message = "this call reaches a `random` that its element has reached before"
        line = lower.report.line(tree.span)
        note = f"note: the `random` on line {line} gives an element the same number each time"
        help_line = "help: write a `random` for each number, or draw one into a variable"
        raise lower.refuse("E402", message, again, note, help_line)
    if kind.name == "int":
        low, high = each(
            tree.arguments, lambda bound: lower.integer(bound, frame, "a bound of `random<int>`")
        )
        return nodes.Random(INT, tree.span, low, high, frame.position, site)
    low, high = each(tree.arguments, lambda bound: lower.convert(lower.scalar(bound, frame), FLOAT))
    return nodes.Random(FLOAT, tree.span, low, high, frame.position, site)
