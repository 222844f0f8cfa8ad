# SPDX-License-Identifier: Apache-2.0
"""What a job of processes decides, without any: pauses, deadlines, and whom it names."""

import io
import types
from pathlib import Path
from typing import Any

import pytest

from tf_hips import config
from tf_hips.cli import party, processes
from tf_hips.cli.children import Child, Failure, Group
from tf_hips.cli.processes import Job


class _Clock:
    """`time.monotonic` that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def job_of(*children: Child) -> Job:
    job = Job(out=io.BytesIO(), err=io.BytesIO())
    job._children = list(children)
    return job


def ended(role: str, code: int) -> Child:
    process: Any = types.SimpleNamespace(stdout=None, stderr=None)  # nothing is left to be read
    return Child(role, process, is_service=False, is_follower=False, code=code, ended_s=5.0)


def test_pauses_before_restarts_double_up_to_half_a_minute() -> None:
    def pause_s(attempt: int) -> float:
        group = Group("west", lambda attempt: None, 10**6, only_killed=False, attempt=attempt)
        return group.pause_s()

    assert [pause_s(attempt) for attempt in range(1, 8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert pause_s(2000) == 30.0


def test_who_is_started_for_the_last_time_does_not_come_back() -> None:
    """It leaves the run with its error, so that no other site waits for it."""
    told = [party._attempt(config.Run(), attempt, 2) for attempt in range(3)]
    assert [one.attempt for one in told] == [0, 1, 2]
    assert [one.comes_back for one in told] == [True, True, False]
    assert not party._attempt(config.Run(), 0, 0).comes_back


@pytest.mark.parametrize("restarts", [True, False])
def test_a_service_that_starts_again_has_its_time_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    clock, path = _Clock(), tmp_path / "address"
    monkeypatch.setattr(processes, "time", clock)
    job = job_of()

    def turn(seconds: float | None) -> None:
        """Four seconds go by; the child fails after 8, and another one is there after 16."""
        clock.now += 4.0
        if clock.now == 108.0:
            job._children = [ended("server", 1)]
        if clock.now == 116.0:
            path.write_text("here\n")

    def restart() -> bool:
        job._children = []
        return restarts

    monkeypatch.setattr(job, "_turn", turn)
    monkeypatch.setattr(job, "_restart", restart)
    assert job.wait_for_file(path, 10.0) == ("here" if restarts else None)


def test_at_the_same_instant_a_signal_is_the_cause_and_an_exit_its_consequence() -> None:
    job = job_of(ended("worker0", 1), ended("worker1", -9))
    assert job.wait() == Failure("worker1", 128 + 9, "killed by SIGKILL")
