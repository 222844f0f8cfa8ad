# SPDX-License-Identifier: Apache-2.0
"""The files of a server's state: a header, then records, each with its length and its checksum.

    header   magic | u32 version | u32 bytes of JSON | u32 crc32 of the JSON | JSON
    record   u32 bytes of payload | u32 crc32 | u8 kind | payload

All numbers are little-endian; a record's checksum is over its length, its kind and its payload. A
journal is appended to; after each sync it gets a mark, a record that says how much of the file is
durable. So what a crash can leave is told from what it cannot: a bad record above every mark is a
tail that was being written, and is cut off; a bad record below one was on the disk, and is damage.

A mark carries 16 random bytes of its file. Packets of children lie in the same file, and no child
knows them, so no packet looks like a mark. Knows no session and no record but the mark.
"""

import dataclasses
import json
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tf_hips.errors import StateError
from tf_hips.ops.checksum import crc32
from tf_hips.ps.transport.wire import Buffer

VERSION = 2
MARK = 0  # the kind of marks; others belong to who writes them
RECORD = struct.Struct("<IIB")

_MAGIC = b"tf_hips\n"
_FRONT = struct.Struct("<8sIII")
_CHECKED = struct.Struct("<IB")
_MARK_BYTES = 16
_MARK = struct.Struct("<16sQQ")
_BLOCK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a state belongs to; a server that was told something else must not go on with it.

    Attributes:
        run: identity of the run.
        parties: names of the sites, in child order.
        compression: text of the compressor that the server was told, or None.
        downlink: the same of the way down.
        shard: which of how many servers of the run; files that do not say are of the only one.
        rule: text of the update rule that the server was told, or None.
        site: name towards the server above, or None.
        way_up: text of the compressor of the way there that the server was told, or None.
        late: what becomes of late updates where rounds close without some children, or None.
        period: updates of a chunk between ways up, as the server was told, or None.
    """

    run: str
    parties: tuple[str, ...]
    compression: str | None
    downlink: str | None
    shard: tuple[int, int] = (0, 1)
    rule: str | None = None
    site: str | None = None
    way_up: str | None = None
    late: str | None = None
    period: int | None = None


@dataclasses.dataclass(frozen=True)
class Header:
    """The beginning of a file.

    Attributes:
        facts: what the state belongs to.
        is_first: whether a run begins with this file; else a file before it comes first.
        mark: 16 random bytes, by which marks of this file are known.
    """

    facts: Facts
    is_first: bool = False
    mark: bytes = dataclasses.field(default_factory=lambda: os.urandom(_MARK_BYTES))

    def to_bytes(self) -> bytes:
        """The bytes that `Reader` reads."""
        fields = dataclasses.asdict(self) | {"mark": self.mark.hex()}
        text = json.dumps(fields, separators=(",", ":")).encode()
        return _FRONT.pack(_MAGIC, VERSION, len(text), crc32(text)) + text


def to_record(kind: int, pieces: Sequence[Buffer]) -> bytes:
    """What stands before `pieces` in a file."""
    size = sum(len(piece) for piece in pieces)
    crc = crc32(_CHECKED.pack(size, kind))
    for piece in pieces:
        crc = crc32(piece, crc)
    return RECORD.pack(size, crc, kind)


def to_mark(mark: bytes, offset: int) -> bytes:
    """A record at `offset` that says: all bytes before me are durable."""
    payload = _MARK.pack(mark, offset, offset)
    return to_record(MARK, [payload]) + payload


class Reader:
    """Reads one file, record by record."""

    def __init__(self, path: Path) -> None:
        """Opens `path` and reads its header.

        Raises:
            StateError: it is no such file, of another version, or damaged.
        """
        self.path = path
        self._file = path.open("rb")
        try:
            self.size = path.stat().st_size
            self.header, self.end = self._read_header()
            self.marked = self.end  # up to where marks say that it is durable
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def torn_bytes(self) -> int:
        """Bytes after the last good record."""
        return self.size - self.end

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Pairs of kind and payload, without marks, up to the end or a torn tail.

        `end` is behind a record when the next one is asked for.

        Raises:
            StateError: a record is bad that was durable.
        """
        while self.end < self.size:
            found = self._read(self.end)
            if found is None:
                self._check_torn()
                return
            kind, payload = found
            if kind != MARK:
                yield kind, payload
            elif len(payload) == _MARK.size and payload.startswith(self.header.mark):
                self.marked = self.end
            self.end += RECORD.size + len(payload)

    def damaged(self, what: str, offset: int) -> StateError:
        """The error of a file that holds something else than was written."""
        return StateError(f"{self.path} is damaged at byte {offset}: {what}. Nothing was changed.")

    def _read_header(self) -> tuple[Header, int]:
        front = self._file.read(_FRONT.size)
        if len(front) < _FRONT.size or not front.startswith(_MAGIC):
            raise StateError(
                f"{self.path} must be a file of a server's state. Received: it begins with "
                f"{front[:8]!r}"
            )
        _, version, size, crc = _FRONT.unpack(front)
        if version != VERSION:
            raise StateError(f"{self.path} must have format {VERSION}. Received: format {version}")
        text = self._file.read(size) if size <= _MAX_HEADER_BYTES else b""
        if len(text) != size or crc32(text) != crc:
            raise self.damaged("its header does not have its checksum", 0)
        try:
            return _read_fields(json.loads(text)), _FRONT.size + size
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self.damaged("its header does not say what the state belongs to", 0) from error

    def _read(self, offset: int) -> tuple[int, bytes] | None:
        """Kind and payload of the record at `offset`; None where there is no good one."""
        self._file.seek(offset)
        front = self._file.read(RECORD.size)
        if len(front) < RECORD.size:
            return None
        size, crc, kind = RECORD.unpack(front)
        if offset + RECORD.size + size > self.size:
            return None
        payload = self._file.read(size)
        if crc32(payload, crc32(_CHECKED.pack(size, kind))) != crc:
            return None
        return kind, payload

    def _check_torn(self) -> None:
        """Raises StateError if a mark says that the bad record at `end` was durable."""
        at = self.end
        tail = b""
        self._file.seek(at)
        while block := self._file.read(_BLOCK_BYTES):
            window = tail + block
            start = at - len(tail)
            place = window.find(self.header.mark)
            while place >= 0:
                if self._claims(start + place - RECORD.size):
                    raise self.damaged(
                        "a record that was durable does not have its checksum", self.end
                    )
                place = window.find(self.header.mark, place + 1)
            at += len(block)
            self._file.seek(at)
            tail = window[-(len(self.header.mark) - 1) :]

    def _claims(self, offset: int) -> bool:
        """Whether a mark at `offset` says that the bytes at `end` are durable."""
        found = self._read(offset) if offset > self.end else None
        if found is None or found[0] != MARK or len(found[1]) != _MARK.size:
            return False
        _, own, durable = _MARK.unpack(found[1])
        return bool(own == offset and durable > self.end)


def _read_fields(fields: dict[str, Any]) -> Header:
    """The header of which `Header.to_bytes` has made `fields`."""
    facts = fields["facts"]
    mark = bytes.fromhex(fields["mark"])
    if len(mark) != _MARK_BYTES:
        raise ValueError(f"a mark must have {_MARK_BYTES} bytes")
    lists = {"parties": tuple(facts["parties"]), "shard": tuple(facts.get("shard", (0, 1)))}
    return Header(Facts(**facts | lists), bool(fields["is_first"]), mark)
