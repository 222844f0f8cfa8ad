# SPDX-License-Identifier: Apache-2.0
"""Parties that end, break off or come back, over real sockets, while the others compute."""

import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, SITES, Party, parties, serving, together, train_all
from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.errors import PeerError
from tf_hips.ps.client.link import Link
from tf_hips.ps.client.patience import Patience
from tf_hips.ps.server.foreground import serve
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.terms.weights import cut_weights

pytestmark = pytest.mark.heavy  # these wait for what is lost


def told(member: Party) -> str:
    """Waits until a party that calls nobody knows why the run has ended."""
    link = member.client.link
    assert link._wake.wait(DEADLINE_S)
    assert link.ended is not None
    return link.ended


def watched(server: Server, child: int) -> None:
    """Waits until the server knows that a child is there."""
    session = server._session
    eventually(
        lambda: bool(session._presence._calls.get(child)), DEADLINE_S, changed=session.changed
    )


def test_a_party_that_is_closed_is_lost(certificates: Certificates) -> None:
    with (
        serving(certificates, lost_after_s=1.5) as server,
        parties(server, certificates) as (a, b),
    ):
        train_all((a, b), 0, 0)
        b.client.close()
        text = "Site `b` was lost: its connection closed and it did not come back within 1.5 s."
        assert text in told(a)
        with pytest.raises(PeerError, match=r"Exchange: The run has ended\. Site `b` was lost"):
            a.train(1, 1)


def test_a_party_that_waits_in_a_round_hears_that_another_is_lost(
    certificates: Certificates,
) -> None:
    with (
        serving(certificates, lost_after_s=1.5) as server,
        parties(server, certificates) as (a, b),
    ):

        def wait() -> None:
            with pytest.raises(PeerError, match=r"The run has ended\. Site `b` was lost"):
                a.train(0, 0)

        together(wait, b.client.close)


def test_a_party_whose_connection_broke_while_it_computed_comes_back(
    certificates: Certificates,
) -> None:
    with serving(certificates) as server, Relay(server.port) as relay:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(relay.address, "b", certificates.party("b"))
        together(a.join, b.join)
        train_all((a, b), 0, 0)
        watched(server, 1)
        session = server._session
        before = list(session._presence._calls[1])
        relay.cut()
        eventually(
            lambda: session._presence._calls[1] not in ([], before),
            DEADLINE_S,
            changed=session.changed,
        )
        assert session.ended is None
        train_all((a, b), 1, 1)
        a.client.leave()
        b.client.leave()


def test_a_reason_outlives_the_server(certificates: Certificates, tmp_path: Path) -> None:
    announce = tmp_path / "address"
    config = ServerConfig(parties=SITES, tls=certificates.server(), once=True)
    errors: list[PeerError] = []

    def run() -> None:
        try:
            serve(config, announce)
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for _ in range(1000):
        if announce.exists():
            break
        threading.Event().wait(0.01)
    address = announce.read_text(encoding="ascii").strip()
    a, b = (Party(address, site, certificates.party(site)) for site in SITES)
    together(a.join, b.join)
    train_all((a, b), 0, 0)
    a.client.leave("out of memory")
    thread.join(8)  # less than the server would wait for somebody who was not told
    assert not thread.is_alive()
    assert "Site `a` left the run: out of memory" in str(errors[0])
    began = time.monotonic()
    with pytest.raises(
        PeerError, match=r"Exchange: The run has ended\. Site `a` left the run: out"
    ):
        b.train(1, 1)
    assert time.monotonic() - began < DEADLINE_S / 2  # nobody answers any more
    b.client.leave()


def test_a_process_that_does_not_close_its_client_ends(certificates: Certificates) -> None:
    program = (
        "import sys, threading\n"
        "from tf_hips.config import Uplink\n"
        "from tf_hips.ps.client.client import Client\n"
        "Client(Uplink(sys.argv[1], 'a'), 'local', 1).join('onebit', 'same', 7)\n"
        "print('joined', flush=True)\n"
        "sys.exit('failed')\n"
    )
    with serving(certificates, insecure=True, parties=("a",), lost_after_s=60.0) as server:
        done = subprocess.run(
            [sys.executable, "-c", program, server.address],
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "joined\n"), done.stderr
        session = server._session
        eventually(lambda: 0 in session._presence._timers, DEADLINE_S, changed=session.changed)


