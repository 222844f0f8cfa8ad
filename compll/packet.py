# SPDX-License-Identifier: Apache-2.0
"""Packets: what stands before a body, and how a tensor is cut into chunks.

    0    4s   magic "HIPS"
    4    u16  version, 1
    6    u16  flags, 0
    8    u32  codec hash: FNV-1a-32 over the specification's hash and the parameters' values
    12   u32  number of elements in this chunk

all little-endian. A tensor of n elements has ceil(n / 2^20) chunks of 2^20 elements, the last one
shorter; an empty tensor is one packet of an empty chunk. The encoding of a tensor is its chunks'
packets, concatenated.
"""

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from compll.ir import nodes
from compll.ir.printer import fnv1a32, spec_hash
from compll.ir.semantics import binary32
from compll.ir.types import FLOAT

CHUNK = 1 << 20
MAX_ELEMENTS = 1 << 40
MAGIC = b"HIPS"
VERSION = 1
PREFIX = struct.Struct("<4sHHII")


class PacketError(ValueError):
    """A packet is truncated, too long, made by another codec, or contradicts its parameters."""


def check_vector(array: object, kind: type, name: str) -> None:
    """Raises ValueError unless `array` is a vector of that dtype."""
    if not isinstance(array, np.ndarray) or array.dtype != kind or array.ndim != 1:
        found = type(array).__name__
        if isinstance(array, np.ndarray):
            found = f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"`{name}` must be a {np.dtype(kind).name} vector. Received: {found}")


def check_state(state: object, names: Sequence[str], n: int, codec: str) -> None:
    """Raises ValueError unless `state` is float32 [len(names), n]; None where there are none."""
    if not names and state is None:
        return
    shape = (len(names), n)
    is_right = isinstance(state, np.ndarray) and (state.dtype, state.shape) == (np.float32, shape)
    if not names or not is_right:
        wanted = f"float32 of shape {shape}, a row for each of {', '.join(names)}"
        found = type(state).__name__
        if isinstance(state, np.ndarray):
            found = f"{state.dtype} of shape {state.shape}"
        wanted = wanted if names else f"None: {codec} has none"
        raise ValueError(f"`state` must be {wanted}. Received: {found}")


def check_key(seed: int, step: int, tensor_id: int, offset: int) -> None:
    """Raises ValueError unless randomness can come from there."""
    bits = {"seed": 64, "step": 32, "tensor_id": 32, "offset": 63}
    for (name, width), value in zip(bits.items(), (seed, step, tensor_id, offset), strict=True):
        _check_integer(name, value, 1 << width, f"2^{width}")


def check_size(n: int) -> None:
    """Raises ValueError unless a tensor can have `n` elements."""
    _check_integer("n", n, MAX_ELEMENTS + 1, "2^40 + 1")


def _check_integer(name: str, value: object, end: int, shown: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < end:
        raise ValueError(f"`{name}` must be an integer in [0, {shown}). Received: {name}={value!r}")


def wire_bytes(n: int, body_bytes: Callable[[int], int]) -> int:
    """Bytes of the packets of n elements, prefixes included; `body_bytes`: of a chunk's body."""
    check_size(n)
    full, rest = divmod(n, CHUNK)
    total = full * (PREFIX.size + body_bytes(CHUNK)) if full else 0
    return total + (PREFIX.size + body_bytes(rest) if rest or not full else 0)


def packet_sizes(n: int) -> list[int]:
    """Elements of each packet of a tensor of `n` elements."""
    if n == 0:
        return [0]
    full, rest = divmod(n, CHUNK)
    return [CHUNK] * full + ([rest] if rest else [])


def codec_hash(program: nodes.Program, values: Mapping[str, float]) -> int:
    """The hash that a packet carries; `values`: every parameter's value by name."""
    data = struct.pack("<I", spec_hash(program))
    data += b"".join(struct.pack("<d", values[param.var.name]) for param in program.params)
    return fnv1a32(data)


def prefix(codec: int, count: int) -> bytes:
    """The 16 bytes before the body of a chunk of `count` elements."""
    return PREFIX.pack(MAGIC, VERSION, 0, codec, count)


def check_prefix(data: bytes, codec: int, count: int) -> None:
    """Raises PacketError unless `data` begins with the prefix of such a packet."""
    if len(data) < PREFIX.size:
        raise PacketError(f"a packet must have at least {PREFIX.size} bytes. Received: {len(data)}")
    magic, version, flags, found_codec, found_count = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise PacketError(f"a packet must begin with {MAGIC!r}. Received: {magic!r}")
    if version != VERSION or flags != 0:
        raise PacketError(
            f"the packet must be of version {VERSION} without flags. "
            f"Received: {version}, {flags:#x}"
        )
    if found_codec != codec:
        raise PacketError(
            f"the packet must be of codec {codec:08x}. "
            f"Received: {found_codec:08x}, another codec or other parameters"
        )
    if found_count != count:
        raise PacketError(f"the packet must hold {count} elements. Received: {found_count}")


def split(
    data: bytes, codec: int, n: int, body_bytes: Callable[[int], int]
) -> list[tuple[int, bytes]]:
    """Number of elements and body of each packet of a tensor of `n` elements.

    Raises:
        PacketError: a prefix is wrong, or `data` is shorter or longer than the packets of n
        elements.
    """
    expected = wire_bytes(n, body_bytes)
    # A foreign packet mostly has another length too; that it is foreign is the better message.
    check_prefix(data, codec, min(n, CHUNK))
    if len(data) != expected:
        raise PacketError(
            f"the packets of {n} elements must have {expected} bytes. Received: {len(data)}"
        )
    parts = []
    at = 0
    for size in packet_sizes(n):
        check_prefix(data[at : at + PREFIX.size], codec, size)
        at += PREFIX.size
        end = at + body_bytes(size)
        parts.append((size, data[at:end]))
        at = end
    return parts


def parameter_values(program: nodes.Program, given: Mapping[str, float]) -> dict[str, float]:
    """Checked values of all parameters, in declaration order; floats as binary32 holds them.

    Raises:
        ValueError: a name is unknown, a value is missing, out of range, or no integer where it must
        be one.
    """
    known = [param.var.name for param in program.params]
    for name in given:
        if name not in known:
            raise ValueError(
                f"`{name}` must be a parameter of {program.name}. "
                f"Known: {', '.join(known) or 'none'}"
            )
    values = {}
    for param in program.params:
        name = param.var.name
        if name not in given and param.default is None:
            raise ValueError(f"`{name}` must be given: {program.name} has no default for it")
        value = given.get(name, param.default)
        if value is None or isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"`{name}` must be a number. Received: {name}={value!r}")
        if param.var.type != FLOAT and value != value // 1:
            raise ValueError(f"`{name}` must be an integer. Received: {name}={value}")
        if param.var.type == FLOAT:
            value = binary32(value)
        if not param.low <= value <= param.high:
            raise ValueError(
                f"`{name}` must be in [{param.low:.9g}, {param.high:.9g}]. Received: {name}={value}"
            )
        values[name] = float(value) + 0.0  # -0 is 0
    return values
