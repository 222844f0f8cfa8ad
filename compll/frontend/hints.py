# SPDX-License-Identifier: Apache-2.0
"""What a message of the parser advises: by what was expected, and by what stands there instead."""

import re

from compll.errors import HELP

# By what the parser expected, up to what differs.
_BY_EXPECTED = {
    "`;` at the end of a statement": "end the statement with `;`",
    "`;` after a state": "end the state with `;`, as in `float* residual;`",
    "`;` after a parameter": "end the parameter with `;`, as in `float clip in [0, 1] = 0.5;`",
    "`(` before parameters": "list the parameters in parentheses, as in `(float x)`",
    "`,` between parameters": "part parameters with `,` and close the list with `)`",
    "`,` between arguments": "part arguments with `,` and close the call with `)`",
    "`,` between the ends": "write a range as `in [0, 1]`",
    "`[` before a range": "write a range as `in [0, 1]`",
    "`]` after a range": "write a range as `in [0, 1]`",
    "`>` after the width": "close the width with `>`, as in `uint<bits>`",
    "`>` after the type": "close the type with `>`, as in `random<float>(0, 1)`",
    "`(` after `random<": "give it arguments, as in `random<float>(0, 1)`",
    "`(` after `bitcast<": "give it arguments, as in `bitcast<uint32>(x)`",
    "`(` after `if`": "put the condition in parentheses, as in `if (x > 0)`",
    "`)` after a condition": "close the condition with `)`",
    "`:` between": "give `?` both values, as in `x > 0 ? 1 : 2`",
    "`]` after an index": "close the index with `]`",
    "`)` to match": "close the parenthesis with `)`",
    "`&` in": "begin a lambda with `[&]`; it captures all it needs",
    "`]` in": "begin a lambda with `[&]`; it captures all it needs",
    "`->` before": "say what the lambda returns, as in `[&](float x) -> float { ... }`",
    "`{` before": "write the body in braces, as in `{ return x; }`",
    "`{` after": "list what the block declares in braces",
    "`}` at the end": "close the block with `}`",
    "the name of a variable": "give the variable a name after its type, as in `float mean = 0;`",
    "the name of a function": "begin as in `void FooEncode(float* gradient, uint8* out)`",
    "the name of a codec": "name the X of XEncode and XDecode there",
    "the name of a parameter": "give the parameter a name after its type, as in `float clip`",
    "the name of a state": "give the state a name after its type, as in `float* residual;`",
    "the name of a field": "write `v.size`, the only field there is",
    "a statement": "write a declaration, an assignment or an `if` there",
    "a type": "begin with a type: float, int, uint8, uint<bits>, or one of them with `*`",
    "a number": "write one number; parameters take no expressions there",
    "a value": "write a number, a name, a call or `(...)` there",
}

# By the word or operator that stands where the parser expected something else.
_BY_FOUND = {
    "and": "write `&&`",
    "or": "write `||`",
    "not": "write `!`",
    "elif": "write `else if (...)`",
    "else": "write `else` directly behind the branch of an `if`, which needs braces if it is long",
    "import": "remove it; a specification stands alone and all functions are built in",
    "from": "remove it; a specification stands alone and all functions are built in",
    "def": "write `void XEncode(...)`, or `lambda_func f = [&](float x) -> float { ... }`",
    "lambda": "write a lambda as `[&](float x) -> float { return x; }`",
    "return": "end the statement before it with `;`",
}
_NO_CAST = "a declaration converts: write `{} x = ...;` and use x"


def advice(expected: str, found: str, is_type: bool) -> str:
    """The line of help for a token that was not expected.

    Args:
        expected: what the parser's message says was.
        found: the token's text.
        is_type: whether that is the name of a type.
    """
    if expected.startswith("a value") and is_type:
        return f"help: {_NO_CAST.format('uint<8>' if found == 'uint' else found)}"
    if expected.startswith("`(` before parameters") and found in ("=", ";", "["):
        return "help: move it into a function; nothing is global but `param` and `state` blocks"
    if expected == "`;` after a state" and found == "=":
        return "help: remove `= ...`: a state is all zeros before the first call"
    if expected.startswith(("`)` after a condition", "`)` to match")) and found == "=":
        return "help: compare with `==`; a value is assigned by a statement of its own"
    if expected.startswith("`;`") and found == "=":
        return "help: an element cannot be assigned: make the whole vector by a `map`"
    if expected == "a type" and found in ("}", ";"):
        what = "no block is open" if found == "}" else "nothing ends"
        return f"help: remove it; {what} there"
    if found in _BY_FOUND and not expected.startswith(("a number", "the name")):
        return f"help: {_BY_FOUND[found]}"
    for start, text in _BY_EXPECTED.items():
        if expected.startswith(start):
            return f"help: {text}"
    return f"help: {HELP['E101']}"


