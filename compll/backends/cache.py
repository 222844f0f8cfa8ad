# SPDX-License-Identifier: Apache-2.0
"""Folders of compiled libraries, each for many processes at once.

The name of an entry has a hash of all that goes into it, and an entry is never changed, so old ones
do no harm. A library is written aside and renamed (backends.toolchain), and processes that want the
same one at once take turns: one compiles, the others wait for it.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from compll.backends import toolchain
from compll.backends.toolchain import BuildError

_HOME = "XDG_CACHE_HOME"


class Cache:
    """A folder, made when something is to be put there.

    All that its methods raise, but for what the caller's functions do, is BuildError.
    """

    def __init__(self, name: str, variable: str | None = None) -> None:
        """The folder of that name under XDG_CACHE_HOME, or under ~/.cache.

        Args:
            name: of the folder.
            variable: of the environment, which names another folder; None: there is none.
        """
        self._name = name
        self._variables = (_HOME,) if variable is None else (variable, _HOME)

    @property
    def folder(self) -> Path:
        """Where it is; it need not be there."""
        first = self._variables[0]
        if first != _HOME and os.environ.get(first):
            return Path(os.environ[first])
        base = os.environ.get(_HOME)
        try:
            return (Path(base) if base else Path.home() / ".cache") / self._name
        except RuntimeError as error:
            raise BuildError(f"set {' or '.join(self._variables)} to a folder: {error}") from error

    def made(self) -> Path:
        """The folder, made if it is missing, and closed to others: what lies there is run."""
        folder = self.folder
        with self.writing():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = folder.stat()
        if held.st_mode & 0o002 or held.st_uid not in (os.geteuid(), 0):
            raise BuildError(
                f"the cache {folder} must be ours and closed to others: set {self._variables[0]}. "
                f"Received: mode {held.st_mode & 0o777:o}, owner {held.st_uid}"
            )
        return folder

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes there: an OSError (a full disk) becomes one that says what to do."""
        try:
            yield
        except OSError as error:
            raise BuildError(
                f"the cache {self.folder} must be a folder that can be written: set "
                f"{self._variables[0]}. Received: {error.strerror}"
            ) from error

    def library(
        self, name: str, is_good: Callable[[Path], bool], make: Callable[[Path], None]
    ) -> Path:
        """A library; one that is there is only read.

        Args:
            name: of the entry, with a `key` in it.
            is_good: whether a path is the library that is wanted, whole.
            make: writes the library to a path.
        """
        entry = self.made() / name
        if not is_good(entry):
            with self.writing(), _turn(entry.with_suffix(".lock")):
                if not is_good(entry):  # else another process has made it
                    make(entry)
        return entry


BUILT = Cache("compll")
"""Of `build`."""


@contextlib.contextmanager
def _turn(file: Path) -> Iterator[None]:
    """One process of this machine at a time; without locks (some network disks) all at once."""
    with file.open("w") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def key(command: Iterable[str], compiler: tuple[str, ...], *more: bytes) -> str:
    """Hash of what makes a library, for the name of its entry.

    Args:
        command: the compiler with its flags.
        compiler: the start of it, which is asked for its version.
        more: what it compiles.

    Raises:
        BuildError: it is no compiler.
    """
    digest = hashlib.sha256()
    # A compiler says the same of itself on unlike processors, and they may share a cache.
    named = "\0".join([platform.machine(), *command])
    for part in (named.encode(), toolchain.version(compiler), *more):
        digest.update(f"{len(part)}\0".encode() + part)
    return digest.hexdigest()[:24]


@functools.cache
def sources() -> bytes:
    """Hash of CompLL and of the headers: with a specification, all that a source is made of."""
    package = Path(__file__).parents[1]
    headers = toolchain.include_folder() / "tf_hips/cc"
    named = [*sorted(headers.glob("runtime/*.h")), *sorted(headers.glob("cuda/*.*h"))]
    named.append(headers / "cuda/library.cu")
    digest = hashlib.sha256()
    for file in [*sorted(package.rglob("*.py")), *named]:
        data = file.read_bytes()
        digest.update(f"{file.name}\0{len(data)}\0".encode() + data)
    return digest.digest()


def build(source: str, name: str, flags: tuple[str, ...] = ()) -> Path:
    """Compiles the source of a codec to a shared library; returns its path in BUILT.

    Raises:
        BuildError: no compiler is found (`CXX` names one), it fails, or the cache cannot be
            written, or others can write to it.
    """
    compiler = toolchain.compiler()
    command = (*compiler, *toolchain.flags(compiler), *flags)
    root = toolchain.include_folder()
    headers = [file.read_bytes() for file in sorted(root.glob("tf_hips/cc/runtime/*.h"))]
    content = source.encode()
    hashed = key(command, compiler, str(root).encode(), content, *headers)
    identity = toolchain.codec_id(name, content)

    def make(library: Path) -> None:
        toolchain.compile_codec(source, identity, library, command)

    return BUILT.library(f"{name}-{hashed}.so", toolchain.is_whole, make)
