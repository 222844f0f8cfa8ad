# SPDX-License-Identifier: Apache-2.0
"""Parties that send nonsense: one clear error for them, and nothing lost for the others."""

import json
import struct
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from tests.ps.parties import (
    DEADLINE_S,
    FEEDBACK,
    SITES,
    Party,
    parties,
    raw_channel,
    raw_exchange,
    serving,
    together,
    train_all,
)
from tests.support.certs import Certificates
from tests.support.eventually import eventually
from tf_hips.errors import NonFiniteError, PacketError, PeerError, ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ps.terms.model import Model
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import HEADER, Call

pytestmark = pytest.mark.heavy  # servers start in most of these

INVALID = grpc.StatusCode.INVALID_ARGUMENT
WRONG = grpc.StatusCode.FAILED_PRECONDITION


def split(member: Party, number: int) -> list[bytes]:
    """The packets of a round, by chunk."""
    packets = member.packets(number).tobytes()
    sizes = Model(tuple(map(tuple, member.shapes))).packet_bytes(member.compressor)
    ends = np.cumsum(sizes)
    return [packets[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def frame(chunk: int, packet: bytes, **header: int) -> bytes:
    fields = {"chunk": chunk, "length": len(packet), "offset": 0, "part": len(packet), **header}
    return HEADER.pack(*fields.values()) + packet


# Each takes the good packets of a round, and gives the messages of a bad one.
STREAMS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], grpc.StatusCode, str]] = {
    "truncated packet": (
        lambda good: [frame(2, good[2][:-1])],
        INVALID,
        "Site `b`, round 1, tensor 2 of shape [72, 10]: ",
    ),
    "packet cut off by the end": (
        lambda good: [frame(2, good[2], length=len(good[2]), part=50)[: 16 + 50]],
        WRONG,
        "The stream ended after 50.",
    ),
    "frame longer than announced": (
        lambda good: [frame(2, good[2] + b"\0", length=len(good[2]), part=len(good[2]))],
        WRONG,
        "16 bytes of header. Received: 1 bytes",
    ),
    "part longer than its packet": (
        lambda good: [frame(2, good[2] + b"\0", length=len(good[2]))],
        WRONG,
        "A part must lie inside its packet.",
    ),
    "packet longer than its chunk": (
        lambda good: [frame(0, good[2])],
        WRONG,
        "A packet of chunk 0 has at most",
    ),
    "four gigabytes announced": (
        lambda good: [frame(2, good[2], length=0xFFFFFFFF)],
        WRONG,
        "a packet that announces 4294967295",
    ),
    "packet of another codec": (
        lambda good: [frame(2, good[2][:8] + b"\0\0\0\0" + good[2][12:])],
        INVALID,
        "Site `b`, round 1, tensor 2 of shape [72, 10]: ",
    ),
    "packet of another chunk": (
        lambda good: [frame(3, good[1])],
        INVALID,
        "Site `b`, round 1, tensor 3 of shape [10]: ",
    ),
    "values that are not finite": (
        lambda good: [frame(2, good[2][:16] + struct.pack("<ff", np.nan, 1.0) + good[2][24:])],
        grpc.StatusCode.OUT_OF_RANGE,
        "Site `b`, round 1, tensor 2 of shape [72, 10]: a gradient must be finite",
    ),
    "unknown chunk": (lambda good: [frame(9, good[2])], WRONG, "has 4 chunks. Received: chunk 9"),
    "chunks missing": (
        lambda good: [frame(0, good[0])],
        WRONG,
        "A round has 4 chunks. The stream ended with 1 delivered.",
    ),
    "no packets": (lambda good: [], WRONG, "The stream ended with 0 delivered."),
    "no frames": (lambda good: [b"GET / HTTP/1.1\r\n"], WRONG, "announces 168636718 bytes"),
}


@pytest.fixture(scope="module")
def trained(certificates: Certificates):
    """A server whose two parties have trained round 0."""
    with serving(certificates) as server, parties(server, certificates) as members:
        yield server, members


