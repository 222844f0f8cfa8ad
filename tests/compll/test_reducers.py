# SPDX-License-Identifier: Apache-2.0
"""Reducers and orders are known by what they compute, in many spellings, and nothing else is."""

import numpy as np
import pytest

import compll
from compll.ir import nodes
from tests.compll.support import encoder

SPELLINGS = {
    "sum": ["return a + b;", "T c = a; c += b; return c;", "return plus(b, a);"],
    "prod": ["return b * a;"],
    "max": [
        "return a > b ? a : b;",
        "if (a > b) { return a; } return b;",
        "if (a > b) { return a; } else { return b; }",
        "if (!(a > b)) { return b; } return a;",
        "if (a <= b) return b; return a;",
        "T c = b; if (a >= b) { c = a; } return c;",
        "return max(b, a);",
        "return larger(a, b);",
        "uint1 c = a > b; return c == 0 ? b : a;",
        "if (a > b) return max(a, b); return b;",
    ],
    "min": [
        "if (a > b) { return b; } return a;",
        "if (b < a) return b; else return a;",
        "return min(a, b);",
        "if (!(b <= a)) { return a; } return b;",
    ],
}
OF_INTS = {
    "count": [
        "return a + (b != 0);",
        "return (b != 0) + a;",
        "return (b == 0 ? 0 : 1) + a;",
        "if (b != 0) { return a + 1; } return a;",
        "if (b == 0) return a; return 1 + a;",
        "uint1 c = 0; if (b) { c = 1; } return c + a;",
        "return a + !!b;",
        "return a + !(b == 0);",
    ],
    "and": [
        "return a && b;",
        "return (b != 0) * (a != 0);",
        "return (a != 0) & (b != 0);",
        "if (a != 0) { return b != 0; } return 0;",
        "if (a) { if (b) { return 1; } } return 0;",
        "if (a == 0) return 0; return b != 0 ? 1 : 0;",
        "return !(!a || !b);",
        "return a && b ? 7 != 0 : 0;",
    ],
    "or": [
        "return a || b;",
        "return (a != 0) | (b != 0);",
        "if (a != 0) { return 1; } return b != 0;",
        "if (a == 0) { if (b == 0) { return 0; } } return 1;",
        "return !(a == 0 && !b);",
    ],
}
REDUCERS = [
    (kind, name, body)
    for names, kinds in ((SPELLINGS, ("float", "int")), (OF_INTS, ("int",)))
    for name, bodies in names.items()
    for body in bodies
    for kind in kinds
]
NONE = [
    "return a;",
    "return a - b;",
    "return a + a;",
    "return a > b ? b : b + 0;",
    "return a > b ? a : a;",
    "return a && a;",
    "return a != 0;",
    "return b + (a != 0);",
    "return a + (b != 1);",
    "return a + (b == 0);",
    "if (b != 0) { return a + 2; } return a;",
    "if (a > 0) return a; return b;",
    "if (a > b) return a; return max(a, b) + 1;",
    "if (a > b) return min(a, b); return b;",
    "uint8 c = a; return c + b;",
    "uint8 c = a; uint8 d = b; return c > d ? c : d;",
    "float c = a; float d = b; return c + d;",
    "float c = a; return c > b ? a : b;",
    "return a * b != 0;",
    "return a & b;",
    "return a && b ? 2 : 0;",
    "return !(a && b);",
]
HELPERS = """
    lambda_func plus = [&](T a, T b) -> T { return a + b; }
    lambda_func larger = [&](T x, T y) -> T { if (y < x) { return x; } return y; }
"""


def values(program: compll.Program) -> list[nodes.Expr]:
    assert program.encode is not None
    return [let.value for let in program.encode.lets]


def reduction(kind: str, body: str) -> compll.Program:
    text = f"{HELPERS} T r = reduce(map(gradient, [&](float g) -> T {{ return g; }}), 0, "
    text += f"[&](T a, T b) -> T {{ {body} }}); uint32 s = r; out = concat(s);"
    return compll.compile_text(encoder(text).replace("T ", f"{kind} "), "foo")


@pytest.mark.parametrize(("kind", "name", "body"), REDUCERS)
def test_a_reducer_has_many_spellings(kind, name, body):
    [found] = [value for value in values(reduction(kind, body)) if isinstance(value, nodes.Reduce)]
    assert found.reducer == name


