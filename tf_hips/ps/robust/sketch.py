# SPDX-License-Identifier: Apache-2.0
"""What travels where a round is decided on sketches: beside a round's call, over the slow link.

    metadata `fixed`         up, with the call: the rows of the caller's leaves cannot change
    frame of chunk n         down, n = the number of chunks: the seed of the round's sketches
    frame of chunk n         up: which leaves have a row, squared norms, sketches
    frame of chunk n + 1     down: the weight of each of the caller's leaves
    frames of chunks 0 .. n - 1, as ever: the weighted sum of the caller's rows up, results down

Rows as they travel, little-endian: of each leaf of the caller one byte (0: no row, 1: a row, 2: it
has refused its own update), of each row its squared norm in float64, then k numbers in float32.
A weight is a float32; 0 has no part in the result, and -0 is a row that was refused.
"""

import dataclasses

import numpy as np

from tf_hips.errors import PacketError
from tf_hips.ops.native import Bytes, Doubles, Floats
from tf_hips.ps.transport.wire import Buffer

FIXED_KEY = "fixed"
FIXED = "1"
NONE, ROW, REFUSED = range(3)  # what is known of a leaf
WEIGHT = np.dtype("<f4")
_NUMBER, _NORM = np.dtype("<f4"), np.dtype("<f8")


@dataclasses.dataclass(frozen=True)
class PartyRows:
    """What the topmost server knows of the rows of one party.

    Attributes:
        leaves: NONE, ROW or REFUSED of each leaf.
        squares: squared norms of those that have a row, in the order of leaves.
        sketches: of the same, float32 [rows, k].
    """

    leaves: Bytes
    squares: Doubles
    sketches: Floats

    def to_bytes(self) -> bytes:
        """As it travels."""
        return b"".join(
            (
                self.leaves.astype(np.uint8).tobytes(),
                self.squares.astype(_NORM).tobytes(),
                self.sketches.astype(_NUMBER).tobytes(),
            )
        )

    @classmethod
    def from_bytes(cls, data: Buffer, num_leaves: int, k: int) -> "PartyRows":
        """Reads what `to_bytes` wrote.

        Args:
            data: what has come.
            num_leaves: leaves of the party.
            k: numbers of a sketch.

        Raises:
            PacketError: it is something else, or a number is none.
        """
        found = np.frombuffer(data, np.uint8)
        leaves = found[:num_leaves]
        if leaves.size < num_leaves or (leaves > REFUSED).any():
            raise PacketError(
                f"Sketches must begin with one byte for each of {num_leaves} leaves, {REFUSED} at "
                f"most. Received: {found[:16].tobytes().hex()} of {found.size} bytes"
            )
        count = int((leaves == ROW).sum())
        wanted = most_bytes(num_leaves, k) - (num_leaves - count) * _row_bytes(k)
        if found.size != wanted:
            raise PacketError(
                f"Sketches of {count} rows with k={k} must have {wanted} bytes. Received: "
                f"{found.size}"
            )
        cut = num_leaves + count * _NORM.itemsize
        squares = np.frombuffer(found[num_leaves:cut].tobytes(), _NORM).astype(np.float64)
        numbers = np.frombuffer(found[cut:].tobytes(), _NUMBER).astype(np.float32)
        if not ((squares >= 0).all() and np.isfinite(numbers).all()):
            raise PacketError(
                "Norms must be >= 0, and sketches finite. Received: norms from "
                f"{squares.min(initial=0.0):g}, {int((~np.isfinite(numbers)).sum())} numbers that "
                "are not finite"
            )
        return cls(leaves.copy(), squares, numbers.reshape(count, k))


def most_bytes(num_leaves: int, k: int) -> int:
    """Bytes of sketches of so many leaves, if all have a row."""
    return num_leaves * (1 + _row_bytes(k))


def weights_to_bytes(weights: Floats) -> bytes:
    """Weights as they travel."""
    return weights.astype(WEIGHT).tobytes()


def weights_from_bytes(data: Buffer, num_leaves: int) -> Floats:
    """Reads what `weights_to_bytes` wrote.

    Raises:
        PacketError: it is something else.
    """
    if len(data) != num_leaves * WEIGHT.itemsize:
        raise PacketError(
            f"Weights of {num_leaves} leaves must have {num_leaves * WEIGHT.itemsize} bytes. "
            f"Received: {len(data)}"
        )
    found = np.frombuffer(bytes(data), WEIGHT).astype(np.float32)
    if not np.isfinite(found).all():
        raise PacketError(f"Weights must be finite. Received: {found[:16].tolist()}")
    return found


def _row_bytes(k: int) -> int:
    return _NORM.itemsize + k * _NUMBER.itemsize
