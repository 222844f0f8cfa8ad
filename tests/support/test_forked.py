# SPDX-License-Identifier: Apache-2.0
"""Forked programs are what `python ...` is: arguments, environment, streams, ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked, launched

pytestmark = pytest.mark.heavy  # processes start

TELL = (
    "import os, sys\n"
    "print(__name__, sys.argv, os.environ['MINE'], os.getcwd(), sys.stdin.read())\n"
    "print('warned', file=sys.stderr)\n"
)


@pytest.mark.parametrize("how", ["text", "module", "script"])
def test_a_program_has_its_arguments_and_streams(tmp_path: Path, how: str) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    command = {
        "text": ["-c", TELL, "a", "--b"],
        "module": ["-m", "tell", "a", "--b"],
        "script": [str(tmp_path / "tell.py"), "a", "--b"],
    }[how]
    words, environment = [sys.executable, *command], {**os.environ, "MINE": "7"}
    real = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    done = forked.run(words, timeout=20, cwd=tmp_path, env=environment)
    assert done.returncode == real.returncode == 0
    assert (done.stdout, done.stderr) == (real.stdout, real.stderr)
    assert done.stderr == "warned\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("raise SystemExit('no more disk')", 1),
        ("raise OSError('no more disk')", 1),
        ("import atexit; atexit.register(print, 'no more disk')", 0),
        ("import sys; sys.excepthook = lambda *_: sys.exit(78); raise KeyError", 78),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_a_program_ends_as_in_python(text: str, code: int) -> None:
    done = forked.run([sys.executable, "-c", text], timeout=20)
    assert done.returncode == code, done.stderr
    assert ("no more disk" in done.stdout + done.stderr) == ("disk" in text)


def test_a_program_hears_lines_and_signals() -> None:
    program = forked.Program(
        [sys.executable, "-c", "import sys\nfor line in sys.stdin: print(line * 2, end='')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write("x\n")
    assert [program.stdout.readline() for _ in range(2)] == ["x\n", "x\n"]
    assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.terminate()
    assert program.wait(20) == -signal.SIGTERM
    program.stdin.close()
    program.stdout.close()


def test_one_that_does_not_end_in_time_is_killed() -> None:
    waits = "import threading; threading.Event().wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run([sys.executable, "-c", waits], timeout=0.2)
    with pytest.raises(ValueError, match=r"must be one of this Python\. Received: sleep"):
        forked.Program(["sleep", "1"])


def test_a_forked_launcher_leaves_no_child_behind(tmp_path: Path) -> None:
    """Its children are its own, lead groups, and begin with the signals that a program has."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys\n"
        "print(os.getpid() == os.getpgid(0), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
        "print(len(os.listdir('/proc/self/fd')))\n"
        "sys.exit(5 if os.environ['HOROVOD_RANK'] == '1' else 0)\n"
    )
    done = launched.run(["party", "-np", "2", "--", str(script)], timeout=30)
    assert done.returncode == 5, done.stderr
    assert "[local/worker1] True True\n" in done.stdout
    assert "[local/worker1] 4\n" in done.stdout  # three streams, and the folder that is listed
    last = done.stderr.splitlines()[-1]
    assert last == "tf-hips: local/worker1 failed first (exit code 5); all processes ended"
