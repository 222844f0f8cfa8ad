# SPDX-License-Identifier: Apache-2.0
"""What travels: frames of packets, call metadata, and the JSON of the small control calls.

A message is at most 1 MiB of raw bytes: a sequence of frames, so small chunks share one message and
large ones are cut over several. A frame is a little-endian header and bytes of one packet:

    u32 chunk number | u32 packet length | u32 part offset | u32 part length | part

The parts of a packet come in order, and one packet ends before the next begins. So a receiver needs
memory for one packet at a time, of a length that it knows before it takes the memory. The rest of a
message's identity (run, site, round, attempt) travels once per call, in the metadata.

Invariants: `Assembler.feed` yields exactly the packets that `bundle` was given, for any split into
messages; any other bytes raise `ProtocolError`. There is no pickle; lengths are checked before
memory is taken. A packet that is kept keeps four times its length at most: whoever sends many small
ones, each in a long message, takes no more memory than the model allows.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tf_hips.config import NAME
from tf_hips.errors import ProtocolError

MESSAGE_BYTES = 1 << 20
HEADER = struct.Struct("<IIII")
SERVICE = "tf_hips.Server"
METADATA_KEY = "hips"  # one short key: gRPC sends metadata of its users in full with every call
HELD_KEY = "held"
WEIGHT_KEY = "weight"
MAX_WEIGHT = 1e15  # so that sums over children are far from losing ones
# What a child says that it stands for when it has refused its own update: nothing, as 0 in every
# mean; by its sign robust rules tell it from a child that sits a round out.
REFUSED_WEIGHT = -0.0

# A packet is cut only where at least this much of it fits the rest of a message: no slivers.
_SMALLEST_PART = 4096
# How many times its own length a packet may hold of its message's memory.
_MOST_BESIDE = 4
_MAX_RANGES_TEXT = 4000  # gRPC bounds a call's metadata to 8 KiB

Buffer = bytes | bytearray | memoryview


def check_name(what: str, value: str) -> str:
    """Returns `value` if it can name a run or a site."""
    if not NAME.fullmatch(value):
        raise ValueError(
            f"`{what}` must be 1 to 50 letters, digits, dots, dashes or underscores. "
            f"Received: {value!r}"
        )
    return value


@dataclasses.dataclass(frozen=True)
class Frame:
    """A part of one packet: bytes `offset` ... of the `packet_bytes` bytes of `chunk`."""

    chunk: int
    packet_bytes: int
    offset: int
    part: memoryview


def parse(message: Buffer) -> Iterator[Frame]:
    """The frames of a message, as views of it.

    Raises:
        ProtocolError: a header or a part is cut off, a part is empty or lies outside its packet.
    """
    view = memoryview(message)
    if len(view) > MESSAGE_BYTES:
        raise ProtocolError(
            f"A message must have at most {MESSAGE_BYTES} bytes. Received: {len(view)}"
        )
    at = 0
    while at < len(view):
        if len(view) - at < HEADER.size:
            raise ProtocolError(
                f"A frame must begin with {HEADER.size} bytes of header. Received: "
                f"{len(view) - at} bytes"
            )
        chunk, packet_bytes, offset, part_bytes = HEADER.unpack_from(view, at)
        at += HEADER.size
        if part_bytes == 0 or offset + part_bytes > packet_bytes:
            raise ProtocolError(
                f"A part must lie inside its packet. Received: chunk={chunk} packet "
                f"length={packet_bytes} "
                f"part offset={offset} part length={part_bytes}"
            )
        if part_bytes > len(view) - at:
            raise ProtocolError(
                f"The frame of chunk {chunk} announces {part_bytes} bytes. Received: "
                f"{len(view) - at} bytes"
            )
        yield Frame(chunk, packet_bytes, offset, view[at : at + part_bytes])
        at += part_bytes


def bundle(packets: Iterable[tuple[int, Buffer]]) -> Iterator[bytes]:
    """Messages that carry `packets`, pairs of chunk number and packet, in their order."""
    pieces: list[Buffer] = []
    room = MESSAGE_BYTES
    for chunk, packet in packets:
        view = memoryview(packet)
        total = len(view)
        offset = 0
        while offset < total:
            left = total - offset
            if room - HEADER.size < min(left, _SMALLEST_PART):
                yield b"".join(pieces)
                pieces, room = [], MESSAGE_BYTES
            size = min(left, room - HEADER.size)
            pieces += (HEADER.pack(chunk, total, offset, size), view[offset : offset + size])
            room -= HEADER.size + size
            offset += size
    if pieces:
        yield b"".join(pieces)


class Assembler:
    """Puts the packets of one stream together again. One per call; not thread-safe."""

    def __init__(self, limits: Sequence[int]) -> None:
        """Takes `limits`, the greatest length of a packet in bytes, by chunk number; 0: none."""
        self._limits = limits
        self._chunk = -1
        self._packet = memoryview(b"")
        self._filled = 0

    def feed(self, message: Buffer) -> list[tuple[int, memoryview]]:
        """The packets that `message` completes: pairs of chunk number and packet.

        Raises:
            ProtocolError: bytes that are no frames, an unknown chunk, a length that is not the
                chunk's, a part that does not continue the packet before it.
        """
        done: list[tuple[int, memoryview]] = []
        for frame in parse(message):
            if self._chunk < 0:
                self._begin(frame)
                if len(frame.part) == frame.packet_bytes:
                    # Else one that is small would hold the memory of all of its message.
                    is_small = len(message) > _MOST_BESIDE * frame.packet_bytes
                    part = memoryview(bytes(frame.part)) if is_small else frame.part
                    done.append((frame.chunk, part))
                    continue
                self._chunk = frame.chunk
                # Not a bytearray, whose bytes are all set to 0 first.
                self._packet = np.empty(frame.packet_bytes, np.uint8).data
                self._filled = 0
            elif (frame.chunk, frame.packet_bytes, frame.offset) != (
                self._chunk,
                len(self._packet),
                self._filled,
            ):
                raise ProtocolError(
                    f"Expected chunk {self._chunk} of {len(self._packet)} bytes from byte "
                    f"{self._filled}. "
                    f"Received: chunk {frame.chunk} of {frame.packet_bytes} bytes from byte "
                    f"{frame.offset}"
                )
            self._packet[self._filled : self._filled + len(frame.part)] = frame.part
            self._filled += len(frame.part)
            if self._filled == len(self._packet):
                done.append((self._chunk, self._packet))
                self._chunk = -1
        return done

    @property
    def begun(self) -> list[tuple[int, int]]:
        """The packet that is not whole yet, if there is one: its chunk, and the bytes of it."""
        return [(self._chunk, self._filled)] if self._chunk >= 0 else []

    def finish(self) -> None:
        """Raises ProtocolError if the stream ended inside a packet."""
        if self._chunk >= 0:
            raise ProtocolError(
                f"The packet of chunk {self._chunk} has {len(self._packet)} bytes. "
                f"The stream ended after {self._filled}."
            )

    def _begin(self, frame: Frame) -> None:
        if frame.chunk >= len(self._limits):
            raise ProtocolError(
                f"The model has {len(self._limits)} chunks. Received: chunk {frame.chunk}"
            )
        if self._limits[frame.chunk] == 0:
            raise ProtocolError(f"Chunk {frame.chunk} is another server's.")
        if frame.packet_bytes > self._limits[frame.chunk]:
            raise ProtocolError(
                f"A packet of chunk {frame.chunk} has at most {self._limits[frame.chunk]} bytes. "
                f"Received: a packet that announces {frame.packet_bytes}"
            )
        if frame.offset != 0:
            raise ProtocolError(
                f"A packet must begin with byte 0. Received: chunk {frame.chunk} from byte "
                f"{frame.offset}"
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """The identity of one call, sent as metadata.

    Attributes:
        run: the run.
        site: who calls; the server compares it with the caller's certificate.
        process: which process of the site calls, a few letters and digits drawn at its start.
        number: the round of an exchange, the first byte of a first synchronisation, else 0.
        attempt: how often this call was tried before; informs only.
    """

    run: str
    site: str
    process: str
    number: int = 0
    attempt: int = 0

    def to_text(self) -> str:
        """The text that `from_text` reads."""
        return f"{self.run}/{self.site}/{self.process}/{self.number}/{self.attempt}"

    @classmethod
    def from_text(cls, text: str) -> "Call":
        """Reads what `to_text` wrote.

        Raises:
            ProtocolError: `text` is something else.
        """
        parts = text.split("/")
        if (
            len(parts) != 5
            or not all(NAME.fullmatch(part) for part in parts[:3])
            or not all(re.fullmatch(r"[0-9]{1,15}", part) for part in parts[3:])
        ):
            raise ProtocolError(
                f"A call's `{METADATA_KEY}` must be run/site/process/number/attempt. Received: "
                f"{text[:200]!r}"
            )
        return cls(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))


def ranges_to_text(numbers: Iterable[int]) -> str:
    """Chunk numbers as text such as `0-5,7`; cut where too long, which costs a repetition."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    if len(text) > _MAX_RANGES_TEXT:
        text = text[: text.rindex(",", 0, _MAX_RANGES_TEXT)]
    return text


