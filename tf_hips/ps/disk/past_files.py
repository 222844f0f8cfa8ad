# SPDX-License-Identifier: Apache-2.0
"""The past in files of a run's folder.

    DIR/RUN/results-000003    header, then a record for each chunk of some rounds

In memory there is only where each round lies, and open is only the file that is being written:
there may be a million of rounds, of hundreds of chunks each, in thousands of files.

They are no part of a run's state: rounds after the last snapshot are made again from the journal.
Those before it are durable when the snapshot is, and are read again when the server is started
again. When something cannot be written or read, what is older is forgotten, and the run goes on.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tf_hips import log
from tf_hips.errors import StateError
from tf_hips.ps.disk.file_format import RECORD, Header, Reader, to_record
from tf_hips.ps.disk.journal import Folder, write
from tf_hips.ps.terms.past import ROUND_BYTES, Past, Results
from tf_hips.ps.terms.recorder import Kind, from_payload, to_payload

# A file takes rounds until it is larger; what nobody needs is deleted by the file.
FILE_BYTES = 64 << 20
# Of a record in a file, beside its packet.
_RECORD_BYTES = 64


@dataclasses.dataclass(eq=False)
class _File:
    """A file of results, and how many rounds in it are kept."""

    path: Path
    size: int = 0
    num_rounds: int = 0


class _Place(NamedTuple):
    """Where the records of a round lie, one after the other."""

    file: _File
    start: int
    end: int


class PastOnDisk(Past):
    """Keeps results in files."""

    def __init__(self, limit_bytes: int, folder: Folder) -> None:
        """Nothing is written before `start`; until then results are kept in memory."""
        super().__init__(limit_bytes)
        self._folder = folder
        self._files: list[_File] = []
        self._open: _File | None = None  # the one that is being written
        self._descriptor = -1  # of that
        self._unsynced: set[_File] = set()
        self._places: dict[int, _Place] = {}
        self._may_write = False

    def start(self) -> None:
        """What was taken so far is written; files of other runs are deleted."""
        with self._lock:
            self._may_write = True
            known = {file.path for file in self._files}
            with contextlib.suppress(OSError):
                for path in self._paths():
                    if path not in known:
                        self._folder.delete(path)
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
                place = self._places[number]
                self._count(number, ROUND_BYTES + place.end - place.start)

    def need(self, number: int) -> None:
        """Rounds before `number` are not needed any more; the next `append` deletes them.

        Does not wait for one that is being written.
        """
        self._needed = max(self._needed, number)

    def results(self, number: int) -> Results:
        """What `append` got, read again.

        Raises:
            KeyError: the round is not kept, or cannot be read any more.
        """
        with self._lock:
            if number in self._rounds:
                return self._rounds[number]
            place = self._places[number]
            try:
                return _read_round(place, number)
            except (StateError, ValueError, OSError) as error:
                raise KeyError(number) from error

    def sync(self) -> None:
        """Makes what was appended durable."""
        with self._lock:
            files, self._unsynced = self._unsynced, set()
        try:
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # nobody needs it any more
                    descriptor = os.open(file.path, os.O_RDONLY)
                    try:
                        os.fdatasync(descriptor)
                    finally:
                        os.close(descriptor)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Closes the files, which stay."""
        with self._lock:
            self._may_write = False
            self._close_open()
            self._files = []
            for kept in (self._places, self._rounds, self._bytes, self._unsynced):
                kept.clear()
            self._total = 0

    def _cost(self, results: Results) -> int:
        return ROUND_BYTES + sum(_RECORD_BYTES + packet.nbytes for _, packet in results)

    def _keep(self, number: int, results: Results) -> None:
        if not self._may_write:
            return
        try:
            file = self._file()
            pieces = []
            for chunk, packet in results:
                payload = to_payload({"round": number, "chunk": chunk}, packet.data)
                pieces += [to_record(Kind.RESULT, payload), *payload]
            start = file.size
            self._unsynced.add(file)
            file.size += write(self._descriptor, pieces)
        except OSError as error:
            self._close_open()  # its end is not where it was thought to be
            self._give_up(error)
            return
        self._put(number, _Place(file, start, file.size))
        del self._rounds[number]

    def _put(self, number: int, place: _Place) -> None:
        before = self._places.get(number)
        if before is not None:
            before.file.num_rounds -= 1
        place.file.num_rounds += 1
        self._places[number] = place

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
            self._close_open()
            last = max(self._folder.numbers("results"), default=0)
            path = self._folder.file("results", last + 1)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._descriptor = os.open(path, flags, 0o600)
            self._open = _File(path)
            self._files.append(self._open)
            self._open.size = write(self._descriptor, [Header(self._folder.facts).to_bytes()])
        return self._open

    def _close_open(self) -> None:
        if self._open is not None:
            os.close(self._descriptor)
            self._open = None

    def _paths(self) -> list[Path]:
        return [self._folder.file("results", one) for one in self._folder.numbers("results")]

    def _read(self, path: Path, before: int, num_chunks: int) -> None:
        with contextlib.closing(Reader(path)) as reader:
            if reader.header.facts != self._folder.facts:
                raise StateError(f"{path} is another run's")
            file = _File(path)
            self._files.append(file)
            self._unsynced.add(file)  # who wrote it may have been killed before
            found: dict[int, tuple[_Place, int]] = {}
            for _, payload in reader.records():
                number = from_payload(payload)[0]["round"]
                end = reader.end + RECORD.size + len(payload)
                place, count = found.get(number, (_Place(file, reader.end, reader.end), 0))
                found[number] = place._replace(end=end), count + 1
        for number, (place, count) in found.items():
            if number < before and count == num_chunks:
                self._put(number, place)

    def _forget(self, numbers: Sequence[int]) -> None:
        super()._forget(numbers)
        for number in numbers:
            place = self._places.pop(number, None)
            if place is not None:
                place.file.num_rounds -= 1
        if self._may_write:
            self._drop_empty()

    def _drop_empty(self) -> None:
        for file in list(self._files):
            if file.num_rounds == 0 and file is not self._open:
                self._files.remove(file)
                self._unsynced.discard(file)
                self._folder.delete(file.path)


def _read_round(place: _Place, number: int) -> Results:
    """The pairs of chunk and packet that lie at `place`.

    Raises:
        StateError, ValueError: round `number` does not.
    """
    with contextlib.closing(Reader(place.file.path)) as reader:
        reader.end, found = place.start, []
        for _, payload in reader.records():
            fields, data = from_payload(payload)
            if fields.get("round") != number:
                break
            found.append((fields["chunk"], np.frombuffer(data, np.uint8)))
            if reader.end + RECORD.size + len(payload) == place.end:
                return found
    raise ValueError(f"{place.file.path} has changed")
