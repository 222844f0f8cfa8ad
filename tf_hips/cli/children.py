# SPDX-License-Identifier: Apache-2.0
"""The processes that a launcher starts: how they begin, how they end, and what that says.

Every child leads a process group of its own (docs/decisions/0024). When it ends, what is left of it
is killed; when the launcher dies, even by SIGKILL, the kernel ends the child (PR_SET_PDEATHSIG).

What a child prints tells when its trouble began, which may be before others end, and its own end
may be after: an interpreter with TensorFlow in it takes its time.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from tf_hips.errors import NO_RESTART, which_rank_ended, who_left

_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl

TRACEBACK_WINDOW_S = 10.0
"""A process whose exception takes down its peers can outlive them. One that printed an exception at
most so many seconds before the first exit is given as many to end itself."""

# Before a group is started again, for the first time and at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# How the text of an uncaught exception begins: Python's own way, `errors.print_in_one_line`'s, and
# that of a command such as `tf-hips train`.
_EXCEPTION = re.compile(
    r"Traceback \(most recent call last\)"
    r"|(?:tf_hips\.errors\.\w+|tf-hips [\w-]+: error): (?P<text>.*)"
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """Who failed first and how.

    Attributes:
        role: name of the child.
        code: exit status for the launcher: the child's own, or 128 + signal.
        reason: the same in words.
        is_stuck: whether it is a service that did not end after all others had.
    """

    role: str
    code: int
    reason: str
    is_stuck: bool = False


@dataclasses.dataclass(eq=False)
class Child:
    """A started process. `code` is None while it runs; times are `time.monotonic()` seconds.

    `is_given_up`: it is a follower that has failed for good. `accuses`: the site that has ended the
    run for it, or the role of the worker of its own site, as it has said itself.
    """

    role: str
    process: subprocess.Popen[bytes]
    is_service: bool
    is_follower: bool
    group: "Group | None" = None
    code: int | None = None
    ended_s: float = 0.0
    traceback_s: float | None = None
    accuses: str | None = None
    is_given_up: bool = False

    @property
    def site(self) -> str:
        """The site that it works for, the beginning of its role; empty for a process of none."""
        return self.role.rpartition("/")[0]

    @property
    def has_spoken(self) -> bool:
        """Whether all that it has printed has been read."""
        pipes = (self.process.stdout, self.process.stderr)
        return all(pipe is None or pipe.closed for pipe in pipes)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.code is not None and self.code != 0

    @property
    def decides(self) -> bool:
        """Whether it has failed, and somebody must be started again or all must end."""
        return self.failed and not self.is_given_up

    @property
    def trouble_s(self) -> float:
        """When the trouble began: a traceback printed just before the end, else the end."""
        if self.traceback_s is None or self.ended_s - self.traceback_s > 2 * TRACEBACK_WINDOW_S:
            return self.ended_s
        return self.traceback_s

    @property
    def failure(self) -> Failure:
        """How it has ended."""
        code = self.code or 0
        if code >= 0:
            return Failure(self.role, code, f"exit code {code}")
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return Failure(self.role, 128 - code, f"killed by {name}")

    def note_line(self, line: str) -> None:
        """Hears a line that it has printed."""
        said = _EXCEPTION.match(line)
        if not said:
            return
        text = said["text"] or ""
        rank = which_rank_ended(text)
        peer = None if rank is None else worker_role(self.site, rank)
        self.accuses = who_left(text) or peer or self.accuses
        now = time.monotonic()
        # The first of a row of tracebacks ("during handling of the above ...") counts.
        if self.traceback_s is None or now - self.traceback_s > TRACEBACK_WINDOW_S:
            self.traceback_s = now

    def is_suspect(self, first: "Child") -> bool:
        """Whether its exception may be why `first` has ended."""
        return (
            self.traceback_s is not None
            and 0 <= first.trouble_s - self.traceback_s <= TRACEBACK_WINDOW_S
        )

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all of its group that is left."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def reap(self) -> None:
        """Notes its end, if it has ended, and kills what is left of its group."""
        # WNOWAIT keeps the zombie, and with it the group's number, until the group has been killed.
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self.send(signal.SIGKILL)
            self.ended_s = time.monotonic()
            self.code = self.process.wait()


def worker_role(site: str, rank: int) -> str:
    """The name of a worker in the output of a job."""
    return f"{site}/worker{rank}"


@dataclasses.dataclass(eq=False)
class Group:
    """Children that are started together, again and again."""

    name: str
    start: Callable[[int], None]
    max_restarts: int
    only_killed: bool
    attempt: int = 0

    def may_restart(self, child: Child) -> bool:
        """Whether it is started again, now that `child` has failed."""
        is_killed = (child.code or 0) < 0
        helps = is_killed or (child.code != NO_RESTART and not self.only_killed)
        return helps and self.attempt < self.max_restarts

    def pause_s(self) -> float:
        """Seconds before it is started again."""
        doublings = min(self.attempt - 1, 10)  # a run of weeks has more than a float can hold
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)


def take_more_files() -> tuple[int, int]:
    """Lets this process open as many files as it may; returns what `limit_files` takes.

    Two pipes of each child are open here, and 1024 files are what a process mostly has, though it
    may have many more.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit_files((before[1], before[1]))
    return before


def limit_files(limits: tuple[int, int]) -> None:
    """Sets how many files this process may open; where the system refuses, nothing changes."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    death_signal: signal.Signals,
    file_limits: tuple[int, int],
) -> subprocess.Popen[bytes]:
    """Starts a process in a group of its own; what it prints comes through two pipes.

    Args:
        command: program and arguments.
        environment: the whole environment of the process.
        death_signal: what it gets when this process dies.
        file_limits: how many files it may open, as for `limit_files`.

    Raises:
        OSError: the program cannot be started.
    """
    launcher = os.getpid()

    def tie_to_launcher() -> None:  # between fork and exec: looks nothing up
        # In a group of its own the terminal would stop it, where it now gets an error.
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        _PRCTL(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        limit_files(file_limits)
        if os.getppid() != launcher:  # it died between fork and prctl
            os._exit(128 + death_signal)

    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,  # not a session, see docs/decisions/0024
        preexec_fn=tie_to_launcher,
    )
