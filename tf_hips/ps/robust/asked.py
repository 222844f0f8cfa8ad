# SPDX-License-Identifier: Apache-2.0
"""Who was asked for its packets, when it is looked at again, and who was passed over."""

from collections.abc import Callable, Collection

from tf_hips.ps.rounds.partial import Key
from tf_hips.ps.terms.quorum import Clock

# Seconds in which nothing comes of who was asked, before the next is asked, too.
ASK_S = 5.0
# How many times as long somebody may be sending, alone.
ASK_TIMES = 12
# And as long as it is waited for where rounds go on without some: a byte now and then is no row.
MOST_TIMES = 120


class Asked:
    """Those who were asked, by child and round. The store's lock guards it.

    Attributes:
        last: the last round in which a child was passed over and sent nothing whole, by child. It
            is asked after others: else it would keep every round waiting.
    """

    def __init__(self, clock: Clock) -> None:
        """Nobody was asked; `clock` calls later."""
        self.last: dict[int, int] = {}
        self._clock = clock
        self._silent: set[Key] = set()
        self._passed_over: set[Key] = set()
        self._timers: dict[Key, Callable[[], None]] = {}  # what stops them

    def hears(self, key: Key) -> None:
        """It has heard that it is asked."""
        self._silent.discard(key)

    def pass_over(self, key: Key, *, is_lost: bool) -> None:
        """Others are asked beside it; `is_lost`: nothing of it is expected any more."""
        self._passed_over.add(key)
        if is_lost:
            self._silent.add(key)

    def is_silent(self, key: Key) -> bool:
        """Whether nothing of it is expected."""
        return key in self._silent

    def end(self, number: int, owing: Collection[int]) -> list[int]:
        """Round `number` is decided: who was passed over, of those that still owe packets."""
        for key in [key for key in self._timers if key[1] == number]:
            self._timers.pop(key)()
        found = [child for child in sorted(owing) if (child, number) in self._passed_over]
        self.last |= dict.fromkeys(found, number)
        return found

    def look_later(self, key: Key, look: Callable[[], None], seconds: float = ASK_S) -> None:
        """Calls `look`, and not what was to be called for this one before."""
        if key in self._timers:
            self._timers.pop(key)()
        self._timers[key] = self._clock.after(seconds, look)

    def forget_before(self, first: int) -> None:
        """Rounds before `first` are over."""
        for keys in (self._silent, self._passed_over):
            keys.difference_update({key for key in keys if key[1] < first})
