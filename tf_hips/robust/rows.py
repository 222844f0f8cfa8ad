# SPDX-License-Identifier: Apache-2.0
"""Which rows take part: NaN, infinities and absurd norms are refused, row by row, and named.

Rows are told apart by their sums of squares, which every pass over them gives anyway: a sum that is
not finite is a row with NaN, an infinity, or a norm whose square float32 does not hold. Beside the
others, a norm is absurd when it is `max_ratio` times their median: of the two middle ones the
lesser, which is between norms of honest rows while more than half of the rows are honest. Of two
rows nobody can say which is absurd.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tf_hips.ops.native import Doubles, Floats

_TOO_LARGE = "a norm whose square float32 does not hold"

_Number = TypeVar("_Number", int, float)

Rows: TypeAlias = Sequence[npt.NDArray[np.floating]] | npt.NDArray[np.floating]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a norm may be.

    Attributes:
        max_norm: of any row, in the unit of the rows; greater ones' squares do not fit float32.
        max_ratio: of a row's norm to the median norm of all finite rows, if there are more than
            two; infinity: any.

    Raises:
        ValueError: a limit is not positive, or `max_norm` is over 1e18.
    """

    max_norm: float = 1e18
    max_ratio: float = 1e4

    def __post_init__(self) -> None:
        if not 0 < self.max_norm <= 1e18:
            raise ValueError(
                f"`max_norm` must be in (0, 1e18]. Received: max_norm={self.max_norm!r}"
            )
        if not self.max_ratio >= 1:
            raise ValueError(f"`max_ratio` must be 1 or more. Received: {self.max_ratio!r}")


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A row that takes no part.

    Attributes:
        row: its number.
        reason: what is wrong with it, such as "NaN at element 17".
    """

    row: int
    reason: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


def as_rows(rows: Rows) -> list[Floats]:
    """The rows as float32 arrays of one length; what is one already is not copied.

    Raises:
        ValueError: there are no rows, or they differ in length or have not one dimension.
        TypeError: they are no rows, or one does not hold floats.
    """
    if not isinstance(rows, Iterable):
        raise TypeError(f"rows must be an array [n, d] or n arrays [d]. Received: {rows!r}")
    found: list[Floats] = []
    for number, row in enumerate(rows):
        array = np.asarray(row)
        if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
            raise TypeError(f"rows must hold floats. Received: {array.dtype} in row {number}")
        if array.ndim != 1 or (found and array.size != found[0].size):
            wanted = f"[{found[0].size}]" if found else "[d]"
            raise ValueError(
                f"rows must all have the shape {wanted}. Received: row {number} of shape "
                f"{list(array.shape)}"
            )
        with np.errstate(over="ignore"):  # what float32 does not hold becomes an infinity, refused
            found.append(np.ascontiguousarray(array, np.float32))
    if not found:
        raise ValueError("there must be at least one row. Received: none")
    return found


def refused(
    rows: Sequence[Floats], squares: Sequence[float], limits: Limits
) -> tuple[Rejected, ...]:
    """The rows that take no part, in their order.

    Args:
        rows: all of them; of a shard its part, which may name no element.
        squares: the sum of squares of each row, of all of its elements.
        limits: what norms may be.
    """
    found = absurd(squares, limits)
    for number, square in enumerate(squares):
        if not math.isfinite(square):
            found[number] = _what_is_not_finite(rows[number])
    return tuple(Rejected(number, reason) for number, reason in sorted(found.items()))


def lesser_median(values: Sequence[_Number]) -> _Number:
    """Of an even number of values the lesser of the two middle ones.

    With at most f liars among 2 f + 1 or 2 f + 2 values it never exceeds the largest honest one.

    Args:
        values: at least one.
    """
    return sorted(values)[(len(values) - 1) // 2]


def absurd(squares: Sequence[float], limits: Limits) -> dict[int, str]:
    """The rows whose norms are not what norms may be, with what is wrong, in their order.

    Args:
        squares: the sum of squares of each row, of all of its elements.
        limits: what norms may be.
    """
    norms = [math.sqrt(one) if math.isfinite(one) else math.inf for one in squares]
    sane = [norm for norm in norms if norm <= limits.max_norm]
    middle = lesser_median(sane) if sane else 0.0
    limit = limits.max_ratio * middle if middle > 0 and len(sane) > 2 else math.inf
    found = {}
    for number, norm in enumerate(norms):
        if math.isinf(norm):
            found[number] = _TOO_LARGE
        elif norm > limits.max_norm:
            found[number] = f"norm {norm:.3g}, at most {limits.max_norm:.3g}"
        elif norm > limit:
            found[number] = (
                f"norm {norm:.3g}, {norm / middle:.3g} times the median {middle:.3g} (at most "
                f"{limits.max_ratio:.3g})"
            )
    return found


def totals(of_chunks: Doubles) -> list[float]:
    """Sums over chunks, rounded once: the same in whatever order shards bring them."""
    return [math.fsum(column) for column in of_chunks.T.tolist()]


def _what_is_not_finite(row: Floats) -> str:
    bad = np.flatnonzero(~np.isfinite(row))
    if not bad.size:
        return _TOO_LARGE
    value = row[bad[0]]
    name = "NaN" if np.isnan(value) else "an infinity"
    return f"{name} at element {bad[0]}"