def test_a_process_that_stands_still_is_lost(certificates: Certificates) -> None:
    program = (
        "import sys\n"
        "from tf_hips.config import Uplink\n"
        "from tf_hips.ps.client.client import Client\n"
        "Client(Uplink(sys.argv[1], 'b'), 'local', 1).join(sys.argv[2], 'same', 7)\n"
        "print('joined', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with serving(certificates, insecure=True, lost_after_s=1.0) as server:
        a = Party(server.address, "a", None)
        with subprocess.Popen(
            [sys.executable, "-c", program, server.address, a.compressor.text],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as b:  # fmt: skip
            try:
                a.client.join(a.compressor.text, "same", 7)
                assert b.stdout is not None
                assert b.stdout.readline() == b"joined\n"
                watched(server, 1)
                # Its kernel goes on to answer, so only pings of HTTP/2 tell.
                b.send_signal(signal.SIGSTOP)
                assert "Site `b` was lost" in told(a)
            finally:
                b.kill()
                a.client.close()


def test_the_first_weights_may_take_longer_than_all_deadlines(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_s = iter((0.4, 0.4, 0.4, 0.4, 0.4))

    def slowly(arrays: Sequence[np.ndarray], start: int) -> Iterator[bytes]:
        for message in cut_weights(arrays, start):
            threading.Event().wait(next(pieces_s))
            yield message

    monkeypatch.setattr("tf_hips.ps.client.client.cut_weights", slowly)
    monkeypatch.setattr("tf_hips.ps.client.client._MARGIN_S", 0.2)
    with (
        serving(certificates, round_timeout_s=1.0) as server,
        parties(server, certificates, deadline_s=0.5) as (a, b),
    ):
        weights = [np.arange(5 << 20, dtype=np.uint32).astype(np.uint8)]
        began = time.monotonic()
        got = together(
            lambda: a.client.first_sync(weights),
            lambda: b.client.first_sync([np.zeros(5 << 20, np.uint8)]),
        )
        assert time.monotonic() - began > 1.5
        np.testing.assert_array_equal(got[0][0], got[1][0])


def test_first_weights_that_stand_still_are_given_up(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = threading.Event()

    def standing_still(arrays: Sequence[np.ndarray], start: int) -> Iterator[bytes]:
        messages = cut_weights(arrays, start)
        yield next(messages)
        given_up.wait(DEADLINE_S)
        yield from messages

    monkeypatch.setattr("tf_hips.ps.client.client.cut_weights", standing_still)
    monkeypatch.setattr("tf_hips.ps.client.client._MARGIN_S", 0.6)
    weights = [np.zeros(3 << 20, np.uint8)]

    def upload(member: Party) -> None:
        with pytest.raises(PeerError, match=r"Upload: .*no byte has moved for 2 s"):
            member.client.first_sync(weights)

    def download(member: Party) -> None:
        text = "Waited 1 s; site `a` has sent 1048576 of 3145728 bytes of the first weights"
        with pytest.raises(PeerError, match=text):
            member.client.first_sync(weights)

    with (
        serving(certificates, round_timeout_s=1.0) as server,
        parties(server, certificates, deadline_s=0.5) as (a, b),
    ):
        try:
            together(lambda: upload(a), lambda: download(b))
        finally:
            given_up.set()


def test_who_came_back_while_its_timer_waited_for_the_lock_is_not_lost() -> None:
    changed, lost = threading.Condition(), list[int]()
    presence, call = Presence(changed, 60.0, lost.append), object()
    with changed:
        presence.expect([0])
        late = presence._timers[0]
        presence.arrive(0, call)
    presence._time_is_up(0, late)
    with changed:
        presence.depart(0, call)
    presence._time_is_up(0, late)
    assert lost == []
    presence._time_is_up(0, presence._timers[0])
    assert lost == [0]
    presence.stop()


def test_patience_is_renewed_by_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def cancel(self) -> None:
            self.cancelled.set()

    now_s = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("tf_hips.ps.client.patience.time", clock)
    patience, call = Patience(0.02), Call()
    with patience.bounding(call):  # type: ignore[arg-type]
        for _ in range(4):
            now_s += 0.015
            assert not patience.is_over
            patience.renew()
        assert not call.cancelled.wait(0.1)  # several times as long, but by the clock it is not
        now_s += 0.02
        assert call.cancelled.wait(DEADLINE_S)
    assert patience.is_over


@pytest.mark.parametrize(
    "text", ["Concurrent RPC limit exceeded!", "A site may have 16 calls at once."]
)
def test_a_busy_server_is_asked_again(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    class Busy(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.RESOURCE_EXHAUSTED

        def details(self) -> str:
            return text

    real, refused = Link.once, []

    def once(link: Link, method: str, *arguments: object) -> bytes:
        if method == "Join" and not refused:
            refused.append(method)
            raise Busy
        return real(link, method, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Link, "once", once)
    with serving(certificates) as server, parties(server, certificates) as members:
        train_all(members, 0, 0)
    assert refused == ["Join"]


def test_a_round_may_take_as_long_as_bytes_move(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times as long as a round may stand still: nobody gives up."""
    monkeypatch.setattr("tf_hips.ps.client.client._MARGIN_S", 0.3)
    monkeypatch.setattr("tf_hips.ps.session.moves.TELLS_AFTER_S", 0.2)
    with (
        serving(certificates, round_timeout_s=2.0) as server,
        Relay(server.port) as relay,
    ):
        members = [
            Party(
                address,
                site,
                certificates.party(site),
                shapes=((2_000_000,),),
                compression="fp32",
                deadline_s=2.0,
            )
            for site, address in zip(SITES, (server.address, relay.address), strict=True)
        ]
        together(*(member.join for member in members))
        relay.bytes_per_s = 2e6  # a message of 1 MiB in half a second; 8 MB up and as many down
        began = time.monotonic()
        train_all(members, 0, 0)
        assert time.monotonic() - began > 6.0
        for member in members:
            member.client.close()
