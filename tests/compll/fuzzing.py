# SPDX-License-Identifier: Apache-2.0
"""Programs that nobody would write: specifications with changes, made by a source of choices.

A change knows the grammar: it puts a token where another of its kind stood, a bracketed group where
another stood, a statement of one program into another. So most results get past the parser, and
many past the check; `survives` then asks more of them than that nothing is raised.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import compll
from compll import passes
from compll.backends.reference import Reference
from compll.errors import Report
from compll.frontend.lexer import tokenize
from compll.ir import nodes
from compll.pipeline import compile_specification
from compll.source import SourceFile
from compll.specification import Specification
from tests.compll.support import SPECS

TESTS = SPECS.parents[2] / "tests"
MAX_BYTES = 1 << 16
N = 37
BRACKETS = {"(": ")", "{": "}", "[": "]"}
# What no specification of ours holds, or not often.
SPICE = (
    *("0", "1", "2", "16", "17", "63", "64", "1e38", "3e38", "1e-45", "9223372036854775807", "0.5"),
    *("99999999999999999999", "0x8000000000000000", "size", ".", "->", "&", "[&]", "~", "!", "<"),
    *("<<", ">>", "%", "?", ":", "uint1", "uint16", "uint32", "uint<bitwidth>", "int", "float"),
    *("void", "float*", "uint<1 + 1>*", "lambda_func", "if", "else", "return", "param", "in"),
    *(
        "map",
        "reduce",
        "range",
        "concat",
        "extract",
        "filter",
        "sort",
        "top_k",
        "sample",
        "scatter",
    ),
    *("random<int>", "random<float>", "bitcast<float>", "bitcast<uint32>", "block_reduce", "state"),
    "hadamard",
    *("sum", "min", "max", "count", "and", "or", "prod", "sqrt", "exp2", "log2", "sign", "round"),
    *("gradient", "gradient.size", "seed", "step", "_", "__x", "\u00e9", "\0", "/*", "//", "\\"),
)


@dataclass(frozen=True)
class Corpus:
    """Texts to start from, the product's own and all, and what stands in them."""

    right: tuple[tuple[str, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    statements: tuple[tuple[str, ...], ...]


def split(text: str) -> tuple[str, ...]:
    """The tokens of a text, without its comments."""
    source = SourceFile("text", text)
    return tuple(token.text for token in tokenize(source, Report(source)) if token.kind != "end")


def group_end(tokens: list[str] | tuple[str, ...], start: int) -> int:
    """Where the bracket at `start` is closed, one behind; the end if it is not."""
    waiting = []
    for at in range(start, len(tokens)):
        if tokens[at] in BRACKETS:
            waiting.append(BRACKETS[tokens[at]])
        elif waiting and tokens[at] == waiting[-1]:
            waiting.pop()
            if not waiting:
                return at + 1
    return len(tokens)


def statement_end(tokens: list[str] | tuple[str, ...], start: int) -> int:
    """One behind the `;` or the block that ends what begins at `start`."""
    at = start
    while at < len(tokens):
        if tokens[at] == ";":
            return at + 1
        if tokens[at] in BRACKETS:
            is_block = tokens[at] == "{"
            at = group_end(tokens, at)
            if is_block:
                return at
        else:
            at += 1
    return at


def statement_starts(tokens: list[str] | tuple[str, ...]) -> list[int]:
    """Where statements, blocks and functions begin."""
    return [0, *(at + 1 for at, token in enumerate(tokens[:-1]) if token in "{};")]


@functools.cache
def corpus() -> Corpus:
    """All specifications of the product and of the tests, wrong ones too."""
    right, wrong = (
        tuple(split(file.read_bytes().decode("utf-8", errors="replace")) for file in sorted(files))
        for files in (SPECS.glob("*.pse"), TESTS.rglob("*.pse"))
    )
    texts = right + wrong
    tokens: dict[str, None] = dict.fromkeys(SPICE)
    groups: dict[tuple[str, ...], None] = {}
    statements: dict[tuple[str, ...], None] = {}
    for text in texts:
        tokens |= dict.fromkeys(text)
        for at, token in enumerate(text):
            if token in BRACKETS and group_end(text, at) - at < 60:
                groups[text[at : group_end(text, at)]] = None
        for at in statement_starts(text):
            if 0 < statement_end(text, at) - at < 80:
                statements[text[at : statement_end(text, at)]] = None
    return Corpus(right, texts, tuple(tokens), tuple(groups), tuple(statements))


def kind_of(token: str) -> str:
    """What may stand in for a token and be parsed: a name, a number, a bracket, an operator."""
    if token[:1].isalpha() or token[:1] == "_":
        return "name"
    if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
        return "number"
    return token if token in (*BRACKETS, *BRACKETS.values(), ";", ",") else "operator"


def mutate(choose: random.Random) -> str:
    """A specification with one to six changes; `choose` makes all choices."""
    known = corpus()
    tokens = list(choose.choice(known.right if choose.random() < 0.8 else known.texts))
    for _ in range(choose.choice([1, 1, 1, 2, 2, 3, 6])):
        if not tokens:
            break
        at = choose.randrange(len(tokens))
        choose.choice(CHANGES)(choose, tokens, at)
    return " ".join(tokens)


def _replace_alike(choose: random.Random, tokens: list[str], at: int) -> None:
    alike = [token for token in corpus().tokens if kind_of(token) == kind_of(tokens[at])]
    here = [token for token in tokens if kind_of(token) == kind_of(tokens[at])]
    tokens[at] = choose.choice(here if choose.random() < 0.6 or not alike else alike)


def _replace_by_any(choose: random.Random, tokens: list[str], at: int) -> None:
    tokens[at] = choose.choice(corpus().tokens)


def _insert(choose: random.Random, tokens: list[str], at: int) -> None:
    tokens.insert(at, choose.choice(corpus().tokens))


def _delete(choose: random.Random, tokens: list[str], at: int) -> None:
    del tokens[at : at + choose.randint(1, 3)]


def _swap(choose: random.Random, tokens: list[str], at: int) -> None:
    other = choose.randrange(len(tokens))
    tokens[at], tokens[other] = tokens[other], tokens[at]


def _replace_group(choose: random.Random, tokens: list[str], at: int) -> None:
    starts = [k for k, token in enumerate(tokens) if token in BRACKETS]
    if starts:
        start = choose.choice(starts)
        pool = [group for group in corpus().groups if group[0] == tokens[start]]
        tokens[start : group_end(tokens, start)] = choose.choice(pool)


def _replace_statement(choose: random.Random, tokens: list[str], at: int) -> None:
    start = choose.choice(statement_starts(tokens))
    tokens[start : statement_end(tokens, start)] = choose.choice(corpus().statements)


def _insert_statement(choose: random.Random, tokens: list[str], at: int) -> None:
    start = choose.choice(statement_starts(tokens))
    tokens[start:start] = choose.choice(corpus().statements)


def _repeat_statement(choose: random.Random, tokens: list[str], at: int) -> None:
    start = choose.choice(statement_starts(tokens))
    taken = tokens[start : statement_end(tokens, start)]
    tokens[start:start] = taken * choose.choice([1, 1, 2, 30])


def _wrap(choose: random.Random, tokens: list[str], at: int) -> None:
    if kind_of(tokens[at]) in ("name", "number"):
        depth = choose.choice([1, 2, 5, 62, 70, 500])
        before, behind = choose.choice(
            [("(", ")"), ("-", ""), ("abs (", ")"), ("1 +", ""), ("1 ? 2 :", ""), ("x [", "]")]
        )
        tokens[at : at + 1] = [before] * depth + [tokens[at]] + [behind] * depth


CHANGES: tuple[Callable[[random.Random, list[str], int], None], ...] = (
    *(_replace_alike, _replace_alike, _replace_alike, _replace_alike, _replace_by_any, _insert),
    *(_delete, _swap, _replace_group, _replace_group, _replace_statement, _insert_statement),
    *(_repeat_statement, _wrap),
)


def survives(data: bytes, name: str = "foo") -> nodes.Program | None:
    """Compiles, and checks what an accepted program promises; None: it was refused.

    Refused means diagnostics. Accepted means that every pass and back end takes it, and that the
    reference makes the same packets of the program before and after the passes.
    """
    try:
        program = compile_specification(Specification(name, ((f"{name}.pse", data),)))
    except compll.CompileError as error:
        assert error.diagnostics
        assert str(error).startswith("error[E")
        return None
    inlined = dict(passes.stages(program))["dead"]
    assert isinstance(inlined, nodes.Program)
    compll.generate(program)
    assert_same_packets(program, inlined)
    return program


def values_of(program: nodes.Program) -> dict[str, float]:
    """A value for each parameter: its default, or what is nearest to 3."""
    return {
        param.var.name: min(max(3, param.low), param.high)
        if param.default is None
        else param.default
        for param in program.params
    }


def sample(n: int = N) -> np.ndarray:
    """A gradient with values of every kind."""
    x = np.random.default_rng(n).normal(size=n).astype(np.float32)
    odd = np.array([0, -0.0, 1e-42, 3e38, -3e38, np.inf, -np.inf, np.nan, 1], np.float32)
    x[:: max(1, n // 9)][: odd.size] = odd[: min(n, odd.size)]
    return x


def codecs(*programs: nodes.Program) -> list[Reference] | None:
    """The reference of each program; None where its parameters or packets cannot be had here."""
    try:
        made = [Reference(program, **values_of(program)) for program in programs]
        small = all(codec.body_bytes(N) <= MAX_BYTES for codec in made)
    except ValueError:  # a width or a length is out of range with these parameters
        return None
    return made if small else None


def assert_same_packets(program: nodes.Program, inlined: nodes.Program) -> None:
    """Before and after the passes: the same packets, the same values."""
    made = codecs(program, inlined)
    if made is None:
        return
    before, after = made
    packet = None
    if program.encode is not None:
        # What is not finite or huge hides what is wrong with the rest: plain numbers, too.
        names = program.state_names
        states = [np.zeros((len(names), N), np.float32) if names else None for _ in range(2)]
        for x in (sample(), np.linspace(-2, 3, N).astype(np.float32)):
            packet = before.encode(x, seed=9, state=states[0])
            again = after.encode(x, seed=9, state=states[1])
            # The prefix holds the hash of the program as it was checked.
            assert packet[16:].tobytes() == again[16:].tobytes()
            np.testing.assert_array_equal(states[0], states[1])
    if program.decode is not None:
        body = np.zeros(before.body_bytes(N), np.uint8)
        bodies = [body] if packet is None else [body, packet[16:]]
        for body in bodies:
            assert decoded(before, body) == decoded(after, body)


def decoded(codec: Reference, body: np.ndarray) -> bytes | str:
    """What a body decodes to, each NaN alike, or why it does not."""
    try:
        out = codec.decode_body(body, N)
    except compll.PacketError as error:
        return str(error)
    return np.where(np.isnan(out), np.float32(np.nan), out).tobytes()
