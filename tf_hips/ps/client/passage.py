# SPDX-License-Identifier: Apache-2.0
"""What a client moves, wherever it comes from and goes to: rounds and first weights.

views     all packets of a round are there before the call, and so are the first weights
upper     both come from children while others travel, and what comes down goes to them
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from tf_hips.ps.client.patience import Patience
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.wire import Buffer

Batch = Sequence[tuple[int, Buffer]]

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

    def go_on(self) -> None:
        """The server says that others go on, so that whoever waits here must wait, too."""


class WayUp:
    """The way up of one attempt; a repeated one waits to hear what the server has."""

    def __init__(
        self, batches: Callable[[frozenset[int]], Iterator[Batch]], *, resumes: bool
    ) -> None:
        """Nothing is sent.

        Args:
            batches: gets what the server has, yields the rest.
            resumes: whether it waits for `resume`, to hear what the server has.
        """
        self._batches = batches
        self._held: frozenset[int] | None = frozenset()
        self._may_send = threading.Event()
        if not resumes:
            self._may_send.set()

    def resume(self, held: Iterable[int] | None) -> None:
        """Sends all but `held`; None: nothing, as the attempt is over.

        Also if it was to send, and gRPC has not begun: who begins late would end the next attempt.
        """
        if held is None or not self._may_send.is_set():
            self._held = None if held is None else frozenset(held)
            self._may_send.set()

    def messages(self) -> Iterator[bytes]:
        """What travels."""
        self._may_send.wait()
        if self._held is not None:
            for batch in self._batches(self._held):
                yield from wire.bundle(batch)


def moving(
    messages: Iterable[bytes], patience: Patience, is_progress: bool = True
) -> Iterator[bytes]:
    """`messages`; each buys time, unless they travel once more over another connection."""
    for message in messages:
        if is_progress:
            patience.renew()
        yield message


def say_held(chunks: set[int]) -> tuple[tuple[str, str], ...]:
    """Metadata by which a caller says what it has."""
    return ((wire.HELD_KEY, wire.ranges_to_text(chunks)),) if chunks else ()


def read_held(metadata: Iterable[tuple[str, str | bytes]] | None, limit: int) -> set[int]:
    """What the other side says that it has, of chunks below `limit`."""
    for key, value in metadata or ():
        if key == wire.HELD_KEY:
            return wire.ranges_from_text(str(value), limit)
    return set()


def read_terms(answer: bytes) -> dict[str, Any]:
    """What a server has answered to `Terms`, by name.

    Raises:
        ProtocolError: it is something else.
    """
    return wire.from_json(
        answer,
        join_timeout_s=float,
        round_timeout_s=float,
        max_gather_bytes=int,
        is_durable=bool,
        shard=list,
        is_over=bool,
        absent=list,
        lost_after_s=float,
    )
