# SPDX-License-Identifier: Apache-2.0
"""The door to CompLL: a specification becomes a codec of the running program.

    topk = tf_hips.load("my.pse")
    strategy = tf_hips.HierarchicalPS(compression=topk(ratio=0.1))

The system's C++ compiler makes a library of the codec alone, in about two seconds, and the cache
keeps it under a hash of all that goes into it: the specification (that of two files as one text),
CompLL, the headers, the compiler and its flags. A library is written aside and renamed, and
processes that want the same one at once take turns: one compiles, the others wait for it. Entries
are never changed, so old ones do no harm; a cached codec of one file is loaded without importing
CompLL.

    TF_HIPS_CACHE   folder of the cache (default: ~/.cache/tf_hips)
    TF_HIPS_SPECS   folders, separated by colons, where codecs that other processes name are found
    TF_HIPS_CPU     "avx2" or "base": compile for all machines, and use narrower registers
    CXX             the C++ compiler (default: g++)
    NVCC            that of CUDA, for codecs that are used on a GPU (default: nvcc)

Another process names a codec by the hash of its specification, never by a path, so a peer can make
this one load only what its user has put here. This is the only module that imports compll.
"""

import codecs
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tf_hips import errors
from tf_hips.ops import loaded, registry
from tf_hips.ops.library import cuda_refusal

if TYPE_CHECKING:
    from compll.specification import Specification
    from tf_hips.ops.compressor import Compressor

CACHE = "TF_HIPS_CACHE"
CPU = "TF_HIPS_CPU"
SPECS = "TF_HIPS_SPECS"
LIBRARY = ".so"
SPECIFICATION = ".pse"

_FLAGS = (
    *("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC", "-shared"),
    # Vector code needs selections. Threaded jumps make branches of them; so does arithmetic that
    # may trap, which is moved to where its result is chosen. No number depends on either.
    *("-fno-thread-jumps", "-fno-trapping-math"),
    # A square root that may set errno is a call for each element; nobody looks at errno of one.
    "-fno-math-errno",
)
# What Linux calls the instructions of x86-64-v3 and -v4, and how compilers are told of them.
_V3 = "avx2 bmi1 bmi2 f16c fma movbe abm"
_V3_FLAGS = ("-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mmovbe", "-mlzcnt")
_V4 = "avx512f avx512bw avx512cd avx512dq avx512vl"
_V4_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_LEVELS = (
    (frozenset([*_V3.split(), *_V4.split()]), (*_V3_FLAGS, *_V4_FLAGS)),
    (frozenset(_V3.split()), _V3_FLAGS),
)
_lock = threading.Lock()


class LoadedCodec:
    """What `load` returns: call it with the codec's parameters to get a `Compressor`.

    Attributes:
        name: of the codec, with the hash of its specification: `my@0123456789abcdef`.
        parameters: in the order of the specification.
    """

    def __init__(self, algorithm: registry.Algorithm) -> None:
        """`algorithm`: of the registry."""
        self.name = algorithm.name
        self.parameters = algorithm.parameters

    def __call__(self, /, *values: float, **named: float) -> "Compressor":
        """Returns the compressor with these values of its parameters, by position or by name.

        Raises:
            TypeError: a value is not a number, or there are too many.
            ValueError: a parameter is unknown, given twice or missing, or out of its range.
        """
        from tf_hips.ops.compressor import Compressor

        if len(values) > len(self.parameters):
            raise TypeError(
                f"`{self.name}` takes {len(self.parameters)} arguments. Received: {len(values)}"
            )
        given = [(p.name, value) for p, value in zip(self.parameters, values, strict=False)]
        return Compressor(self.name, (*given, *named.items()))

    def __repr__(self) -> str:
        shown = ", ".join(
            parameter.name if parameter.default is None else f"{parameter.name}={parameter.default}"
            for parameter in self.parameters
        )
        return f"<codec {self.name}({shown})>"


class _Source(NamedTuple):
    """A specification: the stem of its codec's name, the whole text, and the files it came from.

    `parts`: for each file what messages call it, and its content.
    """

    stem: str
    data: bytes
    parts: tuple[tuple[str, bytes], ...]

    @property
    def name(self) -> str:
        """The full name of the codec."""
        return loaded.full_name(self.stem, self.data)

    @property
    def shown(self) -> str:
        """The files, for messages."""
        return " + ".join(file for file, _ in self.parts)


