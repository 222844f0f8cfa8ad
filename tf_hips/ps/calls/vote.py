# SPDX-License-Identifier: Apache-2.0
"""The server's end of a vote: hears digests, asks for packets; the other end: `client.vote`."""

import re
from collections.abc import Callable, Iterator
from types import TracebackType

import grpc

from tf_hips.errors import ProtocolError
from tf_hips.ps.client.vote import ASK, DIGEST_KEY
from tf_hips.ps.robust.ballots import DIGEST_BYTES
from tf_hips.ps.robust.voted import VotingStore
from tf_hips.ps.rounds.round import Rounds
from tf_hips.ps.transport import wire

_HEX = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class Poll:
    """The server's end of one call of a child; of rounds without votes it does nothing."""

    def __init__(
        self, rounds: Rounds, number: int, child: int, context: grpc.ServicerContext
    ) -> None:
        """Reads what the caller says.

        Raises:
            ProtocolError: it says no digest where it must, or one where it must not; or it cannot
                compute what most compute.
        """
        self._store = rounds if isinstance(rounds, VotingStore) else None
        why_unlike = self._store.why_unlike(child) if self._store is not None else None
        if why_unlike is not None:
            raise ProtocolError(why_unlike)
        self._number = number
        self._child = child
        self._received: Callable[[], int] = int
        self._has_told = False
        metadata = dict(context.invocation_metadata() or ())
        text = metadata.get(DIGEST_KEY)
        must = self._store is not None and self._store.is_by_digest
        if must != (text is not None):
            wanted = "come with the digest of its packets" if must else "come without a digest"
            raise ProtocolError(f"A round must {wanted} here. Received: digest={str(text)[:80]}")
        if text is not None and not _HEX.fullmatch(str(text)):
            raise ProtocolError(
                f"`{DIGEST_KEY}` must be {2 * DIGEST_BYTES} hexadecimal digits. Received: "
                f"{str(text)[:80]!r}"
            )
        self._digest = None if text is None else bytes.fromhex(str(text))

    def vote(self) -> bool:
        """Gives the caller's ballot to the store; whether it is new."""
        if self._store is None or self._digest is None:
            return False
        return self._store.vote(self._number, self._child, self._digest)

    def counting(self, received: Callable[[], int]) -> "Poll":
        """`received` counts the bytes that come of the caller."""
        self._received = received
        return self

    @property
    def is_due(self) -> bool:
        """Whether the caller has to be told that it is asked."""
        store = self._store
        return store is not None and not self._has_told and store.asks(self._number, self._child)

    def messages(self) -> Iterator[bytes]:
        """The question, where it is due."""
        store = self._store
        if store is None or not self.is_due:
            return
        self._has_told = True
        yield from wire.bundle([(len(store.model.chunks), ASK)])
        store.told(self._number, self._child, self._received)

    def __enter__(self) -> "Poll":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The call has ended; if the caller owes packets, others are asked."""
        if self._store is not None and self._has_told:
            self._store.passes_over(self._number, self._child, is_lost=False)
