# SPDX-License-Identifier: Apache-2.0
"""Jobs of small Python scripts: output, first failure, exit codes, and nothing left behind."""

import contextlib
import io
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.cli.scripts import SLEEP, Output, python, run
from tests.support.eventually import eventually
from tf_hips.cli.children import Failure
from tf_hips.cli.processes import Job

pytestmark = pytest.mark.heavy  # processes start, and are waited for, in each of these

DEADLINE_S = 20.0


def is_gone(pid: int) -> bool:
    """True when the process has ended; a zombie that nobody has reaped yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def read_pid(path: Path) -> int:
    eventually(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


WRITE_PID = """
import os, pathlib
path = pathlib.Path({path!r})
path.write_text(f"{{os.getpid()}}\\n")
"""


def test_lines_are_prefixed_and_streams_kept_apart() -> None:
    failure, output = run(
        {"a": "import sys; print('one'); print('two', file=sys.stderr)", "b": "print('three')"}
    )
    assert failure is None
    assert sorted(output.lines()) == ["[a] one", "[b] three"]
    assert output.errors() == ["[a] two"]


def test_lines_of_many_writers_never_interleave() -> None:
    body = """
        import sys
        for number in range(300):
            for part in ("<", "{0}" * 50, ">"):
                sys.stdout.write(part)
                sys.stdout.flush()
            sys.stdout.write("\\n")
        """
    _, output = run({role: body.format(role) for role in "abcd"})
    assert len(output.lines()) == 1200
    assert set(output.lines()) == {f"[{role}] <{role * 50}>" for role in "abcd"}


def test_text_without_a_newline_is_a_line() -> None:
    _, output = run({"a": "import sys; sys.stdout.write('end')"})
    assert output.lines() == ["[a] end"]


def test_a_rewritten_line_keeps_its_last_state() -> None:
    _, output = run({"a": r"import sys; sys.stdout.write('\r 1/3\r 2/3\r 3/3 done\nnext\r\n')"})
    assert output.lines() == ["[a]  3/3 done", "[a] next"]


def test_only_the_last_update_of_a_keras_bar_is_kept() -> None:
    body = r"""
        import sys
        for step in (1, 2, 3):
            bar = f"\x1b[1m{step}/3\x1b[0m \x1b[32m\u2501\u2501\x1b[0m loss: 1\n"
            sys.stdout.buffer.write(bar.encode())
            sys.stdout.flush()
        print("Epoch 2/3")
        """
    _, output = run({"a": body})
    assert output.lines() == ["[a] 3/3 \u2501\u2501 loss: 1", "[a] Epoch 2/3"]


def test_success_of_all_is_success_and_a_service_ends_with_them(tmp_path: Path) -> None:
    mark = tmp_path / "done"
    service = f"""
        import pathlib, time
        while not pathlib.Path({str(mark)!r}).exists():
            time.sleep(0.01)
        print("served")
        """
    failure, output = run(
        {"server": service, "a": f"import pathlib; pathlib.Path({str(mark)!r}).touch()"},
        services=("server",),
    )
    assert failure is None
    assert output.lines() == ["[server] served"]


def test_a_failing_service_fails_the_job() -> None:
    failure, _ = run({"server": "raise SystemExit(5)", "a": SLEEP}, services=("server",))
    assert failure == Failure("server", 5, "exit code 5")


def test_a_child_is_tied_to_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not stop at the terminal, and does not begin where the launcher has died before."""
    body = """
        import signal
        for number in (signal.SIGTTIN, signal.SIGTTOU):
            assert signal.getsignal(number) == signal.SIG_IGN
        """
    failure, output = run({"tied": body})
    assert failure is None, output.errors()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # of a launcher that is no parent any more
    failure, _ = run({"orphan": "raise SystemExit(1)"})
    assert failure == Failure("orphan", 128 + 9, f"exit code {128 + 9}")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "deaf"
    deaf = f"""
        import pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path({str(mark)!r}).touch()
        time.sleep(600)
        """
    failing = f"""
        import pathlib, time
        while not pathlib.Path({str(mark)!r}).exists():
            time.sleep(0.01)
        raise SystemExit(1)
        """
    begin = time.monotonic()
    output = Output()
    with Job(out=output.out, err=output.err, grace_s=0.3) as job:
        deaf_pid = job.start("deaf", python(deaf), os.environ)
        job.start("b", python(failing), os.environ)
        failure = job.wait()
    assert failure == Failure("b", 1, "exit code 1")
    assert is_gone(deaf_pid)
    assert time.monotonic() - begin < DEADLINE_S


