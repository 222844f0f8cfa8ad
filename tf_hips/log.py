# SPDX-License-Identifier: Apache-2.0
"""Console messages and the event log.

Messages go through absl, one logger for the package; nothing is configured at import. Events are
one JSON object per line in `<log_dir>/<role>-<site>-<rank>.jsonl`: what happened, when, in which
round. Reports and figures are drawn from events alone, so they can be drawn again.

Every event has `time_us` (wall clock, microseconds), `run`, `role`, `site`, `rank`, `event`; the
rest is the event's own. JSON has no NaN and no infinity: both are written as null, and read as None
also where a script of its own wrote them.
"""

import collections
import contextlib
import json
import logging as standard_logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from absl import logging

# What a clock goes back by reading it twice, at most; more is a clock that was set.
_SAME_US = 1000
# By how much an event in a file may be before those that stand before it: events of threads that
# have waited for the disk, which may stand still for seconds. By more, the clock was set back.
_LATE_US = 30_000_000
# A clock that shows less (2025) has not been set since its machine began: many have no battery.
_FIRST_US = 1_735_689_600_000_000
# The values of every event that are texts.
_TEXTS = ("event", "run", "role", "site")
# Events of `write_later` that may wait for the disk.
_MOST_WAITING = 10_000
# Seconds that the end of a process waits for them.
_SETTLE_S = 5.0
# Seconds from a write that has failed to the next one.
_TRY_AGAIN_S = 30.0

Event = Mapping[str, Any]
"""One of a log, as it is read: JSON values by name."""
Listener = Callable[[str, Mapping[str, Any]], None]
"""Gets the name and the values of an event."""
Tell = Callable[..., None]
"""Writes an event, as `EventLog.write` does."""


def printable(text: str) -> str:
    """Text from elsewhere, without what would steer a terminal or begin a line."""
    return "".join(one if one.isprintable() else " " for one in text)


def printable_lines(text: str) -> str:
    """The same of a text that may have lines: all but the first are indented."""
    return "\n    ".join(printable(line) for line in text.splitlines())


class _Printable:
    """A text or an error, which may be another site's: neither looks like a message."""

    def __init__(self, value: str | BaseException) -> None:
        self._value = value

    def __str__(self) -> str:
        return printable_lines(str(self._value))

    def __repr__(self) -> str:
        return printable(repr(self._value))


def _shown(arguments: tuple[object, ...]) -> list[object]:
    return [_Printable(one) if isinstance(one, str | BaseException) else one for one in arguments]


@logging.skip_log_prefix
def debug(message: str, *arguments: object) -> None:
    """Logs `message % arguments` for who looks for a mistake."""
    logging.debug(message, *_shown(arguments))


@logging.skip_log_prefix
def info(message: str, *arguments: object) -> None:
    """Logs `message % arguments`."""
    logging.info(message, *_shown(arguments))


@logging.skip_log_prefix
def news(message: str, *arguments: object) -> None:
    """Logs `message % arguments` as information that is shown where warnings are.

    For what is in order, and what somebody who waits at a terminal must know: absl hides
    information unless it is asked for.
    """
    if logging.level_info() or not logging.level_warning():
        info(message, *arguments)
        return
    if not standard_logging.root.handlers:  # as absl does before its first message
        standard_logging.basicConfig()
    logger = logging.get_absl_logger()
    place = logger.findCaller()
    record = logger.makeRecord(
        logger.name,
        standard_logging.INFO,
        *place[:2],
        message,
        tuple(_shown(arguments)),
        None,
        place[2],
    )
    logger.handle(record)


@logging.skip_log_prefix
def warning(message: str, *arguments: object) -> None:
    """Logs `message % arguments` as what should not be."""
    logging.warning(message, *_shown(arguments))


@logging.skip_log_prefix
def error(message: str, *arguments: object) -> None:
    """Logs `message % arguments` as what has failed."""
    logging.error(message, *_shown(arguments))


