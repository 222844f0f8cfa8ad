# SPDX-License-Identifier: Apache-2.0
"""Codecs that come while the program runs: a specification becomes one of them.

    topk = tf_hips.load("my.pse")
    strategy = tf_hips.HierarchicalPS(compression=topk(ratio=0.1))

Also by the name that another process gives, which has the hash of the specification in it. Where
specifications are found, and what makes libraries of them, is a matter of ops.specifications; what
is loaded, of ops.loaded.
"""

import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tf_hips import errors
from tf_hips.ops import loaded, registry, specifications
from tf_hips.ops.library import cuda_refusal

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

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
        TypeError: `path` or `other` is no path.
        ValueError: a built-in codec, or a loaded one of another content, has this name.
    """
    file = _path("path", path)
    source = None
    if file.suffix != specifications.LIBRARY:
        source = specifications.read(file, None if other is None else _path("other", other))
        name, shown = specifications.full_name(source), source.shown
    elif other is not None:
        raise ValueError(
            f"`other` must be left out for a library, which has both halves. Received: {other}"
        )
    else:
        name, shown = loaded.identity(file)[1], str(file)
    with _lock:
        _check_name(name, shown, replace)
        if loaded.table(name) is None:
            library = file if source is None else specifications.library(source)
            added = loaded.add(library)
            if source is None:
                specifications.keep_library(file, name)
            return LoadedCodec(added)
        algorithm = registry.find(name)
        registry.add(algorithm)
        return LoadedCodec(algorithm)


def _path(name: str, value: str | os.PathLike[str]) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"`{name}` must be a path such as 'my.pse'. Received: {name}={value!r}")
    return Path(value)


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
                # What another process named changes nothing of what a stem means here.
                loaded.add(specifications.library_of(name), is_ours=False)
    return registry.find(name, also)


def table(name: str) -> int | None:
    """Address of the table of a codec named with its hash; raises what `algorithm` raises."""
    return loaded.table(algorithm(name).name)


def cuda_table(name: str, architectures: Sequence[str] = ()) -> tuple[int | None, str]:
    """The kernels of a codec named with its hash, compiled if need be.

    Args:
        name: of the codec.
        architectures: the GPUs of this machine, such as "90" for compute capability 9.0. None: they
            are not known, and the library has code for all that `make build CUDA=1` names.

    Returns:
        The address of its TfHipsCudaCodec, or None and why there is none.
    """
    try:
        with _lock:
            entry = specifications.cuda_library(name, architectures)
            getter = ctypes.CDLL(str(entry.absolute()))[
                f"tf_hips_cuda_codec_{name.partition('@')[0]}"
            ]
    except (errors.SpecificationError, errors.LibraryError, OSError) as error:
        return None, str(error)
    refusal = cuda_refusal(entry.absolute())
    if refusal:
        return None, refusal
    getter.restype = ctypes.c_void_p
    address: int = getter()
    return address, ""


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
