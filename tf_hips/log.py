# SPDX-License-Identifier: Apache-2.0
"""Console messages and the event log.

Messages go through absl, one logger for the package; nothing is configured at import. Events are
one JSON object per line in `<log_dir>/<role>-<site>-<rank>.jsonl`: what happened, when, in which
round. Reports and figures are drawn from events alone, so they can be drawn again.

Every event has `time_us` (wall clock, microseconds), `run`, `role`, `site`, `rank`, `event`; the
rest is the event's own.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from absl import logging

debug = logging.debug
info = logging.info
warning = logging.warning
error = logging.error


Listener = Callable[[str, Mapping[str, Any]], None]


class EventLog:
    """Appends events to a file of JSON lines; without a folder it does nothing. Thread-safe."""

    def __init__(
        self, folder: str | Path | None, *, run: str, role: str, site: str, rank: int
    ) -> None:
        """Opens `<folder>/<role>-<site>-<rank>.jsonl` for appending; makes the folder."""
        self._facts = {"run": run, "role": role, "site": site, "rank": rank}
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        self._listeners: list[Listener] = []
        if folder is not None:
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            path /= f"{role}-{site}-{rank}.jsonl"
            self._file = path.open("a", encoding="utf-8")
            if not _ends_a_line(path):
                self._file.write("\n")

    def listen(self, listener: Listener) -> None:
        """Has `listener` called with the name and the values of each event, by whoever writes it.

        Also where there is no folder.
        """
        self._listeners.append(listener)

    def write(self, event: str, **values: Any) -> None:
        """Writes one event with `values`, which must be JSON values.

        A disk that is full ends no run: there is a warning, and later events are dropped.
        """
        for listener in self._listeners:
            listener(event, values)
        with self._lock:
            file = self._file
            if file is None:
                return
            record = {"time_us": time.time_ns() // 1000, **self._facts, "event": event, **values}
            try:
                file.write(json.dumps(record) + "\n")
                file.flush()
            except OSError as failure:
                self._file = None
                with contextlib.suppress(OSError):
                    file.close()
                warning("Events are no longer written to %s: %s", file.name, failure)

    def close(self) -> None:
        """Closes the file; later events are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
    """
    events = []
    for path in sorted(Path(folder).glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and {"time_us", "event"} <= event.keys():
                        events.append(event)
    return sorted(events, key=lambda event: event["time_us"])
