# SPDX-License-Identifier: Apache-2.0
"""A worker on another host ends when the connection that started it does."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import children, hurried
from tf_hips import config
from tf_hips.cli import arguments, worker
from tf_hips.ops.specifications import CACHE

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


SPECIFICATION = Path(__file__).parents[1] / "ops" / "mine.pse"


def test_a_specification_of_the_compression_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a host that has neither the file nor a codec of it in its cache."""
    theirs = tmp_path / "theirs"
    hurried.cache_of_its_own(tmp_path, monkeypatch)
    text = arguments.codec(f"error_feedback({SPECIFICATION}(2, 1))")
    variables = worker.environment(config.Run(compression=text))
    script = (
        "from tf_hips import config\n"
        "from tf_hips.ops import parse\n"
        "print(parse(config.current().compression).text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", worker.__name__, sys.executable, "-c", script],
        env={**os.environ, **variables, CACHE: str(theirs), "PYTHONPATH": str(Path.cwd())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{text}\n"


def test_a_specification_of_another_content_is_refused(tmp_path: Path) -> None:
    variables = {
        **worker.environment(config.Run()),
        "TF_HIPS_CONFIG_SPECIFICATIONS": '{"mine@0123456789abcdef": "nothing"}',
    }
    done = subprocess.run(
        [sys.executable, "-m", worker.__name__, sys.executable, "-c", "print(1)"],
        env={**os.environ, **variables, CACHE: str(tmp_path), "PYTHONPATH": str(Path.cwd())},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "SpecificationError: `mine@0123456789abcdef` must have that content" in done.stderr


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
