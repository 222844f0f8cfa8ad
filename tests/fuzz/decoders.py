# SPDX-License-Identifier: Apache-2.0
"""Random bytes for everything that decodes what peers send or files hold.

`python -m tests.fuzz` feeds them by coverage, `tests/ps/test_fuzz_targets.py` from Hypothesis.
Each target takes bytes, and raises nothing but what the decoder's docstring promises.
"""

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_hips.errors import PacketError, ProtocolError, StateError
from tf_hips.ps.disk.file_format import VERSION, Facts, Header, Reader, to_mark, to_record
from tf_hips.ps.robust import sketch
from tf_hips.ps.rounds import gather
from tf_hips.ps.rules.joint import Report, Verdict
from tf_hips.ps.terms.model import Model
from tf_hips.ps.terms.recorder import from_payload
from tf_hips.ps.transport import wire

LIMITS = (5, 100, 4096, 1 << 20)
_FRONT = struct.Struct("<8sIII")
_FACTS = Facts("job", ("a", "b"), None, "fp32")
_MODEL = Model(((3, 5), (), (70,)))
# A file in memory, where there is such a folder.
_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


def frames(data: bytes) -> None:
    """Messages of one stream."""
    assembler = wire.Assembler(LIMITS)
    num_bytes = 0
    with contextlib.suppress(ProtocolError):
        for message in _pieces(data):
            for chunk, packet in assembler.feed(message):
                assert len(packet) <= LIMITS[chunk]
                num_bytes += len(packet)
            held = len(assembler._packet)
            assert held <= max(LIMITS), f"{held} bytes are held"
        assembler.finish()
    assert num_bytes <= len(data)


def bundles(data: bytes) -> None:
    """What `bundle` makes of any packets is put together again."""
    packets = [(k % len(LIMITS), piece) for k, piece in enumerate(_pieces(data)) if piece]
    assembler = wire.Assembler([1 << 20] * len(LIMITS))
    got = [
        (chunk, bytes(packet))
        for message in wire.bundle(packets)
        for chunk, packet in assembler.feed(message)
    ]
    assembler.finish()
    assert got == packets


def texts(data: bytes) -> None:
    """Metadata and control messages."""
    text = data.decode("utf-8", "replace")
    for decode in (
        wire.Call.from_text,
        lambda one: wire.ranges_from_text(one, 5000),
        lambda one: wire.from_json(data, shapes=list, round=int, error=(str, type(None))),
    ):
        with contextlib.suppress(ProtocolError):
            decode(text)
    with contextlib.suppress(ProtocolError):
        Model.from_json(wire.from_json(data, shapes=list)["shapes"])
    with contextlib.suppress(ProtocolError):
        Model.from_json(_shapes(data))


def gathers(data: bytes) -> None:
    """The way up of a small value."""
    upload = gather.Upload(1000)
    try:
        for message in _pieces(data):
            upload.feed(message)
        found = upload.finish()
    except ProtocolError:
        return
    assert found is None or (len(found[1]) <= 1000 and found[0])


def sketches(data: bytes) -> None:
    """Sketches of a party's leaves, and their weights."""
    with contextlib.suppress(PacketError):
        found = sketch.PartyRows.from_bytes(data, 3, 2)
        assert found.sketches.shape == (len(found.squares), 2)
        assert found.to_bytes() == data
    with contextlib.suppress(PacketError):
        assert len(sketch.weights_from_bytes(data, 3)) == 3


def payloads(data: bytes) -> None:
    """A record's payload: JSON and bytes."""
    with contextlib.suppress(ValueError):
        from_payload(data)


def verdicts(data: bytes) -> None:
    """What shards tell each other about a round: any bytes, and any JSON before any numbers."""
    first, *rest = [*_pieces(data), b""]
    for payload in (data, struct.pack("<I", len(first)) + first + b"".join(rest)):
        with contextlib.suppress(ProtocolError):
            Report.from_bytes(payload, _MODEL, 3)
        with contextlib.suppress(ProtocolError):
            Verdict.from_bytes(payload, 3)


def files(data: bytes) -> None:
    """Any bytes as a file of a state."""
    _read(data)


def headers(data: bytes) -> None:
    """Any text in a header that has its checksum."""
    _read(_FRONT.pack(b"tf_hips\n", VERSION, len(data), zlib.crc32(data)) + data)


def journals(data: bytes) -> None:
    """A good header, then records, marks and torn bytes."""
    header = Header(_FACTS, is_first=True, mark=bytes(range(16)))
    content = bytearray(header.to_bytes())
    for number, piece in enumerate(_pieces(data)):
        what = piece[0] % 4 if piece else 0
        if what == 0:
            content += to_record(1 + number % 8, [piece]) + piece
        elif what == 1:
            content += to_mark(header.mark, len(content))
        elif what == 2:
            content += piece
        else:
            content += to_mark(header.mark, max(0, len(content) - len(piece)))
    _read(bytes(content))


TARGETS: tuple[Callable[[bytes], None], ...] = (
    frames,
    bundles,
    texts,
    gathers,
    payloads,
    verdicts,
    files,
    headers,
    journals,
    sketches,
)


def _pieces(data: bytes) -> list[bytes]:
    """Cuts `data`; two bytes before each piece are its length."""
    found, at = [], 0
    while at + 2 <= len(data):
        size = int.from_bytes(data[at : at + 2], "little")
        found.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return found


def _shapes(data: bytes) -> list[Any]:
    return [
        [*map(int, struct.unpack(f"<{len(one) // 8}q", one[: len(one) // 8 * 8]))]
        for one in _pieces(data)
    ]


def _read(content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=_FOLDER)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with contextlib.suppress(StateError):
            reader = Reader(Path(name))
            try:
                for _, payload in reader.records():
                    assert len(payload) <= len(content)
                assert 0 <= reader.torn_bytes <= len(content)
            finally:
                reader.close()
    finally:
        Path(name).unlink()


def one_input(data: bytes) -> None:
    """The first byte says which target gets the others."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])
