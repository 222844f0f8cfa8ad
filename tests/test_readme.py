# SPDX-License-Identifier: Apache-2.0
"""What README shows works as it stands: its Python blocks run, its commands and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.tf
@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs_as_one_worker(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Epoch 2/2" in done.stdout


def test_there_is_an_example_and_no_more_than_200_lines() -> None:
    assert BLOCKS
    assert len(README.splitlines()) <= 200


def test_every_verb_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= verbs
    assert not [verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)]


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"@[A-Z]+@|\bTBD\b", README)
