# SPDX-License-Identifier: Apache-2.0
"""A strategy with a connection to a server: what moves over it."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_hips import log
from tf_hips.comm import primitives, watchdog
from tf_hips.errors import ProtocolError, is_final
from tf_hips.ps.client.shards import Connection
from tf_hips.ps.client.welcome import Welcome
from tf_hips.ps.terms.tree import bundle
from tf_hips.strategies import places
from tf_hips.strategies.agreeing import as_texts, doubted, from_texts
from tf_hips.strategies.grouped import GroupedStrategy
from tf_hips.strategies.over_parties import ExactReduction
from tf_hips.strategies.replicas import on_rank_0


def waiting_for_round() -> AbstractContextManager[None]:
    """While this rank waits for the other parties: the server says when one of them is too late."""
    return watchdog.doing("a round with the other parties", has_deadline=True)


class ConnectedStrategy(GroupedStrategy):
    """What of a strategy is about its connection; without a server nothing."""

    _exact: ExactReduction
    _bytes = (0, 0)
    _num_gathers = 0
    _gathered_bytes = 0
    _seconds_in_rounds = 0.0
    _when_left: tuple[Callable[[], None], ...] = ()  # called when the run was left in peace
    _is_resumed = False  # this process has taken over where its backup was made
    _takes_part = False  # it has agreed on the model, or gathered since it has taken over

    def _together(self) -> Welcome | None:
        """What the run is, where all parties keep step; None: this one is by itself."""
        is_apart = self.rule is not None and self.rule.is_asynchronous
        return None if is_apart or self._apart else self.welcome

    def _has_place(self) -> bool:
        """Whether the run ends where this process fails.

        One that has come back, and has done nothing yet, has changed nothing: others wait as they
        do for one that was killed, so that its site can be started as it must be.
        """
        return self.welcome is None or not self.welcome.is_back or self._takes_part

    def _tell_repeated(self, first_round: int) -> None:
        """Says so where rounds are done again from their beginning, for want of a backup."""
        welcome = self.welcome
        if welcome is None or not welcome.is_back or self._is_resumed:
            return
        if welcome.newest > first_round:
            log.warning(
                "Run %s goes on, and there is no backup here: rounds %d to %d are done again, with "
                "what was sent then. For a script that was changed, give the run another name "
                "(`--run`), or remove what the server keeps of it (`--state`).",
                self.config.run,
                first_round,
                welcome.newest,
            )

    def _leave(self, client: Connection, reason: str | None, error: BaseException | None) -> None:
        """Leaves the run; where another process can take this one's place says why it goes.

        Args:
            client: the connection.
            reason: why, if not in peace.
            error: what ends this process, if it is known; after some a launcher starts no other.
        """
        has_ended = client.ended("Leave") is not None
        comes_back = self.config.comes_back and not is_final(error)
        if reason is not None and (comes_back or not self._has_place()):
            if not (comes_back or has_ended):
                log.warning(
                    "This process had come back, and fails before it has taken its place. The run "
                    "goes on without it: start it again as it must be, before the server gives "
                    "this site up (`--lost-after`)."
                )
            client.away(reason)
            return
        client.leave(reason)
        places.leave(self.config)
        if reason is not None or has_ended:
            return  # others may want to go on from what is kept here
        for action in self._when_left:
            try:
                action()
            except OSError as kept:
                log.warning("What was kept to come back to the run is still there: %s", kept)

    def _connected(self) -> Connection:
        if self.client is None or self._is_closed:
            raise ProtocolError("The strategy has left its run; make a new one to train on.")
        return self.client

    def _connected_or_closing(self) -> Connection:
        if self.client is None:
            raise ProtocolError("Only rank 0 of a party with an uplink counts bytes.")
        return self.client

    def _over_parties(
        self, tensors: Sequence[tf.Tensor], label: str, operation: str | Sequence[str] = "sum"
    ) -> list[tf.Tensor]:
        if self._together() is None:
            return list(tensors)
        return self._exact(tensors, label, operation)

    def gather_objects(self, value: Any, label: str) -> list[Any]:
        """JSON values of all workers of all parties, by global rank, on all of them. Eager."""
        own = primitives.gather_objects(value, label)
        welcome = self._together()
        if welcome is None:
            return own
        payload, parties = json.dumps(own).encode(), doubted(self)
        texts = on_rank_0(lambda: as_texts(self._gather_bytes(label, payload), parties))
        texts = primitives.broadcast_object(texts, 0, f"{label} of all parties")
        told = zip(texts, welcome.workers, welcome.parties, strict=True)
        return from_texts(list(told), label, parties)

    def _gather_bytes(self, label: str, payload: bytes) -> list[bytes | None]:
        """Bytes of all parties, in their order; None of absent ones. On rank 0, in turn."""
        # The number counts answers: a gather that failed is asked for again, not skipped.
        with watchdog.doing("a sum over the parties", has_deadline=True):
            payloads = self._connected().gather(self._num_gathers, label, payload)
        self._num_gathers += 1
        self._takes_part = self._takes_part or self._is_resumed
        self._gathered_bytes += len(payload)
        return payloads

    def most_gather_bytes(self) -> int:
        """What a party may send at a time, as that of all is a bundle of a server above: rank 0."""
        welcome = self._together()
        if welcome is None:
            return super().most_gather_bytes()
        number = max(1, len(welcome.parties))
        front = len(bundle([None] * number))
        return max(1, (self._connected().max_gather_bytes - front) // number)

    def from_party(self, party: int, label: str, payload: bytes) -> bytes | None:
        """Bytes of one party, at all that keep step; None where it is absent. On rank 0, in turn.

        Args:
            party: which one.
            label: what they are, for messages.
            payload: this party's; those of others do not travel.
        """
        welcome = self._together()
        if welcome is None:
            return payload
        return self._gather_bytes(label, payload if welcome.child == party else b"")[party]

    def _first_sync(self, values: list[np.ndarray]) -> list[np.ndarray]:
        if self._is_resumed:
            return values  # they are about to be replaced by those of the backup
        client = self._connected()
        began = time.monotonic()
        synced = client.first_sync(values)
        sent, received = self._new_bytes()
        self.write_event(
            "first_sync",
            bytes=sum(value.nbytes for value in values),
            sent=sent,
            received=received,
            seconds=time.monotonic() - began,
        )
        return synced

    def _send(
        self, number: int, packets: np.ndarray, weight: float | None
    ) -> tuple[np.ndarray, float]:
        """What a round brings down, and its seconds; a thread that has the uplink may call it."""
        client, began = self._connected(), time.monotonic()
        merged = client.exchange(number, packets, weight)
        return merged, time.monotonic() - began

    def _note_round(self, number: int, seconds: float) -> None:
        """A round is over: counts it."""
        self._seconds_in_rounds += seconds
        self._open_round(number + 1)
        sent, received = self._new_bytes()
        self.write_event("round", round=number, sent=sent, received=received, seconds=seconds)

    def _read_bytes(self) -> tuple[int, int]:
        count = self._connected_or_closing().wire_bytes()
        return count.sent, count.received

    def _new_bytes(self) -> tuple[int, int]:
        """Bytes sent and received on the uplink since the last call."""
        before, self._bytes = self._bytes, self._read_bytes()
        return self._bytes[0] - before[0], self._bytes[1] - before[1]
