# SPDX-License-Identifier: Apache-2.0
"""What README shows works as it stands: its Python blocks run, its commands and files exist."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support.ranks import start_alone

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.tf
@pytest.mark.parametrize("block", BLOCKS)
def test_python_block_runs_as_one_worker(block: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block, encoding="utf-8")
    assert "Epoch 2/2" in start_alone(run_script, tmp_path, deadline_s=50)


def run_script() -> None:
    """In a process that has TensorFlow already."""
    runpy.run_path("train.py", run_name="__main__")


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
