# SPDX-License-Identifier: Apache-2.0
"""The verifier refuses every expression whose type is not that of its parts."""

import random
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

import compll
from compll import passes
from compll.ir import nodes
from compll.ir.types import BOOL, FLOAT, INT, Array, UInt
from compll.ir.verify import verify
from compll.ir.verify_types import IrError, check_types
from compll.ir.walk import children
from compll.source import Span
from tests.compll.generated_programs import generate
from tests.compll.support import SPECS, spec

# Which together have every node.
SEEDS = (0, 1, 2, 3)
SPAN = Span(0, 1)
# No expression has it, and of no part is it the right one.
ODD = Array(Array(BOOL))
ANY_VECTOR = {"array", "source"}  # of Size, Reduce, BlockReduce and Map
NODES = {
    *("Const", "Ref", "Size", "Unary", "Binary", "Select", "Convert", "Bitcast", "Math", "Index"),
    *("KeyPart", "Random", "Range", "Map", "Reduce", "Apply", "Elementwise", "Sample", "Filter"),
    *("Sort", "TopK", "Scatter", "BlockReduce", "Hadamard"),
}


def const(kind, value):
    return nodes.Const(kind, SPAN, value)


def name(kind):
    return nodes.Ref(kind, SPAN, nodes.Var("x", kind, SPAN))


def inside(item: object) -> Iterator[nodes.Expr]:
    """All expressions of a program, or of a part of one."""
    if isinstance(item, nodes.Expr):
        yield item
    if isinstance(item, tuple):
        for one in item:
            yield from inside(one)
    elif hasattr(item, "__dataclass_fields__") and not isinstance(item, nodes.Var):
        for one in fields(item):
            yield from inside(getattr(item, one.name))


def expressions() -> list[nodes.Expr]:
    programs = [spec(path.stem) for path in sorted(SPECS.glob("*.pse"))]
    programs += [compll.compile_text(generate(random.Random(s)).text, "made") for s in SEEDS]
    found: list[nodes.Expr] = []
    for program in programs:
        inlined = dict(passes.stages(program))["inline"]
        found += [*inside(program), *inside(inlined)]
    return found


def broken(expr: nodes.Expr) -> Iterator[nodes.Expr]:
    """The same with another type, and with each part of another type."""
    yield replace(expr, type=ODD)
    for item in fields(expr):
        part = getattr(expr, item.name)
        is_any = item.name in ANY_VECTOR and isinstance(
            expr, nodes.Size | nodes.Reduce | nodes.BlockReduce | nodes.Map
        )
        if isinstance(part, nodes.Expr):
            yield replace(expr, **{item.name: name(INT if is_any else ODD)})
        elif isinstance(part, tuple) and part and isinstance(part[0], nodes.Expr):
            yield replace(expr, **{item.name: (name(ODD), *part[1:])})
            yield replace(expr, **{item.name: part[1:]})


def test_no_wrong_type_passes():
    seen = dict.fromkeys(NODES, 0)
    for expr in expressions():
        check_types(expr)
        for wrong in broken(expr):
            with pytest.raises(IrError):
                check_types(wrong)
            seen[type(expr).__name__] += 1
    assert min(seen.values()) > 0, seen
    assert set(seen) == NODES


@pytest.mark.parametrize(
    "wrong",
    [
        const(FLOAT, 0.1),  # binary32 has no such number
        const(FLOAT, 1),
        const(INT, 1.0),
        const(INT, True),
        const(INT, 2**63),
        const(UInt(3), 8),
        const(UInt(3), -1),
        const(BOOL, 1),
        const(Array(INT), 1),
        nodes.Unary(FLOAT, SPAN, "~", name(FLOAT)),
        nodes.Unary(INT, SPAN, "!", name(INT)),
        nodes.Unary(INT, SPAN, "+", name(INT)),
        nodes.Binary(FLOAT, SPAN, "%", name(FLOAT), name(FLOAT)),
        nodes.Binary(INT, SPAN, "&&", name(INT), name(INT)),
        nodes.Binary(BOOL, SPAN, "+", name(BOOL), name(BOOL)),
        nodes.Binary(INT, SPAN, "<", name(INT), name(INT)),
        nodes.Binary(INT, SPAN, "+", name(INT), name(FLOAT)),
        nodes.Binary(UInt(4), SPAN, "+", name(UInt(4)), name(UInt(4))),
        nodes.Math(INT, SPAN, "sqrt", (name(INT),)),
        nodes.Math(FLOAT, SPAN, "sin", (name(FLOAT),)),
        nodes.Bitcast(INT, SPAN, name(FLOAT)),
        nodes.KeyPart(INT, SPAN, "rank"),
        nodes.Random(FLOAT, SPAN, name(FLOAT), name(FLOAT), name(INT), 0, 8),
        nodes.Random(UInt(8), SPAN, name(UInt(8)), name(UInt(8)), name(INT), 0),
        nodes.Reduce(UInt(8), SPAN, "sum", name(UInt(8)), name(Array(UInt(8)))),
        nodes.Index(FLOAT, SPAN, name(Array(FLOAT)), name(FLOAT)),
        nodes.Hadamard(Array(INT), SPAN, const(INT, 16), name(Array(INT))),
        nodes.Expr(FLOAT, SPAN),
    ],
)
def test_what_no_program_has(wrong):
    with pytest.raises(IrError):
        check_types(wrong)


def test_nan_and_what_depends_on_parameters_are_constants():
    check_types(const(FLOAT, float("nan")))
    check_types(const(FLOAT, float("inf")))
    check_types(const(UInt(name(INT)), 70000))


def test_a_program_is_refused_wherever_it_is_wrong():
    """In lets, lambdas, sizes and fields, before and behind inlining."""
    program = spec("qsgd")
    for one, is_inlined in ((program, False), (dict(passes.stages(program))["dead"], True)):
        verify(one, is_inlined=is_inlined)
        encode = one.encode
        for number, let in enumerate(encode.lets):
            if not list(children(let.value)):
                continue
            wrong = next(broken(let.value))
            lets = (*encode.lets[:number], replace(let, value=wrong), *encode.lets[number + 1 :])
            with pytest.raises(IrError):
                verify(replace(one, encode=replace(encode, lets=lets)), is_inlined=is_inlined)
