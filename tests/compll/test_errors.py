# SPDX-License-Identifier: Apache-2.0
"""Every diagnostic: `errors/<code>_<what>.pse` must be refused with the text beside it."""

from pathlib import Path

import pytest

import compll
from compll.errors import CODES, HELP
from compll.pipeline import cuda_source

FOLDER = Path(__file__).parent / "errors"
CASES = sorted(FOLDER.glob("*.pse"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_case(case, request):
    with pytest.raises(compll.CompileError) as caught:
        program = compll.compile_spec(case)
        # What a back end refuses is right for the others.
        assert case.name.startswith("E7")
        cuda_source(program, case.read_text(encoding="utf-8"), str(case))
    text = str(caught.value).replace(str(case), case.name) + "\n"
    assert {item.code for item in caught.value.diagnostics} == {case.name[:4]}
    for item in caught.value.diagnostics:
        assert item.notes
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


def test_all_errors_of_a_stage_come_at_once():
    text = "void XEncode(float* g, uint8* o) { float a = b; float c = d; o = concat(e, a); }"
    with pytest.raises(compll.CompileError) as caught:
        compll.compile_text(text, "x")
    assert [item.message for item in caught.value.diagnostics] == [
        "unknown name `b`",
        "unknown name `d`",
        "unknown name `e`",
    ]
