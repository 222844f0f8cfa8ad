# SPDX-License-Identifier: Apache-2.0
"""Trees of servers for tests: what each round must give, computed without any server."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ps.parties import DEADLINE_S, Party, serving, together
from tests.support.certs import Certificates
from tf_hips.config import Uplink
from tf_hips.ops import compressor as compressors
from tf_hips.ops import native
from tf_hips.ops.compressor import CHUNK
from tf_hips.ps.server.server import Server
from tf_hips.ps.terms.model import Model

SEED = 7
# Two chunks in the first tensor, so that one travels while the other is still coming in.
SHAPES = ((CHUNK + 3000,), (8,), (40, 7))


@dataclasses.dataclass(frozen=True)
class Node:
    """A server and what is below it, by name: a leaf, or another server.

    Attributes:
        site: its name towards the server above; "" for the topmost.
        children: names of leaves, or nodes.
        sends: compression of the children.
        up: compression of its own way up; of the topmost that of the way down.
    """

    site: str
    children: tuple["str | Node", ...]
    sends: str = "fp32"
    up: str = "error_feedback(onebit)"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one if isinstance(one, str) else one.site for one in self.children)

    @property
    def leaves(self) -> tuple[tuple[str, "Node"], ...]:
        """Pairs of leaf and the server that it speaks to."""
        found: list[tuple[str, Node]] = []
        for one in self.children:
            found += [(one, self)] if isinstance(one, str) else one.leaves
        return tuple(found)


class Simulated:
    """The sums and encodings of a tree."""

    def __init__(self, node: Node, shapes: Sequence[Sequence[int]], first: int = 0) -> None:
        self.node = node
        self.model = Model(tuple(tuple(shape) for shape in shapes))
        self.sends = compressors.parse(node.sends)
        self.up = compressors.parse(node.up)
        self.seed = native.derive_seed(SEED, f"party/{node.site}" if node.site else "server")
        self.residuals = [np.zeros(chunk.size, np.float32) for chunk in self.model.chunks]
        self.children: list[Party | Simulated] = []
        for one in node.children:
            if isinstance(one, str):
                leaf = Party("127.0.0.1:1", one, None, shapes=shapes, compression=node.sends)
                leaf.child = first
                first += 1
                self.children.append(leaf)
            else:
                self.children.append(Simulated(one, shapes, first))
                first += len(one.leaves)

    def packets(self, number: int) -> list[npt.NDArray[np.uint8]]:
        """What this server sends up, or the topmost down, by chunk."""
        rows = []
        for child in self.children:
            if isinstance(child, Simulated):
                rows.append(child.packets(number))
            else:
                cuts = np.cumsum(self.model.packet_bytes(self.sends))[:-1]
                rows.append(np.split(child.packets(number), cuts))
        results = []
        for place, chunk in enumerate(self.model.chunks):
            merged = native.merge(self.sends, [row[place] for row in rows], chunk.size)
            key = native.Key(self.seed, number, chunk.tensor, chunk.offset)
            kept = self.residuals[place] if self.up.has_state else None
            results.append(native.encode(self.up, merged, key, kept=kept))
        return results


def expected(node: Node, num_rounds: int, shapes: Sequence[Sequence[int]] = SHAPES) -> list[bytes]:
    """What every leaf must get in rounds 0 to `num_rounds` - 1."""
    whole = Simulated(node, shapes)
    return [
        b"".join(packet.tobytes() for packet in whole.packets(number))
        for number in range(num_rounds)
    ]


@contextlib.contextmanager
def serving_tree(
    certificates: Certificates,
    node: Node,
    *,
    insecure: bool = True,
    below: dict[str, Any] | None = None,
    by_site: dict[str, dict[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[dict[str, Server]]:
    """The servers of a tree in this process, by site; "" is the topmost.

    Settings are those of all of them, `below` of all but the topmost, `by_site` of one each.
    """
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(one: Node, above: Server | None, role: str) -> None:
            own = dict(settings)
            if above is None:
                own.pop("uplink_compression", None)
            else:
                own.pop("rule", None)
                own |= below or {}
                identity = None if insecure else certificates.party(one.site)
                own["uplink"] = Uplink(above.address, one.site, identity, DEADLINE_S, role)
            own |= (by_site or {}).get(one.site, {})
            if insecure:
                own["insecure"] = True
            elif above is not None:
                own["tls"] = certificates.identity("server", one.site)
            server = stack.enter_context(serving(certificates, parties=one.names, **own))
            servers[one.site] = server
            for child in one.children:
                if isinstance(child, Node):
                    start(child, server, "server" if above is not None else "global-server")

        start(node, None, "")
        yield servers


@contextlib.contextmanager
def leaves_of(
    certificates: Certificates,
    node: Node,
    addresses: dict[str, str],
    *,
    insecure: bool = True,
    shapes: Sequence[Sequence[int]] = SHAPES,
    joins: bool = True,
) -> Iterator[list[Party]]:
    """The leaves of a tree, joined and agreed on the model, in its order."""
    members = [
        Party(
            addresses[server.site],
            name,
            None if insecure else certificates.party(name),
            shapes=shapes,
            compression=server.sends,
            downlink=node.up,
            above=server.up if server.site else None,
            server_role="server" if server.site else "global-server",
            workers=place + 1,
        )
        for place, (name, server) in enumerate(node.leaves)
    ]
    try:
        if joins:
            together(*(member.join for member in members))
        yield members
    finally:
        for member in members:
            member.client.close()


def addresses_of(servers: dict[str, Server]) -> dict[str, str]:
    return {site: server.address for site, server in servers.items()}