# Names that other languages have, and what stands for them here.
_ELSEWHERE = {
    "true": "write 1; any number that is not 0 is true",
    "false": "write 0",
    "True": "write 1; any number that is not 0 is true",
    "False": "write 0",
    "nan": "leave out what is not finite by a `filter`; `x != x` tells it",
    "NAN": "leave out what is not finite by a `filter`; `x != x` tells it",
    "inf": "write `1.0 / 0`",
    "INFINITY": "write `1.0 / 0`",
    "pow": "write x * x, or `exp2(y * log2(x))`",
    "exp": "write `exp2(x * 1.442695)`",
    "log": "write `log2(x) * 0.6931472`",
    "fabs": "write `abs(x)`",
    "len": "write `v.size`",
    "size": "write `v.size`",
    "mean": "write `reduce(v, 0, sum) / max(v.size, 1)`",
    "sum": "write `reduce(v, 0, sum)`",
    "int": "a declaration converts: write `int j = x;`",
    "float": "a declaration converts: write `float y = x;`",
    "import": "remove it; a specification stands alone and all functions are built in",
    "include": "remove it; files are not included",
}


_TRIGONOMETRIC = "of functions of that kind there are sqrt, exp2 and log2"
_ARGUMENT = (
    "with `float top = reduce(v, v[0], {})`, `reduce` by `min` a map over `range(v.size)` that "
    "returns `v[i] == top ? i : v.size`, from `v.size`"
)
# The same for functions: names that variables have as well.
_FUNCTIONS_ELSEWHERE = {
    "isnan": "write `x != x`",
    "isinf": "write `abs(x) > 3.4028234e38`",
    "isfinite": "write `abs(x) <= 3.4028234e38`",
    "log10": "write `log2(x) * 0.30103`",
    "log1p": "write `log2(1 + x) * 0.6931472`",
    "exp10": "write `exp2(x * 3.321928)`",
    "expm1": "write `exp2(x * 1.442695) - 1`",
    "tanh": "write `1 - 2 / (1 + exp2(x * 2.885390))`",
    "sigmoid": "write `1 / (1 + exp2(x * -1.442695))`",
    "sqr": "write `x * x`",
    "square": "write `x * x`",
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan"), _TRIGONOMETRIC),
    "trunc": "a declaration drops the fraction: write `int j = x;`",
    "clamp": "write `min(max(x, lo), hi)`",
    "clip": "write `min(max(x, lo), hi)`",
    "where": "write `c ? a : b` in the lambda of a `map`",
    "select": "write `c ? a : b` in the lambda of a `map`",
    "argmax": _ARGUMENT.format("max"),
    "argmin": _ARGUMENT.format("min"),
    "argsort": "write `top_k(v, k)`: the indices of the k largest, in ascending order",
    "norm": "write `sqrt(reduce(map(v, [&](float x) -> float { return x * x; }), 0, sum))`",
}


def elsewhere(name: str) -> tuple[str, ...]:
    """The line of help for a name of another language; nothing for other names."""
    return (f"help: {_ELSEWHERE[name]}",) if name in _ELSEWHERE else ()


def elsewhere_called(name: str) -> tuple[str, ...]:
    """The same for a name that is used as a function."""
    text = _FUNCTIONS_ELSEWHERE.get(name)
    return elsewhere(name) if text is None else (f"help: {text}",)


# Operators of CompLL that this version does not have, and what stands for them.
_LATER = {
    "gather": "write `map(indices, [&](int i) -> float { return v[i]; })`",
    "zip": "write `map(range(v.size), [&](int i) -> float { return v[i] + w[i]; })`",
    "scan": "nothing stands in its place: a `reduce` or `block_reduce` gives the last sums alone",
    "histogram": (
        "count each bin, as in `reduce(map(v, [&](float x) -> int { return x < 1; }), 0, sum)`"
    ),
}
LATER = tuple(_LATER)


def later(name: str) -> str:
    """The line of help for one of LATER."""
    return f"help: {_LATER[name]}"


