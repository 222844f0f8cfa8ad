# SPDX-License-Identifier: Apache-2.0
"""Lexer, parser and check: what is understood, and that nothing but CompileError ever comes out."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import compll
from compll.errors import Report
from compll.frontend import ast
from compll.frontend.lexer import tokenize
from compll.frontend.parser import parse
from compll.ir.printer import print_functions, spec_hash
from compll.source import SourceFile
from tests.compll.support import SPECS, encoder


def tokens(text):
    source = SourceFile("t", text)
    report = Report(source)
    found = tokenize(source, report)
    report.raise_if_any()
    return [(token.kind, token.text) for token in found]


def expression(text):
    source = SourceFile("t", encoder(f"    float a = {text};"))
    report = Report(source)
    tree = parse(source, report)
    report.raise_if_any()
    declaration = tree.functions[0].body[0]
    assert isinstance(declaration, ast.Declare)
    return shape(declaration.value)


def shape(tree):
    match tree:
        case ast.Binary():
            return (shape(tree.left), tree.op, shape(tree.right))
        case ast.Unary():
            return (tree.op, shape(tree.operand))
        case ast.Ternary():
            return (shape(tree.condition), "?", shape(tree.yes), shape(tree.no))
        case ast.Number():
            return tree.value
        case ast.Name():
            return tree.name
        case ast.Call():
            return (tree.name, *map(shape, tree.arguments))
        case ast.Index():
            return (shape(tree.base), "[]", shape(tree.index))
        case ast.Field():
            return (shape(tree.base), ".", tree.name)


def test_tokens():
    assert tokens("a<<1.5e-3/*x*/>=.5f//y\n2") == [
        ("name", "a"),
        ("op", "<<"),
        ("float", "1.5e-3"),
        ("op", ">="),
        ("float", ".5"),
        ("int", "2"),
        ("end", ""),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 + 2 * 3", (1, "+", (2, "*", 3))),
        ("1 - 2 - 3", ((1, "-", 2), "-", 3)),
        ("1 << 2 + 3", (1, "<<", (2, "+", 3))),
        ("a < b == c", (("a", "<", "b"), "==", "c")),
        ("a & b == c", ("a", "&", ("b", "==", "c"))),
        ("a || b && c", ("a", "||", ("b", "&&", "c"))),
        ("-a * !b", (("-", "a"), "*", ("!", "b"))),
        ("a ? b : c ? d : e", ("a", "?", "b", ("c", "?", "d", "e"))),
        ("g[i + 1].size", (("g", "[]", ("i", "+", 1)), ".", "size")),
        ("random<float>(0, 1) > 2", (("random", 0, 1), ">", 2)),
    ],
)
def test_precedence(text, expected):
    assert expression(text) == expected


def test_the_listing_of_hipress_compiles_verbatim():
    listing = (SPECS.parents[2] / "tests/compll/terngrad_listing.pse").read_text(encoding="ascii")
    program = compll.compile_text(listing, "terngrad")
    assert program.decode is None
    assert program.params[0].default is None
    assert listing in (SPECS / "terngrad.pse").read_text(encoding="ascii")
    with pytest.raises(ValueError, match="`bitwidth` must be given"):
        compll.Reference(program)
    ours = compll.compile_spec(SPECS / "terngrad.pse")
    text = print_functions(ours)
    assert print_functions(program) == text[: text.index("TernGradDecode")]


def test_hash_ignores_what_does_not_change_packets():
    text = (SPECS / "terngrad.pse").read_text(encoding="ascii")
    first = spec_hash(compll.compile_text(text, "a"))
    assert spec_hash(compll.compile_text(text.replace("= 2;", "= 4; // other"), "b")) == first
    assert spec_hash(compll.compile_text(text.replace("99999", "9999"), "c")) != first


WORDS = [
    *(
        "void",
        "float",
        "int",
        "uint1",
        "uint8",
        "uint",
        "<",
        ">",
        "*",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
    ),
    *(
        "[&]",
        "->",
        ";",
        ",",
        "=",
        "+",
        "-",
        "/",
        "%",
        "?",
        ":",
        "<<",
        "&&",
        "!",
        ".size",
        "1",
        "0.5",
    ),
    *("gradient", "out", "a", "b", "f", "map", "reduce", "range", "random<float>", "concat", "sum"),
    *(
        "if",
        "else",
        "return",
        "lambda_func",
        "param",
        "Foo",
        "in",
        "FooEncode",
        "FooDecode",
        "extract",
    ),
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join))
def test_words_never_crash(text):
    refuse_or_compile(text)
    refuse_or_compile(encoder(text))
    refuse_or_compile(
        encoder(f"lambda_func f = [&](float a) -> float {{ {text} }} out = concat(gradient);")
    )


@settings(max_examples=150)
@given(st.text(max_size=80))
@example("(" * 5000)
@example("{" * 5000)
@example("-" * 5000)
@example("void FooEncode(float* gradient, uint8* out) { float a = " + "1+" * 5000)
def test_text_never_crashes(text):
    refuse_or_compile(text)
    refuse_or_compile(encoder(text))


@settings(max_examples=50)
@given(st.data())
def test_damaged_listing_never_crashes(data):
    text = (SPECS / "terngrad.pse").read_text(encoding="ascii")
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    refuse_or_compile(
        text[:start] + data.draw(st.sampled_from(["", ";", "}", "(", "x", "1"])) + text[end:]
    )


def refuse_or_compile(text):
    try:
        program = compll.compile_text(text, "foo")
    except compll.CompileError as error:
        assert error.diagnostics
        assert str(error).startswith("error[E")
    else:
        # What is accepted can be emitted too.
        compll.generate(program)
