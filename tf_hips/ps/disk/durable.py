# SPDX-License-Identifier: Apache-2.0
"""Sessions that outlive their server: recorded in a folder, and restored from it.

    accepted --Journal.append--> queue --written, synced--> durable --> answers leave the server

What a session accepts goes to a journal in the order in which it was accepted, and what it makes of
that is computed meanwhile. Only telling it waits. A journal that has grown gets a snapshot, at the
beginning of a round; merges of that round wait until the residuals are in the file, chunk by chunk,
so they are never copied as a whole. Packets are taken in meanwhile.

When the disk fails, the run ends for all children with the reason; nothing that is not durable was
told to anybody.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tf_hips import log
from tf_hips.errors import PeerError, StateError
from tf_hips.ps.disk.file_format import Facts
from tf_hips.ps.disk.journal import Folder, Journal, Recovery, SnapshotWriter
from tf_hips.ps.disk.past_files import PastOnDisk
from tf_hips.ps.session.members import Terms
from tf_hips.ps.session.session import Session
from tf_hips.ps.terms.past import Past
from tf_hips.ps.terms.quorum import Clock
from tf_hips.ps.terms.recorder import Entry, Kind, Recorder, from_payload, to_payload
from tf_hips.ps.transport.wire import Buffer

# A journal gets a snapshot when it is larger than this, and than so many last snapshots.
SNAPSHOT_AFTER_BYTES = 64 << 20
SNAPSHOT_AFTER_SNAPSHOTS = 4


class JournalRecorder(Recorder):
    """Tells a journal what a session accepts, and writes snapshots."""

    is_keeping = True

    def __init__(self, folder: Folder, events: log.EventLog) -> None:
        """A recorder that keeps nothing until it has a journal, as while a session is restored."""
        self._folder = folder
        self._events = events
        self._journal: Journal | None = None
        self._snapshot_bytes = 0
        self._writer: threading.Thread | None = None
        self._past: PastOnDisk | None = None
        self._goes_on: Callable[[], None] = lambda: None

    def make_past(self, limit_bytes: int) -> Past:
        """Where the results of a session's older rounds are kept: beside the journal."""
        self._past = PastOnDisk(limit_bytes, self._folder)
        if self._journal is not None:
            self._past.start()
        return self._past

    def attach(
        self, journal: Journal, session: Session, snapshot_bytes: int = 0, *, is_restored: bool
    ) -> None:
        """From now on `journal` gets what `session` accepts."""
        self._snapshot_bytes = snapshot_bytes
        self.restored_from = str(self._folder.path) if is_restored else None

        def tell() -> None:
            with session.changed:
                session.changed.notify_all()

        self._goes_on = session.note_moved
        journal.start(tell, session.end)
        self._journal = journal
        if self._past is not None:
            self._past.start()

    @property
    def durable(self) -> int:
        """What depends on a record at this position, or one before it, may be told."""
        return 0 if self._journal is None else self._journal.durable

    def add(self, kind: Kind, data: Buffer = b"", **fields: Any) -> int:
        """Takes down one record; its position. `data` must not change later."""
        if self._journal is None:
            return 0
        return self._journal.append(kind, to_payload(fields, data))

    @property
    def has_failed(self) -> bool:
        """Whether what was accepted could not be kept."""
        return self._journal is not None and self._journal.failure is not None

    def settle(self) -> str | None:
        """Waits until all that was taken down is durable; why it will never be, or None."""
        if self._journal is None or self._journal.settle():
            return None
        return self._journal.failure

    def disown(self, reason: str) -> None:
        """What is kept is older than the run, which ends: it stays as it is, without that end."""
        self.is_disowned = True
        if self._journal is not None:
            self._journal.give_up(reason)

    def begin_round(
        self,
        capture: Callable[[], Iterator[Entry]],
        done: Callable[[], None],
        archive: Callable[[], None],
    ) -> None:
        """Begins a snapshot if the journal has grown, and none is being written."""
        journal = self._journal
        if journal is None or journal.failure is not None:
            return
        limit = max(SNAPSHOT_AFTER_BYTES, SNAPSHOT_AFTER_SNAPSHOTS * self._snapshot_bytes)
        if journal.grown_bytes <= limit or (self._writer and self._writer.is_alive()):
            return
        number, position = journal.rotate()
        writer = threading.Thread(
            target=self._write_snapshot,
            args=(journal, number, position, capture(), done, archive),
            name="tf_hips-snapshot",
            daemon=True,
        )
        try:
            writer.start()
        except RuntimeError as error:
            # No thread to spare: the older journals are kept, and the next one to grow tries again.
            log.warning("No snapshot of the run in %s: %s.", self._folder.path, error)
            done()
            return
        self._writer = writer

    def close(self) -> None:
        """Writes what waits, and closes the journal."""
        if self._writer is not None:
            self._writer.join()
        if self._journal is not None:
            self._journal.close()
        if self._past is not None:
            self._past.close()

    def _write_snapshot(
        self,
        journal: Journal,
        number: int,
        position: int,
        entries: Iterator[Entry],
        done: Callable[[], None],
        archive: Callable[[], None],
    ) -> None:
        began = time.monotonic()
        round_number = -1
        writer: SnapshotWriter | None = None
        try:
            try:
                writer = SnapshotWriter(self._folder, number)
                for kind, fields, data in entries:
                    writer.add(kind, to_payload(fields, data))
                    self._goes_on()  # merges wait for the end of it
                    if kind == Kind.NEWEST:
                        round_number = fields["round"]
            finally:
                done()  # the residuals are in the file, or never will be
            # The older journals must not go before the new one is there, nor before the rounds that
            # could be made again from them are in the past.
            archive()
            if self._past is not None:
                self._past.sync()
            if not journal.settle(position):
                return
            writer.finish()
            self._snapshot_bytes = writer.num_bytes
        except Exception as error:  # noqa: BLE001 - all who wait for this thread hear of it
            path = self._folder.file("snapshot", number)
            journal.fail(f"{getattr(error, 'filename', None) or path}", error)
            return
        finally:
            if writer is not None:
                writer.close()
        self._events.write(
            "snapshot",
            round=round_number,
            bytes=writer.num_bytes,
            duration_us=int(1e6 * (time.monotonic() - began)),
        )


