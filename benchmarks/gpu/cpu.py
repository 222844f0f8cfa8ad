# SPDX-License-Identifier: Apache-2.0
"""A codec as C++ on this machine's processors, chunks side by side: what large tensors and timed
calls on a GPU are compared with. The NumPy reference would take minutes for them; g++, which nvcc
needs too, makes the library.
"""

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import compll
from benchmarks.gpu.machine import Bytes, Floats, GpuError
from compll import packet
from compll.backends.cache import build
from compll.backends.library import CompiledCodec
from compll.backends.toolchain import BuildError

# For g++, besides those of what is shipped.
FLAGS: tuple[str, ...] = ()


class Cpu:
    """The codec, with the interface of the reference."""

    def __init__(self, program: compll.Program) -> None:
        source = compll.generate(program)[f"{program.name}.codec.cc"]
        try:
            self._codec = CompiledCodec(program, build(source, program.name, FLAGS))
        except BuildError as error:
            raise GpuError(str(error)) from error
        self._bodies = self._codec.body_bytes

    def encode(self, x: Floats, state: Floats | None = None, **key: Any) -> Bytes:
        """The packets of a tensor; the state is replaced."""
        if state is None:
            return self._packets(
                x.size, key, lambda part, where: self._codec.encode_body(x[part], **where)
            )
        new = np.empty_like(state)

        def encode(part: slice, where: dict[str, Any]) -> Bytes:
            old, later = ([row[part] for row in rows] for rows in (state, new))
            return self._codec.encode_body(x[part], **where, state=old, new_state=later)

        packets = self._packets(x.size, key, encode)
        state[:] = new
        return packets

    def encode_feedback(self, x: Floats, residual: Floats, **key: Any) -> Bytes:
        """The packets of x + residual; the residual is replaced."""

        def encode(part: slice, where: dict[str, Any]) -> Bytes:
            rest = residual[part]
            return self._codec.encode_feedback_body(x[part], rest, rest, **where)

        return self._packets(x.size, key, encode)

    def decode(self, packets: Bytes, n: int) -> Floats:
        """The values of packets that are in order."""
        out = np.empty(n, np.float32)
        starts = self._starts(n)

        def decode(start: int, body: bytes) -> None:
            part = out[start : start + packet.CHUNK]
            self._codec.decode_body(np.frombuffer(body, np.uint8), part)

        bodies = packet.split(packets.tobytes(), self._codec.codec_hash, n, self._bodies)
        _side_by_side(decode, starts, [body for _, body in bodies])
        return out

    def _packets(
        self, n: int, key: dict[str, Any], encode: Callable[[slice, dict[str, Any]], Bytes]
    ) -> Bytes:
        def one(start: int, size: int) -> tuple[Bytes, Bytes]:
            where = {**key, "offset": key.get("offset", 0) + start}
            prefix = np.frombuffer(packet.prefix(self._codec.codec_hash, size), np.uint8)
            return prefix, encode(slice(start, start + size), where)

        sizes = packet.packet_sizes(n)
        parts = _side_by_side(one, self._starts(n), sizes)
        return np.concatenate([part for pair in parts for part in pair])

    @staticmethod
    def _starts(n: int) -> list[int]:
        return [packet.CHUNK * k for k in range(len(packet.packet_sizes(n)))]


def _side_by_side(function: Callable[..., Any], *arguments: list[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, *arguments))
