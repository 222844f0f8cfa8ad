# SPDX-License-Identifier: Apache-2.0
"""What a server answers a child that has joined a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tf_hips.ps.rules import parse
from tf_hips.ps.rules import votes as voting
from tf_hips.ps.rules.votes import Votes
from tf_hips.ps.terms.tree import Guards, Paths, as_guards


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
        keeps_all: whether that is the first one of this party, and all gathers are kept, too.
        votes: how the children of its server vote, as a text of `rules.votes`; None: they do not.
        first_group: number of the first of its workers among the groups of workers that share
            batches; of groups that change, where those of its server begin.
        groups: how many such groups there are in the whole tree; without votes, all workers.
        robust: text of the robust rule by which its server merges for one above it; None: there is
            no such rule, or it is `rule`.
        quorum: text of what closes a round of its server without some children; None: nothing does.
        paths: of all parties of the tree, from its topmost server: where `parties` stand.
        guards: robust rules and quorums of all servers of the tree, the topmost one's path is "".
            The same on all workers of a tree, unlike `robust` and `quorum`.
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
    votes: str | None
    first_group: int
    groups: int
    robust: str | None
    quorum: str | None
    paths: Paths
    guards: Guards

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Welcome":
        """Reads what JSON has carried."""
        read = {
            "parties": tuple(map(str, fields["parties"])),
            "workers": tuple(map(int, fields["workers"])),
            "paths": tuple(map(str, fields["paths"])),
            "guards": as_guards(fields["guards"]),
        }
        return cls(**{**fields, **read})

    @property
    def bears_liars(self) -> bool:
        """Whether some server of the tree has a robust rule; the same on all of its workers."""
        return any(rule is not None for _, rule, _ in self.guards)

    @property
    def looks_at_leaves(self) -> bool:
        """Whether all parties of the tree are rows of its topmost server, whatever is between."""
        return parse(self.rule).sketch is not None

    @property
    def bears_refusals(self) -> bool:
        """Whether rounds go on without one of its children that has refused its own update."""
        rule = parse(self.rule)
        return rule.is_mean and (rule.is_robust or self.robust is not None)

    @property
    def voting(self) -> Votes | None:
        """How the children of its server vote; None: they do not."""
        return None if self.votes is None else voting.read(self.votes)


def why_apart(welcomes: Sequence[Welcome], servers: Sequence[str]) -> str | None:
    """Why servers that share a model are not in one run, as one begins and another goes on.

    A party that was killed while it joined is known to some of them only, but before all of them
    knew all parties there was no second round.

    Args:
        welcomes: what the servers answered.
        servers: their addresses.

    Returns:
        None: they are in one run.
    """
    going_on = [place for place, one in enumerate(welcomes) if one.is_back and one.newest > 0]
    new = [place for place, one in enumerate(welcomes) if not one.is_back]
    if not going_on or not new:
        return None
    return (
        "All servers of a run must be in the same one. Received: a run in round "
        f"{welcomes[going_on[0]].newest} from {servers[going_on[0]]}, and a new one from "
        f"{servers[new[0]]}, at which the run before is over or was lost. It ends at all; started "
        "again, all sites begin a new run"
    )
