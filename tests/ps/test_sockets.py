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
def listening() -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
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


def test_a_socket_that_leads_where_no_name_server_said_is_counted() -> None:
    """As where `localhost` is ::1 to gRPC alone. Of two new ones neither is taken."""

    class Astray(Meter):
        def _resolve(self) -> set[tuple[str, int]]:
            return {("192.0.2.1", self._port)}

    with listening() as address, listening() as further, contextlib.ExitStack() as stack:
        meter, other = Astray(*address), Astray(*further)

        def send(where: tuple[str, int]) -> None:
            stack.enter_context(socket.create_connection(where)).sendall(b"abc")

        with meter.connecting():
            send(address)
        with other.connecting():
            send(further)
            send(further)
        assert (meter.read().sent, other.read().sent) == (3, 0)


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
