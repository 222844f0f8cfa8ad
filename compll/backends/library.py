# SPDX-License-Identifier: Apache-2.0
"""A codec compiled by the system's C++ compiler and called through ctypes.

Chunks and prefixes are added here, as in the reference.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from compll import packet
from compll.backends.reference import Bytes, Floats, Reference
from compll.backends.toolchain import BuildError
from compll.ir import nodes
from compll.ir.printer import spec_hash
from compll.packet import PacketError

_STATUS = {
    1: "the buffer for the body is too small",
    2: "the body must be as long as its element count asks for",
    3: "the body was made with other parameters",
    4: "a parameter or the number of elements is out of range, or a block that is no power of two "
    "from 16 to 1024, or a width that is not from 1 to 16",
    5: "the specification has no such function",
    6: "there is no memory for a vector that is kept",
    7: "the codec has state, which must be given",
}
_BODY_STATUS = (2, 3)
_BAD_PARAMETER = 4


class _Key(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("tensor_id", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
    )


class _Codec(ctypes.Structure):
    _fields_ = (
        ("abi_version", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("spec_hash", ctypes.c_uint32),
        ("num_params", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("is_fixed_size", ctypes.c_int32),
        ("is_sparse", ctypes.c_int32),
        ("max_body_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)),
        (
            "encode",
            ctypes.CFUNCTYPE(
                ctypes.c_int64,
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
                *(ctypes.c_void_p, ctypes.c_int64),
            ),
        ),
        (
            "decode",
            ctypes.CFUNCTYPE(
                ctypes.c_int32,
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32),
            ),
        ),
        (
            "encode_feedback",
            ctypes.CFUNCTYPE(
                ctypes.c_int64,
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
            ),
        ),
        (
            "merge",
            ctypes.CFUNCTYPE(
                ctypes.c_int32,
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32),
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p),
            ),
        ),
        ("num_states", ctypes.c_int32),
        ("state_names", ctypes.c_void_p),
        (
            "encode_state",
            ctypes.CFUNCTYPE(
                ctypes.c_int64,
                *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
                *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),
            ),
        ),
    )


def _pointers(vectors: Sequence[Floats] | Sequence[Bytes]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(vectors))(*(vector.ctypes.data for vector in vectors))


class CompiledCodec:
    """A codec in machine code, with the interface of Reference."""

    def __init__(self, program: nodes.Program, library: Path, /, **params: float) -> None:
        """`library`: what `build` made of the program; `params`: as for Reference."""
        self.program = program
        self.params = packet.parameter_values(program, params)
        self.codec_hash = packet.codec_hash(program, self.params)
        self.state_names = program.state_names
        self._codec = self._table(library)
        if self._codec.spec_hash != spec_hash(program):
            raise BuildError(f"{library} must hold {program.name}. Received: another program")
        self._values = (ctypes.c_double * max(1, len(self.params)))(*self.params.values())

    def _table(self, library: Path) -> _Codec:
        getter = getattr(ctypes.CDLL(str(library)), f"tf_hips_codec_{self.program.name}")
        getter.restype = ctypes.POINTER(_Codec)
        table: _Codec = getter().contents
        return table

    @property
    def has_feedback(self) -> bool:
        """Whether it encodes with feedback itself; else the runtime decodes what it encodes."""
        return bool(self._codec.encode_feedback)

    @property
    def has_merge(self) -> bool:
        """Whether it sums bodies itself; for one whose decoding can fail the runtime does."""
        return bool(self._codec.merge)

    def body_bytes(self, n: int) -> int:
        """Bytes of the body of a chunk of n elements."""
        return self._checked(int(self._codec.max_body_bytes(self._values, n)))

    def wire_bytes(self, n: int) -> int:
        """Bytes of the packets of n elements, prefixes included."""
        return packet.wire_bytes(n, self.body_bytes)

    def _checked(self, result: int) -> int:
        if result >= 0:
            return result
        if -result in _BODY_STATUS:
            raise PacketError(_STATUS[-result])
        if -result == _BAD_PARAMETER:
            # The reference refuses the same, and says which width or block it is.
            Reference(self.program, **self.params).body_bytes(0)
        raise ValueError(_STATUS.get(-result, f"unknown status {-result}"))

    def encode_body(
        self,
        x: Floats,
        seed: int = 0,
        step: int = 0,
        tensor_id: int = 0,
        offset: int = 0,
        state: Sequence[Floats] = (),
        new_state: Sequence[Floats] = (),
    ) -> Bytes:
        """The body of the packet of one chunk; `x`: contiguous float32 [n], as each state."""
        body = np.empty(self.body_bytes(x.size), np.uint8)
        key = _Key(seed, step, tensor_id, offset)
        head = (self._values, ctypes.byref(key), x.ctypes.data)
        tail = (x.size, body.ctypes.data, body.size)
        if state:
            size = self._codec.encode_state(*head, _pointers(state), _pointers(new_state), *tail)
        else:
            size = self._codec.encode(*head, *tail)
        return body[: self._checked(int(size))]

    def encode_feedback_body(
        self,
        x: Floats,
        residual: Floats,
        new_residual: Floats,
        seed: int = 0,
        step: int = 0,
        tensor_id: int = 0,
        offset: int = 0,
    ) -> Bytes:
        """The body of the sum of `x` and `residual`, contiguous float32 [n].

        What decoding it misses of the sum is written to `new_residual`, which may be `residual`.

        Raises:
            ValueError: the program cannot encode with feedback.
        """
        if not self.has_feedback:
            raise ValueError(
                f"`program` must encode with feedback. Received: {self.program.name}, which lacks "
                "an Encode or a Decode, or has state"
            )
        body = np.empty(self.body_bytes(x.size), np.uint8)
        key = _Key(seed, step, tensor_id, offset)
        vectors = (x.ctypes.data, residual.ctypes.data, new_residual.ctypes.data)
        size = self._codec.encode_feedback(
            self._values, ctypes.byref(key), *vectors, x.size, body.ctypes.data, body.size
        )
        return body[: self._checked(int(size))]

    def decode_body(self, body: Bytes, out: Floats, add: bool = False) -> None:
        """Decodes the body of one chunk into `out`; raises PacketError."""
        status = self._codec.decode(
            self._values, body.ctypes.data, body.size, out.ctypes.data, out.size, int(add)
        )
        self._checked(-int(status))

    def merge_bodies(self, bodies: Sequence[Bytes], out: Floats) -> None:
        """Writes the sum of the bodies of one chunk, in their order, to `out`.

        Raises:
            ValueError: the codec has no merge of its own: see `has_merge`.
            PacketError: a body is refused; `out` is as it was.
        """
        if not self.has_merge:
            raise ValueError(
                f"`program` must have a Decode that cannot fail. Received: {self.program.name}"
            )
        sizes = (ctypes.c_int64 * len(bodies))(*(body.size for body in bodies))
        bad_row = ctypes.c_int32()
        rows = (_pointers(bodies), sizes, len(bodies), out.ctypes.data, out.size)
        status = self._codec.merge(self._values, *rows, 0, ctypes.byref(bad_row))
        self._checked(-int(status))

    def encode(
        self,
        x: Floats,
        seed: int = 0,
        step: int = 0,
        tensor_id: int = 0,
        offset: int = 0,
        state: Floats | None = None,
    ) -> Bytes:
        """Packets of a float32 vector [n]; returns uint8 [wire_bytes(n)]; `state`: as Reference."""
        packet.check_vector(x, np.float32, "x")
        packet.check_key(seed, step, tensor_id, offset)
        packet.check_state(state, self.state_names, x.size, self.program.name)
        x = np.ascontiguousarray(x)
        old = [] if state is None else [np.ascontiguousarray(row) for row in state]
        new = [np.empty_like(row) for row in old]
        parts = []
        start = 0
        for size in packet.packet_sizes(x.size):
            parts.append(np.frombuffer(packet.prefix(self.codec_hash, size), np.uint8))
            part = slice(start, start + size)
            key = (seed, step, tensor_id, offset + start)
            states = ([row[part] for row in rows] for rows in (old, new))
            parts.append(self.encode_body(x[part], *key, *states))
            start += size
        if state is not None:
            for row, values in enumerate(new):
                state[row] = values
        return np.concatenate(parts)

    def decode(self, packets: Bytes, n: int) -> Floats:
        """The float32 vector [n] in `packets` (uint8); raises PacketError."""
        packet.check_vector(packets, np.uint8, "packets")
        parts = packet.split(packets.tobytes(), self.codec_hash, n, self.body_bytes)
        out = np.empty(n, np.float32)
        start = 0
        for size, body in parts:
            self.decode_body(np.frombuffer(body, np.uint8), out[start : start + size])
            start += size
        return out
