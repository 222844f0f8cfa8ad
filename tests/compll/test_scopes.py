# SPDX-License-Identifier: Apache-2.0
"""Lambdas: whose variables they see, and that what they grow into has an end."""

import numpy as np
import pytest

import compll
from tests.compll.support import encoder

PREFIX = 16
X = np.arange(1, 5, dtype=np.float32)


def refused(body):
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(encoder(body), "foo")
    return [(item.code, item.message) for item in caught.value.diagnostics]


SCALE = """
    float k = 2;
    lambda_func f = [&](float x) -> float { return x * k; }
"""


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("lambda_func g = [&](float k) -> float { return f(k); }", [2, 4, 6, 8]),
        ("lambda_func g = [&](float x) -> float { float k = 9; return f(x); }", [2, 4, 6, 8]),
        ("lambda_func g = [&](float x) -> float { return f(x); } k = 3;", [3, 6, 9, 12]),
        # A lambda sees what stands before it: the outer k, not the one that hides it later.
        (
            "lambda_func g = [&](float x) -> float {"
            "  lambda_func h = [&](float y) -> float { return y * k; }"
            "  float k = 9;"
            "  return h(x); }",
            [2, 4, 6, 8],
        ),
        # `f` inside the new `f` is the one outside, so this is no recursion.
        (
            "lambda_func g = [&](float x) -> float {"
            "  lambda_func f = [&](float y) -> float { return f(y) + 1; }"
            "  return f(x); }",
            [3, 5, 7, 9],
        ),
        # A built-in function stays what it was where it was used.
        (
            "lambda_func g = [&](float x) -> float { return abs(-x); }"
            "lambda_func abs = [&](float x) -> float { return 7; }",
            [1, 2, 3, 4],
        ),
    ],
)
def test_a_lambda_means_what_it_means_where_it_stands(rest, expected):
    text = encoder(f"{SCALE}{rest}\nfloat* y = map(gradient, g);\nout = concat(y);")
    program = compll.compile_text(text, "foo")
    assert compll.Reference(program).encode(X)[PREFIX:].view(np.float32).tolist() == expected


def test_reducers_and_widths_are_scoped_too():
    text = """
    lambda_func width = [&](float x) -> uint<b> { return x; }
    lambda_func f = [&](float b) -> float { return width(b); }
    float* y = map(gradient, f);
    out = concat(y);"""
    program = compll.compile_text(encoder(text, ", uint8 b"), "foo")
    packet = compll.Reference(program, b=2).encode(X)
    assert packet[PREFIX:].view(np.float32).tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize("declared", ["int b;", "int b = 0;", "int b = 99;"])
@pytest.mark.parametrize("width", ["b", "b + 1 - 1", "w"])
def test_a_width_is_captured_where_the_lambda_is_used(declared, width):
    inside = "int w = b;" if width == "w" else ""
    text = f"{declared} lambda_func q = [&](float g) -> uint<4> {{"
    text += f" {inside} uint<{width}> low = g * 9; return low; }}"
    used = "out = concat(map(gradient, q));"
    program = compll.compile_text(encoder(f"{text} b = 2; {used}"), "foo")
    assert compll.Reference(program).encode(X)[PREFIX:].tolist() == [0x33, 0x33]
    compll.compile_text(encoder(f"{text} out = concat(gradient);"), "foo")
    message = "a width must be from 1 to 16. Received: 17"
    assert refused(f"{text} b = 17; {used}") == [("E304", message)]
    [(code, message)] = refused(f"{text} b = gradient[0]; {used}")
    assert (code, message) == ("E304", "a width must be made of numbers and parameters")


def chain(length):
    lambdas = [
        f"lambda_func f{k} = [&](float x) -> float {{ return f{k - 1}(x); }}"
        for k in range(1, length)
    ]
    first = "lambda_func f0 = [&](float x) -> float { return x; }"
    return "\n".join([first, *lambdas, f"float* y = map(gradient, f{length - 1});"])


