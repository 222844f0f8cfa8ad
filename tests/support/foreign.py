# SPDX-License-Identifier: Apache-2.0
"""Libraries for another processor, called in a process that an emulator runs.

Python's own processor cannot load them. So a small program (foreign_host.cc) is compiled for the
other one, run by an emulator, and told what to call; memory goes there and comes back. `Library`
stands for `ctypes.CDLL` with the functions of our native library, and `Codec` for `CompiledCodec`,
so that tests of one processor are tests of the other:

    python -m pytest -p tests.support.foreign tests/compll/test_rows.py

compiles codecs for AArch64, and with TF_HIPS_TEST_FOREIGN=PATH, a library of all codecs, what calls
the native library, such as tests/ops/test_native.py, calls that one.
"""

import ctypes
import functools
import math
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from compll.backends import cache, toolchain
from compll.backends import library as compiled
from compll.backends.library import CompiledCodec
from tests.support import children
from tf_hips.ops import library

NATIVE = "TF_HIPS_TEST_FOREIGN"
COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Where Debian and Fedora put what programs of the other processor are linked with.
LIBRARIES = (Path("/usr/aarch64-linux-gnu"), Path("/usr/aarch64-linux-gnu/sys-root"))
BUILD_DEADLINE_S = 120
_WORD = struct.Struct("<Q")

# Parameters of our functions, in order. NAME[SIZE] is the address of SIZE bytes, with ! of such as
# are written; NAME[][SIZE] an array of addresses, `k` being which. The others are numbers, or
# objects of ctypes, whose own memory is sent.
_FUNCTIONS = {
    "tf_hips_abi_version": "",
    "tf_hips_num_codecs": "",
    "tf_hips_find_codec": "name",
    "tf_hips_wire_bytes": "codec params n",
    "tf_hips_codec_hash": "codec params",
    "tf_hips_encode": "codec params key x[4*n] residual[4*n]! n out[capacity]! capacity",
    "tf_hips_encode_state": (
        "codec params key x[4*n] state[4*n*states(codec)] new[4*n*states(codec)]! n "
        "out[capacity]! capacity"
    ),
    "tf_hips_encode_momentum": (
        "codec params key x[4*n] beta feedback state[4*n*(1+feedback)] new[4*n*(1+feedback)]! n "
        "out[capacity]! capacity"
    ),
    "tf_hips_decode": "codec params packets[bytes] bytes out[4*n]! n add",
    "tf_hips_merge": "codec params packets[][bytes[k]] bytes num out[4*n]! n bad_row",
    "tf_hips_merge_encode": (
        "codec params key packets[][bytes[k]] bytes num residual[4*n]! n out[capacity]! capacity "
        "bad_row"
    ),
    "tf_hips_status_text": "status",
    "tf_hips_explain": "codec params packets[bytes] bytes n text capacity",
    "tf_hips_crc32": "crc data[n] n",
    "tf_hips_update_scale": "x[4*n] factor out[4*n]! n",
    "tf_hips_update_add_scaled": "base[4*n] x[4*n] factor out[4*n]! n",
    "tf_hips_update_momentum": ("g[4*n] m[4*n] rate beta nesterov new_m[4*n]! step[4*n]! n"),
    "tf_hips_update_adam": (
        "g[4*n] m[4*n] v[4*n] rate beta1 beta2 eps new_m[4*n]! new_v[4*n]! step[4*n]! n"
    ),
    "tf_hips_update_adaptive": (
        "g[4*n] m[4*n] v[4*n] rate beta1 beta2 tau kind new_m[4*n]! new_v[4*n]! step[4*n]! n"
    ),
    "tf_hips_update_delayed": (
        "g[4*n] total[4*n] received[4*n] square[4*n] rate lambda_ decay eps new_total[4*n]! "
        "new_square[4*n]! n"
    ),
    "tf_hips_update_mix": "g[4*n] total[4*n] received[4*n] alpha new_total[4*n]! n",
    "tf_hips_robust_coordinate": (
        "rows[][4*d] n d weights[4*m*n] m rule drop out[4*d]! squares[8*n*chunks(d)]!"
    ),
    "tf_hips_robust_distances": (
        "rows[][4*d] n d squares[8*n*chunks(d)]! distances[4*n*(n-1)*chunks(d)]!"
    ),
    "tf_hips_robust_mix": "rows[][4*d] n d weights[4*m*n] m out[][4*d]!",
    "tf_hips_robust_sketch": "rows[][4*d] n d halves[32*count] count",
}
# Those of a codec's table (codec.h).
_SLOTS = {
    "max_body_bytes": "params n",
    "encode": "params key x[4*n] n body[capacity]! capacity",
    "decode": "params body[bytes] bytes out[4*n]! n mode",
    "encode_feedback": "params key x[4*n] residual[4*n] new[4*n]! n body[capacity]! capacity",
    "merge": "params bodies[][bytes[k]] bytes num out[4*n]! n mode bad_row",
    "encode_state": "params key x[4*n] state[][4*n] new[][4*n]! n body[capacity]! capacity",
}
_PARAMETER = re.compile(r"(\w+?)(\[\])?(?:\[(.+)\])?(!?)")
_CHUNK = 1 << 20


