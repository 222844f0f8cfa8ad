# SPDX-License-Identifier: Apache-2.0
"""Diagnostics: every code in one list, and how they are shown.

A stage collects what it finds in a `Report` and raises one `CompileError` with all of it, so that a
specification is mended in one go. Codes are stable: they are documented in docs/compll-language.md,
and each one has a test case under tests/compll/errors. The form is

    error[E201]: unknown name `gpa`
      --> specs/foo.pse:12:25
       |
    12 |     float r = gradient[i] / gpa;
       |                             ^^^
       = help: did you mean `gap`?

Hundreds say the stage: 0 lexer and file, 1 parser, 2 names, 3 types, 4 operators, 5 functions,
6 parameters, 7 back ends.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compll.source import SourceFile, Span

CODES = {
    "E001": "a character that the language does not have",
    "E002": "a comment that is never closed",
    "E003": "a malformed number",
    "E004": "a file that is not a specification: not text, or too long",
    "E101": "another token was expected",
    "E102": "nested too deeply",
    "E103": "a statement or operator of C that the language does not have",
    "E201": "unknown name",
    "E202": "unknown function",
    "E203": "a name declared twice, or two unequal blocks of one name",
    "E204": "an operator of CompLL that this version does not have",
    "E205": "a variable is read before it has a value",
    "E206": "an assignment to something that cannot be assigned",
    "E207": "a lambda that does not return on every path",
    "E208": "unknown type",
    "E301": "a value of another type is needed",
    "E302": "operands of a type that the operator does not take",
    "E303": "a wrong number of arguments",
    "E304": "a bad width of `uint`",
    "E305": "a lambda with a wrong signature",
    "E306": "unknown field",
    "E307": "only vectors can be indexed",
    "E308": "a number that its type cannot hold",
    "E401": "a reducer outside the accepted ones",
    "E402": "`random` in a wrong place, of a wrong type or reached twice, or `sample` in a Decode",
    "E403": "a length that depends on data",
    "E404": "a vector operator inside a lambda",
    "E405": "an order outside the accepted ones",
    "E406": "a `scatter` outside a Decode",
    "E407": "a number of elements that a block cannot have",
    "E501": "a function that is neither an Encode nor a Decode",
    "E502": "a wrong signature of Encode or Decode",
    "E503": "more than one codec in a file",
    "E504": "an Encode must end with one `concat` into its output",
    "E505": "a Decode must `extract` once and then assign its gradient",
    "E506": "Decode extracts something else than Encode concatenates",
    "E507": "Encode and Decode take different parameters",
    "E508": "Decode makes a vector of another length than its gradient",
    "E509": "a file without functions",
    "E510": "a value of this type has no form in a packet",
    "E511": "a statement that is not allowed there",
    "E601": "a `param` block that matches no codec or no parameter",
    "E602": "a bad default or range of a parameter",
    "E603": "a reserved parameter name",
    "E604": "a `state` block that matches no codec with an Encode, or holds more than 8 vectors",
    "E605": "a state that is not a `float*`",
    "E606": "a state that is not assigned exactly once",
    "E607": "a state in a Decode",
    "E608": "a state assigned a vector of another length than the gradient",
    "E701": "something that the CUDA back end does not do",
}

# What to do, where the place of a message knows nothing sharper.
HELP = {
    "E001": "remove it, or write it in a comment; programs are plain ASCII",
    "E002": "end it with `*/`",
    "E003": "write integers as 12 or 0xC, floats as 0.5 or 1e-3",
    "E004": "save it as UTF-8 text",
    "E101": "compare it with the grammar in docs/compll-language.md",
    "E102": "name parts of it in variables, or use fewer lambdas in lambdas",
    "E103": "write a `map` or a `reduce`",
    "E201": "declare it before it is used",
    "E202": "call one of the functions in docs/compll-language.md, or a lambda",
    "E203": "give one of the two another name",
    "E204": "see docs/compll-language.md for what stands in its place",
    "E205": "give it a value where it is declared",
    "E206": "declare a variable of your own and assign that",
    "E207": "end it with a `return` outside of any `if`",
    "E208": "write float, int, uint8 or another type of docs/compll-language.md",
    "E301": "write a value of that type, or declare a variable of it first",
    "E302": "declare an `int` first, as in `int j = x;`, and use that",
    "E303": "see docs/compll-language.md for its arguments",
    "E304": "write a number from 1 to 16, or parameters, as in `uint<bits>`",
    "E305": "write a lambda of that form, as in `[&](float x) -> float { return x; }`",
    "E306": "write `v.size`",
    "E307": "use the value without `[...]`",
    "E308": "write a number that is nearer to 0",
    "E401": "use one of sum, prod, min, max, count, and, or",
    "E402": "write `random<float>(lo, hi)` or `random<int>(lo, hi)`",
    "E403": "make the length of parameters and the gradient's size",
    "E404": "compute it before the lambda, which captures it",
    "E405": "write `less` or `greater`",
    "E406": "move it to the Decode",
    "E407": "write 16, 32, 64, 128, 256, 512, 1024 or a parameter",
    "E501": "name it XEncode or XDecode",
    "E502": "write its parameters in that order and with these types",
    "E503": "move it to a file of its own",
    "E504": "end the Encode with one `packet = concat(a, b, ...);`",
    "E505": "write one `extract(packet, a, b, ...);` and end with `gradient = ...;`",
    "E506": "extract what Encode concatenates, in that order",
    "E507": "give both functions the same parameters",
    "E508": "make it by a `map` over `range(gradient.size)`, or by a `scatter` of that size",
    "E509": "write an XEncode or an XDecode",
    "E510": "declare it with a width, as in `uint32 x = ...;`",
    "E511": "remove it, or assign its value to a variable",
    "E601": "write the type and the name as the functions do",
    "E602": "write numbers that the type and the range hold",
    "E603": "give the parameter another name",
    "E604": "name the block like the codec, with at most 8 vectors in it",
    "E605": "declare it as `float* NAME;`",
    "E606": "assign it once, outside of any `if`",
    "E607": "put what Decode needs into the packet",
    "E608": "make it by a `map` over `range(gradient.size)`",
    "E701": "leave cuda out: --target numpy,cpp,tensorflow",
}


_LONGEST_QUOTE = 60  # characters of the program's text in a message
_LONG_WORD = re.compile(rf"\w{{{_LONGEST_QUOTE + 3},}}")  # a name or a number of the program
_CONVERTED = re.compile(r"\bint\((\w+)\)")
_LONGEST_LINE = 160  # characters of the program's text; of a longer line a part is shown
_MOST_SHOWN = 20  # diagnostics of a specification: in a broken file one makes many others


@dataclass(frozen=True)
class Diagnostic:
    """One message: a code, what is wrong, where, and what helps.

    Attributes:
        code: key of `CODES`.
        message: what is wrong, in one line.
        span: where.
        notes: lines such as "note: ..." or "help: ...".
    """

    code: str
    message: str
    span: Span
    notes: tuple[str, ...] = ()

    def moved(self, by: int) -> "Diagnostic":
        """The same in a text that begins so many characters earlier."""
        return replace(self, span=Span(self.span.start + by, self.span.end + by))

    def render(self, source: SourceFile) -> str:
        """The message with the program text and carets under the span's first line."""
        source, start = source.at(self.span.start)
        number, column = source.location(start)
        text = source.line(number)
        before, marked, after = _around(text, column - 1, self.span.end - self.span.start)
        width = max(1, columns(printable(marked)))
        indent = columns(printable(before))
        gutter = " " * len(str(number))
        lines = [
            f"error[{self.code}]: {self.message}",
            f"{gutter}--> {source.name}:{number}:{column}",
            f"{gutter} |",
            f"{number} | {printable(before + marked + after)}",
            f"{gutter} | {' ' * indent}{'^' * width}",
            *(f"{gutter} = {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def _around(text: str, start: int, length: int) -> tuple[str, str, str]:
    """What of a line stands before, in and behind a place; of a long line what is near it."""
    end = min(len(text), start + length)
    first, last = 0, len(text)
    if len(text) > _LONGEST_LINE:
        first = max(0, start - _LONGEST_LINE // 2)
        last = min(len(text), first + _LONGEST_LINE)
        end = min(end, last)
    before = "..." + text[first:start] if first else text[:start]
    return before, text[start:end], text[end:last] + ("..." if last < len(text) else "")


def printable(text: str) -> str:
    """Text for a terminal: tabs as blanks, and what would not be seen, or act, as its escape."""
    return "".join(
        " "
        if char == "\t"
        else char
        if char.isprintable()
        else char.encode("unicode_escape").decode()
        for char in text
    )


def columns(text: str) -> int:
    """Columns that text takes on a terminal: wide characters take two, combining ones none.

    Those are the marks that take no place of their own: accents, and what many scripts write above
    or below a letter, which Unicode does not reorder and so gives no combining class.
    """
    return sum(
        0
        if unicodedata.category(char) in ("Mn", "Me")
        else 2
        if unicodedata.east_asian_width(char) in ("W", "F")
        else 1
        for char in text
    )


def as_written(text: str) -> str:
    """Types of the IR as programs have them: there a `uint8 b` makes no `uint<int(b)>`."""
    return _CONVERTED.sub(r"\1", text)


class CompileError(Exception):
    """A specification was refused. `str()` shows the first diagnostics with the program text.

    Attributes:
        source: the specification.
        diagnostics: all of them, in order.
    """

    def __init__(self, source: SourceFile, diagnostics: Sequence[Diagnostic]) -> None:
        """`diagnostics`: at least one, in the order they are to be shown."""
        self.source = source
        self.diagnostics = tuple(diagnostics)
        shown = [d.render(source) for d in self.diagnostics[:_MOST_SHOWN]]
        if more := len(self.diagnostics) - len(shown):
            shown.append(f"and {more} more error{'s' if more > 1 else ''} in {source.name}")
        super().__init__("\n\n".join(shown))


class Report:
    """Collects the diagnostics of one stage; one code is kept once for one place."""

    def __init__(self, source: SourceFile) -> None:
        """`source`: the file that the spans refer to."""
        self._source = source
        self._found: dict[tuple[str, Span], Diagnostic] = {}

    def add(self, code: str, message: str, span: Span, *notes: str) -> None:
        """Adds a diagnostic; where no note is a help, there is that of HELP for the code, too."""
        if code not in CODES:
            raise KeyError(f"`code` must be listed in CODES. Received: code={code!r}")
        if not any(note.startswith("help: ") for note in notes):
            notes = (*notes, f"help: {HELP[code]}")
        message, *lines = (
            _LONG_WORD.sub(lambda word: f"{word[0][:_LONGEST_QUOTE]}...", as_written(line))
            for line in (message, *notes)
        )
        self._found.setdefault((code, span), Diagnostic(code, message, span, tuple(lines)))

    def line(self, span: Span) -> int:
        """Number of the line where `span` starts, for notes that point elsewhere."""
        source, start = self._source.at(span.start)
        return source.location(start)[0]

    def text(self, span: Span) -> str:
        """What the program's text holds at `span`, on one line and cut where it is long."""
        words = " ".join(self._source.text[span.start : span.end].split())
        return words if len(words) <= _LONGEST_QUOTE else f"{words[:_LONGEST_QUOTE]}..."

    def place(self, span: Span) -> str:
        """The line where `span` starts, with its file if there are several, for such notes."""
        file = f" of {self._source.at(span.start)[0].name}" if self._source.parts else ""
        return f"line {self.line(span)}{file}"

    def raise_if_any(self) -> None:
        """Raises CompileError with all diagnostics in the order of the text, if there are any."""
        if self._found:
            found = sorted(self._found.values(), key=lambda d: (d.span.start, d.code))
            raise CompileError(self._source, found)
