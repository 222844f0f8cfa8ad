# SPDX-License-Identifier: Apache-2.0
"""The system's C++ compiler: from the source of a codec to a shared library.

A library is written aside and renamed, so that a process that wants it never sees half of it.
"""

import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = (
    *("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared"),
    # Vector code needs selections. Threaded jumps make branches of them; so does arithmetic that
    # may trap, which is moved to where its result is chosen. No number depends on either.
    *("-fno-thread-jumps", "-fno-trapping-math"),
    # A square root that may set errno is a call for each element; nobody looks at errno of one.
    "-fno-math-errno",
)
# What g++ alone knows: for clang++ such a flag is an error.
OF_GCC = frozenset({"-fno-thread-jumps"})
# Arithmetic as on a CPU: no fused multiply-add, denormals kept, all rounded to nearest.
# Code for T4, A100 and H100 and their like, and PTX for what is newer.
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    *("-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"),
    "--expt-relaxed-constexpr",
    "-cudart=static",
    "-Xcompiler=-ffp-contract=off,-fvisibility=hidden,-fPIC",
    "-gencode=arch=compute_75,code=sm_75",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
)
CPU = "TF_HIPS_CPU"
"""Of the environment: "avx2" or "base" for narrower registers than the processor has."""
BUILD_DEADLINE_S = 300
# What Linux calls the instructions of x86-64-v3 and -v4, and how compilers are told of them.
_V3 = "avx2 bmi1 bmi2 f16c fma movbe abm"
_V3_FLAGS = ("-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mmovbe", "-mlzcnt")
_V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
_V4_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_LEVELS = (
    (frozenset([*_V3.split(), *_V4.split()]), (*_V3_FLAGS, *_V4_FLAGS)),
    (frozenset(_V3.split()), _V3_FLAGS),
)
# What compilers say that they make code for, such as x86_64-pc-linux-gnu.
_TARGET = re.compile(r"(\w+)(-[\w.]+)+")
# Names that systems and compilers have for what Linux calls otherwise.
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}
# The start of an ELF file of 64 bits, little-endian. Of its header: the processor, where the tables
# of its segments and of its sections lie, the size of an entry of each, and their number. Of an
# entry: where a segment lies, and its bytes. Linkers write the sections' table last.
_ELF = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<18xH12xQQ6xHHHH2x")
_PROCESSORS = {62: "x86_64", 183: "aarch64"}
_SEGMENT = struct.Struct("<8xQ16xQ16x")
_SHOWN_CHARACTERS = 4000


class BuildError(RuntimeError):
    """There is no C++ compiler, it refused the source, or a cache cannot be used; says which."""


def include_folder() -> Path:
    """The folder that holds `tf_hips/cc/runtime`, for the C++ compiler's -I."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / "tf_hips/cc/runtime/codec.h").is_file():
        raise BuildError(
            f"the headers must be in {folder}/tf_hips/cc/runtime. Received: no codec.h there"
        )
    return folder


def compiler() -> tuple[str, ...]:
    """The C++ compiler, its path first: what `CXX` says, else g++.

    `CXX` may have arguments, as in "ccache g++" or "g++ -m64".
    """
    wanted = os.environ.get("CXX", "")
    try:
        first, *rest = shlex.split(wanted) or ["g++"]
    except ValueError as error:
        raise BuildError(f"`CXX` must be a command: {error}. Received: {wanted}") from error
    found = shutil.which(first)
    if found is None:
        raise BuildError(
            "a C++ compiler is needed for a specification: install g++ (apt-get install g++), "
            "set CXX, or load a library that `compll gen --build` made on another machine. "
            f"Received: no {first}"
        )
    return found, *rest


@functools.cache
def version(compiler: tuple[str, ...]) -> bytes:
    """What a compiler says of itself.

    Raises:
        BuildError: it is no compiler.
    """
    asked = [*compiler, "--version"]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"{' '.join(compiler)} must be a C++ compiler. Received: {error}"
        ) from error
    return done.stdout


def flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """FLAGS, without those that a compiler does not know.

    Raises:
        BuildError: it is no compiler.
    """
    if b"clang" not in version(compiler):
        return FLAGS
    return tuple(flag for flag in FLAGS if flag not in OF_GCC)


@functools.cache
def target(compiler: tuple[str, ...]) -> str:
    """The processor that a compiler makes code for, as `platform.machine` names it.

    This machine's own where the compiler does not say.
    """
    asked = [*compiler, "-dumpmachine"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, errors="replace", timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return platform.machine()
    found = _TARGET.fullmatch(done.stdout.strip())
    return platform.machine() if found is None else _SAME.get(found[1], found[1])


def check_here(compiler: tuple[str, ...]) -> None:
    """Raises BuildError where this machine cannot load what a compiler makes."""
    made_for = target(compiler)
    if made_for != platform.machine():
        raise BuildError(
            f"`CXX` must compile for this processor, {platform.machine()}, for what is loaded here "
            "(`compll gen --build` compiles for others, too). Received: "
            f"{' '.join(compiler)}, for {made_for}"
        )


def machine_flags(compiler: tuple[str, ...]) -> tuple[str, ...]:
    """Flags for the instructions that this machine has: less code, and a shorter wait.

    None where TF_HIPS_CPU asks for narrower registers: such a library has code for all machines.
    None for a compiler for another processor, which would refuse them, nor on AArch64, where all
    machines have the registers that there is code for.
    """
    if os.environ.get(CPU):
        return ()
    found = _instructions()
    level = next((flags for needed, flags in _LEVELS if found >= needed), None)
    if level is None or target(compiler) != "x86_64":
        return ()
    return (*level, "-DTF_HIPS_ONE_MACHINE")


@functools.cache
def _instructions() -> frozenset[str]:
    """What the processor has, as Linux names it; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def codec_id(name: str, specification: bytes) -> str:
    """What a library says it is: the codec's name and 16 digits of its specification's SHA-256."""
    return f"{name}@{hashlib.sha256(specification).hexdigest()[:16]}"


