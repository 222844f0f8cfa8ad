# SPDX-License-Identifier: Apache-2.0
"""What becomes of the votes of a round: one row of each group for the rule, and who is named."""

import dataclasses
from collections.abc import Sequence

from tf_hips.log import Tell
from tf_hips.ps.robust.ballots import Ballots
from tf_hips.ps.rules.votes import Votes
from tf_hips.ps.rules.whole import Distances, Ruling, WholeRound
from tf_hips.robust import Aggregator


@dataclasses.dataclass
class Counts:
    """What was seen of one child since the server began, in rounds."""

    outvoted: int = 0
    proven: int = 0
    passed_over: int = 0


class Winners:
    """The rule behind the votes: one row for each group that has a vote."""

    def __init__(self, votes: Votes, then: Aggregator, sites: Sequence[str], secret: int) -> None:
        """A rule.

        Args:
            votes: how children vote.
            then: what aggregates the votes.
            sites: names of the children.
            secret: what buckets are drawn from; no child knows it.
        """
        self._detox = votes.with_rule(then)
        self._num_groups = votes.num_groups(len(sites))
        self._sites = tuple(sites)
        self._secret = secret
        self.dropped: dict[int, dict[int, str]] = {}  # by round; by a member, why

    def decide(self, round: WholeRound) -> Ruling:
        """As of `RoundRule`; the rows are those of winners, in the order of their groups."""
        round.missing = self.dropped.pop(round.number, {})
        then = self._detox.aggregator(len(self._sites), len(round.children))
        return Distances(then, self._sites, self._secret, self._num_groups).decide(round)


class Tally:
    """Who was outvoted, was absent, has lied or was asked in vain, and which groups are dropped."""

    def __init__(self, sites: Sequence[str], tell: Tell) -> None:
        """Nobody has voted.

        Args:
            sites: names of the children.
            tell: writes an event: its name, and fields.
        """
        self.counts = [Counts() for _ in sites]
        self._sites = tuple(sites)
        self._tell = tell

    def note(self, number: int, ballots: Ballots, passed_over: Sequence[int]) -> None:
        """Counts and tells how a round was decided.

        Args:
            number: the round.
            ballots: what was said in it.
            passed_over: who was asked for its packets, and had not sent them when others had.
        """
        votes = [ballots.vote(group) for group in ballots.groups]
        seen: dict[str, list[int]] = {
            "outvoted": sorted(child for vote in votes for child in vote.outvoted),
            "absent": sorted(child for vote in votes for child in vote.absent),
            "proven": sorted(child for vote in votes for child in vote.proven),
            "passed_over": sorted(passed_over),
        }
        for child in seen["outvoted"]:
            self.counts[child].outvoted += 1
        for child in seen["proven"]:
            self.counts[child].proven += 1
        for child in passed_over:
            self.counts[child].passed_over += 1
        for event, children in seen.items():
            if children:
                self._tell(event, round=number, sites=self._names(children))
        for group in ballots.groups:
            if group.is_dropped:
                sites = self._names(group.members)
                self._tell("dropped", round=number, sites=sites, reason=group.why)

    def _names(self, children: Sequence[int]) -> list[str]:
        return [self._sites[child] for child in children]
