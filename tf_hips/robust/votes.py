# SPDX-License-Identifier: Apache-2.0
"""signSGD's majority vote on packets of onebit, which are counted and not decoded.

A packet of n elements is its prefix, two means of 4 bytes each, and one bit per element that is 1
where the gradient is negative. The two means are not looked at: a peer that lies about its scale
has one vote per element, as all others. Counters are bit-sliced: bit b of the count of 64 elements
is one word, so that a packet is added with two operations per word and bit.

Source: Bernstein et al., "signSGD with Majority Vote is Communication Efficient And Fault
Tolerant", ICLR 2019.
"""

import functools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from tf_hips.errors import PacketError
from tf_hips.ops import native
from tf_hips.ops.algorithms import onebit
from tf_hips.ops.compressor import CHUNK, chunk_sizes, packet_sizes
from tf_hips.ops.native import PREFIX_BYTES, Buffer, Bytes, Floats

_MEANS = 8
Words = npt.NDArray[np.uint64]


def onebit_majority(packets: Sequence[Buffer], n: int) -> Floats:
    """The sign of most packets at each element; 0 of a tie.

    A packet that is no packet of onebit is refused whole. An element that is 0 counts as positive,
    because onebit does not tell the two apart.

    Args:
        packets: of each child all packets of n elements, concatenated.
        n: elements.

    Returns:
        float32 [n] of -1, 0 and 1.

    Raises:
        PacketError: a packet is cut off, too long, or of another codec; says whose.
        ValueError: there are no packets.
    """
    if not packets:
        raise ValueError("there must be at least one child's packets. Received: none")
    for child, given in enumerate(packets):
        if not _is_well_formed(given, n):
            _raise_why(child, given, n)
    counters: list[Words] = []
    for given in packets:
        _add(counters, _bits(given, n))
    return _signs(counters, len(packets), n)


def can_be_counted(packets: Sequence[Buffer], n: int) -> bool:
    """Whether `onebit_majority` of packets is the majority of what they decode to.

    It is where all are packets of onebit whose means have a sign each: without one, all elements of
    a chunk may be 0, which says nothing.
    """
    return all(_is_well_formed(given, n) and _has_two_signs(given, n) for given in packets)


def _has_two_signs(given: Buffer, n: int) -> bool:
    data, at = np.frombuffer(given, np.uint8), 0
    for size in chunk_sizes(n):
        first = at + PREFIX_BYTES
        negative, positive = np.frombuffer(data[first : first + _MEANS].tobytes(), np.float32)
        if not (positive > 0 > negative and np.isfinite([positive, negative]).all()):
            return False
        at = first + _MEANS + -(-size // 8)
    return True


def _is_well_formed(given: Buffer, n: int) -> bool:
    """Whether the packets have the prefixes and the length that packets of n elements have.

    Any bits are codes, so nothing else can be wrong.
    """
    data = np.frombuffer(given, np.uint8)
    if data.size != native.wire_bytes(onebit(), n):
        return False
    at = 0
    for size in packet_sizes(n):
        if data[at : at + PREFIX_BYTES].tobytes() != _prefix(size):
            return False
        at += PREFIX_BYTES + _MEANS + -(-size // 8)
    return True


def _raise_why(child: int, given: Buffer, n: int) -> NoReturn:
    """Lets the decoder say what is wrong."""
    try:
        native.decode(onebit(), given, n)
    except PacketError as error:
        raise PacketError(f"child {child}: {error}") from error
    raise AssertionError("the decoder takes what has other prefixes or another length")


@functools.cache
def _prefix(size: int) -> bytes:
    zeros = np.zeros(size, np.float32)
    return native.encode(onebit(), zeros, native.Key(0, 0, 0))[:PREFIX_BYTES].tobytes()


def _bits(given: Buffer, n: int) -> Words:
    """The bits of all chunks, each filled up to whole words; CHUNK is a multiple of 64."""
    data = np.frombuffer(given, np.uint8)
    words = np.zeros(-(-n // 64), np.uint64)
    target = words.view(np.uint8)
    at = 0
    for chunk, size in enumerate(chunk_sizes(n)):
        length = -(-size // 8)
        first = at + PREFIX_BYTES + _MEANS
        target[chunk * CHUNK // 8 : chunk * CHUNK // 8 + length] = data[first : first + length]
        at = first + length
    return words


def _add(counters: list[Words], carry: Words) -> None:
    for place, counter in enumerate(counters):
        counters[place], carry = counter ^ carry, counter & carry
    if carry.any() or not counters:
        counters.append(carry)


def _signs(counters: list[Words], voters: int, n: int) -> Floats:
    """-1 where more than half of the voters say negative, 0 where half of them do, else 1."""
    half, is_odd = divmod(voters, 2)
    more = np.zeros_like(counters[0])
    equal = ~more
    for place in range(max(len(counters), half.bit_length()) - 1, -1, -1):
        bits = counters[place] if place < len(counters) else np.zeros_like(more)
        if half >> place & 1:
            equal &= bits
        else:
            more |= equal & bits
            equal &= ~bits
    signs = _of_bits(more, -1.0, n)
    return signs if is_odd else signs * _of_bits(equal, 0.0, n)


def _of_bits(words: Words, value: float, n: int) -> Floats:
    """`value` where a bit is 1, else 1: what packets of such means and bits decode to."""
    bits = words.view(np.uint8)
    parts, at = [], 0
    for size in chunk_sizes(n):
        parts += [np.frombuffer(_prefix(size), np.uint8), _as_bytes([value, 1.0])]
        parts.append(bits[at : at + -(-size // 8)])
        at += CHUNK // 8
    return native.decode(onebit(), np.concatenate(parts), n) if parts else np.ones(n, np.float32)


def _as_bytes(means: Sequence[float]) -> Bytes:
    return np.array(means, np.float32).view(np.uint8)
