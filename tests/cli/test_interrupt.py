# SPDX-License-Identifier: Apache-2.0
"""What comes from outside: Ctrl-C while a command still loads, or waits for others, which is exit
code 130 and no traceback; a terminal, or streams, that are closed.
"""

import contextlib
import select
import signal
import socket
import subprocess
import sys

import pytest

from tf_hips import cli
from tf_hips.ps.session.settings import ServerConfig

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_ends_in_peace_and_leaves_what_is_ignored(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP comes where its terminal is closed, and is ignored under nohup and `tf-hips up`."""
    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in ends}
    told: list[object] = []

    def serve(config: ServerConfig, announce: object) -> None:
        handler = signal.getsignal(number)
        if callable(handler):
            handler(number, None)
        told.append(handler)

    monkeypatch.setattr("tf_hips.ps.server.foreground.serve", serve)
    try:
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(number, handler)
            with pytest.raises(SystemExit) as ended:
                cli.main(["server", "--parties", "a", "--insecure"])
            assert ended.value.code == 0
            assert told == [signal.SIG_IGN] * (handler == signal.SIG_IGN)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_streams_that_the_caller_has_closed_lead_nowhere() -> None:
    code = (
        "import os, sys\nfrom tf_hips import cli\n"
        "try:\n    cli.main(['run', '--no-such-option', 'train.py'])\n"
        "except SystemExit as ended:\n    code = ended.code\n"
        "print('not into what is opened next')\nbehind = os.open('/dev/null', 0)\n"
        "inherited = os.system('echo >&1 && echo >&2 && read line')\n"
        "sys.exit(0 if (code, behind > 2, inherited >> 8) == (2, True, 1) else 9)"
    )
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed, check=False, timeout=30).returncode == 0
