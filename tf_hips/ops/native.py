# SPDX-License-Identifier: Apache-2.0
"""The codecs for processes without TensorFlow: NumPy arrays and byte buffers, through ctypes.

Calls release the GIL and use as many threads as there are processors, up to 64 (TF_HIPS_NUM_THREADS
overrides); the result does not depend on that number. Buffers are not copied. Packets are checked
before anything is written, so any bytes are safe.
"""

import ctypes
import dataclasses
import functools
import hashlib
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tf_hips import errors
from tf_hips.ops import jit, library, loaded

if TYPE_CHECKING:
    from tf_hips.ops.compressor import Compressor

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Buffer: TypeAlias = bytes | bytearray | memoryview | Bytes

_THREADS = "TF_HIPS_NUM_THREADS"
_BAD_PARAMETER = 4
_NO_SCRATCH = 6
_BAD_ARGUMENT = 16
_SPLIT_VARIABLE_SIZE = 24
OUT_OF_MEMORY = 25
# kMaxTensorElements and kPrefixBytes of cc/runtime/packet.h.
MAX_ELEMENTS = 1 << 48
PREFIX_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Key:
    """Where the randomness of one encoding comes from. Equal keys and gradients give equal packets.

    Attributes:
        seed: of this encoder, in [0, 2^64); see `Compressor.encoder_seed`.
        step: in [0, 2^32).
        tensor_id: position of the tensor in its model, in [0, 2^32).
        offset: index in its tensor of the first element encoded, in [0, 2^63).
    """

    seed: int
    step: int
    tensor_id: int
    offset: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("seed", 64), ("step", 32), ("tensor_id", 32), ("offset", 63)):
            check_integer(name, getattr(self, name))
            if not 0 <= getattr(self, name) < 1 << bits:
                raise ValueError(
                    f"`{name}` must be in [0, 2^{bits}). Received: {name}={getattr(self, name)}"
                )


