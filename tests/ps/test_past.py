# SPDX-License-Identifier: Apache-2.0
"""Results of rounds that are over: which are kept, and that no other bytes come back."""

import errno
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tf_hips.ps.disk import past_files
from tf_hips.ps.disk.file_format import Facts
from tf_hips.ps.disk.journal import Folder
from tf_hips.ps.disk.past_files import PastOnDisk
from tf_hips.ps.terms.past import ROUND_BYTES as ROUND_COSTS
from tf_hips.ps.terms.past import Past, Results

NUM_CHUNKS = 3
CHUNK_BYTES = 1000
ROUND_BYTES = NUM_CHUNKS * CHUNK_BYTES


def results(number: int) -> Results:
    return [(chunk, np.full(CHUNK_BYTES, number * 10 + chunk, np.uint8)) for chunk in (2, 0, 1)]


def is_right(past: Past, number: int) -> bool:
    pairs = zip(past.results(number), results(number), strict=True)
    return all(one[0] == two[0] and (one[1] == two[1]).all() for one, two in pairs)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path, Facts("job", ("a", "b"), None, None))
    yield made
    made.close()


def on_disk(folder: Folder, limit: int = 1 << 20) -> PastOnDisk:
    past = PastOnDisk(limit, folder)
    past.start()
    return past


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_rounds_are_kept_from_the_oldest_that_is_needed(folder: Folder, kind: str) -> None:
    cost = Past(0)._cost(results(0)) if kind == "memory" else on_disk(folder)._cost(results(0))
    past = Past(4 * cost) if kind == "memory" else on_disk(folder, 4 * cost)
    assert past.oldest is None
    for number in range(5, 11):
        past.append(number, results(number))
    assert (past.oldest, past.num_bytes) == (7, 4 * cost)
    past.need(10)
    past.append(11, results(11))
    assert (past.oldest, past.num_bytes) == (10, 2 * cost)
    assert is_right(past, 11)
    with pytest.raises(KeyError):
        past.results(9)
    past.append(20, results(20))  # nobody can do 12 to 19 again
    assert past.oldest == 20
    past.close()


def test_a_server_that_starts_again_finds_them(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_files, "FILE_BYTES", 2 * ROUND_BYTES)
    first = on_disk(folder)
    for number in range(9):
        first.append(number, results(number))
    first.sync()
    first.close()
    assert len(list(folder.path.glob("results-*"))) > 2
    second = PastOnDisk(1 << 20, folder)
    second.restore(7, NUM_CHUNKS)  # the journal makes 7 and 8 again
    assert second.oldest == 0
    second.start()
    for number in (7, 8, 9):
        second.append(number, results(number))
    assert all(is_right(second, number) for number in range(10))
    second.need(8)
    second.append(10, results(10))
    assert second.oldest == 8
    second.close()


