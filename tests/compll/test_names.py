# SPDX-License-Identifier: Apache-2.0
"""Variables may have any name: what C++, the runtime or generated code calls its own is renamed."""

import keyword
import re
import subprocess
from pathlib import Path

import pytest

import compll
from compll.backends.c_names import RESERVED, is_reserved
from compll.backends.toolchain import compiler, include_folder
from compll.frontend import interface
from compll.frontend.parser import TYPE_NAMES
from tests.compll.support import SPECS, spec

GOLDEN = Path(__file__).with_name("golden")
HEADERS = sorted(
    [
        *(include_folder() / "tf_hips/cc").glob("runtime/*.h"),
        *(include_folder() / "tf_hips/cc").glob("cuda/*.*h"),
    ]
)
_NOT_CODE = re.compile(
    r'/\*.*?\*/|//[^\n]*|"[^"\n]*"|#(?:pragma|if|include)[^\n]*|__attribute__\(\(.*?\)\)', re.DOTALL
)
# Most kinds of loops: sums, noise, blocks, kept vectors, state, codes of odd widths.
ENCODE = """
state Foo { float* kept; }
void FooEncode(float* gradient, uint8* out, uint8 width__ PARAMS) {
    float scale__ = SUM;
    float sd__ = sqrt(reduce(gradient, 0, sum)) + scale__;
    LOCALS
    float* noisy__ = map(gradient, [&](float g) -> float {
        return g + random<float>(-sd__, sd__); });
    float* top__ = block_reduce(noisy__, 32, 0, max);
    uint<width__>* q__ = map(range(gradient.size), [&](int i) -> uint<width__> {
        return noisy__[i] / top__[i / 32] * scale__; });
    uint2* two__ = map(noisy__, [&](float x) -> uint2 { return x > sd__ ? 3 : 1; });
    int* large__ = filter(range(gradient.size), [&](int i) -> uint1 {
        return noisy__[i] > sd__; }, 9);
    uint32 count__ = large__.size;
    kept = map(range(gradient.size), [&](int i) -> float { return kept[i] / 2 + gradient[i]; });
    float* values__ = map(large__, [&](int i) -> float { return gradient[i]; });
    out = concat(sd__, q__, two__, count__, values__);
}
void FooDecode(uint8* out, float* gradient, uint8 width__ PARAMS) {
    float sd__; uint<width__>* q__; uint2* two__; uint32 count__; float* values__;
    extract(out, sd__, q__, two__, count__, values__);
    float scale__ = SUM;
    LOCALS
    gradient = map(range(gradient.size), [&](int i) -> float {
        return two__[i] == 3 ? sd__ * scale__ : q__[i] + values__[i % 9]; });
}
"""


def code(text: str) -> str:
    """C++ without what holds no names."""
    return _NOT_CODE.sub("", text)


def called(text: str) -> set[str]:
    """Names that are called or given template arguments, but for members and qualified ones."""
    return set(re.findall(r"(?<![:.>\w])([a-z]\w+)(?=[(<])", code(text)))


def test_the_list_holds_what_headers_and_generated_code_call():
    texts = [file.read_text(encoding="utf-8") for file in HEADERS]
    assert len(texts) > 20
    texts += [file.read_text(encoding="ascii") for file in GOLDEN.glob("*.cc.txt")]
    names = set().union(*map(called, texts))
    assert {"row_at", "add_field", "store_codes"} <= names
    # Variables never end in `_` unless they were renamed; `width(` begins a variable.
    unlisted = {name for name in names if not is_reserved(name) and not name.endswith("_")}
    assert {name for name in unlisted if not name.startswith("rows_of_")} == {"width"}
    types = set().union(*(re.findall(r"\b[a-z]\w*_t\b", code(text)) for text in texts))
    assert {"int64_t", "uint8_t"} <= types
    assert [name for name in types if not is_reserved(name)] == []


def candidates() -> list[str]:
    """Every name in the headers and in generated code that a specification may have, too."""
    texts = [file.read_text(encoding="utf-8") for file in HEADERS if file.parent.name == "runtime"]
    for name in ("onebit", "terngrad", "qsgd", "graddrop", "dgc"):
        texts.append(compll.generate(spec(name))[f"{name}.codec.cc"])
    names = set().union(*(re.findall(r"\b[A-Za-z]\w*\b", code(text)) for text in texts), RESERVED)
    taken = {*interface.RESERVED, *keyword.kwlist, *keyword.softkwlist, *TYPE_NAMES, "out", "kept"}
    return sorted(names - taken)


def accepted(names: list[str], is_parameter: bool) -> str | None:
    """The text of a codec with variables of these names, if the language takes them."""
    kind = "float" if is_parameter else ""
    text = ENCODE.replace("PARAMS", "".join(f", {kind} {name}" for name in names) if kind else "")
    local = "".join(f"float {name} = {n} + sd__;\n" for n, name in enumerate(names))
    used = "".join(f"scale__ = scale__ + {name} * {n};\n" for n, name in enumerate(names))
    text = text.replace("LOCALS", used if is_parameter else local + used).replace("SUM", "0")
    try:
        compll.compile_text(text, "foo")
    except compll.CompileError as error:
        assert {found.code for found in error.diagnostics} <= {"E101", "E103", "E203"}, error
        return None
    return text


AT_ONCE = 250  # names of a codec; many more would be too many operations


def acceptable(names: list[str], is_parameter: bool) -> list[str]:
    """Those of `names` that the language takes; nearly all, so that many are tried together."""
    if len(names) <= AT_ONCE and accepted(names, is_parameter):
        return names
    half = len(names) // 2
    parts = (names[:half], names[half:]) if half else ()
    return [name for part in parts for name in acceptable(part, is_parameter)]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("is_parameter", "one_in"),
    [
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
        (False, 10),
    ],
    ids=["parameters", "locals", "a tenth of the locals"],
)
def test_any_name_is_good_in_cpp(is_parameter, one_in):
    known = {"int64_t", "int32_t", "uint8_t", "add_field", "row_count"}
    names = acceptable(sorted({*candidates()[::one_in], *known}), is_parameter)
    assert known <= set(names)
    assert len(names) > 1000 / one_in
    for start in range(0, len(names), AT_ONCE):
        text = accepted(names[start : start + AT_ONCE], is_parameter)
        assert text is not None
        source = compll.generate(compll.compile_text(text, "foo"))["foo.codec.cc"]
        done = subprocess.run(
            [*compiler(), "-fsyntax-only", "-std=c++17", f"-I{include_folder()}", "-x", "c++", "-"],
            input=source.encode(),
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr.decode()[:2000]


def test_what_nvcc_declares_itself_is_renamed():
    """No header of ours says so, and the emulation in the tests has other means."""
    assert {"threadIdx", "blockIdx", "blockDim", "gridDim", "warpSize"} <= RESERVED


def test_names_that_are_as_good_in_cpp_stay():
    assert not is_reserved("mean") and not is_reserved("x") and not is_reserved("min")
    program = compll.compile_text((SPECS / "onebit.pse").read_text(), "onebit")
    assert "numNegative" in compll.generate(program)["onebit.codec.cc"]
