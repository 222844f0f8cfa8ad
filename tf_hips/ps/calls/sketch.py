# SPDX-License-Identifier: Apache-2.0
"""The server's end of a call of a round decided on sketches; the other end: `client.sketch`."""

from collections.abc import Callable, Iterator
from types import TracebackType

import grpc

from tf_hips.errors import ProtocolError
from tf_hips.ps.calls.vote import Poll
from tf_hips.ps.robust.sketch import FIXED, FIXED_KEY
from tf_hips.ps.robust.sketched_top import WeighingStore
from tf_hips.ps.rounds.round import Rounds
from tf_hips.ps.transport import wire


class WeighPoll:
    """What one caller says and hears beside its packets; as `vote.Poll`."""

    def __init__(self, store: WeighingStore, number: int, child: int) -> None:
        """Nothing has been told.

        Args:
            store: the rounds.
            number: the round.
            child: who calls.
        """
        self._store = store
        self._number = number
        self._child = child
        self._has_told_seed = False
        self._has_told_weights = False

    def vote(self) -> bool:
        """Notes that the rows of the caller's leaves are fixed; whether that is new."""
        return self._store.fix(self._number, self._child)

    def counting(self, received: Callable[[], int]) -> "WeighPoll":
        """`received` counts the bytes that come of the caller; nobody asks."""
        del received
        return self

    @property
    def is_due(self) -> bool:
        """Whether the caller has to be told something."""
        return self._seed() is not None or self._weights() is not None

    def messages(self) -> Iterator[bytes]:
        """What the caller has to be told."""
        first = self._store.sketch_chunk
        seed = self._seed()
        if seed is not None:
            self._has_told_seed = True
            yield from wire.bundle([(first, seed)])
        weights = self._weights()
        if weights is not None:
            self._has_told_weights = True
            yield from wire.bundle([(first + 1, weights)])

    def _seed(self) -> bytes | None:
        return None if self._has_told_seed else self._store.seed(self._number, self._child)

    def _weights(self) -> bytes | None:
        if self._has_told_weights:
            return None
        return self._store.weights_of(self._number, self._child)

    def __enter__(self) -> "WeighPoll":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The call has ended; what was said stands."""


def poll_of(
    rounds: Rounds, number: int, child: int, context: grpc.ServicerContext
) -> Poll | WeighPoll:
    """What a caller says and hears beside the packets of a round.

    Raises:
        ProtocolError: it says that its rows are fixed where nobody makes sketches, or does not
            where all must; or as for `Poll`.
    """
    said = dict(context.invocation_metadata() or ()).get(FIXED_KEY)
    makes_sketches = isinstance(rounds, WeighingStore)
    if said not in (None, FIXED) or makes_sketches != (said is not None):
        wanted = "say that its rows are fixed" if makes_sketches else "come without sketches"
        raise ProtocolError(f"A round must {wanted} here. Received: {FIXED_KEY}={str(said)[:80]}")
    if isinstance(rounds, WeighingStore):
        return WeighPoll(rounds, number, child)
    return Poll(rounds, number, child, context)
