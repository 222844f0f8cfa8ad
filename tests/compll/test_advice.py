# SPDX-License-Identifier: Apache-2.0
"""What messages advise: that it is said, and that a program which follows it compiles."""

import numpy as np
import pytest

import compll
from tests.compll.support import compiled, encoder


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


@pytest.mark.heavy  # a run of g++ where the cache is empty
def test_vectors_that_are_stored():
    """Transforms of many stages, which have too many operations without."""
    keep = "filter({}, [&](float x) -> uint1 {{ return 1; }});"
    wrong = right = stages(8, TWO_READS)
    for old in ("x2", "x4", "x6"):
        right = right.replace(f"{old}[", f"kept_{old}[")
        next_one = f"float* x{int(old[1]) + 1} ="
        stored = f"float* kept_{old} = {keep.format(old)}\n"
        right = right.replace(next_one, stored + next_one)
    advice = f"or store it, by a filter that keeps all: `float* w = {keep.format('v')}`"
    check(wrong, "E102", advice, right)
    program = compll.compile_text(right, "small")
    x = np.random.default_rng(0).integers(-9, 9, 512).astype(np.float32)
    signs = np.array([[(-1) ** (i & j).bit_count() for i in range(256)] for j in range(256)])
    expected = (x.reshape(2, 256) @ signs).astype(np.float32)
    for back_end in (compll.Reference(program), compiled(program)):
        np.testing.assert_array_equal(back_end.encode(x)[16:].view(np.float32), expected.ravel())


def test_steps_are_better_in_one_lambda():
    maps = "".join(
        f"float* v{k + 1} = map(v{k}, [&](float x) -> float {{ return x * 2; }});\n"
        for k in range(300)
    )
    wrong = encoder(f"float* v0 = gradient;\n{maps}out = concat(v300);")
    steps = "".join(f"float x{k + 1} = x{k} * 2; " for k in range(300))
    one = f"float* v = map(gradient, [&](float x0) -> float {{ {steps}return x300; }});"
    check(wrong, "E102", "in one lambda, with variables", encoder(f"{one}\nout = concat(v);"))


MAPPED = "out = concat(map(gradient, [&](float x) -> float {{ return {}; }}));"


@pytest.mark.parametrize(
    ("call", "advice", "written"),
    [
        ("isnan(x)", "write `x != x`", "x != x"),
        ("isinf(x)", "`abs(x) > 3.4028234e38`", "abs(x) > 3.4028234e38"),
        ("isfinite(x)", "`abs(x) <= 3.4028234e38`", "abs(x) <= 3.4028234e38"),
        ("log10(x)", "`log2(x) * 0.30103`", "log2(x) * 0.30103"),
        ("log1p(x)", "`log2(1 + x) * 0.6931472`", "log2(1 + x) * 0.6931472"),
        ("exp10(x)", "`exp2(x * 3.321928)`", "exp2(x * 3.321928)"),
        ("expm1(x)", "`exp2(x * 1.442695) - 1`", "exp2(x * 1.442695) - 1"),
        ("tanh(x)", "`1 - 2 / (1 + exp2(x * 2.885390))`", "1 - 2 / (1 + exp2(x * 2.885390))"),
        ("sigmoid(x)", "`1 / (1 + exp2(x * -1.442695))`", "1 / (1 + exp2(x * -1.442695))"),
        ("square(x)", "`x * x`", "x * x"),
        ("clamp(x, 0, 1)", "`min(max(x, lo), hi)`", "min(max(x, 0), 1)"),
        ("clip(x, 0, 1)", "`min(max(x, lo), hi)`", "min(max(x, 0), 1)"),
        ("where(x > 0, x, 0)", "`c ? a : b`", "x > 0 ? x : 0"),
        ("sin(x)", "there are sqrt, exp2 and log2", "sqrt(x) + exp2(x) + log2(x)"),
    ],
)
def test_functions_of_other_languages(call, advice, written):
    check(encoder(MAPPED.format(call)), "E202", advice, encoder(MAPPED.format(written)))


def test_trunc_is_a_declaration():
    right = MAPPED.replace("return {}", "int j = x; return j").format()
    check(encoder(MAPPED.format("trunc(x)")), "E202", "`int j = x;`", encoder(right))


