# SPDX-License-Identifier: Apache-2.0
"""A process that has imported TensorFlow and forks: ranks of tests start in a tenth of a second.

Importing TensorFlow, Keras, Horovod and our strategies takes seconds of a processor, which is most
of what a launch of ranks costs; to take them to pieces at the end takes a third of one. The zygote
does the one once for a session of pytest, and its children leave out the other. A child has a
group, environment, folder and output of its own, and runs and ends like a program that was started.

Forking is safe as long as the zygote only imports: TensorFlow and Horovod make their threads when
they are first used, in the child.

One JSON value per line: a command on standard input, its answer on standard output.

    {"start": [arguments], "environment": {..}, "folder": "..", "output": ".."} -> pid
    {"poll": pid}                                                               -> exit code or null
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from tests.support import children

_PAUSE_S = 0.01


class Child:
    """A forked process that leads a group of its own; used like a `subprocess.Popen`."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        """Refers to process `pid`, a child of `zygote`."""
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        """The exit code, minus the signal's number if one ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._zygote.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end.

        Raises:
            subprocess.TimeoutExpired: it did not come within `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_PAUSE_S)
        return code


class Zygote:
    """The process that forks, as its parent sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Starts it; it imports while the caller goes on."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # NumPy's threads, made on import
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        children.keep(self._process.pid)
        atexit.register(self.end)

    def start(
        self, arguments: list[str], *, environment: dict[str, str], folder: str, output: Path
    ) -> Child:
        """Forks a child that runs `ranks` with `arguments`."""
        return Child(
            self,
            self.ask(start=arguments, environment=environment, folder=folder, output=str(output)),
        )

    def ask(self, **command: Any) -> Any:
        """The answer to a command."""
        pipes = self._process.stdin, self._process.stdout
        if pipes[0] is None or pipes[1] is None:
            raise RuntimeError("The zygote must have pipes.")
        pipes[0].write((json.dumps(command) + "\n").encode())
        pipes[0].flush()
        line = pipes[1].readline()
        if not line:
            raise RuntimeError(f"The zygote has ended with code {self._process.wait()}.")
        return json.loads(line)

    def end(self) -> None:
        """Ends it; children that run are not its business."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(command: dict[str, Any]) -> list[str]:
    """Makes this forked child a program of its own; returns its arguments."""
    os.setpgid(0, 0)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    tempfile.tempdir = None  # what it is, was read from another environment
    with Path(os.devnull).open("rb") as nothing, Path(command["output"]).open("wb") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the program
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    faulthandler.enable()
    arguments: list[str] = command["start"]
    return arguments


def _end(code: int) -> NoReturn:
    """Ends this child as Python does, but for the objects, which the system takes back at once."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _main() -> int:
    import horovod.tensorflow  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow  # noqa: F401

    import tf_hips.loops  # noqa: F401
    from tests.support import ranks

    # Half a million objects that stay: to look at them takes longer than many tests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*children.GARBAGE)
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            command = json.loads(line)
            if "poll" in command:
                answers.write(json.dumps(_poll(command["poll"])) + "\n")
                continue
            pid = os.fork()
            if pid == 0:
                answers.close()
                _end(ranks.main(*_become(command)))
            with contextlib.suppress(OSError):  # the child was faster, or has ended
                os.setpgid(pid, pid)
            answers.write(json.dumps(pid) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main())