def compile_codec(
    source: str, identity: str, output: Path, command: tuple[str, ...] | None = None
) -> None:
    """Compiles the source of a codec to a library that stands alone, with the C interface only.

    Args:
        source: what `compll.generate` made.
        identity: `codec_id` of the specification, which the library tells whoever loads it.
        output: the library.
        command: compiler and flags; None: `compiler()` and its `flags`.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the output cannot be written.
    """
    told = f'-DTF_HIPS_CODEC_ID="{identity}"'
    if command is None:
        command = (*compiler(), *flags(compiler()))
    command = (*command, "-DTF_HIPS_STANDALONE_CODEC", told)
    _compile(source, f"{identity.partition('@')[0]}.codec.cc", output, command)


def compile_cuda(
    source: str, name: str, output: Path, nvcc: str, architectures: Sequence[str] = ()
) -> None:
    """Compiles the CUDA source of a codec to a library, which also says whether it can run.

    Args:
        source: what `compll.pipeline.cuda_source` made.
        name: of the codec.
        output: the library; of the interface of tf_hips/cc/cuda/library_cuda.h, too.
        nvcc: path of the compiler.
        architectures: GPUs that it has code for, such as "90" for sm_90; none: as NVCC_FLAGS says.

    Raises:
        BuildError: it fails.
        OSError: the output cannot be written.
    """
    flags = [flag for flag in NVCC_FLAGS if not architectures or "gencode" not in flag]
    flags += [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures]
    more = str(include_folder() / "tf_hips/cc/cuda/library.cu")
    _compile(source, f"{name}.cu", output, (nvcc, *flags, "-shared", more))


def _compile(source: str, file_name: str, output: Path, command: tuple[str, ...]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    # Ends with the process that writes it, or lies there under a name that nobody asks for.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".making-") as scratch:
        file = Path(scratch, file_name)
        file.write_text(source, encoding="ascii")
        made = Path(scratch, "codec.so")
        _run([*command, f"-I{include_folder()}", "-o", str(made), str(file)], file_name)
        made.replace(output)


def _run(command: list[str], file_name: str) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_DEADLINE_S,
        )
    except subprocess.CalledProcessError as error:
        shown = error.stderr.strip()[:_SHOWN_CHARACTERS]
        raise BuildError(f"{command[0]} refused {file_name}:\n{shown}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not finish within {BUILD_DEADLINE_S} s") from error


def is_whole(library: Path) -> bool:
    """Whether a file is a library, for any processor, that was not cut off."""
    try:
        check_whole(library, is_for_here=False)
        with library.open("rb") as file:
            head = file.read(_HEADER.size)
    except OSError:
        return False
    return len(head) == _HEADER.size and head.startswith(_ELF)


def check_whole(library: Path, *, is_for_here: bool = True) -> None:
    """Raises OSError where a library is for another processor, or was cut off.

    The system's loader finds no file in the first case. In the second it would end the process
    (SIGBUS).
    """
    with library.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_ELF):
            return  # the system's loader refuses it
        machine, begin, sections, each, number, each_section, num_sections = _HEADER.unpack(head)
        made_for = _PROCESSORS.get(machine, f"number {machine} of ELF")
        if is_for_here and made_for != platform.machine():
            raise OSError(f"it is for {made_for}, and this processor is {platform.machine()}")
        if each != _SEGMENT.size:
            return  # so it does with this
        file.seek(begin)
        table = file.read(each * number)
    segments = _SEGMENT.iter_unpack(table[: len(table) // each * each])
    ends = [offset + held for offset, held in segments]
    wanted = max([begin + each * number, sections + each_section * num_sections, *ends])
    if size < wanted:
        raise OSError(f"{size} bytes of at least {wanted}: it was cut off")