NORM = "sqrt(reduce(map(v, [&](float x) -> float { return x * x; }), 0, sum))"
ZIPPED = "map(range(v.size), [&](int i) -> float { return v[i] + w[i]; })"
COUNT = "reduce(map(v, [&](float x) -> int { return x < 1; }), 0, sum)"
LAST = (
    "float top = reduce(v, v[0], {}); int a = reduce(map(range(v.size), [&](int i) -> int {{ "
    "return v[i] == top ? i : v.size; }}), v.size, min)"
)


@pytest.mark.parametrize(
    ("wrong", "advice", "right"),
    [
        ("float a = norm(v)", f"write `{NORM}`", f"float a = {NORM}"),
        ("int a = argmax(v)", "top = reduce(v, v[0], max)`, `reduce` by `min`", LAST.format("max")),
        ("int a = argmin(v)", "top = reduce(v, v[0], min)`, `reduce` by `min`", LAST.format("min")),
        (
            "int* k = argsort(v); int a = k[0]",
            "`top_k(v, k)`",
            "int* k = top_k(v, 9); int a = k[0]",
        ),
    ],
)
def test_functions_of_whole_vectors(wrong, advice, right):
    ends = [f"float* v = gradient; {one}; uint32 b = a; out = concat(b);" for one in (wrong, right)]
    check(encoder(ends[0]), "E202", advice, encoder(ends[1]))


def test_what_the_argmax_of_the_advice_is():
    text = f"float* v = gradient; {LAST.format('max')}; uint32 b = a; out = concat(b);"
    program = compll.compile_text(encoder(text), "foo")
    x = np.array([1, 7, -3, 7, 2], np.float32)
    assert compll.Reference(program).encode(x)[-4:].view(np.uint32) == [1]


@pytest.mark.parametrize(
    ("name", "advice", "right"),
    [
        ("gather", "`map(indices, [&](int i) -> float { return v[i]; })`", "float a = 0;"),
        ("zip", f"`{ZIPPED}`", f"float* w = v; float* a = {ZIPPED};"),
        ("scan", "nothing stands in its place", "float a = 0;"),
        ("histogram", f"as in `{COUNT}`", f"int a = {COUNT};"),
    ],
)
def test_what_stands_in_the_place_of_what_there_is_not(name, advice, right):
    ends = (
        f"float* v = gradient; {one} out = concat(v);" for one in (f"float a = {name}(v);", right)
    )
    check(encoder(next(ends)), "E204", advice, encoder(next(ends)))
    [(code, _, notes)] = found(encoder(f"{name}(gradient); out = concat(gradient);"))
    assert code == "E204" and advice in notes


@pytest.mark.parametrize("name", ["gather", "zip", "scan", "histogram"])
def test_what_is_refused_is_not_proposed(name):
    for near in (name[:-1], f"{name}s", f"{name[0]}{name}"):
        [(code, _, notes)] = found(encoder(f"out = concat({near}(gradient));"))
        assert code == "E202" and f"`{name}`" not in notes


@pytest.mark.parametrize(
    ("wrong", "code", "advice", "right"),
    [
        (
            "map(gradient, abs)",
            "E305",
            "`[&](float x) -> float { return abs(x); }`",
            "map(gradient, [&](float x) -> float { return abs(x); })",
        ),
        (
            "map(gradient, round)",
            "E305",
            "`[&](float x) -> float { return round(x); }`",
            "map(gradient, [&](float x) -> float { return round(x); })",
        ),
        (
            "filter(gradient, sign)",
            "E305",
            "`[&](float x) -> float { return sign(x); }`",
            "filter(gradient, [&](float x) -> float { return sign(x); })",
        ),
        (
            "map(gradient, bitcast)",
            "E305",
            "`[&](float x) -> uint32 { return bitcast<uint32>(x); }`",
            "map(gradient, [&](float x) -> uint32 { return bitcast<uint32>(x); })",
        ),
        (
            "map(gradient, random)",
            "E305",
            "`[&](float x) -> float { return random<float>(0, 1); }`",
            "map(gradient, [&](float x) -> float { return random<float>(0, 1); })",
        ),
        ("map(gradient, square)", "E201", "`x * x`", "gradient"),
        ("map(gradient, toCode)", "E201", "`lambda_func toCode = [&]", "gradient"),
        ("sort(gradient, descending)", "E201", "`greater`", "sort(gradient, greater)"),
        ("sort(gradient, ascending)", "E201", "`less`, the smallest f", "sort(gradient, less)"),
        ("sort(gradient, abs)", "E305", "write `less`", "sort(gradient, less)"),
        ("sort(gradient, lesser)", "E201", "did you mean `less`?", "sort(gradient, less)"),
        ("reduce(gradient, 0, abs)", "E305", "name one of sum", "reduce(gradient, 0, sum)"),
        ("reduce(gradient, 0, maxi)", "E201", "did you mean `max`", "reduce(gradient, 0, max)"),
    ],
)
def test_names_in_the_place_of_a_lambda(wrong, code, advice, right):
    check(encoder(f"out = concat({wrong});"), code, advice, encoder(f"out = concat({right});"))


