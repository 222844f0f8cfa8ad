# SPDX-License-Identifier: Apache-2.0
"""Backups that go from a site that has one to a site that has lost its own.

    site without a backup    asks its server (`WantBackup`), and gets a parcel
    server                   asks another child over its `Watch` call; passes on what comes
    child that is asked      sends its newest backup (`GiveBackup`), while it trains or waits

Nothing is kept here: the server holds a few messages, and the slower of both sides sets the pace.
A server with a server above asks there when none of its own children can give; one that is asked
from above asks its children. So a parcel finds its way through a tree.

Nothing can check what a site hands over: it has optimizer, statistics and positions in it beside
the weights. So below a robust rule only the first party of the run may give, whose first weights
all have taken: who trusts it need not trust another one.

What the two sites must have in common is told by the backup itself, where it is taken up.
"""

import collections
import dataclasses
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

from tf_hips import log
from tf_hips.errors import PeerError, ProtocolError
from tf_hips.ps.session.members import Caller, Members
from tf_hips.ps.session.presence import Presence
from tf_hips.ps.transport import wire
from tf_hips.ps.transport.news import Request
from tf_hips.ps.transport.parcel import Held

# Messages of at most 1 MiB that wait for the receiver.
_DEPTH = 4
# Of each child; more are of who asks without end.
_MOST_EXPIRED = 64
# For a child to open its files and read them once, for their digests; for a message to be taken.
_ANSWER_S = 120.0
# Open at once of what one child gives: each is a call of its own, of which it may have so many
# (`calls_at_once`), and it needs some for its rounds.
_MOST_PIPES = 4

_Asks = tuple[int | None, int]
# Who asks, None being the server above, and who is asked.

FetchAbove = Callable[[Held, int], Iterator[bytes]]


class _Pipe:
    """What one child sends to one that receives."""

    def __init__(self, request: Request, asks: _Asks, changed: threading.Condition) -> None:
        self.request = request
        self.asks = asks
        self.child = asks[1]
        self._changed = changed
        self._messages: collections.deque[bytes] = collections.deque()
        self.is_done = False
        self._is_closed = False
        self.error: str | None = None

    def put(self, message: bytes, patience_s: float, is_lost: Callable[[], bool]) -> None:
        """Hands a message on, when there is room.

        Raises:
            PeerError: nobody takes it any more, or none was taken in time.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._is_closed or is_lost() or len(self._messages) < _DEPTH, patience_s
            )
            if self._is_closed or is_lost():
                raise PeerError("The site that asked for a backup takes no more of it.")
            if not in_time:
                raise PeerError(
                    f"The site that asked for a backup has taken nothing for {patience_s:.0f} s."
                )
            self._messages.append(message)
            self._changed.notify_all()

    def get(
        self,
        patience_s: float,
        is_lost: Callable[[], bool],
        is_there: Callable[[], bool] = lambda: True,
    ) -> bytes | None:
        """The next message; None: that was all.

        Raises:
            PeerError: none came in time, the sender gave up or is not `is_there`, or `is_lost`.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: bool(self._messages) or self.is_done or is_lost() or not is_there(),
                patience_s,
            )
            if self._messages and not is_lost():
                message = self._messages.popleft()
                self._changed.notify_all()
                return message
            if self.error is not None:
                raise PeerError(self.error)
            if not (self.is_done or is_lost() or is_there()):
                raise PeerError("it has gone before it sent any")
            if is_lost() or not in_time:
                why = "the run has ended" if in_time else f"nothing came for {patience_s:.0f} s"
                raise PeerError(f"The backup is not whole: {why}.")
            return None

    def finish(self, error: str | None = None) -> None:
        with self._changed:
            self.is_done = True
            self.error = error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class _Wish:
    """A request that has no answer yet, and when it was made (`time.monotonic`)."""

    request: Request
    since: float = dataclasses.field(default_factory=time.monotonic)


