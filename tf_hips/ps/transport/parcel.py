# SPDX-License-Identifier: Apache-2.0
"""A folder of files as a stream of messages, from the site that has it to one that needs it.

    header      JSON: the folder's name, and name, length and digest of each file
    bytes       of all files, one after the other, from where the receiver has them

What a broken connection has brought stays: a receiver says which parcel it has begun and how many
bytes of it are there, and a sender whose parcel is the same goes on from there.

Invariants: nothing is written outside the folder that the receiver chose, whatever the header says;
a parcel that is whole has the bytes that its header promises, by their digests. Imports no
TensorFlow.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.transport import wire

MAX_FILES = 10_000
MAX_BYTES = (1 << 63) - 1  # what a file system can hold of a file
# A file system that is filled to its last byte takes others with it.
_SPARE_BYTES = 64 << 20
_BLOCK = 1 << 20
# What was written a moment ago may be written again and look the same: clocks of file systems tick.
_SETTLED_S = 2.0
_IDENTITY = re.compile(r"(?:[0-9a-f]{32})?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


@dataclasses.dataclass(frozen=True)
class Held:
    """What a receiver has of a parcel.

    Attributes:
        parcel: identity of the parcel that it has begun; empty: of none.
        num_bytes: bytes of its files, from the first on.
    """

    parcel: str = ""
    num_bytes: int = 0

    @classmethod
    def told(cls, parcel: str, num_bytes: int) -> "Held":
        """What the other side says that it has.

        Raises:
            ProtocolError: nobody can have that.
        """
        if not _IDENTITY.fullmatch(parcel) or not 0 <= num_bytes <= MAX_BYTES:
            raise ProtocolError(
                "What is there of a parcel must be told by its identity of 32 hexadecimal digits, "
                f"or none, and bytes. Received: {parcel[:40]!r}, {str(num_bytes)[:40]} bytes"
            )
        return cls(parcel, num_bytes)


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a parcel: its name, length in bytes and BLAKE2b digest in hex."""

    name: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Header:
    """What a parcel is.

    Attributes:
        name: of the folder.
        files: in the order of their bytes.
        start: bytes that are left out, because the receiver has them.
    """

    name: str
    files: tuple[File, ...]
    start: int = 0

    @property
    def identity(self) -> str:
        """Equal for parcels of equal content."""
        text = repr((self.name, self.files))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_message(self) -> bytes:
        """As it travels."""
        files = [[file.name, file.size, file.digest] for file in self.files]
        return wire.to_json(name=self.name, files=files, start=self.start)

    @classmethod
    def from_message(cls, message: bytes) -> "Header":
        """What the other side has sent.

        Raises:
            ProtocolError: it is no header, or could not be taken.
        """
        fields = wire.from_json(message, name=str, files=list, start=int)
        if not 1 <= len(fields["files"]) <= MAX_FILES:
            raise ProtocolError(
                f"A parcel must have 1 to {MAX_FILES} files. Received: {len(fields['files'])}"
            )
        files = tuple(_file(one) for one in fields["files"])
        header = cls(_checked(fields["name"]), files, fields["start"])
        if len({file.name for file in files}) < len(files):
            raise ProtocolError("Files of a parcel must have different names.")
        if not 0 <= header.start <= header.num_bytes:
            raise ProtocolError(
                f"A parcel must begin inside its {header.num_bytes} bytes. Received: {header.start}"
            )
        return header


def send(folder: Path, held: Held) -> Iterator[bytes]:
    """The messages of a folder, less what the receiver has.

    The files are open when the first message comes, so the folder may be deleted afterwards.

    Args:
        folder: has files only.
        held: what the receiver has.

    Raises:
        OSError: a file cannot be read, or the folder is gone.
    """
    with contextlib.ExitStack() as stack:
        paths = sorted(folder.iterdir())
        opened = [stack.enter_context(path.open("rb")) for path in paths]
        files = tuple(_describe(path.name, file) for path, file in zip(paths, opened, strict=True))
        header = Header(folder.name, files)
        if held.parcel == header.identity and held.num_bytes <= header.num_bytes:
            header = dataclasses.replace(header, start=held.num_bytes)
        yield header.to_message()
        left_out = header.start
        for file, told in zip(opened, files, strict=True):
            skipped = min(left_out, told.size)
            left_out -= skipped
            file.seek(skipped)
            left = told.size - skipped
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise PeerError(f"The file {told.name} has become shorter while it was sent.")
                left -= len(block)
                yield block


