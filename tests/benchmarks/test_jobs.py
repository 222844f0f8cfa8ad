# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a benchmark's job run."""

from pathlib import Path

import pytest

from benchmarks import jobs


@pytest.mark.parametrize(
    ("siblings", "processors", "spread"),
    [
        # Numbered core by core, as many hypervisors do.
        (["0-1", "0-1", "2-3", "2-3"], [0, 1, 2, 3], [0, 2, 1, 3]),
        # All cores first, then their second threads.
        (["0,2", "1,3", "0,2", "1,3"], [0, 1, 2, 3], [0, 1, 2, 3]),
        # Not all are ours.
        (["0-1", "0-1", "2-3", "2-3"], [1, 2, 3], [1, 2, 3]),
        ([], [3, 5], [3, 5]),
    ],
)
def test_ranks_have_cores_of_their_own_while_there_are_any(
    tmp_path: Path, siblings: list[str], processors: list[int], spread: list[int]
) -> None:
    for number, shared in enumerate(siblings):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{shared}\n")
    assert jobs.spread(processors, tmp_path) == spread


def test_this_machine_has_all_its_processors() -> None:
    assert sorted(jobs.spread([0, 1])) == [0, 1]
