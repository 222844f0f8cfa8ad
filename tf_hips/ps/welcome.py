# SPDX-License-Identifier: Apache-2.0
"""What a server answers a child that has joined a run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Welcome:
    """What a child learns when all have joined.

    Attributes:
        child: its position among the parties.
        parties: names of all parties of the tree, in its order.
        workers: number of workers of each party.
        compression: canonical text of the compressor of the way up.
        downlink: canonical text of the compressor of the way down.
        seed: seed of the run.
        rule: canonical text of the server's update rule.
        round: the first round of this party, if it has told it before; else 0.
        newest: the newest round.
        session: what tells this run from others of its name.
        is_back: whether this process has taken over from another one of its site.
        oldest: the oldest round that such a process can come back to.
        keeps_all: whether that is the first one of this party.
    """

    child: int
    parties: tuple[str, ...]
    workers: tuple[int, ...]
    compression: str
    downlink: str
    seed: int
    rule: str
    round: int
    newest: int
    session: str
    is_back: bool
    oldest: int
    keeps_all: bool
