# SPDX-License-Identifier: Apache-2.0
"""The first weights of a run: child 0 sends them, the server passes them on as they come.

Invariant: bytes arrive in order, and those that arrive again are skipped, so a transfer that was
cut off goes on where it stopped. Every child describes its own weights first; a difference is found
before a byte travels.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_hips.errors import ProtocolError
from tf_hips.ps.terms.model import first_difference
from tf_hips.ps.transport.wire import MESSAGE_BYTES, Buffer

# Kinds and bytes of all weights, as `FirstWeights` has them.
Described = tuple[tuple[str, ...], int]

_PIECE_BYTES = 64 << 20
_KIND = re.compile(r"([^\[\]]+)\[([0-9, ]*)\]")
_BFLOAT16_INFINITY = 0x7F80


@dataclasses.dataclass(frozen=True)
class _Span:
    """Where the bytes of one weight are among those of all.

    Attributes:
        begin: the first one.
        end: behind the last one.
        name: type of its elements as `kind_of` writes it.
        item_bytes: of an element.
    """

    begin: int
    end: int
    name: str
    item_bytes: int

    def are_finite(self, data: bytes) -> bool:
        """Whether whole elements are finite, as far as this is known of their type."""
        if self.name == "bfloat16":  # not NumPy's own
            bits = np.frombuffer(data, np.uint16) & _BFLOAT16_INFINITY
            return not (bits == _BFLOAT16_INFINITY).any()
        dtype = _numpy_type(self.name)
        if dtype is None or dtype.kind not in "fc":
            return True
        return bool(np.isfinite(np.frombuffer(data, dtype)).all())


class FirstWeights:
    """The bytes of all weights, in order. Not thread-safe: the session's lock guards it."""

    def __init__(self) -> None:
        """Weights that nobody has described yet."""
        self.num_bytes = 0
        self.is_forgotten = False
        self._kinds: tuple[str, ...] | None = None
        self._content = bytearray()
        self._spans: list[_Span] = []

    @property
    def is_described(self) -> bool:
        """Whether child 0 has said what will come."""
        return self._kinds is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What child 0 has said will come: type and shape of each weight."""
        return self._kinds or ()

    @property
    def are_whole(self) -> bool:
        """Whether all of them have come."""
        return self.is_described and self.held == self.num_bytes and not self.is_forgotten

    @property
    def held(self) -> int:
        """Bytes that have come."""
        return len(self._content)

    def describe(self, kinds: Sequence[str], num_bytes: int) -> None:
        """Takes child 0's description: type and shape of each weight, bytes of all.

        Raises:
            ProtocolError: there is another description already.
        """
        if self._kinds is not None and (self._kinds, self.num_bytes) != (tuple(kinds), num_bytes):
            raise ProtocolError(
                "The first synchronisation of this run was begun with other weights."
            )
        self._kinds, self.num_bytes = tuple(kinds), num_bytes
        self._spans = _spans(kinds)

    def difference(self, kinds: Sequence[str], num_bytes: int) -> str | None:
        """How another child's description differs from that of child 0; None where it does not."""
        text = first_difference(self._kinds or (), kinds, "weight")
        if text is None and num_bytes != self.num_bytes:
            text = f"there are {self.num_bytes} bytes there and {num_bytes} here"
        return text

    def take(self, position: int, data: Buffer) -> int:
        """Takes bytes `position` ... of the weights.

        Returns:
            The position after them.

        Raises:
            ProtocolError: they leave a gap or go beyond the end, or differ from what came before.
        """
        end = position + len(data)
        if position > self.held or end > self.num_bytes:
            raise ProtocolError(
                f"The first weights have {self.num_bytes} bytes and come in order, from byte "
                f"{self.held}. Received: bytes {position} to {end}"
            )
        known = min(end, self.held) - position
        if memoryview(self._content)[position : position + known] != memoryview(data)[:known]:
            raise ProtocolError(
                "The first weights must be the same when they come again: others may have them. "
                f"Received: other bytes from byte {position} on. Begin with the same weights in "
                "every process of a site (`keras.utils.set_random_seed`), or start a new run"
            )
        if end > self.held:
            self._content += memoryview(data)[self.held - position :]
        return end

    def nonfinite(self, position: int, data: Buffer) -> str | None:
        """The first weight into which bytes `position` ... would bring a NaN or an infinity.

        Args:
            position: of the first byte; what is held of the bytes before it is looked at, too.
            data: bytes that `take` has not got.

        Returns:
            Its number and kind, for messages; None: all elements that are whole are finite.
        """
        held, end = self.held, min(position + len(data), self.num_bytes)
        if not position <= held < end:
            return None
        new, content = memoryview(data)[held - position :], memoryview(self._content)
        place = bisect.bisect_right(self._spans, held, key=lambda span: span.end)
        for number, span in enumerate(self._spans[place:], place):
            if span.begin >= end:
                break
            # Messages end anywhere, also in an element.
            first = max(held, span.begin)
            first -= (first - span.begin) % span.item_bytes
            last = min(end, span.end)
            last -= (last - span.begin) % span.item_bytes
            whole = bytes(content[first : min(held, last)])
            whole += bytes(new[max(first, held) - held : max(last - held, 0)])
            if not span.are_finite(whole):
                return f"{number}, {self.kinds[number]}"
        return None

    def has_message(self, position: int) -> bool:
        """Whether a whole message from byte `position` is there."""
        return min(self.num_bytes, position + MESSAGE_BYTES) <= self.held

    def message(self, position: int) -> bytes:
        """The message from byte `position`."""
        return bytes(memoryview(self._content)[position : position + MESSAGE_BYTES])

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """Pairs of position and bytes, all of what has come; it does not change any more."""
        # While somebody holds a view of it, an array cannot grow, and a snapshot takes its time.
        content = memoryview(self._content if self.are_whole else bytes(self._content))
        for position in range(0, len(content), _PIECE_BYTES):
            yield position, content[position : position + _PIECE_BYTES]

    def forget(self) -> None:
        """Frees the memory, when nobody can begin with the weights any more."""
        self._content = bytearray()
        self._spans = []
        self.num_bytes = 0
        self.is_forgotten = True


