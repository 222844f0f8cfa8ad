# SPDX-License-Identifier: Apache-2.0
"""One run as a server sees it: who has joined, which model, its rounds, who has left.

    join (all) -> agree_model (all) -> first synchronisation -> rounds -> leave (all)
                                       (child 0 up, the others down)
                  gathers, any time

No gRPC here: `server` turns calls into these methods and their errors into status codes. Who has
joined is kept by `members`, payloads by `gather`, packets by `store`, and these by `state`; the
calls with which children begin are in `joining`, those of the first synchronisation in
`first_sync`, those of rounds in `round_call`, those of gathers in `gather_call`; how children leave
is in `departing`. All waiting goes through `waiting`.
Only `watch` waits longer: a child holds it open to show that it is there, and to hear why the run
has ended whatever it is doing.

Rounds that may close without some children (`Terms.quorum`) are closed by `closing`.

With a server above, what all children have brought goes up, and what comes down from there is what
they get: `server.uplink` does that.

A child that was killed may come back as another process: it joins again, and does the rounds since
its last backup once more (`comeback`). What it delivered before counts, and so do the results.

A session with a recorder tells it what it accepts, and answers when that is durable: results of a
chunk wait for its packets, other answers for `settle`. `restore` makes the session of a server
that has ended from what was recorded.

Invariant: a call that is refused changes nothing, so the children that behave can go on.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from tf_hips.errors import ENDED, PeerError, ProtocolError, TfHipsError
from tf_hips.log import Tell
from tf_hips.ps.rounds.asynchronous import AsynchronousStore
from tf_hips.ps.rounds.store import Store
from tf_hips.ps.session.ahead import Ahead
from tf_hips.ps.session.away import Away
from tf_hips.ps.session.closing import Closing
from tf_hips.ps.session.comeback import Comeback
from tf_hips.ps.session.departing import Departing
from tf_hips.ps.session.description import describe
from tf_hips.ps.session.first_sync import FirstSync
from tf_hips.ps.session.gather_call import Gathering
from tf_hips.ps.session.handover import Handover
from tf_hips.ps.session.joining import Joining
from tf_hips.ps.session.members import Caller, Child, Terms
from tf_hips.ps.session.moves import BACKUP, Moves
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.session.round_call import Exchanging
from tf_hips.ps.session.state import State
from tf_hips.ps.session.waiting import Waiting
from tf_hips.ps.terms.quorum import Clock, SystemClock
from tf_hips.ps.terms.recorder import Entry, Kind, Recorder
from tf_hips.ps.terms.tree import Place
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.news import News, Notice, Request, Tick
from tf_hips.ps.transport.parcel import Held

# Failures of a child in one round that are written down.
_MOST_FAILURES = 8


class Session(Departing):
    """The state of one run. Thread-safe; one condition guards it and its store."""

    def __init__(
        self,
        terms: Terms,
        recorder: Recorder | None = None,
        *,
        clock: Clock | None = None,
        tell: Tell | None = None,
    ) -> None:
        """A session that nobody has joined.

        Args:
            terms: what the server was told.
            recorder: is told what it accepts.
            clock: by which rounds are closed; None: the system's.
            tell: writes events of rounds that are closed; None: nowhere.
        """
        self.changed = threading.Condition()
        self._terms = terms
        self._recorder = recorder if recorder is not None else Recorder()
        self._state = State(terms, self.changed, self._recorder)
        self._members = self._state.members
        self._away = Away(self._members)
        self._presence = Presence(self.changed, terms.lost_after_s, self._lose)
        self._waiting = Waiting(self.changed, self._members, self._note_end)
        self._closing: Closing | None = None
        self._state.rejections.tell = self._state.choices.tell = tell
        self._state.electing.use(tell, clock)
        if terms.quorum is not None:
            self._closing = Closing(
                terms.quorum,
                self._state,
                clock if clock is not None else SystemClock(),
                self._waiting.end,
                lambda: self.is_over,
                tell if tell is not None else _tell_nobody,
            )
            self._waiting.lets_go = self._let_go
            closing = self._closing
            self._waiting.bears_losses = lambda: closing.has_begun
        moves = self.moves = Moves()
        self.note_moved = moves.note
        self._comeback = Comeback(self._state, self._presence, self._waiting, self._joined)
        self.back_up = self._comeback.back_up
        sync = FirstSync(self._state, self.changed, self._waiting, self._joined, self.settle)
        self.begin_sync, self.upload, self.download = sync.begin, sync.upload, sync.download
        self.first_sync = sync
        ahead = Ahead(
            self._members,
            self._recorder,
            lambda: self._state.is_asynchronous or self._waiting.bears_losses(),
        )
        joining = Joining(
            self._state,
            ahead,
            self._waiting,
            self._comeback,
            self._joined,
            self._find,
            self.start,
        )
        self.join, self.agree_model = joining.join, joining.agree_model
        values = Gathering(
            self._state,
            ahead,
            self._waiting,
            self._comeback,
            self._joined,
            self._check_there,
            moves,
            self._closing,
        )
        self.begin_gather, self.has_payload = values.begin, values.has_payload
        self.wait_gather, self.answer_gather = values.wait, values.answer
        rounds = Exchanging(
            self._state,
            ahead,
            self._waiting,
            self._joined,
            self._check_there,
            self._capture,
            moves,
            self._closing,
        )
        self.begin_round, self.wait_results = rounds.begin, rounds.wait_results
        self.wait_agreed = rounds.wait_agreed
        self._parted: dict[int, str] = {}
        self._told: set[int] = set()
        self._failures: dict[int, tuple[int, int]] = {}  # of a child: its round, and how many in it
        self.handover = Handover(
            self.changed,
            self._members,
            self._presence,
            lambda: self.is_over,
            self._note_backup,
        )

    @property
    def store(self) -> Store | AsynchronousStore | None:
        """The rounds, once all children have agreed on the model."""
        return self._state.store

    @property
    def state(self) -> State:
        """What the run consists of; `changed` guards it."""
        return self._state

    @property
    def error(self) -> type[TfHipsError]:
        """What the end of the run is raised as."""
        return self._waiting.error

    @property
    def token(self) -> str:
        """What tells this run from others of its name; "" before it has started."""
        return self._members.session

    @property
    def ended(self) -> str | None:
        """Why the run has ended, if it has."""
        return self._waiting.ended

    @property
    def is_disowned(self) -> bool:
        """Whether the run has ended because the state that it was restored from is older."""
        return self._recorder.is_disowned

    @property
    def is_below_quorum(self) -> bool:
        """Whether the run has ended because too few children were there for too long."""
        return self._closing is not None and self._closing.is_below

    @property
    def is_over(self) -> bool:
        """Whether the run has ended with a reason, or all children have left."""
        with self.changed:
            return self.ended is not None or self._members.have_left

    def absent(self) -> list[str]:
        """The sites that have yet to join before a run begins; of one that is over, all."""
        with self.changed:
            if self.is_over:
                return list(self._terms.parties)
            return [self._site(child) for child in sorted(self._members.absent())]

    def is_known_to_all(self) -> bool:
        """Whether every child has left, knows why the run has ended, or cannot be told."""
        with self.changed:
            return self._members.have_left or (
                self.ended is not None
                and (
                    not self.is_started
                    or all(
                        one.has_left or child in self._told
                        for child, one in self._members.children.items()
                    )
                )
            )

    def idle_s(self) -> float:
        """Seconds since the last call ended or began; 0 while one waits."""
        with self.changed:
            return self._waiting.idle_s()

    def restore(self, records: Iterable[tuple[Kind, dict[str, Any], wire.Buffer]]) -> None:
        """Does what records say, oldest first; then the children have time to come back.

        Raises:
            Exception: a record says what cannot be.
        """
        state = self._state
        with (
            self.changed,
            state.rejections.quiet(),
            state.choices.quiet(),
            state.electing.quiet(),
        ):
            for kind, fields, data in records:
                if "child" in fields:
                    self._waiting.note_call(fields["child"])
                if kind == Kind.ENDED:
                    self._waiting.end(fields["reason"])
                elif kind == Kind.FAILED:
                    # It may have called since, and has to find its way back to say so.
                    grace_s = self._terms.lost_after_s
                    self._waiting.note_failure(fields["child"], fields["text"], grace_s)
                elif kind == Kind.ARRIVED and self._closing is not None:
                    self._closing.restore(fields["seconds"])
                else:
                    self._state.apply(kind, fields, data)
            if self.is_started and not self.is_over:
                children = self._members.children
                self._presence.expect(one for one in children if not children[one].has_left)
                for lost in self._members.lost:
                    self._presence.excuse(lost)
                    self._told.add(lost)  # it is expected again when it calls
                if self._closing is not None:
                    self._closing.resume()

    def settle(self) -> None:
        """Waits until all that was accepted before is durable; the lock must be free.

        Raises:
            PeerError: it cannot be made durable, which ends the run.
        """
        failure = self._recorder.settle()
        if failure is not None:
            raise PeerError(f"{ENDED}{failure}")

    def describe(self) -> dict[str, Any]:
        """What the run is doing, as `description.describe` says."""
        return describe(self._state, self._presence, lambda: self.ended, self._closing)

    def hang_up(self, caller: Caller) -> None:
        """Notes that the other end of a call is gone."""
        with self.changed:
            caller.is_gone = True
            self.changed.notify_all()

    @property
    def owes_leave(self) -> bool:
        """Whether there is a server above that does not know that the run is over here."""
        with self.changed:
            return self._members.place is not None and not self._state.has_left_above

    @property
    def num_leaves(self) -> int:
        """Leaves of the whole tree, each of which has a payload in a gather."""
        with self.changed:
            return len(self._members.whole(0)[1])

    @property
    def have_all_failed(self) -> bool:
        """Whether the last step of every child ended with an error, so that none waits for it."""
        with self.changed:
            return len(self._waiting.failures()) == len(self._terms.parties)

    def start(self, place: Place | None = None) -> None:
        """All children have joined, and the server above, if there is one, has answered."""
        with self.changed:
            self._state.start(place)
            self._presence.expect(self._members.children)
            self.changed.notify_all()

    def goes_on(self, child: int) -> None:
        """Notes that packets of `child` have come: what failed before is over.

        Closes the round if that was what it waited for; the lock must be free.
        """
        with self.changed:
            self._waiting.note_call(child)
        if self._closing is not None:
            self._closing.look()

    def fail(self, caller: Caller, text: str) -> tuple[bool, bool]:
        """Notes that a child's last step ended with an error; its next call is the end of that.

        If others wait for it and it does not come soon, the run ends for all.

        Returns:
            Whether it is news, and whether it is written down. Until the child goes on the first
            one stands: saying it again keeps nobody waiting for longer. Of one that goes on and
            fails in the same round, again and again, some are written.
        """
        with self.changed:
            self._member(caller)
            if caller.child in self._waiting.failures():
                return False, False
            self._joined(caller)
            self._waiting.note_failure(caller.child, text)
            number = self.store.of(caller.child).round if self.store is not None else 0
            last, count = self._failures.get(caller.child, (number, 0))
            count = count + 1 if last == number else 1
            self._failures[caller.child] = number, count
            is_written = count <= _MOST_FAILURES
            if is_written:
                self._recorder.add(Kind.FAILED, child=caller.child, text=text[:1000])
            return True, is_written

    def watch(self, caller: Caller, tick_s: float | None = None) -> Iterator[News]:
        """Shows that a child is there, until it leaves or hangs up, or the run ends.

        Args:
            caller: the child.
            tick_s: seconds from one `Tick` to the next; None: there are none.

        Yields:
            What the child is asked for, notices, and ticks; at the end why the run has ended, if it
            has, and the error of it; the child counts as told when it asks for more.

        Raises:
            ProtocolError: the child is not in this run.
        """
        with self.changed:
            child = self._member(caller) if self.ended is None else None
            if child is not None:
                self._presence.arrive(caller.child, caller)
                self.handover.watches_anew(caller.child)
                self._find(caller.child)
                self.changed.notify_all()
        if child is not None:
            try:
                while (request := self._next_request(caller, child, tick_s)) is not None:
                    yield request
            finally:
                with self.changed:
                    self._presence.depart(caller.child, caller)
                    self.changed.notify_all()
        reason = self.ended
        if reason is None:
            return
        self._recorder.settle()
        try:
            yield reason, self._waiting.error
        finally:
            with self.changed:
                self._told.add(caller.child)
                self.changed.notify_all()

    def want_backup(self, caller: Caller, held: Held, workers: int) -> Iterator[bytes]:
        """The messages of another child's newest backup; see `Handover.want`.

        Raises:
            ProtocolError: the child is not in this run.
            PeerError: nobody has a backup, or it broke off.
        """
        with self.changed:
            self._joined(caller)
        yield from self.handover.fetch(caller, held, workers)

    def _next_request(
        self, caller: Caller, child: Child, tick_s: float | None
    ) -> Request | Tick | Notice | None:
        """What a child is asked for or told next; None: it is gone, or the run has ended."""
        handover = self.handover
        with self.changed:
            is_due = self.changed.wait_for(
                lambda: (
                    self.ended is not None
                    or child.has_left
                    or caller.is_gone
                    or self._has_notice(caller)
                    or handover.has_request(caller.child)
                ),
                tick_s,
            )
            if not is_due:
                return Tick()
            is_on = self.ended is None and not child.has_left and not caller.is_gone
            if not is_on:
                return None
            if self._has_notice(caller):
                return self._away.next_notice(caller.child)
            return handover.next_request(caller.child)

    def _has_notice(self, caller: Caller) -> bool:
        """Whether a `Watch` has a notice to give: of several the newest one alone."""
        is_newest = self._presence.is_newest(caller.child, caller)
        return is_newest and self._away.has_notice(caller.child)

    def _note_backup(self, caller: Caller | None, number: int) -> None:
        """A message of a backup has gone to `caller`, or to the server above."""
        if caller is None:
            self.moves.note()
            return
        with self.changed:
            child, store = self._members.children[caller.child], self.store
            newest = store.of(caller.child).round if store is not None else 0
            self.moves.done_again(caller.child, BACKUP, child.num_returns, number, newest)

    def _capture(self) -> Iterator[Entry]:
        failures = self._waiting.failures().items()
        return itertools.chain(
            self._state.capture(),
            [(Kind.FAILED, {"child": child, "text": text}, b"") for child, text in failures],
            self._closing.capture() if self._closing is not None else (),
        )

    def _note_end(self) -> None:
        self._presence.stop()
        if self._closing is not None:
            self._closing.stop()
        self._recorder.add(Kind.ENDED, reason=self.ended)

    def _member(self, caller: Caller) -> Child:
        self._waiting.check(caller)
        child = self._members.known(caller)
        # A call that was on its way when its process left, as a `Watch`, brings nobody back.
        if child.has_left or caller.process == self._parted.get(caller.child):
            raise ProtocolError(f"Site `{self._site(caller.child)}` has left this run.")
        return child

    def _joined(self, caller: Caller) -> Child:
        child = self._member(caller)
        self._waiting.note_call(caller.child)
        self._find(caller.child)
        return child

    def _find(self, child: int) -> None:
        """A child that was lost, or whose process had ended, calls again."""
        self._away.look(child)
        if self._closing is not None and self._members.children[child].is_lost:
            self._closing.find(child)
        if self._closing is not None and child in self._told:
            self._told.discard(child)
            self._presence.expect([child])


def _tell_nobody(event: str, **fields: object) -> None:
    """Where events of a session without a server go."""
