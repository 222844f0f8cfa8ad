# SPDX-License-Identifier: Apache-2.0
"""Children that vote, in one process, over real sockets: honest ones, and some that lie."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ps.parties import DEADLINE_S, together
from tf_hips.config import Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ps.client.client import Client
from tf_hips.ps.client.passage import Passage
from tf_hips.ps.client.seat import SeatClient
from tf_hips.ps.client.vote import Ballot
from tf_hips.ps.server.server import Server, ServerConfig
from tf_hips.ps.terms.model import Model
from tf_hips.robust.detox import Detox

SITES = tuple("abcdefg")
SHAPES = [[40], [5, 3], [7]]
MODEL = Model.from_json(SHAPES)
SIZE = MODEL.num_elements
Floats = npt.NDArray[np.float32]
Packets = npt.NDArray[np.uint8]
SEED = 7


def gradient(number: int, group: int, size: int = SIZE) -> Floats:
    """What honest members of a group compute in a round."""
    return np.random.default_rng((number, group)).standard_normal(size, np.float32)


@dataclasses.dataclass
class Behaviour:
    """What a child does otherwise than others.

    Attributes:
        gradient: what it sends instead of its own.
        digest: what it says of its packets instead of the truth.
        is_silent: whether it takes no part.
    """

    gradient: Callable[[int, Floats], Floats] = lambda number, own: own
    digest: Callable[[int, str], str] = lambda number, own: own
    is_silent: Callable[[int], bool] = lambda number: False


class _Saying(Client):
    """A client that may say another digest than that of its packets."""

    say: Callable[[int, str], str]

    def _ballot(self, passage: Passage) -> Ballot:
        found = super()._ballot(passage)
        found.metadata = tuple((key, self.say(passage.number, one)) for key, one in found.metadata)
        return found


class Voter:
    """A child that trains on gradients of its group."""

    def __init__(
        self,
        address: str,
        site: str,
        *,
        behaviour: Behaviour | None = None,
        compression: str = "fp32",
        shapes: Sequence[Sequence[int]] = SHAPES,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.site = site
        self.does = behaviour if behaviour is not None else Behaviour()
        self.compressor = compressors.parse(compression)
        self.shapes = [list(shape) for shape in shapes]
        self.model = Model.from_json(self.shapes)
        self.client = _Saying(Uplink(address, site, None, deadline_s), "local", 1)
        self.client.say = self.does.digest
        self.asks = SeatClient(self.client)
        self.seats: dict[int, int] = {}

    def join(self, rule: str | None = None, *, is_agreed: bool = True) -> None:
        self.client.join(self.compressor.text, "fp32", SEED, rule)
        if is_agreed:
            self.client.agree_model(self.shapes)
        self.asks = SeatClient(self.client)  # it waits as long as the server has said

    def packets(self, number: int) -> Packets:
        """Encodes with noise that a group has in common."""
        seat = self.asks.seat(number)
        self.seats[number] = seat.group
        row = self.does.gradient(number, gradient(number, seat.group, self.model.num_elements))
        sizes = [int(np.prod(shape)) for shape in self.shapes]
        rows = np.split(row, np.cumsum(sizes)[:-1])
        return np.concatenate(
            [
                native.encode(
                    self.compressor.of_size(size), part, native.Key(seat.group, number, tensor)
                )
                for tensor, (part, size) in enumerate(zip(rows, sizes, strict=True))
            ]
        )

    def exchange(self, number: int) -> Floats | None:
        """One round; what came down, or None where it took no part."""
        if self.does.is_silent(number):
            return None
        merged = self.client.exchange(number, self.packets(number))
        return decoded(merged, self.model)


def decoded(packets: Packets, model: Model = MODEL) -> Floats:
    fp32 = compressors.parse("fp32")
    lengths = model.packet_bytes(fp32)
    cuts = np.split(packets, np.cumsum(lengths)[:-1])
    return np.concatenate(
        [
            native.decode(fp32, part, chunk.size)
            for part, chunk in zip(cuts, model.chunks, strict=True)
        ]
    )


@contextlib.contextmanager
def voting(
    rule: str,
    behaviours: Mapping[str, Behaviour] | None = None,
    *,
    sites: Sequence[str] = SITES,
    compression: str = "fp32",
    shapes: Sequence[Sequence[int]] = SHAPES,
    are_agreed: bool = True,
    **settings: Any,
) -> Iterator[tuple[Server, list[Voter]]]:
    """A server of children that vote, and the children, joined."""
    settings = {
        "round_timeout_s": DEADLINE_S,
        "join_timeout_s": DEADLINE_S,
        "parties": tuple(sites),
        "rule": rule,
        "insecure": True,
        **settings,
    }
    server = Server(ServerConfig(**settings))
    server.start()
    members = [
        Voter(
            server.address,
            site,
            behaviour=(behaviours or {}).get(site),
            compression=compression,
            shapes=shapes,
        )
        for site in sites
    ]
    try:
        together(*(lambda one=one: one.join(is_agreed=are_agreed) for one in members))
        yield server, members
    finally:
        for one in members:
            one.client.close()
        server.stop(0.0)


def one_round(members: Sequence[Voter], number: int) -> Floats:
    """What all got that took part, which is the same for all."""
    results = together(*(lambda one=one: one.exchange(number) for one in members))
    there = [one for one in results if one is not None]
    assert all(one.tobytes() == there[0].tobytes() for one in there)
    return there[0]


def secret_of(server: Server) -> int:
    """What the server draws groups from, which no child knows."""
    secret = server._session.state.electing.secret
    assert secret is not None
    return secret


def expected(server: Server, detox: Detox, number: int, rows: Sequence[Floats]) -> Floats:
    """What the function makes of the same rows."""
    return detox.run(rows, seed=secret_of(server), step=number).vector


def rows_of(members: Sequence[Voter], number: int) -> list[Floats]:
    """What children have sent in a round that is over."""
    return [
        one.does.gradient(number, gradient(number, one.seats[number], one.model.num_elements))
        for one in members
    ]


def children(server: Server) -> dict[str, dict[str, Any]]:
    """What the server tells of its children, by name."""
    return {one["site"]: one for one in server.snapshot()["children"]}