def load(
    path: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    replace: bool = False,
) -> LoadedCodec:
    """Makes the codec of a specification known to this process, compiling it if that is needed.

    Loading the same content again costs a look into the file.

    Args:
        path: a specification, `my.pse`, or a library that `compll gen --build` made of one. If it
            holds an Encode alone or a Decode alone, the other half is looked for beside it:
            `MyEncode.pse` and `MyDecode.pse` are one codec, `My`.
        other: the file of the other half, wherever it is.
        replace: take the name although another content has it; compressors that were made of the
            other one stay as they are. For interactive work.

    Returns:
        A function from the codec's parameters to a `Compressor`.

    Raises:
        SpecificationError: there is no such file, or CompLL refuses it; has its diagnostics.
        LibraryError: there is no C++ compiler, or the cache cannot be written.
        ValueError: a built-in codec, or a loaded one of another content, has this name.
    """
    file = Path(path)
    source = None
    if file.suffix != LIBRARY:
        source = _read(file, None if other is None else Path(other))
        name, shown = source.name, source.shown
    elif other is not None:
        raise ValueError(
            f"`other` must be left out for a library, which has both halves. Received: {other}"
        )
    else:
        name, shown = loaded.identity(file)[1], str(file)
    with _lock:
        _check_name(name, shown, replace)
        if loaded.table(name) is None:
            library = file if source is None else _library(source)
            return LoadedCodec(loaded.add(library))
        algorithm = registry.find(name)
        registry.add(algorithm)
        return LoadedCodec(algorithm)


def files(path: str | os.PathLike[str]) -> list[Path]:
    """The files that `load(path)` needs: that one, and the other half beside it if there is one.

    Raises:
        SpecificationError: there is no such specification.
    """
    file = Path(path)
    if file.suffix == LIBRARY:
        return [file]
    return [Path(part) for part, _ in _read(file, None).parts]


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
        source = _Source(name.partition("@")[0], text.encode(), ((name, text.encode()),))
        if source.name != name:
            raise errors.SpecificationError(
                f"`{name}` must have that content. Received: {source.name}"
            )
        folder = _cache()
        try:
            _keep(source, folder)
        except OSError as error:
            raise _not_writable(folder, error) from error


def algorithm(name: str, also: Iterable[str] = ()) -> registry.Algorithm:
    """The algorithm called `name`; one that is named with its hash is loaded if it is here.

    Args:
        name: what a user or another process wrote.
        also: further names that would have been valid in its place, for the message.

    Raises:
        ValueError: there is none.
        SpecificationError: no specification of that content is known here; says what to do.
        LibraryError: as for `load`.
    """
    # Of what a thread is loading the registry hears last.
    if loaded.NAME.fullmatch(name) is not None and not registry.holds(name):
        with _lock:
            if not registry.holds(name):
                found = _specification(name)
                before = registry.newest(name.partition("@")[0])
                loaded.add(_library(found))
                if before is not None:  # what another process named does not change what ours means
                    registry.add(registry.find(before))
    return registry.find(name, also)


def table(name: str) -> int | None:
    """Address of the table of a codec named with its hash; raises what `algorithm` raises."""
    return loaded.table(algorithm(name).name)


def cuda_table(name: str, architectures: Sequence[str] = ()) -> tuple[int | None, str]:
    """The kernels of a codec named with its hash, compiled if need be.

    Args:
        name: of the codec.
        architectures: the GPUs of this machine, such as "90" for compute capability 9.0. They are
            part of an entry's name, so machines that share a cache do not take each other's. None:
            they are not known, and the library has code for all that `make build CUDA=1` names.

    Returns:
        The address of its TfHipsCudaCodec, or None and why there is none.
    """
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc")
    if nvcc is None:
        return None, "nvcc is not here"
    stem, _, content = name.partition("@")
    try:
        source = _specification(name)
        entry = (
            _cache() / f"{stem}-{content}-{_tools((nvcc, *architectures), (nvcc,))}.cuda{LIBRARY}"
        )
        with _lock:
            if not loaded.is_whole(entry):
                with _turn(entry.with_suffix(".lock")):
                    if not loaded.is_whole(entry):  # else another process has made it
                        _make_cuda(entry, source, nvcc, architectures)
            getter = ctypes.CDLL(str(entry.absolute()))[f"tf_hips_cuda_codec_{stem}"]
    except (errors.SpecificationError, errors.LibraryError, OSError) as error:
        return None, str(error)
    refusal = cuda_refusal(entry.absolute())
    if refusal:
        return None, refusal
    getter.restype = ctypes.c_void_p
    address: int = getter()
    return address, ""


def _make_cuda(entry: Path, source: _Source, nvcc: str, architectures: Sequence[str]) -> None:
    from compll import CompileError
    from compll.backends.toolchain import BuildError, compile_cuda
    from compll.pipeline import compile_specification, cuda_source
    from compll.specification import Specification

    try:
        specification = Specification(source.stem, source.parts)
        made = cuda_source(compile_specification(specification), specification)
        compile_cuda(made, source.stem, entry, nvcc, architectures)
    except CompileError as error:
        raise errors.SpecificationError(str(error)) from error
    except BuildError as error:
        raise errors.LibraryError(str(error)) from error


