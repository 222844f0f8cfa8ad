# SPDX-License-Identifier: Apache-2.0
"""One round as a party sees it: packets that go up, and room for those that come down.

Nothing is copied on the way up: what travels are views of the caller's packets. On the way down a
packet is written once, to its place in the result. Clients of several servers work on one round at
the same time, each on the chunks of its server.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import numpy.typing as npt

from tf_hips.errors import PeerError
from tf_hips.ops.compressor import Compressor
from tf_hips.ps.client.passage import Batch
from tf_hips.ps.terms.model import Model

Packets = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a party: its packets, and room for the merged ones, both by chunk number.

    Attributes:
        number: the round.
        views: of the packets, which are not copied.
        result: uint8 [bytes], all merged packets.
        targets: views of `result`.
    """

    number: int
    views: Sequence[memoryview]
    result: Packets
    targets: Sequence[memoryview]

    def batches(self, chunks: Sequence[int], held: frozenset[int]) -> Iterator[Batch]:
        """All packets of `chunks` at once, but those in `held`."""
        yield [(chunk, self.views[chunk]) for chunk in chunks if chunk not in held]

    def take(self, chunk: int, packet: memoryview) -> None:
        """Puts a result into its place."""
        self.targets[chunk][:] = packet

    def go_on(self) -> None:
        """Nobody else waits for this round."""


@dataclasses.dataclass(frozen=True)
class Agreed:
    """What all parties have agreed on."""

    model: Model
    uplink: Compressor
    downlink: Compressor

    def downlink_bytes(self, number: int) -> tuple[int, ...]:
        """Bytes of each merged packet of a round, by chunk number."""
        return self.model.packet_bytes(self.downlink.at(number))

    def open_round(self, number: int, packets: Packets) -> Round:
        """A round of these packets; raises ValueError if they are not those of the model."""
        uplink, down = self.uplink.at(number), self.downlink_bytes(number)
        up = self.model.packet_bytes(uplink)
        packets = np.ascontiguousarray(packets)
        if packets.dtype != np.uint8 or packets.shape != (sum(up),):
            raise ValueError(
                f"`packets` must be uint8 of shape ({sum(up)},), the packets of the model agreed "
                f"on, by {uplink.text} in round {number}. Received: {packets.dtype} of shape "
                f"{packets.shape}"
            )
        result = np.empty(sum(down), np.uint8)
        return Round(number, _cut(packets, up), result, _cut(result, down))


class Halt:
    """By which one thread ends an exchange of another one, and leaves the connection as it is."""

    def __init__(self) -> None:
        """Nothing is ended."""
        self._lock = threading.Lock()
        self._stream: grpc.Future | None = None
        self._is_set = False

    def set(self) -> None:
        """Ends the exchange; one that comes later, too."""
        with self._lock:
            self._is_set = True
            if self._stream is not None:
                self._stream.cancel()

    @contextlib.contextmanager
    def bound(self, stream: grpc.Future, server: str) -> Iterator[None]:
        """From now on `set` ends this call; its error is then that of `check`."""
        with self._lock:
            self._stream = stream
            if self._is_set:
                stream.cancel()
        try:
            yield
        except (grpc.RpcError, grpc.FutureCancelledError):
            self.check(server)
            raise

    def check(self, server: str) -> None:
        """Raises PeerError if the exchange was ended."""
        if self._is_set:
            raise PeerError(f"Server {server}, Exchange: given up, as another server failed.")


def _cut(packets: Packets, lengths: Sequence[int]) -> list[memoryview]:
    view = memoryview(packets)
    cuts = itertools.accumulate(lengths, initial=0)
    return [view[start:end] for start, end in itertools.pairwise(cuts)]
