# SPDX-License-Identifier: Apache-2.0
"""The past in files of a run's folder.

    DIR/RUN/results-000003    header, then a record for each chunk of some rounds

They are no part of a run's state: rounds after the last snapshot are made again from the journal.
Those before it are durable when the snapshot is, and are read again when the server is started
again. When something cannot be written or read, what is older is forgotten, and the run goes on.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tf_hips import log
from tf_hips.errors import StateError
from tf_hips.ops.checksum import crc32
from tf_hips.ps.disk.file_format import RECORD, Header, Reader, to_record
from tf_hips.ps.disk.journal import Folder, write
from tf_hips.ps.terms.past import Past, Results
from tf_hips.ps.terms.recorder import Kind, from_payload, to_payload

# A file takes rounds until it is larger; what nobody needs is deleted by the file.
FILE_BYTES = 64 << 20


@dataclasses.dataclass(eq=False)
class _File:
    """A file of results."""

    path: Path
    descriptor: int
    size: int = 0
    rounds: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the packet of a chunk lies."""

    chunk: int
    offset: int
    length: int
    crc: int


class PastOnDisk(Past):
    """Keeps results in files."""

    def __init__(self, limit_bytes: int, folder: Folder) -> None:
        """Nothing is written before `start`; until then results are kept in memory."""
        super().__init__(limit_bytes)
        self._folder = folder
        self._files: list[_File] = []
        self._open: _File | None = None  # the one that is being written
        self._places: dict[int, tuple[_File, list[_Place]]] = {}
        self._may_write = False

    def start(self) -> None:
        """What was taken so far is written; files of other runs are deleted."""
        with self._lock:
            self._may_write = True
            known = {file.path for file in self._files}
            with contextlib.suppress(OSError):
                for path in self._paths():
                    if path not in known:
                        path.unlink()
            self._drop_empty()
            for number, results in list(self._rounds.items()):
                if number in self._bytes:  # else writing has failed, and all were forgotten
                    self._keep(number, results)

    def restore(self, before: int, num_chunks: int) -> None:
        """Finds the newest unbroken row of rounds in the folder that ends at round `before` - 1.

        Args:
            before: the first round that will be appended.
            num_chunks: chunks of a whole round.
        """
        with self._lock:
            for path in self._paths():
                try:
                    self._read(path, before, num_chunks)
                except (StateError, OSError, ValueError, KeyError) as error:
                    log.warning("Results of older rounds are not kept: %s", error)
            first = before
            while first - 1 in self._places:
                first -= 1
            self._forget([number for number in self._places if number < first])
            for number in range(first, before):
                _, places = self._places[number]
                self._count(number, sum(place.length for place in places))

    def results(self, number: int) -> Results:
        """What `append` got, read again.

        Raises:
            KeyError: the round is not kept, or cannot be read any more.
        """
        with self._lock:
            if number in self._rounds:
                return self._rounds[number]
            file, places = self._places[number]
            found = []
            for place in places:
                data = os.pread(file.descriptor, place.length, place.offset)
                if len(data) != place.length or crc32(data) != place.crc:
                    raise KeyError(number)
                found.append((place.chunk, np.frombuffer(data, np.uint8)))
            return found

    def sync(self) -> None:
        """Makes what was appended durable."""
        with self._lock:
            descriptors = [os.dup(file.descriptor) for file in self._files]
        try:
            for descriptor in descriptors:
                os.fdatasync(descriptor)
        except OSError as error:
            self._give_up(error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def close(self) -> None:
        """Closes the files, which stay."""
        with self._lock:
            self._may_write = False
            for file in self._files:
                os.close(file.descriptor)
            self._files, self._open = [], None
            for kept in (self._places, self._rounds, self._bytes):
                kept.clear()
            self._total = 0

    def _keep(self, number: int, results: Results) -> None:
        if not self._may_write:
            return
        try:
            file = self._file()
            places, pieces = [], []
            end = file.size
            for chunk, packet in results:
                payload = to_payload({"round": number, "chunk": chunk}, packet.data)
                pieces += [to_record(Kind.RESULT, payload), *payload]
                end += RECORD.size + sum(len(piece) for piece in payload)
                crc = crc32(packet.data)
                places.append(_Place(chunk, end - packet.nbytes, packet.nbytes, crc))
            file.size += write(file.descriptor, pieces)
        except OSError as error:
            self._open = None  # its end is not where it was thought to be
            self._give_up(error)
            return
        file.rounds.add(number)
        self._places[number] = file, places
        del self._rounds[number]

    def _give_up(self, error: OSError) -> None:
        with self._lock:
            log.warning(
                "Results up to round %d are not kept, so nobody can come back to them: %s",
                max(self._bytes, default=0),
                error,
            )
            self._forget(list(self._bytes))

    def _file(self) -> _File:
        """The file that the next round goes to."""
        if self._open is None or self._open.size > FILE_BYTES:
            numbers = [int(path.name.partition("-")[2]) for path in self._paths()]
            path = self._folder.file("results", max([0, *numbers]) + 1)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._open = _File(path, os.open(path, flags, 0o600))
            self._files.append(self._open)
            self._open.size = write(self._open.descriptor, [Header(self._folder.facts).to_bytes()])
        return self._open

    def _paths(self) -> list[Path]:
        return sorted(self._folder.path.glob("results-*"))

    def _read(self, path: Path, before: int, num_chunks: int) -> None:
        reader = Reader(path)
        try:
            if reader.header.facts != self._folder.facts:
                raise StateError(f"{path} is another run's")
            file = _File(path, os.open(path, os.O_RDONLY))
            self._files.append(file)
            found: dict[int, list[_Place]] = {}
            for _, payload in reader.records():
                fields, data = from_payload(payload)
                end = reader.end + RECORD.size + len(payload)
                place = _Place(fields["chunk"], end - len(data), len(data), crc32(data))
                found.setdefault(fields["round"], []).append(place)
        finally:
            reader.close()
        for number, places in found.items():
            if number < before and len(places) == num_chunks:
                file.rounds.add(number)
                self._places[number] = file, places

    def _forget(self, numbers: Sequence[int]) -> None:
        super()._forget(numbers)
        for number in numbers:
            self._places.pop(number, None)
        for file in self._files:
            file.rounds.difference_update(numbers)
        if self._may_write:
            self._drop_empty()

    def _drop_empty(self) -> None:
        for file in list(self._files):
            if not file.rounds and file is not self._open:
                self._files.remove(file)
                os.close(file.descriptor)
                with contextlib.suppress(OSError):
                    file.path.unlink()
