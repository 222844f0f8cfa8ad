# SPDX-License-Identifier: Apache-2.0
"""A server that stops while something begins."""

import threading
from typing import Any

import pytest

from tests.ps.parties import DEADLINE_S, together
from tests.support.eventually import eventually
from tf_hips.ps.server import server as servers
from tf_hips.ps.server.server import Server
from tf_hips.ps.session.session import Session
from tf_hips.ps.session.settings import ServerConfig


def test_a_run_that_begins_while_its_server_stops_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begins, goes_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **named: Any) -> Session:
        begins.set()
        assert goes_on.wait(DEADLINE_S)
        return Session(*arguments, **named)

    server = Server(ServerConfig(("a",), "run", insecure=True))
    with server._session.changed:
        server._session.end("It is over.")
    monkeypatch.setattr(servers, "Session", slowly)

    def stop() -> None:
        assert begins.wait(DEADLINE_S)
        server.stop(0.0)

    def go_on() -> None:
        eventually(server._stopped.is_set)
        goes_on.set()

    together(lambda: server.session_of(is_join=True), stop, go_on)
    assert server._session.ended == "The server was stopped."
