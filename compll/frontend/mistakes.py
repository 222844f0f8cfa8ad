# SPDX-License-Identifier: Apache-2.0
"""Mistakes of who knows C++ or Python, seen in the tokens around the one that does not fit.

What was expected there says little: who writes `gradient.size()` misses no `;`.
"""

from collections.abc import Sequence

from compll.frontend import hints
from compll.frontend.lexer import Token
from compll.ir.reducers import REDUCERS

FOREIGN_WORDS = (
    *("for", "while", "do", "switch", "case", "break", "continue", "goto", "struct", "class"),
    *("auto", "const", "static", "typedef", "template", "using", "namespace", "new", "delete"),
    "sizeof",
)
FOREIGN_OPERATORS = ("++", "--")
FOREIGN_STARTS = ("def", "elif", "from", "import")
"""Foreign where a statement begins with them, and good names of variables."""

_TABLE = (
    "there are no tables: write a lambda that returns `k == 0 ? a : k == 1 ? b : c`, or a `map` of "
    "one over `range(n)`"
)
_FOREIGN = {
    "++": "write `x += 1;`",
    "--": "write `x -= 1;`",
    **dict.fromkeys(
        ("auto", "const", "static"),
        "remove it; a declaration is a type and a name, `float mean = ...;`",
    ),
    **dict.fromkeys(("switch", "case"), "write `if (...)`, or `c ? a : b`"),
    **dict.fromkeys(
        ("struct", "class", "typedef", "template", "using", "namespace", "new", "delete"),
        "remove it, or choose another name; there are numbers, vectors and lambdas",
    ),
    "sizeof": "write `v.size`",
}


def foreign(text: str) -> str:
    """The line of help for a word or operator of C that the language does not have."""
    vectors = "vectors are worked on with `map` and `reduce`; see docs/compll-language.md"
    return f"help: {_FOREIGN.get(text, vectors)}"


def advice(tokens: Sequence[Token], at: int, expected: str, is_type: bool) -> str | None:
    """The line of help for a token that does not fit; None where no such mistake is seen.

    Args:
        tokens: of the file, the last one being its end.
        at: the token's number.
        expected: what the parser's message says was.
        is_type: whether it is the name of a type.
    """
    found = _advice(tokens, at, is_type and "between parameters" not in expected)
    is_table = tokens[at].text == "[" and tokens[min(at + 1, len(tokens) - 1)].text != "&"
    if is_table and expected == "`;` at the end of a statement":
        found = _TABLE
    return None if found is None else f"help: {found}"


def _advice(tokens: Sequence[Token], at: int, is_type: bool) -> str | None:
    text = tokens[at].text
    before = tokens[max(0, at - 1)]
    if text == "(" and at > 1 and tokens[at - 2].text == "." and before.kind == "name":
        return _method(before.text)
    if text == ":" and _is_pair(tokens, at):
        after = [token.text for token in tokens[at : at + 4] if token.text != ":"]
        if after[1:2] == ["("]:
            return f"write `{after[0]}` alone: there are no namespaces"
        return "there are no namespaces, and vectors are `float*`, `int*` and so on"
    if text == "**" or (text == before.text == "*" and before.span.end == tokens[at].span.start):
        return "write x * x, or `exp2(y * log2(x))`"
    if text == "{" and before.text in ("=", "(", ",") and _is_table(tokens, at):
        return _TABLE
    if is_type and before.text == "(" and _closes_before(tokens, at, "->"):
        return "begin a lambda with `[&]`, as in `[&](float x) -> float { return x; }`"
    return _declared_there(tokens, at) if is_type else None


def _method(name: str) -> str:
    """For `v.name(`."""
    if name in ("size", "length", "len"):
        return "write `v.size` without `()`"
    if name in REDUCERS:
        init = {"max": "v[0]", "min": "v[0]", "prod": "1", "and": "1"}.get(name, "0")
        return f"write `reduce(v, {init}, {name})`"
    for known in hints.elsewhere_called(name):
        return known.removeprefix("help: ")
    return "vectors have no functions of their own: write a `map` or a `reduce`"


def _is_table(tokens: Sequence[Token], at: int) -> bool:
    """Whether a `{` begins values, and no body."""
    first = at + 1 + (tokens[at + 1].text == "-")
    after = tokens[min(first + 1, len(tokens) - 1)].text
    return tokens[first].text == "}" or after in (",", "}")


def _is_pair(tokens: Sequence[Token], at: int) -> bool:
    """Whether a `:` is one of a `::`."""
    near = (tokens[max(0, at - 1)], tokens[min(at + 1, len(tokens) - 1)])
    span = tokens[at].span
    return any(
        other.text == ":" and span.start - 1 <= other.span.start <= span.start + 1
        for other in near
        if other is not tokens[at]
    )


def _closes_before(tokens: Sequence[Token], at: int, then: str) -> bool:
    """Whether the parenthesis around a token closes right before `then`."""
    level = 1
    for number in range(at, len(tokens) - 1):
        level += {"(": 1, ")": -1}.get(tokens[number].text, 0)
        if level == 0:
            return tokens[number + 1].text == then
    return False


def _declared_there(tokens: Sequence[Token], at: int) -> str | None:
    """For a declaration that stands among arguments."""
    end = at + 1
    if tokens[end].text == "<":
        while tokens[end].text not in (">", ";") and end < len(tokens) - 2:
            end += 1
        end += 1
    end += tokens[end].text == "*"
    if tokens[end].kind != "name" or tokens[min(end + 1, len(tokens) - 1)].text not in (",", ")"):
        return None
    kind = "".join(token.text for token in tokens[at:end])
    name = tokens[end].text
    return f"declare it before, `{kind} {name};`, and write only `{name}` here"
