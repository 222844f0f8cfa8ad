# SPDX-License-Identifier: Apache-2.0
"""Results of rounds that are over, for children that come back from an older backup.

    store --round that is over--> Past --its results--> a child that does that round again

A child that was killed starts from its last backup and does the rounds since again; it gets the
results that the others got then. So rounds are kept from the oldest backup on, as children tell,
but never more than a limit of bytes: a child whose backup is older cannot come back. What Python's
objects take counts, too: packets may be of a few bytes each.

Here in memory; in files, where a server keeps its runs: `past_files`.

Invariant: the rounds that are kept follow one another without a gap, up to the newest one that was
appended.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MOST_IN_MEMORY = 256 << 20
"""Bytes that a server keeps in memory of what is over, whatever it may keep on disk."""

# Of Python's objects, beside the bytes of packets.
ROUND_BYTES, _PACKET_BYTES = 512, 256

Packet = npt.NDArray[np.uint8]
Results = Sequence[tuple[int, Packet]]


class Past:
    """Keeps results in memory. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        """Nothing is kept yet.

        Args:
            limit_bytes: of all results; a single round may be larger than that and is not kept.
        """
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()
        self._rounds: dict[int, Results] = {}
        self._bytes: dict[int, int] = {}
        # There may be a million of rounds, and each round asks for these two.
        self._oldest = 0  # if any is kept
        self._total = 0  # of all bytes
        self._needed = 0

    def append(self, number: int, results: Results) -> None:
        """Takes the results of a round, pairs of chunk and packet in order of merging.

        One that does not follow the newest one replaces all.
        """
        with self._lock:
            if self._bytes and number != self._oldest + len(self._bytes):
                self._forget(list(self._bytes))
            self._rounds[number] = results
            self._count(number, self._cost(results))
            self._keep(number, results)
            self._trim()

    def has(self, number: int) -> bool:
        """Whether the results of a round are kept; does not wait for one that is being written."""
        return number in self._bytes

    @property
    def oldest(self) -> int | None:
        """The oldest round that is kept; None: no round is. Does not wait for one being written."""
        return self._oldest if self._bytes else None

    @property
    def num_bytes(self) -> int:
        """About what all that is kept takes, in bytes."""
        with self._lock:
            return self._total

    def results(self, number: int) -> Results:
        """What `append` got.

        Raises:
            KeyError: the round is not kept.
        """
        with self._lock:
            return self._rounds[number]

    def need(self, number: int) -> None:
        """Rounds before `number` are not needed any more."""
        with self._lock:
            self._needed = max(self._needed, number)
            self._trim()

    def start(self) -> None:
        """What was taken so far may be written."""

    def restore(self, before: int, num_chunks: int) -> None:
        """Finds the rounds before `before` that a server before this one has kept."""

    def sync(self) -> None:
        """Makes what was appended durable, as far as it will be read again."""

    def close(self) -> None:
        """Nothing is asked for or appended any more."""

    def _trim(self) -> None:
        while self._bytes:
            if self._oldest >= self._needed and self._total <= self._limit_bytes:
                return
            self._forget([self._oldest])

    def _count(self, number: int, num_bytes: int) -> None:
        """Notes that a round is kept, which follows those that are."""
        if not self._bytes:
            self._oldest = number
        self._bytes[number] = num_bytes
        self._total += num_bytes

    def _cost(self, results: Results) -> int:
        """About what a round takes, in bytes."""
        return ROUND_BYTES + sum(_PACKET_BYTES + packet.nbytes for _, packet in results)

    def _keep(self, number: int, results: Results) -> None:
        """Puts away what is in memory."""

    def _forget(self, numbers: Sequence[int]) -> None:
        """Forgets all rounds, or the oldest one; others of `numbers` are not kept."""
        for number in numbers:
            self._rounds.pop(number, None)
            if number in self._bytes:
                self._total -= self._bytes.pop(number)
                self._oldest = number + 1
