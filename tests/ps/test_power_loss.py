# SPDX-License-Identifier: Apache-2.0
"""What a loss of power leaves: files, names and deletions get to the disk in an order that holds.

The tests of kills copy a folder as a process leaves it. The disk may hold less than that: what was
written and not synced, a new name, or a deletion before the name that it makes room for.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ps.test_journal import FACTS, Kept, content, fill, started
from tests.ps.test_journal import folder as folder
from tests.ps.test_journal import snapshot as snapshot_of
from tf_hips.errors import StateError
from tf_hips.ps.disk import journal as journals
from tf_hips.ps.disk.journal import Folder, Journal, Recovery

Told = list[tuple[str, Path]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is done to which file, in order; a rename is told with the name that it gives."""
    found: Told = []

    def telling(what: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(one: Any, *arguments: Any, **more: Any) -> Any:
            path = Path(f"/proc/self/fd/{one}").readlink() if isinstance(one, int) else one
            found.append((what, arguments[0] if what == "rename" else path))
            return operation(one, *arguments, **more)

        return run

    for name, what in (("fsync", "sync"), ("fdatasync", "sync"), ("writev", "write")):
        monkeypatch.setattr(os, name, telling(what, getattr(os, name)))
    for name in ("rename", "unlink"):
        monkeypatch.setattr(Path, name, telling(name, getattr(Path, name)))
    return found


def test_names_come_after_what_they_name_and_deletions_after_names(
    tmp_path: Path, told: Told
) -> None:
    folder = Folder(tmp_path / "base", FACTS)
    # The way to the folder is there before anything in it.
    assert {("sync", tmp_path), ("sync", tmp_path / "base")} <= set(told)
    durable: list[int] = []
    journal = Journal.begin(folder)
    journal.start(lambda: durable.append(len(told)), lambda text: None)
    journal.append(1, [b"before"])
    writer = snapshot_of(folder, journal, [(2, b"state")])
    writer.finish()
    writer.close()
    journal.close()
    folder.close()
    first = ("write", folder.file("journal", 1))
    last = max(place for place, one in enumerate(told[: durable[0]]) if one == first)
    assert ("sync", first[1]) in told[last : durable[0]]  # before it is said to be durable
    renames = [place for place, (what, _) in enumerate(told) if what == "rename"]
    names = [told[place][1].name for place in renames]
    assert names == ["journal-000001", "journal-000002", "snapshot-000002"]
    for place in renames:
        path = told[place][1]
        draft = path.with_name(f".{path.name}")
        last = max(at for at, one in enumerate(told[:place]) if one == ("write", draft))
        assert ("sync", draft) in told[last:place], path  # whole before it has its name
        since = itertools.takewhile(lambda one: one[0] != "unlink", told[place + 1 :])
        assert ("sync", folder.path) in since, path  # which is there before anything goes


def test_what_a_killed_server_had_not_synced_is_durable_when_it_goes_on(
    folder: Folder, told: Told
) -> None:
    journal = started(Journal.begin(folder))
    fill(journal)
    journal.close()
    recovery = Recovery(folder)
    list(recovery.records())
    told.clear()
    again = started(recovery.resume())
    again.close()
    assert ("sync", folder.file("journal", 1)) in told


def test_damage_behind_a_snapshot_is_no_torn_tail(folder: Folder) -> None:
    """Marks of a journal that is not the first one are believed, too."""
    journal = started(Journal.begin(folder))
    fill(journal)
    writer = snapshot_of(folder, journal, [(20, b"state")])
    writer.finish()
    writer.close()
    later: Kept = [(1, b"after"), (2, b"more")]
    fill(journal, later)
    journal.close()
    assert content(folder) == [(20, b"state"), *later]
    path = folder.file("journal", 2)
    data = bytearray(path.read_bytes())
    data[data.index(b"fter")] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match=r"journal-000002 is damaged .*was durable"):
        content(folder)


def test_what_is_written_in_part_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full takes some bytes of a call."""
    monkeypatch.setattr(os, "writev", lambda one, pieces: os.write(one, b"".join(pieces)[:5]))
    path = tmp_path / "file"
    with path.open("wb") as file:
        assert journals.write(file.fileno(), [b"abc", b"", b"defghijk", b"lm"]) == 13
    assert path.read_bytes() == b"abcdefghijklm"


def test_a_journal_that_has_been_rotated_has_not_grown(folder: Folder) -> None:
    """Else each round would begin a snapshot."""
    journal = started(Journal.begin(folder))
    journal.append(1, [bytes(1000)])
    assert journal.grown_bytes > 1000
    journal.rotate()
    assert journal.grown_bytes == 0
    journal.append(1, [bytes(1000)])
    assert 1000 < journal.grown_bytes < 1100
    journal.close()


def test_a_snapshot_says_how_many_records_it_has(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is missing that is whole, with all that stands behind it."""
    journal = started(Journal.begin(folder))
    writer = snapshot_of(folder, journal, [(20, b"one"), (21, b"two")])
    writer._count -= 1
    writer.finish()
    writer.close()
    journal.close()
    with pytest.raises(StateError, match=r"snapshot-000002 .*must be whole"):
        content(folder)


def test_room_is_tried_on_the_disk(folder: Folder, told: Told) -> None:
    """Some file systems look for the blocks only when they sync."""
    folder.try_room()
    draft = folder.path / ".room"
    assert told == [("write", draft), ("sync", draft), ("unlink", draft)]
