# SPDX-License-Identifier: Apache-2.0
"""The stages in order: parse, check, passes, emit. The only module that sees all of them.

Every stage reports all it finds before the next one starts, except that check also runs on what the
parser understood only if the parser understood everything.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compll import specification
from compll.backends import cpp, cuda, makefile, module, tf_op, toolchain
from compll.errors import CompileError, Report
from compll.frontend.check import check
from compll.frontend.parser import parse
from compll.ir import nodes
from compll.ir.verify import verify
from compll.passes import optimise
from compll.passes.inline import TooLargeError, inline
from compll.source import SourceFile, Span, join
from compll.specification import Specification


def compile_spec(path: str | Path, other: str | Path | None = None) -> nodes.Program:
    """Compiles the specification at `path` to a checked program.

    Args:
        path: the file of a codec, which is named after it, or of its Encode or Decode; then the
            other half is looked for beside it (FooEncode.pse and FooDecode.pse are one codec, Foo)
            and may be missing.
        other: the file of the other half, wherever it is.

    Raises:
        CompileError: the specification is refused; holds every diagnostic.
        OSError: a file cannot be read.
    """
    return compile_specification(specification.read(path, other))


def compile_specification(spec: Specification) -> nodes.Program:
    """Compiles what the files of a specification hold; raises CompileError."""
    return _compile([_source(file, data) for file, data in spec.parts], spec.name)


def _source(shown: str, data: bytes) -> SourceFile:
    try:
        return SourceFile(shown, text_of(data))
    except UnicodeDecodeError as error:
        readable = error.object.decode("ascii", errors="replace").replace("\ufffd", "?")
        report = Report(SourceFile(shown, readable))
        report.add("E004", "a specification must be UTF-8 text", Span(error.start, error.start + 1))
        report.raise_if_any()
        raise


def text_of(data: bytes) -> str:
    """The text of a specification: UTF-8, with a byte order mark or without.

    Raises:
        UnicodeDecodeError: it is something else.
    """
    return data.decode("utf-8-sig")


def compile_text(text: str, name: str, shown: str = "<text>") -> nodes.Program:
    """Compiles text; `name`: of the codec; `shown`: the file that messages name."""
    return _compile([SourceFile(shown, text)], name)


def _compile(files: Sequence[SourceFile], name: str) -> nodes.Program:
    """Compiles one file, or two that are read as one; `name`: of the codec."""
    source = join(files)
    found = []
    # Each for itself, so that a bracket that one leaves open is not looked for in the other.
    for start, file in source.parts:
        report = Report(file)
        try:
            parse(file, report)
            report.raise_if_any()
        except CompileError as error:
            found += [one.moved(start) for one in error.diagnostics]
    if found:
        raise CompileError(source, found)
    report = Report(source)
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        message = f"the file of a codec must be named like a variable. Received: {name!r}"
        report.add("E004", message, Span(0, 1), "help: rename it, such as to my_codec.pse")
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
        report.add("E102", str(error), error.span, error.advice)
        report.raise_if_any()
    return program


# All that `write` leaves says in its first lines what it is.
_HEAD_BYTES = 400
TARGETS = ("numpy", "cpp", "cuda", "tensorflow")
"""What `write` can make; `cpp` is what TensorFlow's operations are built on."""


@dataclass(frozen=True)
class Written:
    """What `write` did besides writing.

    Attributes:
        left_out: the `.cu` files that CUDA's back end refused, each with the reason. One of an
            earlier call was removed: the Makefile would build it beside other sources than its own.
        removed: files that were of another specification of a codec's name, with what was built of
            them: parts that this call did not write, which nobody would tell from those it did.
    """

    left_out: Mapping[str, CompileError]
    removed: tuple[str, ...]


