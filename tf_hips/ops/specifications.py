# SPDX-License-Identifier: Apache-2.0
"""Specifications: where they are, and the libraries that CompLL makes of them.

The system's C++ compiler makes a library of the codec alone, in about two seconds, and the cache
keeps it under a hash of all that goes into it: the specification (that of two files as one text),
CompLL, the headers, the compiler and its flags. A codec that is cached is loaded
without importing the compiler.

    TF_HIPS_CACHE   folder of the cache (default: ~/.cache/tf_hips)
    TF_HIPS_SPECS   folders, separated by colons, where codecs that other processes name are found
    TF_HIPS_CPU     "avx2" or "base": compile for all machines, and use narrower registers
    CXX             the C++ compiler (default: g++)
    NVCC            that of CUDA, for codecs that are used on a GPU (default: nvcc)

Another process names a codec by the hash of its specification, never by a path, so a peer can make
this one load only what its user has put here. This is the only module that imports the compiler.
"""

import codecs
import contextlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from compll import specification
from compll.backends import cache, toolchain
from compll.errors import CompileError
from compll.specification import Specification
from tf_hips import errors
from tf_hips.ops import loaded

CACHE = "TF_HIPS_CACHE"
SPECS = "TF_HIPS_SPECS"
LIBRARY = ".so"
SPECIFICATION = ".pse"

_cache = cache.Cache("tf_hips", CACHE)


def full_name(source: Specification) -> str:
    """The name of the codec of a specification, `my@0123456789abcdef`."""
    return toolchain.codec_id(source.name, source.data)


def read(file: Path, other: Path | None = None) -> Specification:
    """Reads a specification; where it is one half, with the other.

    Raises:
        SpecificationError: there is no such file.
    """
    try:
        return specification.read(file, other)
    except OSError as error:
        raise errors.SpecificationError(
            f"`{error.filename or file}` must be a specification that can be read. Received: "
            f"{error.strerror}, in the folder {Path.cwd()}"
        ) from error


def files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that `load(path)` needs: that one, and the other half beside it if there is one.

    Raises:
        SpecificationError: there is no such specification.
    """
    file = Path(path)
    if file.suffix == LIBRARY:
        return [file]
    return [Path(part) for part, _ in read(file).parts]


def find(name: str) -> Specification:
    """The specification of a codec that another process named: from the cache, or the user's.

    Raises:
        SpecificationError: none of that content is here; says what to do.
    """
    stem = name.partition("@")[0]
    others = []
    for source in _candidates(name):
        if full_name(source) == name:
            return source
        others.append(f"{source.shown} is {full_name(source)}")
    raise errors.SpecificationError(
        f"`{name}` must be a specification of that content, which this process does not have. Put "
        f"{stem}{SPECIFICATION}, or the library {stem}{LIBRARY} that was built of it, here and "
        f"name it (`tf_hips.load` in a program, `--compression {stem}{SPECIFICATION}` of a "
        f"server), or set {SPECS} to the folder that holds it, a specification in one file or two. "
        f"Received: {'; '.join(others) or 'no such file'}"
    )


def _candidates(name: str) -> Iterator[Specification]:
    """Specifications that may be meant: what the cache keeps, then those in the user's folders."""
    stem = name.partition("@")[0]
    folders = [Path(folder) for folder in os.environ.get(SPECS, "").split(":") if folder]
    for file in (_kept(name), *(folder / f"{stem}{SPECIFICATION}" for folder in folders)):
        with contextlib.suppress(OSError):
            # A byte order mark is no part of it, as CompLL has it.
            data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
            yield Specification(stem, ((str(file), data),))
    for folder in folders:
        with contextlib.suppress(OSError):
            yield from specification.in_two_files(folder, stem)


def library_of(name: str) -> Path:
    """The library of a codec that another process named: of its specification, or as it was built.

    Raises:
        SpecificationError: as for `find`.
        LibraryError: as for `library`.
    """
    try:
        source = find(name)
    except errors.SpecificationError:
        built = _built(name)
        if built is None:
            raise
        return built
    return library(source)


def _built(name: str) -> Path | None:
    """A library that `compll gen --build` made of a codec: one loaded before, or the user's."""
    stem = name.partition("@")[0]
    folders = [Path(folder) for folder in os.environ.get(SPECS, "").split(":") if folder]
    for file in (_kept_library(name), *(folder / f"{stem}{LIBRARY}" for folder in folders)):
        with contextlib.suppress(OSError, errors.LibraryError):
            # What is opened is run: so nothing else of that name is.
            if name.encode() in file.read_bytes() and loaded.identity(file)[1] == name:
                return file
    return None


def keep_library(file: Path, name: str) -> None:
    """Puts a library that was built elsewhere into the cache, for who names its codec.

    A server on this machine knows it then, as it does a specification that was loaded here. Where
    the cache cannot be written the library serves without.
    """
    with contextlib.suppress(OSError, errors.LibraryError), _our_errors():
        folder, kept, data = _cache.made(), _kept_library(name), file.read_bytes()
        if not kept.is_file() or kept.read_bytes() != data:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
                aside = Path(scratch, kept.name)
                aside.write_bytes(data)
                aside.replace(kept)


