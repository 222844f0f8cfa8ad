# SPDX-License-Identifier: Apache-2.0
"""`@ranks` must fail when a rank fails or hangs, say which one, and leave nothing behind."""

import os
from pathlib import Path

import pytest

from tests.support.ranks import ranks, start_alone

pytestmark = pytest.mark.tf


@ranks(2)
def _one_rank_fails(folder):
    from tf_hips.comm import primitives

    (folder / f"{primitives.rank()}.pid").write_text(str(os.getpid()))
    if primitives.rank() == 1:
        raise RuntimeError("rank one is unwell")
    primitives.barrier()


@ranks(2, deadline_s=8)
def _hangs(folder):
    import threading

    (folder / f"{os.getpid()}.pid").write_text(str(os.getpid()))
    threading.Event().wait()


def _alive(folder):
    return [
        pid
        for pid in (int(file.read_text()) for file in folder.glob("*.pid"))
        if Path(f"/proc/{pid}").exists()
    ]


def test_a_failing_rank_is_shown_with_its_traceback(tmp_path):
    with pytest.raises(AssertionError) as caught:
        _one_rank_fails(folder=tmp_path)
    assert "rank 1: exit code 1" in str(caught.value)
    assert "RuntimeError: rank one is unwell" in str(caught.value)
    assert len(list(tmp_path.glob("*.pid"))) == 2
    assert not _alive(tmp_path)


def test_ranks_that_hang_are_killed_at_the_deadline(tmp_path):
    with pytest.raises(
        AssertionError, match="2 of 2 ranks failed; not ended within 8 s: rank 0, rank 1"
    ):
        _hangs(folder=tmp_path)
    assert not _alive(tmp_path)


def _fails_alone():
    print("one process")
    raise RuntimeError("it is unwell")


def test_a_process_alone_that_fails_is_shown_with_what_it_wrote(tmp_path):
    with pytest.raises(AssertionError, match=r"exit code 1\n(?s:.*)one process\n(?s:.*)unwell"):
        start_alone(_fails_alone, tmp_path)
