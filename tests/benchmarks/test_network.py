# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: what their links let through, and that nothing of them stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import network

MBIT = 40.0
BYTES = 1_500_000

SERVER = """
import socket, time
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
connection, _ = server.accept()
total, began = 0, time.perf_counter()
while data := connection.recv(1 << 16):
    total += len(data)
print(total, time.perf_counter() - began)
"""
CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(bytes(int(sys.argv[3])))
"""


def transfer(source: network.Host, target: network.Host) -> float:
    """Sends BYTES; the Mbit/s at which they come."""
    with subprocess.Popen(
        target.command(sys.executable, "-c", SERVER), stdout=subprocess.PIPE, text=True
    ) as server:
        port = server.stdout.readline().strip()
        client = [sys.executable, "-c", CLIENT, target.address, port, str(BYTES)]
        subprocess.run(source.command(*client), check=True, timeout=20)
        total, seconds = server.stdout.read().split()
    assert int(total) == BYTES
    return BYTES * 8 / float(seconds) / 1e6


def frames(source: network.Host, target: network.Host) -> int:
    """How many frames come while BYTES do."""
    path = Path("/sys/class/net", target.port, "statistics/tx_packets")
    before = int(path.read_text(encoding="ascii"))
    transfer(source, target)
    return int(path.read_text(encoding="ascii")) - before


def left_of(pid: int) -> list[str]:
    folders = [Path("/sys/class/net"), Path("/run/netns"), Path("/etc/netns")]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return [name for name in names if name.startswith(f"hips{pid}")]


@pytest.mark.net
def test_links_have_a_rate_and_counters_and_nothing_stays() -> None:
    with pytest.raises(KeyboardInterrupt), network.network(2, MBIT) as made:
        assert len(left_of(os.getpid())) == 1 + 2 * 3  # a bridge; ports, namespaces, hosts files
        first, second = made.hosts
        before = made.counters()
        # What else runs on the machine may only make it slower.
        rates = [transfer(first, second)]
        assert max(rates) <= 1.15 * MBIT
        while max(rates) < 0.85 * MBIT and len(rates) < 4:
            rates.append(transfer(first, second))
        assert 0.85 * MBIT <= max(rates) <= 1.15 * MBIT
        after = made.counters()
        sent, received = (after[host][way] - before[host][way] for host, way in ((0, 0), (1, 1)))
        for counted in (sent, received):
            # Frames of 1514 bytes carry 1448.
            assert len(rates) * BYTES < counted < 1.1 * len(rates) * BYTES
        made.limit(None)
        rates = [transfer(second, first) for _ in range(3)]
        assert max(rates) > 2 * MBIT
        assert frames(first, second) > BYTES / 1500
        made.offload(True)
        assert frames(first, second) < BYTES / 3000
        made.offload(False)
        assert frames(first, second) > BYTES / 1500
        raise KeyboardInterrupt
    assert not left_of(os.getpid())


@pytest.mark.net
def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    killed = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import os, signal\nfrom benchmarks import network\n"
            "with network.network(1):\n"
            "    print(os.getpid(), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)",
        ],
        cwd=Path(network.__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=30,
    )
    pid = int(killed.stdout)
    assert left_of(pid)
    with network.network(1):
        assert not left_of(pid)
    assert not left_of(os.getpid())


def test_who_may_not_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(PermissionError, match="must be made by root"),
        network.network(1),
    ):
        pass
