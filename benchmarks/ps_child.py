# SPDX-License-Identifier: Apache-2.0
"""Children of a parameter server, for `make bench-ps`: one process, no TensorFlow.

Does what the driver says (`obedience`). A process may be several children, each a thread, where
only the server is looked at.
"""

import concurrent.futures
import gc
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import obedience
from tf_hips.config import Tls, Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.client import Client
from tf_hips.ps.terms.model import Model

DEADLINE_S = 600.0


class Child:
    """One child, with gradients that it has drawn before."""

    def __init__(self, server: str, run: str, site: str, identity: Tls | None) -> None:
        self._client = Client(Uplink(server, site, identity, DEADLINE_S), run, 1)

    def join(self, shapes: Sequence[Sequence[int]], up: str, down: str) -> int:
        """Joins and agrees on the model; bytes that one round sends."""
        welcome = self._client.join(up, down, 7)
        self._child = welcome.child
        self._up, self._down = map(compressors.parse, (welcome.compression, welcome.downlink))
        self._client.agree_model(shapes)
        self._model = Model(tuple(map(tuple, shapes)))
        draw = np.random.default_rng(welcome.child).standard_normal
        self._sizes = [math.prod(shape) for shape in shapes]
        self._gradients = [draw(size, np.float32) for size in self._sizes]
        self._kept = [
            np.zeros(size, np.float32) if self._up.has_residual else None for size in self._sizes
        ]
        self._lengths = [native.wire_bytes(self._up, size) for size in self._sizes]
        self._packets = np.empty(sum(self._lengths), np.uint8)
        self._values = np.empty(max(self._sizes), np.float32)
        return self._packets.size

    def round(self, number: int) -> tuple[float, float]:
        """Encodes, exchanges, decodes; seconds of all, and of the exchange."""
        began = time.perf_counter()
        at = 0
        for tensor, length in enumerate(self._lengths):
            native.encode(
                self._up,
                self._gradients[tensor],
                native.Key(self._child, number, tensor),
                kept=self._kept[tensor],
                out=self._packets[at : at + length],
            )
            at += length
        called = time.perf_counter()
        merged = self._client.exchange(number, self._packets)
        answered = time.perf_counter()
        at = 0
        lengths = self._model.packet_bytes(self._down)
        for chunk, length in zip(self._model.chunks, lengths, strict=True):
            out = self._values[: chunk.size]
            native.decode(self._down, merged[at : at + length], chunk.size, out=out)
            at += length
        return time.perf_counter() - began, answered - called

    def leave(self) -> None:
        """Leaves the run."""
        self._client.leave()


class Worker:
    """What this process has made so far."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def join(
        self,
        server: str,
        run: str,
        sites: list[str],
        identities: list[dict[str, str] | None],
        shapes: list[list[int]],
        up: str,
        down: str,
    ) -> dict[str, Any]:
        """Makes children, and waits for those of other processes."""
        self._pool = concurrent.futures.ThreadPoolExecutor(len(sites))
        self._children = [
            Child(server, run, site, Tls(**one) if one else None)
            for site, one in zip(sites, identities, strict=True)
        ]
        sizes = list(self._pool.map(lambda one: one.join(shapes, up, down), self._children))
        return {"bytes": sizes[0]}

    def rounds(self, first: int, count: int) -> dict[str, Any]:
        """Makes rounds; for each the slowest child's seconds, and those of its exchange."""
        gc.collect()
        found = list(
            self._pool.map(
                lambda one: [one.round(number) for number in range(first, first + count)],
                self._children,
            )
        )
        seconds = [max(child[k][0] for child in found) for k in range(count)]
        exchanges = [max(child[k][1] for child in found) for k in range(count)]
        return {"seconds": seconds, "exchanges": exchanges}

    def leave(self) -> dict[str, Any]:
        """Leaves the run, with all children."""
        list(self._pool.map(Child.leave, self._children))
        return {}


def main() -> int:
    """Obeys until the input ends."""
    obedience.obey(Worker())
    return 0


if __name__ == "__main__":
    sys.exit(main())
