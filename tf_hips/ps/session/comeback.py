# SPDX-License-Identifier: Apache-2.0
"""Children that come back: another process of a site takes over from one that was killed.

    backup     a child says to which round and gather it can come back; what is older is forgotten
    join       a new process of the site; the one before it must be gone
    model      with the round that it goes on with
    rounds     those since then are done again: its packets are there already, and it gets the
               results that all got then
    gathers    the same

So every replica takes the same steps with the same bytes, and a run in which children were killed
ends with the weights of one in which none was. What a child computes again need not be equal bit
for bit: what it delivered the first time stands.

Part of a session, and under its lock.
"""

import collections
from collections.abc import Callable

from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.rounds.round import Rounds
from tf_hips.ps.session.members import Caller, Child
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Wait, Waiting
from tf_hips.ps.terms.model import Model, first_difference
from tf_hips.ps.terms.recorder import AheadError

# Lines of the log about each child.
_MOST_TOLD = 128


class Comeback:
    """What one session does for children that come back."""

    def __init__(
        self,
        state: State,
        presence: Presence,
        waiting: Waiting,
        check: Callable[[Caller], Child],
    ) -> None:
        """Nobody has gone.

        Args:
            state: of the run.
            presence: who is there.
            waiting: the session's waiting calls.
            check: called first by each call, with the lock held; raises if the caller may not.
        """
        self._state = state
        self._presence = presence
        self._waiting = waiting
        self._joined = check
        self._members = state.members
        self._num_told: collections.Counter[int] = collections.Counter()

    def join(self, caller: Caller, child: Child) -> None:
        """Lets the caller take over from the process before it, when that is gone.

        Args:
            caller: the call of the new process.
            child: what it says.

        Raises:
            ProtocolError: it says something else than the one before it, or that one is there.
            PeerError: the run ends, or the caller hangs up.
        """
        position = caller.child
        members, presence = self._members, self._presence
        members.check_return(position, child)
        known = members.children[position]
        before = known.process
        if presence.is_there(position):
            # The end of a connection whose machine is gone is noticed by pings only.
            patience_s = min(caller.patience_s, members.terms.lost_after_s / 2)
            if self._may_log(position):
                log.warning(
                    "Site %s has come as another process, and the one before it is there. Waiting "
                    "%.0f s for its end.",
                    members.site(position),
                    patience_s,
                )
            try:
                self._waiting.until(
                    Caller(position, caller.process, patience_s, number=caller.number),
                    Wait(
                        "join",
                        lambda: (
                            caller.is_gone
                            or known.process != before
                            or not presence.is_there(position)
                        ),
                        lambda: "the process before it is there",
                    ),
                )
            except PeerError:
                self._waiting.check(caller)
                raise members.second_process(position) from None
            self._waiting.check(caller)
            if known.process == caller.process:
                return  # by an earlier call, over a connection that was lost
            if known.process != before:
                raise members.second_process(position)
        self._state.take_back(position, caller.process)
        if self._may_log(position):
            log.info("Site %s has come back as another process", members.site(position))

    def _may_log(self, position: int) -> bool:
        """Whether one more line is written of a child that comes again and again."""
        self._num_told[position] += 1
        return self._num_told[position] <= _MOST_TOLD

    def check_model(self, caller: Caller, store: Rounds, model: Model, number: int) -> None:
        """Raises ProtocolError unless a child that has come back can go on with round `number`.

        It is an AheadError where that round has not begun.
        """
        site = self._members.site(caller.child)
        text = first_difference(store.model.shapes, model.shapes, "tensor")
        if text is not None:
            raise ProtocolError(
                f"A process that comes back must train the same model. The run's (there) and that "
                f"of site `{site}` (here) differ: {text}"
            )
        newest = store.round
        if number > newest + 1:
            raise AheadError(
                f"Site `{site}` can come back to rounds {store.oldest} to {newest + 1}. Received: "
                f"a backup of round {number}, which has not begun",
                f"round {number}",
                f"round {newest}",
            )
        if number < store.oldest:
            raise ProtocolError(
                f"Site `{site}` can come back to rounds {store.oldest} to {newest}, whose results "
                f"are kept. Received: a backup of round {number}. Back up more often, or let the "
                "server keep more (`--past-mb`)"
            )

    def check_gather(self, caller: Caller, number: int, label: str) -> None:
        """Raises ProtocolError where a child that has come back does something else than before.

        What did not count is no business of this: who was lost because it did something else than
        most may come back with a script that was corrected.
        """
        gathers = self._state.gathers
        before = gathers.labels(number).get(caller.child)
        is_absent = gathers.is_absent(caller.child, number)
        if before is not None and before != label and not is_absent:
            raise ProtocolError(
                f"Site `{self._members.site(caller.child)}` has come back and must do what it did "
                f"before. Exact value {number} was `{before}`. Received: `{label}`"
            )

    def back_up(self, caller: Caller, session: str, number: int, gather: int) -> None:
        """Notes that a child can come back to round `number` and gather `gather`.

        Raises:
            ProtocolError: they are not of this run, or have not begun.
        """
        store = self._state.store
        members = self._members
        with self._state.changed:
            child = self._joined(caller)
            # Who goes on may have a new backup before the others have agreed on the model.
            newest = child.first_round if store is None else store.of(caller.child).round
            is_first = members.terms.shard.index == 0  # which alone has the gathers
            latest = self._state.gathers.newest + 1 if is_first else gather
            is_here = 0 <= number <= newest + 1 and 0 <= gather <= latest
            if session != members.session or not is_here:
                raise ProtocolError(
                    f"A backup must be of this run, of exact value {latest} and of round "
                    f"{newest + 1} at most. Received: round {str(number)[:40]}, exact value "
                    f"{str(gather)[:40]}"
                )
            told = number, gather if is_first else 0
            before = child.backup
            # Both go on, so that there are no more of them than rounds and gathers.
            is_newer = before is None or (before != told and before[0] <= number)
            if is_newer and (before is None or before[1] <= told[1]):
                self._state.note_backup(caller.child, *told)

    def forget(self) -> None:
        """A child has left and comes back to nothing."""
        self._state.forget_past()