RECURSIVE = "lambda_func f = [&](float x) -> float { return f(x); } float* y = map(gradient, f);"


def test_recursion_is_refused_once():
    assert refused(f"{RECURSIVE} out = concat(y);") == [("E202", "unknown function `f`")]


def test_uses_of_a_refused_lambda_are_not_reported():
    body = "lambda_func f = [&](float x) -> float { return q; } float a = f(1); out = concat(a);"
    assert refused(body) == [("E201", "unknown name `q`")]


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("if (gradient.size > 0) { x = nam; }", ("E201", "unknown name `nam`")),
        ("if (gradient.size > 0) { int k = 1; } else { x = nam; }", ("E201", "unknown name `nam`")),
        ("if (gradient.size > 0) float x = 1;", ("E203", "`x` is declared twice")),
        ("if (1) { if (2) { x = nam; } }", ("E201", "unknown name `nam`")),
    ],
)
def test_an_error_inside_an_if_brings_no_second_one(inside, expected):
    assert refused(f"float x = 0; {inside} float y = x + 1; out = concat(x, y);") == [expected]
    # A variable that no error is about is still missed.
    found = refused(f"float x = 0; float z; {inside} float w = z; out = concat(x);")
    assert [code for code, _ in found] == sorted([expected[0], "E205"])
    in_lambda = f"lambda_func f = [&](float g) -> float {{ float x = 0; {inside} return x; }}"
    assert refused(f"{in_lambda} out = concat(map(gradient, f));") == [expected]


def test_lambdas_call_lambdas_up_to_a_depth():
    assert compll.generate(compll.compile_text(encoder(f"{chain(60)} out = concat(y);"), "foo"))
    ((code, message),) = refused(f"{chain(118)} out = concat(y);")
    assert (code, message[:28]) == ("E102", "nested more than 128 levels ")


@pytest.mark.parametrize("operator", ["-", "*", "<<", "|", "&&"])
def test_chains_of_operators_have_up_to_64(operator):
    body = "int n = gradient.size; uint8 y = n{}; out = concat(y);"
    chain_of = f" {operator} n"
    assert compll.generate(compll.compile_text(encoder(body.format(chain_of * 64)), "foo"))
    found = refused(body.format(chain_of * 65))
    assert found == [("E102", "more than 64 operators in a row")]
    codes = [code for code, _ in refused(f"float y = gradient{'[0]' * 64}; out = concat(y);")]
    assert codes and "E102" not in codes
    found = refused(f"float y = gradient{'[0]' * 65}; out = concat(y);")
    assert found == [("E102", "more than 64 indices in a row")]


def test_nesting_in_called_lambdas_counts():
    """Each level alone is allowed; together they would be deeper than Python's stack."""
    deep = "abs(" * 50 + "{}" + ")" * 50
    lambdas = "".join(
        f"lambda_func f{k} = [&](float x) -> float {{ return "
        + deep.format(f"f{k - 1}(x)" if k else "x")
        + "; }"
        for k in range(20)
    )
    found = refused(f"{lambdas} float* y = map(gradient, f19); out = concat(y);")
    assert {code for code, _ in found} == {"E102"}
    deep = "- " * 50
    maps = "".join(
        f"float* v{k} = map(range(gradient.size), "
        f"[&](int i) -> float {{ return {deep}v{k - 1}[i]; }});"
        for k in range(1, 20)
    )
    found = refused(f"float* v0 = gradient; {maps} out = concat(v19);")
    assert found == [("E102", "nested more than 200 levels deep once vectors are written out")]


def test_chains_of_maps_have_an_end():
    maps = "".join(
        f"float* v{k} = map(v{k - 1}, [&](float x) -> float {{ return x; }});"
        for k in range(1, 1500)
    )
    found = refused(f"float* v0 = gradient; {maps} out = concat(v1499);")
    assert found == [("E102", "nested more than 200 levels deep once vectors are written out")]


