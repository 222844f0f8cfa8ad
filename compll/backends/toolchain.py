# SPDX-License-Identifier: Apache-2.0
"""The system's C++ compiler: from the source of a codec to a shared library.

A library is written aside and renamed, so that a process that wants it never sees half of it.
"""

import hashlib
import os
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
# Arithmetic as on a CPU: no fused multiply-add, denormals kept, all rounded to nearest.
# Code for A100 and H100, and PTX for what is newer.
NVCC_FLAGS = (
    "-O3",
    "-std=c++17",
    *("-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"),
    "--expt-relaxed-constexpr",
    "-cudart=static",
    "-Xcompiler=-ffp-contract=off,-fvisibility=hidden,-fPIC",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
)
BUILD_DEADLINE_S = 300
# The start of an ELF file of 64 bits: where the table of its sections lies, which linkers write
# last, the size of an entry, and their number.
_HEADER = struct.Struct("<40xQ10xHH2x")
_SHOWN_CHARACTERS = 4000


class BuildError(RuntimeError):
    """There is no C++ compiler, or it refused the source; holds its message."""


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
            "a C++17 compiler is needed: install g++ (apt-get install g++), or set CXX. "
            f"Received: no {first}"
        )
    return found, *rest


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
        command: compiler and flags; None: `compiler()` and FLAGS.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the output cannot be written.
    """
    told = f'-DTF_HIPS_CODEC_ID="{identity}"'
    command = (*compiler(), *FLAGS) if command is None else command
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


def cache_folder() -> Path:
    """Where built codecs are kept: `compll` under XDG_CACHE_HOME, or under ~/.cache.

    Raises:
        BuildError: nothing says where a home is.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "compll"
    except RuntimeError as error:
        raise BuildError(f"set XDG_CACHE_HOME to the folder of caches: {error}") from error


def _cache() -> Path:
    """The folder of the cache, made if it is missing."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = folder.stat()
    # What lies there is run by this process.
    if held.st_mode & 0o002 or held.st_uid not in (os.geteuid(), 0):
        raise BuildError(
            f"the cache {folder} must be ours and closed to others: set XDG_CACHE_HOME. Received: "
            f"mode {held.st_mode & 0o777:o}, owner {held.st_uid}"
        )
    return folder


def is_whole(library: Path) -> bool:
    """Whether a file is a library that was not cut off: to load one would end the process."""
    try:
        with library.open("rb") as file:
            head = file.read(_HEADER.size)
            size = file.seek(0, os.SEEK_END)
    except OSError:
        return False
    if len(head) < _HEADER.size or not head.startswith(b"\x7fELF\x02\x01"):
        return False
    begin, each, number = _HEADER.unpack(head)
    return bool(size >= begin + each * number)


def build(source: str, name: str, flags: tuple[str, ...] = ()) -> Path:
    """Compiles the source of a codec to a shared library; returns its path in the cache.

    The cache goes by a hash of everything that goes into a library: the generated source, the
    runtime's headers, the compiler and its flags.

    Raises:
        BuildError: no compiler is found (`CXX` names one), it fails, or others can write to the
            cache.
        OSError: the cache cannot be written.
    """
    words = compiler()
    command = (*words, *FLAGS, *flags)
    root = include_folder()
    digest = hashlib.sha256("\0".join([*command, str(root), source]).encode())
    for program in filter(None, map(shutil.which, words)):  # also what `ccache` runs
        digest.update(str(Path(program).stat().st_mtime_ns).encode())
    for header in sorted((root / "tf_hips/cc/runtime").glob("*.h")):
        digest.update(header.read_bytes())
    library = _cache() / f"{name}-{digest.hexdigest()[:24]}.so"
    if not is_whole(library):
        compile_codec(source, codec_id(name, source.encode()), library, command)
    return library