def test_what_is_torn_or_of_another_run_is_not_found(folder: Folder, tmp_path: Path) -> None:
    past = on_disk(folder)
    for number in range(4):
        past.append(number, results(number))
    past.close()
    [path] = folder.path.glob("results-*")
    whole = path.read_bytes()
    for cut, oldest in ((10, None), (len(whole) // 2, None), (len(whole), 0)):
        path.write_bytes(whole[:cut])
        again = PastOnDisk(1 << 20, folder)
        again.restore(4, NUM_CHUNKS)  # a row that does not reach round 3 is of no use
        assert again.oldest == oldest
        again.close()
    other = Folder(tmp_path / "other", Facts("job", ("a", "c"), None, None))
    (other.path / path.name).write_bytes(whole)
    foreign = PastOnDisk(1 << 20, other)
    foreign.restore(4, NUM_CHUNKS)
    assert foreign.oldest is None
    foreign.close()
    other.close()


def test_after_a_full_disk_no_other_bytes_are_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = on_disk(folder)
    for number in range(3):
        past.append(number, results(number))

    def full(descriptor: int, pieces: list[memoryview]) -> int:
        os.write(descriptor, b"".join(bytes(piece) for piece in pieces)[:1500])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(past_files, "write", full)
        past.append(3, results(3))
    assert past.oldest is None
    for number in range(4, 7):
        past.append(number, results(number))
    assert all(is_right(past, number) for number in range(4, 7))
    past.close()


def test_bytes_that_have_changed_are_not_given_out(folder: Folder) -> None:
    past = on_disk(folder)
    past.append(0, results(0))
    [path] = folder.path.glob("results-*")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    with pytest.raises(KeyError):
        past.results(0)
    path.unlink()  # by somebody else
    with pytest.raises(KeyError):
        past.results(0)
    past.close()


def test_each_round_costs_the_same_however_many_are_kept() -> None:
    """Nothing is counted over all of them."""

    class Counted(dict[int, int]):
        def values(self) -> Any:
            raise AssertionError("all rounds were looked at")

        __iter__ = values

    packets = [(0, np.zeros(10, np.uint8))]
    cost = Past(0)._cost(packets)
    past = Past(3 * cost)
    past._bytes = Counted()
    for number in range(7, 100):
        past.append(number, packets)
        assert past.oldest == max(7, number - 2)
        assert past.num_bytes == cost * min(3, number - 6)


# What threads of other tests may take meanwhile; a record of each packet would be 1.5 MB.
OTHERS = 64 << 10


@pytest.mark.parametrize("kind", ["memory", "files"])
@pytest.mark.parametrize(("num_chunks", "num_bytes"), [(1, 1), (160, 40)])
def test_memory_is_no_more_than_what_counts(
    folder: Folder, kind: str, num_chunks: int, num_bytes: int
) -> None:
    past = Past(1 << 40) if kind == "memory" else on_disk(folder, 1 << 40)

    def fill(first: int, last: int) -> None:
        for number in range(first, last):
            packets = [(chunk, np.zeros(num_bytes, np.uint8)) for chunk in range(num_chunks)]
            past.append(number, packets)

    fill(0, 10)
    counted = past.num_bytes
    tracemalloc.start()
    try:
        fill(10, 60)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < past.num_bytes - counted + OTHERS
    if kind == "files":  # whatever is in them
        assert taken < 50 * ROUND_COSTS + OTHERS
    past.close()


def test_files_are_open_only_while_they_are_used(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_files, "FILE_BYTES", ROUND_BYTES)
    past = on_disk(folder)
    past.append(0, results(0))

    def num_open() -> int:
        opened = (file.path for file in psutil.Process().open_files())
        return sum(Path(path).match(f"{folder.path.resolve()}/results-*") for path in opened)

    for number in range(1, 20):
        past.append(number, results(number))
    past.sync()
    assert all(is_right(past, number) for number in range(20))
    assert (len(list(folder.path.glob("results-*"))), num_open()) == (20, 1)
    past.close()
    assert num_open() == 0


def test_files_that_somebody_else_has_made_are_left_alone(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_files, "FILE_BYTES", ROUND_BYTES)
    past = on_disk(folder)
    past.append(0, results(0))
    copy = folder.path / "results-000001.bak"
    copy.write_bytes((folder.path / "results-000001").read_bytes())
    for number in range(1, 4):
        past.append(number, results(number))
    past.close()
    again = PastOnDisk(1 << 20, folder)
    again.restore(4, NUM_CHUNKS)
    again.start()
    assert all(is_right(again, number) for number in range(4))
    again.close()
    assert copy.exists()


def test_nobody_waits_for_a_round_that_is_being_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session asks with its lock held: all its children would wait for this disk."""
    past = on_disk(folder)
    past.append(0, results(0))
    writes, may_end = threading.Event(), threading.Event()
    real = past_files.write

    def slow(descriptor: int, pieces: list[Any]) -> int:
        writes.set()
        assert may_end.wait(20)
        return real(descriptor, pieces)

    monkeypatch.setattr(past_files, "write", slow)
    writer = threading.Thread(target=past.append, args=(1, results(1)))
    writer.start()
    assert writes.wait(20)
    told: list[int | None] = []

    def ask() -> None:
        past.need(1)
        told.append(past.oldest)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    asker.join(10)
    may_end.set()
    writer.join(20)
    assert told == [0]
    assert past.oldest == 1
    past.close()


def test_what_a_killed_server_left_is_durable_with_the_next_snapshot(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = on_disk(folder)
    first.append(0, results(0))
    first.close()
    second = PastOnDisk(1 << 20, folder)
    second.restore(1, NUM_CHUNKS)
    second.start()
    second.append(1, results(1))
    synced = []
    monkeypatch.setattr(
        os, "fdatasync", lambda one: synced.append(os.path.realpath(f"/proc/self/fd/{one}"))
    )
    second.sync()
    assert sorted(synced) == sorted(map(str, folder.path.glob("results-*")))
    assert len(synced) == 2
    second.sync()
    assert len(synced) == 2  # nothing has been written since
    second.close()