def write(
    specs: Sequence[Specification],
    folder: Path,
    targets: Sequence[str] = TARGETS,
    *,
    needs_cuda: bool = True,
) -> Written:
    """Compiles specifications and writes their sources, with a Makefile, to a folder.

    The Makefile is the same whatever is written, and builds all that lies in the folder: what an
    earlier call left there stays if it is of other codecs, or of the same specification.

    Args:
        specs: of codecs; all are compiled before anything is written.
        folder: made if it is missing.
        targets: of TARGETS.
        needs_cuda: raise what the CUDA back end refuses; else leave that codec's `.cu` out.

    Returns:
        What was left out, and what was removed.

    Raises:
        CompileError: a specification is refused, or is by the CUDA back end if that is needed.
        ValueError: two of them would be written to the same file, or name the same operations; or
            a file that would be written or removed is not of this compiler.
        OSError: a file cannot be written.
    """
    programs = [compile_specification(spec) for spec in specs]
    _check_distinct(specs, programs)
    files: dict[str, str] = {}
    left_out: dict[str, CompileError] = {}
    removed: list[str] = []
    for program, spec in zip(programs, specs, strict=True):
        parts = _parts(program, spec)
        kernels = f"{program.name}.cu"
        if "cuda" in targets or (folder / kernels).exists():
            try:
                parts[kernels] = cuda_source(program, spec)
            except CompileError as error:
                if "cuda" in targets and needs_cuda:
                    raise
                if "cuda" in targets:
                    left_out[kernels] = error
        mine = {
            name: text
            for name, text in parts.items()
            if _TARGET_OF[name.removeprefix(program.name)] in targets
        }
        removed += _leftovers(folder, program.name, parts, {*mine, *left_out})
        files |= mine
    if "cpp" in targets or "cuda" in targets:
        files["Makefile"] = makefile.TEXT
    _check_ours(folder / name for name in (*files, *left_out))
    _check_operations(folder, files)
    _check_libraries(folder, files)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="ascii")
    for name in (*left_out, *removed):
        (folder / name).unlink(missing_ok=True)
    return Written(left_out, tuple(removed))


# The sources of a codec, by what follows its name, with the target that each belongs to.
_TARGET_OF = {
    ".codec.cc": "cpp",
    ".mk": "cpp",
    ".tf.cc": "tensorflow",
    "_reference.py": "numpy",
    ".cu": "cuda",
}
# What is built of them, with something that no library of another origin holds.
_BUILT = {".so": b"tf_hips_codec_id", "_ops.so": b"Compll>", "_cuda.so": b"tf_hips_cuda_codec_"}


def _parts(program: nodes.Program, spec: Specification) -> dict[str, str]:
    """The sources of a codec, by file name, without the kernels."""
    name = program.name
    named = " and ".join(Path(file).name for file, _ in spec.parts)
    return {
        **generate(program),
        f"{name}.mk": makefile.identify(name, toolchain.codec_id(name, spec.data)),
        f"{name}_reference.py": module.emit(program, text_of(spec.data), ascii(named)[1:-1]),
    }


def _leftovers(
    folder: Path, name: str, parts: Mapping[str, str], written: Collection[str]
) -> list[str]:
    """Files of a codec that are of another specification than the one that is written now.

    Args:
        folder: where they lie.
        name: of the codec.
        parts: its sources; kernels only if they lie there or are written.
        written: names of the sources that this call overwrites or removes anyhow.
    """
    there = [
        path for end in _TARGET_OF if (path := folder / f"{name}{end}").is_file() and _is_ours(path)
    ]
    built = [
        path
        for end, mark in _BUILT.items()
        if (path := folder / f"{name}{end}").is_file() and mark in path.read_bytes()
    ]
    says, named = parts[f"{name}.mk"], folder / f"{name}.mk"
    identity = says.rpartition(" ")[2].strip().encode()
    # It names the specification: what differs then was changed by hand, or is of another compll.
    is_same = (
        named.read_bytes() == says.encode()
        if named in there
        else all(path.read_bytes() == parts.get(path.name, "").encode() for path in there)
    )
    stale = [] if is_same else [*there]
    for path in built:
        names_it = path.name == f"{name}.so"  # the specification, too
        stale += [path] * (identity not in path.read_bytes() if names_it else not is_same)
    return [path.name for path in stale if path.name not in written]


