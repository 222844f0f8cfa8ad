# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command still loads, or waits for others: exit code 130 and no traceback."""

import contextlib
import select
import signal
import socket
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
        ("tf_hips.cli", ["info"], ("tf_hips.cli.info",), "tf_hips.cli.info"),
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


@pytest.mark.heavy
def test_ctrl_c_waits_for_no_server_that_is_silent() -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        servers = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in silent)
        asking = subprocess.Popen(
            [
                *(sys.executable, "-m", "tf_hips.cli", "status", "--insecure"),
                *("--server", servers, "--timeout", "600"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(asking.wait)
        stack.callback(asking.kill)
        # Channels of a process connect one after the other, so one of them is asked by now.
        for one in select.select(silent, [], [], 30)[0]:
            stack.enter_context(one.accept()[0])
        asking.send_signal(signal.SIGINT)
        said = asking.communicate(timeout=30)[1]
        assert (asking.returncode, said) == (130, "")
