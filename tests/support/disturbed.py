# SPDX-License-Identifier: Apache-2.0
"""Trainings under `tf-hips run` whose processes are killed, beside ones that nobody disturbs."""

import os
import re
import subprocess
import sys
from pathlib import Path

PRELUDE = """
import hashlib, os, pathlib, shutil, signal, sys
import keras, numpy as np, psutil
import tf_hips

folder, disturbs = pathlib.Path(sys.argv[1]), sys.argv[2] == "disturbed"


def once(name):
    path = folder / name
    is_new = not path.exists()
    path.touch()
    return disturbs and is_new


def kill_server():
    [server] = [one for one in psutil.Process(os.getppid()).children() if "server" in one.cmdline()]
    server.kill()
"""
"""Before a script: `folder`, `once(name)` (true once in a run that is disturbed), `kill_server`."""


def train(
    folder: Path, script: str, how: str, *arguments: str, parties: int = 2, options: tuple = ()
) -> tuple[set[str], str]:
    """Trains parties of one worker each; what they say behind `END`, and all that was printed.

    Args:
        folder: of the run; its logs are in `logs`.
        script: comes after `PRELUDE`; each worker prints one line that begins with `END`.
        how: "disturbed", or anything else.
        arguments: more of the script.
        parties: how many.
        options: more of `tf-hips run`.
    """
    folder.mkdir()
    (folder / "train.py").write_text(PRELUDE + script)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tf_hips.cli", "run"),
            *("--parties", str(parties), "--workers", "1", "--server"),
            *("--log-dir", str(folder / "logs"), *options),
            *(str(folder / "train.py"), str(folder), how, *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1"},
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    ends = re.findall(r"^\[party\d/worker0\] END (.*)$", printed, re.MULTILINE)
    assert len(ends) == parties, printed
    return set(ends), printed
