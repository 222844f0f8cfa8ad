# SPDX-License-Identifier: Apache-2.0
"""Results of rounds that are over: which are kept, and that no other bytes come back."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tf_hips.ps.disk import past_files
from tf_hips.ps.disk.file_format import Facts
from tf_hips.ps.disk.journal import Folder
from tf_hips.ps.disk.past_files import PastOnDisk
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
    past = Past(4 * ROUND_BYTES) if kind == "memory" else on_disk(folder, 4 * ROUND_BYTES)
    assert past.oldest is None
    for number in range(5, 12):
        past.append(number, results(number))
    assert (past.oldest, past.num_bytes) == (8, 4 * ROUND_BYTES)
    past.need(10)
    assert (past.oldest, past.num_bytes) == (10, 2 * ROUND_BYTES)
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
    past.close()


def test_each_round_costs_the_same_however_many_are_kept() -> None:
    """Nothing is counted over all of them."""

    class Counted(dict[int, int]):
        def values(self) -> Any:
            raise AssertionError("all rounds were looked at")

        __iter__ = values

    past = Past(30)
    past._bytes = Counted()
    for number in range(7, 100):
        past.append(number, [(0, np.zeros(10, np.uint8))])
        assert past.oldest == max(7, number - 2)
        assert past.num_bytes == 10 * min(3, number - 6)