def _spans(kinds: Sequence[str]) -> list[_Span]:
    """Where weights are, up to the first of a kind that is not known.

    Kinds come from a child. All others compare them with their own before a byte travels.
    """
    spans: list[_Span] = []
    begin = 0
    for kind in kinds:
        found = _KIND.fullmatch(kind)
        if found is None:
            break
        name, shape = found.groups()
        dtype = _numpy_type(name)
        size = dtype.itemsize if dtype is not None else 2 if name == "bfloat16" else 0
        try:
            count = math.prod(int(one) for one in shape.split(",") if one)
        except ValueError:
            break
        if size == 0:
            break
        spans.append(_Span(begin, begin + count * size, name, size))
        begin += count * size
    return spans


def _numpy_type(name: str) -> np.dtype[Any] | None:
    """A type of NumPy's own, by what it calls it; None: it is none, or has no size."""
    if re.fullmatch(r"[<>|=][a-z]\d+", name) is None:
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return None


def kind_of(dtype: np.dtype[Any], shape: Sequence[int]) -> str:
    """Type and shape of one weight in one text, such as `<f4[3, 5]`.

    Raises:
        ValueError: the type has no bytes of its own.
    """
    if dtype.hasobject:
        raise ValueError(f"Weights must be numbers. Received: an array of type {dtype}")
    # NumPy calls all types it did not make itself, such as bfloat16, V.
    return f"{dtype.name if dtype.kind == 'V' else dtype.str}{list(shape)}"


def cut_weights(
    arrays: Iterable[npt.NDArray[Any]], start: int, most_bytes: int = MESSAGE_BYTES
) -> Iterator[bytes]:
    """The bytes of contiguous arrays from byte `start` on, in messages.

    Args:
        arrays: each is asked for when the bytes before it have been taken.
        start: of the first byte.
        most_bytes: of a message; all but the last have as many.
    """
    pieces: list[npt.NDArray[np.uint8]] = []
    room = most_bytes
    for array in arrays:
        left = bytes_of(array)[start:]
        start = max(0, start - array.nbytes)
        while left.size:
            piece, left = left[:room], left[room:]
            pieces.append(piece)
            room -= piece.size
            if room == 0:
                yield b"".join(pieces)
                pieces, room = [], most_bytes
    if pieces:
        yield b"".join(pieces)


class Refill:
    """Arrays whose bytes come one after the other: each is given away when it is whole.

    So nothing is held of all of them but what whoever gets them keeps.

    Attributes:
        held: bytes that have come.
    """

    def __init__(
        self,
        kinds: Iterable[tuple[Any, Sequence[int]]],
        give: Callable[[npt.NDArray[Any]], object],
    ) -> None:
        """Nothing has come.

        Args:
            kinds: type and shape of each array.
            give: gets the arrays, in order.
        """
        self.held = 0
        self._kinds = iter(kinds)
        self._give = give
        self._array: npt.NDArray[Any] | None = None
        self._left = np.empty(0, np.uint8)  # of the array that is being filled
        self._next()

    def take(self, data: Buffer) -> None:
        """Takes the next bytes.

        Raises:
            ValueError: they are more than the arrays have.
        """
        rest = np.frombuffer(data, np.uint8)
        self.held += rest.size
        while rest.size:
            if self._array is None:
                raise ValueError(f"Bytes must belong to an array. Received: {rest.size} too many")
            part = rest[: self._left.size]
            self._left[: part.size] = part
            self._left, rest = self._left[part.size :], rest[part.size :]
            self._next()

    def _next(self) -> None:
        """Gives away what is whole, and goes on to what has bytes yet to come."""
        while not self._left.size:
            if self._array is not None:
                self._give(self._array)
                self._array = None
            kind = next(self._kinds, None)
            if kind is None:
                return
            dtype, shape = kind
            self._array = np.empty(tuple(shape), dtype)
            self._left = bytes_of(self._array)


def equal_bytes(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether arrays of one type and shape hold the same bytes; unlike numbers, NaNs may be."""
    first, second = bytes_of(one), bytes_of(other)
    places = range(0, first.size, MESSAGE_BYTES)
    return all(
        np.array_equal(first[at : at + MESSAGE_BYTES], second[at : at + MESSAGE_BYTES])
        for at in places
    )


def bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an array, without a copy where it is contiguous."""
    # One value for all elements has no bytes of its own for each.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
