# SPDX-License-Identifier: Apache-2.0
"""What both ends know about a model: the shapes of its gradients, and the chunks cut from them.

A tensor of n elements has ceil(n / CHUNK) chunks in row-major order; the chunks of all tensors, in
order of position, are numbered from 0. The number is what travels. Invariant: the table is a
function of the shapes alone.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from tf_hips.errors import ProtocolError
from tf_hips.ops import compressor as compressors
from tf_hips.ops.compressor import Compressor, chunk_sizes

MAX_RANK = 32
MAX_ELEMENTS = (
    1 << 40
)  # of one model: 4 TiB of float32, so that sums and products stay far from overflow


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk: its tensor's position, its first element there, its number of elements."""

    tensor: int
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The shapes of all gradients of a model, in order of position."""

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_json(cls, value: object) -> "Model":
        """A model from a peer's list of lists.

        Raises:
            ProtocolError: `value` is no list of shapes, or the model is beyond any sane size.
        """
        if not isinstance(value, list):
            raise ProtocolError(
                f"`shapes` must be a list of shapes. Received: {type(value).__name__}"
            )
        shapes: list[tuple[int, ...]] = []
        elements = 0
        for position, shape in enumerate(value):
            if not isinstance(shape, list) or len(shape) > MAX_RANK:
                raise ProtocolError(f"Shape {position} must be a list of at most {MAX_RANK} sizes.")
            for size in shape:
                if type(size) is not int or not 0 <= size <= MAX_ELEMENTS:
                    raise ProtocolError(
                        f"Shape {position} must hold sizes from 0 to 2^40. Received: "
                        f"{str(size)[:40]}"
                    )
            shapes.append(tuple(shape))
            elements += math.prod(shape)
            if elements > MAX_ELEMENTS:
                raise ProtocolError("The model must have at most 2^40 elements.")
        return cls(tuple(shapes))

    @functools.cached_property
    def num_elements(self) -> int:
        """Elements of all gradients together."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all gradients as float32."""
        return 4 * self.num_elements

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks of the model, by number."""
        table: list[Chunk] = []
        for tensor, shape in enumerate(self.shapes):
            offset = 0
            for size in chunk_sizes(math.prod(shape)):
                table.append(Chunk(tensor, offset, size))
                offset += size
        return tuple(table)

    def compressor(self, text: str) -> Compressor:
        """What encodes this model's gradients where all have agreed on `text`.

        Raises:
            ProtocolError: it is a budget with no room for the model.
        """
        try:
            return compressors.parse(text).for_sizes([math.prod(shape) for shape in self.shapes])
        except ValueError as error:
            raise ProtocolError(f"The model is too large: {error}") from error

    def packet_bytes(self, compressor: Compressor) -> tuple[int, ...]:
        """Bytes of each chunk's packet under `compressor`, by chunk number.

        Asked for in every round, computed once for each compressor.
        """
        if compressor not in self._packet_bytes:
            ways = [self.codec(compressor, chunk) for chunk in range(len(self.chunks))]
            kinds = list(zip(ways, (one.size for one in self.chunks), strict=True))
            lengths = {(way, size): way.chunk_packet_bytes(size) for way, size in set(kinds)}
            self._packet_bytes[compressor] = tuple(lengths[kind] for kind in kinds)
        return self._packet_bytes[compressor]

    @functools.cached_property
    def _packet_bytes(self) -> dict[Compressor, tuple[int, ...]]:
        return {}

    def codec(self, compressor: Compressor, chunk: int) -> Compressor:
        """What `compressor` is for the tensor of a chunk."""
        if not compressor.is_mixed:
            return compressor
        return compressor.of_size(math.prod(self.shapes[self.chunks[chunk].tensor]))

    def describe(self, chunk: int) -> str:
        """The chunk in words: which tensor, which elements."""
        where = self.chunks[chunk]
        shape = self.shapes[where.tensor]
        if where.size == math.prod(shape):
            return f"tensor {where.tensor} of shape {list(shape)}"
        last = where.offset + where.size - 1
        return f"tensor {where.tensor} of shape {list(shape)}, elements {where.offset} to {last}"


def first_difference(
    expected: Sequence[object], received: Sequence[object], noun: str
) -> str | None:
    """The first position where two lists differ, in words, or None where they are equal."""
    for position, (one, other) in enumerate(zip(expected, received, strict=False)):
        if one != other:
            return f"{noun} {position} is {_text(one)} there and {_text(other)} here"
    if len(expected) != len(received):
        return f"there are {len(expected)} of {noun} there and {len(received)} here"
    return None


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
