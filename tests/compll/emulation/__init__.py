# SPDX-License-Identifier: Apache-2.0
"""Generated CUDA on a CPU: a tool of tests.

Kernels are compiled as C++ against a header that stands in for CUDA's, and run thread by thread.
"""

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

import compll
from benchmarks.gpu.binding import ADD, FINE, RESIDUAL, SET, Key, table
from compll import packet
from compll.backends import cuda
from compll.backends.cache import BUILT
from compll.backends.toolchain import compiler, include_folder
from compll.passes import optimise
from tests.compll import hurry

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Reports = npt.NDArray[np.uint64]
__all__ = ["ADD", "FINE", "RESIDUAL", "Emulated"]
FOLDER = Path(__file__).parent
_OWN = '#include "tf_hips/cc/cuda/library.cu"\n'
# What `_OWN` includes that takes long to read.
_LONG = "#include <string>\n"
# Headers that some kernels alone include, and that are short: with those of all, they would make
# another set to read once, which takes longer than to read these.
_SOME = re.compile(r"cuda/(held|tiles|top_k)\.cuh")
# As in hurry.py: what is inlined wherever it is called is compiled again each time.
_CALLED = """#include "tf_hips/cc/runtime/target.h"
#undef TF_HIPS_INLINE
#define TF_HIPS_INLINE inline
"""
FLAGS = (
    *("-O0", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror"),
    "-Wno-tautological-compare",  # a program may compare a value with itself
)


def make(command: list[str], source: str, name: str, *more: Path) -> Path:
    """What a compiler makes of a source, from the cache; `more`: files it depends on besides."""
    root = include_folder()
    headers = [*root.glob("tf_hips/cc/cuda/*"), *root.glob("tf_hips/cc/runtime/*.h"), *more]
    digest = hashlib.sha256("\0".join([*command, str(root), source]).encode())
    for file in sorted([*headers, FOLDER / "cuda_runtime.h"]):
        digest.update(file.read_bytes())

    def compile_to(made: Path) -> None:
        aside = made.with_suffix(f".{os.getpid()}.new")
        full = [*compiler(), *command, f"-I{FOLDER}", f"-I{root}", "-o", str(aside)]
        subprocess.run([*full, "-x", "c++", "-"], input=source.encode(), check=True, timeout=120)
        aside.replace(made)

    # Two workers may need it at once: one compiles, the other waits.
    entry = f"emulated-{name}-{digest.hexdigest()[:24]}.so"
    return BUILT.library(entry, Path.is_file, compile_to)


def flags(*kernels: str) -> list[str]:
    """Flags for sources of kernels, with most of their headers in the compiler's own form."""
    # As the kernels include them, so that none is there which they forget.
    included = re.findall(r"^#include .*\n", "".join(kernels), re.MULTILINE)
    often = (line for line in dict.fromkeys(included) if not _SOME.search(line))
    text = "".join([_CALLED, *often, _LONG])
    root = include_folder()
    command = (*compiler(), *FLAGS, f"-I{FOLDER}", f"-I{root}")
    files = [*root.glob("tf_hips/cc/*/*.*h"), FOLDER / "cuda_runtime.h"]
    return [*FLAGS, *hurry.read_once(text, command, files)]


def build(program: compll.Program, *others: compll.Program, more: str = "") -> Path:
    """The emulated kernels of programs as a library, from the cache; `more`: source besides."""
    kernels = [cuda.emit(optimise(one)) for one in (program, *others)]
    return make(flags(*kernels), "\n".join([*kernels, _OWN, more]), program.name)


class Guarded:
    """A vector between bytes that must not change, `skew` bytes off alignment."""

    def __init__(self, count: int, kind: type, skew: int = 0) -> None:
        size = count * np.dtype(kind).itemsize
        self._whole = np.full(size + 256, 0xA5, np.uint8)
        self._start = (-self._whole.ctypes.data) % 64 + 64 + skew
        self._end = self._start + size
        self.inside = self._whole[self._start : self._end].view(kind)

    def check(self) -> None:
        """Nothing was written outside."""
        assert (self._whole[: self._start] == 0xA5).all()
        assert (self._whole[self._end :] == 0xA5).all()


class Emulated:
    """A codec whose generated kernels run on this CPU."""

    def __init__(
        self, program: compll.Program, library: Path | None = None, **params: float
    ) -> None:
        """`library`: with the kernels; None for `build`."""
        self.program = program
        values = packet.parameter_values(program, params)
        self._library = ctypes.CDLL(str(library or build(program)))
        self.codec = table(self._library, program.name)
        self.values = (ctypes.c_double * max(1, len(values)))(*values.values())

    def order(self, *, backwards: bool) -> None:
        """In which order blocks run, and the threads of a block."""
        self._library.emulation_order(int(backwards))

    def alone(self, *, may_be: bool) -> None:
        """Whether one block of threads may do all of a small call; it does, at first."""
        self._library.emulation_alone(int(may_be))

    def hold(self, *, blocks: int) -> None:
        """How many blocks that keep tiles run at once; 0: none does. 4 at first."""
        self._library.emulation_hold(blocks)

    def launches(self) -> int:
        """Kernels that have been launched so far."""
        self._library.emulation_launches.restype = ctypes.c_longlong
        return int(self._library.emulation_launches())

    def watch(self, *vectors: np.ndarray | None) -> None:
        """Told of the vectors that a call makes, before its kernels run."""

    def scratch(self, n: int) -> Guarded:
        """Memory that the kernels may use, full of garbage."""
        return Guarded(int(self.codec.scratch_bytes(self.values, n)), np.uint8)

    def encode(
        self,
        x: Floats,
        residual: Floats | None = None,
        skew: int = 0,
        state: Floats | None = None,
        is_apart: bool = False,
        report: Reports | None = None,
        **key: int,
    ) -> tuple[Bytes, Floats | None]:
        """Packets, and with a residual or state [num_states, n] the new one.

        `is_apart`: the new residual is not written over the old one. `report`: one, of a codec
        without state, that is to say whether the packets decode.
        """
        n = x.size
        packets = Guarded(int(self.codec.wire_bytes(self.values, n)), np.uint8, skew)
        scratch = self.scratch(n)
        kept = None if residual is None else residual.copy()
        at = None if kept is None else kept.ctypes.data
        where = Key(*(key.get(name, 0) for name in ("seed", "step", "tensor_id", "offset")))
        old = new = at
        if residual is not None and is_apart:
            kept = np.full_like(residual, np.nan)
            old, new = residual.ctypes.data, kept.ctypes.data
        if state is not None:
            kept = np.empty_like(state)
            old, new = state.ctypes.data, kept.ctypes.data
        self.watch(packets.inside, scratch.inside, kept)
        first = (self.values, ctypes.byref(where), x.ctypes.data, old, new)
        last = (
            *(n, packets.inside.ctypes.data, packets.inside.size),
            *(scratch.inside.ctypes.data, scratch.inside.size, None),
        )
        if state is None:
            status = self.codec.encode(
                *first, None if report is None else report.ctypes.data, *last
            )
        else:
            status = self.codec.encode_state(*first, *last)
        assert status == 0, status
        packets.check()
        scratch.check()
        return packets.inside.copy(), kept

    def decode(
        self, rows: list[Bytes], n: int, out: Floats | None = None, mode: int = SET
    ) -> tuple[Floats, int]:
        """The sum of rows, and the report."""
        result = Guarded(n, np.float32)
        result.inside[:] = np.float32(7) if out is None else out
        scratch = self.scratch(n)
        report = np.zeros(1, np.uint64)
        pointers = (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))
        self.watch(result.inside, scratch.inside)
        status = self.codec.decode(
            *(self.values, pointers, rows[0].size, len(rows), result.inside.ctypes.data, n, mode),
            *(report.ctypes.data, scratch.inside.ctypes.data, scratch.inside.size, None),
        )
        assert status == 0, status
        result.check()
        scratch.check()
        return result.inside.copy(), int(report[0])