def ranges_from_text(text: str, limit: int) -> set[int]:
    """Reads what `ranges_to_text` wrote; all numbers are below `limit`.

    Raises:
        ProtocolError: `text` is something else.
    """
    numbers: set[int] = set()
    before = -1
    for part in text[: 2 * _MAX_RANGES_TEXT].split(",") if text else ():
        match = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not before < first <= last < limit:
            raise ProtocolError(
                f"Chunks must be ascending ranges of numbers below {limit}. Received: {part[:40]!r}"
            )
        numbers.update(range(first, last + 1))
        before = last
    return numbers


def to_json(**values: object) -> bytes:
    """A control message.

    Raises:
        ProtocolError: it would be longer than a message may be.
    """
    message = json.dumps(values, separators=(",", ":"), allow_nan=False).encode()
    if len(message) > MESSAGE_BYTES:
        raise ProtocolError(
            f"A control message must have at most {MESSAGE_BYTES} bytes. Received: "
            f"{len(message)} bytes, "
            f"keys {', '.join(values)}"
        )
    return message


def from_json(message: Buffer, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """Reads a control message that has exactly the keys of `kinds`, each with a value of that type.

    Raises:
        ProtocolError: it is too long, no JSON, or has other keys or types.
    """
    if len(message) > MESSAGE_BYTES:
        raise ProtocolError(f"A control message must have at most {MESSAGE_BYTES} bytes.")
    try:
        values = json.loads(bytes(message), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"A control message must be JSON. Received: {bytes(message[:40])!r}"
        ) from error
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        keys = sorted(values)[:10] if isinstance(values, dict) else type(values).__name__
        raise ProtocolError(
            f"A control message must have the keys {sorted(kinds)}. Received: {str(keys)[:200]}"
        )
    for key, kind in kinds.items():
        allowed = kind if isinstance(kind, tuple) else (kind,)
        if type(values[key]) not in allowed:
            names = " or ".join(one.__name__ for one in allowed)
            raise ProtocolError(f"`{key}` must be {names}. Received: {str(values[key])[:40]!r}")
    return values


def weight_from_text(text: str) -> float:
    """What a child says that it stands for in a round.

    Raises:
        ProtocolError: it is no such number.
    """
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MAX_WEIGHT:
        raise ProtocolError(
            f"`weight` must be a number from 0 to {MAX_WEIGHT:g}. Received: {text[:40]!r}"
        )
    return weight


def _refuse_constant(text: str) -> float:
    raise ValueError(text)
