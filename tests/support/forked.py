# SPDX-License-Identifier: Apache-2.0
"""Python programs of this package that begin at once: `run` and `Program` for `subprocess`'s.

A `tf-hips` command imports for half a second of a processor, and hundreds of them start in tests. A
process that has imported it all forks them (see `zygote`). The program is what runs behind
`python`: `-m MODULE`, `-c TEXT` or a script, with its arguments, its environment, its standard
streams and its exit code. It has another command line in /proc, and leads a group of its own.

Tests of how commands start, of what they import, of process groups, or of what /proc says start
real ones.
"""

import _thread
import collections
import contextlib
import functools
import importlib
import operator
import os
import queue
import runpy
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.zygote import Child, Zygote

_PATIENCE_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]
# What these programs import sooner or later; none of it loads TensorFlow, or starts a thread.
_LOADS = (
    *("cryptography.x509", "google.protobuf", "grpc", "numpy", "psutil", "yaml"),
    *("tests.ps.relay", "tests.faults.training", "tf_hips.comm.launch"),
    *("tf_hips.cli", "tf_hips.ps.client.shards", "tf_hips.ps.security.authority"),
    *("tf_hips.ps.server.foreground", "tf_hips.ps.server.server"),
)


@functools.cache
def _zygote_of_servers() -> Zygote:
    path = os.pathsep.join([str(_ROOT), *_path(os.environ)])
    return Zygote({**os.environ, "PYTHONPATH": path}, "servers")


def _path(environment: Mapping[str, str]) -> list[str]:
    return [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]


class Program(Child):
    """A Python program; used like a `subprocess.Popen` of the command without its first word.

    Attributes:
        stdin, stdout, stderr: text streams of those that are `subprocess.PIPE`, else None.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        """Starts it.

        Args:
            command: `sys.executable` and arguments.
            stdin, stdout, stderr: `subprocess.PIPE` or `DEVNULL`, or a file of this process; for
                `stderr` also `subprocess.STDOUT`.
            cwd: its folder; None: this process's.
            env: its environment; None: this process's.
            zygote: what it is forked from; None: one that has imported what servers need.
        """
        zygote = zygote or _zygote_of_servers()
        if command[0] != sys.executable:
            raise ValueError(f"`command` must be one of this Python. Received: {command[0]}")
        ours: list[Any] = [None, None, None]
        paths: list[str] = []
        with contextlib.ExitStack() as theirs:  # their ends of pipes, until it has them
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream == subprocess.PIPE:
                    ends = os.pipe()
                    mine, its = ends if number else ends[::-1]
                    theirs.callback(os.close, its)
                    ours[number] = os.fdopen(mine, "r" if number else "w", buffering=1)
                    paths.append(f"/proc/{os.getpid()}/fd/{its}")
                elif stream == subprocess.DEVNULL:
                    paths.append(os.devnull)
                elif stream == subprocess.STDOUT:
                    paths.append(paths[1])
                else:
                    descriptor = stream if isinstance(stream, int) else stream.fileno()
                    paths.append(f"/proc/{os.getpid()}/fd/{descriptor}")
            pid = zygote.ask(
                program=[str(one) for one in command[1:]],
                environment=dict(os.environ if env is None else env),
                folder=str(cwd or Path.cwd()),
                streams=paths,
            )
        super().__init__(zygote, pid)
        self.stdin, self.stdout, self.stderr = ours

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless its end is known."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)


def run(
    command: Sequence[str],
    *,
    timeout: float,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    zygote: Zygote | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs a program to its end; what it printed, as text.

    Raises:
        subprocess.TimeoutExpired: it did not end within `timeout` seconds; it is killed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        program = Program(command, stdout=out, stderr=errors, cwd=cwd, env=env, zygote=zygote)
        try:
            code = program.wait(timeout)
        finally:
            if program.poll() is None:
                program.kill()
                program.wait()
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), errors.read())


def load() -> None:
    """Imports what the programs need."""
    for name in _LOADS:
        importlib.import_module(name)


def main(arguments: Sequence[str]) -> int:
    """Does what `python ARGUMENTS` does, in this forked process; its exit code."""
    what, *rest = arguments
    sys.orig_argv = [sys.executable, *arguments]
    # What /proc says of its command line is the zygote's; its name is the command's, as `server`.
    Path("/proc/self/comm").write_text((rest[1:2] or [Path(what).name])[0])
    known = [one for one in _path(os.environ) if one not in sys.path]
    sys.path[:1] = [str(Path(what).parent) if what not in ("-c", "-m") else "", *known]
    if "TF_HIPS_CONFIG" in os.environ:  # `import tf_hips` looks at it
        importlib.import_module("tf_hips.errors").print_in_one_line()
    try:
        _run(what, rest)
    except SystemExit as ended:
        return _code_of(ended)
    except BaseException as error:  # noqa: BLE001 - whatever it is
        sys.last_type, sys.last_value, sys.last_traceback = told = sys.exc_info()
        try:
            sys.excepthook(*told)  # type: ignore[arg-type]
        except SystemExit as ended:
            return _code_of(ended)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _code_of(ended: SystemExit) -> int:
    code = _read_by_nobody(ended)
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _read_by_nobody(ended: SystemExit) -> Any:
    """The code, read as the interpreter does: no Python code asks (see `tf_hips.ps.client.exits`).

    Threads of Python's own functions have no frame.
    """
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read = map(found.put, map(operator.attrgetter("code"), [ended]))
    _thread.start_new_thread(collections.deque, (read,))
    return found.get(timeout=_PATIENCE_S)


def _run(what: str, rest: list[str]) -> None:
    if what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")
