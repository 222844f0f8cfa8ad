# SPDX-License-Identifier: Apache-2.0
"""The formatters and the linter of `make check`, for machines that run `make test` alone."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
# `make check` has them itself.
pytestmark = pytest.mark.heavy


def run(*command: str) -> str:
    """What a command that ends well prints."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("check", [("format", "--check", "--diff"), ("check",)], ids=" ".join)
def test_python(check: tuple[str, ...]) -> None:
    run(str(BIN / "ruff"), *check)


def test_cpp() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, which says which sources are ours")
    kinds = ("*.h", "*.cc", "*.cu", "*.cuh", ":!tests/**/golden/**")
    names = run("git", "ls-files", "-co", "--exclude-standard", "--", *kinds).split()
    there = [name for name in names if (ROOT / name).exists()]
    assert there
    run(str(BIN / "clang-format"), "--dry-run", "-Werror", *there)