def carried(text: str) -> dict[str, str]:
    """What processes on other machines need for the codecs that the text of a compression names.

    Returns:
        Specifications by the names of their codecs. One that was loaded from a library alone has
        none here, and those machines must have that library.
    """
    found = {}
    for match in loaded.NAME.finditer(text):
        with contextlib.suppress(OSError):
            # Its name is the hash of these bytes: no line end may change.
            found[match[0]] = _kept(match[0]).read_bytes().decode("utf-8")
    return found


def keep(specifications: Mapping[str, str]) -> None:
    """Puts into this machine's cache what `carried` has found on another.

    Raises:
        SpecificationError: one is not what its name says, or has a name that no codec has.
        LibraryError: the cache cannot be written.
    """
    for name, text in specifications.items():
        if loaded.NAME.fullmatch(name) is None:  # a part of it goes into a path
            raise errors.SpecificationError(
                "A specification must have the name of a codec, such as my@0123456789abcdef. "
                f"Received: {name!r}"
            )
        source = Specification(name.partition("@")[0], ((name, text.encode()),))
        if full_name(source) != name:
            raise errors.SpecificationError(
                f"`{name}` must have that content. Received: {full_name(source)}"
            )
        with _our_errors():
            _cache.made()
            with _cache.writing():
                _keep(source)


def library(source: Specification) -> Path:
    """The library of a specification, from the cache or made now.

    Raises:
        SpecificationError: CompLL refuses it, or it lacks one half; has the diagnostics.
        LibraryError: there is no C++ compiler, or the cache cannot be written.
    """
    name = full_name(source)

    def is_good(entry: Path) -> bool:
        try:
            return entry.is_file() and loaded.identity(entry)[1] == name
        except errors.LibraryError:  # a disk was full, or someone wrote there: make it again
            return False

    def make(entry: Path) -> None:
        toolchain.compile_codec(_generated(source), name, entry, command)
        _keep(source)

    with _our_errors():
        compiler = toolchain.compiler()
        toolchain.check_here(compiler)
        command = (*compiler, *toolchain.flags(compiler), *toolchain.machine_flags(compiler))
        key = cache.key(command, compiler, cache.sources())
        entry = _cache.library(f"{name.replace('@', '-')}-{key}{LIBRARY}", is_good, make)
    # The disk may have been full when the library was made: it serves without, where it can be.
    with contextlib.suppress(OSError):
        _keep(source)
    return entry


def cuda_library(name: str, architectures: Sequence[str] = ()) -> Path:
    """The kernels of a codec named with its hash, from the cache or made now.

    Args:
        name: of the codec.
        architectures: as `jit.cuda_table` has them. They are part of an entry's name, so machines
            that share a cache do not take each other's.

    Raises:
        SpecificationError: it is not here, or CompLL makes no kernels of it.
        LibraryError: there is no nvcc, or the cache cannot be written.
    """
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc")
    if nvcc is None:
        raise errors.LibraryError("nvcc is not here")
    source = find(name)

    def make(entry: Path) -> None:
        from compll.pipeline import compile_specification, cuda_source

        made = cuda_source(compile_specification(source), source)
        toolchain.compile_cuda(made, source.name, entry, nvcc, architectures)

    with _our_errors():
        key = cache.key((nvcc, *architectures), (nvcc,), cache.sources())
        entry = f"{name.replace('@', '-')}-{key}.cuda{LIBRARY}"
        return _cache.library(entry, toolchain.is_whole, make)


def _generated(source: Specification) -> str:
    """C++ of both halves."""
    from compll.pipeline import compile_specification, generate

    program = compile_specification(source)
    if program.encode is None or program.decode is None:
        lacks = "Encode" if program.encode is None else "Decode"
        looked = ""
        if len(source.parts) == 1:
            file, content = source.parts[0]
            looked = f"; {specification.looked_for(Path(file), content)}"
        raise errors.SpecificationError(
            f"`{source.shown}` must have an Encode and a Decode. Received: no {lacks}{looked}"
        )
    return generate(program)[f"{source.name}.codec.cc"]


def cache_folder() -> Path:
    """Where codecs are kept: TF_HIPS_CACHE, or `tf_hips` under XDG_CACHE_HOME or ~/.cache.

    Raises:
        LibraryError: nothing says where a home is.
    """
    with _our_errors():
        return _cache.folder


def _kept(name: str) -> Path:
    """Where the cache keeps the specification of a codec that it has compiled."""
    return cache_folder() / f"{name.replace('@', '-')}{SPECIFICATION}"


def _kept_library(name: str) -> Path:
    """Where the cache keeps a library that was built elsewhere; unlike machines may share it."""
    return cache_folder() / f"{name.replace('@', '-')}-{platform.machine()}.built{LIBRARY}"


def _keep(source: Specification) -> None:
    """Puts a specification into the cache, for those who name its codec, unless it is there."""
    kept = _kept(full_name(source))
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".making-") as scratch:
            aside = Path(scratch, kept.name)
            aside.write_bytes(source.data)
            aside.replace(kept)


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """What CompLL raises, with the same words."""
    try:
        yield
    except CompileError as error:
        raise errors.SpecificationError(str(error)) from error
    except toolchain.BuildError as error:
        raise errors.LibraryError(str(error)) from error