def derive_seed(run_seed: int, role: str) -> int:
    """Returns the seed of one encoder of a run, in [0, 2^64).

    Args:
        run_seed: of the whole run, the same in all processes.
        role: "worker/<rank>", "owner/<rank>", "party/<site>", "server", "server/<site>" for what
            answers a child alone, or "everyone" for what all do alike. What of these an encoder
            has, its compressor says: `Compressor.encoder_seed`.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{role}".encode()).digest()[:8], "little")


def wire_bytes(compressor: "Compressor", n: int) -> int:
    """Returns the bytes of all packets of n elements, prefixes included."""
    check_size(n)
    codec, params = _codec(compressor.codec)
    return _checked(_functions().wire_bytes(codec, params, n), compressor)


def encode(
    compressor: "Compressor",
    x: Floats,
    key: Key,
    kept: Floats | None = None,
    out: Bytes | None = None,
) -> Bytes:
    """Encodes one tensor.

    Args:
        compressor: what to encode with; of a warm-up the stage of `key.step`.
        x: float32 of any shape, C-contiguous.
        key: where randomness comes from.
        kept: what encoding keeps (a residual, or momentum and states), float32 of
            `compressor.state_shape`, updated in place; given if and only if `compressor.has_state`.
        out: uint8 of at least `compressor.wire_bytes(x.size)`; made when None.

    Returns:
        The packets of all chunks, concatenated: uint8, 1-D; a view of `out` if that was given.

    Raises:
        TypeError: an array has another dtype or layout.
        ValueError: sizes differ, or `kept` is missing or superfluous.
        PacketError: a loaded codec's Decode refuses what its Encode has made; `kept` is then new of
            some chunks and old of others, and of one that failed its momentum alone may be new.
    """
    compressor = check_stage(compressor.at(key.step))
    values = _floats(x, "x")
    kept = _checked_kept(compressor, kept, values.size)
    packets = _packets_for(compressor, values.size, out)
    if compressor.has_momentum and kept is not None:
        return _encode_momentum(compressor, values, key, kept, packets)
    codec, params = _codec(compressor.codec)
    if kept is not None and not compressor.has_residual:
        return _encode_state(compressor, values, key, kept, packets)
    written = _functions().encode(
        codec,
        params,
        _c_key(key),
        values.ctypes.data,
        None if kept is None else kept.ctypes.data,
        values.size,
        packets.ctypes.data,
        packets.size,
    )
    return packets[: _checked(written, compressor)]


def _encode_momentum(
    compressor: "Compressor", values: Floats, key: Key, kept: Floats, packets: Bytes
) -> Bytes:
    """Takes a gradient into the momentum and encodes that, chunk by chunk; see ops.smoothing."""
    codec, params = _codec(compressor.codec)
    written = _functions().encode_momentum(
        codec,
        params,
        _c_key(key),
        values.ctypes.data,
        dict(compressor.params)["beta"],
        compressor.for_sums.has_residual,
        kept.ctypes.data,
        kept.ctypes.data,
        values.size,
        packets.ctypes.data,
        packets.size,
    )
    return packets[: _checked(written, compressor)]


def _encode_state(
    compressor: "Compressor", values: Floats, key: Key, state: Floats, packets: Bytes
) -> Bytes:
    """Encodes with a codec that has state, which becomes the new one in place."""
    codec, params = _codec(compressor.codec)
    written = _functions().encode_state(
        codec,
        params,
        _c_key(key),
        values.ctypes.data,
        state.ctypes.data,
        state.ctypes.data,
        values.size,
        packets.ctypes.data,
        packets.size,
    )
    return packets[: _checked(written, compressor)]


def decode(
    compressor: "Compressor", packets: Buffer, n: int, out: Floats | None = None, add: bool = False
) -> Floats:
    """Decodes the packets of one tensor of n elements.

    Args:
        compressor: what they were encoded with; error feedback makes no difference. Of a warm-up
            that is `compressor.at(step)`.
        packets: all packets of the tensor, concatenated.
        n: elements.
        out: float32 of n elements to write or add to; made when None.
        add: add to `out` instead of writing it.

    Returns:
        `out`, or a new array of shape [n].

    Raises:
        PacketError: the packets are truncated, too long, or not of this codec; `out` is then as it
            was, unless the body of a later packet is at fault.
        ValueError: `add` without `out`, `out` has another size, or `compressor` is a warm-up.
    """
    check_stage(compressor)
    if add and out is None:
        raise ValueError("`add` must come with `out`. Received: add=True, out=None")
    check_size(n)
    source = _bytes(packets, "packets")
    target = _room_for(compressor, [source], n) if out is None else _output(out, n)
    codec, params = _codec(compressor.codec)
    status = _functions().decode(
        codec, params, source.ctypes.data, source.size, target.ctypes.data, n, add
    )
    if status != 0:
        raise _packet_error(compressor, status, [source], n, 0)
    return target if out is None else out


def merge(
    compressor: "Compressor", packets: Sequence[Buffer], n: int, out: Floats | None = None
) -> Floats:
    """Returns the sum of several encoded tensors of n elements, added in the order given.

    Args:
        compressor: what they were encoded with; of a warm-up, `compressor.at(step)`.
        packets: for each tensor, all its packets concatenated; at least one. An array of uint8
            [W, B] will do.
        n: elements of each tensor.
        out: float32 of n elements to write; made when None.

    Raises:
        PacketError: as for `decode`; the message says which.
        ValueError: `packets` is empty, `out` has another size, or `compressor` is a warm-up.
    """
    check_stage(compressor)
    check_size(n)
    rows, pointers, sizes = _rows(packets)
    target = _room_for(compressor, rows, n) if out is None else _output(out, n)
    codec, params = _codec(compressor.codec)
    bad_row = ctypes.c_int32(-1)
    status = _functions().merge(
        codec, params, pointers, sizes, len(rows), target.ctypes.data, n, ctypes.byref(bad_row)
    )
    if status != 0:
        raise _packet_error(compressor, status, rows, n, bad_row.value)
    return target if out is None else out


def merge_encode(
    compressor: "Compressor",
    packets: Sequence[Buffer],
    n: int,
    key: Key,
    kept: Floats | None = None,
    out: Bytes | None = None,
) -> Bytes:
    """Merges and encodes the sum again, chunk by chunk, so that the sum never leaves the cache.

    Equals `encode(compressor, merge(compressor, packets, n), key, kept)`, bit for bit. Of a warm-up
    the stage of `key.step` does both.

    Raises:
        PacketError: as for `merge`; `kept` is then as it was, unless the body of a later packet is
            at fault.
        ValueError: `packets` is empty, sizes differ, or `kept` is missing or superfluous.
    """
    check_size(n)
    compressor = check_for_sums(check_stage(compressor.at(key.step)))
    kept = _checked_kept(compressor, kept, n)
    rows, pointers, sizes = _rows(packets)
    merged = _packets_for(compressor, n, out)
    bad_row = ctypes.c_int32(-1)
    codec, params = _codec(compressor.codec)
    written = _functions().merge_encode(
        codec,
        params,
        _c_key(key),
        pointers,
        sizes,
        len(rows),
        None if kept is None else kept.ctypes.data,
        n,
        merged.ctypes.data,
        merged.size,
        ctypes.byref(bad_row),
    )
    if written < 0:
        raise _packet_error(compressor, -written, rows, n, bad_row.value)
    return merged[:written]


class _CKey(ctypes.Structure):
    """TfHipsKey of cc/runtime/codec.h."""

    _fields_ = [
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("tensor_id", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
    ]


def _c_key(key: Key) -> "ctypes._Pointer[_CKey]":
    return ctypes.pointer(_CKey(key.seed, key.step, key.tensor_id, key.offset))


class _Functions:
    """The functions of cc/runtime/api.h, with their types."""

    def __init__(self) -> None:
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

        def function(name: str, result: Any, *arguments: Any) -> "ctypes._NamedFuncPointer":
            made: ctypes._NamedFuncPointer = library.function(
                f"tf_hips_{name}", result, arguments, f"`{name}` of codecs"
            )
            return made

        codec = (pointer, pointer)  # the codec, its parameters
        key = ctypes.POINTER(_CKey)
        rows = (ctypes.POINTER(pointer), ctypes.POINTER(i64), i32)
        bad_row = ctypes.POINTER(i32)
        self.find_codec = function("find_codec", pointer, ctypes.c_char_p)
        self.wire_bytes = function("wire_bytes", i64, *codec, i64)
        self.encode = function("encode", i64, *codec, key, pointer, pointer, i64, pointer, i64)
        self.encode_state = function(
            "encode_state", i64, *codec, key, pointer, pointer, pointer, i64, pointer, i64
        )
        self.encode_momentum = function(
            "encode_momentum",
            i64,
            *codec,
            key,
            pointer,
            ctypes.c_float,
            i32,
            pointer,
            pointer,
            i64,
            pointer,
            i64,
        )
        self.decode = function("decode", i32, *codec, pointer, i64, pointer, i64, i32)
        self.merge = function("merge", i32, *codec, *rows, pointer, i64, bad_row)
        self.merge_encode = function(
            "merge_encode", i64, *codec, key, *rows, pointer, i64, pointer, i64, bad_row
        )
        self.status_text = function("status_text", ctypes.c_char_p, i32)
        self.explain = function("explain", i32, *codec, pointer, i64, i64, ctypes.c_char_p, i64)


@functools.cache
def _functions() -> _Functions:
    threads = os.environ.get(_THREADS)
    if threads is not None and not re.fullmatch("[0-9]*[1-9][0-9]*", threads):
        # The library itself would take it for unset.
        raise ValueError(f"`{_THREADS}` must be an integer, at least 1. Received: {threads!r}")
    return _Functions()


@functools.lru_cache(maxsize=256)
def _codec(codec: "Compressor") -> "tuple[int, ctypes.Array[ctypes.c_double]]":
    """The codec's table, and its parameters as C wants them."""
    functions = _functions()
    if not codec.makes_packets:
        raise ValueError(f"a compressor must make packets to be run. Received: {codec.text}")
    if loaded.NAME.fullmatch(codec.name):
        # Also for a value that was made in another process and came here whole.
        found = jit.table(codec.name)
    else:
        found = functions.find_codec(codec.name.encode())
    if not found:
        raise errors.LibraryError(
            f"{library.NATIVE_PATH.name} has no codec {codec.name!r}; run `make build`"
        )
    values = [float(value) for _, value in codec.codec_params]
    return found, (ctypes.c_double * len(values))(*values)