@pytest.mark.parametrize(
    ("wrong", "code", "advice", "right"),
    [
        ("int n = gradient.size();", "E101", "`v.size` without `()`", "int n = gradient.size;"),
        ("int n = gradient.length();", "E101", "`v.size` without `()`", ""),
        (
            "float n = gradient.max();",
            "E101",
            "write `reduce(v, v[0], max)`",
            "float n = reduce(gradient, gradient[0], max);",
        ),
        (
            "float n = gradient.mean();",
            "E101",
            "write `reduce(v, 0, sum) / max(v.size, 1)`",
            "float n = reduce(gradient, 0, sum) / max(gradient.size, 1);",
        ),
        ("float* n = gradient.abs();", "E101", "write a `map` or a `reduce`", ""),
        ("std::vector<float> v;", "E101", "vectors are `float*`", "float* v = gradient;"),
        ("int n = 3; n--;", "E103", "`x -= 1;`", "int n = 3; n -= 1;"),
        ("int n = 3; --n;", "E103", "`x -= 1;`", "int n = 3; n -= 1;"),
        ("int n = 3; n++;", "E103", "`x += 1;`", "int n = 3; n += 1;"),
        (
            "float* b = map(gradient, (float g) -> float { return g; });",
            "E101",
            "begin a lambda with `[&]`, as in `[&](float x)",
            "float* b = map(gradient, [&](float g) -> float { return g; });",
        ),
        (
            "float t[3] = {1, 2, 3};",
            "E101",
            "a lambda that returns `k == 0 ? a : k == 1 ? b : c`, or a `map` of one over `range(n)",
            "lambda_func t = [&](int k) -> float { return k == 0 ? 1 : k == 1 ? 2 : 3; }"
            "float* v = map(range(3), t); float a = v[1] + t(2);",
        ),
        ("float* t = {1, 2, 3};", "E101", "there are no tables", ""),
        ("float x = std::min(2, 3);", "E101", "write `min` alone", "float x = min(2, 3);"),
        ("float x = 2 > 1 ? std::abs(2) : 3;", "E101", "write `abs` alone", "float x = abs(2);"),
        ("float x = 2 ** 3;", "E101", "write x * x", "float x = 3 * 3;"),
        ("float x = (float)3;", "E101", "a declaration converts: write `float x", "float x = 3;"),
        (
            "float n = 1; if (n = 0) { n = 2; }",
            "E101",
            "compare with `==`",
            "float n = 1; if (n == 0) { n = 2; }",
        ),
        ("float n = 1; int a = (n = 0);", "E101", "compare with `==`", "int a = (1 == 0);"),
        ("float n = -INFINITY;", "E201", "write `1.0 / 0`", "float n = -1.0 / 0;"),
        (
            "int h = gradient.size * 0x9E3779B97F4A7C15;",
            "E308",
            "write it as `(-0x61C8864680B583EB)`, which has the same 64 bits",
            "int h = gradient.size * (-0x61C8864680B583EB);",
        ),
        ("int h = 0x8000000000000000;", "E308", "nearer to 0", ""),
        ("int h = 0x1FFFFFFFFFFFFFFFF;", "E003", "0xC", ""),
        ("float x = int(3);", "E101", "a declaration converts: write `int x", "int x = 3;"),
    ],
)
def test_habits_of_other_languages(wrong, code, advice, right):
    ends = (encoder(f"{body} out = concat(gradient);") for body in (wrong, right))
    check(next(ends), code, advice, next(ends))