class Handover:
    """What one session does for sites that have lost their backups. Thread-safe."""

    def __init__(
        self,
        changed: threading.Condition,
        members: Members,
        presence: Presence,
        is_over: Callable[[], bool],
        note_moved: Callable[[Caller | None, int], object],
    ) -> None:
        """Nobody has asked.

        Args:
            changed: guards the session.
            members: of the run.
            presence: who is there.
            is_over: whether the run has ended.
            note_moved: called when a message has moved, for which others wait: to whom (None: the
                server above), and its number in this backup.
        """
        self._changed = changed
        self._members = members
        self._presence = presence
        self._is_over = is_over
        self._note_moved = note_moved
        self._asked: dict[int, collections.deque[Request]] = {}
        # Of who asks and who is asked: what has no answer yet, whoever waits for it.
        self._unanswered: dict[_Asks, _Wish] = {}
        # Tickets of each child that nobody waits for any more, and that it may still answer.
        self._expired: dict[int, collections.deque[str]] = {}
        self._pipes: dict[str, _Pipe] = {}
        self._given: list[_Pipe] = []  # that a call is there for, whether somebody takes it or not
        self.fetch_above: FetchAbove | None = None
        """Fetches from the server above, where there is one."""

    def has_request(self, child: int) -> bool:
        """Whether `next_request` has one for `child`; the session's lock is held."""
        return bool(self._asked.get(child))

    def next_request(self, child: int) -> Request:
        """What `child` is to be told; the session's lock is held."""
        return self._asked[child].popleft()

    def watches_anew(self, child: int) -> None:
        """What `child` was told over an earlier call may not have reached it; the lock is held."""
        queued = self._asked.get(child, ())
        for asks, wish in list(self._unanswered.items()):
            if asks[1] == child and wish.request not in queued:
                self._expire(asks)

    def fetch(self, caller: Caller | None, held: Held, workers: int) -> Iterator[bytes]:
        """The messages of another site's newest backup.

        Args:
            caller: the child that asks; None: the server above, which looks elsewhere itself.
            held: what the receiver has.
            workers: those of the site that receives; one of another size has other files.

        Raises:
            PeerError: nobody has one, or it broke off.
        """
        told = []
        for child in self._candidates(caller, workers):
            pipe: _Pipe | None = None
            try:
                try:
                    pipe = self._ask(caller, child, held, workers)
                    first = pipe.get(_ANSWER_S, self._is_lost(caller), self._is_there(child))
                except PeerError as error:
                    if self._is_lost(caller)():
                        raise  # nobody takes what another one would open
                    told.append(f"`{self._members.site(child)}`: {error}")
                    continue
                site = self._members.site(child)
                log.info("The newest backup of site %s goes to one that has lost its own", site)
                yield from self._pass_on(pipe, first, caller)
                return
            finally:
                if pipe is not None:
                    self._forget(pipe)
        if caller is not None and self.fetch_above is not None:
            for number, message in enumerate(self.fetch_above(held, workers)):
                self._note_moved(caller, number)
                yield message
            return
        reasons = "; ".join(told) if told else "no other site of this size is there"
        raise PeerError(f"No other site has given a backup: {reasons}{self._advice()}")

    def give(self, caller: Caller, messages: Iterable[bytes]) -> None:
        """Takes what a child sends that was asked.

        Raises:
            ProtocolError: nobody has asked it.
            PeerError: the receiver is gone, perhaps before it began, or takes nothing.
        """
        stream = iter(messages)
        fields = wire.from_json(next(stream, b""), ticket=str, error=(str, type(None)))
        with self._changed:
            pipe = self._pipes.get(fields["ticket"])
            was_asked = self._note_answer(caller.child, fields["ticket"])
            if pipe is None or pipe.child != caller.child:
                if was_asked:  # it is not to blame
                    raise PeerError("The site that asked for a backup takes no more of it.")
                raise ProtocolError("A backup must be asked for before it is sent.")
            self._given.append(pipe)
        error: str | None = "the site that sent it was cut off"
        try:
            if fields["error"] is not None:
                error = fields["error"][:1000]
                return
            patience_s = min(_ANSWER_S, caller.patience_s)
            for message in stream:
                pipe.put(message, patience_s, lambda: caller.is_gone or self._is_over())
            error = None
        except PeerError as problem:
            error = str(problem)
            raise
        finally:
            pipe.finish(error)
            with self._changed:
                self._given.remove(pipe)
                self._changed.notify_all()

    def _pass_on(self, pipe: _Pipe, first: bytes | None, caller: Caller | None) -> Iterator[bytes]:
        message, number = first, 0
        patience_s = caller.patience_s if caller is not None else _ANSWER_S
        while message is not None:
            yield message
            self._note_moved(caller, number)
            number += 1
            message = pipe.get(patience_s, self._is_lost(caller))

    def _candidates(self, caller: Caller | None, workers: int) -> list[int]:
        """Children to ask, the one with the newest backup first."""
        with self._changed:
            children = self._members.children
            return sorted(
                (
                    child
                    for child, known in children.items()
                    if (caller is None or child != caller.child)
                    and self._may_give(child)
                    and not known.has_left
                    and self._presence.is_there(child)
                    and (
                        # A party's server asks its own children, whatever it has said.
                        not self._members.is_leaf(child)
                        or (known.workers == workers and known.backup is not None)
                    )
                ),
                key=lambda child: children[child].backup or (0, 0),
                reverse=True,
            )

    def _may_give(self, child: int) -> bool:
        """Whether `child` is believed, or the first leaf of the whole tree, or its server."""
        if self._members.doubting_rule is None:
            return True
        place = self._members.place
        return child == 0 and (place is None or place.first == 0)

    def _advice(self) -> str:
        with self._changed:
            rule, place = self._members.doubting_rule, self._members.place
        if rule is None:
            return ""
        first = self._members.terms.parties[0] if place is None else place.leaves[0][0]
        return (
            f". Below the robust rule {rule} only the first party, `{first}`, may give one: "
            "nothing can check what another one hands over. Bring it back, put this site's own "
            "backup in its place, or begin all sites anew under another `--run`"
        )

    def _note_answer(self, child: int, ticket: str) -> bool:
        """Whether `child` was asked so and has not answered before; the session's lock is held."""
        for asks, wish in self._unanswered.items():
            if asks[1] == child and wish.request.ticket == ticket:
                del self._unanswered[asks]
                self._changed.notify_all()
                return True
        expired = self._expired.get(child, ())
        if ticket not in expired:
            return False
        self._expired[child].remove(ticket)
        return True

    def _expire(self, asks: _Asks) -> None:
        """Waits for an answer no more; the session's lock is held."""
        wish = self._unanswered.pop(asks, None)
        if wish is not None:
            expired = self._expired.setdefault(asks[1], collections.deque(maxlen=_MOST_EXPIRED))
            expired.append(wish.request.ticket)
            self._changed.notify_all()

    def _ask(self, caller: Caller | None, child: int, held: Held, workers: int) -> _Pipe:
        """Asks `child`, when it gives no more than it can; of a caller it is asked one at a time.

        An answer takes reading a whole backup, at the site that trains: who hangs up and asks
        again, as after a connection that broke, gets the answer to what was asked before, or waits
        for that. The server above sees to it for those who ask there.

        Raises:
            PeerError: the caller is gone, or `child` is busy for too long.
        """
        is_lost, is_there = self._is_lost(caller), self._is_there(child)
        asks = (None if caller is None else caller.child, child)

        def adopted() -> Request | None:
            """The same wish, for whose answer nobody waits any more."""
            wish = self._unanswered.get(asks)
            if wish is None or wish.request.ticket in self._pipes:
                return None
            request = wish.request
            return request if (request.held, request.workers) == (held, workers) else None

        def is_free() -> bool:
            has_answered = asks not in self._unanswered or adopted() is not None
            return has_answered and self._has_room(asks)

        with self._changed:
            patience_s = min(_ANSWER_S, caller.patience_s) if caller is not None else _ANSWER_S
            wish = self._unanswered.get(asks)
            late_s = _ANSWER_S if wish is None else wish.since + _ANSWER_S - time.monotonic()
            self._changed.wait_for(
                lambda: is_free() or is_lost() or not is_there(), min(patience_s, late_s)
            )
            if is_lost():
                raise PeerError("The site that asked for a backup is there no more.")
            if not self._has_room(asks):
                raise PeerError("it gives as many backups as it can at once")
            request = adopted()
            if request is None:
                wish = self._unanswered.get(asks)
                if wish is not None and time.monotonic() < wish.since + _ANSWER_S:
                    raise PeerError("it has not answered yet what it was asked before")
                self._expire(asks)
                request = Request(uuid.uuid4().hex, held, workers)
                if caller is not None:
                    self._unanswered[asks] = _Wish(request)
                self._asked.setdefault(child, collections.deque()).append(request)
            pipe = self._pipes[request.ticket] = _Pipe(request, asks, self._changed)
            self._changed.notify_all()
        return pipe

    def _has_room(self, asks: _Asks) -> bool:
        """Whether one more may be given so; the session's lock is held."""
        asker, child = asks
        waiting = {one for one in self._pipes.values() if not one.is_done}
        pipes = [one for one in waiting.union(self._given) if one.child == child]
        if asker is not None:  # a server asks for each of its leaves
            leaves = max(1, len(self._members.children[asker].leaves))
            if sum(one.asks == asks for one in pipes) >= leaves:
                return False
        return len(pipes) < _MOST_PIPES

    def _forget(self, pipe: _Pipe) -> None:
        pipe.close()
        with self._changed:
            self._pipes.pop(pipe.request.ticket, None)
            asked = self._asked.get(pipe.child)
            if asked is not None and pipe.request in asked:
                asked.remove(pipe.request)  # it was not told, and answers nothing
                self._note_answer(pipe.child, pipe.request.ticket)
            self._changed.notify_all()

    def _is_there(self, child: int) -> Callable[[], bool]:
        return lambda: self._presence.is_there(child)

    def _is_lost(self, caller: Caller | None) -> Callable[[], bool]:
        return lambda: self._is_over() or (caller is not None and caller.is_gone)