def _checked(result: int, compressor: "Compressor") -> int:
    """Passes a size on, and raises for -status."""
    if result >= 0:
        return result
    raise _error(-result, f"{compressor.text}: {_functions().status_text(-result).decode()}")


def _error(status: int, text: str) -> Exception:
    if status in (_NO_SCRATCH, OUT_OF_MEMORY):
        return MemoryError(text)
    if status in (_BAD_PARAMETER, _BAD_ARGUMENT, _SPLIT_VARIABLE_SIZE):
        return ValueError(text)
    return errors.PacketError(text)


def _packet_error(
    compressor: "Compressor", status: int, rows: Sequence[Bytes], n: int, bad_row: int
) -> Exception:
    """The error for a failed decoding, with what row `bad_row` (-1: none) should have been."""
    reason = f"{compressor.text}: {_functions().status_text(status).decode()}"
    if bad_row < 0:
        return _error(status, reason)
    where = f"row {bad_row} of {len(rows)}: " if len(rows) > 1 else ""
    _, explained = _explain(compressor, rows[bad_row], n)
    return _error(status, where + (explained or reason))


def _explain(compressor: "Compressor", packets: Bytes, n: int) -> tuple[int, str]:
    """What is wrong with the prefixes or the length of packets: status (0: nothing) and text."""
    codec, params = _codec(compressor.codec)
    text = ctypes.create_string_buffer(512)
    status = _functions().explain(
        codec, params, packets.ctypes.data, packets.size, n, text, len(text)
    )
    return status, text.value.decode(errors="replace")