class Intake:
    """Takes a parcel into a folder, in one stream or several."""

    def __init__(self, folder: Path) -> None:
        """Nothing has come.

        Args:
            folder: of this parcel alone; made when the first header comes.
        """
        self._folder = folder
        self._header: Header | None = None
        self._num_bytes = 0
        self._is_open = False

    @property
    def held(self) -> Held:
        """What the sender may leave out."""
        if self._header is None:
            return Held()
        return Held(self._header.identity, self._num_bytes)

    @property
    def name(self) -> str:
        """Name of the folder at the sender's.

        Raises:
            ProtocolError: no parcel has come.
        """
        return self._known().name

    def begin(self) -> None:
        """The next message is a header, of a stream that begins."""
        self._is_open = False

    def take(self, message: bytes) -> None:
        """Takes the next message of a stream.

        Raises:
            ProtocolError: it is no part of this parcel.
            OSError: it cannot be written.
        """
        if not self._is_open:
            self._open(Header.from_message(message))
            return
        header = self._known()
        if self._num_bytes + len(message) > header.num_bytes:
            raise ProtocolError(
                f"A parcel must end after its {header.num_bytes} bytes. Received: "
                f"{self._num_bytes + len(message)}"
            )
        view = memoryview(message)
        for file, offset in _from(header.files, self._num_bytes):
            part = view[: file.size - offset]
            if len(part):
                with (self._folder / file.name).open("ab") as out:
                    out.write(part)
            view = view[len(part) :]
            if not len(view):
                break
        self._num_bytes += len(message)

    def finish(self) -> None:
        """Checks that all is there.

        Raises:
            PeerError: something is missing. To a server a connection that breaks may look like a
                stream that ends.
            ProtocolError: something is not what the header promises.
        """
        header = self._header
        if header is None:
            raise PeerError("A parcel must begin with its header. Received: nothing")
        if self._num_bytes < header.num_bytes:
            raise PeerError(
                f"A parcel must have {header.num_bytes} bytes. Received: {self._num_bytes}"
            )
        for file in header.files:
            with (self._folder / file.name).open("rb") as opened:
                digest = hashlib.file_digest(opened, _hash).hexdigest()
            if digest != file.digest:
                self._header = None  # nothing of it can be used
                raise ProtocolError(f"The file {file.name} of a parcel is damaged.")

    def _open(self, header: Header) -> None:
        if header.start:
            if header.identity != self.held.parcel or header.start != self._num_bytes:
                raise ProtocolError(
                    f"A parcel that goes on must do so at byte {self._num_bytes} of what is there. "
                    f"Received: byte {header.start} of {header.name}"
                )
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            free = shutil.disk_usage(self._folder).free
            if header.num_bytes + _SPARE_BYTES > free:
                raise ProtocolError(
                    f"The file system of {self._folder} has {free >> 20} MiB free. Received: "
                    f"{header.name}, of {header.num_bytes >> 20} MiB"
                )
            for file in header.files:
                (self._folder / file.name).touch()
            self._header, self._num_bytes = header, 0
        self._is_open = True

    def _known(self) -> Header:
        if self._header is None:
            raise ProtocolError("A parcel must begin with its header. Received: nothing")
        return self._header


def _from(files: Sequence[File], position: int) -> Iterator[tuple[File, int]]:
    """Files that have bytes from `position` on, with where in each that is."""
    for file in files:
        if position < file.size:
            yield file, position
        position = max(0, position - file.size)


def _file(fields: Any) -> File:
    match fields:
        case [str(name), int(size), str(digest)] if type(size) is int and 0 <= size <= MAX_BYTES:
            return File(_checked(name), size, digest)
    raise ProtocolError("A file must be told by name, length and digest. Received: something else")


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            "A name in a parcel must be letters, digits, dots, dashes and underscores, and not "
            f"begin with a dot. Received: {name[:200]!r}"
        )
    return name


def _hash() -> Any:
    return hashlib.blake2b(digest_size=16)


class _Digests:
    """Digests of files that have been read, by what changes with them. Thread-safe.

    Whoever wants a backup may break off and ask again, and the site that has it trains meanwhile:
    files are read one at a time, and once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, file: io.BufferedReader) -> str:
        """The digest of an open file, which may be read to its end for that."""
        with self._lock:
            told = os.fstat(file.fileno())
            key = (told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)
            digest = self._known.get(key)
            if digest is None:
                digest = hashlib.file_digest(file, _hash).hexdigest()
                if time.time() - told.st_mtime > _SETTLED_S:
                    while len(self._known) >= MAX_FILES:
                        del self._known[next(iter(self._known))]
                    self._known[key] = digest
            return digest


_digests = _Digests()


def _describe(name: str, file: io.BufferedReader) -> File:
    digest = _digests.of(file)
    return File(name, file.seek(0, os.SEEK_END), digest)