class Keeper:
    """Keeps the sessions of one server, one at a time."""

    def __init__(
        self,
        base: str,
        run: str,
        terms: Terms,
        events: log.EventLog,
        clock: Clock | None = None,
    ) -> None:
        """Takes the folder `base`/`run`.

        Args:
            base: folder of the server's runs.
            run: identity of the run.
            terms: what the server was told.
            events: where it is written what was restored, and which rounds were closed.
            clock: of the sessions; None: the system's.

        Raises:
            ConfigError: it cannot be made, or a running server holds it.
        """
        facts = Facts(
            run,
            terms.parties,
            terms.compression,
            terms.downlink,
            terms.shard.numbers,
            terms.rule if terms.rule is not None else terms.robust,
            terms.site,
            terms.way_up,
            terms.quorum.late if terms.quorum is not None else None,
            terms.period,
        )
        self._folder = Folder(base, facts)
        self._base = base
        self._terms = terms
        self._events = events
        self._clock = clock
        self._recorder: JournalRecorder | None = None
        self._was_cut_off = False  # the session before, by a disk that failed

    def restore(self) -> Session | None:
        """The session that is in the folder; None where there is none, or it is over.

        Raises:
            StateError: the files are damaged, or another run's or server's, or cannot be written
                to.
            PeerError: the disk is full.
        """
        began = time.monotonic()
        recorder = JournalRecorder(self._folder, self._events)
        session = Session(self._terms, recorder, clock=self._clock, tell=self._events.write_later)
        recovery: Recovery | None = None
        try:
            recovery = Recovery(self._folder)
            if recovery.is_empty:
                return None
            session.restore(_entries(recovery))
            if session.is_over and not session.owes_leave:
                log.info("The run in %s is over; a new one begins.", self._folder.path)
                return None
            self._try_room()
            journal = recovery.resume()
        except (StateError, PeerError):
            session.end("It cannot be restored.")
            raise
        except OSError as error:
            session.end("It cannot be restored.")
            raise StateError(
                f"The state in {self._folder.path} must be files that this user can read and "
                f"write. Received: {error}"
            ) from error
        except Exception as error:
            session.end("It cannot be restored.")
            raise StateError(
                f"{recovery.place if recovery else self._folder.path}: a record must say what "
                f"this server can do again. Received: {type(error).__name__}: {error}"
            ) from error
        self._recorder = recorder
        recorder.attach(journal, session, recovery.snapshot_bytes, is_restored=True)
        self._tell(session, recovery, time.monotonic() - began)
        return session

    def renew(self) -> Session:
        """The session after one that is over: where the disk has failed, the same one as it was.

        Not so for one of several shards, or below a server: the others know that the run is over,
        and begin a new one.

        Raises:
            StateError: as for `restore`.
            PeerError: the folder cannot be written to.
        """
        if self._recorder is not None:
            is_alone = self._terms.shard.count == 1 and self._terms.site is None
            self._was_cut_off = is_alone and self._recorder.has_failed
            self._release()
        found = self.restore() if self._was_cut_off else None
        self._was_cut_off = False
        return found if found is not None else self.begin()

    def begin(self) -> Session:
        """A new session; what the folder held before is deleted.

        Raises:
            PeerError: the folder cannot be written to.
        """
        self._release()
        recorder = JournalRecorder(self._folder, self._events)
        session = Session(self._terms, recorder, clock=self._clock, tell=self._events.write_later)
        try:
            journal = Journal.begin(self._folder)
        except OSError as error:
            raise PeerError(f"The server cannot keep a run in {self._base}: {error}.") from error
        try:
            self._try_room()  # what the run before took is free now
        except PeerError:
            journal.close()
            raise
        recorder.attach(journal, session, is_restored=False)
        self._recorder = recorder
        return session

    def close(self) -> None:
        """Writes what waits, and gives the folder up."""
        self._release()
        self._folder.close()

    def _try_room(self) -> None:
        try:
            self._folder.try_room()
        except OSError as error:
            raise PeerError(f"The server cannot keep a run in {self._base}: {error}.") from error

    def _release(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def _tell(self, session: Session, recovery: Recovery, seconds: float) -> None:
        if recovery.num_records == 0:
            return
        number = session.store.round if session.store is not None else None
        self._events.write(
            "restored",
            round=number,
            records=recovery.num_records,
            bytes=recovery.num_bytes,
            seconds=round(seconds, 6),
            cut_bytes=recovery.cut_bytes,
        )
        if recovery.cut_bytes:
            log.warning(
                "%s ended in %d bytes of a record that is not whole. They are cut off; a server "
                "that was killed has told nobody of them.",
                self._folder.path,
                recovery.cut_bytes,
            )
        log.info(
            "Restored the run in %s, %s, from %d records in %.1f s.",
            self._folder.path,
            "before its first round" if number is None else f"in round {number}",
            recovery.num_records,
            seconds,
        )


def _entries(recovery: Recovery) -> Iterator[tuple[Kind, dict[str, Any], memoryview]]:
    for kind, payload in recovery.records():
        fields, data = from_payload(payload)
        yield Kind(kind), fields, data
