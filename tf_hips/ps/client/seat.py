# SPDX-License-Identifier: Apache-2.0
"""A child's end of `calls.seat`: where it sits in a round, and what decides on its bits."""

from tf_hips.errors import ProtocolError
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.shards import Connection
from tf_hips.ps.client.vote import REPLICA, SEAT, Seat
from tf_hips.ps.transport import wire


class SeatClient:
    """Asks the one server that has all of the model. Thread-safe, as a link is."""

    def __init__(self, client: Connection) -> None:
        """A client that has joined.

        Raises:
            ProtocolError: there are several servers, whose groups would differ.
        """
        if not isinstance(client, Client):
            raise ProtocolError("Parties that vote must have one server. Received: several")
        self._link, self._wait_s = client.link, client.wait_s

    def seat(self, round: int) -> Seat:
        """Where this party sits in a round: what it hears of its group.

        Args:
            round: one that it has done, or the next.

        Raises:
            ProtocolError: there is no such seat yet, or the server's children do not vote.
            PeerError: the server cannot be reached.
        """
        answer = self._link.control(SEAT, wire.to_json(round=round), self._wait_s)
        return Seat(**wire.from_json(answer, group=int, groups=int))

    def say_replica(self, facts: str) -> str | None:
        """Says what decides on this party's bits; what of it differs at another party, if any is.

        Args:
            facts: an object as JSON, of texts by name (`vote.facts_to_json`).

        Raises:
            ProtocolError: it differs, and votes are on equal bytes: the run has ended.
            PeerError: the server cannot be reached.
        """
        answer = self._link.control(REPLICA, wire.to_json(facts=facts), self._wait_s)
        differs: str | None = wire.from_json(answer, differs=(str, type(None)))["differs"]
        return differs