def _read(file: Path, other: Path | None) -> _Source:
    """Reads a specification; where it is one half, with the other."""
    try:
        if other is None:
            source = _alone(file, file.stem)
            if loaded.table(source.name) is not None or _kept(source.name).is_file():
                return source  # what was compiled before is whole

        from compll import specification

        return _of(specification.read(file, other))
    except OSError as error:
        raise errors.SpecificationError(
            f"`{error.filename or file}` must be a specification that can be read. Received: "
            f"{error.strerror}, in the folder {Path.cwd()}"
        ) from error


def _alone(file: Path, stem: str) -> _Source:
    """A specification in one file; a byte order mark is no part of it, as CompLL has it."""
    data = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    return _Source(stem, data, ((str(file), data),))


def _of(specification: "Specification") -> _Source:
    return _Source(specification.name, specification.data, specification.parts)


def _kept(name: str) -> Path:
    """Where the cache keeps the specification of a codec that it has compiled."""
    return cache_folder() / f"{name.replace('@', '-')}{SPECIFICATION}"


def _check_name(name: str, file: str, replace: bool) -> None:
    stem = name.partition("@")[0]
    if stem in registry.REGISTRY or stem in registry.WITHOUT_PACKETS:
        raise ValueError(
            f"`{file}` must have a name of its own: {stem} is a built-in codec. Rename the file."
        )
    other = registry.newest(stem)
    if other not in (None, name) and not replace:
        raise ValueError(
            f"`{file}` must have the content that was loaded before as {other}. Received: {name}. "
            "Rename the file, start a new process, or call tf_hips.load(..., replace=True)"
        )


def _specification(name: str) -> _Source:
    """The specification of a codec that another process named."""
    stem = name.partition("@")[0]
    others = []
    for source in _candidates(name):
        if source.name == name:
            return source
        others.append(f"{source.shown} is {source.name}")
    raise errors.SpecificationError(
        f"`{name}` must be a specification of that content, which this process does not have. Put "
        f"{stem}{SPECIFICATION} here and name it (`tf_hips.load` in a program, `--compression "
        f"{stem}{SPECIFICATION}` of a server), or set {SPECS} to the folder that holds it, in one "
        f"file or two. "
        f"Received: {'; '.join(others) or 'no such file'}"
    )


def _candidates(name: str) -> Iterator[_Source]:
    """Specifications that may be meant: what the cache keeps, then those in the user's folders."""
    stem = name.partition("@")[0]
    folders = [Path(folder) for folder in os.environ.get(SPECS, "").split(":") if folder]
    for file in (_kept(name), *(folder / f"{stem}{SPECIFICATION}" for folder in folders)):
        with contextlib.suppress(OSError):
            yield _alone(file, stem)
    if folders:
        from compll import specification

        for folder in folders:
            with contextlib.suppress(OSError):
                yield from map(_of, specification.in_two_files(folder, stem))


