# SPDX-License-Identifier: Apache-2.0
"""`--slowdown worker=N:cpu=20%`: a worker that gets a share of a core, as from a smaller machine.

Beside the worker runs a process that measures what it has used, all threads together, and stops it
(SIGSTOP) while it has used more than its share of the time, as a CPU quota of a control group does.
That needs no rights and no control group. What is used too much in one period is taken from the
next, so the share holds over time. Processes that a worker starts are not counted.

    python -I -S quota.py PID SHARE

Imports nothing but the standard library, so that it is there before a worker has begun to work.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from tf_hips.cli.processes import Job

VARIABLE = "TF_HIPS_CPU_QUOTA"
_PERIOD_S = 0.1
_LEAST_RUN_S = 0.005


class Bucket:
    """CPU time that a process may use: it fills with time, and holds that of one period at most."""

    def __init__(self, share: float, period_s: float = _PERIOD_S) -> None:
        """Is full.

        Args:
            share: seconds of CPU for each second; of one core.
            period_s: time after which it is full.
        """
        self.share = share
        self._most_s = self._left_s = share * period_s

    def spend(self, elapsed_s: float, used_s: float) -> float:
        """Seconds for which the process must rest; 0: it may go on.

        Args:
            elapsed_s: since the last call.
            used_s: CPU time of the process in them.
        """
        self._left_s = min(self._most_s, self._left_s + self.share * elapsed_s) - used_s
        return max(0.0, -self._left_s / self.share)

    def run_s(self, cores: int) -> float:
        """Seconds after which it may be empty, if all cores are used."""
        return max(_LEAST_RUN_S, self._left_s / cores)


def start(job: "Job", role: str, pid: int, own: Mapping[str, str]) -> None:
    """Starts the process beside a worker, if its variables say so.

    Args:
        job: that of the worker.
        role: of the worker.
        pid: of the worker.
        own: variables of the worker.
    """
    if VARIABLE in own:
        command = [sys.executable, "-I", "-S", __file__, str(pid), own[VARIABLE]]
        job.start(f"{role} quota", command, os.environ, is_service=True)


def cpu_s(pid: int) -> float:
    """CPU time of a process in seconds, all of its threads together, also of those that ended.

    Raises:
        OSError: there is no such process.
    """
    # What clock_getcpuclockid(3) makes of a pid: CPUCLOCK_SCHED of a process.
    return time.clock_gettime((~pid << 3) | 2)


def hold(pid: int, share: float) -> None:
    """Holds a process to its share until it ends; another child of this one's parent.

    Raises:
        OSError: it belongs to another user.
    """
    try:
        handle = os.pidfd_open(pid)
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (ProcessLookupError, FileNotFoundError):
        return  # it has ended already
    if int(status.rpartition(")")[2].split()[1]) != os.getppid():
        return  # its number is another's by now
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    cores = len(os.sched_getaffinity(pid))
    bucket = Bucket(share)

    def let_go(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        signal.pidfd_send_signal(handle, signal.SIGCONT)
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, let_go)
    now, used = time.monotonic(), cpu_s(pid)
    try:
        while not ended.poll(1e3 * bucket.run_s(cores)):
            before, used_before = now, used
            now, used = time.monotonic(), cpu_s(pid)
            rest_s = bucket.spend(now - before, used - used_before)
            if rest_s > 0:
                signal.pidfd_send_signal(handle, signal.SIGSTOP)
                has_ended = ended.poll(1e3 * rest_s)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
                if has_ended:
                    return
    except ProcessLookupError:
        return  # between two looks
    except OSError:
        if not ended.poll(0):
            raise


if __name__ == "__main__":
    hold(int(sys.argv[1]), float(sys.argv[2]))