def _room_for(compressor: "Compressor", rows: Sequence[Bytes], n: int) -> Floats:
    """Room for n elements, if these can be their packets: false ones must not cost memory."""
    for index, row in enumerate(rows):
        status, _ = _explain(compressor, row, n)
        if status != 0:
            raise _packet_error(compressor, status, rows, n, index)
    return np.empty(n, np.float32)


def _output(out: Floats, n: int) -> Floats:
    return _floats(out, "out", size=n, write=True)


def check_integer(name: str, value: object) -> None:
    """Raises TypeError for what is no integer; truth values are none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}")


def check_size(n: int) -> None:
    """Refuses what cannot be the number of elements of a tensor: TypeError, ValueError."""
    check_integer("n", n)
    if not 0 <= n <= MAX_ELEMENTS:
        raise ValueError(f"`n` must be in [0, 2^48]. Received: n={n}")


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape in Python's integers, which do not overflow; refuses what `check_size` refuses."""
    for side in shape:
        check_size(side)
    sides = tuple(int(side) for side in shape)
    check_size(math.prod(sides))
    return sides


def check_stage(compressor: "Compressor") -> "Compressor":
    """Passes on what makes packets; raises ValueError for a warm-up, whose stages do, and mixed."""
    if compressor.is_warmup:
        raise ValueError(
            "packets must be decoded with the stage of the warm-up that made them: give "
            f"`compressor.at(step)`, the step being that of encoding. Received: {compressor.text}"
        )
    if compressor.is_mixed:
        raise ValueError(
            "what is mixed must be asked for by the elements of a tensor: give "
            f"`compressor.of_size(n)`. Received: {compressor.text}"
        )
    return compressor


def check_for_sums(compressor: "Compressor") -> "Compressor":
    """Passes on a compressor that encodes sums.

    Raises:
        ValueError: it has momentum, or its codec state, which the summands went through already.
    """
    if compressor.for_sums != compressor:
        raise ValueError(
            f"sums must be encoded without momentum, such as by {compressor.for_sums.text}. "
            f"Received: {compressor.text}"
        )
    return compressor


def _checked_kept(compressor: "Compressor", kept: Floats | None, n: int) -> Floats | None:
    """What encoding n elements keeps, checked."""
    if compressor.has_state != (kept is not None):
        raise ValueError(
            "`kept` must be given if and only if the compressor has error feedback, momentum or "
            "state. "
            f"Received: {compressor.text}, kept={'None' if kept is None else 'an array'}"
        )
    if kept is None:
        return None
    return _floats(kept, "kept", size=math.prod(compressor.state_shape((n,))), write=True)


def _floats(array: Any, name: str, size: int | None = None, write: bool = False) -> Floats:
    """Checks an array of float32 that C will read, or write in place."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise TypeError(
            f"`{name}` must be a float32 array. Received: {getattr(array, 'dtype', type(array))}"
        )
    if (
        not array.flags.c_contiguous
        or not array.flags.aligned
        or (write and not array.flags.writeable)
    ):
        raise TypeError(
            f"`{name}` must be C-contiguous{' and writable' if write else ''}. "
            f"Received: strides={array.strides}, writable={array.flags.writeable}"
        )
    if size is not None and array.size != size:
        raise ValueError(f"`{name}` must have {size} elements. Received: {array.size}")
    return array


def _bytes(buffer: Buffer, name: str) -> Bytes:
    """Views a buffer as uint8 without copying it."""
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise TypeError(
                f"`{name}` must be contiguous uint8 in one dimension. "
                f"Received: {buffer.dtype} of shape {buffer.shape}, strides={buffer.strides}"
            )
        return buffer
    view = memoryview(buffer)
    # frombuffer refuses empty buffers
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _packets_for(compressor: "Compressor", n: int, out: Bytes | None) -> Bytes:
    size = wire_bytes(compressor, n)
    if out is None:
        return np.empty(size, np.uint8)
    view = _bytes(out, "out")
    if view.size < size or not view.flags.writeable:
        raise ValueError(
            f"`out` must be writable and have at least {size} bytes. "
            f"Received: {view.size}, writable={view.flags.writeable}"
        )
    return view


def _rows(
    packets: Sequence[Buffer],
) -> "tuple[list[Bytes], ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_int64]]":
    if len(packets) == 0:
        raise ValueError("`packets` must have at least one row. Received: 0")
    rows = [_bytes(row, f"packets[{index}]") for index, row in enumerate(packets)]
    pointers = (ctypes.c_void_p * len(rows))(*[row.ctypes.data for row in rows])
    return rows, pointers, (ctypes.c_int64 * len(rows))(*[row.size for row in rows])
