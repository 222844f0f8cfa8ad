# SPDX-License-Identifier: Apache-2.0
"""A name server that fails for a while is no end of a run; a name that was never known is."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.ps.parties import DEADLINE_S, Certificates, parties, serving, train_all
from tests.ps.relay import Relay
from tf_hips.ps.security import diagnosis
from tf_hips.ps.transport.sockets import split_address

pytestmark = pytest.mark.heavy  # servers, and names that come and go


def test_a_run_outlives_a_name_that_is_not_found_for_a_while(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a link that is gone with its name server, or of a container that starts again."""
    errors = [socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NONAME]
    connect = socket.create_connection

    def create_connection(*given: Any, **more: Any) -> socket.socket:
        if errors:
            raise socket.gaierror(errors.pop(0), "not now")
        return connect(*given, **more)

    with serving(certificates) as server, Relay(server.port) as relay:
        settings: dict[str, Any] = {"address": relay.address}
        with parties(server, certificates, **settings) as members:
            train_all(members, 0, 0)
            monkeypatch.setattr(diagnosis.socket, "create_connection", create_connection)
            relay.cut_after("up", 100)
            train_all(members, 1, 1)
    assert not errors


def test_a_name_that_was_never_known_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_connection(*_: Any, **__: Any) -> socket.socket:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(diagnosis.socket, "create_connection", create_connection)
    found = diagnosis.diagnose("nowhere.invalid", 1, None, "x", timeout_s=DEADLINE_S)
    assert not found.may_pass
    assert "The host of nowhere.invalid:1 is not known" in found.text


@pytest.mark.parametrize("own", [None, "ares"])
def test_names_are_found_as_the_system_finds_them(own: str | None) -> None:
    """gRPC's own resolver knows no `hub.local`, and `diagnose` would find the server there."""
    environment = {key: value for key, value in os.environ.items() if key != "GRPC_DNS_RESOLVER"}
    if own is not None:
        environment["GRPC_DNS_RESOLVER"] = own
    program = "import tf_hips.ps, os; print(os.environ['GRPC_DNS_RESOLVER'])"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    assert told.stdout.split() == [own or "native"]


@pytest.mark.parametrize("text", ["::1:7070", "2001:db8::1:7070", "[::1:7070", "::1]:7070"])
def test_an_address_of_ipv6_stands_in_brackets(text: str) -> None:
    """Else the last part of the address would pass for a port."""
    with pytest.raises(ValueError, match="in brackets"):
        split_address(text)
    assert split_address("[2001:db8::1]:7070") == ("2001:db8::1", 7070)
