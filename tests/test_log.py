# SPDX-License-Identifier: Apache-2.0
"""Messages and events of one process; what reads them has tests of its own."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from absl import logging as absl_logging

from tf_hips import log


def test_words_of_others_neither_steer_a_terminal_nor_look_like_a_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forged = "x\x1b[2J\r\nWARNING:absl:Refused a call of 10.0.0.7\u2028of site c"
    with caplog.at_level(logging.WARNING):
        log.error("Site %s has left: %s, %d", "a\x07", forged, 3)
        log.warning("It failed: %s", ValueError(forged))
        log.warning("It failed: %r", ConnectionRefusedError(forged))
    first, second, third = caplog.messages
    assert third.startswith("It failed: ConnectionRefusedError(")
    assert first.startswith("Site a  has left: x [2J")
    for line in (first + second).splitlines()[1:]:
        assert line.startswith("    ")
    assert not any(one < " " and one != "\n" for one in first + second)
    assert {record.filename for record in caplog.records} == {"test_log.py"}


def test_news_are_shown_where_warnings_are_and_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = absl_logging.get_verbosity()
    try:
        for verbosity in (absl_logging.WARNING, absl_logging.INFO, absl_logging.ERROR):
            absl_logging.set_verbosity(verbosity)
            log.news("%s has come", f"site {verbosity}\x07")
    finally:
        absl_logging.set_verbosity(before)
    assert caplog.messages == ["site -1  has come", "site 0  has come"]
    told = {(record.levelname, record.filename) for record in caplog.records}
    assert told == {("INFO", "test_log.py")}


def test_a_text_of_lines_stays_readable() -> None:
    assert log.printable_lines("one\ntwo") == "one\n    two"
    assert log.printable("one\ntwo\t3") == "one two 3"


def test_a_clock_that_is_set_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a machine that begins with a clock that is ahead, until it has heard the right time."""
    seconds = iter((7190.0, 7200.0, 20.0, 21.0, 32.0, 40.0))
    monkeypatch.setattr(log.time, "time_ns", lambda: int(next(seconds) * 1e9))
    for site, names in (("a", ("joined", "x", "set right", "left", "result")), ("b", ("other",))):
        events = log.EventLog(tmp_path, run="job", role="worker", site=site, rank=0)
        for name in names:
            events.write(name)
        events.close()
    found = log.read_events(tmp_path)
    names = ["joined", "x", "set right", "left", "result", "other"]
    assert [one["event"] for one in found] == names
    at_us = [one["time_us"] for one in found]
    assert at_us[:3] == [9_999_999, 19_999_999, 20_000_000]
    assert at_us[3:] == [21_000_000, 32_000_000, 40_000_000]


def test_a_clock_that_was_ahead_for_a_moment_moves_nothing_else(tmp_path: Path) -> None:
    with (tmp_path / "worker-a-0.jsonl").open("w") as file:
        for second in (10, 11, 10**9, 12, 12.5, 12.2, 13):
            line = {"time_us": int(second * 10**6), "run": "job", "role": "worker", "site": "a"}
            file.write(json.dumps({**line, "rank": 0, "event": "x", "at": second}) + "\n")
    found = log.read_events(tmp_path)
    # Threads that have waited for the disk are told by their times.
    assert [one["at"] for one in found] == [10, 11, 10**9, 12, 12.2, 12.5, 13]
    assert found[2]["time_us"] == 11_999_999


