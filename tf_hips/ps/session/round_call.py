# SPDX-License-Identifier: Apache-2.0
"""The calls of rounds: each child delivers its packets, and waits for what all have made.

Part of a session, and under its lock. The packets are kept by `store`.
"""

import time
from collections.abc import Callable, Iterable, Iterator

from tf_hips.errors import ProtocolError
from tf_hips.ps.robust.joint import JointStore
from tf_hips.ps.rounds.round import Packet, Rounds
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.session.ahead import Ahead
from tf_hips.ps.session.closing import Closing
from tf_hips.ps.session.members import Caller, Child
from tf_hips.ps.session.moves import ROUND, Moves
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Wait, Waiting
from tf_hips.ps.terms.recorder import Entry


class Exchanging:
    """The rounds of one run, as its children call for them."""

    def __init__(
        self,
        state: State,
        ahead: Ahead,
        waiting: Waiting,
        check: Callable[[Caller], Child],
        check_there: Callable[[str, Iterable[int]], None],
        capture: Callable[[], Iterator[Entry]],
        moves: Moves,
        closing: Closing | None = None,
    ) -> None:
        """No call has come.

        Args:
            state: of the run.
            ahead: knows whether a child is further than what was restored.
            waiting: the session's waiting calls.
            check: called first by each call, with the lock held; raises if the caller may not.
            check_there: gets what is waited for, and for whom; raises if one of them has left.
            capture: the whole session, for a snapshot.
            moves: whether anything goes on in the session.
            closing: closes rounds without some children; None: they wait for all.
        """
        self.changed = state.changed
        self._ahead = ahead
        self._state = state
        self._members = state.members
        self._recorder = state.recorder
        self._waiting = waiting
        self._joined = check
        self._check_there = check_there
        self._capture = capture
        self._moves = moves
        self._closing = closing

    def wait_agreed(self, caller: Caller, what: str) -> None:
        """Waits until all have agreed on the model, with the lock held.

        Who reads ahead waits so, beside what its child does: nobody is in its way.

        Args:
            caller: the call.
            what: it waits for, for messages.

        Raises:
            PeerError: the other parties have not agreed on the model in time.
        """
        self._waiting.until(
            caller, Wait(what, lambda: self._state.store is not None, self._without_model)
        )

    def begin(self, caller: Caller, number: int, weight: float | None = None) -> Rounds:
        """The caller's rounds, with round `number` ready for packets of the caller.

        Args:
            caller: the call.
            number: the round.
            weight: what the caller stands for in it, where the rule takes a mean; None: 1.

        Raises:
            ProtocolError: it is not the round's turn, or the weight is not taken.
            StateError: the session was restored from a state that is older than the run.
            PeerError: the other parties have not agreed on the model in time.
        """
        members = self._members
        with self.changed:
            self._joined(caller)
            self._waiting.until(
                caller,
                Wait(
                    _round(number),
                    lambda: self._state.store is not None,
                    self._without_model,
                    members.without_model,
                ),
            )
            store = self._state.store
            if store is None:
                raise ProtocolError("The model is not agreed on.")
            rounds = store.of(caller.child)
            is_new = self._ahead.taken(
                caller.child, lambda: self._state.begin_round(rounds, number, caller.child)
            )
            if is_new:
                self._recorder.begin_round(self._capture, store.release, self._state.archive)
            if weight is not None:
                self._state.weigh(rounds, number, caller.child, weight)
            self._end_if_refused(rounds, number)
            if self._closing is not None:
                self._closing.begins(caller.child, number)
        if is_new:
            self._state.archive()
        if self._closing is not None:
            self._closing.look()
        return rounds

    def wait_results(
        self,
        caller: Caller,
        store: Rounds,
        number: int,
        after: int,
        stop: Callable[[], bool],
        refused: int,
    ) -> tuple[int, list[tuple[int, Packet]]]:
        """Waits for more than `after` merged chunks, and returns them as the store does.

        While bytes of rounds come in, it waits as long as it takes, and returns now and then with
        nothing, so that its caller can say so to the child.

        Args:
            caller: the call.
            store: the caller's rounds.
            number: the round.
            after: chunks that were returned before.
            stop: true when the caller's own packets have failed; nothing is returned then.
            refused: refusals the caller knows of; a new one is raised.

        Raises:
            PeerError: a child has left, or did not deliver in time.
            NonFiniteError: the sum of a chunk's packets was refused.
            TooFewRowsError: a robust rule makes nothing of the round.
        """
        members = self._members
        with self.changed:
            moved, began = self._moves.count, time.monotonic()

            def is_ready() -> bool:
                if store.awaits(number, caller.child):
                    return stop() or self._moves.tells(moved, began)
                if store.is_past(number) or self._moves.tells(moved, began):
                    return True
                if stop() or len(store.refusals(number)) > refused:
                    return True
                if store.results(number, after)[0] > after or store.is_merged(number):
                    return True
                self._check_there(_round(number), needs())
                return False

            def needs() -> list[int]:
                missing = [members.terms.parties.index(site) for site in store.missing(number)]
                return missing if self._closing is None else self._closing.needed(missing)

            def late() -> str:
                if members.place is not None:
                    return "the server above has not answered"
                awaited = store.awaited() if isinstance(store, JointStore) else ""
                return awaited or "the server's disk is late"

            self._waiting.until(
                caller,
                Wait(
                    _round(number),
                    is_ready,
                    lambda: (
                        f"in round {number} these have not delivered their packets: "
                        + (
                            ", ".join(
                                f"site `{site}` ({count} of {len(store.chunks)} chunks came)"
                                for site, count in store.missing(number).items()
                            )
                            or f"none; {late()}"
                        )
                    ),
                    needs,
                    lambda: self._moves.count + int(not store.missing(number)),
                ),
            )
            if store.awaits(number, caller.child):
                return after, []
            if self._closing is not None:
                self._closing.answered(caller.child, number)
            if not store.is_past(number):
                self._end_if_refused(store, number)
                news = store.refusals(number)[refused:]
                if news and not stop():
                    raise type(news[0])(str(news[0]))
                return store.results(number, after)
            # Who waits for a child that does its rounds again sees that it goes on.
            returns = members.children[caller.child].num_returns
            self._moves.done_again(caller.child, ROUND, returns, number, store.round)
            self.changed.notify_all()
        results = store.past_results(number)
        return len(results), results[after:]

    def _without_model(self) -> str:
        names = self._members.names(self._members.without_model())
        return f"the parties {names} have not sent their model"

    def _end_if_refused(self, store: Rounds, number: int) -> None:
        """Ends the run for a sum that is refused of a round that cannot be done again."""
        refusals = store.refusals(number)
        if not refusals:
            return
        is_decided = isinstance(store, Store) and store.is_closed(number)
        if self._closing is not None or is_decided:
            self._waiting.end(str(refusals[0]), type(refusals[0]))


def _round(number: int) -> str:
    return f"round {number} of the gradients"
