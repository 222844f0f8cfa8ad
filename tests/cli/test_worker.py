# SPDX-License-Identifier: Apache-2.0
"""A worker on another host ends when the connection that started it does."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import children
from tf_hips import config
from tf_hips.cli import worker

pytestmark = pytest.mark.heavy  # processes start, and are waited for, in each of these

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
STAYS = (
    "import threading\nimport os\nprint(os.getpid(), flush=True)\n"
    "try:\n    threading.Event().wait()\nfinally:\n    open('left', 'w').close()\n"
)


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", worker.__name__, sys.executable, "-c", script],
        env={
            **os.environ,
            **worker.environment(config.Run(run="r1")),
            "PYTHONPATH": str(Path.cwd()),
        },
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )


# The stubborn one waits for the grace that the other does not use.
@pytest.mark.parametrize("before", ["", STUBBORN], ids=["polite", "stubborn"])
def test_a_worker_ends_when_nobody_reads_it(before: str, tmp_path: Path) -> None:
    process = start(before + STAYS, tmp_path)
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.stdout.close()
    assert process.wait(20) == (-9 if before else -15)


def test_what_watches_a_worker_ends_with_it(tmp_path: Path) -> None:
    process = start("from tf_hips import config\nprint(config.current().run)\n", tmp_path)
    # The output ends when both have closed it.
    assert process.communicate(timeout=20)[0] == "r1\n"
    assert process.returncode == 0


def test_what_watches_is_no_child_of_the_worker(tmp_path: Path) -> None:
    process = start(STAYS, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    assert psutil.Process(process.pid).children() == []
    watching = [one for one in children.left_behind() if worker.__name__ in one.cmdline()]
    assert len(watching) == 1
    process.kill()
    process.communicate(timeout=20)
    assert psutil.wait_procs(watching, timeout=20)[1] == []
