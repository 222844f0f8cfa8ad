# SPDX-License-Identifier: Apache-2.0
"""Norms of rows whose chunks are merged each by itself, so that nothing could be refused for them.

A rule of coordinates has made a result of a chunk before the others are there. What is absurd it
bounds in each coordinate; whose it was is known when the round is whole, and told then.
"""

import threading
from collections.abc import Callable, Mapping

from tf_hips.robust.rows import Limits, absurd

# Hears of children whose norms are absurd: the round, and what is absurd, by child.
Note = Callable[[int, Mapping[int, str]], None]


class Norms:
    """The norms of one round at a time. Thread-safe.

    A server that was restarted in the middle of a round says nothing of that one.
    """

    def __init__(self, num_chunks: int, note: Note) -> None:
        """Nothing is known.

        Args:
            num_chunks: chunks of a round that are here.
            note: hears of what is absurd, when the last chunk has come.
        """
        self._num_chunks = num_chunks
        self._note = note
        self._lock = threading.Lock()
        self._number = -1
        self._by_chunk: dict[int, Mapping[int, float]] = {}

    def add(self, number: int, chunk: int, squares: Mapping[int, float]) -> None:
        """Takes the sums of squares of the rows of a chunk of round `number`, by child."""
        with self._lock:
            if number != self._number:
                self._number, self._by_chunk = number, {}
            self._by_chunk[chunk] = squares
            if len(self._by_chunk) < self._num_chunks:
                return
            by_chunk, self._by_chunk = self._by_chunk, {}
        children = sorted(set().union(*by_chunk.values()))
        # In the order of chunks: the last digit of a sum is that of every run.
        ordered = [by_chunk[place] for place in sorted(by_chunk)]
        totals = [sum(one.get(child, 0.0) for one in ordered) for child in children]
        found = {children[row]: reason for row, reason in absurd(totals, Limits()).items()}
        if found:
            self._note(number, found)
