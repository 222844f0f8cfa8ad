# SPDX-License-Identifier: Apache-2.0
"""ESync's state server: a scripted client that does what the original's workers do."""

import contextlib
import datetime
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips import cli
from tf_hips.config import Tls
from tf_hips.errors import ConfigError, PeerError, ProtocolError
from tf_hips.ps.client.state_client import StateClient
from tf_hips.ps.security import revocation, tls
from tf_hips.ps.server import bounded_http
from tf_hips.ps.server.state_server import StateServer, StateServerConfig

pytestmark = pytest.mark.heavy  # servers start in most of these


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextlib.contextmanager
def serving(
    identity: Any = None, clock: Any = time.time, revoked: str | None = None
) -> Iterator[StateServer]:
    server = StateServer(StateServerConfig("127.0.0.1:0", identity, revoked), clock)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def post(server: StateServer, path: str, /, **fields: Any) -> tuple[int, bytes]:
    """As the original's `requests.post(url, data=fields)`: a connection for each request."""
    body = urllib.parse.urlencode(fields).encode()
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", body, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def page(server: StateServer) -> Any:
    with urllib.request.urlopen(f"http://{server.address}/", timeout=10) as answer:
        return json.load(answer)


def test_a_round_of_the_original() -> None:
    clock = Clock()
    with serving(clock=clock) as server:
        assert page(server) == {"num_workers": 0, "t": 1, "epsilon": 0.5, "records": None}
        assert post(server, "/init/", num_workers=2, epsilon=0.5) == (200, b"")
        for rank, c in enumerate((4.0, 1.0)):
            answer = post(server, "/apply/", r=rank, k=0, c=c, te=100.0)
            assert answer == (200, b'{"ready": 0}')
        for k in range(1, 4):
            clock.now = te = 100.0 + k
            ready = json.loads(post(server, "/apply/", r=1, k=k, c=1.0, te=te)[1])["ready"]
            assert ready == int(k == 3)
        clock.now = 104.0
        assert post(server, "/apply/", r=0, k=1, c=4.0, te=104.0)[1] == b'{"ready": 1}'
        assert page(server)["records"] == [
            [0, 1, 4.0, 104.0, True, 1],
            [1, 3, 1.0, 103.0, True, 1],
        ]
        assert post(server, "/reset/", r=1, t=2, te=105.0) == (200, b"")
        assert page(server)["t"] == 2
        assert page(server)["records"][0] == [0, 0, 4.0, 104.0, False, 1]


def test_defaults_of_the_original() -> None:
    with serving() as server:
        post(server, "/init/")
        found = page(server)
        assert (found["num_workers"], found["epsilon"]) == (6, 0.5)


@pytest.mark.parametrize(
    ("path", "fields", "status", "text"),
    [
        ("/apply/", {"r": 2, "k": 1, "c": 1, "te": 1}, 400, "from 0 to 1. Received: 2"),
        ("/apply/", {"r": 0, "k": 1, "c": 1}, 400, "`te` must be a number"),
        ("/apply/", {"r": 0, "k": 1, "c": "nan", "te": 1}, 400, "`c` must be a finite number"),
        ("/apply/", {"r": 0, "k": "1.5", "c": 1, "te": 1}, 400, "`k` must be a whole number"),
        ("/apply/", {"r": 0, "k": 1, "c": 1, "te": 1, "x": 1}, 400, "fields must be"),
        ("/apply/", {"r": "9" * 41, "k": 1, "c": 1, "te": 1}, 400, "`r` must be a number"),
        ("/reset/", {"r": 0, "t": -1, "te": 1}, 400, "`t` must be"),
        ("/init/", {"num_workers": 100_001}, 400, "`num_workers` must be from 1"),
        ("/init/", {"epsilon": "inf"}, 400, "`epsilon` must be a finite number"),
        ("/init/", {str(key): 1 for key in range(9)}, 400, "the fields of a form"),
        ("/stop/", {}, 404, "there are /init/"),
        ("/init/", {"num_workers": "1" * 5000}, 413, "at most 4096 bytes"),
    ],
)
def test_requests_that_are_refused_change_nothing(
    path: str, fields: dict[str, Any], status: int, text: str
) -> None:
    with serving() as server:
        post(server, "/init/", num_workers=2)
        before = page(server)
        code, content = post(server, path, **fields)
        assert code == status
        assert text in json.loads(content)["error"]
        assert page(server) == before


@pytest.mark.parametrize(
    ("header", "body", "status", "text"),
    [
        ("Content-Length: 14", "num_workers=1", 400, "announced. Received: 13"),
        ("Transfer-Encoding: chunked", "d\r\nnum_workers=3\r\n0\r\n\r\n", 411, "Content-Length"),
    ],
    ids=["cut-off", "chunked"],
)
def test_a_body_that_is_not_read_whole_is_no_other_one(
    header: str, body: str, status: int, text: str
) -> None:
    """Of `num_workers=12` what has come is `num_workers=1`; of pieces nothing, which is 6."""
    with serving() as server:
        post(server, "/init/", num_workers=2)
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"POST /init/ HTTP/1.1\r\n{header}\r\n\r\n{body}".encode())
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionError):  # it is closed with bytes still to read
                while part := connection.recv(1000):
                    answer += part
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert text in answer.decode()
        assert page(server)["num_workers"] == 2