class ForeignError(Exception):
    """The other process ended, or a function did what it must not do."""


def missing() -> str:
    """Why nothing can be compiled for AArch64 and run here; empty: it can."""
    if _found(COMPILERS) is None:
        return f"no C++ compiler for AArch64: {' or '.join(COMPILERS)}"
    if _found(EMULATORS) is None:
        return f"no emulator of AArch64: {' or '.join(EMULATORS)}"
    if _system() is None:
        return f"no libraries for AArch64 in {' or '.join(map(str, LIBRARIES))}"
    return ""


def compiler() -> str:
    """The cross compiler, as CXX names it; who calls has asked `missing`."""
    return _found(COMPILERS) or COMPILERS[0]


def command() -> list[str]:
    """What a program for AArch64 is run with."""
    return [_found(EMULATORS) or EMULATORS[0], "-L", str(_system())]


def _found(names: tuple[str, ...]) -> str | None:
    return next((name for name in names if shutil.which(name)), None)


def _system() -> Path | None:
    return next((at for at in LIBRARIES if (at / "lib/ld-linux-aarch64.so.1").exists()), None)


class Host:
    """A process of the other processor, which ends with this one."""

    def __init__(self, program: Path) -> None:
        """`program`: what `build_host` made."""
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*command(), str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        children.keep(self._process.pid)

    def open(self, path: Path) -> int:
        """Loads a library; returns its handle, or raises OSError."""
        with self._lock:
            self._send(b"o", _text(str(path)))
            handle = self._word()
            if not handle:
                raise OSError(self._take(self._word()).decode())
        return handle

    def symbol(self, handle: int, name: str) -> int:
        """The address of a symbol; 0: there is none."""
        with self._lock:
            self._send(b"s", _WORD.pack(handle), _text(name))
            return self._word()

    def memory(self, address: int, size: int) -> bytes:
        """What is there; of `size` 0 a text, without the 0 that ends it."""
        with self._lock:
            self._send(b"r", _WORD.pack(address), _WORD.pack(size))
            return self._take(size or self._word())

    def call(self, address: int, call: "Call") -> int:
        """Calls a function and writes what it wrote; returns its result, of 64 bits."""
        with self._lock:
            self._send(b"c", _WORD.pack(address), *call.request())
            wrong, result = self._word(), self._word()
            for piece in call.pieces.values():
                if piece.is_written:
                    taken = self._take(piece.size)
                    ctypes.memmove(piece.address, taken, piece.size)
        if wrong:
            what = {1: "wrote beside its memory", 2: "changed the mode of its caller's denormals"}
            raise ForeignError(f"a function of the library {what[wrong]}")
        return result

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"".join(parts))
            self._process.stdin.flush()
        except BrokenPipeError:
            self._gone()

    def _take(self, size: int) -> bytes:
        assert self._process.stdout is not None
        taken = self._process.stdout.read(size)
        if len(taken) < size:
            self._gone()
        return taken

    def _word(self) -> int:
        word: int = _WORD.unpack(self._take(_WORD.size))[0]
        return word

    def _gone(self) -> NoReturn:
        raise ForeignError(f"the emulated process ended: {self._process.wait()}") from None


