# SPDX-License-Identifier: Apache-2.0
"""What a client moves, wherever it comes from and goes to: rounds and first weights.

views     all packets of a round are there before the call, and so are the first weights
upper     both come from children while others travel, and what comes down goes to them
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tf_hips.ps.wire import Buffer

Batch = Sequence[tuple[int, Buffer]]

# Kinds and bytes of the first weights, as `FirstWeights` has them.
Described = tuple[tuple[str, ...], int]
# The bytes from a position on, in messages, as they come; ends early where the call is given up.
ReadWeights = Callable[[int], Iterator[bytes]]


class Passage(Protocol):
    """One round: packets up, results down, both as pairs of chunk number and packet."""

    @property
    def number(self) -> int:
        """The round."""

    def batches(self, chunks: Sequence[int], held: frozenset[int]) -> Iterator[Batch]:
        """The packets of `chunks` but those in `held`, as they come; ends after the last one.

        A call that breaks is made again, and asks again for the same chunks: the iterator from
        before ends then, also while it waits.
        """

    def take(self, chunk: int, packet: memoryview) -> None:
        """Takes a result, perhaps again; `packet` stays as it is."""
