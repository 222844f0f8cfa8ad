# SPDX-License-Identifier: Apache-2.0
"""Gathers over sockets: cut, too long, nonsense, and parties that say that a step failed."""

import json
import pathlib
import threading
import time

import grpc
import numpy as np
import pytest

from tests.ps.parties import DEADLINE_S, Party, parties, raw_channel, serving, together, train_all
from tests.ps.relay import Relay
from tests.support.certs import Certificates
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.session import waiting
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import HEADER, Call

pytestmark = pytest.mark.heavy  # servers


def gather_all(members: list[Party], number: int, size: int) -> list[list[bytes]]:
    """Gathers noise of `size` bytes, another length at each party."""
    payloads = [
        np.random.default_rng((number, place)).bytes(size + place) for place in range(len(members))
    ]
    results = together(
        *(
            lambda member=member, payload=payload: member.client.gather(number, "noise", payload)
            for member, payload in zip(members, payloads, strict=True)
        )
    )
    assert results == [payloads] * len(members)
    return results


def test_gathers_and_rounds_between_each_other(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        for number, size in enumerate((5, 0, 3 << 20, 1)):
            gather_all([a, b], number, size)
            train_all((a, b), number, number)
        empty = together(*(lambda m=m: m.client.gather(4, "x", b"") for m in (a, b)))
        assert empty == 2 * [[b"", b""]]
        small = [member.client.wire_bytes() for member in (a, b)]
        gather_all([a, b], 5, 100)
        for member, before in zip((a, b), small, strict=True):
            after = member.client.wire_bytes()
            assert after.sent - before.sent < 100 + 500
            assert after.received - before.received < 200 + 500
        # The same number again: the answer that was lost on its way.
        gather_all([a, b], 5, 100)
        with pytest.raises(ProtocolError, match=r"must stay what it was.*`noise`, 100 bytes"):
            a.client.gather(5, "noise", b"something else")
        with pytest.raises(
            ProtocolError, match=r"Gather: The gather must be one of 0 to 6, which is n"
        ):
            b.client.gather(8, "noise", b"")
        gather_all([a, b], 6, 1)


def test_a_payload_beyond_the_limit_is_refused_and_costs_nothing(
    certificates: Certificates,
) -> None:
    text = r"at most 1000 bytes, the server's `max_gather_bytes` \(`--max-gather-mb`\). Received: 1"
    with (
        serving(certificates, max_gather_bytes=1000) as server,
        parties(server, certificates) as (a, b),
    ):
        with pytest.raises(ProtocolError, match=text):
            b.client.gather(0, "x", bytes(1001))
        b.client._max_gather_bytes = 1 << 30
        with pytest.raises(ProtocolError, match=r"at most 2002 bytes\. Received: a packet that an"):
            b.client.gather(0, "x", bytes(3000))
        b.client._max_gather_bytes = 1000
        gather_all([a, b], 0, 999)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_gather_whose_connection_is_cut_counts_once(
    certificates: Certificates, direction: str
) -> None:
    with serving(certificates) as server, Relay(server.port) as relay:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(relay.address, "b", certificates.party("b"))
        together(a.join, b.join)
        gather_all([a, b], 0, 10)
        relay.cut_after(direction, 6 << 20)
        before = b.client.wire_bytes()
        gather_all([a, b], 1, 8 << 20)
        assert relay.num_cuts == 1
        after = b.client.wire_bytes()
        if direction == "down":  # the payload was there, and did not travel again
            assert after.sent - before.sent < 9 << 20
        gather_all([a, b], 2, 10)
        a.client.close()
        b.client.close()


def raw_gather(channel: grpc.Channel, call: Call, messages: list[bytes]) -> tuple[object, str]:
    """Sends `messages` as a gather; how the server ends it."""
    stream = channel.stream_stream(f"/{wire.SERVICE}/Gather")(
        iter(messages), timeout=DEADLINE_S, metadata=((wire.METADATA_KEY, call.to_text()),)
    )
    try:
        list(stream)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_nonsense_is_refused_and_the_gather_goes_on(certificates: Certificates) -> None:
    wrong = grpc.StatusCode.FAILED_PRECONDITION
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        with raw_channel(server.address, certificates.party("b")) as channel:
            for messages, text in (
                ([], "Received: none"),
                ([b"GET / HTTP/1.1\r\n"], "announces 168636718 bytes"),
                ([HEADER.pack(0, 1 << 30, 0, 1) + b"x"], "announces 1073741824"),
            ):
                code, said = raw_gather(channel, b.call(0), messages)
                assert code == wrong
                assert text in said
        assert not server._session._state.gathers.has(1, 0)
        gather_all([a, b], 0, 5)


def test_parties_in_different_calls_hear_it_as_what_it_is(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        errors: list[str] = []

        def hear(call) -> None:
            with pytest.raises(ProtocolError, match="must take the same steps") as caught:
                call()
            errors.append(str(caught.value))
            with pytest.raises(ProtocolError, match="must take the same steps"):
                call()  # whatever it calls from now on

        began = time.monotonic()
        together(
            lambda: hear(lambda: a.train(1, 1)),
            lambda: hear(lambda: b.client.gather(0, "epoch end", b"")),
        )
        assert time.monotonic() - began < 5.0
        for said in errors:
            assert "site `a` waits in round 1 of the gradients" in said
            assert "site `b` waits in exact value 0 (`epoch end`)" in said


def test_a_step_that_failed_is_told(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "FAILED_AFTER_S", 0.5)
    text = "Site `a` does not come to exact value 1 .*: its last step ended with an error. Oops"
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        a.client.failed("Oops")
        gather_all([a, b], 0, 5)

        def wait() -> None:
            with pytest.raises(PeerError, match=text):
                b.client.gather(1, "x", b"")

        together(wait, lambda: a.client.failed("Oops" * 1000))
        a.client.failed("the run is over, and that is no error")
        with pytest.raises(PeerError, match=text):
            a.client.gather(1, "x", b"")
    other = Party(server.address, "a", certificates.party("a"))
    other.client.failed("nobody has joined")
    other.client.close()
    assert threading.active_count() < 200


def test_what_a_party_says_of_its_failures_is_written_once(
    certificates: Certificates, tmp_path: pathlib.Path
) -> None:
    """In the events and in the journal, however often it calls; anew when it has gone on."""
    log_dir, state = tmp_path / "log", tmp_path / "state"
    with (
        serving(certificates, log_dir=str(log_dir), state_dir=str(state)) as server,
        parties(server, certificates) as (a, b),
    ):
        gather_all([a, b], 0, 5)
        for place in range(200):
            a.client.failed(f"Oops {place}")
        before = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        for _ in range(200):
            a.client.failed("x" * 1000)
        after = sum(path.stat().st_size for path in state.rglob("*") if path.is_file())
        assert after - before < 10_000
        gather_all([a, b], 1, 5)
        a.client.failed("another one")
        gather_all([a, b], 2, 5)
    events = [json.loads(line) for path in log_dir.glob("*.jsonl") for line in path.open()]
    told = [one["text"] for one in events if one["event"] == "failed"]
    assert told == ["Oops 0", "another one"]
