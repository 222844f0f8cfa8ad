# SPDX-License-Identifier: Apache-2.0
"""What is known at a script's exit of the code that it ends with."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy  # servers start in most of these

_BEGIN = """
import atexit, sys
from tf_hips.ps.client import exits
exits.watch()
atexit.register(lambda: print("reason:", exits.reason(None)))
"""


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("", 0, "None"),
        ("sys.exit()", 0, "None"),
        ("sys.exit(0)", 0, "None"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("sys.exit('no more disk')", 1, "SystemExit: no more disk"),
        # Caught, and looked at: the script goes on, and ends well.
        ("try:\n sys.exit(3)\nexcept SystemExit as error:\n assert error.code == 3", 0, "None"),
        ("try:\n sys.exit(3)\nfinally:\n print('last words')", 3, "SystemExit: 3"),
        ("import threading\nthreading.Thread(target=sys.exit, args=[3]).start()", 0, "None"),
    ],
)
def test_the_exit_code_is_known_at_exit(end: str, code: int, reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + end], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines()[-1] == f"reason: {reason}"
    assert done.stderr == ("no more disk\n" if "disk" in reason else "")
