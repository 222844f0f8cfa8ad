# SPDX-License-Identifier: Apache-2.0
"""The guards around every test: each is seen to catch what it is for, in a pytest of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.golden import Golden

ROOT = Path(__file__).resolve().parents[2]


def run_planted(folder: Path, source: str) -> "subprocess.CompletedProcess[str]":
    """Runs pytest, with our conftest as a plugin, on one test file with this source."""
    test = folder / "test_planted.py"
    test.write_text(source, encoding="utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"),
            *("-c", ROOT / "pyproject.toml", "--rootdir", folder, test),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def assert_gone(pid_file: Path) -> None:
    pid = int(pid_file.read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.heavy
def test_an_orphan_fails_the_session_and_is_ended(tmp_path: Path) -> None:
    done = run_planted(
        tmp_path,
        "import subprocess\n"
        "def test_leaks():\n"
        "    subprocess.run(['sh', '-c', 'sleep 300 & echo $! >pid'], check=True)\n",
    )
    assert done.returncode == 1, done.stdout
    assert "left these processes behind" in done.stdout
    assert "sleep 300" in done.stdout
    assert "1 passed, 1 error" in done.stdout.splitlines()[-1]
    assert_gone(tmp_path / "pid")


@pytest.mark.heavy
def test_a_late_test_is_unwound(tmp_path: Path) -> None:
    done = run_planted(
        tmp_path,
        "import pathlib, time, pytest\n"
        "@pytest.mark.timeout(0.5)\n"
        "def test_hangs():\n"
        "    try:\n"
        "        time.sleep(300)\n"
        "    finally:\n"
        "        pathlib.Path('unwound').touch()\n",
    )
    assert done.returncode == 1, done.stdout
    assert "Timeout (>0.5s)" in done.stdout
    assert (tmp_path / "unwound").exists()


@pytest.mark.heavy
def test_a_test_that_no_signal_reaches_is_ended_with_its_children(tmp_path: Path) -> None:
    done = run_planted(
        tmp_path,
        "import signal, subprocess, time, pytest\n"
        "from tests import conftest\n"
        "conftest.GRACE_S = 0.5\n"
        "@pytest.mark.timeout(0.5)\n"
        "def test_stuck():\n"
        "    subprocess.run(['sh', '-c', 'sleep 300 & echo $! >pid'], check=True)\n"
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "    time.sleep(300)\n",
    )
    assert done.returncode == 3, done.stdout
    assert "test_stuck ignored its deadline" in done.stderr
    assert "test_planted.py" in done.stderr
    assert_gone(tmp_path / "pid")


def test_golden_compares_and_updates(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is missing"):
        Golden(tmp_path / "golden", update=False).check("a.txt", "one\n")
    Golden(tmp_path / "golden", update=True).check("a.txt", "one\n")
    Golden(tmp_path / "golden", update=False).check("a.txt", "one\n")
    with pytest.raises(AssertionError, match=r"differs[\s\S]*-one\n\+two"):
        Golden(tmp_path / "golden", update=False).check("a.txt", "two\n")


@pytest.mark.heavy
def test_a_group_stays_in_one_worker() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", "-v"),
            *("-p", "no:cacheprovider", "tests/cli/test_output.py"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    workers = re.findall(r"^\[(gw\d)\] .* PASSED ", done.stdout, re.MULTILINE)
    assert len(workers) >= 10
    assert len(set(workers)) == 1
