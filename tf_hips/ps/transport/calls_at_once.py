# SPDX-License-Identifier: Apache-2.0
"""How many calls of one child are open, so that one of them cannot take the threads of all.

A call has a thread of its server for as long as it is open. A child needs a watch, a pace, an
exchange, now and then one more; and the same again whose connection is gone and which have not
noticed. Whoever has more is told so and may try again.

A status is nobody's call and reads the residuals of a whole model, so there are few of them at
once, whoever asks: two are as good as twenty.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from tf_hips.errors import TfHipsError

MAX_CALLS = 16
"""Calls of one child at once; a server has threads for so many of each."""

MAX_STATUS = 2
"""Calls for a status at once, of all who ask; a server has threads to spare for so many."""

TOO_MANY = "calls at once"
"""What a child reads of it that has a call too many: it has no code of its own."""


class CrowdedError(TfHipsError):
    """A call too many of one child.

    Attributes:
        is_news: whether it is worth a line of log: the first one since there was room.
    """

    def __init__(self, text: str, *, is_news: bool) -> None:
        """A call that is refused for `text`."""
        super().__init__(text)
        self.is_news = is_news


class CallsAtOnce:
    """Counts the open calls of children. Thread-safe."""

    def __init__(self, sites: Sequence[str]) -> None:
        """No call is open.

        Args:
            sites: names of the children.
        """
        self._sites = tuple(sites)
        self._lock = threading.Lock()
        self._open = [0] * len(sites)
        self._are_told = [False] * len(sites)
        self._statuses = threading.Semaphore(MAX_STATUS)

    @contextlib.contextmanager
    def taking(self, child: int) -> Iterator[None]:
        """A call of `child` is open meanwhile.

        Raises:
            CrowdedError: it has as many as it may have.
        """
        with self._lock:
            if self._open[child] >= MAX_CALLS:
                is_news, self._are_told[child] = not self._are_told[child], True
                raise CrowdedError(
                    f"A site may have {MAX_CALLS} {TOO_MANY}. Received: one more of site "
                    f"`{self._sites[child]}`",
                    is_news=is_news,
                )
            self._open[child] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[child] -= 1
                if 2 * self._open[child] <= MAX_CALLS:
                    self._are_told[child] = False

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """A call for a status is open meanwhile.

        Raises:
            CrowdedError: there are as many as there may be.
        """
        if not self._statuses.acquire(blocking=False):
            raise CrowdedError(
                f"There may be {MAX_STATUS} {TOO_MANY} for a server's status. Received: one more",
                is_news=False,  # nothing is wrong
            )
        try:
            yield
        finally:
            self._statuses.release()