def cache_folder() -> Path:
    """Where codecs are kept: TF_HIPS_CACHE, or `tf_hips` under XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "tf_hips"
    except RuntimeError as error:
        raise errors.LibraryError(f"set {CACHE} or XDG_CACHE_HOME to a folder: {error}") from error


def _library(source: _Source) -> Path:
    """The library of a specification, from the cache or made now."""
    name = source.name
    command = _command()
    folder = _cache()
    entry = folder / f"{name.replace('@', '-')}-{_tools(command, _compiler())}{LIBRARY}"
    if _is_good(entry, name):
        # The disk may have been full when the library was made: it serves without, where it can be.
        with contextlib.suppress(OSError):
            _keep(source, folder)
        return entry
    with _turn(entry.with_suffix(".lock")):
        try:
            if not _is_good(entry, name):
                _make(entry, source, command)
            _keep(source, folder)
        except OSError as error:  # the disk is full
            raise _not_writable(folder, error) from error
    return entry


def _keep(source: _Source, folder: Path) -> None:
    """Puts a specification into the cache, for those who name its codec, unless it is there."""
    kept = _kept(source.name)
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=folder, prefix=".making-") as scratch:
            aside = Path(scratch, kept.name)
            aside.write_bytes(source.data)
            aside.replace(kept)


def _is_good(entry: Path, name: str) -> bool:
    """Whether the cache has the library, whole."""
    if not entry.is_file():
        return False
    try:
        return loaded.identity(entry)[1] == name
    except errors.LibraryError:  # a disk was full, or someone wrote there: make it again
        return False


def _make(entry: Path, source: _Source, command: tuple[str, ...]) -> None:
    from compll import CompileError, specification
    from compll.backends.library import BuildError, compile_codec
    from compll.pipeline import compile_specification, generate

    try:
        program = compile_specification(specification.Specification(source.stem, source.parts))
    except CompileError as error:
        raise errors.SpecificationError(str(error)) from error
    if program.encode is None or program.decode is None:
        lacks = "Encode" if program.encode is None else "Decode"
        looked = ""
        if len(source.parts) == 1:
            file, content = source.parts[0]
            looked = f"; {specification.looked_for(Path(file), content)}"
        raise errors.SpecificationError(
            f"`{source.shown}` must have an Encode and a Decode. Received: no {lacks}{looked}"
        )
    made = generate(program)[f"{source.stem}.codec.cc"]
    try:
        compile_codec(made, source.name, entry, command)
    except BuildError as error:
        raise errors.LibraryError(str(error)) from error


def _compiler() -> tuple[str, ...]:
    """The C++ compiler, its path first; `CXX` may have arguments, as in "ccache g++"."""
    wanted = os.environ.get("CXX", "")
    try:
        first, *rest = shlex.split(wanted) or ["g++"]
    except ValueError as error:
        raise errors.LibraryError(f"CXX must be a command: {error}. Received: {wanted}") from error
    found = shutil.which(first)
    if found is None:
        raise errors.LibraryError(
            "a C++ compiler is needed to load a specification: install g++ (apt-get install g++), "
            "set CXX, or load a library that `compll gen --build` made on another machine. "
            f"Received: no {first}"
        )
    return found, *rest


def _command() -> tuple[str, ...]:
    """The C++ compiler with its flags."""
    return *_compiler(), *_FLAGS, *_machine_flags()


def _machine_flags() -> tuple[str, ...]:
    """Flags for the instructions that this machine has: less code, and a shorter wait.

    They are part of an entry's name, so machines that share a cache do not take each other's.
    None where TF_HIPS_CPU asks for narrower registers: such a library has code for all machines.
    """
    if os.environ.get(CPU):
        return ()
    found = _instructions()
    level = next((flags for needed, flags in _LEVELS if found >= needed), None)
    return () if level is None else (*level, "-DTF_HIPS_ONE_MACHINE")


@functools.cache
def _instructions() -> frozenset[str]:
    """What the processor has, as Linux names it; empty where it does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _tools(command: tuple[str, ...], compiler: tuple[str, ...]) -> str:
    """Hash of all that makes a library of a specification; `compiler`: the start of the command."""
    digest = hashlib.sha256("\0".join(command).encode())
    digest.update(_version(compiler))
    digest.update(_sources())
    return digest.hexdigest()[:16]


@functools.cache
def _version(compiler: tuple[str, ...]) -> bytes:
    asked = [*compiler, "--version"]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise errors.LibraryError(
            f"{' '.join(compiler)} must be a C++ compiler. Received: {error}"
        ) from error
    return done.stdout


@functools.cache
def _sources() -> bytes:
    """Hash of CompLL and of the headers, without importing CompLL."""
    spec = importlib.util.find_spec("compll")
    if spec is None or spec.origin is None:
        raise errors.LibraryError("CompLL must be installed beside tf_hips. Received: no `compll`")
    compll = Path(spec.origin).parent
    headers = Path(__file__).resolve().parents[1] / "cc"
    digest = hashlib.sha256()
    named = [*sorted(headers.glob("runtime/*.h")), *sorted(headers.glob("cuda/*.*h"))]
    named.append(headers / "cuda/library.cu")
    for file in [*sorted(compll.rglob("*.py")), *named]:
        data = file.read_bytes()
        digest.update(f"{file.name}\0{len(data)}\0".encode() + data)
    return digest.digest()


def _cache() -> Path:
    """The folder of the cache, made if it is missing."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = folder.stat()
    except OSError as error:
        raise _not_writable(folder, error) from error
    # What lies there is run by this process.
    if held.st_mode & 0o002 or held.st_uid not in (os.geteuid(), 0):
        raise errors.LibraryError(
            f"the cache {folder} must be ours and closed to others: set {CACHE}. Received: mode "
            f"{held.st_mode & 0o777:o}, owner {held.st_uid}"
        )
    return folder


@contextlib.contextmanager
def _turn(file: Path) -> Iterator[None]:
    """One process of this machine at a time; without locks (some network disks) all at once."""
    try:
        handle = file.open("w")
    except OSError as error:
        raise _not_writable(file.parent, error) from error
    with handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _not_writable(folder: Path, error: OSError) -> errors.LibraryError:
    return errors.LibraryError(
        f"the cache {folder} must be a folder that can be written: set {CACHE}. Received: "
        f"{error.strerror}"
    )
