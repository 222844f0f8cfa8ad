# SPDX-License-Identifier: Apache-2.0
"""Events that are written under a lock wait for no disk."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tf_hips import log

FACTS: dict[str, Any] = {"run": "job", "role": "server", "site": "x", "rank": 0}
DEADLINE_S = 20.0


def test_a_slow_disk_holds_up_nobody(tmp_path: Path) -> None:
    # What is written to a pipe that nobody reads stands still.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    events = log.EventLog(tmp_path, **FACTS)
    assert events._lines is not None
    events._lines.close()
    events._lines._file = pipe.open("w", encoding="utf-8")
    try:
        for number in range(200):  # beyond 64 KiB
            events.write_later("closed", number=number, text="x" * 1000)
        assert events._waiting  # and this thread is here
        os.set_blocking(reader, True)
        found: list[bytes] = []
        draining = threading.Thread(
            target=lambda: found.extend(iter(lambda: os.read(reader, 1 << 16), b"")), daemon=True
        )
        draining.start()
        events.close()
        draining.join(DEADLINE_S)
        assert not draining.is_alive()
    finally:
        os.close(reader)
    assert b"".join(found).count(b'"closed"') == 200


def test_late_events_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    events = log.EventLog(tmp_path, **FACTS)
    for number in range(50):
        (events.write_later if number % 2 else events.write)("x", number=number)
    events.close()
    events.write_later("too late")
    assert [one["number"] for one in log.read_events(tmp_path)] == list(range(50))
    assert log.EventLog(None, **FACTS).write_later("nowhere") is None


def test_what_is_too_much_is_dropped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_MOST_WAITING", 3)
    events = log.EventLog(tmp_path, **FACTS)
    with events._lock:  # the disk
        for number in range(7):
            events.write_later("x", number=number)
    events.settle()
    events.write_later("x", number=7)
    events.close()
    found = log.read_events(tmp_path)
    assert [one["number"] for one in found] == [0, 1, 2, 7]
    assert [one.get("dropped") for one in found] == [None, None, None, 4]
