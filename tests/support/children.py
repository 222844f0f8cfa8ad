# SPDX-License-Identifier: Apache-2.0
"""Which processes the tests started, and how to end those that are left.

Every process that a test starts inherits a variable with this session's mark, grandchildren
included, so one whose parent died and that now belongs to init is found too. Children that were
forked without an exec have no such variable in /proc; they are found as children.
"""

import contextlib
import os
import time
import uuid

import psutil

VARIABLE = "TF_HIPS_TEST_SESSION"
# Python's own helper: it lives as long as the interpreter that started it and ends with it.
_HELPER = "multiprocessing.resource_tracker"
_EXEC_S = 0.01  # a process that becomes another program can be read by then
_kept: set[int] = set()


def mark_environment() -> None:
    """Gives this process's future children a mark of their own."""
    os.environ[VARIABLE] = uuid.uuid4().hex


def keep(pid: int) -> None:
    """Says that process `pid`, but not its children, ends with this one and not with a test."""
    _kept.add(pid)


def left_behind() -> list[psutil.Process]:
    """Live processes that this process or its descendants started since `mark_environment`."""
    mark = os.environ[VARIABLE]
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    unknown = list(psutil.process_iter())
    for pause_s in (0.0, _EXEC_S):
        time.sleep(pause_s)
        environments = [(process, _environment(process)) for process in unknown]
        found |= {one.pid: one for one, of in environments if of.get(VARIABLE) == mark}
        # Nothing to read: it belongs to the kernel, or just now becomes another program.
        unknown = [process for process, of in environments if not of]
    return [
        process for pid, process in sorted(found.items()) if pid != os.getpid() and _counts(process)
    ]


def describe(processes: list[psutil.Process]) -> str:
    """One line per process: pid and command."""
    return "\n".join(f"  pid {process.pid}: {_command(process)[:200]}" for process in processes)


def end(processes: list[psutil.Process]) -> None:
    """Kills the processes and waits until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def wait_until_gone(seconds: float) -> list[psutil.Process]:
    """Gives processes that are about to end this long, and returns those that did not."""
    processes = left_behind()
    psutil.wait_procs(processes, timeout=seconds)
    return [process for process in processes if process.is_running() and _counts(process)]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return dict(process.environ())
    except (psutil.Error, OSError):
        return {}  # it ended just now, or is another user's: not ours either way


def _counts(process: psutil.Process) -> bool:
    try:
        return (
            process.pid not in _kept
            and process.status() != psutil.STATUS_ZOMBIE
            and _HELPER not in _command(process)
        )
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(gone)"
