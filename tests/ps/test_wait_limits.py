# SPDX-License-Identifier: Apache-2.0
"""What a party's server asks the one above about waits, however often its children ask."""

import gc
import socket
import threading
import time
import weakref
from typing import Any

import pytest

from tests.ps.parties import DEADLINE_S, serving, together
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.config import Uplink
from tf_hips.errors import PeerError
from tf_hips.ps.calls import wait_limits
from tf_hips.ps.calls.wait_limits import Limits, Waits
from tf_hips.ps.client.link import Link
from tf_hips.ps.session.settings import ServerConfig
from tf_hips.ps.transport.sockets import Meter

UPLINK = Uplink("127.0.0.1:1", "west")


class Above:
    """Answers for the server above."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.is_there = True
        self.goes_on = threading.Event()
        self.goes_on.set()
        monkeypatch.setattr(Limits, "above", self.answer)
        self.waits = Waits(ServerConfig(("a", "b"), insecure=True, uplink=UPLINK))

    def answer(self, *_: Any) -> Limits:
        self.asked += 1
        assert self.goes_on.wait(DEADLINE_S)
        if not self.is_there:
            raise PeerError("it is not there")
        return Limits(1000.0, 2000.0, 1 << 20)


def test_an_answer_is_used_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    above = Above(monkeypatch)
    for _ in range(5):
        assert above.waits.ask(DEADLINE_S).round_timeout_s == 2 * 2010.0
    assert above.asked == 1
    above.waits._fresh_until = 0.0
    above.waits.ask(DEADLINE_S)
    assert above.asked == 2


def test_an_error_is_that_of_those_who_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    above = Above(monkeypatch)
    above.is_there = False
    above.goes_on.clear()
    waiting = threading.Semaphore(0)

    class Told:
        """A lock that tells who waits for it."""

        def __init__(self) -> None:
            self.lock = threading.Lock()
            self.release = self.lock.release

        def acquire(self, timeout: float) -> bool:
            waiting.release()
            return self.lock.acquire(timeout=timeout)

    above.waits._lock = Told()  # type: ignore[assignment]

    def ask() -> None:
        with pytest.raises(PeerError, match="it is not there"):
            above.waits.ask(DEADLINE_S)

    def go_on() -> None:
        for _ in range(3):
            assert waiting.acquire(timeout=DEADLINE_S)
        above.goes_on.set()

    together(ask, ask, ask, go_on)
    assert above.asked == 1
    above.is_there = True  # who asks afterwards finds out for itself
    above.waits.ask(DEADLINE_S)
    assert above.asked == 2


def test_who_waits_for_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    above = Above(monkeypatch)
    with above.waits._lock, pytest.raises(PeerError, match="has not answered within 0 s"):
        above.waits.ask(0.01)


def test_a_server_that_stops_waits_for_no_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()[:2]
        uplink = Uplink(f"{host}:{port}", "west", None, DEADLINE_S)
        waits = Waits(ServerConfig(("a", "b"), insecure=True, uplink=uplink))

        def ask() -> None:
            with pytest.raises(PeerError, match="The server was stopped"):
                waits.ask(DEADLINE_S)

        def close() -> None:
            with silent.accept()[0]:  # it has begun to connect
                waits.close()

        began = time.monotonic()
        together(ask, close)
        ask()  # nor who asks afterwards
        assert time.monotonic() - began < DEADLINE_S


@pytest.mark.heavy
def test_a_connection_that_has_ended_leaves_nothing(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters: list[weakref.ref[Meter]] = []
    before = set(Meter._claimed)

    def linked(*arguments: Any) -> Link:
        link = Link(*arguments)
        meters.append(weakref.ref(link.meter))
        return link

    monkeypatch.setattr(wait_limits, "Link", linked)
    with serving(certificates, insecure=True, parties=("west",)) as server:
        uplink = Uplink(server.address, "west", None, DEADLINE_S)
        waits = Waits(ServerConfig(("a", "b"), "local", insecure=True, uplink=uplink))
        for _ in range(3):
            waits.ask(DEADLINE_S)
            waits._fresh_until = 0.0
        meter = Meter("127.0.0.1", 1)

        def are_gone() -> bool:
            gc.collect()
            meter.scan()
            return before.issuperset(Meter._claimed) and not any(one() for one in meters)

        eventually(are_gone)
