# SPDX-License-Identifier: Apache-2.0
"""The library that the GPU benchmark measures: built with nvcc, called through ctypes."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import compll
from benchmarks.gpu.binding import CUDA_FAILED, FINE, I32, I64, SET, VOID, Key, table
from compll import packet

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build/cuda/libbench.so"
BUILD_DEADLINE_S = 580

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class GpuError(RuntimeError):
    """CUDA refused something; there is no more to say."""


def nvcc() -> str | None:
    """Path of the compiler, the one that tools/build_cuda.py takes; None where it is not."""
    return shutil.which(os.environ.get("NVCC", "nvcc"))


def build(arch: str | None) -> bool:
    """Compiles codecs and helper with nvcc; False where nvcc is not. `arch`: None for all."""
    if nvcc() is None:
        return False
    command = [sys.executable, str(ROOT / "tools/build_cuda.py"), "--output", str(LIBRARY)]
    command += ["--with", "benchmarks/gpu/device.cu"]
    command += [] if arch is None else ["--arch", arch]
    try:
        subprocess.run(command, check=True, cwd=ROOT, timeout=BUILD_DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise GpuError(
            f"nvcc must be done within {BUILD_DEADLINE_S} s; what it has compiled is kept, so run "
            "this again, or for one kind of GPU alone (--arch sm_90). Received: no end"
        ) from error
    except subprocess.CalledProcessError as error:
        # It has said why.
        raise GpuError(f"{command[1]} must return 0. Received: {error.returncode}") from error
    return True


class Memory:
    """A vector in device memory, `skew` bytes off alignment."""

    def __init__(self, gpu: "Gpu", count: int, kind: type = np.uint8, skew: int = 0) -> None:
        self.gpu, self.count, self.kind = gpu, count, np.dtype(kind)
        self.bytes = count * self.kind.itemsize
        self._start = gpu.call("gpu_alloc", I64(self.bytes + skew), result=VOID)
        if not self._start:
            raise GpuError(f"there must be {self.bytes} bytes of device memory. Received: none")
        self.at = self._start + skew

    def put(self, values: npt.NDArray[Any]) -> "Memory":
        """Copies to the device."""
        values = np.ascontiguousarray(values)
        if values.nbytes > self.bytes:
            raise GpuError(f"there must be room for {values.nbytes} bytes. Received: {self.bytes}")
        self.gpu.good("gpu_upload", VOID(self.at), VOID(values.ctypes.data), I64(values.nbytes))
        return self

    def fill(self, byte: int) -> None:
        """Makes all bytes this one."""
        self.gpu.good("gpu_fill", VOID(self.at), I32(byte), I64(self.bytes))

    def get(self) -> npt.NDArray[Any]:
        """Copies from the device, after everything before."""
        values = np.empty(self.count, self.kind)
        self.gpu.good("gpu_download", VOID(values.ctypes.data), VOID(self.at), I64(self.bytes))
        return values

    def free(self) -> None:
        """Gives it back."""
        self.gpu.good("gpu_free", VOID(self._start))


def addresses(memory: Sequence[Memory]) -> Any:
    """Where vectors lie, as an array of pointers."""
    return (VOID * len(memory))(*(one.at for one in memory))


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

    def refusal(self) -> str:
        """Why the library cannot run here; empty if it can."""
        text: bytes = self.call("tf_hips_cuda_refusal", result=ctypes.c_char_p)
        return text.decode()

    def has(self, codec: str) -> bool:
        """Whether a codec is in the library: the CUDA back end may refuse one, and says so then."""
        return hasattr(self.library, f"tf_hips_cuda_codec_{codec}")

    def good(self, name: str, *arguments: Any) -> None:
        """Calls one that returns an error of CUDA."""
        error = self.call(name, *arguments)
        if error != 0:
            raise GpuError(f"{name} must return 0. Received: {self._cuda_text(error)}")

    def _cuda_text(self, error: int) -> str:
        text: bytes = self.call("gpu_error_text", I32(error), result=ctypes.c_char_p)
        return text.decode()

    def milliseconds(self, name: str, *arguments: Any) -> float:
        """Calls one that returns milliseconds."""
        found = float(self.call(name, *arguments, result=ctypes.c_double))
        if found < 0:
            error = self.error_text() if found == -1000 else self._cuda_text(int(-found))
            raise GpuError(f"{name} must measure a time. Received: {error}")
        return found

    def was_late(self) -> bool:
        """Whether the last time must be measured again: it has the host's own in it."""
        return bool(self.call("gpu_was_late"))

    def error_text(self) -> str:
        """What CUDA said when a codec or a pass last failed."""
        text: bytes = self.call("tf_hips_cuda_error_text", result=ctypes.c_char_p)
        return text.decode() or "another status than 0"

    def cuda_version(self, of: str) -> str:
        """CUDA that the "driver" can run, or of which the "library" is."""
        number = int(self.call(f"gpu_{of}_version", result=I32))
        return f"{number // 1000}.{number // 10 % 100}" if number else "unknown"

    @property
    def name(self) -> str:
        """Of the first GPU."""
        text: bytes = self.call("gpu_name", result=ctypes.c_char_p)
        return text.decode()