def test_a_range_is_no_table():
    codec = encoder("out = concat(gradient);", ", float clip")
    block = "param Foo {{ float clip{} [0, 1]; }}\n"
    advice = "as in `float clip in [0, 1] = 0.5;`"
    check(block.format("") + codec, "E101", advice, block.format(" in") + codec)


@pytest.mark.parametrize("kind", ["float", "float*", "uint4*", "uint<3>*", "uint<2 + 1>*"])
@pytest.mark.parametrize("place", ["{}", "{}, b", "a, {}"])
def test_a_declaration_among_the_arguments_of_extract(kind, place):
    names = place.format("c").split(", ")
    right = "".join(f"{kind} {name}; " for name in names)
    wrong = "".join(f"{kind} {name}; " for name in names if name != "c")
    fields = [f"{kind} {name} = {'gradient' if '*' in kind else 1};" for name in names]
    end = "g = map(range(g.size), [&](int i) -> float { return i; }); }"
    encode = encoder(f"{' '.join(fields)} out = concat({', '.join(names)});")
    decode = "void FooDecode(uint8* p, float* g) {{ {} extract(p, {}); {}"
    check(
        encode + decode.format(wrong, place.format(f"{kind} c"), end),
        "E101",
        f"`{kind.replace('2 + 1', '2+1')} c;`, and write only `c` here",
        encode + decode.format(right, place.format("c"), end),
    )


INDICES = "int* kept = top_k(gradient, 9);"
VALUES = "map(kept, [&](int i) -> float { return gradient[i]; })"


def test_top_k_gives_no_values():
    advice = f"`{INDICES}`, and the values are `{VALUES}`"
    advice = advice.replace("gradient", "v").replace("9", "k")
    right = encoder(f"{INDICES} float* v = {VALUES}; out = concat(v);")
    check(encoder("float* v = top_k(gradient, 9); out = concat(v);"), "E301", advice, right)
    later = encoder("float* v; v = top_k(gradient, 9); out = concat(v);")
    check(later, "E301", advice, right)
    # Who wants them as floats says so.
    for kind in ("int*", "uint32*", "uint8*"):
        assert not found(encoder(f"{kind} k = top_k(gradient, 9); float* v = k; out = concat(v);"))
    block = "state Foo {\n    float* kept;\n}\n"
    [(code, _, notes)] = found(
        block + encoder("kept = top_k(gradient, gradient.size); out = concat(gradient);")
    )
    assert code == "E301" and advice in notes


CODEC = """
void FooEncode(float* gradient, uint8* out, {0} k) {{
    out = concat(k, gradient);
}}

void FooDecode(uint8* packet, float* gradient, {0} k) {{
    extract(packet, k, gradient);
}}
"""
HELPER = "float half(float x) {\n    return x / 2;\n}\n"
HELPED = (
    "lambda_func half = [&](float x) -> float { return x / 2; } out = concat(half(gradient[0]));"
)


