# SPDX-License-Identifier: Apache-2.0
"""Codes of any width to bytes and back.

Code k of width b occupies bits [k b, (k + 1) b) of the stream, LSB first.
"""

import numpy as np
import numpy.typing as npt


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes."""
    return (count * bits + 7) // 8


def pack(codes: npt.NDArray[np.int64], bits: int) -> bytes:
    """Codes (0 .. 2^bits - 1) to bytes; the unused bits of the last byte are 0."""
    if bits in (8, 16, 32):
        return codes.astype(f"<u{bits // 8}").tobytes()
    places = np.arange(bits, dtype=np.int64)
    stream = ((codes[:, None] >> places) & 1).astype(np.uint8).reshape(-1)
    return np.packbits(stream, bitorder="little").tobytes()


def unpack(data: bytes, count: int, bits: int) -> npt.NDArray[np.int64]:
    """The first `count` codes of `data`."""
    if bits in (8, 16, 32):
        return np.frombuffer(data, f"<u{bits // 8}", count).astype(np.int64)
    stream = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    weights = np.int64(1) << np.arange(bits, dtype=np.int64)
    return stream.reshape(count, bits).astype(np.int64) @ weights
