# SPDX-License-Identifier: Apache-2.0
"""What `import tf_hips.robust` brings: little, and everything by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from tf_hips import robust

PROGRAM = """
import sys
import tf_hips.robust
lazy = {"tf_hips.robust.attacks", "tf_hips.robust.detox"}
assert not lazy & {*sys.modules}, lazy & {*sys.modules}
import tf_hips.ps.rules
assert "tf_hips.robust.attacks" not in sys.modules
assert tf_hips.robust.attacks.constant().name == "constant"
from tf_hips.robust import detox
assert detox is tf_hips.robust.detox is sys.modules["tf_hips.robust.detox"]
from tf_hips.robust import *
assert attacks.NAMES and krum().text == "krum(f=auto)"
"""


def test_who_starts_imports_no_attacks_and_no_groups() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


def test_all_names_are_there() -> None:
    assert {*robust.__all__} <= {*dir(robust)}
    assert all(getattr(robust, name) is not None for name in robust.__all__)
    with pytest.raises(AttributeError, match=r"'tf_hips\.robust' has no attribute 'attack'"):
        robust.attack  # noqa: B018
