# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command still loads: exit code 130 and no traceback."""

import subprocess
import sys

import pytest

# The first import of one of these is interrupted, as by Ctrl-C at that moment.
INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({others!r}):
            sys.stdout.write(f"at {{name}}")
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from {home} import main
sys.stdout.write("started, interrupted ")
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    ("home", "arguments", "others", "first"),
    [
        ("tf_hips.cli", ["info"], ("tf_hips.cli.", "tf_hips.errors"), "tf_hips.cli.arguments"),
        ("tf_hips.cli", ["info"], ("tf_hips.cli.train",), "tf_hips.cli.train"),
        ("tf_hips.cli", ["info"], ("rich",), "rich"),
        ("compll.cli", ["includes"], ("compll.commands", "numpy"), "compll.commands"),
        ("compll.cli", ["includes"], ("numpy",), "numpy"),
    ],
)
def test_ctrl_c_while_it_loads(
    home: str, arguments: list[str], others: tuple[str, ...], first: str
) -> None:
    code = INTERRUPTED.format(home=home, arguments=arguments, others=others)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.startswith(f"started, interrupted at {first}")
