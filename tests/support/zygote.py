# SPDX-License-Identifier: Apache-2.0
"""A process that has imported what takes long and forks: what tests start begins at once.

Importing TensorFlow, Keras, Horovod and our strategies takes seconds of a processor, which is most
of what a launch of ranks costs; to take them to pieces at the end takes a third of one. The zygote
does the one once for a session of pytest, and its children leave out the other. A child has a
group, environment, folder and output of its own, and runs and ends like a program that was started.
Another zygote has imported what servers need, and no TensorFlow; see `forked`.

Forking is safe as long as the zygote only imports: TensorFlow, Horovod and gRPC make their threads
when they are first used, in the child.

One JSON value per line: a command on standard input, its answer on standard output.

    {"start": [arguments], "environment": {..}, "folder": "..", "output": ".."} -> pid
    {"program": [arguments of Python], .., "streams": [input, output, errors]}  -> pid
    {"poll": pid}                                                               -> exit code or null
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support import children

_BROKEN = 70  # exit code of a child that could not even begin, or end


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
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)  # can be read once it has ended
            try:
                ended = select.poll()
                ended.register(descriptor, select.POLLIN)
                while self.poll() is None:
                    left_s = None if end is None else end - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                    ended.poll(None if left_s is None else 1000 * left_s)
            finally:
                os.close(descriptor)
        if self.returncode is None:
            raise RuntimeError(f"Process {self.pid} has ended and has no exit code.")
        return self.returncode


class Zygote:
    """The process that forks, as its parent sees it."""

    def __init__(self, environment: dict[str, str], loads: str = "tensorflow") -> None:
        """Starts it; it imports while the caller goes on.

        Args:
            environment: its variables.
            loads: "tensorflow", with all that ranks use, or "servers".
        """
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote", loads],
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
        with self._lock:
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


def _become(command: dict[str, Any], streams: Sequence[int]) -> None:
    """Makes this forked child a program of its own, with these for its standard streams."""
    os.setpgid(0, 0)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    tempfile.tempdir = None  # what it is, was read from another environment
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the program
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115


def _end(code: int) -> NoReturn:
    """Ends this child as Python does, but for the objects, which the system takes back at once."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _opened(command: dict[str, Any]) -> list[int]:
    """Descriptors of what a child reads and writes."""
    reads, *writes = command.get("streams") or [os.devnull, command["output"], command["output"]]
    kinds = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return [os.open(reads, os.O_RDONLY), *(os.open(one, kinds) for one in writes)]


def _load(what: str) -> None:
    if what == "servers":
        importlib.import_module("tests.support.forked").load()
        return
    import horovod.tensorflow  # noqa: F401
    import keras  # noqa: F401
    import pytest  # noqa: F401
    import tensorflow  # noqa: F401

    import tf_hips.loops  # noqa: F401
    from tests.support import ranks  # noqa: F401


def live(command: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """What a child does from its first moment on.

    Args:
        command: as above.
        streams: descriptors that become its standard streams.
    """
    try:
        _become(command, streams)
        if "program" in command:
            from tests.support import forked

            _end(forked.main(command["program"]))
        from tests.support import ranks

        faulthandler.enable()
        _end(ranks.main(*command["start"]))
    except BaseException:  # noqa: BLE001 - else it would go on as the process that forks
        traceback.print_exc()
    finally:
        os._exit(_BROKEN)


def _main(loads: str) -> int:
    _load(loads)
    # Half a million objects that stay: to look at them takes longer than many tests.
    gc.collect()
    gc.freeze()
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            command = json.loads(line)
            if "poll" in command:
                answers.write(json.dumps(_poll(command["poll"])) + "\n")
                continue
            streams = _opened(command)
            pid = os.fork()
            if pid == 0:
                answers.close()
                live(command, streams)
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(OSError):  # the child was faster, or has ended
                os.setpgid(pid, pid)
            answers.write(json.dumps(pid) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
