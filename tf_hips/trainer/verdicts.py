# SPDX-License-Identifier: Apache-2.0
"""What the rule of simulated workers makes of them, told as a server tells it.

    outvoted      who said something else than its group
    dropped       a group without a vote, and why
    row_refused   a row that took no part; of a group that votes the row of all who agreed on it
    rows_chosen   the rows that the result is made of, and all that took part, of the same

The events are those of a server, so `tf-hips report` reads both alike. No TensorFlow here.
"""

from collections.abc import Callable, Sequence

from tf_hips.ps.robust.choices import Choices
from tf_hips.ps.robust.rejections import Rejections
from tf_hips.robust.aggregator import Aggregation
from tf_hips.robust.detox import Vote
from tf_hips.robust.rows import Rejected

NO_MAJORITY = "no majority"
"""Why a group is dropped where all of its members are at hand."""


class Verdicts:
    """Who was outvoted, dropped with its group, or refused."""

    def __init__(self, workers: int, write_event: Callable[..., None]) -> None:
        """Nobody was.

        Args:
            workers: how many there are.
            write_event: of the strategy: its name, and fields.
        """
        self._names = [f"worker {number}" for number in range(workers)]
        self._write_event = write_event
        self._rejections = Rejections(self._names)
        self._choices = Choices(self._names)
        self._rejections.tell = self._choices.tell = write_event

    def voted(self, step: int, votes: Sequence[Vote]) -> None:
        """Tells how the groups of a step have voted."""
        outvoted = sorted(worker for vote in votes for worker in vote.outvoted if vote.is_won)
        if outvoted:
            self._write_event("outvoted", round=step, sites=self._of(outvoted))
        for vote in votes:
            if not vote.is_won:
                members = self._of(vote.members)
                self._write_event("dropped", round=step, sites=members, reason=NO_MAJORITY)

    def refused(
        self, step: int, rejected: Sequence[Rejected], votes: Sequence[Vote] | None = None
    ) -> None:
        """Tells whose rows took no part in a step that was made.

        Args:
            step: of the run.
            rejected: the rows, with the reason.
            votes: of all groups, if rows are votes: those that were won, in order; None: a row is a
                worker.
        """
        self._rejections.note(step, by_worker(rejected, votes))

    def chosen(self, step: int, found: Aggregation, votes: Sequence[Vote] | None = None) -> None:
        """Tells whose rows a step was made of, where the rule chooses some.

        Args:
            step: of the run.
            found: what the rule came to.
            votes: as for `refused`.
        """
        if found.selected is None:
            return
        won = [vote.agreed for vote in votes if vote.is_won] if votes is not None else None
        chosen, among = (
            rows if won is None else [worker for row in rows for worker in won[row]]
            for rows in (found.selected, found.accepted)
        )
        self._choices.note(step, chosen, among)

    def stopped(
        self, step: int, rejected: Sequence[Rejected], votes: Sequence[Vote] | None = None
    ) -> str:
        """Tells the same of a step that the rule refuses to make.

        Returns:
            Who each row is, for the error; empty where rows are workers.
        """
        for worker, reason in sorted(by_worker(rejected, votes).items()):
            self._write_event(
                "row_refused",
                round=step,
                child=worker,
                child_site=self._names[worker],
                reason=reason,
            )
        if votes is None:
            return ""
        won = [vote for vote in votes if vote.is_won]
        told = [
            f"row {one.row} is the vote of {' and '.join(self._of(won[one.row].agreed))}"
            for one in rejected
        ]
        told += [
            f"the group of {' and '.join(self._of(vote.members))} has {NO_MAJORITY}"
            for vote in votes
            if not vote.is_won
        ]
        return "; ".join(told)

    def _of(self, workers: Sequence[int]) -> list[str]:
        return [self._names[worker] for worker in workers]


def by_worker(rejected: Sequence[Rejected], votes: Sequence[Vote] | None = None) -> dict[int, str]:
    """Of each worker whose row took no part the reason.

    Buckets are means of rows that do take part, so a row that is refused is never a bucket.

    Args:
        rejected: as for `Verdicts.refused`.
        votes: as for `Verdicts.refused`.
    """
    if votes is None:
        return {one.row: one.reason for one in rejected}
    won = [vote for vote in votes if vote.is_won]
    return {
        worker: f"{one.reason}, in the vote of its group"
        for one in rejected
        for worker in won[one.row].agreed
    }
