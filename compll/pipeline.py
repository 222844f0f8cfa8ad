# SPDX-License-Identifier: Apache-2.0
"""The stages in order: parse, check, passes, emit. The only module that sees all of them.

Every stage reports all it finds before the next one starts, except that check also runs on what the
parser understood only if the parser understood everything.
"""

import re
from pathlib import Path

from compll.backends import cpp, tf_op
from compll.errors import CompileError, Report
from compll.frontend.check import check
from compll.frontend.parser import parse
from compll.ir import nodes
from compll.ir.verify import verify
from compll.passes import optimise
from compll.passes.inline import TooLargeError, inline
from compll.source import SourceFile, Span


def compile_spec(path: str | Path) -> nodes.Program:
    """Compiles the specification at `path` to a checked program, named after the stem of the file.

    Raises:
        CompileError: the specification is refused; holds every diagnostic.
        OSError: the file cannot be read.
    """
    path = Path(path)
    return compile_bytes(path.read_bytes(), path.stem, str(path))


def compile_bytes(data: bytes, name: str, shown: str) -> nodes.Program:
    """Compiles what a file holds; `name`: of the codec; `shown`: the file that messages name."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        readable = data.decode("ascii", errors="replace").replace("\ufffd", "?")
        report = Report(SourceFile(shown, readable))
        report.add("E004", "a specification must be UTF-8 text", Span(error.start, error.start + 1))
        report.raise_if_any()
        raise
    return compile_text(text, name, shown)


def compile_text(text: str, name: str, shown: str = "<text>") -> nodes.Program:
    """Compiles text; `name`: of the codec; `shown`: the file that messages name."""
    source = SourceFile(shown, text)
    report = Report(source)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        message = f"the file of a codec must be named like a variable. Received: {name!r}"
        report.add("E004", message, Span(0, 1))
    tree = parse(source, report)
    report.raise_if_any()
    program = check(tree, name, report)
    report.raise_if_any()
    if program is None:
        raise CompileError(source, ())
    verify(program)
    try:
        # What is accepted can be generated: size is a property of the specification.
        inline(program)
    except TooLargeError as error:
        report.add("E102", str(error), error.span)
        report.raise_if_any()
    return program


def generate(program: nodes.Program) -> dict[str, str]:
    """The sources of a codec, by file name: `NAME.codec.cc` and `NAME.tf.cc`."""
    plan = optimise(program)
    return {
        f"{program.name}.codec.cc": cpp.emit(plan),
        f"{program.name}.tf.cc": tf_op.emit(program),
    }
