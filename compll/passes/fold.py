# SPDX-License-Identifier: Apache-2.0
"""Constants, and conversions that change nothing.

    1 << 2                        -->  4                 (never to NaN: its bits are the machine's)
    uintN(floor(x))               -->  uintN(x)     after clamping at 0, truncation is floor
    uintN(c ? 1 : 0)              -->  c ? uintN(1) : uintN(0)
    bool(uintN(c)), bool(int(x))  -->  c, bool(x)        for a condition c, an unsigned x
    0 <= i && i < n ? x : 0       -->  x                 for element i of n
    let y = x;  ... y ...         -->  ... x ...

Everything here is exact: folded or not, a program computes the same bits.
"""

import math
from dataclasses import replace

from compll.ir import nodes, semantics
from compll.ir.functions import Value
from compll.ir.types import BOOL, FLOAT, INT, Type, UInt
from compll.passes.inline import rebuild


def fold(program: nodes.Program) -> nodes.Program:
    """Folds both functions."""
    encode, decode = program.encode, program.decode
    with semantics.quiet():
        if encode is not None:
            encode = encode.with_values(*_function(encode.lets, encode.values))
            sizes = tuple(size and _fold(size, {}) for size in encode.sizes)
            encode = replace(encode, sizes=sizes)
        if decode is not None:
            lets, results = _function(decode.lets, (decode.result,))
            items = tuple(
                replace(item, size=item.size and _fold(item.size, {})) for item in decode.fields
            )
            decode = replace(decode, fields=items, lets=lets, result=results[0])
    return replace(program, encode=encode, decode=decode)


def folded(expr: nodes.Expr) -> nodes.Expr:
    """Folds one expression."""
    with semantics.quiet():
        return _fold(expr, {})


def _function(
    lets: tuple[nodes.Let, ...], values: tuple[nodes.Expr, ...]
) -> tuple[tuple[nodes.Let, ...], tuple[nodes.Expr, ...]]:
    """Folds lets and the values computed from them."""
    names: dict[nodes.Var, nodes.Expr] = {}
    folded = _lets(lets, names)
    values = tuple(_fold(value, names) for value in values)
    return tuple(folded), values


def _lets(lets: tuple[nodes.Let, ...], names: dict[nodes.Var, nodes.Expr]) -> list[nodes.Let]:
    kept = []
    for let in lets:
        value = _fold(let.value, names)
        if isinstance(value, nodes.Ref | nodes.Const):
            names[let.var] = value
        else:
            kept.append(replace(let, value=value))
    return kept


def _fold(expr: nodes.Expr, names: dict[nodes.Var, nodes.Expr]) -> nodes.Expr:
    match expr:
        case nodes.Ref():
            return replace(names[expr.var], span=expr.span) if expr.var in names else expr
        case nodes.Reduce():
            return replace(expr, init=_fold(expr.init, names), source=_fold(expr.source, names))
        case nodes.Elementwise():
            size = _fold(expr.size, names)
            inner = dict(names)
            lets = _lets(expr.lets, inner)
            value = _fold(expr.value, inner)
            lets = [replace(let, value=_inside(let.value, expr.position, size)) for let in lets]
            value = _inside(value, expr.position, size)
            if lets and isinstance(value, nodes.Ref) and value.var is lets[-1].var:
                value = lets.pop().value
            return replace(expr, size=size, lets=tuple(lets), value=value)
        case _:
            return _simplify(rebuild(expr, lambda child: _fold(child, names)))


def _inside(expr: nodes.Expr, position: nodes.Var, size: nodes.Expr) -> nodes.Expr:
    """What is known of an element's number: it is at least 0 and less than `size`."""
    match expr:
        case nodes.Binary(op="<=", left=nodes.Const(value=0), right=nodes.Ref(var=var)):
            return nodes.Const(BOOL, expr.span, True) if var is position else expr
        case nodes.Binary(op="<", left=nodes.Ref(var=var), right=right) if right == size:
            return nodes.Const(BOOL, expr.span, True) if var is position else expr
        case _:
            return _simplify(rebuild(expr, lambda child: _inside(child, position, size)))


def _simplify(expr: nodes.Expr) -> nodes.Expr:
    match expr:
        case nodes.Convert():
            return _convert(expr)
        case nodes.Unary(operand=nodes.Const() as operand):
            return _constant(expr, semantics.unary(expr.op, _value(operand)))
        case nodes.Binary(left=nodes.Const() as left, right=nodes.Const() as right):
            return _constant(
                expr, semantics.binary(expr.op, _value(left), _value(right), left.type)
            )
        case nodes.Bitcast(operand=nodes.Const() as operand):
            return _constant(expr, semantics.bitcast(_value(operand), expr.type))
        case nodes.Binary(op="&&", left=nodes.Const(value=True)):
            return expr.right
        case nodes.Binary(op="&&", right=nodes.Const(value=True)):
            return expr.left
        case nodes.Select(condition=nodes.Const() as condition):
            return expr.yes if condition.value else expr.no
        case nodes.Select() if expr.yes == expr.no:
            return expr.yes
        case nodes.Select(yes=nodes.Const() as yes, no=nodes.Const() as no) if expr.type == BOOL:
            return expr.condition if yes.value and not no.value else expr
        case nodes.Math() if all(isinstance(argument, nodes.Const) for argument in expr.arguments):
            values = [
                _value(argument) for argument in expr.arguments if isinstance(argument, nodes.Const)
            ]
            return _constant(expr, semantics.math(expr.function, values))
        case _:
            return expr


def _value(expr: nodes.Const) -> Value:
    return semantics.constant(expr.value, expr.type)


def _constant(expr: nodes.Expr, value: Value) -> nodes.Expr:
    if expr.type == FLOAT:
        return expr if math.isnan(value) else nodes.Const(FLOAT, expr.span, float(value))
    return nodes.Const(expr.type, expr.span, bool(value) if expr.type == BOOL else int(value))


def _fixed_bits(kind: Type) -> int | None:
    """Width of a UInt that is known now; 0 for other types, None when it depends on parameters."""
    if not isinstance(kind, UInt):
        return 0
    return kind.bits if isinstance(kind.bits, int) else None


def _convert(expr: nodes.Convert) -> nodes.Expr:
    operand, kind = expr.operand, expr.type
    if operand.type == kind:
        return operand
    bits = _fixed_bits(kind)
    if isinstance(operand, nodes.Const) and bits is not None:
        return _constant(expr, semantics.convert(_value(operand), operand.type, kind, bits))
    if isinstance(kind, UInt) and isinstance(operand, nodes.Math) and operand.function == "floor":
        return replace(expr, operand=operand.arguments[0])
    if (
        isinstance(operand, nodes.Select)
        and isinstance(operand.yes, nodes.Const)
        and isinstance(operand.no, nodes.Const)
    ):
        if bits is not None:
            yes, no = (
                _convert(replace(expr, operand=operand.yes)),
                _convert(replace(expr, operand=operand.no)),
            )
            return nodes.Select(kind, expr.span, operand.condition, yes, no)
        return expr
    if isinstance(operand, nodes.Convert):
        inner = operand.operand
        is_widening = isinstance(inner.type, UInt) and operand.type == INT
        if kind == BOOL and (inner.type == BOOL or is_widening):
            return _convert(replace(expr, operand=inner))
        if (kind == FLOAT and is_widening) or (inner.type == kind and is_widening):
            return _convert(replace(expr, operand=inner))
    return expr
