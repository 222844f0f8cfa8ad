# SPDX-License-Identifier: Apache-2.0
"""Who a launcher names: who failed first, though others may have ended before."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.scripts import SLEEP, python, run
from tf_hips.cli.children import Failure
from tf_hips.cli.processes import Job

pytestmark = pytest.mark.heavy  # processes start, and are waited for, in each of these


def test_the_first_failure_is_the_one_named() -> None:
    late = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n" + SLEEP
    failure, _ = run({"a": late, "b": "raise SystemExit(3)", "c": late})
    assert failure == Failure("b", 3, "exit code 3")


def test_a_child_killed_by_a_signal_is_named_with_it() -> None:
    failure, _ = run({"a": SLEEP, "b": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"})
    assert failure == Failure("b", 128 + 9, "killed by SIGKILL")


class Marking(io.BytesIO):
    """A stream that touches a file when a text has been written to it."""

    def __init__(self, text: bytes, mark: Path) -> None:
        super().__init__()
        self._text, self._mark = text, mark

    def write(self, data: Any) -> int:
        if self._text in data:
            self._mark.touch()
        return super().write(data)


@pytest.mark.parametrize(
    "exception",
    [
        "Traceback (most recent call last):",
        "tf_hips.errors.PeerError: gone",
        "tf-hips train: error: mnist is not there",
    ],
)
def test_the_exception_that_came_first_is_named_even_when_its_process_ends_last(
    tmp_path: Path, exception: str
) -> None:
    seen, pid = tmp_path / "seen", tmp_path / "pid"
    culprit = f"""
        import os, pathlib, sys, time
        sys.stderr.write({exception!r} + "\\nraised\\n")
        sys.stderr.flush()
        path = pathlib.Path({str(pid)!r})
        while not path.exists() or not path.read_text().endswith("\\n"):
            time.sleep(0.01)
        try:
            while True:  # until the launcher has seen the end of the victim
                os.kill(int(path.read_text()), 0)
                time.sleep(0.01)
        except ProcessLookupError:
            sys.exit(4)
        """
    victim = f"""
        import os, pathlib, sys, time
        while not pathlib.Path({str(seen)!r}).exists():
            time.sleep(0.01)
        pathlib.Path({str(pid)!r}).write_text(f"{{os.getpid()}}\\n")
        sys.exit("Traceback (most recent call last):\\nConnectionError: peer gone")
        """
    with Job(out=io.BytesIO(), err=Marking(b"raised", seen)) as job:
        job.start("victim", python(victim), os.environ)
        job.start("culprit", python(culprit), os.environ)
        failure = job.wait()
    assert failure == Failure("culprit", 4, "exit code 4")


ENDED = "tf_hips.errors.PeerError: Server a:1, Step: The run has ended. "


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (ENDED + "Site `east` left the run: SystemExit: no more disk", "east/worker0"),
        (ENDED + "Site `tree` left the run: Site `east` left the run: 3", "east/worker0"),
        ("tf-hips server: error: Site `east` left the run: 3", "east/worker0"),
        # Of a site that is elsewhere, and of a server that cannot tell: nothing to wait for.
        (ENDED + "Site `north` left the run: SystemExit: 3", "west/worker0"),
        (ENDED + "No party called for 3600 s (`--idle-timeout`).", "west/worker0"),
        (
            "tf_hips.errors.ConfigError: `a` is wrong: Site `east` left the run: 3",
            "west/worker0",
        ),
    ],
)
def test_who_left_the_run_is_named_even_when_it_ends_after_those_who_heard_of_it(
    tmp_path: Path, words: str, named: str
) -> None:
    os.mkfifo(gate := tmp_path / "gate")
    # It prints no traceback, and outlives the victim, whose end it sees at the other end.
    culprit = f"import sys; open({str(gate)!r}).read(); sys.exit(4)"
    victim = f"""
        import sys
        gate = open({str(gate)!r}, "w")
        sys.stderr.write({words!r} + "\\n")
        sys.exit(78)
        """
    with Job(out=io.BytesIO(), err=io.BytesIO(), grace_s=0.1) as job:
        job.start("west/worker0", python(victim), os.environ)
        job.start("east/worker0", python(culprit), os.environ)
        failure = job.wait()
    code = {"east/worker0": 4, "west/worker0": 78}[named]
    assert failure == Failure(named, code, f"exit code {code}")


IN_A_STEP = (
    "tf_hips.errors.PeerError: Another rank of this party ended in the middle of a step: rank 1 "
)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (IN_A_STEP + "ended in `fit` with SystemExit: 4.", "west/worker1"),
        ("tf_hips.errors.PeerError: Rank 1 ended in `fit`, without an error.", "west/worker1"),
        ("tf_hips.errors.ProtocolError: Rank 1 failed. KeyError: 3", "west/worker1"),
        # A rank that is elsewhere, and one whose end nobody has seen.
        (IN_A_STEP.replace("1", "7") + "ended in `fit` with SystemExit: 4.", "west/worker0"),
        ("tf_hips.errors.PeerError: Rank 1 gives no sign of life", "west/worker0"),
    ],
)
def test_which_rank_ended_is_named_also_where_its_site_has_ended_the_run(
    tmp_path: Path, words: str, named: str
) -> None:
    gates = [str(tmp_path / name) for name in ("west", "east")]
    for gate in gates:
        os.mkfifo(gate)
    # It outlives both victims.
    culprit = f"import sys; [open(gate).read() for gate in {gates}]; sys.exit(4)"

    def victim(gate: str, said: str, code: int) -> str:
        return f"""
            import sys
            gate = open({gate!r}, "w")
            sys.stderr.write({said!r} + "\\n")
            sys.exit({code})
            """

    of_west = ENDED + "Site `west` left the run: PeerError: " + words.partition(": ")[2]
    with Job(out=io.BytesIO(), err=io.BytesIO(), grace_s=0.1) as job:
        job.start("west/worker0", python(victim(gates[0], words, 1)), os.environ)
        job.start("east/worker0", python(victim(gates[1], of_west, 78)), os.environ)
        job.start("west/worker1", python(culprit), os.environ)
        failure = job.wait()
    code = {"west/worker1": 4, "west/worker0": 1}[named]
    assert failure == Failure(named, code, f"exit code {code}")


def test_a_worker_that_fails_is_named_before_a_follower() -> None:
    with Job(out=io.BytesIO(), err=io.BytesIO()) as job:
        job.start("evaluator", python("raise SystemExit(3)"), os.environ, is_follower=True)
        job.start("a", python("raise SystemExit(4)"), os.environ)
        assert job.wait() == Failure("a", 4, "exit code 4")
