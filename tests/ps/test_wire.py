# SPDX-License-Identifier: Apache-2.0
"""Frames survive any split into messages; other bytes are refused before memory is taken."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_hips.errors import ProtocolError
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import HEADER, MESSAGE_BYTES, Call

NAMES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,49}\Z")


def frame(chunk: int, packet_bytes: int, offset: int, part: bytes) -> bytes:
    return HEADER.pack(chunk, packet_bytes, offset, len(part)) + part


def assemble(messages: list[bytes], limits: list[int]) -> list[tuple[int, bytes]]:
    assembler = wire.Assembler(limits)
    packets = [
        (chunk, bytes(packet)) for message in messages for chunk, packet in assembler.feed(message)
    ]
    assembler.finish()
    return packets


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_protocol_error(message: bytes) -> None:
    try:
        frames = list(wire.parse(message))
    except ProtocolError:
        return
    assert b"".join(frame(f.chunk, f.packet_bytes, f.offset, bytes(f.part)) for f in frames) == (
        message
    )


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_stream_gives_packets_within_the_limits_or_a_protocol_error(
    messages: list[bytes],
) -> None:
    limits = [3, 0, 40]
    try:
        packets = assemble(messages, limits)
    except ProtocolError:
        return
    assert all(0 < len(packet) <= limits[chunk] for chunk, packet in packets)


@given(
    st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_packets_survive_any_chunking(
    packets: list[bytes], sizes: list[int], flushes: list[bool]
) -> None:
    messages = [b""]
    step = 0
    for chunk, packet in enumerate(packets):
        offset = 0
        while offset < len(packet):
            part = packet[offset : offset + sizes[step % len(sizes)]]
            if flushes[step % len(flushes)]:
                messages.append(b"")
            messages[-1] += frame(chunk, len(packet), offset, part)
            offset += len(part)
            step += 1
    assert assemble(messages, [50] * len(packets)) == list(enumerate(packets))


def test_bundle_shares_and_cuts_messages() -> None:
    small = [bytes([k]) * (k + 1) for k in range(10)]
    assert [len(m) for m in wire.bundle(enumerate(small))] == [sum(16 + len(p) for p in small)]
    sizes = [5, MESSAGE_BYTES - 16, 1, 3 * MESSAGE_BYTES + 7, MESSAGE_BYTES - 4000, 4096, 4097]
    packets = [bytes([k]) * size for k, size in enumerate(sizes)]
    messages = list(wire.bundle(enumerate(packets)))
    assert all(len(message) <= MESSAGE_BYTES for message in messages)
    assert len(messages) <= sum(sizes) // MESSAGE_BYTES + 3
    assert assemble(messages, sizes) == list(enumerate(packets))


def test_nothing_gives_no_message() -> None:
    assert list(wire.bundle([])) == []
    assert list(wire.parse(b"")) == []


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([frame(0, 8, 0, b"abcdefgh")[:-1]], "announces 8 bytes. Received: 7"),
        ([frame(0, 8, 0, b"abcdefgh") + b"x"], "16 bytes of header. Received: 1"),
        ([frame(0, 8, 4, b"abcdefgh")], "inside its packet"),
        ([frame(0, 8, 0, b"")], "inside its packet"),
        ([frame(0, 0, 0, b"")], "inside its packet"),
        ([frame(3, 8, 0, b"abcdefgh")], "has 3 chunks. Received: chunk 3"),
        ([frame(1, 0xFFFFFFFF, 0, b"a")], "at most 20 bytes. Received: a packet that announces"),
        ([frame(0, 8, 2, b"cdefgh")], "must begin with byte 0"),
        ([frame(0, 8, 0, b"abcd"), frame(0, 8, 5, b"fgh")], "from byte 4. Received: chunk 0 of 8"),
        ([frame(0, 8, 0, b"abcd"), frame(1, 8, 0, b"ab")], "Expected chunk 0 of 8"),
        ([frame(0, 8, 0, b"abcd"), frame(0, 9, 4, b"efghi")], "Received: chunk 0 of 9"),
        ([frame(0, 8, 0, b"abcd")], "ended after 4"),
        ([b"\0" * (MESSAGE_BYTES + 1)], "at most 1048576 bytes"),
    ],
)
def test_bad_frames_are_refused(messages: list[bytes], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        assemble(messages, [20, 20, 20])


@given(NAMES, NAMES, st.integers(0, 10**15 - 1), st.integers(0, 10**15 - 1))
def test_a_call_survives_its_text(run: str, site: str, number: int, attempt: int) -> None:
    call = Call(run, site, "p0", number, attempt)
    assert Call.from_text(call.to_text()) == call


@pytest.mark.parametrize(
    "text", ["", "a/b/0", "a/b/p/0/0/0", "a/b/p/-1/0", "a b/b/p/0/0", "a/b/p/x/0"]
)
def test_other_texts_are_no_call(text: str) -> None:
    with pytest.raises(ProtocolError, match="run/site/process/number/attempt"):
        Call.from_text(text)


@given(st.sets(st.integers(0, 300)))
def test_ranges_survive_their_text(numbers: set[int]) -> None:
    assert wire.ranges_from_text(wire.ranges_to_text(numbers), 301) == numbers


def test_long_ranges_are_cut_to_a_subset() -> None:
    numbers = set(range(0, 20000, 2))
    text = wire.ranges_to_text(numbers)
    held = wire.ranges_from_text(text, 20000)
    assert len(text) <= 4000
    assert held < numbers
    assert len(held) > 500


@pytest.mark.parametrize("text", ["0-9,0-9", "5,3", "2-4,4"])
def test_ranges_ascend(text: str) -> None:
    """One that comes again costs the server as much as the first one does."""
    with pytest.raises(ProtocolError, match="ascending ranges"):
        wire.ranges_from_text(text, 10)


@given(st.text(alphabet="0123456789,-x", max_size=20))
def test_any_text_is_ranges_or_a_protocol_error(text: str) -> None:
    with contextlib.suppress(ProtocolError):
        assert wire.ranges_from_text(text, 50) <= set(range(50))


def test_control_messages() -> None:
    message = wire.to_json(number=1, text="a", items=[1], reason=None)
    kinds = {"number": int, "text": str, "items": list, "reason": (str, type(None))}
    assert wire.from_json(message, **kinds) == json.loads(message)
    for bad, text in [
        (b"", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b'{"number": NaN}', "must be JSON"),
        (b"[]", "must have the keys"),
        (b'{"text": "a"}', "must have the keys"),
        (b" " * (MESSAGE_BYTES + 1), "at most 1048576 bytes"),
    ]:
        with pytest.raises(ProtocolError, match=text):
            wire.from_json(bad, number=int)
    with pytest.raises(ProtocolError, match=r"`number` must be int. Received: 'True'"):
        wire.from_json(b'{"number": true}', number=int)
    with pytest.raises(ProtocolError, match="at most 1048576 bytes"):
        wire.to_json(text="a" * MESSAGE_BYTES)


@given(st.binary(max_size=60))
def test_any_bytes_are_control_or_a_protocol_error(message: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert set(wire.from_json(message, number=int)) == {"number"}


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "a" * 51, "\u00e9", "a\n"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="`site` must be 1 to 50 letters"):
        wire.check_name("site", name)


def test_a_packet_that_is_kept_does_not_keep_its_message() -> None:
    """Of however long a message: memory is bounded by what is kept, not by what came with it."""
    large = bytes(900_000)
    sizes = [1, 40, 1000, 60_000, 100_000]
    assembler = wire.Assembler([len(large)] * 6)
    for chunk, size in enumerate(sizes, start=1):
        [message] = wire.bundle([(0, large), (chunk, b"x" * size)])
        (_, first), (found, packet) = assembler.feed(message)
        assert (found, bytes(packet)) == (chunk, b"x" * size)
        for held in (first, packet):
            assert len(held.obj) <= 4 * len(held)
    # What fills its message is not copied.
    [message] = wire.bundle([(0, large)])
    [(_, packet)] = assembler.feed(message)
    assert packet.obj is message
