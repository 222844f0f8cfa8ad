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

from collections.abc import Sequence
from dataclasses import dataclass

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
    "E203": "a name declared twice",
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
    "E402": "`random` or `sample` in a wrong place, or `random` of a wrong type",
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

    def render(self, source: SourceFile) -> str:
        """The message with the program text and carets under the span's first line."""
        number, column = source.location(self.span.start)
        text = source.line(number)
        shown = text.replace("\t", " ")
        width = max(1, min(self.span.end - self.span.start, len(text) - column + 1))
        gutter = " " * len(str(number))
        lines = [
            f"error[{self.code}]: {self.message}",
            f"{gutter}--> {source.name}:{number}:{column}",
            f"{gutter} |",
            f"{number} | {shown}",
            f"{gutter} | {' ' * (column - 1)}{'^' * width}",
            *(f"{gutter} = {note}" for note in self.notes),
        ]
        return "\n".join(lines)


class CompileError(Exception):
    """A specification was refused. `str()` shows every diagnostic with the program text."""

    def __init__(self, source: SourceFile, diagnostics: Sequence[Diagnostic]) -> None:
        """`diagnostics`: at least one, in the order they are to be shown."""
        self.source = source
        self.diagnostics = tuple(diagnostics)
        super().__init__("\n\n".join(d.render(source) for d in self.diagnostics))


class Report:
    """Collects the diagnostics of one stage; one code is kept once for one place."""

    def __init__(self, source: SourceFile) -> None:
        """`source`: the file that the spans refer to."""
        self._source = source
        self._found: dict[tuple[str, Span], Diagnostic] = {}

    def add(self, code: str, message: str, span: Span, *notes: str) -> None:
        """Adds a diagnostic."""
        if code not in CODES:
            raise KeyError(f"`code` must be listed in CODES. Received: code={code!r}")
        self._found.setdefault((code, span), Diagnostic(code, message, span, notes))

    def line(self, span: Span) -> int:
        """Number of the line where `span` starts, for notes that point elsewhere."""
        return self._source.location(span.start)[0]

    def raise_if_any(self) -> None:
        """Raises CompileError with all diagnostics in the order of the text, if there are any."""
        if self._found:
            found = sorted(self._found.values(), key=lambda d: (d.span.start, d.code))
            raise CompileError(self._source, found)
