# SPDX-License-Identifier: Apache-2.0
"""Which gradients PowerSGD takes for matrices, and how many bytes that saves: arithmetic of shapes.

The sum itself is comm.low_rank. Imports no TensorFlow.
"""

import dataclasses
import math
from collections.abc import Sequence

BYTES_PER_FLOAT = 4


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A gradient as a matrix, and the rank that is sent of it.

    Attributes:
        rows, columns: its sides.
        rank: columns of either factor, below both sides.
    """

    rows: int
    columns: int
    rank: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of its two factors, float32."""
        return BYTES_PER_FLOAT * self.rank * (self.rows + self.columns)


def matrix_of(shape: Sequence[int], rank: int, min_compression_rate: float) -> Matrix | None:
    """The matrix that a gradient of `shape` is for PowerSGD; None if it is summed as it is.

    Its axes are parted where the sides are shortest together: for a kernel of a dense layer or a
    convolution before the outputs, as in the paper, for one of attention [model, heads, size]
    behind the first axis.

    Args:
        shape: of the gradient.
        rank: of the factors.
        min_compression_rate: how many times fewer elements than the gradient the factors must have,
            at least 1.
    """
    splits = [(math.prod(shape[:axis]), math.prod(shape[axis:])) for axis in range(1, len(shape))]
    if not splits:
        return None
    rows, columns = min(reversed(splits), key=sum)
    if rank * (rows + columns) * min_compression_rate >= rows * columns:
        return None
    return Matrix(rows, columns, rank)


def wire_bytes(shape: Sequence[int], rank: int, min_compression_rate: float) -> int:
    """Bytes of what is summed over the ranks for a gradient of `shape`."""
    matrix = matrix_of(shape, rank, min_compression_rate)
    return BYTES_PER_FLOAT * math.prod(shape) if matrix is None else matrix.wire_bytes


def square(n: int) -> tuple[int, int]:
    """Sides of the matrix nearest to a square that holds n elements, its last row maybe in part."""
    if n < 0:
        raise ValueError(f"`n` must be at least 0. Received: n={n}")
    columns = math.isqrt(n - 1) + 1 if n else 0
    return (math.ceil(n / columns) if n else 0), columns
