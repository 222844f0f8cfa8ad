# SPDX-License-Identifier: Apache-2.0
"""Finds the native libraries, checks that they fit, and loads each once.

`_tf_hips_ops.so` holds the TensorFlow ops. Its C++ interface fits one minor version of TensorFlow
only, and a wrong one crashes or fails with an undefined symbol; so the version it was built for,
stamped in tf_hips/_build_info.py, is compared before it is loaded. `libtf_hips_native.so` holds the
same codecs behind a C interface, for processes without TensorFlow.

Invariant: this module does not import TensorFlow; who loads the ops has it already.
"""

import contextlib
import ctypes
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_hips import errors

OPS_PATH = Path(__file__).with_name("_tf_hips_ops.so")
NATIVE_PATH = Path(__file__).with_name("libtf_hips_native.so")
# Opened by the ops (cc/tf/cuda_library.h), when one of them runs on a GPU.
CUDA_PATH = Path(__file__).with_name("libtf_hips_cuda.so")
ABI_VERSION = 5

_codecs: dict[str, int] = {}
_CUDA_REMEDY = "`make build CUDA=1` makes it where nvcc is"
_REMEDY = "run `make build` in the source tree, or install a wheel made for this TensorFlow"


def check_tensorflow(built: str, running: str) -> None:
    """Raises LibraryError unless the two TensorFlow versions share their major and minor number."""
    if built.split(".")[:2] != running.split(".")[:2]:
        raise errors.LibraryError(
            f"{OPS_PATH.name} was built for TensorFlow {built}, and this process runs "
            f"TensorFlow {running}; {_REMEDY}"
        )


def built_with() -> Any:
    """Returns the module tf_hips._build_info: TENSORFLOW, COMPILER, CUDA, GIT_COMMIT as strings.

    Raises:
        LibraryError: nothing has been built here.
    """
    try:
        return importlib.import_module("tf_hips._build_info")
    except ModuleNotFoundError as error:
        raise errors.LibraryError(f"the native libraries have not been built; {_REMEDY}") from error


@functools.cache
def ops(tf: Any) -> Any:
    """Returns the module of generated op wrappers, `tf_hips_onebit_encode` and the others.

    Args:
        tf: the module `tensorflow`.

    Raises:
        LibraryError: the library is missing, or was built for another TensorFlow.
    """
    check_tensorflow(built_with().TENSORFLOW, tf.__version__)
    _check_exists(OPS_PATH)
    try:
        wrappers = tf.load_op_library(str(OPS_PATH))
        for name, table in list(_codecs.items()):  # another thread may add one meanwhile
            _give(name, table)
    except (tf.errors.OpError, OSError) as error:
        raise errors.LibraryError(f"{OPS_PATH} does not load: {error}; {_REMEDY}") from error
    return wrappers


def add_codec(name: str, table: int) -> None:
    """Lets the ops `tf_hips_loaded_*` find a codec that was loaded while the program runs.

    A process that has TensorFlow gets the ops with it, for graphs that were saved elsewhere.

    Args:
        name: what the attribute `codec` of an op says.
        table: address of its TfHipsCodec, which must stay.
    """
    _codecs[name] = table
    if ops.cache_info().currsize:
        _give(name, table)
        return
    tf = sys.modules.get("tensorflow")
    if hasattr(tf, "load_op_library"):  # else it is being imported
        with contextlib.suppress(errors.LibraryError):  # the native face may be all that is wanted
            ops(tf)


def add_cuda_codec(tf: Any, name: str, table: int) -> None:
    """Lets the ops `tf_hips_loaded_*` run a codec on a GPU.

    Args:
        tf: the module `tensorflow`.
        name: what the attribute `codec` of an op says.
        table: address of its TfHipsCudaCodec, which must stay.
    """
    ops(tf)
    _give(name, table, "tf_hips_ops_add_cuda_codec")


def _give(name: str, table: int, how: str = "tf_hips_ops_add_codec") -> None:
    # The library that TensorFlow has loaded: the same file is mapped once.
    function = ctypes.CDLL(str(OPS_PATH))[how]
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    if function(name.encode(), table) != 0:
        raise errors.LibraryError(
            f"{OPS_PATH.name} must take the codec {name}. Received: another interface version; "
            f"{_REMEDY}"
        )


@functools.cache
def native() -> ctypes.CDLL:
    """Returns the plain C library; calls into it release the GIL.

    Raises:
        LibraryError: the library is missing, or has another interface version.
    """
    _check_exists(NATIVE_PATH)
    try:
        library = ctypes.CDLL(str(NATIVE_PATH))
        version = library.tf_hips_abi_version()
    except (OSError, AttributeError) as error:
        raise errors.LibraryError(f"{NATIVE_PATH} does not load: {error}; {_REMEDY}") from error
    if version != ABI_VERSION:
        raise errors.LibraryError(
            f"{NATIVE_PATH.name} must have interface version {ABI_VERSION}. "
            f"Received: {version}; {_REMEDY}"
        )
    return library


def function(name: str, result: Any, arguments: Sequence[Any], what: str) -> Any:
    """A function of the plain C library.

    Args:
        name: there.
        result: its type.
        arguments: their types.
        what: it is for, for the message.

    Raises:
        LibraryError: the library has not got it, or as for `native`.
    """
    try:
        found = native()[name]
    except AttributeError as error:
        raise errors.LibraryError(
            f"{NATIVE_PATH.name} must have {what}. Received: an older one; "
            "run `make build` in the source tree, or install a newer wheel"
        ) from error
    found.restype, found.argtypes = result, arguments
    return found


def functions(prefix: str, signatures: Mapping[str, Sequence[Any]], what: str) -> dict[str, Any]:
    """Functions of the plain C library, which return an int32.

    Args:
        prefix: of their names there.
        signatures: types of the arguments, by the rest of the name.
        what: they are for, for messages.

    Raises:
        LibraryError: the library has not got one of them, or as for `native`.
    """
    return {
        name: function(f"{prefix}{name}", ctypes.c_int32, arguments, what)
        for name, arguments in signatures.items()
    }


@functools.cache
def cuda_refusal(path: Path) -> str:
    """Why the kernels of a library for GPUs cannot run on this machine; empty if they can.

    Its own answer (cc/cuda/library_cuda.h): an old driver, no GPU, or one without code for it.
    """
    try:
        function = ctypes.CDLL(str(path)).tf_hips_cuda_refusal
    except OSError as error:
        return f"{path.name} does not load: {error}"
    except AttributeError:
        return f"{path.name} is of another version; {_CUDA_REMEDY}"
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode(errors="replace")


def built_in_cuda_refusal(name: str) -> str:
    """Why a built-in codec has no kernels for the GPUs of this machine; empty if it has."""
    if not CUDA_PATH.is_file():
        return f"no {CUDA_PATH.name}; {_CUDA_REMEDY}"
    refusal = cuda_refusal(CUDA_PATH)
    # The CUDA back end may refuse a specification, and says so when the library is made.
    if not refusal and not hasattr(ctypes.CDLL(str(CUDA_PATH)), f"tf_hips_cuda_codec_{name}"):
        return f"no kernels of {name} in {CUDA_PATH.name}"
    return refusal


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise errors.LibraryError(f"{path} is missing; {_REMEDY}")