def pyramid(levels):
    maps = "".join(
        f"float* v{k} = map(range(gradient.size), "
        f"[&](int i) -> float {{ return v{k - 1}[i] + v{k - 1}[i + 1]; }});"
        for k in range(1, levels)
    )
    return f"float* v0 = gradient; {maps} out = concat(v{levels - 1});"


def test_vectors_that_double_have_an_end():
    program = compll.compile_text(encoder(pyramid(5)), "foo")
    assert compll.generate(program)
    for levels in (14, 60):
        found = refused(pyramid(levels))
        assert found == [("E102", "more than 4000 operations once vectors are written out")]


def test_long_lengths():
    """The limit on lengths has its own words, and reading a length again does not use it up."""
    sums = "int a0 = gradient.size;" + "".join(f"int a{k} = a{k - 1} + 1;" for k in range(1, 100))
    ranges = "int* v0 = range({});" + "".join(
        f"int* v{k} = range(v{k - 1}.size);" for k in range(1, 30)
    )
    end = "uint1* c = map(v29, [&](int i) -> uint1 { return 1; }); out = concat(c);"
    program = compll.compile_text(encoder(sums + ranges.format("a80") + end), "foo")
    assert compll.Reference(program).encode(X).size == PREFIX + (4 + 80 + 7) // 8
    assert compll.generate(program)
    ((code, message),) = refused(sums + ranges.format("a99") + "out = concat(gradient);")
    assert code == "E403"
    assert message.startswith("a length must have at most 256 operations")
    wide = "".join(f"int b{k} = b{k - 1} + b{k - 1};" for k in range(1, 20))
    with pytest.raises(compll.CompileError, match="a width must have at most 256 operations"):
        compll.compile_text(
            encoder(f"int b0 = b; {wide} uint<b19> x = 0; out = concat(x);", ", uint8 b"), "foo"
        )


def test_widths_do_not_depend_on_the_gradient():
    found = refused("uint<gradient.size> x = 0; out = concat(x);")
    assert found == [("E304", "a width must be made of numbers and parameters")]


ROUNDED = "lambda_func rounded = [&](float x) -> int { return floor(x + random<float>(0, 1)); }"


@pytest.mark.parametrize(
    "body",
    [
        "return x < 0 ? -rounded(-x) : x < 1 ? rounded(x) : 2 * rounded(x);",
        "if (x < 0) { return -rounded(-x); } return rounded(x);",
        "if (x < 0) { if (x < -1) { return -rounded(-x); } } else { return rounded(x); } "
        "return rounded(x);",
        "float y = 0; if (x < 0) { y = -rounded(-x); } else { y = rounded(x); } return y;",
    ],
)
def test_an_element_reaches_a_random_once_on_each_path(body):
    function = f"[&](float x) -> float {{ {body} }}"
    # Two maps may call the same lambda: that is how a state knows what was sent.
    text = encoder(f"{ROUNDED} out = concat(map(gradient, {function}), map(gradient, {function}));")
    packet = compll.Reference(compll.compile_text(text, "foo")).encode(X)[PREFIX:]
    first, second = np.split(packet.view(np.float32), 2)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "body",
    [
        "return rounded(x) - rounded(x + 7);",
        "float y = rounded(x); if (x < 0) { y = 1; } return y + rounded(x);",
        "float y = 0; if (x < 0) { y = rounded(x); } return y + rounded(x);",
        "if (rounded(x) > 0) { return 1; } return rounded(x);",
        "return (x < 0 ? rounded(x) : 0) + rounded(x);",
        "return rounded(x) > 0 ? rounded(x) : 0;",
    ],
)
def test_an_element_reaches_no_random_twice(body):
    found = refused(f"{ROUNDED} out = concat(map(gradient, [&](float x) -> float {{ {body} }}));")
    assert [code for code, _ in found] == ["E402"]
