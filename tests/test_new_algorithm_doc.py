# SPDX-License-Identifier: Apache-2.0
"""docs/new-algorithm.md, from top to bottom: its files are written, its commands run, and what they
print is what the page shows. `...` in the page stands for any text.

`make test` leaves out what trains and what computes with a million numbers, `make test-all` none.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import hurried

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/new-algorithm.md").read_text(encoding="utf-8")
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A command's deadline: the slowest one trains with a server and two workers.
DEADLINE_S = 150
LONG = r"tf-hips run|python try\.py"


def steps() -> list[tuple[str, str]]:
    """(file, content) and (command, output) in the order of the page; commands begin with `$ `."""
    found = [(match.start(), [(match[1], match[2])]) for match in FILE.finditer(PAGE)]
    for match in CONSOLE.finditer(PAGE):
        parts = re.split(r"^(\$ .*)\n", match[1], flags=re.MULTILINE)
        assert parts[0] == "", match[1]
        found.append((match.start(), list(zip(parts[1::2], parts[2::2], strict=True))))
    return [step for _, group in sorted(found) for step in group]


@pytest.mark.tf
@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quickly", "whole"]
)
def test_the_page_runs_as_it_stands(tmp_path: Path, is_whole: bool) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "TF_HIPS_CACHE": str(tmp_path / "cache"),
        "CXX": str(hurried.compiler(tmp_path)),
        hurried.HURRY: "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "1",
        "LC_ALL": "C",
    }
    folder = tmp_path / "work"
    folder.mkdir()
    commands = 0
    for name, text in steps():
        if not name.startswith("$ "):
            (folder / name).write_text(text, encoding="utf-8")
            continue
        commands += 1
        if not is_whole and re.search(LONG, name):
            continue
        done = subprocess.run(
            ["bash", "-c", name[2:]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        shown = "\n".join(line for line in done.stdout.splitlines() if "absl" not in line)
        expected = re.escape(text.rstrip("\n")).replace(re.escape("..."), ".*")
        assert re.fullmatch(expected, shown), f"{name}\n{shown}"
        if "tf-hips run" in name:
            weights = {line.split()[-1] for line in shown.splitlines()}
            assert len(weights) == 1, shown
    assert commands == len(re.findall(r"^\$ ", PAGE, re.MULTILINE)) >= 8