def test_a_follower_has_time_after_the_last_worker_but_not_for_ever() -> None:
    for body, failure in (
        ("import time; time.sleep(0.5)", None),
        (SLEEP, Failure("evaluator", 1, "still there 2 s after the last worker")),
    ):
        output = Output()
        with Job(out=output.out, err=output.err) as job:
            pid = job.start("evaluator", python(body), os.environ, is_follower=True)
            job.start("server", python(SLEEP if failure else "pass"), os.environ, is_service=True)
            job.start("a", python("pass"), os.environ)
            assert job.wait(service_grace_s=0.3, follower_grace_s=2.0) == failure
        assert is_gone(pid)


def test_a_follower_that_fails_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(gate := tmp_path / "gate")  # the worker waits there until the follower is given up
    said: list[str] = []

    def say(job: Job, text: str) -> None:
        said.append(text)
        if text.endswith("the workers go on"):
            gate.write_text("go on")

    monkeypatch.setattr(Job, "_say", say)
    attempts: list[int] = []
    output = Output()
    with Job(out=output.out, err=output.err) as job:

        def start(attempt: int) -> None:
            attempts.append(attempt)
            job.start("evaluator", python("raise SystemExit(3)"), os.environ, is_follower=True)

        job.start("a", python(f"print(open({str(gate)!r}).read())"), os.environ)
        job.start_group("evaluator", start, 1)
        failure = job.wait()
    assert failure == Failure("evaluator", 3, "exit code 3")
    assert attempts == [0, 1]
    assert output.lines() == ["[a] go on"]
    assert said == [
        "evaluator failed (exit code 3); evaluator starts again (1 of 1)",
        "evaluator failed (exit code 3); the workers go on",
    ]


def test_a_service_that_stays_is_ended_and_fails_the_job() -> None:
    output = Output()
    with Job(out=output.out, err=output.err) as job:
        pid = job.start("server", python(SLEEP), os.environ, is_service=True)
        job.start("a", python("pass"), os.environ)
        failure = job.wait(service_grace_s=0.3)
    assert failure == Failure("server", 1, "still there 0.3 s after the last worker", is_stuck=True)
    assert is_gone(pid)


def test_grandchildren_end_with_their_parent(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    body = f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", {(WRITE_PID.format(path=str(path)) + SLEEP)!r}])
        import pathlib, time
        while not pathlib.Path({str(path)!r}).exists():
            time.sleep(0.01)
        """
    failure, _ = run({"a": body})
    assert failure is None
    eventually(lambda: is_gone(read_pid(path)))


def test_wait_for_file_returns_early_when_a_child_fails(tmp_path: Path) -> None:
    output = Output()
    with Job(out=output.out, err=output.err) as job:
        job.start("server", python("raise SystemExit(7)"), os.environ, is_service=True)
        assert job.wait_for_file(tmp_path / "never", DEADLINE_S) is None
        assert job.wait() == Failure("server", 7, "exit code 7")


@pytest.mark.parametrize("max_restarts", [1, 0])
def test_a_service_may_be_killed_before_its_file_is_there(
    tmp_path: Path, max_restarts: int
) -> None:
    path = tmp_path / "address"
    bodies = (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        f"import pathlib, time; pathlib.Path({str(path)!r}).write_text('here'); time.sleep(600)",
    )
    with Job(out=io.BytesIO(), err=io.BytesIO()) as job:

        def start(attempt: int) -> None:
            job.start("server", python(bodies[attempt]), os.environ, is_service=True)

        job.start_group("server", start, max_restarts, only_killed=True)
        assert job.wait_for_file(path, DEADLINE_S) == ("here" if max_restarts else None)
        if max_restarts:
            job.start("worker", python("raise SystemExit(3)"), os.environ)
            assert job.wait() == Failure("worker", 3, "exit code 3")
        else:
            assert job.wait() == Failure("server", 128 + 9, "killed by SIGKILL")


def test_wait_for_file_has_a_deadline(tmp_path: Path) -> None:
    output = Output()
    with Job(out=output.out, err=output.err) as job:
        job.start("server", python(SLEEP), os.environ, is_service=True)
        with pytest.raises(TimeoutError, match=r"never did not appear within 0\.2 s"):
            job.wait_for_file(tmp_path / "never", 0.2)


def test_a_job_may_open_more_files_than_a_process_mostly_has() -> None:
    """Its children may open as many as without it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(one.name) for one in Path("/proc/self/fd").iterdir()}
    few = [number for number in range(100) if number not in taken][16]
    output = Output()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
        with Job(out=output.out, err=output.err) as job:
            for number in range(10):  # two pipes each
                job.start(f"w{number}", ["sh", "-c", "ulimit -Sn && ulimit -Hn"], os.environ)
            assert job.wait() is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    told = [line.split()[1] for line in output.lines()]
    hard = "unlimited" if before[1] == resource.RLIM_INFINITY else str(before[1])
    assert sorted(told) == sorted([str(few), hard] * 10)


