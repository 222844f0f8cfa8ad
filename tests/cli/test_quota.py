# SPDX-License-Identifier: Apache-2.0
"""Workers with a share of a core: how long they rest, and a real one under the launcher."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tf_hips.cli import quota

# Works until it was stopped and let go five times, or gives up.
SCRIPT = """
import os, pathlib, signal, sys, time
looks = []
signal.signal(signal.SIGCONT, lambda *_: looks.append((time.monotonic(), time.process_time())))
rank = os.environ["HOROVOD_RANK"]
while time.process_time() < (0.1 if rank == "0" else 10) and len(looks) < 5:
    pass
(wall, used), (wall_after, used_after) = [*looks, (0, 0), (0, 0)][0], [(1, 9), *looks][-1]
share = (used_after - used) / (wall_after - wall)
text = f"{len(looks)} {share} {os.environ.get('TF_HIPS_SLOWDOWN')}"
pathlib.Path(sys.argv[1], rank).write_text(text)
"""


@pytest.mark.parametrize(("share", "cores"), [(0.2, 1), (0.5, 4), (0.01, 2), (1.5, 2)])
def test_the_share_holds_over_time(share: float, cores: int) -> None:
    bucket = quota.Bucket(share)
    elapsed = used = 0.0
    for _ in range(2000):
        run_s = bucket.run_s(cores)
        rest_s = bucket.spend(run_s, cores * run_s)
        elapsed += run_s
        used += cores * run_s
        if rest_s:
            bucket.spend(rest_s, 0.0)
            elapsed += rest_s
    assert used / elapsed == pytest.approx(share, rel=0.02)


def test_what_is_below_its_share_never_rests_and_saves_up_one_period() -> None:
    bucket = quota.Bucket(0.5, period_s=0.1)
    assert not any(bucket.spend(0.1, 0.04) for _ in range(50))
    # However long it rests, 50 ms are there, and no more.
    assert bucket.spend(10.0, 0.0) == 0.0
    assert bucket.spend(0.05, 0.05) == 0.0
    assert bucket.spend(0.0, 0.02) == pytest.approx(0.04)
    assert bucket.run_s(2) > 0


def test_cpu_time_of_a_process_is_that_of_all_its_threads() -> None:
    before, own = quota.cpu_s(os.getpid()), time.process_time()
    sum(range(300_000))
    used, expected = quota.cpu_s(os.getpid()) - before, time.process_time() - own
    assert used == pytest.approx(expected, abs=0.02)
    with pytest.raises(OSError, match=r"argument|process"):
        quota.cpu_s(2**22 - 1)


def test_a_worker_is_stopped_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "tf_hips.cli", "run", "--parties", "1", "--workers", "2"]
    command += ["--slowdown", "worker=1:cpu=20%", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    free, held = ((tmp_path / str(rank)).read_text().split() for rank in range(2))
    assert (free[0], held[0], held[2]) == ("0", "5", "None")
    # On a machine that is busy it may get less, and never more for long.
    assert float(held[1]) < 0.3
