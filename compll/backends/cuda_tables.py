# SPDX-License-Identifier: Apache-2.0
"""What codes of few bits alone make: computed once for each of them by the threads of a warp."""

import dataclasses

from compll.backends.c_common import max_bits
from compll.backends.cuda_reduce import Item
from compll.backends.cuda_scope import Scope
from compll.backends.cuda_side import Side
from compll.ir import nodes
from compll.ir.types import FLOAT, INT, UInt
from compll.ir.walk import changed, children, free_vars, walk

# A warp has 32 threads.
_MAX_BITS = 5


def only_code(part: nodes.Elementwise, side: Side) -> nodes.Index | None:
    """The code of a packet that alone makes an element, if few are different; None: no such."""
    roots = [part.value, *(let.value for let in part.lets)]
    found = {expr for root in roots for expr in walk(root) if isinstance(expr, nodes.Index)}
    known = {let.var for let in part.lets} | side.known() | {part.position}
    if len(found) != 1 or not set().union(*map(free_vars, roots)) <= known:
        return None
    [code] = found
    is_few = isinstance(code.type, UInt) and max_bits(code.type, side.program.params) <= _MAX_BITS
    is_here = isinstance(code.index, nodes.Ref) and code.index.var is part.position
    fields = {item.var for item in side.fields}
    is_field = isinstance(code.array, nodes.Ref) and code.array.var in fields

    def needs_more(expr: nodes.Expr) -> bool:
        if expr == code:
            return False
        if isinstance(expr, nodes.Ref):
            return expr.var is part.position
        return isinstance(expr, nodes.Random) or any(map(needs_more, children(expr)))

    return code if is_few and is_here and is_field and not any(map(needs_more, roots)) else None


def looked_up(
    scope: Scope, item: Item, code: nodes.Index, values: str, width: nodes.Param | None
) -> Item:
    """A loop over codes that asks for what each of them makes.

    Args:
        scope: of the loop.
        item: the loop as it is without.
        code: what it reads.
        values: C++ for what takes the elements.
        width: a parameter that the kernel is compiled for each value of, if any.
    """
    var = nodes.Var("code_here", code.type, code.span)

    def change(expr: nodes.Expr) -> nodes.Expr:
        if expr == code:
            return nodes.Ref(code.type, code.span, var)
        return changed(expr, change)

    lets = tuple(dataclasses.replace(let, value=change(let.value)) for let in item.part.lets)
    part = dataclasses.replace(item.part, lets=lets, value=change(item.part.value))
    function, table = scope.names.fresh("made_of"), scope.names.fresh("table")
    statements, text = scope.element(part, FLOAT, "0")
    before = [
        *item.before,
        f"const auto {function} = [&]({scope.c.type(code.type)} {scope.names.of(var)}) {{",
        *(f"  {line}" for line in statements),
        f"  return {text};",
        "};",
        f"const auto {table} = table_of<{_bits(code, width)}>({function});",
    ]
    looked = scope.names.fresh("looked_up")
    return dataclasses.replace(
        item,
        part=dataclasses.replace(item.part, lets=(), value=code),
        kind=code.type,
        before=before,
        # Asked for by all threads, whether they have the element or not.
        sink=lambda text: (
            f"const float {looked} = {table}({text}); {values}[u] = is_inside ? {looked} : 0.0f;"
        ),
    )


def _bits(code: nodes.Index, width: nodes.Param | None) -> str:
    """C++ for how many bits codes have, as far as the kernel is compiled for that."""
    bits = code.type.bits if isinstance(code.type, UInt) else None
    while isinstance(bits, nodes.Convert) and bits.type == INT:
        bits = bits.operand
    if isinstance(bits, int):
        return str(bits)
    is_width = isinstance(bits, nodes.Ref) and width is not None and bits.var is width.var
    return "kWidth" if is_width else "kAnyWidth"
