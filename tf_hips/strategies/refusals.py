# SPDX-License-Identifier: Apache-2.0
"""What is said of ranks whose gradients a robust rule refuses or chooses, in log and events.

The log has a line when other ranks are refused than in the step before, the events every step. Rank
0 writes both, and who is refused hears of it in its own log. Who is chosen is an event alone.
"""

from collections.abc import Callable, Sequence

from tf_hips import log
from tf_hips.comm.robust_rows import Refused
from tf_hips.errors import ToleranceError
from tf_hips.robust import Aggregator
from tf_hips.strategies.gradients import Gradient


class Refusals:
    """Tells of one list of gradients; called on all ranks with the same."""

    def __init__(
        self,
        gradients: Sequence[Gradient],
        rule: Aggregator,
        rank: int,
        write_event: Callable[..., None],
    ) -> None:
        """Nobody has been refused yet.

        Args:
            gradients: of the list.
            rule: that refuses.
            rank: this one.
            write_event: writes an event of this process.
        """
        self._names = [gradient.name for gradient in gradients]
        self._rule = rule
        self._rank = rank
        self._write_event = write_event
        self._last: list[int] = []  # who was refused in step `_last_step`
        self._last_step = -1

    def __call__(self, step: int, refused: Sequence[Refused], error: ToleranceError | None) -> None:
        """Tells who takes no part in a step.

        Args:
            step: its number.
            refused: who, ascending.
            error: why there is no result, if there is none.

        Raises:
            ToleranceError: there is no result.
        """
        rows = [{"rank": one.rank, "reason": self._reason(one)} for one in refused]
        if self._rank == 0:
            self._write_event("rows_refused", step=step, rule=self._rule.text, rows=rows)
        named = "; ".join(f"rank {row['rank']}: {row['reason']}" for row in rows)
        if error is not None:
            raise ToleranceError(f"{error}, in step {step}: {named}")
        ranks = [one.rank for one in refused]
        is_same = ranks == self._last and step - self._last_step <= 1
        self._last_step = step
        if not is_same and (self._rank == 0 or self._rank in ranks):
            log.warning("From step %d on rows take no part in %s: %s", step, self._rule, named)
        self._last = ranks

    def chosen(self, step: int, chosen: Sequence[int], among: Sequence[int]) -> None:
        """Tells of whose gradients the result of a step is made.

        Args:
            step: its number.
            chosen: these ranks.
            among: all that took part.
        """
        if self._rank == 0:
            sites, all_of_them = ([f"rank {rank}" for rank in part] for part in (chosen, among))
            self._write_event("rows_chosen", step=step, sites=sites, among=all_of_them)

    def _reason(self, one: Refused) -> str:
        if not one.tensors:
            return one.reason
        first, *others = one.tensors
        more = f" and {len(others)} more" if others else ""
        return f"{one.reason} in gradient {first} ({self._names[first]}){more}"