@pytest.mark.parametrize("body", NONE)
def test_what_computes_something_else_is_no_reducer(body):
    with pytest.raises(compll.CompileError) as caught:
        reduction("int", body)
    assert [found.code for found in caught.value.diagnostics] == ["E401"]


def order(kind: str, element: str, body: str, result: str = "uint1") -> compll.Program:
    text = f"{element}* v = map(gradient, [&](float g) -> {element} {{ return g * 9; }});"
    text += f"{element}* s = sort(v, [&]({kind} a, {kind} b) -> {result} {{ {body} }});"
    text += "out = concat(map(s, [&](float x) -> float { return x; }));"
    return compll.compile_text(encoder(text), "foo")


LESS = [
    "return a < b;",
    "return b > a;",
    "if (a < b) { return 1; } return 0;",
    "if (a < b) return 1; else return 0;",
    "return a < b ? 1 : 0;",
    "uint1 c = a < b; return c != 0;",
    "if (!(a < b)) return 0; return 1;",
]


@pytest.mark.parametrize(
    ("kind", "element"),
    [
        ("float", "float"),
        ("int", "int"),
        ("uint8", "uint8"),
        ("int", "uint8"),
        ("uint32", "uint32"),
    ],
)
def test_an_order_has_many_spellings(kind, element):
    of_ints = ["return !(a >= b);", "if (a >= b) { return 0; } return 1;"]
    for body in [*LESS, *(of_ints if kind != "float" else [])]:
        for result in ("uint1", "int", "float"):
            for is_greater in (False, True):
                swapped = body.translate(str.maketrans("<>", "><")) if is_greater else body
                program = order(kind, element, swapped, result)
                [found] = [v for v in values(program) if isinstance(v, nodes.Sort)]
                assert found.is_descending == is_greater, body
    x = np.array([3, 1, 2], np.float32)
    made = compll.Reference(order(kind, element, LESS[0])).encode(x)
    np.testing.assert_array_equal(made[16:].view(np.float32), np.sort(x) * 9)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("float", "return a <= b;"),
        ("float", "return !(a >= b);"),  # is true of NaN
        ("float", "return abs(a) < abs(b);"),
        ("int", "return a < a;"),
        ("int", "return a < b || a == b;"),
        ("int", "uint4 c = a; uint4 d = b; return c < d;"),
        ("int", "float c = a; float d = b; return c < d;"),
        ("int", "return a < b ? 2 : 0;"),  # as a uint1, 0
        ("int", "return a < b ? 1 : 1;"),
    ],
)
def test_what_compares_otherwise_is_no_order(kind, body):
    with pytest.raises(compll.CompileError) as caught:
        order(kind, kind, body)
    assert [found.code for found in caught.value.diagnostics] == ["E405"]


def test_a_long_lambda_is_looked_through_quickly():
    """Written out, each of these has 2^60 operands."""
    chain = "".join(f"int c{k + 1} = c{k} < b ? c{k} + c{k} : c{k} * c{k};" for k in range(60))
    halves = "".join(f"uint8 d{k + 1} = a < b ? d{k} : d{k} + {k};" for k in range(60))
    for body in (f"int c0 = a; {chain} return c60;", f"uint8 d0 = a; {halves} return d60;"):
        with pytest.raises(compll.CompileError, match="E401"):
            reduction("int", body)


def test_a_chain_of_arms_is_looked_through_as_far_as_it_goes():
    chain = "int x = 0;" + "".join(f" if (a > {k}) {{ x = a; }}" for k in range(1500))
    for end in ("if (x) { return a; } return b;", "uint8 y = x; return y;"):
        with pytest.raises(compll.CompileError, match="E401"):
            reduction("int", f"{chain} {end}")


@pytest.mark.parametrize("kind", ["float", "int"])
@pytest.mark.parametrize("element", ["uint8", "uint1", "uint32"])
@pytest.mark.parametrize("body", ["return a + (b != 0);", "return b ? a + 1 : a;"])
def test_a_count_of_what_was_cut_off_is_no_count(kind, element, body):
    """Of 0.5 and 256 a uint8 is 0, which nobody counts."""
    text = f"{kind}* v = map(gradient, [&](float g) -> {kind} {{ return g; }}); "
    text += (
        f"uint32 s = reduce(v, 0, [&](int a, {element} b) -> int {{ {body} }}); out = concat(s);"
    )
    with pytest.raises(compll.CompileError, match="E305"):
        compll.compile_text(encoder(text), "foo")
