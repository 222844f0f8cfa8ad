# SPDX-License-Identifier: Apache-2.0
"""A server that is told to end: more than once, while it writes; with nobody to read its words."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ps.parties import DEADLINE_S, SITES, Party, expected_rounds, together, train_all
from tests.ps.test_restart import Later, ServerProcess
from tests.support.eventually import eventually
from tf_hips.ps.server import foreground
from tf_hips.ps.session.settings import ServerConfig

pytestmark = pytest.mark.heavy

# Its disk is slow while a file is there; it says when it waits for it, and that it was told to end.
SLOW = """
import os, threading
from pathlib import Path
from tf_hips import cli
from tf_hips.ps.disk import journal
from tf_hips.ps.server.server import Server

base, sync, can_be_left = Path({base!r}), os.fdatasync, Server.can_be_left

def wait_for_the_disk(descriptor):
    while (base / "slow").exists():
        (base / "waits").touch()
        threading.Event().wait(0.01)
    sync(descriptor)

def told(server):
    (base / "told").touch()
    return can_be_left(server)

os.fdatasync, Server.can_be_left = wait_for_the_disk, told
cli.main({arguments!r})
"""


class SlowServer(ServerProcess):
    """A server whose disk can be made slow."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.base = base

    def command(self, *more: str) -> list[str]:
        arguments = super().command(*more)[3:]
        return [sys.executable, "-c", SLOW.format(base=str(self.base), arguments=arguments)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SlowServer]:
    made = SlowServer(tmp_path)
    made.start()
    yield made
    made.end()


def test_a_run_is_kept_however_often_its_server_is_told_to_end(server: SlowServer) -> None:
    a, b = (Party(server.address, site, None) for site in SITES)
    together(a.join, b.join)
    merged = train_all((a, b), 0, 0)
    (server.base / "slow").touch()
    early = Later(lambda: a.train(1, 1))
    eventually((server.base / "waits").exists)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    eventually((server.base / "told").exists)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        server.process.send_signal(number)
    (server.base / "slow").unlink()
    assert server.process.wait(DEADLINE_S) == 0
    server.start()
    merged += b.train(1, 1)
    assert early.result() == merged[1:]
    assert merged == expected_rounds(2)


class Left(BaseException):
    """What the end of a process is in this test."""


class Leavable:
    """A server whose run is kept, and that is told to end."""

    ended: bool

    def __init__(self, config: ServerConfig) -> None:
        Leavable.ended = False

    def start(self) -> None:
        pass

    def wait(self) -> str | None:
        raise SystemExit

    def can_be_left(self) -> bool:
        return True

    def stop(self) -> None:
        Leavable.ended = True


def broken() -> io.TextIOWrapper:
    """Text for a pipe that has lost its reader."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    stream.write("last words")
    return stream


def closed() -> io.TextIOWrapper:
    with Path(os.devnull).open("w") as stream:
        return stream


def test_no_file_of_a_server_has_the_number_of_stdout() -> None:
    """Which was closed before it began; a journal would get what libraries write there."""
    code = (
        "import os, sys\n"
        "from tf_hips.ps.server import foreground\n"
        "from tf_hips.ps.session.settings import ServerConfig\n"
        "def begin(config):\n"
        "    sys.stdout.write('of a script')\n"
        "    sys.stdout.flush()\n"
        "    sys.exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 9)\n"
        "foreground.Server = begin\n"
        "foreground.serve(ServerConfig(parties=('a',), insecure=True))"
    )
    closed_ones = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code]
    assert subprocess.run(closed_ones, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("make", [lambda: None, broken, closed], ids=["none", "broken", "closed"])
def test_a_run_is_kept_whatever_has_become_of_the_output(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a daemon that began without one, where `sys.stdout` is None."""
    stream, is_left = make(), []

    def leave(code: int) -> None:
        is_left.append((code, Leavable.ended))
        raise Left

    monkeypatch.setattr(foreground, "Server", Leavable)
    monkeypatch.setattr(os, "_exit", leave)
    with monkeypatch.context() as patch, pytest.raises(Left):
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        foreground.serve(ServerConfig(parties=SITES, insecure=True))
    assert is_left == [(0, False)]  # without an end for all
    if make is broken:
        with pytest.raises(BrokenPipeError):
            stream.close()
