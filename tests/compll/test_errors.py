# SPDX-License-Identifier: Apache-2.0
"""Every diagnostic: `errors/<code>_<what>.pse` must be refused with the text beside it."""

import inspect
import re
import unicodedata
from pathlib import Path

import pytest

import compll
from compll import specification
from compll.cli import main
from compll.errors import CODES, HELP
from compll.frontend import hints, parser
from compll.pipeline import cuda_source
from tests.compll.support import SPECS

FOLDER = Path(__file__).parent / "errors"
EXPECTS = re.compile(r'_expect(?:_semicolon)?\("(.)"?, f?"([^"]*)"')
CASES = sorted(FOLDER.glob("*.pse"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_case(case, request):
    with pytest.raises(compll.CompileError) as caught:
        program = compll.compile_spec(case)
        # What a back end refuses is right for the others.
        assert case.name.startswith("E7")
        cuda_source(program, specification.read(case))
    text = str(caught.value).replace(str(case), case.name) + "\n"
    assert {item.code for item in caught.value.diagnostics} == {case.name[:4]}
    for item in caught.value.diagnostics:
        assert [note for note in item.notes if note.startswith("help: ")]
        for note in item.notes:
            kind, _, advice = note.partition(": ")
            assert kind in ("help", "note") and len(advice) > 5 and "\n" not in note
            assert advice not in item.message and item.message not in advice
    expected = case.with_suffix(".txt")
    if request.config.getoption("--update-golden", default=False):
        expected.write_text(text, encoding="ascii")
    assert text == expected.read_text(encoding="ascii")


def test_every_code_has_a_case():
    assert {case.name[:4] for case in CASES} == set(CODES)


def test_every_code_says_what_to_do():
    assert set(HELP) == set(CODES)


def test_codes_are_documented():
    page = Path(__file__).resolve().parents[2] / "docs/compll-language.md"
    text = page.read_text(encoding="utf-8")
    assert [code for code in CODES if f"| {code} |" not in text] == []


def test_carets_point_at_the_program():
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(
            "void XEncode(float* g, uint8* o) {\n\to = concat(h);\n}\n", "x", "x.pse"
        )
    assert str(caught.value).splitlines() == [
        "error[E201]: unknown name `h`",
        " --> x.pse:2:13",
        "  |",
        "2 |  o = concat(h);",
        "  |             ^",
        "  = help: declare it before, as in `float h = ...;`",
    ]


WIDE = "void XEncode(float* g, uint8* o) {\n/* \u65e5\u672c e\u0301 */ o = concat(h);\n}\n"


def test_carets_stand_below_wide_characters():
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(WIDE, "x", "x.pse")
    shown, caret = str(caught.value).splitlines()[3:5]
    # Two characters of two columns each, and one that takes none.
    assert caret.index("^") == shown.index("h)") + 2 - 1


# Marks that Unicode does not reorder, of class 0: vowels of Thai and Hindi, the emoji selector.
@pytest.mark.parametrize("text", ["\u0e44\u0e21\u0e49\u0e31", "\u0928\u0941", "\u2764\ufe0f"])
def test_carets_stand_below_marks_that_take_no_column(text):
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(f"void XEncode(float* g, uint8* o) {{ /*{text}*/ o = h; }}", "x")
    shown, caret = str(caught.value).splitlines()[3:5]
    marks = sum(unicodedata.category(char) == "Mn" for char in text)
    assert marks > 0
    assert caret.index("^") == shown.index("h;") - marks


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n  "])
def test_what_the_end_of_the_file_lacks_is_marked_behind_the_text(end):
    with pytest.raises(compll.CompileError, match="found the end of the file") as caught:
        compll.compile_text("void XEncode(float* g, uint8* o) {\n  o = concat(g);" + end, "x")
    assert str(caught.value).splitlines()[1:5] == [
        " --> <text>:2:17",
        "  |",
        "2 |   o = concat(g);",
        "  |                 ^",
    ]


@pytest.mark.parametrize("name", ["dgc", "graddrop", "terngrad"])
def test_a_brace_that_is_missing_brings_few_messages(name):
    """What comes behind it was read as functions, with a message for each statement."""
    text = re.sub(r"//[^\n]*", "", (SPECS / f"{name}.pse").read_text(encoding="utf-8"))
    for at in (match.start() for match in re.finditer("[{}]", text)):
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_text(text[:at] + text[at + 1 :], name)
        assert len(caught.value.diagnostics) <= 3, str(caught.value)


def test_a_state_of_another_codec_is_not_declared_twice():
    blocks = ["state Y { float* r; }", "state X { float* r; }"]
    for text in (" ".join(blocks), " ".join(reversed(blocks))):
        encode = " void XEncode(float* g, uint8* o) { r = g; o = concat(g); }"
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_text(text + encode, "x")
        assert [item.code for item in caught.value.diagnostics] == ["E604"]


def test_a_chain_of_arms_that_is_too_long_is_told_once():
    chain = "if (g.size > 1) a = 1;" + " else if (g.size > 2) a = 2;" * 99
    text = f"void XEncode(float* g, uint8* o) {{ float a = 0; {chain} float b = ; o = concat(a); }}"
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(text, "x")
    assert [item.code for item in caught.value.diagnostics] == ["E102", "E101"]


def test_widths_are_shown_as_they_are_written():
    text = (
        "void XEncode(float* g, uint8* o, uint8 b) {{ uint<b>* q = map(g, f); {} o = concat(q); }}"
    )
    text = text.replace("map(g, f)", "map(g, [&](float x) -> uint<b> {{ return x; }})")
    with pytest.raises(compll.CompileError, match=r"found `uint<b>\*`"):
        compll.compile_text(text.format("float z = q;"), "x")
    with pytest.raises(ValueError, match=r"width `uint<b>` must be from 1 to 16\. Received: 20"):
        compll.Reference(compll.compile_text(text.format(""), "x"), b=20).wire_bytes(3)


def test_long_names_and_numbers_are_cut_in_messages():
    long = "z" * 5000
    for wrong in (long, f"1{long}", "9" * 5000):
        text = f"void XEncode(float* g, uint8* o) {{ float a = {wrong}; o = concat(a); }}"
        with pytest.raises(compll.CompileError) as caught:
            compll.compile_text(text, "x")
        assert max(map(len, str(caught.value).splitlines())) < 200
        assert wrong[:60] in caught.value.diagnostics[0].message + str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_lines_may_end_in_any_way(end):
    text = "// one" + end + "void XEncode(float* g, uint8* o) {" + end + "o = concat(h); }" + end
    with pytest.raises(compll.CompileError, match=r"x.pse:3:12\n  \|\n3 \| o = concat"):
        compll.compile_text(text, "x", "x.pse")
    assert compll.compile_text(text.replace("h)", "g)"), "x").encode is not None


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    file = tmp_path / "x.pse"
    file.write_bytes(b"\xef\xbb\xbfvoid XEncode(float* g, uint8* o) { o = concat(g); }")
    assert compll.compile_spec(file).encode is not None
    assert main(["gen", str(file), "-o", str(tmp_path / "out")]) == 0
    exec((tmp_path / "out/x_reference.py").read_text(), {})
    file.write_bytes(b"\xef\xbb\xbfvoid \xff")
    with pytest.raises(compll.CompileError, match=r":1:6"):
        compll.compile_spec(file)


def test_binary_files_are_one_error_and_print_no_control_characters():
    for text in ("\x00\x01\x02" * 50, "void\x1b[31mX", "\x7fELF\x02", "void\x1fX"):
        with pytest.raises(compll.CompileError, match="must be text") as caught:
            compll.compile_text(text, "x")
        assert [found.code for found in caught.value.diagnostics] == ["E004"]
        assert all(char.isprintable() or char == "\n" for char in str(caught.value))
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text("void \u202e X", "x")
    assert "\u202e" not in str(caught.value) and "\\u202e" in str(caught.value)


def test_every_expectation_of_the_parser_has_its_own_advice():
    text = inspect.getsource(parser)
    wanted = [f"`{token}` {where}" for token, where in EXPECTS.findall(text)]
    wanted += re.findall(r'_(?:fail|name)\("((?:a|the|`) ?[^"]*)"', text)
    wanted += [
        "`>` after the type of `random`",
        "`(` after `random<...>`",
        "`(` after `bitcast<...>`",
    ]
    assert len(wanted) > 25
    assert [w for w in wanted if hints.advice(w, "", False) == f"help: {HELP['E101']}"] == []


def test_all_errors_of_a_stage_come_at_once():
    text = "void XEncode(float* g, uint8* o) { float a = b; float c = d; o = concat(e, a); }"
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(text, "x")
    assert [item.message for item in caught.value.diagnostics] == [
        "unknown name `b`",
        "unknown name `d`",
        "unknown name `e`",
    ]


IN_ONE_STATEMENT = [
    "float x = u + v;",
    "uint<u> x = v;",
    "double x = u; // a type, and a value",
    "float x = u ? v : w;",
    "float x = u && v;",
    "float x = min(u, abs(v));",
    "float x = g[u] * v[0];",
    "float x = same(u) + same(v);",
    "float x = add(u, v);",
    "float* x = map(u, [&](float y) -> float { return v; });",
    "float* x = map(g, [&](float y) -> float { if (u) { return v; } return w; });",
    "float* x = map(g, [&](double y) -> double { return 0; });",
    "float* x = map(g, [&](float y) -> float { return random<float>(u, v); });",
    "float* x = filter(u, v, w);",
    "float* x = sort(u, v);",
    "int* x = top_k(u, v);",
    "float* x = sample(u, v);",
    "float x = reduce(u, v, w);",
    "float* x = block_reduce(u, v, w, sum);",
]


@pytest.mark.parametrize("statement", IN_ONE_STATEMENT)
def test_all_errors_of_a_statement_come_at_once(statement):
    lambdas = """
        lambda_func same = [&](float x) -> float { return x; }
        lambda_func add = [&](float x, float y) -> float { return x + y; }
    """
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(
            f"void XEncode(float* g, uint8* o) {{ {lambdas} {statement}\no = concat(g); }}", "x"
        )
    wanted = re.findall(r"\b(u|v|w|double)\b", statement.partition("//")[0])
    found = re.findall(r"`(\w+)` is not|unknown name `(\w+)`", str(caught.value))
    assert ["".join(names) for names in found] == wanted


def test_all_fields_and_places_of_a_packet_are_looked_at():
    text = """
    void XEncode(float* g, uint8* o) { o = concat(u, g, v); }
    void XDecode(uint8* p, float* g) {
        extract(p, w, g, x);
        g = scatter(u, v, w, y);
    }
    """
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(text, "x")
    assert [item.message[-2] for item in caught.value.diagnostics] == [*"uvwxuvwy"]


def test_a_variable_of_an_unknown_type_is_told_once():
    text = """
    void XEncode(float* g, uint8* o) { o = concat(g, g); }
    void XDecode(uint8* p, float* g) { double x; extract(p, x, g); }
    """
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(text, "x")
    assert [item.code for item in caught.value.diagnostics] == ["E208"]


@pytest.mark.parametrize("place", ["begin", "middle", "end"])
def test_of_a_long_line_the_part_around_the_caret_is_shown(place, tmp_path):
    filler = {"begin": (0, 9000), "middle": (9000, 9000), "end": (9000, 0)}[place]
    before, after = (f"/*{'x' * n}*/" if n else "" for n in filler)
    path = tmp_path / "long.pse"
    path.write_text(
        f"void AEncode(float* g, uint8* p) {{ float a = {before}nope{after}; p = concat(a); }}\n"
    )
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_spec(path)
    lines = str(caught.value).splitlines()
    [shown] = [line for line in lines if line.startswith("1 | ")]
    [carets] = [line for line in lines if set(line) == {" ", "|", "^"}]
    assert len(shown) < 200
    assert shown[carets.index("^") : carets.rindex("^") + 1] == "nope"
    assert shown.startswith("1 | ...") == (place != "begin")
    assert shown.endswith("...") == (place != "end")
