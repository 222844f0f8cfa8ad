# SPDX-License-Identifier: Apache-2.0
"""`tf-hips run` and `tf-hips party` whose workers and servers begin at once, with all imported.

A worker that imports TensorFlow takes five seconds of a processor before it does anything. Here the
launcher is forked from a process that has imported it (see `forked`), and forks what it would else
start as `python ...`. All else is as it is for users: pipes, groups, signals, exit codes.

How the launcher starts processes is tested with real ones, in `tests/cli/test_processes.py` and
`tests/cli/test_run.py`, and with TensorFlow in `tests/cli/test_party.py` and `tests/test_demo.py`.
"""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.support import forked
from tests.support.zygote import Zygote, live
from tf_hips import cli
from tf_hips.cli import children, processes

_PRCTL = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1
_PROGRAM = "import sys\nfrom tests.support import launched\nlaunched.main(sys.argv[1:])\n"
_LARGEST_DESCRIPTOR = 1 << 10


def run(
    arguments: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    zygote: Zygote | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs `tf-hips ARGUMENTS`, which launches; what it printed, as text.

    Args:
        arguments: of the command.
        timeout: seconds that it may take.
        env: its environment; None: this process's.
        zygote: has imported what is launched; None: no TensorFlow.

    Raises:
        subprocess.TimeoutExpired: it did not end in time; all of it is killed.
    """
    return forked.run(command(arguments), timeout=timeout, env=env, zygote=zygote)


def command(arguments: Sequence[str]) -> list[str]:
    """`tf-hips ARGUMENTS`, which launches, for a `forked.Program`."""
    return [sys.executable, "-c", _PROGRAM, *arguments]


def main(arguments: Sequence[str]) -> None:
    """The launcher: `tf-hips` with another way to start its children."""
    processes.spawn = _spawn  # type: ignore[assignment]
    cli.main(arguments)


class _Process:
    """As much of a `subprocess.Popen` as a launcher needs."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    death_signal: signal.Signals,
    file_limits: tuple[int, int],
) -> Any:
    """In place of `children.spawn`."""
    if command[0] != sys.executable:
        return children.spawn(command, environment, death_signal, file_limits)
    launcher = os.getpid()
    nothing, (out, its_out), (err, its_err) = (
        os.open(os.devnull, os.O_RDONLY),
        os.pipe(),
        os.pipe(),
    )
    pid = os.fork()
    if pid == 0:
        _PRCTL(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != launcher:  # it died between fork and prctl
            os._exit(128 + death_signal)
        children.limit_files(file_limits)
        _live(command, environment, (nothing, its_out, its_err))
    for descriptor in (nothing, its_out, its_err):
        os.close(descriptor)
    with contextlib.suppress(OSError):  # the child was faster, or has ended
        os.setpgid(pid, pid)
    return _Process(pid, os.fdopen(out, "rb"), os.fdopen(err, "rb"))


def _live(
    command: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
) -> NoReturn:
    """The rest of the life of a child of the launcher."""
    # As `exec` leaves signals, and as Python and `children.spawn` then set them.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # What is the launcher's stays the launcher's: it is never taken to pieces here.
    gc.freeze()
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.detach()
    for descriptor in range(3, _LARGEST_DESCRIPTOR):
        if descriptor not in streams:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    live({"program": command[1:], "environment": environment, "folder": Path.cwd()}, streams)
