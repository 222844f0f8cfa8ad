# SPDX-License-Identifier: Apache-2.0
"""A set of numbers most of which follow one another, as rounds that a site misses while it is away.

Takes memory, and time, by the number of spans and not of numbers: there may be a million of these.
"""

import bisect
from collections.abc import Iterable, Iterator

Span = tuple[int, int]  # from the first number up to, not including, the second


class Spans:
    """A set of whole numbers. Not thread-safe.

    Invariant: spans are in order, not empty, and do not touch each other.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """The numbers of `spans`, which are as `__iter__` gives them."""
        found = list(spans)
        self._firsts = [first for first, _ in found]
        self._ends = [end for _, end in found]

    def __contains__(self, number: int) -> bool:
        """Whether `number` is in the set."""
        place = bisect.bisect_right(self._firsts, number) - 1
        return place >= 0 and number < self._ends[place]

    def __iter__(self) -> Iterator[Span]:
        """The spans, in order."""
        return iter(zip(self._firsts, self._ends, strict=True))

    def add(self, number: int) -> None:
        """Puts a number into the set."""
        if number in self:
            return
        place = bisect.bisect_right(self._firsts, number)
        first, end, begin, stop = number, number + 1, place, place
        if place > 0 and self._ends[place - 1] == number:
            first, begin = self._firsts[place - 1], place - 1
        if place < len(self._firsts) and self._firsts[place] == number + 1:
            end, stop = self._ends[place], place + 1
        self._firsts[begin:stop], self._ends[begin:stop] = [first], [end]

    def discard(self, number: int) -> None:
        """Takes a number out of the set, if it is there."""
        if number not in self:
            return
        place = bisect.bisect_right(self._firsts, number) - 1
        halves = [(self._firsts[place], number), (number + 1, self._ends[place])]
        left = [(first, end) for first, end in halves if first < end]
        self._firsts[place : place + 1] = [first for first, _ in left]
        self._ends[place : place + 1] = [end for _, end in left]

    def drop_before(self, number: int) -> None:
        """Takes all numbers before `number` out of the set."""
        place = bisect.bisect_right(self._ends, number)
        del self._firsts[:place], self._ends[:place]
        if self._firsts and self._firsts[0] < number:
            self._firsts[0] = number