def cuda_source(program: nodes.Program, spec: Specification) -> str:
    """The source of a codec for nvcc, `NAME.cu`.

    Args:
        program: what was compiled from `spec`.
        spec: for messages.

    Raises:
        CompileError: the CUDA back end does not do something that the specification asks for.
    """
    plan = optimise(program)
    report = Report(join([_source(file, data) for file, data in spec.parts]))
    for refusal in cuda.refusals(plan):
        note = "help: leave cuda out: --target numpy,cpp,tensorflow"
        report.add("E701", refusal.message, refusal.span, note)
    report.raise_if_any()
    return cuda.emit(plan)


def build(spec: Specification, folder: Path) -> Path:
    """Compiles a specification to a library that `tf_hips.load` takes; returns its path.

    Raises:
        CompileError, ValueError, OSError: as for `write`; BuildError: the C++ compiler is missing
            or fails.
    """
    program = compile_specification(spec)
    library = folder / f"{program.name}.so"
    if library.exists() and b"tf_hips_codec_id" not in library.read_bytes():
        raise _not_ours(library)
    source = generate(program)[f"{program.name}.codec.cc"]
    toolchain.compile_codec(source, toolchain.codec_id(program.name, spec.data), library)
    return library


def _check_ours(files: Iterable[Path]) -> None:
    """Raises ValueError if one of them lies there and is not of this compiler."""
    for file in files:
        if file.exists() and not _is_ours(file):
            raise _not_ours(file)


def _is_ours(file: Path) -> bool:
    with file.open("rb") as held:
        head = held.read(_HEAD_BYTES)
    return not head or b"Generated by compll" in head  # an empty one is no loss


def _not_ours(file: Path) -> ValueError:
    return ValueError(
        f"{file} must be made by compll to be overwritten or removed. Received: a file of another "
        "origin; move it away, or choose another folder"
    )


def _check_distinct(specs: Sequence[Specification], programs: Sequence[nodes.Program]) -> None:
    """Raises ValueError if two programs have one name, or one prefix of operations."""
    for attribute, what in (
        ("name", "be written to {}.codec.cc"),
        ("prefix", "register operations of {}"),
    ):
        seen: dict[str, str] = {}
        for spec, program in zip(specs, programs, strict=True):
            value: str = getattr(program, attribute)
            if value in seen:
                raise ValueError(f"{seen[value]} and {spec.shown} would both {what.format(value)}")
            seen[value] = spec.shown


def _check_operations(folder: Path, files: Mapping[str, str]) -> None:
    """Raises ValueError if what lies in a folder registers operations of files to be written."""
    made = {name: text for name, text in files.items() if name.endswith(".tf.cc")}
    for other in sorted(folder.glob("*.tf.cc")) if made else ():
        if other.name in files:
            continue
        theirs = _operations(other.read_text(encoding="utf-8", errors="replace"))
        for name, text in made.items():
            for operation in sorted(theirs & _operations(text)):
                raise ValueError(
                    f"{name} and {other} would both register operations such as {operation}, and "
                    "a process that loads both would have neither. Remove one, or rename its "
                    "functions"
                )


def _check_libraries(folder: Path, files: Iterable[str]) -> None:
    """Raises ValueError if the Makefile would build two things under one name."""
    there = [*files, *(path.name for path in folder.glob("*"))]
    ends = (".codec.cc", ".cu")
    codecs = {name.removesuffix(end) for name in there for end in ends if name.endswith(end)}
    for name in sorted(codecs):
        for end in ("_ops", "_cuda"):
            if f"{name}{end}" in codecs and "Makefile" in files:
                raise ValueError(
                    f"{name} and {name}{end} would both be built to {name}{end}.so: rename one, or "
                    "choose another folder"
                )


def _operations(text: str) -> set[str]:
    """The operations that a NAME.tf.cc registers."""
    return set(re.findall(r"^REGISTER_OP\(.*\"(.*)\"\)$", text, re.MULTILINE))


def generate(program: nodes.Program) -> dict[str, str]:
    """The sources of a codec, by file name: `NAME.codec.cc` and `NAME.tf.cc`."""
    plan = optimise(program)
    return {
        f"{program.name}.codec.cc": cpp.emit(plan),
        f"{program.name}.tf.cc": tf_op.emit(program),
    }