def test_handlers_are_restored() -> None:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    }
    run({"a": "pass"})
    assert {number: signal.getsignal(number) for number in before} == before


LAUNCHER = """
import os, sys
from tf_hips.cli import party
from tf_hips.cli.processes import Job
with Job(grace_s=1.0) as job:
    for role, body in {scripts!r}.items():
        job.start(role, [sys.executable, "-c", body], os.environ)
    failure = job.wait()
sys.exit(party.report(failure))
"""


def launch(scripts: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER.format(scripts=scripts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["interrupt", "terminate"],
)
def test_a_signal_to_the_launcher_ends_all(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    paths = {role: tmp_path / role for role in ("a", "b")}
    launcher = launch(
        {role: WRITE_PID.format(path=str(path)) + SLEEP for role, path in paths.items()}
    )
    try:
        pids = [read_pid(path) for path in paths.values()]
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=DEADLINE_S)
    finally:
        launcher.kill()
    assert launcher.returncode == code
    assert errors.splitlines()[-1] == f"tf-hips: got {number.name}; all processes ended"
    assert all(is_gone(pid) for pid in pids)


WAITS_FOR_A_SERVICE = """
import os, sys
from tf_hips.cli import party
from tf_hips.cli.processes import Job
with Job(grace_s=1.0) as job:
    job.start("server", [sys.executable, "-c", {service!r}], os.environ, is_service=True)
    job.start("a", [sys.executable, "-c", {worker!r}], os.environ)
    failure = job.wait(service_grace_s=600.0)
sys.exit(party.report(failure))
"""


def test_a_signal_is_heard_while_a_service_ends(tmp_path: Path) -> None:
    """The service signals its launcher as soon as the launcher has seen the worker's end."""
    mark = tmp_path / "watching"
    worker = f"""
        import pathlib, time
        while not pathlib.Path({str(mark)!r}).exists():
            time.sleep(0.01)
        """
    service = f"""
        import os, pathlib, signal, time
        children = pathlib.Path(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children")
        while len(children.read_text().split()) != 2:
            time.sleep(0.01)
        pathlib.Path({str(mark)!r}).touch()
        while len(children.read_text().split()) != 1:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        """
    script = WAITS_FOR_A_SERVICE.format(
        service=textwrap.dedent(service), worker=textwrap.dedent(worker)
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr == "tf-hips: got SIGINT; all processes ended\n"


def test_children_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    launcher = launch({"a": deaf + WRITE_PID.format(path=str(path)) + SLEEP})
    try:
        pid = read_pid(path)
        launcher.kill()
        launcher.communicate(timeout=DEADLINE_S)
        eventually(lambda: is_gone(pid))
    finally:
        launcher.kill()


def test_a_reader_that_goes_away_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    body = (
        WRITE_PID.format(path=str(path))
        + "import time\nwhile True:\n    print('x' * 1000, flush=True); time.sleep(0.01)"
    )
    launcher = launch({"a": body})
    try:
        pid = read_pid(path)
        if launcher.stdout is not None:
            launcher.stdout.close()
        code = launcher.wait(timeout=DEADLINE_S)
    finally:
        launcher.kill()
    assert code == 128 + signal.SIGPIPE
    assert is_gone(pid)


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[IO[bytes], int]]:
    """What reads a pipe that takes no more, and its descriptor to write to."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, contextlib.ExitStack() as stack:
        stack.callback(os.close, writing)
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(select.PIPE_BUF))
        os.set_blocking(writing, True)
        yield reader, writing


SIGNALS = "import os, signal; print('x', flush=True); os.kill(os.getppid(), signal.SIGTERM)\n"


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_signal_is_heard_while_nobody_reads_the_output(buffering: int) -> None:
    with full_pipe() as (reader, writing):
        # Without an end of its own the job ends once somebody reads.
        late = threading.Timer(DEADLINE_S, lambda: reader.read(1 << 16))
        late.daemon = True
        late.start()
        began = time.monotonic()
        out = os.fdopen(writing, "wb", buffering, closefd=False)
        with out, Job(out=out, err=io.BytesIO(), grace_s=0.3) as job:
            job.start("a", [sys.executable, "-S", "-c", SIGNALS + SLEEP], os.environ)
            assert job.wait() == Failure("launcher", 128 + 15, "got SIGTERM")
        late.cancel()
        assert time.monotonic() - began < DEADLINE_S


def test_a_launcher_of_which_nobody_reads_a_word_ends() -> None:
    script = LAUNCHER.format(scripts={"a": SIGNALS + SLEEP})
    with full_pipe() as (_, writing):
        launcher = subprocess.Popen([sys.executable, "-c", script], stdout=writing, stderr=writing)
        try:
            assert launcher.wait(timeout=DEADLINE_S) == 128 + 15
        finally:
            launcher.kill()
            launcher.wait()
