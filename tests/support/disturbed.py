# SPDX-License-Identifier: Apache-2.0
"""Trainings under `tf-hips run` whose processes are killed, beside ones that nobody disturbs."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import launched, ranks

KERAS = "import keras\nimport tf_hips\n"
PRELUDE = """
import hashlib, os, pathlib, shutil, signal, sys
import numpy as np, psutil

folder, disturbs = pathlib.Path(sys.argv[1]), sys.argv[2] == "disturbed"


def once(name):
    path = folder / name
    is_new = not path.exists()
    path.touch()
    return disturbs and is_new


def kill_server():
    [server] = [one for one in psutil.Process(os.getppid()).children() if one.name() == "server"]
    server.kill()
"""
"""Before a script: `folder`, `once(name)` (true once in a run that is disturbed), `kill_server`."""


def launch(
    folder: Path,
    script: str,
    *arguments: str,
    parties: int = 2,
    options: Sequence[str] = (),
    timeout_s: float = 150,
    uses_tensorflow: bool = True,
) -> tuple[int, str]:
    """Runs a script as parties of one worker each; the exit code, and all that was printed.

    Args:
        folder: gets the script; its path is the first argument.
        script: the text.
        arguments: those behind it.
        parties: how many.
        options: of `tf-hips run`.
        timeout_s: seconds that it may take.
        uses_tensorflow: whether the script does.
    """
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    done = launched.run(
        [
            *("run", "--parties", str(parties), "--workers", "1", *options),
            *(str(folder / "train.py"), str(folder), *arguments),
        ],
        timeout=timeout_s,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),  # with the tests
            "TF_NUM_INTRAOP_THREADS": "1",
        },
        zygote=ranks.the_zygote() if uses_tensorflow else None,
    )
    return done.returncode, done.stdout + done.stderr


def train(
    folder: Path,
    script: str,
    how: str,
    *arguments: str,
    parties: int = 2,
    options: Sequence[str] = (),
    imports: str = KERAS,
) -> tuple[set[str], str]:
    """Trains to the end; what workers say behind `END`, and all that was printed.

    Args:
        folder: as for `launch`; logs are in `logs`.
        script: comes after `PRELUDE`; each worker prints one line that begins with `END`.
        how: "disturbed", or anything else.
        arguments: more of the script.
        parties: how many.
        options: more of `tf-hips run`.
        imports: lines before `PRELUDE`.
    """
    options = ("--server", "--log-dir", str(folder / "logs"), *options)
    code, printed = launch(
        *(folder, imports + PRELUDE + script, how, *arguments),
        parties=parties,
        options=options,
        uses_tensorflow=bool(imports),
    )
    assert code == 0, printed
    ends = re.findall(r"^\[party\d/worker0\] END (.*)$", printed, re.MULTILINE)
    assert len(ends) == parties, printed
    return set(ends), printed
