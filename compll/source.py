# SPDX-License-Identifier: Apache-2.0
"""A specification's text and places in it.

A `Span` is a half-open range of character offsets; every token, tree node and IR node carries one.
Lines and columns are computed only when a message is rendered.
"""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (exclusive) of a source file."""

    start: int
    end: int

    def to(self, other: "Span") -> "Span":
        """The span from the start of this one to the end of `other`."""
        return Span(self.start, max(self.end, other.end))


@dataclass(frozen=True)
class SourceFile:
    """The text of one specification and the name that messages use for it.

    Attributes:
        name: of the file; of several, all of them.
        text: all of it.
        parts: the files that it is made of, where they are several, with their offsets in it.
    """

    name: str
    text: str
    parts: tuple[tuple[int, "SourceFile"], ...] = ()

    def at(self, offset: int) -> tuple["SourceFile", int]:
        """The file that a character offset lies in, and the offset in that file."""
        for start, part in reversed(self.parts):
            if offset >= start:
                return part, offset - start
        return self, offset

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    def location(self, offset: int) -> tuple[int, int]:
        """Line and column of a character offset in a single file, both counted from 1."""
        line = bisect.bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Text of a line, counted from 1, without its end."""
        start = self._line_starts[number - 1]
        end = self._line_starts[number] if number < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")


def join(files: Sequence[SourceFile]) -> SourceFile:
    """Files one below the other, each on lines of its own, as one."""
    if len(files) == 1:
        return files[0]
    parts = []
    text = ""
    for file in files:
        if text and not text.endswith("\n"):
            text += "\n"
        parts.append((len(text), file))
        text += file.text
    return SourceFile(" + ".join(file.name for file in files), text, tuple(parts))
