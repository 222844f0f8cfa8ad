# SPDX-License-Identifier: Apache-2.0
"""Text to tokens.

Comments are `//` to the end of the line and `/* */`. The list of tokens always ends with one of
kind "end". Characters outside the language are reported and skipped, so that all of them are found
in one run; the parser only gets files without any.
"""

import re
from dataclasses import dataclass

from compll.errors import Report
from compll.source import SourceFile, Span

MAX_CHARACTERS = 1 << 20
# Control characters that no text has.
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")

_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n\r]*|/\*.*?\*/)"
    r"|(?P<open>/\*)"
    r"|(?P<directive>#[^\n\r]*)"
    r"|(?P<string>\"[^\"\n\r]*\"?|'[^'\n\r]*')"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[A-Za-z0-9_.]*)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<op>->|<<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%<>=!~&|^?:;,.(){}\[\]])",
    re.DOTALL,
)
_INTEGER = re.compile(r"[0-9]+\Z")
_HEXADECIMAL = re.compile(r"0[xX][0-9A-Fa-f]{1,16}\Z")
_FLOAT = re.compile(r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eEfF]))(?:[eE][+-]?[0-9]+)?[fF]?\Z")


@dataclass(frozen=True, slots=True)
class Token:
    """A token; `kind` is "name", "int", "float", "op" or "end"."""

    kind: str
    text: str
    span: Span

    def describe(self) -> str:
        """The token as messages name it."""
        return "the end of the file" if self.kind == "end" else f"`{self.text}`"


def tokenize(source: SourceFile, report: Report) -> list[Token]:
    """Splits a file into tokens; findings go to `report`."""
    text = source.text
    if len(text) > MAX_CHARACTERS:
        report.add(
            "E004",
            f"a specification must have at most {MAX_CHARACTERS} characters. Received: {len(text)}",
            Span(0, 1),
            "help: shorten it; a codec is a page of text",
        )
        text = ""
    if (found := _BINARY.search(text)) is not None:
        message = "a specification must be text. Received: a file with control characters"
        report.add("E004", message, Span(found.start(), found.end()))
        text = ""
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            shown = (
                text[at]
                if text[at].isprintable() and text[at].isascii()
                else f"U+{ord(text[at]):04X}"
            )
            report.add("E001", f"unexpected character `{shown}`", Span(at, at + 1))
            at += 1
            continue
        span = Span(at, match.end())
        kind = match.lastgroup
        if kind == "open":
            report.add("E002", "this comment is never closed", span, "help: end it with `*/`")
            break
        if kind in ("directive", "string"):
            _foreign(match.group(), span, report)
        elif kind == "number":
            tokens.append(_number(match.group(), span, report))
        elif kind != "space":
            tokens.append(Token(str(kind), match.group(), span))
        at = match.end()
    end = len(text.rstrip())
    tokens.append(Token("end", "", Span(end, end + 1)))
    return tokens


def _foreign(text: str, span: Span, report: Report) -> None:
    """Reports a string or a line of a preprocessor: one message for all of it."""
    if not text.startswith("#"):
        help_line = "help: write numbers; a parameter stands for what is chosen by name"
        report.add("E001", "the language has no strings", span, help_line)
        return
    help_line = "help: write comments as `// ...`"
    message = "the language has no lines with `#`"
    if text[1:].strip().startswith("include"):
        message = "files are not included"
        help_line = "help: remove the line; all functions are built in"
    report.add("E001", message, span, help_line)


def _number(text: str, span: Span, report: Report) -> Token:
    if _INTEGER.match(text):
        if len(text) > 1 and text[0] == "0":
            report.add(
                "E003", f"malformed number `{text}`", span, "help: integers have no leading zeros"
            )
            return Token("int", "0", span)
        return Token("int", text, span)
    if _HEXADECIMAL.match(text):
        return Token("int", str(int(text, 16)), span)
    if _FLOAT.match(text):
        return Token("float", text.rstrip("fF"), span)
    report.add(
        "E003",
        f"malformed number `{text}`",
        span,
        "help: write integers as 12 or 0xC, floats as 0.5 or 1e-3",
    )
    return Token("int", "0", span)
