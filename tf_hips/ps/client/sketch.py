# SPDX-License-Identifier: Apache-2.0
"""A party server's end of a call of a round that is decided on sketches.

With the call it says that its leaves' rows are fixed, and hears the seed of the round when all have
said so; its sketches go up, its leaves' weights come down, then what it makes of its rows goes up
(`robust.sketch`). What comes once more, over another connection, is the same.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from tf_hips.errors import ProtocolError
from tf_hips.ps.client.passage import WayUp
from tf_hips.ps.robust.sketch import FIXED, FIXED_KEY, WEIGHT
from tf_hips.ps.terms.tree import MAX_LEAVES
from tf_hips.ps.transport.wire import Buffer
from tf_hips.robust.sketches import SEED_BYTES


@runtime_checkable
class Hearing(Protocol):
    """A `Passage` whose round is decided on sketches."""

    def hear_seed(self, seed: bytes) -> None:
        """Takes the seed of the round, perhaps again."""

    def hear_weights(self, data: Buffer) -> None:
        """Takes the weights of the leaves, perhaps again.

        Raises:
            PacketError: they are no such thing.
        """


class Fixed:
    """What is said and heard beside the packets of a round; as `vote.Ballot`."""

    metadata = ((FIXED_KEY, FIXED),)

    def __init__(self, passage: Hearing) -> None:
        """Nothing was heard."""
        self._passage = passage

    def waits(self, is_first: bool) -> bool:
        """Whether an attempt waits before it sends."""
        return not is_first

    def resume(self, call: WayUp, held: Collection[int]) -> None:
        """Goes on with an attempt after another, now that the server has said what it has."""
        call.resume(held)

    def limits(self, lengths: list[int]) -> list[int]:
        """`lengths` of packets, with those of a seed and of weights."""
        return [*lengths, SEED_BYTES, MAX_LEAVES * WEIGHT.itemsize]

    def hears(self, call: WayUp, chunk: int, num_chunks: int, packet: Buffer) -> bool:
        """Whether what has come is a seed or weights, which it takes."""
        del call
        if chunk == num_chunks:
            if len(packet) != SEED_BYTES:
                raise ProtocolError(f"A seed must have {SEED_BYTES} bytes. Received: {len(packet)}")
            self._passage.hear_seed(bytes(packet))
        elif chunk == num_chunks + 1:
            self._passage.hear_weights(packet)
        return chunk >= num_chunks
