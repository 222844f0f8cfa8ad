# SPDX-License-Identifier: Apache-2.0
"""What a child that votes says and hears, and how it travels: beside a round's call.

    metadata `digest`      up, with the call: SHA-256 of the caller's packets, in hex
    frame of chunk n       down, of one byte, n = the number of chunks: packets are asked for

A child that is asked sends its packets as it would have done at once; others send none, and all get
the results. A call that is made again says the digest again. It is told what the server has: all
chunks stand for "not asked", and then only the frame asks.

Before a round a child asks where it sits, and once, before the first, it says what decides on its
bits (`calls.seat`).
"""

import dataclasses
import json
from collections.abc import Collection

from tf_hips.ps.client.passage import Passage, WayUp
from tf_hips.ps.robust.ballots import digest_of
from tf_hips.ps.transport.wire import Buffer

DIGEST_KEY = "digest"
ASK = b"\x01"
SEAT, REPLICA = "Seat", "Replica"


@dataclasses.dataclass(frozen=True)
class Seat:
    """Where a child sits in a round: all that it hears of its group.

    Attributes:
        group: number of its group, whose batch it computes, among those of the whole tree.
        groups: how many groups of workers with batches of their own there are.
    """

    group: int
    groups: int


def facts_to_json(facts: dict[str, str]) -> str:
    """What `SeatClient.say_replica` takes."""
    return json.dumps(dict(sorted(facts.items())), separators=(",", ":"))


class Ballot:
    """The child's end: what it says of a round, and when its packets go up."""

    def __init__(self, is_needed: bool, passage: Passage, chunks: Collection[int]) -> None:
        """What is said of `passage`.

        Args:
            is_needed: whether the server's children vote by digest; else nothing is said, and
                packets go up at once.
            passage: the round.
            chunks: those of the server, all of the model.
        """
        self._is_needed = is_needed
        self._chunks = frozenset(chunks)
        self.metadata: tuple[tuple[str, str], ...] = ()
        if is_needed:
            self.metadata = ((DIGEST_KEY, self._digest(passage).hex()),)

    def _digest(self, passage: Passage) -> bytes:
        batches = passage.batches(sorted(self._chunks), frozenset())
        return digest_of(packet for batch in batches for _, packet in batch)

    def waits(self, is_first: bool) -> bool:
        """Whether an attempt waits before it sends."""
        return self._is_needed or not is_first

    def resume(self, call: WayUp, held: Collection[int]) -> None:
        """Goes on with an attempt after another, now that the server has said what it has."""
        if not self._is_needed or not self._chunks <= set(held):
            call.resume(held)

    def limits(self, lengths: list[int]) -> list[int]:
        """`lengths` of packets, with that of the question."""
        return [*lengths, len(ASK)] if self._is_needed else lengths

    def hears(self, call: WayUp, chunk: int, num_chunks: int, packet: Buffer) -> bool:
        """Whether what has come is the question; then packets go up."""
        del packet
        if not self._is_needed or chunk != num_chunks:
            return False
        call.resume(())
        return True
