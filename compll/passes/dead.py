# SPDX-License-Identifier: Apache-2.0
"""Values that nobody reads.

    let x = e;  (x unused)                       -->
    each i < n { let y = e; 1 }  (y unused)      -->  each i < n { 1 }

What fold leaves behind goes here: names that stood for a constant or for another name, arms of a
condition that is known. A scatter stays: it decides whether a packet is refused.
"""

from dataclasses import replace

from compll.ir import nodes
from compll.ir.walk import free_vars
from compll.passes.inline import rebuild


def dead(program: nodes.Program) -> nodes.Program:
    """Drops the lets of both functions whose values do not reach a field, a state or the result."""
    encode, decode = program.encode, program.decode
    if encode is not None:
        encode = encode.with_values(*_function(encode.lets, encode.values))
    if decode is not None:
        lets, results = _function(decode.lets, (decode.result,))
        decode = replace(decode, lets=lets, result=results[0])
    return replace(program, encode=encode, decode=decode)


def _function(
    lets: tuple[nodes.Let, ...], values: tuple[nodes.Expr, ...]
) -> tuple[tuple[nodes.Let, ...], tuple[nodes.Expr, ...]]:
    # Within expressions first: what only a dropped let reads is not read.
    lets = tuple(replace(let, value=_within(let.value)) for let in lets)
    values = tuple(map(_within, values))
    return _used(lets, values), values


def _used(lets: tuple[nodes.Let, ...], values: tuple[nodes.Expr, ...]) -> tuple[nodes.Let, ...]:
    wanted = set().union(*map(free_vars, values))
    kept = []
    for let in reversed(lets):
        if let.var in wanted or isinstance(let.value, nodes.Scatter):
            kept.append(let)
            wanted |= free_vars(let.value)
    return tuple(reversed(kept))


def _within(expr: nodes.Expr) -> nodes.Expr:
    match expr:
        case nodes.Reduce():
            return replace(expr, init=_within(expr.init), source=_within(expr.source))
        case nodes.Elementwise():
            lets, values = _function(expr.lets, (expr.value,))
            return replace(expr, size=_within(expr.size), lets=lets, value=values[0])
        case _:
            return rebuild(expr, _within)
