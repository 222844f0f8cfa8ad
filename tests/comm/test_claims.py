# SPDX-License-Identifier: Apache-2.0
"""A rank is one process: its children have its environment, not its place."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tf_hips.comm import claims
from tf_hips.errors import ConfigError

PLACE = {
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    "HOROVOD_RANK": "3",
}


@contextlib.contextmanager
def another() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that ends when its input does."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def started_by(pid: int, start: str | None) -> dict[str, str]:
    """The environment of a process that `pid`, which is the rank, has started."""
    mark = f"process {pid}, started at {start}, is {' '.join(PLACE.values())}"
    return {**PLACE, claims.CLAIM_VARIABLE: mark}


def test_who_was_started_by_a_rank_is_refused_while_that_is_there() -> None:
    with another() as rank:
        start = claims._start_of(rank.pid)
        environment = started_by(rank.pid, start)
        told = rf"in process {os.getpid()}, .* of process {rank.pid}, rank 3$"
        with pytest.raises(ConfigError, match=told):
            claims.claim(environment)
        assert environment == started_by(rank.pid, start)
        # One that a launcher has started in it has a place of its own.
        other = {**environment, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4712"}
        claims.claim(other)
        assert " 4712 3" in other[claims.CLAIM_VARIABLE]
        # The number of one that has ended, used again.
        claims.claim(started_by(rank.pid, "1"))
        assert rank.stdin is not None
        rank.stdin.close()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        claims.claim(started_by(rank.pid, start))  # it has ended, and nobody has asked how


def test_children_of_a_job_of_one_are_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are forks, or a launcher of ours has told of a run, which may have a server."""
    with another() as rank:
        alone = {**started_by(rank.pid, claims._start_of(rank.pid)), "HOROVOD_SIZE": "1"}
        claims.claim(dict(alone))
        for more in ({claims.CONFIG_VARIABLE: "/x.json"}, {"HOROVOD_SIZE": "2"}):
            with pytest.raises(ConfigError, match="A rank must be one process"):
                claims.claim({**alone, **more})
        monkeypatch.setattr(claims, "_holder", rank.pid)
        with pytest.raises(ConfigError, match="A rank must be one process"):
            claims.claim(alone)


def test_a_process_takes_its_place_again() -> None:
    environment = dict(PLACE)
    claims.claim(environment)
    own = dict(environment)
    assert own == started_by(os.getpid(), claims._start_of(os.getpid()))
    claims.claim(environment)  # so does who replaces it by `exec`
    assert environment == own
    for mark in ("", "7", "process x, started at 1, is there"):
        environment = {**PLACE, claims.CLAIM_VARIABLE: mark}
        claims.claim(environment)
        assert environment == own


@pytest.mark.parametrize("name", PLACE)
def test_who_has_no_launcher_has_no_place(name: str) -> None:
    mark = started_by(os.getppid(), claims._start_of(os.getppid()))
    environment = {key: value for key, value in mark.items() if key != name}
    before = dict(environment)
    claims.claim(environment)
    assert environment == before