def _text(text: str) -> bytes:
    return _WORD.pack(len(text)) + text.encode()


@dataclass
class _Piece:
    """Memory of this process that a call needs there, in `number`-th place."""

    number: int
    address: int
    size: int
    is_written: bool


@dataclass
class Call:
    """The arguments of one call.

    Attributes:
        pieces: memory, by its address: what is one array here is one array there.
        places: where addresses of memory lie in memory: numbers and offset.
        whole: integers, and numbers of memory.
        real: floats, as they are in registers.
        kept: what has memory for this call alone.
    """

    pieces: dict[int, _Piece] = field(default_factory=dict)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    whole: list[tuple[bool, int]] = field(default_factory=list)
    real: list[bytes] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def piece(self, address: int, size: int, *, is_written: bool = False) -> int:
        """The number of a piece of memory."""
        found = self.pieces.setdefault(address, _Piece(len(self.pieces), address, size, is_written))
        found.size = max(found.size, size)
        found.is_written |= is_written
        return found.number

    def request(self) -> Iterator[bytes]:
        """What the other process is told."""

        def words(*values: int) -> bytes:
            return struct.pack(f"<{len(values)}q", *values)

        yield words(len(self.pieces))
        for piece in self.pieces.values():
            yield words(piece.size, piece.address % _CHUNK, piece.is_written)
            yield ctypes.string_at(piece.address, piece.size)
        yield words(len(self.places))
        yield from (words(*place) for place in self.places)
        yield words(len(self.whole))
        yield from (words(*one) for one in self.whole)
        yield words(len(self.real))
        yield from self.real


class Function:
    """A function there, called like one of ctypes."""

    def __init__(self, host: Host, address: int, parameters: str) -> None:
        """`parameters`: as in _FUNCTIONS."""
        self._host, self._address = host, address
        self._parameters = []
        for text in parameters.split():
            found = _PARAMETER.fullmatch(text)
            assert found is not None, text
            self._parameters.append(found.groups())
        self.restype: Any = ctypes.c_int
        self.argtypes: Any = ()

    def __call__(self, *arguments: Any) -> Any:
        """Sends what it needs, calls it, and has what it wrote."""
        assert len(arguments) == len(self._parameters)
        call = Call()
        known = {name: value for (name, *_), value in zip(self._parameters, arguments, strict=True)}
        known["chunks"] = lambda d: math.ceil(d / _CHUNK)
        known["states"] = lambda codec: _table_of(self._host, codec).num_states
        for at, ((name, is_many, size, mark), value) in enumerate(
            zip(self._parameters, arguments, strict=True)
        ):
            kind = self.argtypes[at] if at < len(self.argtypes) else None
            if kind in (ctypes.c_float, ctypes.c_double):
                code = "<fxxxx" if kind is ctypes.c_float else "<d"
                call.real.append(struct.pack(code, value))
                continue
            if value is None:
                call.whole.append((False, 0))
                continue
            if is_many:
                table = call.piece(ctypes.addressof(value), ctypes.sizeof(value))
                for k, address in enumerate(value):
                    wanted = eval(size, {**known, "k": k})
                    part = call.piece(address, wanted, is_written=bool(mark))
                    call.places.append((table, 8 * k, part))
                call.whole.append((True, table))
            elif size is not None:
                wanted = eval(size, known)
                call.whole.append((True, call.piece(value, wanted, is_written=bool(mark))))
            else:
                call.whole.append(_plain(call, value))
            if name == "halves":
                _add_halves(call, value, known)
        return self._result(self._host.call(self._address, call))

    def _result(self, word: int) -> Any:
        if self.restype is ctypes.c_void_p:
            return word or None
        if self.restype is ctypes.c_char_p:
            return self._host.memory(word, 0)
        return self.restype(word).value


