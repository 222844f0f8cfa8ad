# SPDX-License-Identifier: Apache-2.0
"""Meters of one process: who waits for whom while it connects."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tf_hips.ps.transport import sockets
from tf_hips.ps.transport.sockets import Meter

DEADLINE_S = 20.0


@contextlib.contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, int]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:
        yield server.getsockname()[:2]


def test_nobody_waits_for_who_connects_to_another_server() -> None:
    with listening() as silent, listening() as address, Meter(*silent).connecting():
        began = time.monotonic()
        with Meter(*address).connecting():
            pass
        assert time.monotonic() - began < sockets._TURN_WAIT_S


def test_clients_of_one_server_connect_one_after_the_other() -> None:
    with listening() as address:
        one, other = Meter(*address), Meter(*address)
        order: list[str] = []
        begins = threading.Event()

        def connect() -> None:
            begins.set()
            with other.connecting():
                order.append("other")

        thread = threading.Thread(target=connect, daemon=True)
        with one.connecting():
            thread.start()
            assert begins.wait(DEADLINE_S)
            mine = socket.create_connection(address)
            order.append("one")
        thread.join(DEADLINE_S)
        with mine:
            mine.sendall(b"abc")
            assert order == ["one", "other"]
            assert (one.read().sent, other.read().sent) == (3, 0)


def test_localhost_that_is_its_ipv6_address_to_grpc_alone_is_counted() -> None:
    """Of two new ones neither is taken."""

    class Astray(Meter):
        def _resolve(self) -> set[tuple[str, int]]:
            return {("127.0.0.1", self._port)}

    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(listening("::1"))
            further = stack.enter_context(listening("::1"))
        except OSError:
            pytest.skip("this kernel has no IPv6")
        meter, other = Astray("localhost", address[1]), Astray("localhost", further[1])

        def send(where: tuple[str, int]) -> None:
            stack.enter_context(socket.create_connection(where)).sendall(b"abc")

        with meter.connecting():
            send(address)
        with other.connecting():
            send(further)
            send(further)
        assert (meter.read().sent, other.read().sent) == (3, 0)


def test_a_server_that_is_away_takes_no_connection_to_another_with_its_port() -> None:
    """As with `--server a:7070,b:7070`: the meter of `a` would end the connection to `b`."""
    with listening("127.0.0.2") as (host, port):
        away, other = Meter("127.0.0.3", port), Meter(host, port)
        with other.connecting(), away.connecting():  # which fails sooner
            mine = socket.create_connection((host, port))
        with mine:
            mine.sendall(b"abc")
            assert (away.read().sent, other.read().sent) == (0, 3)
            away.settle()
            mine.sendall(b"de")
            assert other.read().sent == 5


def test_a_silent_server_keeps_nobody_from_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_TURN_WAIT_S", 0.05)
    monkeypatch.setattr(sockets, "_SCAN_WAIT_S", 0.05)
    with listening() as address:
        one, other = Meter(*address), Meter(*address)
        with one.connecting(), other.connecting():
            mine = socket.create_connection(address)
            mine.sendall(b"abc")
        with mine:
            assert (one.read().sent, other.read().sent) == (0, 3)


def test_turns_end_with_their_meters() -> None:
    with listening() as address:
        meter = Meter(*address)
        assert address in Meter._turns
        del meter
        assert address not in Meter._turns


def test_a_process_short_of_descriptors_counts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: Path) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    with listening() as address:
        meter = Meter(*address)
        with meter.connecting():
            first = socket.create_connection(address)
        claimed = set(Meter._claimed)
        with first, meter.connecting():
            second = socket.create_connection(address)
            with monkeypatch.context() as patch:
                patch.setattr(Path, "iterdir", none_left)
                meter._scan()
                first.sendall(b"abc")
                second.sendall(b"de")
            assert claimed <= Meter._claimed  # another meter must not take them for its own
        with second:
            assert meter.read().sent == 5


def test_a_kernel_that_does_not_count_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sockets._tcp_info
    with listening() as address:
        meter = Meter(*address)
        with meter.connecting():
            mine = socket.create_connection(address)
        with mine:
            mine.sendall(b"abc")
            assert meter.read().sent == 3
            # What qemu answers for a program of another processor.
            monkeypatch.setattr(sockets, "_tcp_info", lambda connection: whole(connection)[:4])
            assert meter.read() == sockets.WireBytes()
            meter.settle()
            assert meter.read() == sockets.WireBytes()
