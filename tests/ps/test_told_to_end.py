# SPDX-License-Identifier: Apache-2.0
"""A server that is told to end more than once, while it still writes what it has accepted."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ps.parties import DEADLINE_S, SITES, Party, expected_rounds, together, train_all
from tests.ps.test_restart import Later, ServerProcess
from tests.support.eventually import eventually

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
