# SPDX-License-Identifier: Apache-2.0
"""What is told of the rounds of one model: how far they are, whose packets came, what came of them.

Answers only. `store` takes packets in and merges them.

Invariant: a result, or a refusal, is told when the packets that it was made of are durable.
"""

import threading
from collections.abc import Collection

from tf_hips.errors import NonFiniteError, ProtocolError, ToleranceError
from tf_hips.ps.rounds.partial import Partial
from tf_hips.ps.rounds.round import Round
from tf_hips.ps.rules import UpdateRule
from tf_hips.ps.rules.robust import is_refused, robust_weight
from tf_hips.ps.terms.past import Packet, Past
from tf_hips.ps.terms.recorder import Recorder
from tf_hips.ps.transport.wire import REFUSED_WEIGHT


class Telling:
    """The rounds of one model over a fixed list of children, as they are asked for."""

    # Set by `Store`:
    changed: threading.Condition
    chunks: tuple[int, ...]
    partial: Partial | None
    past: Past
    _is_here: frozenset[int]
    _recorder: Recorder
    _rounds: dict[int, Round]
    _rule: UpdateRule
    _sites: tuple[str, ...]

    @property
    def round(self) -> int:
        """The newest round that any child has begun."""
        with self.changed:
            return max(self._rounds)

    @property
    def oldest(self) -> int:
        """The oldest round whose results are kept."""
        with self.changed:
            older = self.past.oldest
            return min(self._rounds) if older is None else min(older, *self._rounds)

    def is_past(self, number: int) -> bool:
        """Whether round `number` is over for all, and nothing of it is taken in any more."""
        with self.changed:
            return number not in self._rounds and self.past.has(number)

    def past_results(self, number: int) -> list[tuple[int, Packet]]:
        """The results of a round that is over: pairs of chunk number and packet.

        Raises:
            ProtocolError: they are no longer kept.
        """
        try:
            return list(self.past.results(number))
        except KeyError as error:
            raise ProtocolError(
                f"Rounds {self.oldest} to {self.round} are kept. Received: round {number}"
            ) from error

    def whole(self, number: int) -> list[int]:
        """The children whose updates of a round that is not closed are complete."""
        with self.changed:
            delivered = self._get(number).delivered
            return [one for one, held in enumerate(delivered) if len(held) == len(self.chunks)]

    def without_row(self, number: int, children: Collection[int], of: int) -> list[int]:
        """Those of `children` that say they have no row, where a robust rule lacks it.

        Args:
            number: the round.
            children: whose updates are complete.
            of: how many they are at least where a round is closed.

        Returns:
            Nobody, where the rule makes something of the others' rows, or there are none.
        """
        with self.changed:
            weights = self._get(number).weights
            said = {child: weights.get(child, 1.0) for child in children}
        robust = self._rule.robust
        if robust is None or self._rule.votes is not None:  # whose votes have no weights
            return []
        missing = sum(map(is_refused, said.values()))
        absent = [child for child, one in said.items() if one == 0 and not is_refused(one)]
        rows = len(said) - len(absent) - missing
        if rows == 0 or rows + missing >= of:
            return []
        try:
            robust.check(rows, missing, of)
        except ToleranceError:
            return absent
        return []

    def is_closed(self, number: int) -> bool:
        """Whether it is decided who counts in round `number`."""
        with self.changed:
            return number not in self._rounds or self._rounds[number].counted is not None

    def results(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """What is merged of round `number`, in order of merging, after the first `after`.

        Returns:
            The value for `after` next time, and pairs of chunk number and packet.
        """
        with self.changed:
            return self._get(number).told(after, self._recorder.durable)

    def ups(self, number: int, after: int) -> tuple[int, list[tuple[int, Packet]]]:
        """What waits for the server above, in order of merging, after the first `after`.

        Only what was made of packets that are durable: made again of others, it would be another.

        Returns:
            The value for `after` next time, and pairs of chunk number and packet.
        """
        with self.changed:
            return self._get(number).told_up(after, self._recorder.durable)

    def due(self) -> int | None:
        """The round of which something waits for the server above; None where there is none."""
        with self.changed:
            newest = max(self._rounds)
            return newest if self.ups(newest, 0)[1] else None

    def weight(self, number: int) -> float | None:
        """What all children together stand for in round `number`; None: the rule takes no mean."""
        if not self._rule.is_mean:
            return None
        with self.changed:
            current = self._get(number)
            counted = current.counted
            children = counted if counted is not None else range(len(self._sites))
            weights = [current.weights.get(child, 1.0) for child in children]
            late = sum(one.weight for one in current.late.values())
            total = robust_weight(weights) if self._rule.is_robust else sum(weights) + late
            # Where all that there was is refused, so is what is made of it.
            return total if total or not any(map(is_refused, weights)) else REFUSED_WEIGHT

    def refusals(self, number: int) -> list[NonFiniteError]:
        """Why chunks of round `number` had to be delivered anew, oldest first."""
        with self.changed:
            if self.is_past(number):
                return []
            durable = self._recorder.durable
            refusals = self._get(number).refusals
            return [error for position, error in refusals if position <= durable]

    def has_refused(self, number: int) -> bool:
        """Whether chunks of round `number` have to be delivered anew, also if nobody may know."""
        with self.changed:
            return not self.is_past(number) and bool(self._get(number).refusals)

    def delivered(self, number: int, child: int) -> frozenset[int]:
        """The chunks that `child` has delivered in round `number`."""
        with self.changed:
            if self.partial is not None and self.partial.has_missed(number, child):
                return self.partial.delivered(number, child)
            if self.is_past(number):
                return self._is_here
            return frozenset(self._get(number).delivered[child])

    def awaits(self, number: int, child: int) -> bool:
        """Whether `child` gets results of a round when its late update is complete."""
        with self.changed:
            durable = self._recorder.durable
            return self.partial is not None and self.partial.awaits(number, child, durable)

    def progress(self, child: int) -> tuple[int, int]:
        """The newest round of which `child` has delivered a chunk, and how many it has.

        The round before the first where it has delivered none.
        """
        with self.changed:
            for number in sorted(self._rounds, reverse=True):
                delivered = len(self._rounds[number].delivered[child])
                if delivered:
                    return number, delivered
            return min(self._rounds) - 1, 0

    def is_merged(self, number: int) -> bool:
        """Whether all chunks of round `number` are merged and may be told."""
        with self.changed:
            if self.is_past(number):
                return True
            current = self._get(number)
            if current.num_merged < len(self.chunks):
                return False
            return not self._recorder.is_keeping or (
                max(current.positions, default=0) <= self._recorder.durable
            )

    def missing(self, number: int) -> dict[str, int]:
        """Children that owe chunks of round `number`, by name, with how many have come."""
        with self.changed:
            if self.is_past(number) or self._get(number).counted is not None:
                return {}
            counts = zip(self._sites, self._get(number).delivered, strict=True)
            return {site: len(got) for site, got in counts if len(got) < len(self.chunks)}

    def _get(self, number: int) -> Round:
        if number not in self._rounds:
            raise ProtocolError(
                f"Rounds {min(self._rounds)} to {max(self._rounds)} are kept. Received: "
                f"round {number}"
            )
        return self._rounds[number]