def wrapped(digits: str, text: str) -> tuple[str, ...]:
    """The line of help for an integer that is too large, if its 64 bits are those of another one.

    Args:
        digits: of the integer, decimal.
        text: as it is written; who writes it in decimal means the number, and not its bits.
    """
    if text[:2].lower() != "0x" or len(digits) > len(str(1 << 64)):
        return ()
    less = (1 << 64) - int(digits)
    if not 0 < less < 1 << 63:
        return ()
    return (f"help: write it as `(-0x{less:X})`, which has the same 64 bits: ints wrap",)


# Words of other languages for the reducers.
_REDUCERS_ELSEWHERE = {
    **dict.fromkeys(("add", "plus", "total"), "sum"),
    **dict.fromkeys(("mul", "multiply", "times", "product"), "prod"),
    **dict.fromkeys(("maximum", "largest"), "max"),
    **dict.fromkeys(("minimum", "smallest"), "min"),
    **dict.fromkeys(("any", "logical_or"), "or"),
    **dict.fromkeys(("all", "logical_and"), "and"),
    **dict.fromkeys(("nonzero", "count_nonzero"), "count"),
}


def reducer_elsewhere(name: str) -> tuple[str, ...]:
    """The line of help for a word that other languages have for a reducer."""
    found = _REDUCERS_ELSEWHERE.get(name)
    return () if found is None else (f"help: the reducer is called `{found}`",)


# How the operators are called.
_FORMS = {
    "abs": "abs(x)",
    "block_reduce": "block_reduce(v, n, init, f)",
    "hadamard": "hadamard(v, n)",
    "filter": "filter(v, f)` or `filter(v, f, k)",
    "map": "map(v, f)",
    "max": "max(x, y)` or, of a vector, `reduce(v, v[0], max)",
    "min": "min(x, y)` or, of a vector, `reduce(v, v[0], min)",
    "bitcast": "bitcast<uint32>(x)",
    "random": "random<float>(lo, hi)",
    "range": "range(n)",
    "reduce": "reduce(v, init, f)",
    "sample": "sample(v, m)",
    "scatter": "scatter(n, indices, values)` or `scatter(n, indices, values, count)",
    "sort": "sort(v, less)",
    "top_k": "top_k(v, k)",
}


def form(name: str) -> str:
    """The line of help that says how a built-in function is called."""
    return f"help: write `{_FORMS.get(name, f'{name}(x)')}`"


def lambda_of(name: str) -> str:
    """The line of help where a built-in function stands in the place of a lambda."""
    kind, call = _IN_LAMBDA.get(name, ("float", f"{name}(x)"))
    return f"help: write `[&](float x) -> {kind} {{ return {call}; }}`"


def mapped(call: str, element: str) -> str:
    """The line of help where a vector stands for a scalar; `call`: what is done with its x."""
    kind = "float" if element == "float" else "int"
    written = f"`map(v, [&]({kind} x) -> {kind} {{ return {call}; }})`"
    name = call.partition("(")[0]
    if name in ("min", "max"):
        written = f"`reduce(v, v[0], {name})` or {written}"
    return f"help: take an element, as in `v[0]`, or write {written}"


def zipped(op: str) -> str:
    """The same for two vectors between which an operator stands."""
    return f"help: write `map(range(v.size), [&](int i) -> float {{ return v[i] {op} w[i]; }})`"


_IN_LAMBDA = {
    "bitcast": ("uint32", "bitcast<uint32>(x)"),
    "random": ("float", "random<float>(0, 1)"),
}


def is_like_a_type(name: str, near: tuple[str, ...]) -> bool:
    """Whether an unknown name was meant as a type; `near`: what is spelt like it."""
    return bool(near) or re.fullmatch(r"u?int[0-9]+(_t)?|double|half|float[0-9]+", name) is not None


def type_help(name: str, near: tuple[str, ...]) -> tuple[str, ...]:
    """The line of help for an unknown type; `near`: that of the type that is spelt like it."""
    if name in ("bool", "boolean"):
        return ("help: write `uint1`, which is 1 or 0",)
    if name in ("half", "float16", "bfloat16"):
        return ("help: keep its bits in a `uint16`, as tf_hips/ops/specs/fp16.pse and bf16.pse do",)
    found = re.fullmatch(r"uint([0-9]{1,2})", name)
    if found and 1 <= int(found[1]) <= 16:
        return (f"help: write `uint<{found[1]}>`",)
    if re.fullmatch(r"u?int[0-9]+(_t)?", name):
        return ("help: write `int`, which has 64 bits, or `uint8`, `uint16`, `uint32`",)
    is_float = name in ("double", "float32", "float64")
    return ("help: write `float`, the only type of that kind",) if is_float else near
