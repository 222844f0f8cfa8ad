# SPDX-License-Identifier: Apache-2.0
"""The library that the GPU benchmark measures: built with nvcc, called through ctypes."""

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import compll
from benchmarks.gpu.binding import FINE, I32, I64, SET, VOID, Key, table
from compll import packet

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/cuda/libbench.so"
BUILD_DEADLINE_S = 580

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class GpuError(RuntimeError):
    """CUDA refused something; there is no more to say."""


def build(arch: str | None) -> bool:
    """Compiles codecs and helper with nvcc; False where nvcc is not. `arch`: None for all."""
    if shutil.which("nvcc") is None:
        return False
    command = [sys.executable, str(ROOT / "tools/build_cuda.py"), "--output", str(LIBRARY)]
    command += ["--with", "benchmarks/gpu/device.cu"]
    command += [] if arch is None else ["--arch", arch]
    subprocess.run(command, check=True, cwd=ROOT, timeout=BUILD_DEADLINE_S)
    return True


class Memory:
    """A vector in device memory."""

    def __init__(self, gpu: "Gpu", count: int, kind: type = np.uint8) -> None:
        self.gpu, self.count, self.kind = gpu, count, np.dtype(kind)
        self.bytes = count * self.kind.itemsize
        self.at = gpu.call("gpu_alloc", I64(self.bytes), result=VOID)
        if not self.at:
            raise GpuError(f"there must be {self.bytes} bytes of device memory. Received: none")

    def put(self, values: npt.NDArray[Any]) -> "Memory":
        """Copies to the device."""
        values = np.ascontiguousarray(values)
        if values.nbytes > self.bytes:
            raise GpuError(f"there must be room for {values.nbytes} bytes. Received: {self.bytes}")
        self.gpu.good("gpu_upload", VOID(self.at), VOID(values.ctypes.data), I64(values.nbytes))
        return self

    def get(self) -> npt.NDArray[Any]:
        """Copies from the device, after everything before."""
        values = np.empty(self.count, self.kind)
        self.gpu.good("gpu_download", VOID(values.ctypes.data), VOID(self.at), I64(self.bytes))
        return values

    def free(self) -> None:
        """Gives it back."""
        self.gpu.good("gpu_free", VOID(self.at))


class Gpu:
    """The GPU of this machine, as far as there is one."""

    def __init__(self, path: Path = LIBRARY) -> None:
        self.library = ctypes.CDLL(str(path))
        self.count = self.call("gpu_count", result=I32)

    def call(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """Calls a function of device.cu."""
        function = getattr(self.library, name)
        function.restype = result
        return function(*arguments)

    def has(self, codec: str) -> bool:
        """Whether a codec is in the library: the CUDA back end may refuse one, and says so then."""
        return hasattr(self.library, f"tf_hips_cuda_codec_{codec}")

    def good(self, name: str, *arguments: Any) -> None:
        """Calls one that returns an error of CUDA."""
        error = self.call(name, *arguments)
        if error != 0:
            raise GpuError(f"{name} must return 0. Received: CUDA error {error}")

    def milliseconds(self, name: str, *arguments: Any) -> float:
        """Calls one that returns milliseconds."""
        found = float(self.call(name, *arguments, result=ctypes.c_double))
        if found < 0:
            raise GpuError(f"{name} must measure a time. Received: an error of CUDA")
        return found

    @property
    def name(self) -> str:
        """Of the first GPU."""
        text: bytes = self.call("gpu_name", result=ctypes.c_char_p)
        return text.decode()


class GpuCodec:
    """A codec whose kernels run on the GPU."""

    def __init__(self, gpu: Gpu, program: compll.Program, n: int, **params: float) -> None:
        """`n`: elements of every tensor of this object."""
        self.gpu, self.n = gpu, n
        self.codec = table(gpu.library, program.name)
        values = packet.parameter_values(program, params)
        self.values = (ctypes.c_double * max(1, len(values)))(*values.values())
        self.wire_bytes = int(self.codec.wire_bytes(self.values, n))
        self.scratch = Memory(gpu, int(self.codec.scratch_bytes(self.values, n)))
        self.packets = Memory(gpu, self.wire_bytes)
        self.report = Memory(gpu, 1, np.uint64)
        self.num_states = int(self.codec.num_states)
        # Of a codec with state: before and after a call.
        shape = self.num_states * n
        self.states = [Memory(gpu, shape, np.float32) for _ in range(2 if shape else 0)]
        for memory in self.states:
            memory.put(np.zeros(shape, np.float32))

    def free(self) -> None:
        """Gives its memory back."""
        for memory in (self.scratch, self.packets, self.report, *self.states):
            memory.free()

    def _encode_arguments(self, gradient: Memory, key: Key) -> list[Any]:
        return [
            *(self.values, ctypes.byref(key), VOID(gradient.at)),
            *(I64(self.n), VOID(self.packets.at), I64(self.wire_bytes)),
            *(VOID(self.scratch.at), I64(self.scratch.bytes)),
        ]

    def encode(self, gradient: Memory, key: Key, residual: Memory | None = None) -> Bytes:
        """The packets of a tensor; the residual, or the state, is replaced."""
        values, where, vector, *rest = self._encode_arguments(gradient, key)
        at = VOID(None if residual is None else residual.at)
        if self.num_states:
            old, new = (VOID(memory.at) for memory in self.states or [gradient, gradient])
            status = self.codec.encode_state(values, where, vector, old, new, *rest, None)
            self.states.reverse()
        else:
            status = self.codec.encode(values, where, vector, at, at, *rest, None)
        if status != 0:
            raise GpuError(f"encode must return 0. Received: status {status}")
        return self.packets.get()

    def _decode_arguments(self, rows: Sequence[Memory], out: Memory, mode: int) -> list[Any]:
        pointers = (VOID * len(rows))(*(row.at for row in rows))
        return [
            *(self.values, pointers, I64(self.wire_bytes), I32(len(rows)), VOID(out.at)),
            *(I64(self.n), I32(mode), VOID(self.report.at)),
            *(VOID(self.scratch.at), I64(self.scratch.bytes)),
        ]

    def decode(self, rows: Sequence[Memory], out: Memory, mode: int = SET) -> int:
        """Sums rows to `out`; returns the report, FINE when all is in order."""
        status = self.codec.decode(*self._decode_arguments(rows, out, mode), None)
        if status != 0:
            raise GpuError(f"decode must return 0. Received: status {status}")
        return int(self.report.get()[0])

    def time_encode(self, gradient: Memory, residual: Memory | None, calls: int) -> float:
        """Milliseconds of an encoding."""
        values, where, vector, *rest = self._encode_arguments(gradient, Key(1, 2, 3, 0))
        name, kept = "gpu_time_encode", [VOID(None if residual is None else residual.at)]
        if self.num_states:
            name, kept = f"{name}_state", [VOID(memory.at) for memory in self.states]
        pointer = VOID(ctypes.addressof(self.codec))
        return self.gpu.milliseconds(name, pointer, values, where, vector, *kept, *rest, I32(calls))

    def time_decode(self, rows: Sequence[Memory], out: Memory, mode: int, calls: int) -> float:
        """Milliseconds of a decoding."""
        arguments = self._decode_arguments(rows, out, mode)
        pointer = ctypes.addressof(self.codec)
        found = self.gpu.milliseconds("gpu_time_decode", VOID(pointer), *arguments, I32(calls))
        if int(self.report.get()[0]) != FINE:
            raise GpuError("what is decoded must be in order")
        return found