def test_nothing_is_asked_before_init() -> None:
    with serving() as server:
        code, content = post(server, "/apply/", r=0, k=1, c=1, te=1)
        assert (code, "`/init/` must come before" in content.decode()) == (409, True)


def test_bytes_that_are_no_request_and_connections_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_http, "_REQUEST_S", 0.2)
    monkeypatch.setattr(bounded_http.BoundedHandler, "timeout", 0.2)
    with serving() as server:
        host, port = server.address.split(":")
        for sent in (b"", b"\0" * 100, b"POST /init/ HTTP/1.1\r\nContent-Length: 9\r\n\r\nnum"):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(sent)
                while connection.recv(1000):
                    pass  # closed by the server, in time
        assert post(server, "/init/") == (200, b"")


@pytest.mark.parametrize("begin", ["POST ", "POST /init/ HTTP/1.1\r\nContent-Length: 4000\r\n\r\n"])
def test_a_request_that_comes_byte_by_byte_ends_in_time(
    begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "_REQUEST_S", 0.2)
    with serving() as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(begin.encode())
            connection.settimeout(0.05)  # a byte each: far less than what each may take
            for _ in range(100):
                try:
                    assert connection.recv(1000) == b""
                except TimeoutError:
                    connection.sendall(b"a")
                except ConnectionError:  # a byte came after it was closed
                    break
                else:
                    break
            else:
                pytest.fail("the server reads on")


@pytest.mark.parametrize("length", ["0" * 9 + "9" * 11, "0" * 9 + "5000", "9" * 5000])
def test_a_length_that_lies_takes_no_memory(length: str) -> None:
    with serving() as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(f"POST /init/ HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode())
            answer = b""
            while part := connection.recv(1000):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert post(server, "/init/") == (200, b"")


def test_there_are_so_many_connections_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http.BoundedServer, "max_connections", 2)
    with serving() as server, contextlib.ExitStack() as stack:
        host, port = server.address.split(":")
        clients = [StateClient(server.address, rank) for rank in range(2)]
        for client in clients:
            client.init(2, 0.5)
            stack.callback(client.close)
        third = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        assert third.recv(1) == b""
        assert not clients[0].apply(0, 1.0)


def test_one_certificate_leaves_room_for_others(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "_MAX_OF_ONE", 2)
    with serving(certificates.server()) as server, contextlib.ExitStack() as stack:
        clients = [
            StateClient(server.address, rank, certificates.party(site))
            for rank, site in enumerate(("west", "west", "west", "east"))
        ]
        for client in clients:
            stack.callback(client.close)
        for client in clients[:2]:
            client.init(4, 0.5)
        with pytest.raises(PeerError, match="no answer"):
            clients[2].apply(1, 1.0)
        clients[3].apply(1, 1.0)
        clients[0].close()
        assert server._server is not None
        open_ones = server._server._of_one
        eventually(lambda: sorted(open_ones.values()) == [1, 1])
        clients[2].apply(1, 1.0)


def test_a_revoked_certificate_is_refused_from_its_next_request_on(
    certificates: Certificates, tmp_path: Path
) -> None:
    listed = tmp_path / "revoked.txt"
    listed.write_bytes(revocation.to_bytes([]))
    west = certificates.party("west")
    with (
        serving(certificates.server(), revoked=str(listed)) as server,
        contextlib.ExitStack() as stack,
    ):
        client = StateClient(server.address, 0, west)
        other = StateClient(server.address, 1, certificates.party("east"))
        for one in (client, other):
            stack.callback(one.close)
        client.init(2, 0.5)
        mark = tls.fingerprint(Path(west.certificate).read_bytes())
        line = revocation.Revoked(mark, "party/west", datetime.date(2026, 1, 2), "lost")
        listed.write_bytes(revocation.to_bytes([line]))
        with pytest.raises(ProtocolError, match="403: the certificate of party/west was revoked"):
            client.apply(1, 1.0)
        other.apply(1, 1.0)
    with pytest.raises(ConfigError, match="`revoked` lists certificates, and plain text has none"):
        StateServerConfig("127.0.0.1:0", revoked=str(listed))


def test_our_client_keeps_its_connection_and_makes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    with serving(clock=clock) as server:
        slow = StateClient(server.address, 0, clock=clock)
        fast = StateClient(server.address, 1, clock=clock)
        slow.init(2, 0.5)
        slow.apply(0, 4.0)
        first = slow._connection
        assert [fast.apply(k, 1.0, 100.0) for k in range(2)] == [False, False]
        clock.now = 103.0
        assert fast.apply(3, 1.0)
        assert slow.apply(1, 4.0)
        assert slow._connection is first
        assert first is not None
        first.sock.shutdown(socket.SHUT_RDWR)
        slow.reset(2)
        assert page(server)["t"] == 2
        with pytest.raises(ProtocolError, match="400: `k` must be a whole number"):
            slow.apply(-1, 1.0)
        slow.close()
        fast.close()
    slow._deadline_s = 0.2
    with pytest.raises(PeerError, match="/reset/: no answer"):
        slow.reset(3)


