# SPDX-License-Identifier: Apache-2.0
"""What messages advise: that it is said, and that a program which follows it compiles."""

import pytest

import compll
from tests.compll.support import encoder


def found(text):
    """Code, message and notes of each diagnostic of a text; nothing where it compiles."""
    try:
        compll.compile_text(text, "foo")
    except compll.CompileError as error:
        return [(item.code, item.message, " ".join(item.notes)) for item in error.diagnostics]
    return []


def check(wrong, code, advice, right):
    """`wrong` is refused once, with the code and the advice, and `right` is not."""
    messages = found(wrong)
    assert [item[0] for item in messages] == [code], messages
    assert advice in messages[0][2], messages
    assert found(right) == []


def stages(number, lambda_):
    """A Hadamard transform of 2^number elements, a vector per stage."""
    vectors = "".join(
        f"float* x{k + 1} = map(range(gradient.size), {lambda_.format(old=f'x{k}', bit=2**k)});\n"
        for k in range(number)
    )
    return encoder(f"float* x0 = gradient;\n{vectors}out = concat(x{number});")


MANY_READS = (
    "[&](int i) -> float {{ return i & {bit} ? {old}[i ^ {bit}] - {old}[i] : "
    "{old}[i] + {old}[i ^ {bit}]; }}"
)
TWO_READS = (
    "[&](int i) -> float {{ float a = {old}[i]; float b = {old}[i ^ {bit}]; "
    "return i & {bit} ? b - a : a + b; }}"
)


def test_vectors_that_are_read_too_often():
    advice = "computed again at every `v[j]`: read it once, into a variable, as in `float a = v[j]"
    check(stages(5, MANY_READS), "E102", advice, stages(5, TWO_READS))


def test_steps_are_better_in_one_lambda():
    maps = "".join(
        f"float* v{k + 1} = map(v{k}, [&](float x) -> float {{ return x * 2; }});\n"
        for k in range(300)
    )
    wrong = encoder(f"float* v0 = gradient;\n{maps}out = concat(v300);")
    steps = "".join(f"float x{k + 1} = x{k} * 2; " for k in range(300))
    one = f"float* v = map(gradient, [&](float x0) -> float {{ {steps}return x300; }});"
    check(wrong, "E102", "in one lambda, with variables", encoder(f"{one}\nout = concat(v);"))