class EventLog:
    """Appends events to a file of JSON lines; without a folder it does nothing. Thread-safe."""

    def __init__(
        self, folder: str | Path | None, *, run: str, role: str, site: str, rank: int
    ) -> None:
        """Opens `<folder>/<role>-<site>-<rank>.jsonl` for appending; makes the folder."""
        self._facts = {"run": run, "role": role, "site": site, "rank": rank}
        # The collector may call `close` in a thread that has it.
        self._lock = threading.RLock()
        self._own = threading.local()  # `is_amid_write`: what this thread is at
        self._is_closing = False
        self._clock = threading.Lock()
        self._last_us = 0
        self._lines: _Lines | None = None
        self._news = threading.Condition()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque()
        self._writer: threading.Thread | None = None
        self._num_dropped = 0
        self._listeners: list[Listener] = []
        if folder is not None:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            path /= f"{role}-{site}-{rank}.jsonl"
            self._lines = _Lines(path)

    def listen(self, listener: Listener) -> None:
        """Has `listener` called with the name and the values of each event, by whoever writes it.

        Also where there is no folder.
        """
        self._listeners.append(listener)

    def write(self, event: str, **values: Any) -> None:
        """Writes one event with `values`, which must be JSON values.

        A disk that is full ends no run: there is a warning, events are dropped until there is room
        again, and the next one says how many (`dropped`).
        """
        self._tell(event, values)
        self._append(self._record(event, values))

    def write_later(self, event: str, **values: Any) -> None:
        """The same by a thread of its own, for who holds a lock: a slow disk stops nobody.

        An event has the time of the call. Of events that wait for the disk there are at most
        10,000; later ones are dropped, and the next one that is kept says how many (`dropped`).
        """
        self._tell(event, values)
        if self._lines is None:
            return
        record = self._record(event, values)
        with self._news:
            if len(self._waiting) >= _MOST_WAITING:
                self._num_dropped += 1
                return
            if self._num_dropped:
                record["dropped"], self._num_dropped = self._num_dropped, 0
            self._waiting.append(record)
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_waiting, name="tf_hips-events", daemon=True
                )
                self._writer.start()
            self._news.notify_all()

    def settle(self) -> None:
        """Waits, 5 s at most, until the events of `write_later` are written."""
        with self._news:
            self._news.wait_for(lambda: not self._waiting, _SETTLE_S)

    def close(self) -> None:
        """Closes the file when what waits is written; later events are dropped.

        Called amid a write of the same thread, as by the collector, it leaves that to the write.
        """
        if getattr(self._own, "is_amid_write", False) or self._is_writer():
            self._is_closing = True
            return
        self.settle()
        self._close_lines()
        with self._news:
            self._news.notify_all()

    def _is_writer(self) -> bool:
        return threading.current_thread() is self._writer

    def _close_lines(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, None
            if lines is not None:
                lines.close()

    def _tell(self, event: str, values: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(event, values)

    def _record(self, event: str, values: dict[str, Any]) -> dict[str, Any]:
        with self._clock:
            now, last = time.time_ns() // 1000, self._last_us
            # One event after the other, also within a microsecond; a clock may be set back.
            self._last_us = last + 1 if last - _SAME_US < now <= last else now
            return {"time_us": self._last_us, **self._facts, "event": event, **values}

    def _append(self, record: dict[str, Any]) -> None:
        self._own.is_amid_write = True  # before it waits for the lock, which others may need
        try:
            with self._lock:
                if self._lines is not None:
                    self._lines.write(record)
        finally:
            self._own.is_amid_write = False
        if self._is_closing and not self._is_writer():
            self.close()

    def _write_waiting(self) -> None:
        """Writes what waits, until the file is closed."""
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: self._waiting or self._lines is None or self._is_closing
                )
                if not self._waiting:
                    break
                record = self._waiting[0]
            self._append(record)
            with self._news:
                self._waiting.popleft()
                self._news.notify_all()
        self._close_lines()


class _Lines:
    """A file that records are appended to, on a disk that may be full for a while.

    Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        """Opens it.

        Raises:
            OSError: it cannot be written.
        """
        self._path = path
        self._file: IO[str] | None = self._open()
        self._tries_at = 0.0  # of `time.monotonic`, where it is closed
        self._num_lost = 0

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, unless the disk does not take it, or has not a moment ago."""
        dropped = record.get("dropped", 0)  # or what a script calls so
        num_dropped = dropped if isinstance(dropped, int) else 0
        if self._file is None and time.monotonic() < self._tries_at:
            self._num_lost += 1 + num_dropped
            return
        if self._num_lost:
            record = {**record, "dropped": num_dropped + self._num_lost}
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(_text(record) + "\n")
            self._file.flush()
        except OSError as failure:
            if not self._num_lost:
                warning("Events are not written to %s: %s", self._path, failure)
            self._num_lost += 1 + num_dropped
            self._tries_at = time.monotonic() + _TRY_AGAIN_S
            self.close()
            return
        if self._num_lost:
            warning("Events are written to %s again; %d were lost", self._path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Closes the file; the next write opens it again."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _open(self) -> IO[str]:
        file = self._path.open("a", encoding="utf-8")
        if not _ends_a_line(self._path):
            file.write("\n")
        return file


def _ends_a_line(path: Path) -> bool:
    """Whether no crash and no full disk has cut off the last line of a file."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """All events of all processes and runs under `folder`, in order of time.

    A line that a crash or a full disk has cut off is left out, and so is one that is no event.
    Where the clock of a process was set back by more than half a minute, what it wrote before is
    moved back, to end when the rest begins: the clock that was set is the right one. So is what it
    wrote in 1970, before its clock was set for the first time, moved to where that was.
    """
    events: list[dict[str, Any]] = []
    known: dict[str, str] = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        first = len(events)
        # As bytes: what a lost disk has left in one line may be no text.
        with path.open("rb") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):
                    event = json.loads(line, parse_constant=lambda _: None)
                    if _is_event(event):
                        events.append(_sharing(event, known))
        _put_in_order(events[first:])
    return sorted(events, key=lambda event: event["time_us"])


def _put_in_order(events: list[dict[str, Any]]) -> None:
    """Moves what a process has written in a file before its clock was set to where that was."""
    # Of each process, as somebody may have joined files: when what follows was written, and by how
    # much it was moved.
    known: dict[tuple[str, str, int], tuple[int, int]] = {}
    for event in reversed(events):
        process, at_us = (event["role"], event["site"], event["rank"]), event["time_us"]
        next_us, moved_us = known.get(process, (at_us, 0))
        was_unset, is_unset = next_us < _FIRST_US <= at_us, at_us < _FIRST_US <= next_us
        if was_unset or (at_us <= next_us + _LATE_US and not is_unset):
            moved_us = 0
        elif (moved_us <= 0 if is_unset else not moved_us) or at_us + moved_us > next_us:
            moved_us = next_us - 1 - at_us
        event["time_us"] = at_us + moved_us
        is_right = moved_us or was_unset
        known[process] = event["time_us"] if is_right else min(at_us, next_us), moved_us


def _text(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:  # the rare case pays for the walk
        return json.dumps(_finite(record))


def _finite(value: Any) -> Any:
    """The value with None in place of what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_event(value: object) -> bool:
    """Whether it has what every event of an `EventLog` has."""
    if not isinstance(value, dict) or type(value.get("time_us")) is not int:
        return False
    return type(value.get("rank")) is int and all(isinstance(value.get(one), str) for one in _TEXTS)


def _sharing(event: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """The event with the strings of `known` in place of those that each line brings anew.

    Of a long run there are a million events, and most of each would be the names of its values.
    """
    shared = {known.setdefault(name, name): value for name, value in event.items()}
    for name in _TEXTS:
        shared[name] = known.setdefault(shared[name], shared[name])
    return shared
