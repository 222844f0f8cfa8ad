# SPDX-License-Identifier: Apache-2.0
"""What a party server passes on, as it comes from its children: packets, first weights.

Iterators that wait for children are consumed by threads of gRPC, which cannot be interrupted. When
a connection breaks, its iterator is ended by the one of the next connection; when all is over, by
`close`, or by the end of the session.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

from tf_hips.ps.client.passage import Batch
from tf_hips.ps.robust.sketched_party import SketchingStore
from tf_hips.ps.rounds.periods import PeriodicStore
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.session.session import Session
from tf_hips.ps.transport.wire import Buffer

Passed = Store | PeriodicStore
"""Rounds of which something goes up."""


class Turns:
    """One iterator of a kind at a time: the next one ends that before it, also while it waits."""

    def __init__(self, session: Session) -> None:
        """No iterator was asked for."""
        self._session = session
        self._turns: dict[tuple[int, ...], int] = {}
        self._is_closed = False

    def begin(self, kind: tuple[int, ...] = ()) -> Callable[[Callable[[], bool]], bool]:
        """Ends the iterator before; a function that waits, and says whether the new one goes on.

        It must be called with the session's lock held.
        """
        session = self._session
        with session.changed:
            turn = self._turns[kind] = self._turns.get(kind, 0) + 1
            session.changed.notify_all()

        def is_over() -> bool:
            return self._is_closed or self._turns[kind] != turn or session.ended is not None

        def wait(is_ready: Callable[[], bool]) -> bool:
            session.changed.wait_for(lambda: is_over() or is_ready())
            return not is_over()

        return wait

    def close(self) -> None:
        """Ends all."""
        with self._session.changed:
            self._is_closed = True
            self._session.changed.notify_all()


class Passing(Turns):
    """One round: packets as children complete them, results to the store."""

    def __init__(self, session: Session, store: Passed, number: int) -> None:
        """Round `number` of the store of `session`."""
        super().__init__(session)
        self.number = number
        self._store = store

    def batches(self, chunks: Sequence[int], held: frozenset[int]) -> Iterator[Batch]:
        """Packets that are complete and durable, until all of the round have been."""
        yield from self.ups(self.begin(tuple(chunks)), frozenset(chunks) - held)

    def ups(
        self, wait: Callable[[Callable[[], bool]], bool], mine: frozenset[int]
    ) -> Iterator[Batch]:
        """The same of the chunks in `mine`, for the iterator whose turn `wait` is of."""
        store, after = self._store, 0
        while after < len(store.chunks):
            with self._session.changed:
                if not wait(functools.partial(self._has_more, after)):
                    return
                after, news = store.ups(self.number, after)
            if batch := [(one, memoryview(packet)) for one, packet in news if one in mine]:
                yield batch

    def take(self, chunk: int, packet: memoryview) -> None:
        """Gives a chunk its result."""
        self._store.finish(self.number, chunk, packet)

    def go_on(self) -> None:
        """Children that wait hear that others go on."""
        with self._session.changed:
            self._session.note_moved()
            self._session.changed.notify_all()

    def _has_more(self, after: int) -> bool:
        return self._store.ups(self.number, after)[0] > after


class SketchPassing(Passing):
    """One round of a party server that makes sketches: packets go up when weights have come."""

    def __init__(self, session: Session, store: SketchingStore, number: int) -> None:
        """Round `number` of the store of `session`."""
        super().__init__(session, store, number)
        self._sketching = store
        self._seed: bytes | None = None

    def hear_seed(self, seed: bytes) -> None:
        """Takes the seed of the round, perhaps again."""
        with self._session.changed:
            self._seed = seed
            self._session.changed.notify_all()

    def hear_weights(self, data: Buffer) -> None:
        """Takes the weights of the leaves, perhaps again."""
        self._sketching.take_weights(self.number, data)

    def batches(self, chunks: Sequence[int], held: frozenset[int]) -> Iterator[Batch]:
        """Sketches when the seed is there, then the weighted sums, where there is a weight."""
        store, number = self._sketching, self.number
        wait = self.begin(tuple(chunks))
        with self._session.changed:
            if not wait(lambda: self._seed is not None or store.is_weighed(number)):
                return
            seed = self._seed
        found = None if seed is None else store.sketches(number, seed)
        if found is not None:
            yield [(len(store.model.chunks), found)]
        with self._session.changed:
            if not wait(functools.partial(store.is_weighed, number)):
                return
        if store.has_weight(number):
            yield from self.ups(wait, frozenset(chunks) - held)


class PassedWeights(Turns):
    """The first weights, as child 0 sends them."""

    def messages(self, position: int) -> Iterator[bytes]:
        """From byte `position` on, when they are durable."""
        wait = self.begin()
        weights = self._session.state.weights
        while position < weights.num_bytes:
            with self._session.changed:
                if not wait(functools.partial(weights.has_message, position)):
                    return
                message = weights.message(position)
            self._session.settle()
            yield message
            position += len(message)