@pytest.mark.parametrize(
    ("wrong", "code", "advice", "right"),
    [
        ("uint<32> a = 1;", "E304", "write `uint32`", "uint32 a = 1;"),
        ("uint<24> a = 1;", "E304", "a number from 1 to 16", "uint<16> a = 1;"),
        ("bool a = 1;", "E208", "write `uint1`", "uint1 a = 1;"),
        ("half a = 1;", "E208", "in a `uint16`, as tf_hips/ops/specs/fp16.pse", "uint16 a = 1;"),
        ("float32 a = 1;", "E208", "write `float`", "float a = 1;"),
        (
            "float a = reduce(gradient, 0, [&](float a, float b) -> float { return a + b * b; });",
            "E401",
            "`map` first, and then reduce: "
            "`reduce(map(v, [&](float x) -> float { ... }), init, sum)`",
            "float a = reduce(map(gradient, [&](float x) -> float { return x * x; }), 0, sum);",
        ),
        (
            "float a = reduce(gradient, 0, [&](float a, float b) -> float { "
            "float c = abs(b); return max(c, a); });",
            "E401",
            "init, max)`",
            "float a = reduce(map(gradient, [&](float x) -> float { return abs(x); }), 0, max);",
        ),
        (
            "float a = max(gradient);",
            "E303",
            "write `max(x, y)` or, of a vector, `reduce(v, v[0], max)`",
            "float a = reduce(gradient, gradient[0], max);",
        ),
        (
            "float a = max(gradient, 0);",
            "E301",
            "`reduce(v, v[0], max)` or `map(v, [&](float x) -> float { return max(x, y); })`",
            "float* a = map(gradient, [&](float x) -> float { return max(x, 0); });",
        ),
        (
            "float* a = abs(gradient);",
            "E301",
            "`map(v, [&](float x) -> float { return abs(x); })`",
            "float* a = map(gradient, [&](float x) -> float { return abs(x); });",
        ),
        (
            "float* a = gradient + 1;",
            "E301",
            "`map(v, [&](float x) -> float { return x + y; })`",
            "float* a = map(gradient, [&](float x) -> float { return x + 1; });",
        ),
        (
            "int* a = 1 - range(gradient.size);",
            "E301",
            "`map(v, [&](int x) -> int { return y - x; })`",
            "int* a = map(range(gradient.size), [&](int x) -> int { return 1 - x; });",
        ),
        (
            "float* v = gradient; "
            "float* a = map(gradient, [&](float g) -> float { return g + v; });",
            "E301",
            "an element, as in `v[i]` in the lambda of a `map` over `range(v.size)`",
            "float* v = gradient; float* a = map(range(v.size), [&](int i) -> float { "
            "return gradient[i] + v[i]; });",
        ),
        (
            "float* a = -gradient;",
            "E301",
            "`map(v, [&](float x) -> float { return -x; })`",
            "float* a = map(gradient, [&](float x) -> float { return -x; });",
        ),
        (
            "float* v = gradient; float* a = v * gradient;",
            "E301",
            "`map(range(v.size), [&](int i) -> float { return v[i] * w[i]; })`",
            "float* v = gradient; float* w = gradient; "
            "float* a = map(range(v.size), [&](int i) -> float { return v[i] * w[i]; });",
        ),
    ],
)
def test_help_that_was_too_weak(wrong, code, advice, right):
    ends = (encoder(f"{body} out = concat(gradient);") for body in (wrong, right))
    check(next(ends), code, advice, next(ends))


def test_a_reducer_that_no_map_makes_is_not_told_to_map():
    for value in ("a + a * b", "a - b", "b * b + abs(a)", "a * a", "b * b"):
        lambda_ = f"[&](float a, float b) -> float {{ float c = a; return {value}; }}"
        [(code, _, notes)] = found(encoder(f"out = concat(reduce(gradient, 0, {lambda_}));"))
        assert code == "E401" and "first" not in notes, value


def test_helpers_and_parameters_in_packets():
    plain = encoder("out = concat(gradient);")
    advice = "`lambda_func half = [&](float x) -> float { ... }`"
    check(HELPER + plain, "E501", advice, encoder(HELPED))
    messages = found(CODEC.format("int"))
    assert [item[0] for item in messages] == ["E510", "E510"]
    assert all("declare the parameter as `uint32`" in item[2] for item in messages)
    assert found(CODEC.format("uint32")) == []


@pytest.mark.parametrize(
    "inside",
    [
        "if (step > 3) { kept = gradient; }",
        "if (step > 3) kept = gradient; else kept = map(gradient, f);",
        "lambda_func g = [&](float x) -> float { kept = x; return x; }",
    ],
)
def test_a_state_in_an_if_is_one_mistake(inside):
    state = "state Foo {\n    float* kept;\n}\n"
    lambda_ = "lambda_func f = [&](float x) -> float { return 0; }\n"
    messages = found(state + encoder(f"{lambda_}{inside}\nout = concat(gradient);"))
    assert {item[0] for item in messages} == {"E206"}
    assert all("outside of any `if`: a `map` whose lambda" in item[2] for item in messages)
    right = "kept = map(gradient, [&](float x) -> float { return step > 3 ? x : f(x); });"
    assert found(state + encoder(f"{lambda_}{right}\nout = concat(gradient);")) == []
    # A state that nothing assigns is still missed.
    assert [item[0] for item in found(state + encoder("out = concat(gradient);"))] == ["E606"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        *(("add", "sum"), ("total", "sum"), ("product", "prod"), ("mul", "prod")),
        *(("maximum", "max"), ("minimum", "min"), ("any", "or"), ("all", "and")),
    ],
)
def test_reducers_under_the_names_of_other_languages(word, meant):
    wrong, right = (
        encoder(f"float x = reduce(gradient, 1, {name});\nout = concat(x);")
        for name in (word, meant)
    )
    check(wrong, "E201", f"the reducer is called `{meant}`", right)


