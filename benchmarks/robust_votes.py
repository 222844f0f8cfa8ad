# SPDX-License-Identifier: Apache-2.0
"""What a server of children that vote receives: by digest, over the same with all packets.

Children are NumPy clients over gRPC on loopback, in threads of this process; bytes are those of
their sockets (TCP_INFO), joining and the question where they sit included. Honest ones, because a
liar costs the packets of one more child at most. Bytes do not depend on the machine.
"""

import concurrent.futures
from collections.abc import Iterator

import numpy as np

from benchmarks.collectives_jobs import Row, ratio_row

ABOUT = "robust-detox-bytes"
# Children, of a group, elements of the model.
CASES = ((9, 3, 1_000_000), (15, 5, 500_000))
ROUNDS = 3
_SEED = 7
_DEADLINE_S = 120.0


def measured() -> Iterator[Row]:
    """One row for each case; over 1/r, which a target holds against 5 % more."""
    for children, r, elements in CASES:
        sent = {vote: _sent(vote, children, r, elements) for vote in ("digest", "exact")}
        share = sent["digest"] / sent["exact"]
        yield ratio_row(
            "votes",
            f"bytes to the server by digest, beyond 1/{r} of a whole vote's; {children} children",
            [share - 1 / r],
            about=ABOUT,
            against=f"{sent['digest'] / 1e6:.4g} MB; whole {sent['exact'] / 1e6:.4g} MB",
        )


def _sent(vote: str, children: int, r: int, elements: int) -> int:
    """Bytes that all children have sent in a run of some rounds."""
    from tf_hips.config import Uplink
    from tf_hips.ops import algorithms, native
    from tf_hips.ps.client.client import Client
    from tf_hips.ps.client.seat import SeatClient
    from tf_hips.ps.server.server import Server, ServerConfig

    sites = tuple(f"site{child}" for child in range(children))
    rule = f"detox(r={r}, vote={vote}) >> median"
    server = Server(
        ServerConfig(parties=sites, insecure=True, rule=rule, round_timeout_s=_DEADLINE_S)
    )
    server.start()
    fp32 = algorithms.fp32()

    def train(site: str) -> int:
        client = Client(Uplink(server.address, site, None, _DEADLINE_S), "local", 1)
        try:
            client.join("fp32", "fp32", _SEED)
            client.agree_model([[elements]])
            for number in range(ROUNDS):
                group = SeatClient(client).seat(number).group
                row = np.random.default_rng((number, group)).standard_normal(elements, np.float32)
                client.exchange(number, native.encode(fp32, row, native.Key(group, number, 0)))
            client.leave()
            return client.wire_bytes().sent
        finally:
            client.close()

    try:
        with concurrent.futures.ThreadPoolExecutor(children) as pool:
            return sum(pool.map(train, sites))
    finally:
        server.stop(0.0)
