# SPDX-License-Identifier: Apache-2.0
"""Groups of a job that are started again, and what is not started again."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_processes import SLEEP, python
from tf_hips.cli.children import Failure
from tf_hips.cli.processes import Job

pytestmark = pytest.mark.heavy  # processes start, and are waited for, in each of these


@pytest.mark.parametrize(("max_restarts", "code"), [(2, 0), (1, 5)])
def test_a_group_is_started_again_as_often_as_it_may(
    capfd: pytest.CaptureFixture[str], max_restarts: int, code: int
) -> None:
    attempts: list[int] = []
    with Job(out=io.BytesIO(), err=io.BytesIO()) as job:

        def start(attempt: int) -> None:
            attempts.append(attempt)
            fails = attempt < 2
            job.start("a", python(SLEEP if fails else ""), os.environ)
            job.start("b", python(f"raise SystemExit({5 if fails else 0})"), os.environ)

        job.start("alone", python("import time; time.sleep(0.5)"), os.environ)
        job.start_group("both", start, max_restarts)
        failure = job.wait()
    assert attempts == list(range(max_restarts + 1))
    assert (failure.code if failure else 0) == code
    told = [line for line in capfd.readouterr().err.splitlines() if "starts again" in line]
    assert told == [
        f"tf-hips: b failed (exit code 5); both starts again ({one} of {max_restarts})"
        for one in range(1, max_restarts + 1)
    ]


def test_groups_that_start_again_share_their_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    started: list[str] = []
    real = Job._turn_until

    def note(job: Job, done: Any, seconds: float | None) -> None:
        if done == job._is_told_to_end and seconds is not None:
            pauses.append(seconds)
        real(job, done, seconds)

    monkeypatch.setattr(Job, "_turn_until", note)
    with Job(out=io.BytesIO(), err=io.BytesIO(), grace_s=30.0) as job:

        def starting(name: str) -> Callable[[int], None]:
            def start(attempt: int) -> None:
                started.append(name)
                body = "raise SystemExit(3)" if attempt == 0 else ""
                job.start(name, [sys.executable, "-S", "-c", body], os.environ)

            return start

        for name in "abc":
            job.start_group(name, starting(name), 1)
        while not all(child.failed for child in job._children):
            job._turn(None)
        assert job.wait() is None
    assert started == list("abcabc")
    assert len(pauses) == 3
    assert sum(pauses) <= 0.5  # of each


def test_a_group_that_only_a_signal_starts_again_may_fail() -> None:
    bodies = ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)")
    with Job(out=io.BytesIO(), err=io.BytesIO()) as job:
        job.start_group(
            "server",
            lambda attempt: job.start("server", python(bodies[attempt]), os.environ) and None,
            5,
            only_killed=True,
        )
        failure = job.wait()
    assert failure == Failure("server", 3, "exit code 3")


def test_what_no_restart_heals_is_not_started_again(tmp_path: Path) -> None:
    attempts: list[int] = []
    # Rank 1 hears of rank 0's error, and is the first of them to end.
    os.mkfifo(gate := tmp_path / "gate")
    first = f"""
        print("tf_hips.errors.ConfigError: no such key", flush=True)
        open({str(gate)!r}).read()
        raise SystemExit(78)
        """
    second = f"""
        gate = open({str(gate)!r}, "w")
        raise SystemExit(1)
        """
    with Job(out=io.BytesIO(), err=io.BytesIO()) as job:

        def start(attempt: int) -> None:
            attempts.append(attempt)
            job.start("worker0", python(first), os.environ)
            job.start("worker1", python(second), os.environ)

        job.start_group("west", start, 5)
        assert job.wait() == Failure("worker0", 78, "exit code 78")
    assert attempts == [0]