def test_a_width_is_advised_where_a_cast_to_uint_is_refused():
    wrong = encoder("out = concat(uint<8>(gradient.size));")
    right = encoder("uint<8> x = gradient.size;\nout = concat(x);")
    check(wrong, "E101", "write `uint<8> x = ...;`", right)


@pytest.mark.parametrize(
    "width", ["b > 8 ? 16 : b", "b > c ? 16 : b", "b >= 8 ? 16 : b", "b ? 8 : 4", "b << 1", "b & 7"]
)
def test_a_width_that_compares_is_put_in_parentheses(width):
    wrong, right = (
        encoder(f"uint<{one}> x = gradient.size;\nout = concat(x);", ", uint8 b, uint8 c")
        for one in (width, f"({width})")
    )
    check(
        wrong, "E101", "put a comparison in parentheses, as in `uint<(bits > 8 ? 16 : 8)>`", right
    )


def test_a_state_is_given_no_value():
    body = encoder("kept = gradient;\nout = concat(kept);")
    state = "state Foo {{ float* kept{}; }}\n"
    wrong, right = (state.format(value) + body for value in (" = 0", ""))
    check(wrong, "E101", "remove `= ...`: a state is all zeros before the first call", right)


DECODE = "void FooDecode(uint8* packet, float* gradient) { REST gradient = v; }"


def test_statements_of_packets_in_wrong_places():
    right = encoder("out = concat(gradient);")
    wrong = encoder("concat(gradient);\nout = concat(gradient);")
    check(wrong, "E511", "by the last statement: `packet = concat(a, b, ...);`", right)
    wrong = encoder("extract(out, gradient);\nout = concat(gradient);")
    check(wrong, "E511", "only a Decode reads a packet", right)
    right = DECODE.replace("REST", "float* v; extract(packet, v);")
    wrong = DECODE.replace("REST", "float* v; extract(packet, v); concat(v);")
    check(wrong, "E511", "only an Encode makes a packet", right)
    wrong = DECODE.replace("REST", "float* v; if (gradient.size) { extract(packet, v); }")
    assert "move it out of the `if`" in found(wrong)[0][2]


def test_two_vectors_without_an_encode():
    wrong = DECODE.replace("REST", "float* v; float* w; extract(packet, v, w);")
    right = encoder("out = concat(gradient, gradient);") + wrong
    check(wrong, "E506", "write `FooEncode`, too", right)


@pytest.mark.parametrize(
    ("statement", "declared"),
    [
        ("float* v = map(b, [&](float x) -> float { return x; });", "float* b = ...;"),
        ("float v = reduce(b, 0, sum);", "float* b = ...;"),
        ("float v = b[0];", "float* b = ...;"),
        ("int v = b.size;", "float* b = ...;"),
        ("float v = gradient[b];", "int b = ...;"),
        ("int* v = range(b);", "int b = ...;"),
        ("uint<b> v = 3;", "int b = ...;"),
        ("uint8* v = b;", "uint8* b = ...;"),
        ("b = sort(gradient, less);", "float* b = ...;"),
        ("b = top_k(gradient, 3);", "int* b = ...;"),
        ("b = 3;", "float b = ...;"),
    ],
)
def test_an_unknown_name_is_declared_as_what_is_needed(statement, declared):
    wrong = encoder(f"{statement}\nout = concat(gradient);")
    check(wrong, "E201", f"as in `{declared}`", encoder("out = concat(gradient);"))


def test_what_is_extracted_is_declared_without_a_value():
    first = found(DECODE.replace("REST", "extract(packet, v);"))[0]
    assert "declare it before, as in `float* v;`" in first[2]
    assert not found(DECODE.replace("REST", "float* v; extract(packet, v);"))