def test_processes_in_one_file_have_clocks_of_their_own(tmp_path: Path) -> None:
    """As where somebody has joined the files of a run."""
    for site, second in (("a", 100), ("b", 10), ("a", 101), ("b", 11)):
        line = {"time_us": second * 10**6, "run": "job", "role": "worker", "site": site, "rank": 0}
        with (tmp_path / "all.jsonl").open("a") as file:
            file.write(json.dumps({**line, "event": "x"}) + "\n")
    assert [one["time_us"] // 10**6 for one in log.read_events(tmp_path)] == [10, 11, 100, 101]


def test_a_clock_that_begins_in_1970_moves_nothing_that_was_right(tmp_path: Path) -> None:
    """As of a board without a battery, whose power was away twice in a run."""
    year = 1_790_000_000  # 2026
    seconds = (year, year + 50, 5, 10, 6, 8, year + 200, year + 201, 7)
    with (tmp_path / "worker-a-0.jsonl").open("w") as file:
        for number, second in enumerate(seconds):
            line = {"time_us": second * 10**6, "run": "job", "role": "worker", "site": "a"}
            file.write(json.dumps({**line, "rank": 0, "event": "x", "number": number}) + "\n")
    found = {one["number"]: one["time_us"] for one in log.read_events(tmp_path)}
    for number in (0, 1, 6, 7, 8):  # the last one's clock was not set any more
        assert found[number] == seconds[number] * 10**6
    # Up to when it was set, in their order.
    assert [found[number] // 10**6 - year for number in (2, 3, 4, 5)] == [192, 197, 197, 199]
    assert [found[number] for number in (2, 3, 4, 5)] == sorted(found[n] for n in (2, 3, 4, 5))


def test_who_has_waited_for_the_disk_moves_nobody(tmp_path: Path) -> None:
    """An event that waits in a thread of its own may come seconds behind later ones."""
    with (tmp_path / "server-a-0.jsonl").open("w") as file:
        for second in (0, 1, 2, 3, 4, 5, 1.5, 6):
            line = {"time_us": int(second * 10**6), "run": "job", "role": "server", "site": "a"}
            file.write(json.dumps({**line, "rank": 0, "event": "x", "at": second}) + "\n")
    found = log.read_events(tmp_path)
    assert [one["at"] for one in found] == [0, 1, 1.5, 2, 3, 4, 5, 6]
    assert all(one["time_us"] == int(one["at"] * 10**6) for one in found)


def test_events_of_a_long_run_share_what_all_of_them_say(tmp_path: Path) -> None:
    for site in ("a", "b"):
        events = log.EventLog(tmp_path, run="job", role="worker", site=site, rank=0)
        for number in range(2):
            events.write("round", round=number, sent=812, seconds=0.25)
        events.close()
    found = log.read_events(tmp_path)
    assert len(found) == 4
    texts = [[*one, one["event"], one["run"], one["role"]] for one in found]
    for of_all in zip(*texts, strict=True):
        assert len({id(text) for text in of_all}) == 1, f"{len(found)} copies of `{of_all[0]}`"


def test_a_file_that_is_cut_while_it_is_written_goes_on_at_its_beginning(tmp_path: Path) -> None:
    events = log.EventLog(tmp_path, run="job", role="worker", site="a", rank=0)
    path = tmp_path / "worker-a-0.jsonl"
    events.write("before")
    kept = path.read_bytes()
    os.truncate(path, 0)  # as logrotate with `copytruncate`
    events.write("behind")
    events.close()
    assert json.loads(kept)["event"] == "before"
    assert json.loads(path.read_bytes())["event"] == "behind"


def test_all_that_a_full_disk_has_cost_is_counted(tmp_path: Path) -> None:
    events = log.EventLog(tmp_path, run="job", role="server", site="a", rank=0)
    lines = events._lines
    assert lines is not None
    lines.close()
    with open("/dev/full", "w") as lines._file:  # noqa: PTH123 - a device
        events.write("round", dropped=5)  # so many had waited for the disk before
        events.write("round", dropped=7)
    lines._tries_at = 0.0  # half a minute later there is room
    events.write("round", dropped="by a script, which has a field of that name")
    events.close()
    [found] = log.read_events(tmp_path)
    assert found["dropped"] == 1 + 5 + 1 + 7


@pytest.mark.parametrize("is_later", [False, True])
def test_a_log_that_is_collected_amid_a_write_closes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_later: bool
) -> None:
    """The collector runs in any thread, also in the one that writes; it must not wait for it."""
    events = log.EventLog(tmp_path, run="job", role="worker", site="a", rank=0)
    closed = threading.Event()

    def written(lines: log._Lines, record: dict[str, object]) -> None:
        write(lines, record)
        if record["event"] == "first":
            events.close()
            closed.set()

    write = log._Lines.write
    monkeypatch.setattr(log._Lines, "write", written)

    def use() -> None:
        one = events.write_later if is_later else events.write
        with events._news:  # so that both wait when the first one is written
            one("first")
            one("second")

    user = threading.Thread(target=use, daemon=True)
    user.start()
    assert closed.wait(20), "it waits for itself"
    for thread in (user, events._writer):
        if thread is not None:
            thread.join(20)
            assert not thread.is_alive()
    assert events._lines is None
    expected = ["first", "second"] if is_later else ["first"]
    assert [one["event"] for one in log.read_events(tmp_path)] == expected
