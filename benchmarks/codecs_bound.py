# SPDX-License-Identifier: Apache-2.0
"""The least time in which bytes can be moved on this machine: of several kernels, the fastest.

Which one that is differs from machine to machine, and with how much is read and written side by
side: how wide loads and stores are, whether stores go past the caches, what is asked for ahead, and
how much of one buffer is moved before the next one's turn. So the kernels of codecs_stream.cc
compete before each comparison, one choice after the other, the largest buffer's first; the
fastest are measured again in each round of it, by turns with the codec.
"""

import ctypes
import dataclasses
import functools
import itertools
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from benchmarks import harness
from benchmarks.codecs_peers import seconds

TOO_LOW = "bound too low"
"""Said of a share that is larger than `MOST`: something moves bytes faster than our kernels."""
MOST = 1.05
TRIES = 3
FINALISTS = 2
# A choice is not worth trying for a buffer of a smaller share of all bytes.
LEAST_SHARE = 0.05

_BLOCK, _READ, _UPDATE, _WRITE = range(4)

Array = npt.NDArray[Any]
Ways = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Streams:
    """What must be moved.

    Attributes:
        read: is read, so many `times`.
        update: is read and written in place; what is in it stays.
        write: is written.
        is_empty: most of what is written are zeros, which some memory takes faster.
    """

    read: Array
    times: int = 1
    update: Array | None = None
    write: Array | None = None
    is_empty: bool = False

    @property
    def num_bytes(self) -> dict[int, int]:
        """Bytes moved by each kind of kernel."""
        update, write = (0 if a is None else a.nbytes for a in (self.update, self.write))
        return {_READ: self.times * self.read.nbytes, _UPDATE: 2 * update, _WRITE: write}


class Bound:
    """The kernels."""

    def __init__(self, helper: ctypes.CDLL, threads: int) -> None:
        self._helper, self._threads = helper, threads

    def compare(self, ours: Callable[[], Any], streams: Streams, rounds: int) -> dict[str, Any]:
        """Moving bytes over ours: the ratio, its interval, our seconds, and by what."""
        ours()
        finalists = self._fastest(streams)
        mine: list[float] = []
        theirs: list[list[float]] = [[] for _ in finalists]
        for _ in range(rounds):
            mine.append(seconds(ours))
            for found, ways in zip(theirs, finalists, strict=True):
                found.append(self._seconds(streams, ways))
        medians = [statistics.median(found) for found in theirs]
        best = medians.index(min(medians))
        ratios = [a / b for a, b in zip(theirs[best], mine, strict=True)]
        low, high = harness.interval(ratios)
        rate = sum(streams.num_bytes.values()) / medians[best] / 1e9
        share = statistics.median(ratios)
        return {
            "ratio": share,
            "interval": f"{low:.2f} - {high:.2f}",
            "seconds": statistics.median(mine),
            "against": f"{rate:.1f} GB/s, {self._name(streams, finalists[best])}",
            "met": TOO_LOW if share > MOST else "",
        }

    def _fastest(self, streams: Streams) -> list[Ways]:
        sizes = streams.num_bytes
        kinds = [kind for kind, size in sizes.items() if size > LEAST_SHARE * sum(sizes.values())]
        kinds.sort(key=lambda kind: -sizes[kind])
        found: dict[Ways, float] = {}
        best: Ways = (0, 0, 0, 0)
        for kind in [*kinds, _BLOCK]:
            tried = [
                (*best[:kind], which, *best[kind + 1 :])
                for which in range(self._helper.num_ways(kind))
            ]
            for _, ways in itertools.product(range(TRIES), tried):
                took = self._seconds(streams, ways)
                found[ways] = min(took, found.get(ways, took))
            best = min(tried, key=lambda ways: found[ways])
        return sorted(found, key=lambda ways: found[ways])[:FINALISTS]

    def _seconds(self, streams: Streams, ways: Ways) -> float:
        arrays = (streams.update, streams.write)
        rest = [(0, 0) if a is None else (a.ctypes.data, a.nbytes) for a in arrays]
        read = streams.read
        call = functools.partial(
            self._helper.stream_by,
            *(read.ctypes.data, read.nbytes, streams.times, *rest[0], *rest[1], self._threads),
            *(int(not streams.is_empty), 0, (ctypes.c_int32 * len(ways))(*ways)),
        )
        return seconds(call)

    def _name(self, streams: Streams, ways: Sequence[int]) -> str:
        parts = [
            self._helper.way_name(kind, ways[kind]).decode()
            for kind, size in streams.num_bytes.items()
            if size > LEAST_SHARE * sum(streams.num_bytes.values())
        ]
        return ", ".join(parts)


def build_helper() -> ctypes.CDLL:
    """codecs_stream.cc as a library."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "codecs_stream.so")
        subprocess.run(
            [
                *("g++", "-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-pthread"),
                *(f"-I{harness.ROOT}", str(harness.ROOT / "benchmarks/codecs_stream.cc")),
                *("-o", str(made)),
            ],
            check=True,
            timeout=120,
        )
        helper = ctypes.CDLL(str(made))
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    helper.stream.argtypes = [pointer, size, size, pointer, size, pointer, size, number]
    helper.stream_by.argtypes = [*helper.stream.argtypes, number, number, pointer]
    for function in (helper.encode_seconds, helper.decode_seconds):
        function.argtypes = [pointer, pointer, pointer, pointer, size, pointer, size, size]
        function.restype = ctypes.c_double
    helper.stream.restype = helper.stream_by.restype = ctypes.c_double
    helper.num_ways.argtypes, helper.num_ways.restype = [number], number
    helper.way_name.argtypes, helper.way_name.restype = [number, number], ctypes.c_char_p
    return helper