class GpuCodec:
    """A codec whose kernels run on the GPU."""

    def __init__(
        self, gpu: Gpu, program: compll.Program, n: int, *, sets: int = 1, skew: int = 0
    ) -> None:
        """What it needs in device memory.

        Args:
            gpu: with the library.
            program: the codec; parameters have their defaults.
            n: elements of every tensor of this object.
            sets: of packets and states, for calls that are timed.
            skew: bytes by which packets are off alignment.
        """
        self.gpu, self.n = gpu, n
        self.codec = table(gpu.library, program.name)
        values = packet.parameter_values(program, {})
        self.values = (ctypes.c_double * max(1, len(values)))(*values.values())
        self.wire_bytes = int(self.codec.wire_bytes(self.values, n))
        self.scratch = Memory(gpu, int(self.codec.scratch_bytes(self.values, n)))
        self.sets = [Memory(gpu, self.wire_bytes, skew=skew) for _ in range(sets)]
        self.packets = self.sets[0]
        self.report = Memory(gpu, 1, np.uint64)
        self.num_states = int(self.codec.num_states)
        # Of a codec with state: before and after a call.
        shape = self.num_states * n
        self.states = [Memory(gpu, shape, np.float32) for _ in range(2 * sets if shape else 0)]
        for memory in self.states:
            memory.put(np.zeros(shape, np.float32))

    def free(self) -> None:
        """Gives its memory back."""
        for memory in (self.scratch, self.report, *self.sets, *self.states):
            memory.free()

    def grow(self, sets: int) -> None:
        """Makes as many sets of packets as that; of a codec without state."""
        while len(self.sets) < sets:
            self.sets.append(Memory(self.gpu, self.wire_bytes))

    def encode(self, gradient: Memory, key: Key, residual: Memory | None = None) -> Bytes:
        """The packets of a tensor; the residual, or the state, is replaced."""
        self.encode_to(self.packets, gradient.at, key, residual)
        packets = self.packets.get()
        if not self.num_states and int(self.report.get()[0]) != FINE:
            raise GpuError("what is encoded must be in order")
        return packets

    def encode_to(
        self, packets: Memory, gradient: int, key: Key, residual: Memory | None = None
    ) -> None:
        """The same, which stays on the device. `gradient`: its address."""
        first = (self.values, ctypes.byref(key), VOID(gradient))
        last = [I64(self.n), VOID(packets.at), I64(packets.bytes), *self._room(), None]
        if self.num_states:
            old, new = (VOID(memory.at) for memory in self.states[:2] or [packets, packets])
            status = self.codec.encode_state(*first, old, new, *last)
            self.states[:2] = self.states[1::-1]
        else:
            at = VOID(None if residual is None else residual.at)
            status = self.codec.encode(*first, at, at, VOID(self.report.at), *last)
        self._check("encode", status)

    def _room(self) -> tuple[Any, Any]:
        return VOID(self.scratch.at), I64(self.scratch.bytes)

    def _check(self, what: str, status: int) -> None:
        if status != 0:
            text = self.codec.error_text().decode() if status == CUDA_FAILED else f"status {status}"
            name = self.codec.name.decode()
            raise GpuError(f"{what} with {name} must return 0. Received: {text}")

    def decode(self, rows: Sequence[Memory], out: Memory, mode: int = SET) -> int:
        """Sums rows to `out`; returns the report, FINE when all is in order."""
        status = self.codec.decode(
            *(self.values, addresses(rows), I64(self.wire_bytes), I32(len(rows)), VOID(out.at)),
            *(I64(self.n), I32(mode), VOID(self.report.at), *self._room(), None),
        )
        self._check("decode", status)
        return int(self.report.get()[0])

    def time_encode(
        self, gradients: Sequence[Memory], residuals: Sequence[Memory] | None, calls: int
    ) -> float:
        """Milliseconds of an encoding. Of `gradients` and `residuals` each set used has one."""
        sets = len(gradients)
        name, kept = "gpu_time_encode", [None if residuals is None else addresses(residuals)]
        if self.num_states:
            name = f"{name}_state"
            kept = [addresses(self.states[::2]), addresses(self.states[1::2])]
        return self.gpu.milliseconds(
            *(name, VOID(ctypes.addressof(self.codec)), self.values),
            *(ctypes.byref(Key(1, 2, 3, 0)), addresses(gradients), *kept, I64(self.n)),
            *(addresses(self.sets[:sets]), I64(self.wire_bytes), *self._room()),
            *(I32(sets), I32(calls)),
        )

    def time_decode(
        self, rows: Sequence[Memory], outs: Sequence[Memory], mode: int, calls: int
    ) -> float:
        """Milliseconds of a decoding. Each set has as many of the rows, and one of `outs`."""
        found = self.gpu.milliseconds(
            *("gpu_time_decode", VOID(ctypes.addressof(self.codec)), self.values),
            *(addresses(rows), I64(self.wire_bytes), I32(len(rows) // len(outs)), addresses(outs)),
            *(I64(self.n), I32(mode), VOID(self.report.at), *self._room()),
            *(I32(len(outs)), I32(calls)),
        )
        if int(self.report.get()[0]) != FINE:
            raise GpuError("what is decoded must be in order")
        return found