@pytest.mark.parametrize("name", STREAMS)
def test_a_bad_stream_is_refused_and_the_round_goes_on(
    certificates: Certificates, name: str
) -> None:
    make, code, text = STREAMS[name]
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        expected = train_all((a, b), 0, 0)
        assert expected
        kept = [residual.copy() for residual in b.residuals]
        good = split(b, 1)
        b.residuals = kept
        with raw_channel(server.address, certificates.party("b")) as channel:
            found = raw_exchange(channel, b.call(1), make(good))
        assert found[0] == code
        assert text in found[1]
        after = train_all((a, b), 1, 2)
    assert after == undisturbed_rounds(certificates)[1:]


def undisturbed_rounds(certificates: Certificates, cache: list[list[bytes]] = []) -> list[bytes]:  # noqa: B006
    """Rounds 0 to 2 of two parties that behave."""
    if not cache:
        with serving(certificates) as server, parties(server, certificates) as members:
            cache.append(train_all(members, 0, 2))
    return cache[0]


def test_a_message_beyond_the_limit_is_refused(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        train_all((a, b), 0, 0)
        credentials = certificates.party("b")
        with raw_channel(server.address, credentials) as channel:
            stub = channel.unary_unary(f"/{wire.SERVICE}/AgreeModel")
            with pytest.raises(grpc.RpcError) as caught:
                stub(
                    b" " * (wire.MESSAGE_BYTES + 1),
                    timeout=DEADLINE_S,
                    metadata=((wire.METADATA_KEY, "local/b/p/0/0"),),
                )
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        train_all((a, b), 1, 1)


@pytest.mark.parametrize(
    ("method", "message", "text"),
    [
        ("Join", b"", "must be JSON"),
        ("Join", b"[" * 1000, "must be JSON"),
        ("Join", b"{}", "must have the keys"),
        (
            "AgreeModel",
            json.dumps({"shapes": [[3, -1]], "round": 0}).encode(),
            "sizes from 0 to 2^40",
        ),
        (
            "AgreeModel",
            json.dumps({"shapes": [["a"]], "round": 0}).encode(),
            "sizes from 0 to 2^40",
        ),
        ("AgreeModel", json.dumps({"shapes": {}, "round": 0}).encode(), "`shapes` must be list"),
        ("BeginSync", json.dumps({"kinds": [1], "bytes": 3}).encode(), "must hold texts"),
        ("Leave", json.dumps({"reason": 5}).encode(), "`reason` must be str or NoneType"),
    ],
)
def test_a_bad_control_message_is_refused(trained, certificates, method, message, text) -> None:
    server, _ = trained
    with (
        raw_channel(server.address, certificates.party("b")) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{wire.SERVICE}/{method}")(
            message, timeout=DEADLINE_S, metadata=((wire.METADATA_KEY, "local/b/p/0/0"),)
        )
    assert caught.value.code() == WRONG
    assert text in caught.value.details()


@pytest.mark.parametrize("text", ["", "local/b", "local/b/p/x/0", "local/b/p/0/0/0"])
def test_a_call_without_an_identity_is_refused(trained, certificates, text) -> None:
    server, _ = trained
    with (
        raw_channel(server.address, certificates.party("b")) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{wire.SERVICE}/Leave")(
            b"", timeout=DEADLINE_S, metadata=((wire.METADATA_KEY, text),) if text else ()
        )
    assert caught.value.code() == WRONG
    assert "must be run/site/process/number/attempt" in caught.value.details()


@pytest.mark.parametrize(("number", "text"), [(7, "must be one of"), (10**14, "must be one of")])
def test_a_round_out_of_turn_is_refused(trained, certificates, number, text) -> None:
    server, (_, b) = trained
    with raw_channel(server.address, certificates.party("b")) as channel:
        code, found = raw_exchange(channel, b.call(number), [])
    assert code == WRONG
    assert text in found


def test_weights_from_the_wrong_party_or_place_are_refused(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        for site, position, data, text in [
            ("b", 0, b"x", "Site `a` sends the first weights"),
            ("a", 0, b"x", "have 0 bytes"),
            ("a", 5, b"", "have 0 bytes"),
        ]:
            process = {"a": a, "b": b}[site].call(0).process
            with (
                raw_channel(server.address, certificates.party(site)) as channel,
                pytest.raises(grpc.RpcError) as caught,
            ):
                channel.stream_unary(f"/{wire.SERVICE}/Upload")(
                    iter([data]),
                    timeout=DEADLINE_S,
                    metadata=((wire.METADATA_KEY, f"local/{site}/{process}/{position}/0"),),
                )
            assert caught.value.code() == WRONG
            assert text in caught.value.details()
        weights = [np.ones(3, np.float32)]
        together(lambda: a.client.first_sync(weights), lambda: b.client.first_sync(weights))


def test_shapes_that_differ_are_named(certificates: Certificates) -> None:
    with serving(certificates) as server:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(server.address, "b", certificates.party("b"))
        text = compressors.parse(FEEDBACK).text
        together(lambda: a.client.join(text, "same", 7), lambda: b.client.join(text, "same", 7))
        a.child, b.child = 0, 1
        a.client.agree_model(a.shapes)
        for shapes, found in [
            (((3, 3, 1, 8), (8,), (72, 12), (12,)), r"tensor 2 is \[72, 10\] there and \[72, 12\]"),
            (((3, 3, 1, 8), (8,)), "there are 4 of tensor there and 2 here"),
            ((), "there are 4 of tensor there and 0 here"),
        ]:
            message = f"Site `a` \\(there\\) and site `b` \\(here\\) differ: {found}"
            with pytest.raises(ProtocolError, match=message):
                b.client.agree_model(shapes)
        b.client.agree_model(b.shapes)
        with pytest.raises(ProtocolError, match=r"differ: tensor 0"):
            b.client.agree_model([(1,)])
        assert train_all((a, b), 0, 2) == undisturbed_rounds(certificates)
        a.client.close()
        b.client.close()


def test_weights_that_differ_are_named(certificates: Certificates) -> None:
    with serving(certificates) as server, parties(server, certificates) as (a, b):
        good = [np.zeros((2, 3), np.float32), np.zeros(4, np.int32)]
        a.client.first_sync(good)
        bad = [np.zeros((2, 3), np.float32), np.zeros(4, np.float32)]
        with pytest.raises(ProtocolError, match=r"weight 1 is <i4\[4\] there and <f4\[4\] here"):
            b.client.first_sync(bad)
        b.client.first_sync(good)
        train_all((a, b), 0, 0)


def test_a_model_beyond_the_limit_is_refused(certificates: Certificates) -> None:
    with (
        serving(certificates, max_model_bytes=4 * 810) as server,
        parties(server, certificates) as (a, b),  # 72 + 8 + 720 + 10 elements
    ):
        train_all((a, b), 0, 0)
        text = "at most 3240 bytes, the server's `max_model_bytes`. Received: 3244 bytes"
        with pytest.raises(ProtocolError, match=f"gradients must have {text}"):
            b.client.agree_model([(811,)])
        with pytest.raises(ProtocolError, match=f"weights must have {text}"):
            b.client.first_sync([np.zeros(811, np.float32)])
        train_all((a, b), 1, 1)


@pytest.mark.parametrize(
    ("compression", "downlink", "seed", "text"),
    [
        ("onebitt", "same", 7, "`compression` is unknown to the server: .*onebit"),
        ("", "same", 7, "`compression` is unknown to the server"),
        (FEEDBACK, "zip", 7, "`downlink` is unknown to the server"),
        ("terngrad", "fp32", 7, "`compression` must be error_feedback.*Received: compression=tern"),
        (FEEDBACK, "fp32", 7, "agree on `downlink`. Site `a` has error_feedback.*downlink=fp32"),
        (FEEDBACK, "same", 8, "agree on `seed`. Site `a` has 7. Received: seed=8 from site `b`"),
        (FEEDBACK, "same", 1 << 70, "`seed` must have at most 64 bits"),
    ],
)
def test_a_party_that_wants_something_else_is_refused(
    certificates: Certificates, compression: str, downlink: str, seed: int, text: str
) -> None:
    with serving(certificates, compression=FEEDBACK) as server:
        a = Party(server.address, "a", certificates.party("a"))
        b = Party(server.address, "b", certificates.party("b"))

        def mistaken() -> None:
            joined_by_a(server)
            with pytest.raises(ProtocolError, match=text):
                b.client.join(compression, downlink, seed)
            with pytest.raises(PeerError, match="has left the run"):
                b.join()

        good = Party(server.address, "b", certificates.party("b"))
        together(a.join, lambda: (mistaken(), good.join()))
        b = good
        assert train_all((a, b), 0, 2) == undisturbed_rounds(certificates)
        a.client.close()
        b.client.close()


def joined_by_a(server) -> None:
    """Waits until site a is in."""
    session = server._session
    eventually(lambda: 0 in session._members.children, DEADLINE_S, changed=session.changed)


def test_the_client_maps_refusals_to_its_own_errors(certificates: Certificates) -> None:
    with (
        serving(certificates) as server,
        parties(server, certificates, compression="fp32") as (a, b),
    ):
        train_all((a, b), 0, 0)
        packets = b.packets(1)
        broken = packets.copy()
        broken[0] ^= 1
        with pytest.raises(PacketError, match="Exchange: Site `b`, round 1, tensor 0"):
            b.client.exchange(1, broken)
        broken = packets.copy()
        broken[16:20].view("<f4")[:] = np.inf
        with pytest.raises(NonFiniteError, match="Exchange: Site `b`, round 1, tensor 0"):
            b.client.exchange(1, broken)
        with pytest.raises(ValueError, match="`packets` must be uint8 of shape"):
            b.client.exchange(1, packets[:-1])
        with pytest.raises(ValueError, match="`packets` must be uint8 of shape"):
            b.client.exchange(1, packets.astype(np.int32))
        train_all((a, b), 1, 1)


def test_a_sum_that_overflows_is_told_to_all_and_can_be_sent_again(
    certificates: Certificates,
) -> None:
    with (
        serving(certificates) as server,
        parties(server, certificates, compression="fp32") as (a, b),
    ):
        good = {member.child: member.packets(0) for member in (a, b)}
        errors = []

        def overflow(member: Party) -> None:
            packets = good[member.child].copy()
            packets[16:20].view("<f4")[:] = 2e38 + 1e38 * member.child
            with pytest.raises(NonFiniteError, match=r"tensor 0 .*the largest value, 3e\+38"):
                member.client.exchange(0, packets)
            errors.append(member)

        together(lambda: overflow(a), lambda: overflow(b))
        assert len(errors) == 2
        again = together(
            lambda: a.client.exchange(0, good[0]), lambda: b.client.exchange(0, good[1])
        )
        np.testing.assert_array_equal(*again)
        train_all((a, b), 1, 1)


def test_calls_before_their_turn_are_refused(certificates: Certificates) -> None:
    with serving(certificates) as server:
        with raw_channel(server.address, certificates.party("b")) as channel:
            code, text = raw_exchange(channel, Call("local", "b", "p", 0), [])
            assert (code, text) == (WRONG, "Site `b` must join before anything else.")
        party = Party(server.address, "b", certificates.party("b"))
        with pytest.raises(ProtocolError, match="`join` must come before"):
            party.client.agree_model([(3,)])
        party.client.close()
        with parties(server, certificates) as members:
            assert train_all(members, 0, 2) == undisturbed_rounds(certificates)
    assert SITES == ("a", "b")