def test_a_link_that_is_away_and_certificates_that_are_renewed_end_nothing(
    certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lay(name: str, identity: Tls) -> Tls:
        laid = Tls(identity.authority, str(tmp_path / name), str(tmp_path / f"{name}.key"))
        shutil.copy(identity.certificate, laid.certificate)
        shutil.copy(identity.key, laid.key)
        return laid

    def shown() -> str:
        host, _, port = server.address.rpartition(":")
        return tls.fingerprint(ssl.get_server_certificate((host, int(port))).encode())

    hub, west = lay("hub", certificates.server()), lay("west", certificates.party("west"))
    with serving(hub) as server, Relay(int(server.address.rpartition(":")[2])) as relay:
        client = StateClient(relay.address, 0, west)
        client.init(1, 0.5)
        before = shown()
        # Half of a pair does not count.
        shutil.copy(certificates.party("west").key, hub.key)
        assert shown() == before
        lay("hub", certificates.identity("global-server", "hq", days=0.5))
        assert shown() != before
        expired = certificates.identity("party", "west", days=-1)
        lay("west", expired)
        relay.cut()
        client._deadline_s = 0.3
        with pytest.raises(PeerError, match="no answer"):
            client.apply(1, 1.0)
        client._deadline_s = 30.0
        relay.answer = b"HTTP/1.1 503 Service Unavailable\r\n\r\n"

        def heal() -> None:
            """When it was said that there is no connection, however slow this machine is."""
            eventually(lambda: "No connection to the state server" in caplog.text)
            relay.answer = None

        healing = threading.Thread(target=heal)
        healing.start()
        lay("west", certificates.identity("party", "west", days=0.5))
        assert client.apply(1, 1.0)
        healing.join()
        # Who stays connected hears of the end, too.
        lay("hub", certificates.identity("global-server", "hq", days=0.003))
        lay("west", certificates.identity("party", "west", days=0.003))
        for who in (client, server._server):
            who._own._fresh_until = 0.0  # as a minute later
        assert client.apply(2, 1.0)
        for laid in (west, hub):
            told = f"The certificate of {laid.certificate} ends in"
            eventually(lambda told=told: told in caplog.text)
        client.close()
    assert "The changed certificate is not used: `tls`: the key" in caplog.text
    assert "No connection to the state server" in caplog.text


def test_with_certificates(certificates: Certificates, foreign_certificates: Certificates) -> None:
    with serving(certificates.server()) as server:
        client = StateClient(server.address, 0, certificates.party("west"))
        client.init(1, 0.5)
        assert client.apply(1, 1.0)
        client.close()
        operator = StateClient(server.address, 0, certificates.identity("operator", "ann"))
        with pytest.raises(ProtocolError, match="403: the certificate must be of role party"):
            operator.init(1, 0.5)
        foreign = StateClient(server.address, 0, foreign_certificates.party("west"))
        with pytest.raises(PeerError, match="no answer"):
            foreign.init(1, 0.5)
        plain = StateClient(server.address, 0)
        with pytest.raises(PeerError, match="no answer"):
            plain.init(1, 0.5)
        identity = certificates.identity("operator", "ann")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(identity.authority)
        context.load_cert_chain(identity.certificate, identity.key)
        with urllib.request.urlopen(
            f"https://{server.address}/", timeout=10, context=context
        ) as answer:
            assert json.load(answer)["num_workers"] == 1


def test_plain_text_is_for_loopback() -> None:
    with pytest.raises(ConfigError, match="Plain text is for loopback only"):
        StateServerConfig("0.0.0.0:0")
    with pytest.raises(ConfigError, match="Plain text is for loopback only"):
        StateClient("192.0.2.1:10010", 0)
    with pytest.raises(ConfigError, match="An address must be host:port"):
        StateServerConfig("10010")
    with pytest.raises(SystemExit) as ended:
        cli.main(["state-server", "--bind", "0.0.0.0:0", "--insecure"])
    assert ended.value.code == 2


def test_a_server_needs_the_certificate_of_one(certificates: Certificates) -> None:
    server = StateServer(StateServerConfig("127.0.0.1:0", certificates.party("west")))
    with pytest.raises(ConfigError, match="global-server"):
        server.start()


def test_the_command_announces_itself_and_ends_in_peace(tmp_path: Path) -> None:
    announce = tmp_path / "address"
    command = [sys.executable, "-m", "tf_hips.cli", "state-server", "--bind", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--insecure", "--announce", str(announce)], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            while "listens at" not in line:
                line = process.stderr.readline()
                assert line
            client = StateClient(line.split()[-1], 0)
            client.init(1, 0.5)
            assert client.apply(1, 1.0)
            client.close()
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(20)
    assert code == 0
    assert announce.read_text() == f"{line.split()[-1]}\n"
