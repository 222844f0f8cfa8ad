# SPDX-License-Identifier: Apache-2.0
"""When rounds and gathers of one run are closed, where that may be without some children.

    all that are there have come                     closed at once
    the quorum has come, and the deadline is over    closed without the others
    the quorum has not come                          open
    too few of the quorum have a row                 open, while others may bring theirs

The last line is of robust rules. Who stands for nothing has no row, so that one that says so, and
lies, would otherwise leave the rule too few in a round that closes with its quorum.

Waiting for all remains: joining, the model, the first weights, the first round, and gathers before
the end of that. So every child has begun when the first one may be left out.

A child that is lost, or has left with an error, is no longer waited for; it may come back. Fewer
than the quorum may be there for a time (`below`); then the run ends.

What is decided here is told to the store and to the recorder. When it is decided depends on
clocks, so a server that is restored does not decide again what was recorded. What adaptive
deadlines have learnt of arrivals is recorded, too.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tf_hips import log
from tf_hips.log import Tell
from tf_hips.ps.rounds.store import Job, Store
from tf_hips.ps.session.below import Below
from tf_hips.ps.session.members import Members
from tf_hips.ps.session.state import State
from tf_hips.ps.terms.quorum import DROP, NEXT, RETURN_S, Arrivals, Clock, Quorum
from tf_hips.ps.terms.recorder import Entry, Kind

# Closed rounds of which it is remembered when that was, to say how late an update is.
_REMEMBERED = 1024


@dataclasses.dataclass
class _Open:
    """A round or gather that is open.

    Attributes:
        number: which.
        opened: when, by the clock.
        more_s: by how much its deadline is longer.
        came: children that have come, with their seconds since then.
        cancel: ends the timer that looks at it at its deadline; None: there is none.
    """

    number: int
    opened: float
    more_s: float = 0.0
    came: dict[int, float] = dataclasses.field(default_factory=dict)
    cancel: Callable[[], None] | None = None

    def stop(self) -> None:
        """It need not be looked at again."""
        if self.cancel is not None:
            self.cancel()
            self.cancel = None


@dataclasses.dataclass(frozen=True)
class _Closed:
    """A round that is closed: when it was opened and closed, and by whose updates."""

    opened: float
    time: float
    counted: frozenset[int]


class Closing:
    """Closes the rounds and gathers of one session. The session's lock guards it."""

    def __init__(
        self,
        quorum: Quorum,
        state: State,
        clock: Clock,
        end: Callable[[str], None],
        is_over: Callable[[], bool],
        tell: Tell,
    ) -> None:
        """Nothing is open.

        Args:
            quorum: what the server was told.
            state: of the run.
            clock: tells when deadlines are over.
            end: ends the run for a reason; called with the lock held.
            is_over: whether the run has ended.
            tell: writes an event: its name, and fields.
        """
        self.quorum = quorum
        self._state = state
        self._members: Members = state.members
        self._changed = state.changed
        self._clock = clock
        self._end = end
        self._is_over = is_over
        self._tell = tell
        self._arrivals = Arrivals(len(self._members.terms.parties))
        self._round: _Open | None = None
        self._gather: _Open | None = None
        self._more_s = 0.0
        self._closed: dict[int, _Closed] = {}
        self._heard: set[tuple[int, int]] = set()  # late children, and the rounds
        self._reached: dict[int, int] = {}
        self._num_late = [0] * len(self._members.terms.parties)
        self._num_absent = [0] * len(self._members.terms.parties)
        self._below = Below(quorum, self._members, self._changed, clock, end, is_over, tell)

    @property
    def is_below(self) -> bool:
        """Whether the run has ended for want of children."""
        return self._below.has_ended

    @property
    def has_begun(self) -> bool:
        """Whether the first round is over, and nobody is needed by name any more."""
        store = self._store
        return store is not None and (
            store.round > store.first_round or store.is_closed(store.first_round)
        )

    @property
    def deadline_s(self) -> float | None:
        """Seconds after the opening of a round at which the quorum is enough; None: none yet."""
        if self.quorum.deadline_s is not None:
            return self.quorum.deadline_s
        return self._arrivals.deadline_s(self.quorum.mads)

    def needed(self, missing: Collection[int]) -> list[int]:
        """Those of `missing` without whom what waits for them is not there at some time."""
        if not self.has_begun:
            return sorted(missing)
        left = [one for one in self._members.children.values() if one.has_left]
        if len(self._members.children) - len(left) < self.quorum.least:
            return sorted(missing)  # too few are to come
        return sorted(self._members.living & set(missing))

    def begins(self, child: int, number: int) -> None:
        """A call of `child` for round `number` has come."""
        self._reached[child] = max(number, self._reached.get(child, number))

    def look(self) -> None:
        """Closes what is due; the lock must be free, for sums are made here."""
        with self._changed:
            self._look_at_gather()
            jobs = self._look_at_round()
            self._below.look()
        store = self._store
        if jobs and store is not None:
            store.merge(jobs)

    def look_soon(self) -> None:
        """`look`, by another thread: for those who hold the lock."""
        self._clock.after(0.0, self.look)

    def look_at_gather(self) -> None:
        """Closes a gather that is due, with the lock held."""
        self._look_at_gather()

    def resume(self) -> None:
        """The session is restored, with the lock held; nothing is decided before a call comes."""
        self._more_s = RETURN_S if self._is_adaptive else 0.0
        self._below.look()

    def capture(self) -> list[Entry]:
        """What `restore` takes, for a snapshot; nothing of it is recorded again."""
        self._arrivals.news()
        kept = {"seconds": self._arrivals.kept()}
        return [(Kind.ARRIVED, kept, b"")] if self._is_adaptive else []

    def restore(self, seconds: Iterable[float]) -> None:
        """Takes arrivals that were recorded."""
        self._arrivals.restore(seconds)

    def stop(self) -> None:
        """The run has ended."""
        for one in (self._round, self._gather):
            if one is not None:
                one.stop()
        self._below.stop()

    def lose(self, child: int, reason: str) -> bool:
        """Lets others go on without `child`; whether they can."""
        one = self._members.children.get(child)
        if not self.has_begun or one is None or one.has_left:
            return False
        if not one.is_lost:
            self._below.why_lost[child] = reason
            self._state.note_lost(child, is_lost=True)
            self._tell("lost", child=child, child_site=self._site(child), reason=reason)
            log.warning("Others go on without site %s. %s", self._site(child), reason)
            self.look_soon()
        return True

    def ended_elsewhere(self, reason: str) -> None:
        """The run has ended at another server of it."""
        self._below.ended_elsewhere(reason)
        self._end(reason)

    def find(self, child: int) -> None:
        """A child that was lost is there again."""
        self._below.why_lost.pop(child, None)
        self._state.note_lost(child, is_lost=False)
        self._tell("found", child=child, child_site=self._site(child))
        log.info("Site %s is there again", self._site(child))
        self._below.without_row = []  # it is awaited, and may have a row
        self._below.look()

    def answered(self, child: int, number: int) -> None:
        """A child gets results of a round; says so where its update came too late for it."""
        closed = self._closed.get(number)
        if closed is None or child in closed.counted or (child, number) in self._heard:
            return
        self._heard.add((child, number))
        self._num_late[child] += 1
        late_s = self._clock.now() - closed.time
        if number >= max(self._closed) - 1:
            # One that does older rounds has begun them late, which says nothing of a round.
            self._arrivals.note(self._clock.now() - closed.opened)
        partial = self._store.partial if self._store is not None else None
        was_dropped = partial is not None and partial.was_dropped(number, child)
        is_kept = self.quorum.late == NEXT and not was_dropped
        self._tell(
            "late",
            round=number,
            child=child,
            child_site=self._site(child),
            late_s=round(late_s, 6),
            goes=NEXT if is_kept else DROP,
        )
        is_first = (child, number - 1) not in self._heard  # one line for a row of them
        (log.warning if is_first else log.debug)(
            "The update of site %s for round %d came %.3f s after the round was closed, and %s",
            self._site(child),
            number,
            late_s,
            "goes into the next one" if is_kept else "is dropped",
        )

    def describe(self) -> dict[str, Any]:
        """What there is to tell: of the server, and by child."""
        return {
            "least": self.quorum.least,
            "deadline_s": self.deadline_s,
            "late": self._num_late.copy(),
            "absent": self._num_absent.copy(),
            "reached": dict(self._reached),
        }

    @property
    def _is_adaptive(self) -> bool:
        return self.quorum.deadline_s is None

    @property
    def _store(self) -> Store | None:
        store = self._state.store
        return store if isinstance(store, Store) else None

    def _site(self, child: int) -> str:
        return self._members.site(child)

    def _sites(self, children: Iterable[int]) -> list[str]:
        return [self._site(child) for child in sorted(children)]

    def _is_due(self, one: _Open, came: Collection[int], *, is_short: bool = False) -> bool:
        """Whether those that have come are enough now; else a timer looks again, if that helps.

        Args:
            one: what is open.
            came: who has come.
            is_short: whether too few of these have a row.
        """
        if not self.has_begun:
            return len(came) == len(self._members.terms.parties)
        if len(came) < self.quorum.least:
            return False
        missing = self._members.living - set(came)
        if is_short and (missing or self._members.lost):  # who is lost may come back
            return False
        if not missing:
            return True
        deadline_s = self.deadline_s
        if deadline_s is None:
            return False
        left_s = one.opened + deadline_s + one.more_s - self._clock.now()
        if left_s <= 0:
            return True
        if one.cancel is None:
            one.cancel = self._clock.after(left_s, lambda: self._look_again(one))
        return False

    def _look_again(self, one: _Open) -> None:
        with self._changed:
            one.cancel = None
        self.look()

    def _look_at_round(self) -> list[Job]:
        store = self._store
        if store is None or self._is_over():
            return []
        number = store.round
        if store.is_closed(number):
            return []
        if self._round is None or self._round.number != number:
            # Of a server that was restored: when these came is not known.
            before = dict.fromkeys(store.whole(number), 0.0)
            self._round = _Open(number, self._clock.now(), self._more_s, before)
            if store.partial is not None:
                store.partial.forget_before(store.oldest)
        one = self._round
        came = store.whole(number)
        self._note(one, came)
        is_first = number == store.first_round
        without_row = store.without_row(number, came, self.quorum.least)
        is_due = self._is_due(one, came, is_short=bool(without_row))
        waits_for_lost = not is_due and self._members.living <= set(came)
        self._below.without_row = without_row if waits_for_lost else []
        if not is_due:
            return []
        one.stop()
        self._more_s = 0.0
        late = store.partial.pending if store.partial is not None else []
        jobs = store.close(number, came, late)
        news = self._arrivals.news()
        if self._is_adaptive and news:
            self._state.recorder.add(Kind.ARRIVED, seconds=news)
        absent = set(range(len(self._members.terms.parties))) - set(came)
        for child in absent:
            self._num_absent[child] += 1
        now = self._clock.now()
        self._closed[number] = _Closed(one.opened, now, frozenset(came))
        forgotten = self._closed.pop(number - _REMEMBERED, None)
        if forgotten is not None:
            self._heard = {pair for pair in self._heard if pair[1] in self._closed}
        self._tell(
            "closed",
            round=number,
            sites=self._sites(came),
            absent=self._sites(absent),
            late=[[self._site(child), number] for child, number in late],
            seconds=round(now - one.opened, 6),
            deadline_s=None if is_first else self.deadline_s,
        )
        self._changed.notify_all()
        return jobs

    def _look_at_gather(self) -> None:
        gathers = self._state.gathers
        number = gathers.newest
        came = gathers.came(number)
        if not came or gathers.is_closed(number) or self._is_over():
            return
        if self._gather is None or self._gather.number != number:
            self._gather = _Open(number, self._clock.now(), self._more_s)
        if not self._is_due(self._gather, came):
            return
        self._gather.stop()
        if len(came) < len(self._members.terms.parties):
            gathers.close(number, came)
            self._state.recorder.add(Kind.GATHER_CLOSED, number=number, children=came)
            absent = set(range(len(self._members.terms.parties))) - set(came)
            self._tell(
                "gather_closed",
                number=number,
                sites=self._sites(came),
                absent=self._sites(absent),
            )
        self._changed.notify_all()

    def _note(self, one: _Open, came: Iterable[int]) -> None:
        """Notes when updates were complete."""
        for child in came:
            if child not in one.came:
                one.came[child] = self._clock.now() - one.opened
                self._arrivals.note(one.came[child])
