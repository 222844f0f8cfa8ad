# SPDX-License-Identifier: Apache-2.0
"""Codecs that came while the program runs: their tables, and what the registry has to know of them.

A loaded codec is called `my@0123456789abcdef`: the stem of its specification and the first 16
digits of the SHA-256 of the file. That name travels between processes in the texts of compressors,
so that two files called `my.pse` are never taken for one another.

Nothing is ever unloaded: tables are used from C and by TensorFlow's kernels.
"""

import ctypes
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from compll.backends import toolchain
from tf_hips import errors
from tf_hips.ops import library, registry

NAME = re.compile(r"([A-Za-z][A-Za-z0-9_]*)@([0-9a-f]{16})", re.ASCII)
"""A loaded codec: stem, content."""

_lock = threading.Lock()
_tables: dict[str, int] = {}
# Device and inode of the file that was opened first under a path.
_opened: dict[str, tuple[int, int]] = {}

_NOT_PROVIDED = 5  # TF_HIPS_NOT_PROVIDED of cc/runtime/codec.h


class _Param(ctypes.Structure):
    """TfHipsParam of cc/runtime/codec.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("is_integer", ctypes.c_int32),
        ("default_value", ctypes.c_double),
        ("minimum", ctypes.c_double),
        ("maximum", ctypes.c_double),
    )


_BODY_BYTES = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.POINTER(ctypes.c_double), ctypes.c_int64)
_FUNCTIONS = ("max_body_bytes", "encode", "decode", "encode_feedback", "merge")


class _Table(ctypes.Structure):
    """TfHipsCodec of cc/runtime/codec.h."""

    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("spec_hash", ctypes.c_uint32),
        ("num_params", ctypes.c_int32),
        ("params", ctypes.POINTER(_Param)),
        ("is_fixed_size", ctypes.c_int32),
        ("is_sparse", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in _FUNCTIONS),
        ("num_states", ctypes.c_int32),
        ("state_names", ctypes.POINTER(ctypes.c_char_p)),
        ("encode_state", ctypes.c_void_p),
    )


def table(name: str) -> int | None:
    """Address of the table of a loaded codec; None if there is none of that name."""
    return _tables.get(name)


def check_values(name: str, values: Sequence[float]) -> None:
    """Raises ValueError where parameters that are in their ranges make a codec that cannot be.

    Blocks and widths may be computed of parameters, and only the codec itself knows them.

    Args:
        name: of a loaded codec.
        values: of its parameters, in their order.
    """
    held = _Table.from_address(_tables[name])
    function = _BODY_BYTES(held.max_body_bytes)
    # Of no elements: what depends on their number is asked for when that is known.
    if function((ctypes.c_double * max(1, len(values)))(*values), 0) < 0:
        names = [held.params[i].name.decode("ascii") for i in range(held.num_params)]
        given = zip(names, values, strict=True)
        shown = ", ".join(f"{parameter}={value:.9g}" for parameter, value in given)
        raise ValueError(
            f"the parameters of `{name}` must make blocks of 16, 32, 64, 128, 256, 512 or 1024 "
            "elements, widths from 1 to 16 bits, and lengths that fit a packet. "
            f"Received: {shown}"
        )


def identity(path: Path) -> tuple[ctypes.CDLL, str]:
    """Loads the library of a codec; returns it and the full name of the codec in it.

    Raises:
        LibraryError: it does not load, or is not a codec that CompLL built for this version.
    """
    try:
        toolchain.check_whole(path)
        cdll = _open(path)
        text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(cdll, "tf_hips_codec_id")))
    except (OSError, ValueError) as error:
        raise errors.LibraryError(
            f"{path} must be a library that `compll gen --build` or tf_hips.load made. "
            f"Received: {error}"
        ) from error
    name = text.decode("ascii", errors="replace")
    if NAME.fullmatch(name) is None:
        raise errors.LibraryError(f"{path} must name its codec. Received: {name!r}")
    return cdll, name


def _open(path: Path) -> ctypes.CDLL:
    # By its full path: a bare name would be looked up among the system's libraries.
    full = str(path.absolute())
    held = path.stat()
    if _opened.setdefault(full, (held.st_dev, held.st_ino)) == (held.st_dev, held.st_ino):
        return ctypes.CDLL(full)
    # Another file has this path now. The system's loader would give the one that it knows under it,
    # and finds the new one under a name that it has not seen.
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, path.name)
        link.symlink_to(full)
        return ctypes.CDLL(str(link))


def add(path: Path, *, is_ours: bool = True) -> registry.Algorithm:
    """Makes the codec in a library known to the registry, the native face and TensorFlow.

    Adding one again changes nothing.

    Args:
        path: of the library.
        is_ours: as for `registry.add`.

    Raises:
        LibraryError: as for `identity`, or the library was built for another version of tf_hips.
    """
    cdll, name = identity(path)
    with _lock:
        if name in _tables:
            return registry.find(name)
        getter = cdll[f"tf_hips_codec_{name.partition('@')[0]}"]
        getter.restype = ctypes.c_void_p
        address: int = getter()
        held = _Table.from_address(address)
        if held.abi_version != library.ABI_VERSION:
            raise errors.LibraryError(
                f"{path} must have interface version {library.ABI_VERSION}: build it again from "
                f"its specification. Received: {held.abi_version}"
            )
        _check_halves(held, path)
        parameters = tuple(_parameter(held.params[i]) for i in range(held.num_params))
        states = tuple(held.state_names[i].decode("ascii") for i in range(held.num_states))
        algorithm = registry.Algorithm(
            name,
            op="loaded",
            parameters=parameters,
            state_names=states,
            is_sparse=bool(held.is_sparse),
        )
        library.add_codec(name, address)
        _tables[name] = address
        # Last: who finds it there, in another thread, needs all else.
        registry.add(algorithm, is_ours=is_ours)
        return algorithm


def _check_halves(held: _Table, path: Path) -> None:
    """Raises LibraryError unless a codec both encodes and decodes."""
    values = (ctypes.c_double * max(1, held.num_params))()
    for i in range(held.num_params):
        values[i] = held.params[i].minimum
    pointer, word, key = ctypes.c_void_p, ctypes.c_int64, ctypes.create_string_buffer(24)
    encode = ctypes.CFUNCTYPE(word, *[pointer] * 3, word, pointer, word)(held.encode)
    decode = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, word, pointer, word, ctypes.c_int32)
    # Of -1 elements: nothing is read or written.
    answers = {
        "Encode": -encode(values, key, None, -1, None, 0),
        "Decode": decode(held.decode)(values, None, 0, None, -1, 0),
    }
    for half, answer in answers.items():
        if answer == _NOT_PROVIDED:
            raise errors.LibraryError(
                f"{path} must have an Encode and a Decode. Received: no {half}"
            )


def _parameter(param: _Param) -> registry.Parameter:
    values = [param.default_value, param.minimum, param.maximum]
    default, low, high = (
        None if value != value else int(value) if param.is_integer else value for value in values
    )
    if low is None or high is None:
        raise errors.LibraryError(f"the range of {param.name!r} must be numbers. Received: NaN")
    return registry.Parameter(param.name.decode("ascii"), default, low, high)
