# SPDX-License-Identifier: Apache-2.0
"""The commands: gen, check, ir, run, includes.

Whatever the input, a mistake is one message on stderr and exit code 1 (2 when the command itself is
misspelt), never a traceback: one comes only from a fault of the compiler. Where nobody reads any
more what is printed, as behind `| head`, a command ends with 141 and says nothing.
"""

import argparse
import contextlib
import difflib
import errno
import io
import os
import platform
import re
import shutil
import signal
import sys
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from compll import __version__, passes, pipeline, specification
from compll.backends import toolchain
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from compll.backends.reference import Reference
from compll.backends.toolchain import BuildError, include_folder
from compll.errors import CompileError
from compll.ir import nodes
from compll.ir.printer import print_plan, print_program, spec_hash
from compll.packet import MAX_ELEMENTS, PacketError
from compll.pipeline import compile_specification, generate
from compll.specification import Specification


class CommandError(Exception):
    """Something that the user gave cannot be used; the message is all there is to say."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
        sys.stdout.flush()  # what cannot be written is told below, and not by Python as it ends
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (CommandError, PacketError, BuildError, ValueError) as error:
        sys.stderr.write(f"compll: error: {error}\n")
        return 1
    except MemoryError as error:
        sys.stderr.write(f"compll: error: not enough memory: {str(error) or 'no more is known'}\n")
        return 1
    except OSError as error:
        if error.filename is None:
            _drop_output()
            if error.errno == errno.EPIPE:
                return 128 + signal.SIGPIPE
        # A full disk has no file's name.
        where = f"{error.filename}: " if error.filename is not None else ""
        sys.stderr.write(f"compll: error: {where}{error.strerror or error}\n")
        return 1
    return 0


def _drop_output() -> None:
    """Sends what is still to be printed nowhere, so that Python does not try again as it ends."""
    with contextlib.suppress(OSError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


# How argparse says that a word is none of those that it may be.
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)$")


class _Parser(argparse.ArgumentParser):
    """One that names the choice that is nearest to a wrong one."""

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and exits with 2."""
        if wrong := _WRONG_CHOICE.search(message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[^\s,']+", wrong[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        super().error(message)


_SEVERAL = "a file of a codec (.pse); its Encode and its Decode may be in two"
_ONE = "a codec: one file, or that of its Encode and that of its Decode"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="compll",
        description="Compiles specifications of gradient compression.",
        epilog="`compll COMMAND --help` has the options of a command. To begin with: "
        "compll check my.pse",
    )
    parser.add_argument("--version", action="version", version=f"compll {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")

    gen = command("gen", "write the sources of each specification, with a Makefile")
    gen.add_argument("specs", nargs="+", metavar="SPEC", help=_SEVERAL)
    gen.add_argument(
        "-o", "--output", default=".", metavar="DIR", help="folder for the files (default: here)"
    )
    gen.add_argument(
        "--target",
        type=_targets,
        action="extend",
        metavar="T,T",
        help="of numpy (NAME_reference.py), cpp (NAME.codec.cc), cuda (NAME.cu) and tensorflow "
        "(NAME.tf.cc, which calls the cpp, so name both), with a Makefile; default: all that can "
        "be had",
    )
    gen.add_argument(
        "--build", action="store_true", help="leave NAME.so, too, a library for tf_hips.load"
    )
    gen.set_defaults(command=_gen, refuse=gen.error)
    check = command("check", "say whether specifications are right")
    check.add_argument("specs", nargs="+", metavar="SPEC", help=_SEVERAL)
    check.set_defaults(command=_check)
    ir = command("ir", "print the typed IR and the loops that are made of it")
    ir.add_argument("specs", nargs="+", metavar="SPEC", help=_ONE)
    ir.add_argument(
        "--after",
        choices=passes.NAMES,
        metavar="PASS",
        help=f"print what this pass made: one of {', '.join(passes.NAMES)}",
    )
    ir.set_defaults(command=_ir)
    run = command("run", "run a function of a specification on a .npy file")
    run.add_argument("specs", nargs="+", metavar="SPEC", help=_ONE)
    run.add_argument("function", metavar="FUNCTION", help="such as TernGradEncode")
    run.add_argument(
        "--in",
        dest="input",
        required=True,
        metavar="X.npy",
        help="a vector: float32 to encode, the uint8 of a packet to decode",
    )
    run.add_argument(
        "--out", dest="output", required=True, metavar="Y.npy", help="where to write the result"
    )
    run.add_argument(
        "--set",
        dest="values",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter",
    )
    for name, bits in _KEY.items():
        run.add_argument(
            f"--{name.replace('_', '-')}",
            type=_word(bits),
            metavar="N",
            help=f"of the noise, in [0, 2^{bits}), when encoding (default: 0)",
        )
    run.add_argument(
        "--state",
        metavar="S.npy",
        help="what an encoder with state kept: float32, a row per state (default: zeros)",
    )
    run.add_argument("--new-state", metavar="T.npy", help="where to write what it keeps then")
    run.add_argument(
        "--residual",
        metavar="R.npy",
        help="error feedback: what the encodings before dropped, added to the input",
    )
    run.add_argument(
        "--new-residual",
        metavar="S.npy",
        help="where to write what this encoding drops then: sent next time with --residual",
    )
    run.add_argument("--size", type=int, metavar="N", help="elements to decode")
    run.add_argument(
        "--backend",
        choices=("numpy", "cpp"),
        default="numpy",
        help="the interpreter, or the C++ that it is compiled to (default: numpy)",
    )
    run.set_defaults(command=_run)
    includes = command("includes", "print the folder to give to the C++ compiler's -I")
    includes.set_defaults(command=lambda _: sys.stdout.write(f"{include_folder()}\n"))
    return parser


# What the noise of an encoding depends on, with the bits of each.
_KEY = {"seed": 64, "step": 32, "tensor_id": 32, "offset": 63}


def _word(bits: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value < 1 << bits:
            raise argparse.ArgumentTypeError(f"must be in [0, 2^{bits}). Received: {text}")
        return value

    parse.__name__ = "integer"
    return parse


def _targets(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    known = ", ".join(pipeline.TARGETS)
    for target in found:
        if target not in pipeline.TARGETS:
            raise argparse.ArgumentTypeError(f"must be of {known}. Received: {target!r}")
    return found


def _gen(options: argparse.Namespace) -> None:
    # The option may be given several times.
    targets = None if options.target is None else tuple(dict.fromkeys(options.target))
    if targets is not None and "tensorflow" in targets and "cpp" not in targets:
        options.refuse(
            "argument --target: tensorflow needs cpp beside it, which its operations call: write "
            "cpp,tensorflow"
        )
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"`--output` must be a folder. Received: {folder}, which is none")
    specs = specification.group(options.specs)
    try:
        if targets is not None:
            written = pipeline.write(specs, folder, targets)
        else:
            written = pipeline.write(specs, folder, needs_cuda=False)
    except CompileError:
        _refuse(_told(specs)[1])
        raise
    if written.left_out:
        told = "\n\n".join(map(str, written.left_out.values()))
        names = ", ".join(written.left_out)
        sys.stderr.write(f"{told}\ncompll: the rest was written, without {names}\n")
    libraries = [f"{spec.name}.so" for spec in specs] if options.build else []
    if removed := [name for name in written.removed if name not in libraries]:
        sys.stderr.write(
            f"compll: removed what was made of another specification: {', '.join(removed)}\n"
        )
    if options.build:
        for spec in specs:
            sys.stdout.write(f"{pipeline.build(spec, folder)}\n")
        made_for, here = toolchain.target(toolchain.compiler()), platform.machine()
        if made_for != here:
            sys.stderr.write(
                f"compll: built for {made_for}: a machine like this, {here}, cannot load it\n"
            )


def _check(options: argparse.Namespace) -> None:
    right, problems = _told(specification.group(options.specs))
    for shown, program in right:
        functions = [f.name for f in (program.encode, program.decode) if f is not None]
        sys.stdout.write(f"{shown}: {', '.join(functions)}; spec hash {spec_hash(program):08x}\n")
    _refuse(problems)


def _told(
    specs: Sequence[Specification],
) -> tuple[list[tuple[str, nodes.Program]], list[CompileError]]:
    """Those of several specifications that are right, and what is wrong with all others."""
    right, problems = [], []
    for spec in specs:
        try:
            right.append((spec.shown, compile_specification(spec)))
        except CompileError as error:
            problems.append(error)
    return right, problems


def _refuse(problems: Sequence[CompileError]) -> None:
    if problems:
        told = "\n\n".join(map(str, problems))
        raise CommandError(f"the following specifications are wrong\n\n{told}")


def _one(options: argparse.Namespace) -> Specification:
    """The specification that was given, in one file or two."""
    found = specification.group(options.specs)
    if len(found) > 1:
        shown = " and ".join(spec.shown for spec in found)
        raise CommandError(f"`SPEC` must be one codec, in one file or two. Received: {shown}")
    return found[0]


def _ir(options: argparse.Namespace) -> None:
    program = compile_specification(_one(options))
    if options.after is None:
        sys.stdout.write(f"{print_program(program)}\n{print_plan(passes.optimise(program))}")
        return
    made = dict(passes.stages(program))[options.after]
    sys.stdout.write(print_plan(made) if isinstance(made, nodes.Plan) else print_program(made))


def _run(options: argparse.Namespace) -> None:
    spec = _one(options)
    program = compile_specification(spec)
    functions = {f.name: f for f in (program.encode, program.decode) if f is not None}
    if options.function not in functions:
        known = " and ".join(functions)
        raise CommandError(
            f"`FUNCTION` must be one of {spec.shown}: {known}. Received: {options.function}"
        )
    _check_outputs(options)
    codec = _codec(program, _values(options.values), options.backend)
    data = _load(options.input)
    key = {name: value for name in _KEY if (value := getattr(options, name)) is not None}
    result: npt.NDArray[Any]
    results: list[tuple[str, npt.NDArray[Any]]]
    if isinstance(functions[options.function], nodes.Encode):
        if options.size is not None:
            raise CommandError(
                "`--size` is for decoding only: an encode takes its size from its input"
            )
        gradient = _with_residual(codec, _vector(data, np.float32, options.input), options)
        state = _state(codec, gradient.size, options)
        result = codec.encode(gradient, **key, state=state)
        results = [(options.output, result)]
        if options.new_residual is not None:
            rest = _dropped(gradient, codec.decode(result, gradient.size))
            results.append((options.new_residual, rest))
        if state is not None and options.new_state is not None:
            results.append((options.new_state, state))
    else:
        if options.state is not None or options.new_state is not None:
            raise CommandError("`--state` and `--new-state` are for encoding only")
        if options.residual is not None or options.new_residual is not None:
            raise CommandError("`--residual` and `--new-residual` are for encoding only")
        if key:
            shown = ", ".join(f"`--{name.replace('_', '-')}`" for name in key)
            raise CommandError(f"{shown} is for encoding only: a decode draws no noise")
        if options.size is None or not 0 <= options.size <= MAX_ELEMENTS:
            shown = "nothing" if options.size is None else options.size
            raise CommandError(
                f"`--size` must be the number of elements to decode, at most {MAX_ELEMENTS}. "
                f"Received: {shown}"
            )
        result = codec.decode(_vector(data, np.uint8, options.input), options.size)
        results = [(options.output, result)]
    _save(results)


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuses two outputs in one file, of which the last one alone would be left."""
    given = {
        "--out": options.output,
        "--new-residual": options.new_residual,
        "--new-state": options.new_state,
    }
    seen: dict[str, str] = {}
    for option, name in given.items():
        if name is None:
            continue
        path = Path(os.path.realpath(name))
        if path.exists() and not path.is_file():  # a pipe, /dev/null
            continue
        other = seen.setdefault(str(path), option)
        if other != option:
            raise CommandError(f"`{other}` and `{option}` must be two files. Received: {name}")


def _save(results: Sequence[tuple[str, npt.NDArray[Any]]]) -> None:
    """Writes all files, or none where one cannot be: what is kept belongs to a packet."""
    with contextlib.ExitStack() as stack:
        asides = []
        for number, (name, values) in enumerate(results):
            path = aside = Path(name)
            is_device = name.startswith("/dev/")  # such as a file behind /dev/stdout
            if not is_device and (path.is_file() or not path.exists()):  # no pipe and no folder
                path = aside = Path(os.path.realpath(name))
                is_new = not path.exists()
                if os.access(path.parent, os.W_OK) and (is_new or os.access(path, os.W_OK)):
                    aside = path.with_name(f".{path.name}.{os.getpid()}.{number}")
                    stack.callback(aside.unlink, missing_ok=True)
            try:
                with aside.open("wb") as file:
                    if file.seekable():
                        np.save(file, values)
                    else:  # NumPy asks for the place in a file, and a pipe has none
                        np.save(whole := io.BytesIO(), values)
                        file.write(whole.getbuffer())
            except OSError as error:
                raise OSError(error.errno, error.strerror or str(error), name) from error
            asides.append((aside, path))
        for aside, path in asides:
            if aside != path:
                if path.exists():
                    shutil.copymode(path, aside)
                aside.replace(path)


def _with_residual(
    codec: Reference | CompiledCodec, gradient: npt.NDArray[np.float32], options: argparse.Namespace
) -> npt.NDArray[np.float32]:
    """What is encoded: with error feedback the sum of a gradient and its residual."""
    if options.residual is None and options.new_residual is None:
        return gradient
    shown = " + ".join(options.specs)
    if codec.program.decode is None:
        raise CommandError(f"{shown} must have a Decode for `--residual` and `--new-residual`")
    if codec.state_names:
        raise CommandError(
            f"{shown} must have no `state` block for `--residual` and `--new-residual`"
        )
    if options.residual is None:
        return gradient
    residual = _vector(_load(options.residual), np.float32, options.residual)
    if residual.size != gradient.size:
        raise CommandError(
            f"{options.residual} must hold {gradient.size} elements, as {options.input} does. "
            f"Received: {residual.size}"
        )
    with np.errstate(all="ignore"):
        total: npt.NDArray[np.float32] = gradient + residual
    return total


def _dropped(
    wanted: npt.NDArray[np.float32], sent: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What a packet lacks; what is not finite would stay for ever, and is 0."""
    with np.errstate(all="ignore"):
        rest: npt.NDArray[np.float32] = wanted - sent
    rest[~np.isfinite(rest)] = 0
    return rest


def _state(
    codec: Reference | CompiledCodec, n: int, options: argparse.Namespace
) -> npt.NDArray[np.float32] | None:
    """What the encoder kept, or zeros; None for one without state."""
    if not codec.state_names:
        if options.state is not None or options.new_state is not None:
            shown = " + ".join(options.specs)
            raise CommandError(f"{shown} must have a `state` block for that")
        return None
    if options.state is None:
        return np.zeros((len(codec.state_names), n), np.float32)
    return _load(options.state)


def _codec(
    program: nodes.Program, values: dict[str, float], backend: str
) -> Reference | CompiledCodec:
    reference = Reference(program, **values)
    if backend == "numpy":
        return reference
    toolchain.check_here(toolchain.compiler())
    source = generate(program)[f"{program.name}.codec.cc"]
    # For this machine alone: the wait is for less than half the code.
    flags = toolchain.machine_flags(toolchain.compiler())
    return CompiledCodec(program, build(source, program.name, flags), **values)


def _values(settings: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            equals = ""
        if not equals or not name.isidentifier():
            raise CommandError(f"`--set` must be NAME=NUMBER. Received: {setting}")
        if name in values:
            raise CommandError(f"`--set` must give {name} once. Received: {' '.join(settings)}")
        values[name] = value
    return values


# What NumPy raises for headers that are no Python literal, or name no type or shape.
_BAD_HEADER = (SyntaxError, tokenize.TokenError, TypeError, OverflowError, RecursionError)


def _load(path: str) -> npt.NDArray[Any]:
    with Path(path).open("rb") as file:
        try:
            source = file if file.seekable() else io.BytesIO(file.read())
            # Not np.load, which also takes archives and advises to load pickles.
            data: npt.NDArray[Any] = np.lib.format.read_array(source, allow_pickle=False)
        except (*_BAD_HEADER, ValueError, EOFError, MemoryError) as error:
            reason = " ".join(str(error).split())
            raise CommandError(f"{path} must be a .npy file of numbers: {reason}") from error
    return data


def _vector(data: npt.NDArray[Any], kind: type, path: str) -> npt.NDArray[Any]:
    if data.dtype != kind or data.ndim != 1:
        wanted = np.dtype(kind).name
        raise CommandError(
            f"{path} must hold a {wanted} vector. Received: {data.dtype} of shape {data.shape}"
        )
    return data
