# SPDX-License-Identifier: Apache-2.0
"""How children leave a run, in peace or not, or are lost; and whether the others go on.

    in peace                      nobody waits for it any more
    with a reason, or lost        the run ends for all; with a quorum, or in asynchronous rounds,
                                  for that child alone
    its process ends, and another
    one may come                  the others are told, and wait until it is lost

Part of a session, and under its lock.
"""

import threading
from collections.abc import Iterable

from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError, TfHipsError, left_the_run, reason_of_end
from tf_hips.ps.session.away import Away
from tf_hips.ps.session.closing import Closing
from tf_hips.ps.session.comeback import Comeback
from tf_hips.ps.session.members import Caller, Members, Terms
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Waiting
from tf_hips.ps.terms.recorder import Kind, Recorder


class Departing:
    """What of a session is about children that are there no more."""

    # Set by `Session`:
    changed: threading.Condition
    _away: Away
    _closing: Closing | None
    _comeback: Comeback
    _members: Members
    _presence: Presence
    _recorder: Recorder
    _state: State
    _terms: Terms
    _parted: dict[int, str]  # which process of a child has left, where others go on
    _told: set[int]  # children that know of the end, or cannot be told
    _waiting: Waiting

    @property
    def is_started(self) -> bool:
        """Whether all parties have joined."""
        return self._members.is_started

    def leave(self, caller: Caller, reason: str | None) -> None:
        """Notes that a child leaves; with a reason, before the others, it ends the run for all.

        Not so where the others go on without it: in asynchronous rounds, and with a quorum.
        """
        with self.changed:
            child = self._members.children.get(caller.child)
            if child is None or (not self.is_started and child.process != caller.process):
                raise ProtocolError(f"Site `{self._site(caller.child)}` has not joined this run.")
            if child.process != caller.process:
                raise self._members.second_process(caller.child)
            if not self.is_started:
                self._give_up(caller.child, reason)
                return
            if reason is not None and self._parts_in_trouble(caller.child, reason):
                return
            if not child.has_left:
                self._recorder.add(Kind.LEFT, child=caller.child, reason=reason)
            child.has_left = True
            self._comeback.forget()
            self._waiting.note_call(caller.child)
            self._presence.release(caller.child)
            if reason is not None:
                self._end_unless_others(
                    caller.child, left_the_run(self._site(caller.child), reason)
                )
            if self._closing is not None:
                self._closing.look_soon()
            self.changed.notify_all()

    def away(self, caller: Caller, reason: str) -> bool:
        """Notes why the process of a child ends, in whose place another may come.

        The others are told; that the connection ends is noticed as always.

        Returns:
            Whether it is news that may be written.
        """
        with self.changed:
            self._waiting.check(caller)
            if self._members.known(caller).has_left:
                return False  # so no other one may come, and nobody waits for it
            is_news = self._away.note(caller.child, reason)
            self.changed.notify_all()
            return is_news

    def pass_on(self, text: str) -> None:
        """Tells all children what the server above has told."""
        with self.changed:
            for child, one in self._members.children.items():
                if not one.has_left:
                    self._away.tell(child, text)
            self.changed.notify_all()

    def end(self, reason: str, error: type[TfHipsError] = PeerError) -> None:
        """Ends the run for all, by `error`; the first reason stands."""
        with self.changed:
            self._waiting.end(reason, error)

    def _give_up(self, child: int, reason: str | None) -> None:
        """A child leaves that waits for the others to join: nobody must wait for it."""
        why = left_the_run(self._site(child), reason, " before it began")
        if self._members.is_sealed:  # the server above counts on it
            self.end(why)
            return
        self._members.children.pop(child).why_out = why  # which its own call that waits is told
        self.changed.notify_all()

    def _let_go(self, child: int, reason: str) -> bool:
        """Whether others go on without a child whose last step ended with an error."""
        return self._closing is not None and self._closing.lose(child, reason)

    def _parts_in_trouble(self, child: int, reason: str) -> bool:
        """Whether a child that leaves for `reason` is lost, and others go on."""
        why = reason_of_end(reason)
        if self._closing is not None and why is not None:
            self._closing.ended_elsewhere(why)
            return False
        if not self._let_go(child, left_the_run(self._site(child), reason)):
            return False
        self._parted[child] = self._members.children[child].process
        self._told.add(child)
        self._waiting.note_call(child)
        self._presence.excuse(child)
        self.changed.notify_all()
        return True

    def _check_there(self, what: str, children: Iterable[int]) -> None:
        gone = self._members.gone(children)
        if gone:
            raise PeerError(
                f"{what[0].upper()}{what[1:]} needs all parties; site `{self._site(gone[0])}` has "
                "left the run before it."
            )

    def _lose(self, child: int) -> None:
        self._told.add(child)  # as far as it can be
        reason = (
            f"Site `{self._site(child)}` was lost: its connection closed and it did not come back "
            f"within {self._terms.lost_after_s:g} s."
        )
        why = self._away.reason(child)
        if why is not None:
            reason = f"{reason} Its process had ended with {why}."
        if not self._let_go(child, reason):
            self._end_unless_others(child, reason)
            return
        self._presence.excuse(child)
        self.changed.notify_all()

    def _end_unless_others(self, child: int, reason: str) -> None:
        """Ends the run for all, or for `child` alone where others go on without it."""
        if not self._state.part(child, reason):
            self.end(reason)
            return
        log.warning("The others go on without a site. %s", reason)
        self._comeback.forget()
        self._presence.release(child)
        self.changed.notify_all()

    def _site(self, child: int) -> str:
        return self._members.site(child)
