# SPDX-License-Identifier: Apache-2.0
"""Rounds of a rule that looks at whole rows: decided once, when all that counts has come.

    complete, or closed (`partial`)       decide: of all packets, once       then chunk by chunk

Children deliver all of a round before they need anything of it, so nobody waits for a chunk that
waits for a decision.

Invariants:
- A round is decided before anything of it is merged, and its children are those of the decision.
- Of a round that was decided nothing can be delivered anew: a step that is refused then ends the
  run. One that cannot be decided is as if nothing of it had come, where children may do it again.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from tf_hips.errors import ToleranceError
from tf_hips.ps.rounds.combining import Combining
from tf_hips.ps.rounds.round import Round, TooFewRowsError
from tf_hips.ps.rules.whole import Ruling
from tf_hips.ps.terms.past import Packet

# Hears of children whose rows a rule has refused: the round, and why, by child.
Refuse = Callable[[int, Mapping[int, str]], None]
# Hears of children whose rows a rule has chosen: the round, they, and all whose rows it has seen.
Choose = Callable[[int, Sequence[int], Sequence[int]], None]


class Deciding:
    """Decides about the rounds of one store."""

    def __init__(
        self,
        combining: Combining,
        changed: threading.Condition,
        refuse: Refuse | None,
        choose: Choose | None,
        *,
        can_redo: bool,
    ) -> None:
        """Nothing is decided.

        Args:
            combining: has the rule.
            changed: the store's; free when something is decided.
            refuse: hears of rows that were refused; None: nobody does.
            choose: hears of rows that were chosen; None: nobody does.
            can_redo: whether children may deliver other packets of a round that was refused.
        """
        self._combining = combining
        self._changed = changed
        self._refuse = refuse
        self._choose = choose
        self._can_redo = can_redo

    def decide(
        self, current: Round, packets: Mapping[int, Mapping[int, Packet]], num_children: int
    ) -> None:
        """Decides about a round.

        Args:
            current: the round.
            packets: all of it that counts, by chunk, each by child.
            num_children: how many children there are.

        Raises:
            TooFewRowsError: the rule makes nothing of it.
        """
        children = range(num_children) if current.counted is None else current.counted
        try:
            ruling = self._combining.decide(current.number, packets, children, current.weights)
        except ToleranceError as error:
            refusal = f"Round {current.number}: {error}"
            with self._changed:
                # One that was raised would keep what is on its frames: all packets of the round.
                current.refusals.append((max(current.positions), TooFewRowsError(refusal)))
                if self._can_redo:
                    current.clear()
                self._changed.notify_all()
            raise TooFewRowsError(refusal) from error
        with self._changed:
            current.ruling, current.counted = ruling, tuple(children)
        if ruling is not None:
            tell_of(current.number, ruling, self._refuse, self._choose)


def tell_of(number: int, ruling: Ruling, refuse: Refuse | None, choose: Choose | None) -> None:
    """Tells whose rows of a round were refused and chosen.

    Args:
        number: the round.
        ruling: what was decided about it.
        refuse: hears of the first; None: nobody does.
        choose: hears of the second, where the rule chooses rows; None: nobody does.
    """
    if ruling.refused and refuse is not None:
        refuse(number, ruling.refused)
    if ruling.selected is not None and choose is not None:
        choose(number, ruling.selected, ruling.accepted)