def _plain(call: Call, value: Any) -> tuple[bool, int]:
    """A number, or an object of ctypes or Python whose memory is sent."""
    if isinstance(value, bytes):
        value = ctypes.create_string_buffer(value)
        call.kept.append(value)
    value = getattr(value, "_obj", value)  # of byref
    if isinstance(value, ctypes._Pointer):
        value = value.contents
    if isinstance(value, ctypes.Array | ctypes.Structure | ctypes._SimpleCData):
        at, size = ctypes.addressof(value), ctypes.sizeof(value)
        return True, call.piece(at, size, is_written=True)
    return False, int(value)


def _add_halves(call: Call, address: int, known: dict[str, Any]) -> None:
    """The arrays of TfHipsSketchHalf (sketch.h), which hold addresses and a width."""
    table, n, d = call.pieces[address].number, known["n"], known["d"]
    for half in range(known["count"]):
        at = 32 * half
        signs, turns, width, sums = struct.unpack("<4q", ctypes.string_at(address + at, 32))
        for offset, where, size in (
            (0, signs, 8 * math.ceil(d / 64)),
            (8, turns, 8 * math.ceil(d / width)),
            (24, sums, 16 * n * width),
        ):
            part = call.piece(where, size, is_written=offset == 24)
            call.places.append((table, at + offset, part))


def _table_of(host: Host, address: int) -> compiled._Codec:
    """A codec's table; what it points to is there and not here."""
    return compiled._Codec.from_buffer_copy(host.memory(address, ctypes.sizeof(compiled._Codec)))


class Library:
    """Stands for `ctypes.CDLL` of the native library."""

    def __init__(self, host: Host, path: Path) -> None:
        """Loads it there."""
        self._host, self._handle = host, host.open(path)

    def __getitem__(self, name: str) -> Function:
        """A function, new each time, as that of ctypes is."""
        address = self._host.symbol(self._handle, name)
        if not address or name not in _FUNCTIONS:
            raise AttributeError(name)
        return Function(self._host, address, _FUNCTIONS[name])

    def __getattr__(self, name: str) -> Function:
        """The same."""
        return self[name]


class Codec(CompiledCodec):
    """A codec in the other processor's machine code."""

    def _table(self, path: Path) -> Any:
        host = the_host()
        getter = host.symbol(host.open(path), f"tf_hips_codec_{self.program.name}")
        table = _table_of(host, host.call(getter, Call()))
        functions: dict[str, Any] = {}
        for name, parameters in _SLOTS.items():
            address = ctypes.cast(getattr(table, name), ctypes.c_void_p).value
            functions[name] = Function(host, address, parameters) if address else None
            if address:
                is_size = name not in ("decode", "merge")
                functions[name].restype = ctypes.c_int64 if is_size else ctypes.c_int32
        return SimpleNamespace(spec_hash=table.spec_hash, **functions)


@functools.cache
def the_host() -> Host:
    """The one process that runs what is for AArch64."""
    return Host(build_host())


def build_host() -> Path:
    """The program that calls functions there, of the cache of libraries."""
    source = Path(__file__).with_name("foreign_host.cc")
    flags = ("-O1", "-std=c++17", "-Wall", "-Wextra", "-Werror")
    compile_it = (str(shutil.which(compiler())), *flags)

    def make(program: Path) -> None:
        with tempfile.TemporaryDirectory(dir=program.parent, prefix=".making-") as scratch:
            made = Path(scratch, "host")
            subprocess.run(
                [*compile_it, str(source), "-ldl", "-o", str(made)],
                check=True,
                timeout=BUILD_DEADLINE_S,
            )
            made.replace(program)

    name = f"foreign-host-{cache.key(compile_it, compile_it[:1], source.read_bytes())}"
    return cache.BUILT.library(name, toolchain.is_whole, make)


def use(path: Path) -> None:
    """From here on `tf_hips.ops` calls this library in place of the native one."""
    foreign = Library(the_host(), path)
    library.native = lambda: foreign  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Of `-p tests.support.foreign`: what tests compile and call is for the other processor."""
    if missing():
        raise pytest.UsageError(missing())
    os.environ["CXX"] = compiler()
    compiled.CompiledCodec = Codec  # type: ignore[misc]
    if os.environ.get(NATIVE):
        use(Path(os.environ[NATIVE]))
