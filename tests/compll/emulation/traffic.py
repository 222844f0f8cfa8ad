# SPDX-License-Identifier: Apache-2.0
"""How many bytes the kernels of a codec move, counted by the emulation (trace.cc).

python -m tests.compll.emulation.traffic [CODEC ...]    the table of docs/gpu.md
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import compll
from compll.backends import cuda
from compll.passes import optimise
from tests.compll.emulation import ADD, FLAGS, FOLDER, Bytes, Emulated, Floats, make
from tests.compll.support import SPECS, spec

N = 1 << 18
NUM_MERGED = 16
# Bytes per element, of which kernels read, and write.
Moved = tuple[float, float]


class Traced(Emulated):
    """Emulated kernels whose accesses to the vectors of a call are counted."""

    def __init__(self, program: compll.Program, **params: float) -> None:
        super().__init__(program, _build(program), **params)
        self._library.trace_text.restype = ctypes.c_char_p

    def count(self, vectors: list[np.ndarray], call: Callable[[], object]) -> dict[str, Moved]:
        """What each kernel of a call moves of `vectors`, and of those that the call makes."""
        self._library.trace_clear()
        self.watch(*vectors)
        call()
        lines = [line.split() for line in self._library.trace_text().decode().splitlines()]
        self._library.trace_clear()
        found: dict[str, Moved] = {}
        for name, read, written in lines:
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + int(read) / N, before[1] + int(written) / N)
        return found

    def watch(self, *vectors: np.ndarray | None) -> None:
        """Counts what is done to these vectors from now on."""
        for vector in vectors:
            if vector is not None:
                at, size = ctypes.c_void_p(vector.ctypes.data), ctypes.c_int64(vector.nbytes)
                self._library.trace_vector(at, size)


def _build(program: compll.Program) -> Path:
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-O0")]
    source = cuda.emit(optimise(program))
    traced = [*flags, "-O1", "-fsanitize=thread", "-DTF_HIPS_TRACE", "-c"]
    kernels = make(traced, source, f"traced-{program.name}")
    trace = FOLDER / "trace.cc"
    parts = make([*flags, "-O2", "-c"], trace.read_text(encoding="ascii"), "trace", trace)
    link = ["-shared", str(kernels), str(parts)]
    return make(link, "", f"linked-{program.name}", kernels, parts)


def count(program: compll.Program) -> dict[str, dict[str, Moved]]:
    """What each kernel moves, by what is done."""
    kernels = Traced(program)
    kernels.hold(blocks=1056)  # as on an H100
    rng = np.random.default_rng(0)
    x = rng.normal(size=N).astype(np.float32)
    out: Floats = np.zeros(N, np.float32)
    states = len(program.state_names)
    state = np.zeros((states, N), np.float32) if states else None
    packets, _ = kernels.encode(x, state=state)

    def encode(residual: Floats | None) -> Callable[[], object]:
        return lambda: kernels.encode(x, residual, state=state)

    def decode(rows: list[Bytes], mode: int) -> Callable[[], object]:
        return lambda: kernels.decode(rows, N, out, mode)

    inputs = [x] if state is None else [x, state]
    found = {"encode": kernels.count(inputs, encode(None))}
    if state is None:
        found["encode, feedback"] = kernels.count([x], encode(x * 0))
    found["decode"] = kernels.count([packets], decode([packets], 0))
    found["decode, add"] = kernels.count([packets], decode([packets], ADD))
    rows = [packets.copy() for _ in range(NUM_MERGED)]
    found[f"merge of {NUM_MERGED}"] = kernels.count(rows, decode(rows, 0))
    return found


def total(kernels: dict[str, Moved]) -> Moved:
    """Of all kernels together."""
    return sum(one[0] for one in kernels.values()), sum(one[1] for one in kernels.values())


def row(name: str) -> str:
    """A line of the table in docs/gpu.md."""
    cells = []
    for kernels in count(spec(name)).values():
        read, written = total(kernels)
        cells.append(f"{read + written:.2f}")
    if len(cells) < 5:
        cells.insert(1, "-")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Prints the table, and behind it what each kernel of the named codecs moves."""
    names = sys.argv[1:] or sorted(path.stem for path in SPECS.glob("*.pse"))
    for name in names:
        print(row(name), flush=True)
        for what, kernels in count(spec(name)).items() if sys.argv[1:] else ():
            for kernel, (read, written) in kernels.items():
                print(f"    {what}: {kernel}: reads {read:.2f}, writes {written:.2f}")


if __name__ == "__main__":
    main()
